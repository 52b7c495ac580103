# SPDX-License-Identifier: Apache-2.0
"""What the commands show of attacks: progress while they go on, and how each fared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from fedsim.progress import Step, showing

if TYPE_CHECKING:
    from fedsim.attacking import AttackReport, Progress
    from fedsim.federation.run import Run
    from fedsim.report.attack_files import AttackFiles


def showing_attacks(*, quiet: bool) -> AbstractContextManager[Progress]:
    """What to call before and after each update is attacked: a bar on a terminal, a line anywhere else."""

    def step(report: AttackReport) -> Step:
        done = report.number - (not report.done)
        return Step(f"attack {report.attack} on {report.observation}", done, report.of)

    def line(report: AttackReport) -> str | None:
        return attack_line(report) if report.done else None

    return showing(step, line, quiet=quiet, first=Step("attack", 0, None))


def attack_line(report: AttackReport) -> str:
    """An attacked update as `name=value` pairs: how much of it is right, where the truth is known."""
    loss = "" if report.loss is None else f" loss={report.loss:.3g}"
    name = json.dumps(report.attack) if " " in report.attack else report.attack
    which = f"attack={name} update={report.observation} number={report.number} of={report.of}"
    return f"{which} {_outcome(report)}{loss}"


def _outcome(report: AttackReport) -> str:
    score = report.score
    if report.error:
        return f"error={json.dumps(report.error, ensure_ascii=False)}"
    if score is None:
        return f"returned={report.returned}"
    labels = "" if score.label_accuracy is None else f" labels_right={score.label_accuracy:.3g}"
    if not report.returned and labels:  # labels are all that was asked for
        return f"examples={score.originals}{labels}"
    right, exact = score.right.right, score.exact.right
    return f"returned={report.returned} examples={score.originals} right={right} exact={exact}{labels}"


def attack_rows(run: Run, names: set[str] | None = None) -> list[tuple[str, str]]:
    """How each attack fared on all its updates, for people; `names` are the result files to show."""
    from fedsim.report.attack_answers import did_it_work

    return [(files.title, did_it_work(files)[1]) for files in _files(run, names)]


def attack_documents(run: Run, names: set[str] | None = None) -> list[dict[str, Any]]:
    """How each attacked update fared, for programs."""
    documents = []
    for files in _files(run, names):
        document = files.document
        file = str(run.path / "attacks" / f"{files.name}.json")
        head = {"attack": document.attack, "file": file, "settings": document.settings}
        for update in document.observations:
            sentence = update.scored.sentence() if update.scored else ""
            documents.append({**head, **update.model_dump(), "sentence": sentence})
    return documents


def _files(run: Run, names: set[str] | None) -> Iterator[AttackFiles]:
    from fedsim.report.attack_files import read_attacks

    return (files for files in read_attacks(run.path) if names is None or f"{files.name}.json" in names)
