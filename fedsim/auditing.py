# SPDX-License-Identifier: Apache-2.0
"""Play the audits of a scenario, and write down what they found: RUN/audit.json.

An audit by canaries, or a game, trains models of its own: the transcript of a run has no canaries in it. So what is
audited is the scenario of a run, by the code that ran it, and not the luck of that run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedsim
from fedsim.errors import AuditError, RunError
from fedsim.federation.checksums import note_files
from fedsim.federation.client import local_work
from fedsim.federation.folder import write_durably
from fedsim.federation.plan import Plan
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

FILE = "audit.json"


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


def audit_run(run: Run, scenario: Scenario | None = None, *, progress: Progress | None = None) -> Path:
    """Play audits on the scenario of a run, and write the results to its folder; those of an earlier time are replaced.

    The audits are those of `scenario`, by default the run's own; where there are none, those that fit its claim.
    """
    scenario = scenario or run.scenario
    return write_audits(run.path, scenario.name, audit_scenario(scenario, run=run, progress=progress))


def write_audits(folder: Path, name: str, audits: Sequence[Mapping[str, Any]]) -> Path:
    """Write what audits found to a folder, whole or not at all."""
    path = folder / FILE
    if path.exists() and not path.is_file():
        raise RunError(f"{path} is in the way: results are written to a file of that name; move it away")
    document = {"fedsim": fedsim.__version__, "scenario": name, "audits": list(audits)}
    write_durably(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    note_files(folder, [path])
    return path


def read_audits(folder: Path) -> list[dict[str, Any]]:
    """The results in a run's folder; none where it was not audited."""
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        audits: list[dict[str, Any]] = json.loads(path.read_text())["audits"]
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path} is damaged: it is not the result of an audit; remove it and audit again") from error
    return audits


def audit_scenario(
    scenario: Scenario, *, run: Run | None = None, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Play the audits of a scenario; for each its settings, a sentence, the verdict, and the numbers behind it.

    `run` is for those that look at a transcript.
    """
    sections = scenario.audit or fitting_audits(scenario)
    results = []
    for number, section in enumerate(sections, start=1):
        name = section.game if isinstance(section, GameAudit) else section.kind

        def show(done: int, total: int, name: str = name, number: int = number) -> None:
            if progress is not None:
                progress(AuditReport(name, number, len(sections), done, total))

        result = _play(scenario, section, show, run)
        results.append({"kind": section.kind, "settings": section.model_dump(mode="json"), **result})
        if progress is not None:
            progress(AuditReport(name, number, len(sections), 1, 1, result["sentence"]))
    return results


def check_audits(planned: Plan, audits: Sequence[AuditSection]) -> None:
    """An AuditError for what cannot be audited in a scenario, before it is run."""
    from fedsim.audit.evidence.clients import client_canaries
    from fedsim.audit.evidence.federated import audited_claim, audited_clients, example_canaries

    for section in audits:
        try:
            if isinstance(section, ExampleCanaries):
                example_canaries(planned, section.canaries)
            elif isinstance(section, ClientCanaries):
                client_canaries(planned, section.canaries)
            elif isinstance(section, TranscriptAudit):
                work = local_work(planned.scenario, planned.noise.example or 0.0)
                audited_clients(planned, audited_claim(planned, "example"), work)
        except AuditError as error:
            raise AuditError(f"audit {section.kind}: {error}") from error


def fitting_audits(scenario: Scenario) -> Sequence[AuditSection]:
    """What a scenario without audits of its own is audited by: canaries where they can be, else a game."""
    defence, found = scenario.defence, []
    one_step = scenario.strategy.name == "fedsgd" or scenario.client.steps == 1
    if defence.example_dp is not None and defence.example_dp.batches == "poisson" and one_step:
        found.append(ExampleCanaries(kind="example-canaries"))
    fixed = defence.client_dp is not None and defence.client_dp.adaptive is None
    if fixed and defence.client_dp is not None and defence.client_dp.noise == "gaussian":
        return (*found, ClientCanaries(kind="client-canaries"))
    return found or (GameAudit(kind="game", game="RC-Targ" if scenario.is_text else "MI"),)


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
