# SPDX-License-Identifier: Apache-2.0
"""What must be true of every command that reads a run folder, whatever happened to the folder."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from damaged_folders import damage
from fuzzed_scenarios import BASE
from sandbox import Outcome, complaint, play
from scenario_fuzzer import Failure

WHOLE = "whole"
SCENARIO = BASE | {
    "rounds": 6,
    "strategy": {"name": "fedsgd"},
    "client": {"batch_size": 4},
    "defence": {"example_dp": {"noise_multiplier": 1.0}},
    "attacks": ["labels"],
    "audit": ["transcript"],
}
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("status", "run"),
    ("status", "run", "--json"),
    ("report", "run"),
    ("report", "run", "--json"),
    ("attack", "run", "--attack", "labels"),
    ("attack", "run", "--json", "--no-report", "--attack", "closed-form"),
    ("audit", "run", "--json"),
    ("run", "--resume", "run"),
    ("run", "--resume", "run", "--json", "--no-report"),
    ("ledger", "run"),
    ("logs", "run"),
    ("read", "run"),
)
QUICK = ("status", "ledger", "logs", "read")
"""Commands of milliseconds: each folder is given to two of them, and to one of the others."""


@dataclass
class Tally:
    """How many folders were damaged, and how the commands ended."""

    cases: int = 0
    commands: int = 0
    refused: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def write_base(folder: Path) -> None:
    """The scenario that everything is warmed up with."""
    (folder / "fuzz-base.yaml").write_text(json.dumps(BASE))


def read(arguments: Sequence[str]) -> int:
    """What a program reads of a run by `fedsim.open_run`; the exit code that a command would have."""
    import fedsim
    from fedsim.errors import FedsimError, printable

    try:
        run = fedsim.open_run(arguments[1])
        print(
            printable(
                f"{run} {run.scenario.name} {len(run.metrics)} {run.claims} {len(run.summary)} {len(run.attacks)}"
            )
        )
        print(len(run.model()) if run.complete else "", run.transcript.verify())
    except FedsimError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    return 0


def failures(seed: int, numbers: range, folder: Path, tally: Tally) -> Iterator[Failure]:
    """Damage a small finished run again and again, and give it to commands; what breaks a rule."""
    whole = whole_run(folder)
    for number in numbers:
        rng = Random(f"{seed}/{number}")
        place = folder / f"case-{number}"
        place.mkdir()
        what, changed = damage(whole, place / "run", rng)
        tally.cases += 1
        quick = [words for words in COMMANDS if words[0] in QUICK]
        others = [words for words in COMMANDS if words[0] not in QUICK]
        for words in (*rng.sample(quick, 2), rng.choice(others)):
            if words[0] == "read":  # commands may have written something
                _, changed = damage_again(whole, place, seed, number)
            outcome = play(words, place, seconds=120, command=read if words[0] == "read" else None)
            tally.commands += 1
            tally.refused += outcome.refused
            tally.seconds[words[0]] = tally.seconds.get(words[0], 0.0) + outcome.seconds
            if why := complaint(outcome, (0, 1, 2) if words[0] == "status" else (0, 2)) or _silent(
                words, outcome, changed, place
            ):
                yield Failure(number, f"{what}: {why}", tuple(words), outcome.err + outcome.out)
        shutil.rmtree(place)


def whole_run(folder: Path) -> Path:
    """A finished run with attacks and an audit."""
    (folder / "s.yaml").write_text(json.dumps(SCENARIO))
    for words in (("run", "s.yaml", "--out", WHOLE), ("audit", WHOLE)):
        outcome = play(words, folder, seconds=300)
        if outcome.code:
            raise AssertionError(outcome.err)
    return folder / WHOLE


def damage_again(whole: Path, place: Path, seed: int, number: int) -> tuple[str, set[str]]:
    """The same damage to a new copy."""
    shutil.rmtree(place / "run")
    return damage(whole, place / "run", Random(f"{seed}/{number}"))


def _silent(words: Sequence[str], outcome: Outcome, changed: set[str], place: Path) -> str | None:
    """Damage that a reader is not told of: a program must get an error, a reader of the page a warning."""
    from fedsim.federation.checksums import FILE, read_sums

    if not (place / "run" / "model.safetensors").is_file():  # the run is called unfinished, and can go on
        return None
    if outcome.refused or not (place / "run" / FILE).is_file() or FILE in changed:
        return None
    covered = set(read_sums(place / "run"))
    if words[0] == "read" and (missed := {name for name in changed if _is_read(name)}):
        return f"read without a word: {sorted(missed)}"
    if words[0] == "report" and (missed := changed & covered):
        page = (place / "run" / "report.html").read_text()
        return None if "Damaged:" in page else f"reported without a word: {sorted(missed)}"
    return None


def _is_read(name: str) -> bool:
    """Whether `read` looks at a file: not at the truth, nor at the tensors of attacks."""
    text = name.endswith((".json", ".jsonl", ".yaml")) and name != "audit.json"
    return text or name.startswith(("transcript/", "model"))
