# SPDX-License-Identifier: Apache-2.0
"""A whole scenario in one call: the federation, then what its server can infer from the transcript."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.errors import RunError
from fedsim.federation import run as federation
from fedsim.federation.plan import Plan
from fedsim.federation.plan import plan as plan_of
from fedsim.federation.run import Run
from fedsim.scenario import Scenario
from fedsim.scenario_file import dump_scenario, load_scenario, parse_scenario

if TYPE_CHECKING:
    import pandas as pd

    from fedsim.federation.server import Progress


def run(
    scenario: Scenario | str | Path,
    *,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Run:
    """Run a scenario (an object, a packaged name, or a file), and play its attacks on what the server saw."""
    return _attacked(federation.run(scenario, overrides=overrides, out=out, progress=progress))


def resume(path: str | Path, *, progress: Progress | None = None) -> Run:
    """Go on with what was interrupted, to the same end that it would have had."""
    return _attacked(federation.resume(path, progress=progress))


def attack(attacked: Run | str | Path, attacks: Sequence[str] = (), *, overrides: Sequence[str] = ()) -> pd.DataFrame:
    """Play attacks on a run (or its folder): those named, or else those of its scenario; how each update fared.

    The rows are of the attacks that were just played; `Run.attacks` has those of all. `overrides` may grant other
    knowledge, as in "adversary.knows.labels=known".
    """
    from fedsim.attacking import attack_run

    target = attacked if isinstance(attacked, Run) else federation.open_run(attacked)
    played = {path.name for path in attack_run(target, with_attacks(target, attacks, overrides))}
    table = target.attacks
    return table[table["file"].isin(played)].reset_index(drop=True)


def plan(scenario: Scenario | str | Path, *, overrides: Sequence[str] = ()) -> Plan:
    """What `fedsim check` shows: what a scenario would run, and the privacy that it will have spent.

    Nothing is written. `estimate_seconds` of it trains for a moment to say how long the run may take.
    """
    if not isinstance(scenario, Scenario):
        scenario = load_scenario(scenario, overrides)
    elif overrides:
        scenario = parse_scenario(dump_scenario(scenario), "scenario", overrides)
    return plan_of(scenario)


def with_attacks(target: Run, attacks: Sequence[str], overrides: Sequence[str]) -> Scenario:
    """The scenario of a run with other attacks (names, or settings in YAML) and other knowledge for its adversary."""
    for override in overrides:
        if not override.startswith("adversary.knows."):
            raise RunError(
                f"--set {override}: the run is over; of its scenario only attacks and adversary.knows can still change"
            )
    for attack in attacks:
        if not attack.strip():
            raise RunError(f"--attack {attack!r} names no attack; name one, for example exact, or leave it out")
    chosen = [f"attacks=[{', '.join(attacks)}]"] if attacks else []
    return load_scenario(target.path / "scenario.yaml", [*overrides, *chosen])


def _attacked(finished: Run) -> Run:
    if finished.scenario.attacks:
        from fedsim.attacking import attack_run

        attack_run(finished, again=False)
    return finished
