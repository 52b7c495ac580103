# SPDX-License-Identifier: Apache-2.0
"""What the commands show of audits: progress while they go on, and what each found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from fedsim.privacy.rounding import rounded_down
from fedsim.progress import Step, showing

if TYPE_CHECKING:
    from fedsim.auditing import AuditReport, Progress


def showing_audits(*, quiet: bool) -> AbstractContextManager[Progress]:
    """What to call as audits go on: a bar on a terminal, a line for each audit anywhere else."""

    def step(report: AuditReport) -> Step:
        return Step(f"audit {report.number} of {report.of}: {report.audit}", report.done, report.total or None)

    def line(report: AuditReport) -> str | None:
        return audit_line(report) if report.sentence else None

    return showing(step, line, quiet=quiet, first=Step("audit", 0, None))


def audit_line(report: AuditReport) -> str:
    """A finished audit as `name=value` pairs."""
    return f"audit={report.audit} number={report.number} of={report.of}"


def audit_rows(audits: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What each audit found, for people: the verdict, then every bound with its tier."""
    rows = []
    for audit in audits:
        game = audit["settings"].get("game")
        name = f"game {game}" if game else str(audit["kind"])
        rows.append((name, str(audit["sentence"])))
        rows += game_rows(audit["numbers"]) if game else []
        rows += verdict_rows(audit["verdict"]) if audit["verdict"] else []
    return rows


def game_rows(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the adversary looked at, and what it found where false alarms are rare."""
    from fedsim.audit.playing.measures import Interval, RateAt

    rates = [RateAt.from_dict(rate) for rate in numbers["rates"]]
    weaker = [
        (f"  seen as in {name}", f"AUC {Interval.from_dict(area)} on the same trials")
        for name, area in numbers["weaker"].items()
    ]
    return [
        ("  looks at", numbers["looks_at"]),
        *((f"  TPR at FPR {100 * rate.at:g}%", rate.sentence()) for rate in rates),
        *weaker,
    ]


def verdict_rows(verdict: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every bound of a verdict: never epsilon without delta, unit and adjacency."""
    claim = verdict["claim"]
    about = f"at δ = {claim['delta']:g} ({claim['adjacency']} one {claim['unit']})"
    rows = []
    for estimate in verdict["estimates"]:
        sure = "no confidence" if estimate["confidence"] is None else f"{100 * estimate['confidence']:g}% confidence"
        lower = estimate["lower"] if isinstance(estimate["lower"], str) else rounded_down(estimate["lower"])
        about_claim = next((f"; {said}" for said in estimate["assumptions"] if said.startswith("the claim is")), "")
        rows.append((f"  tier {estimate['tier']}", f"ε ≥ {lower} {about}, {sure}: {estimate['method']}{about_claim}"))
    return rows
