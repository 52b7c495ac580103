# SPDX-License-Identifier: Apache-2.0
"""What must be true of `fedsim check` and `fedsim run`, whatever a scenario holds."""

from __future__ import annotations

import json
import math
import shutil
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzzed_scenarios import BASE, Case, case
from sandbox import Outcome, complaint, play

from fedsim.errors import FedsimError, printable
from fedsim.scenario_file import load_scenario

QUICK = 3.0
"""Seconds that `check` may foresee for a scenario that is then run."""


@dataclass(frozen=True)
class Failure:
    """A case that broke a rule; its number and seed make it again."""

    number: int
    why: str
    arguments: tuple[str, ...]
    said: str

    def __str__(self) -> str:
        return f"case {self.number}: {self.why}\n  {' '.join(map(repr, self.arguments))}\n  {self.said.strip()[-1500:]}"


@dataclass
class Tally:
    """How many cases there were, and how they ended."""

    cases: int = 0
    refused: int = 0
    accepted: int = 0
    run: int = 0


def write_base(folder: Path) -> None:
    """The scenario that cases are made from, where `warm_up` looks for it."""
    (folder / "fuzz-base.yaml").write_text(json.dumps(BASE))


def failures(seed: int, numbers: range, folder: Path, tally: Tally) -> Iterator[Failure]:
    """Play the cases of a seed in a folder; those that break a rule."""
    for number in numbers:
        rng = Random(f"{seed}/{number}")
        fuzzed = case(rng)
        place = folder / f"case-{number}"
        place.mkdir()
        (place / "s.yaml").write_bytes(fuzzed.text.encode("utf-8", "surrogatepass"))
        tally.cases += 1
        words = tuple(word for override in fuzzed.overrides for word in ("--set", override))
        outcome = refused_at_once(place / "s.yaml", fuzzed.overrides) if rng.random() < 0.9 else None
        outcome = outcome or play(("check", "s.yaml", "--json", *words), place)
        why, played = _wrong(fuzzed, outcome, place), outcome
        tally.refused += outcome.refused
        tally.accepted += outcome.code == 0
        quick = why is None and outcome.code == 0 and json.loads(outcome.out)["seconds"] < QUICK
        if quick and rng.random() < 0.3 and _attacks_quickly(place / "s.yaml", fuzzed.overrides):
            tally.run += 1
            report = ("--no-report",) if rng.random() < 0.7 else ()
            played = play(("run", "s.yaml", "--json", "--out", "run", *report, *words), place, seconds=120)
            why = _wrong_run(played, place, bool(report))
        if why:
            yield Failure(number, why, (fuzzed.text[:2000], *played.arguments), played.err + played.out)
        shutil.rmtree(place)


def refused_at_once(file: Path, overrides: tuple[str, ...]) -> Outcome | None:
    """The refusal of what can be seen in the file alone, without a process: most cases end here."""
    try:
        load_scenario(file, overrides)
    except FedsimError as error:
        return Outcome(("check",), 2, "", printable(f"error: {error}"), 0.0)
    except Exception:
        return Outcome(("check",), 1, "", traceback.format_exc(), 0.0)
    return None


def _attacks_quickly(file: Path, overrides: tuple[str, ...]) -> bool:
    """Attacks may rightly take minutes, which `check` does not foresee."""
    return {attack.name for attack in load_scenario(file, overrides).attacks} <= {"labels", "closed-form"}


def _wrong(fuzzed: Case, outcome: Outcome, place: Path) -> str | None:
    if why := complaint(outcome):
        return why
    if {path.name for path in place.iterdir()} != {"s.yaml"}:
        return "check left something behind"
    if outcome.refused:
        return "a refusal prints a result" if outcome.out else None
    if fuzzed.garbage:
        return f"garbage was accepted: {fuzzed.garbage}"
    return _senseless(json.loads(outcome.out))


def _senseless(plan: dict[str, object]) -> str | None:
    """What in a plan cannot be."""
    counts = ("train_rows", "test_rows", "population", "parameters", "rounds", "steps_per_round", "messages")
    for name in counts:
        if not isinstance(plan[name], int) or plan[name] < 1:  # type: ignore[operator]
            return f"{name} is {plan[name]}"
    numbers = ("cohort_size", "seconds", "transcript_bytes")
    for name in numbers:
        value = plan[name]
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            return f"{name} is {value}"
    for claim in plan["claims"]:  # type: ignore[attr-defined]
        epsilon, delta = float(claim["epsilon"]), float(claim["delta"])
        if not epsilon > 0 or not 0 <= delta < 1 or math.isnan(epsilon):
            return f"a claim of ε = {epsilon} at δ = {delta}"
    return None


def _wrong_run(outcome: Outcome, place: Path, no_report: bool) -> str | None:
    if why := complaint(outcome):
        return f"run: {why}"
    if outcome.refused:
        # What only training shows (a model that diverges) leaves a run that can be looked at; else nothing is left.
        begun = (place / "run" / "scenario.yaml").is_file()
        return None if begun or not (place / "run").exists() else "run: half a folder was left behind"
    document = json.loads(outcome.out)
    accuracy = document["accuracy"]
    if accuracy is not None and not 0 <= accuracy <= 1:
        return f"run: the accuracy is {accuracy}"
    if (place / "run" / "report.html").is_file() == no_report:
        return "run: there is no report, or one that nobody asked for"
    return None
