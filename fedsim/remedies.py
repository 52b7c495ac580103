# SPDX-License-Identifier: Apache-2.0
"""Commands that settle what an audit has left open, or that work where one was refused.

A command is offered only if what it asks for passes the checks that `fedsim check` makes.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fedsim.audit.evidence.federated import audited_claim, example_canaries
from fedsim.audit.playing.trials import trials_to_settle
from fedsim.audit.verdict import Claim
from fedsim.auditing import check_audits, fitting_audits
from fedsim.errors import FedsimError
from fedsim.federation.client import local_work
from fedsim.federation.cohorts import participations
from fedsim.federation.plan import plan
from fedsim.scenario import AuditSection, ClientCanaries, ExampleCanaries, GameAudit, Scenario
from fedsim.scenario_file import dump_scenario, parse_scenario

MOST_TRIALS = 200_000
_MEMORY = 2e9  # bytes of all final weights of a game
CANARIES = "example-canaries"
_SECTION: TypeAdapter[AuditSection] = TypeAdapter(AuditSection)


def settling(folder: Path, scenario: Scenario, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each audit of a run that is inconclusive the command that would settle it, if there is one."""
    found = []
    for result in results:
        verdict = result["verdict"]
        if verdict is not None and verdict["status"] == "inconclusive":
            section = _SECTION.validate_python(result["settings"])
            offered = (one for one in _stronger(scenario, section, result) if _works(scenario, *one))
            found += [_command(folder, *one) for one in islice(offered, 1)]
    return list(dict.fromkeys(found))


def instead(
    target: Path | str, scenario: Scenario, audits: Sequence[AuditSection], given: Sequence[str] = ()
) -> str | None:
    """A command in place of audits that were refused: the same audit of single steps, or the audits that fit.

    `target` is the folder of a run or the name of a scenario, `scenario` what it holds without those audits, and
    `given` the overrides of the command that was refused.
    """
    if any(section.kind in (CANARIES, "transcript") for section in audits):
        overrides = single_steps(scenario)
        if overrides and _works(scenario, overrides, CANARIES):
            return _command(target, [*given, *overrides], CANARIES)
    if audits and _works(scenario, [], ""):
        return _command(target, given, "")
    fewer = [f"partition.examples_per_client={max(1, len(plan(scenario).dataset.x_train) // 4)}"]
    return _command(target, [*given, *fewer], "") if _works(scenario, fewer, "") else None


def single_steps(scenario: Scenario) -> list[str]:
    """Overrides after which the server sees each step: as many rounds of one local step; the claim stays the same."""
    dp, client = scenario.defence.example_dp, scenario.client
    if dp is None or dp.batches != "poisson":
        return []
    try:
        planned = plan(scenario)
        claim = audited_claim(planned, "example")
    except FedsimError:
        return []
    work, size = local_work(scenario, planned.noise.example or 0.0), planned.partition.size
    for member, times in participations(planned.cohorts).items():
        steps = work.local_steps(size(member))
        if times * steps == claim.compositions and steps > 0:
            batch = "null" if client.batch_size is None else client.batch_size
            section = f"client={{batch_size: {batch}, steps: 1, learning_rate: {client.learning_rate:g}}}"
            return [section, f"rounds={scenario.rounds * steps}"]
    return []


Remedy = tuple[list[str], str]
"""Overrides of the scenario, and the audit to play."""


def _stronger(scenario: Scenario, section: AuditSection, result: Mapping[str, Any]) -> Iterator[Remedy]:
    """What may settle an audit, best first; not everything of it can be played."""
    needed = result["numbers"].get("needed")
    if isinstance(section, ExampleCanaries) and needed:
        clients = len(example_canaries(plan(scenario), section.canaries)[2])
        yield [], f"{{kind: {CANARIES}, canaries: {math.ceil(needed / clients)}}}"
    elif isinstance(section, ClientCanaries) and needed:
        yield [], f"{{kind: client-canaries, canaries: {needed}}}"
    else:
        yield [], CANARIES
        if steps := single_steps(scenario):
            yield steps, CANARIES
    if isinstance(section, GameAudit):
        claim = Claim(**result["verdict"]["claim"])
        trials = trials_to_settle(claim, section.confidence)
        if trials is not None and trials <= min(MOST_TRIALS, _MEMORY / (4 * plan(scenario).layout.size)):
            yield [], f"{{kind: game, game: {section.game}, trials: {trials}}}"


def _works(scenario: Scenario, overrides: Sequence[str], audit: str) -> bool:
    try:
        chosen = [f"audit=[{audit}]"] if audit else []
        changed = parse_scenario(dump_scenario(scenario), "scenario.yaml", [*overrides, *chosen])
        check_audits(plan(changed), changed.audit or fitting_audits(changed))
    except FedsimError:
        return False
    return True


def _command(target: Path | str, overrides: Sequence[str], audit: str) -> str:
    """The command; a run is over, so that overrides are of the scenario in its folder."""
    named = target / "scenario.yaml" if overrides and isinstance(target, Path) else target
    words = ["fedsim", "audit", str(named), *(word for one in overrides for word in ("--set", one))]
    return shlex.join([*words, *(["--audit", audit] if audit else [])])
