# SPDX-License-Identifier: Apache-2.0
"""What the commands show of attacks: progress while they go on, and how each update fared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from fedsim.progress import Step, showing

if TYPE_CHECKING:
    from fedsim.attacking import AttackReport, Progress
    from fedsim.federation.run import Run


def showing_attacks(*, quiet: bool) -> AbstractContextManager[Progress]:
    """What to call before and after each update is attacked: a bar on a terminal, a line anywhere else."""

    def step(report: AttackReport) -> Step:
        done = report.number - (report.found is None)
        return Step(f"attack {report.attack} on {report.observation}", done, report.of)

    def line(report: AttackReport) -> str | None:
        return attack_line(report) if report.found is not None else None

    return showing(step, line, quiet=quiet, first=Step("attack", 0, None))


def attack_line(report: AttackReport) -> str:
    """An attacked update as `name=value` pairs."""
    loss = "" if report.loss is None else f" loss={report.loss:.3g}"
    name = json.dumps(report.attack) if " " in report.attack else report.attack
    which = f"attack={name} update={report.observation} number={report.number} of={report.of}"
    return f"{which} found={report.found}{loss}"


def attack_rows(run: Run, names: set[str] | None = None) -> list[tuple[str, str]]:
    """How each attacked update fared, for people; `names` are the result files to show."""
    rows = []
    for entry in _entries(run, names):
        what = entry["error"] or entry["sentence"] or f"{entry['found']} items, no truth to score them with"
        name = entry["settings"].get("title") or entry["attack"]
        rows.append((f"{name} on {entry['key']}", str(what)))
    return rows


def attack_documents(run: Run, names: set[str] | None = None) -> list[dict[str, Any]]:
    """The same for programs."""
    return list(_entries(run, names))


def _entries(run: Run, names: set[str] | None) -> Iterator[dict[str, Any]]:
    from fedsim.report.attack_files import read_attacks

    for files in read_attacks(run.path):
        if names is not None and f"{files.name}.json" not in names:
            continue
        document = files.document
        for update in document.observations:
            sentence = update.scored.sentence() if update.scored else ""
            file = str(run.path / "attacks" / f"{files.name}.json")
            head = {"attack": document.attack, "file": file, "settings": document.settings}
            yield {**head, **update.model_dump(), "sentence": sentence}
