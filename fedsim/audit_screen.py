# SPDX-License-Identifier: Apache-2.0
"""What the commands show of audits: progress while they go on, and what each found."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from fedsim.auditing import AuditReport, Progress


@contextmanager
def showing_audits(*, quiet: bool) -> Iterator[Progress]:
    """What to call as audits go on: a bar on a terminal, a line for each audit anywhere else."""
    errors = Console(stderr=True)
    if sys.stdout.isatty() or (quiet and errors.is_terminal):
        with _bar(errors) as progress:
            yield progress
    elif quiet:
        yield lambda report: None
    else:
        yield lambda report: print(audit_line(report), flush=True) if report.sentence else None


@contextmanager
def _bar(errors: Console) -> Iterator[Progress]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("audit", total=None)

        def show(report: AuditReport) -> None:
            words = escape(f"audit {report.number} of {report.of}: {report.audit}")
            bar.update(task, description=words, completed=report.done, total=report.total or None)

        yield show


def audit_line(report: AuditReport) -> str:
    """A finished audit as `name=value` pairs."""
    return f"audit={report.audit} number={report.number} of={report.of}"


def audit_rows(audits: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What each audit found, for people: the verdict, then every bound with its tier."""
    rows = []
    for audit in audits:
        name = str(audit["settings"].get("game") or audit["kind"])
        rows.append((name, str(audit["sentence"])))
        rows += verdict_rows(audit["verdict"]) if audit["verdict"] else []
    return rows


def verdict_rows(verdict: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every bound of a verdict: never epsilon without delta, unit and adjacency."""
    claim = verdict["claim"]
    about = f"at δ = {claim['delta']:g} ({claim['adjacency']} one {claim['unit']})"
    rows = []
    for estimate in verdict["estimates"]:
        sure = "no confidence" if estimate["confidence"] is None else f"{100 * estimate['confidence']:g}% confidence"
        lower = (
            estimate["lower"] if isinstance(estimate["lower"], str) else f"{int(estimate['lower'] * 1000) / 1000:.3f}"
        )
        about_claim = next((f"; {said}" for said in estimate["assumptions"] if said.startswith("the claim is")), "")
        rows.append((f"  tier {estimate['tier']}", f"ε ≥ {lower} {about}, {sure}: {estimate['method']}{about_claim}"))
    return rows
