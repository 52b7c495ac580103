# SPDX-License-Identifier: Apache-2.0
"""Play the audits of a scenario, and write down what they found: RUN/audits/001-NAME.json.

An audit by canaries, or a game, trains models of its own: the transcript of a run has no canaries in it. So what is
audited is the scenario of a run, by the code that ran it, and not the luck of that run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.audit.results import check_room, write_audit
from fedsim.errors import AuditError
from fedsim.federation.client import local_work
from fedsim.federation.plan import Plan, plan
from fedsim.federation.run import Run
from fedsim.privacy.rounding import rounded_down, rounded_up
from fedsim.scenario import (
    AuditSection,
    ClientCanaries,
    ExampleCanaries,
    GameAudit,
    OneRunSum,
    Scenario,
    TranscriptAudit,
)

_LANGUAGE_GAMES: Sequence[AuditSection] = (GameAudit(kind="game", game="RC-Targ"),)
_GAMES: Sequence[AuditSection] = (GameAudit(kind="game", game="MI"), GameAudit(kind="game", game="DPD"))
"""What an ordinary adversary sees of an ordinary row, and all that there is to be seen of the worst one."""


@dataclass(frozen=True)
class AuditReport:
    """One audit, as it goes on; with a sentence once it is done."""

    audit: str
    number: int
    of: int
    done: int = 0
    total: int = 0
    sentence: str = ""


Progress = Callable[[AuditReport], None]


def audit_run(run: Run, scenario: Scenario | None = None, *, progress: Progress | None = None) -> list[Path]:
    """Play audits on the scenario of a run, and write the results to its folder, beside those of other audits.

    The audits are those of `scenario`, by default the run's own; where there are none, those that fit its claim. The
    files are in the order of the audits.
    """
    scenario = scenario or run.scenario
    check_room(run.path)
    results = audits_of(scenario, run=run, progress=progress)
    return [write_audit(run.path, scenario.name, name, result) for name, result in results]


def audit_scenario(
    scenario: Scenario, *, run: Run | None = None, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Play the audits of a scenario; for each its settings, a sentence, the verdict, and the numbers behind it.

    `run` is for those that look at a transcript.
    """
    return [result for _, result in audits_of(scenario, run=run, progress=progress)]


def audits_of(
    scenario: Scenario, *, run: Run | None = None, progress: Progress | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the result of each audit, as soon as it is done."""
    sections = scenario.audit or fitting_audits(scenario)
    for number, section in enumerate(sections, start=1):
        name = section.game if isinstance(section, GameAudit) else section.kind

        def show(done: int, total: int, name: str = name, number: int = number) -> None:
            if progress is not None:
                progress(AuditReport(name, number, len(sections), done, total))

        result = _play(scenario, section, show, run)
        yield name, {"kind": section.kind, "settings": section.model_dump(mode="json"), **result}
        if progress is not None:
            progress(AuditReport(name, number, len(sections), 1, 1, result["sentence"]))


def check_audits(planned: Plan, audits: Sequence[AuditSection]) -> None:
    """An AuditError for what cannot be audited in a scenario, before it is run."""
    from fedsim.audit.evidence.clients import client_canaries
    from fedsim.audit.evidence.federated import audited_claim, audited_clients, example_canaries
    from fedsim.audit.playing.arena import Arena

    for section in audits:
        try:
            if isinstance(section, ExampleCanaries):
                example_canaries(planned, section.canaries)
            elif isinstance(section, ClientCanaries):
                client_canaries(planned, section.canaries)
            elif isinstance(section, TranscriptAudit):
                work = local_work(planned.scenario, planned.noise.example or 0.0)
                audited_clients(planned, audited_claim(planned, "example"), work)
            elif isinstance(section, GameAudit):
                Arena.of(planned.scenario, 0).check(section.game)
        except AuditError as error:
            name = section.game if isinstance(section, GameAudit) else section.kind
            raise AuditError(f"audit {name}: {error}") from error


def fitting_audits(scenario: Scenario) -> Sequence[AuditSection]:
    """What a scenario without audits of its own is audited by: canaries where there can be, else games."""
    canaries: list[AuditSection] = [ExampleCanaries(kind="example-canaries"), ClientCanaries(kind="client-canaries")]
    games = _LANGUAGE_GAMES if scenario.is_text else _GAMES
    planned = plan(scenario)
    return [one for one in canaries if _fits(planned, one)] or [one for one in games if _fits(planned, one)] or games


def _fits(planned: Plan, section: AuditSection) -> bool:
    try:
        check_audits(planned, [section])
    except AuditError:
        return False
    return True


def _play(
    scenario: Scenario, section: AuditSection, show: Callable[[int, int], None], run: Run | None
) -> dict[str, Any]:
    from fedsim.audit.evidence.federated import audit_seed, example_evidence

    seed = audit_seed(scenario) if section.seed is None else section.seed
    match section:
        case ExampleCanaries():
            from fedsim.audit.federation import judge

            evidence = example_evidence(scenario, canaries=section.canaries, seed=seed, progress=show)
            return judge(evidence, section.confidence, section.guess_share).to_dict()
        case ClientCanaries():
            from fedsim.audit.evidence.clients import client_evidence
            from fedsim.audit.federation import judge

            evidence = client_evidence(scenario, canaries=section.canaries, seed=seed, progress=show)
            return judge(evidence, section.confidence, section.guess_share).to_dict()
        case TranscriptAudit():
            from fedsim.audit.evidence.transcript import transcript_evidence
            from fedsim.audit.federation import judge

            if run is None:
                raise AuditError("audit transcript looks at a run; run the scenario first, or use example-canaries")
            return judge(transcript_evidence(run, seed=seed, progress=show), section.confidence).to_dict()
        case GameAudit():
            from fedsim.audit.playing.trials import play_and_judge

            return play_and_judge(section.game, scenario, section.trials, seed, section.confidence, show).to_dict()
        case OneRunSum():
            return _one_run_sum(section, seed, show)
    raise AuditError(f"audit: {section.kind} is not known to this version; leave it out")


def _one_run_sum(section: OneRunSum, seed: int, show: Callable[[int, int], None]) -> dict[str, Any]:
    from fedsim.audit.one_run_sum import play_questions, summarise

    outcomes = play_questions(section.questions, repeats=section.repeats, delta=section.delta, seed=seed, progress=show)
    rows = summarise(outcomes)
    best = max(rows, key=lambda row: float(row["valid"]))
    sentence = (
        f"{len(outcomes)} audits of noisy sums: most is proved with {best['varied']} {best['value']:,g}, on average"
        f" ε ≥ {rounded_down(best['valid'], 2)} at δ = {section.delta:g} (add/remove one example), where ε is"
        f" {rounded_up(best['true_epsilon'], 2)} at this δ."
    )
    numbers = {"rows": rows, "outcomes": [outcome.to_dict() for outcome in outcomes]}
    return {"verdict": None, "sentence": sentence, "numbers": numbers}
