# SPDX-License-Identifier: Apache-2.0
"""What the commands show: progress while a run goes on, tables for people, documents for programs.

An epsilon is never shown without its delta and its unit.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsim.errors import counted, printable, printable_json, size
from fedsim.progress import Step, showing

if TYPE_CHECKING:
    from fedsim.federation.plan import Plan
    from fedsim.federation.run import Run
    from fedsim.federation.server import Progress, RoundReport
    from fedsim.privacy import PrivacyClaim
    from fedsim.privacy.charges import Spent
    from fedsim.scenario import Scenario


def show_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Names and what they stand for: in two columns on a terminal, elsewhere one line each, `name: value`."""
    rows = [(printable(name), printable(value)) for name, value in rows]
    terminal = Console()
    if not terminal.is_terminal:
        print(*(f"{name}: {value}" for name, value in rows), sep="\n", flush=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    terminal.print(table)


def show_hint(text: str) -> None:
    """What to do next, for somebody at a terminal; programs that read the output do not need it."""
    terminal = Console()
    if terminal.is_terminal:
        terminal.print(f"\n{escape(printable(text))}", style="dim")


def show_json(document: Any) -> None:
    """One JSON document, and nothing else, on standard output."""
    text = json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(printable_json(text) + "\n")


def _finite(value: Any) -> Any:
    """The same with infinities and NaN, which JSON does not have, as text."""
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# --- while a run goes on --------------------------------------------------------------------------------------------


def showing_progress(*, quiet: bool, rounds: int | None = None) -> AbstractContextManager[Progress]:
    """What to call after each round: it moves a bar on a terminal, and prints a line anywhere else."""

    def step(report: RoundReport) -> Step:
        return Step("round", report.round, report.rounds, _news(report))

    return showing(step, lambda report: round_line(report), quiet=quiet, first=Step("round", 0, rounds))


def _news(report: RoundReport) -> str:
    accuracy = "" if report.accuracy is None else f"accuracy {report.accuracy:.3f}"
    return "  ".join(part for part in (accuracy, *map(_spent, report.claims[:1])) if part)


def _spent(claim: PrivacyClaim) -> str:
    from fedsim.privacy import rounded_up

    if not claim.finite:
        return ""
    return f"ε ≤ {rounded_up(claim.epsilon)} at δ = {claim.delta:g} ({claim.adjacency} one {claim.unit})"


def round_line(report: RoundReport) -> str:
    """A round as `name=value` pairs, with the first claim (the one against the server); what is unknown is left out."""
    from fedsim.privacy import rounded_up

    pairs: list[tuple[str, Any]] = [
        ("round", report.round),
        ("of", report.rounds),
        ("clients", report.clients),
        ("failures", report.failures),
        ("train_loss", report.train_loss),
        ("loss", report.loss),
        ("accuracy", report.accuracy),
    ]
    for claim in report.claims[:1]:
        epsilon = rounded_up(claim.epsilon) if claim.finite else "inf"
        pairs += [("epsilon", epsilon), ("delta", claim.delta), ("unit", claim.unit), ("adjacency", claim.adjacency)]
    return " ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in pairs
        if value is not None
    )


# --- after a run ----------------------------------------------------------------------------------------------------


def run_document(run: Run, report: Path | None) -> dict[str, Any]:
    """A finished run for programs."""
    return {
        "name": run.scenario.name,
        "folder": str(run.path),
        "report": str(report) if report else None,
        "rounds": run.scenario.rounds,
        "accuracy": last_measured(run, "accuracy"),
        "loss": last_measured(run, "loss"),
        "claims": [{**claim.to_dict(), "sentence": claim.sentence()} for claim in run.claims],
    }


def run_rows(run: Run, report: Path | None) -> list[tuple[str, str]]:
    """A finished run for people."""
    scenario, summary, accuracy = run.scenario, run.summary, last_measured(run, "accuracy")
    who = clients(summary["population"], summary["cohort_size"], scenario.cohort.sampling)
    failures = int(run.metrics["failures"].sum())
    return [
        ("ran", f"{scenario.name}: {scenario.strategy.name}, {rounds(scenario)}, {who}"),
        ("model", f"{scenario.model.name}, {summary['parameters']:,} parameters, on {summary['data']}"),
        (
            "accuracy",
            "not measured"
            if accuracy is None
            else f"{accuracy:.4f} on {counted(summary['test_rows'], 'held-out row')}",
        ),
        *([("failures", f"{failures} answers of clients were missing or refused, see the report")] if failures else []),
        *_claim_rows(run.claims),
        *(("note", note) for note in summary.get("notes", ())),
        ("folder", str(run.path)),
        *([("report", str(report))] if report else []),
    ]


def last_measured(run: Run, column: str) -> float | None:
    """The last value of a metric that was measured at all."""
    values = run.metrics[column].dropna()
    return float(values.iloc[-1]) if len(values) else None


def _claim_rows(claims: Sequence[PrivacyClaim]) -> list[tuple[str, str]]:
    return [("privacy", claim.sentence()) for claim in claims] or [
        ("privacy", "no claim: no defence that supports one")
    ]


# --- before a run ---------------------------------------------------------------------------------------------------


def plan_document(plan: Plan, seconds: float, attacked: tuple[float, float]) -> dict[str, Any]:
    """What would run, for programs."""
    return {
        "name": plan.scenario.name,
        "data": plan.dataset.name,
        "train_rows": len(plan.dataset.x_train),
        "test_rows": len(plan.dataset.x_test),
        "population": plan.population,
        "cohort_size": float(plan.cohort_size),
        "model": plan.scenario.model.name,
        "parameters": plan.parameters,
        "strategy": plan.scenario.strategy.name,
        "rounds": plan.scenario.rounds,
        "steps_per_round": plan.steps_per_round,
        "messages": plan.messages,
        "transcript_bytes": plan.transcript_bytes,
        "memory_bytes": plan.memory,
        "seconds": seconds,
        "attack_seconds": list(attacked),
        "notes": plan.notes,
        "claims": [{**claim.to_dict(), "sentence": claim.sentence()} for claim in plan.claims],
    }


def plan_rows(plan: Plan, seconds: float, attacked: tuple[float, float]) -> list[tuple[str, str]]:
    """What would run, for people."""
    scenario, dataset = plan.scenario, plan.dataset
    shape = "x".join(map(str, dataset.x_train.shape[1:]))
    later = _and_attacks(scenario, attacked)
    rows = f"{len(dataset.x_train):,} rows to train on, {len(dataset.x_test):,} held out"
    who = clients(plan.population, plan.cohort_size, scenario.cohort.sampling)
    steps = (
        "one gradient"
        if scenario.strategy.name == "fedsgd"
        else f"at most {counted(plan.steps_per_round, 'local step')}"
    )
    return [
        ("scenario", f"{scenario.name}: {scenario.question}" if scenario.question else scenario.name),
        ("data", f"{dataset.name}: {rows}, input {shape}, {dataset.classes:,} classes"),
        ("clients", f"{who}, partition {scenario.partition.kind}"),
        ("model", f"{scenario.model.name}, {plan.parameters:,} parameters"),
        ("training", f"{scenario.strategy.name}, {rounds(scenario)}, {steps} for a client in a round"),
        ("defence", _defence(plan)),
        ("server sees", f"{plan.messages:,} messages, about {size(plan.transcript_bytes)} of them kept as tensors"),
        ("memory", f"about {size(plan.memory)} beside the data and Python itself"),
        ("time", f"about {duration(seconds)} on this machine, some more for the report{later}"),
        *_claim_rows(plan.claims),
        *(("note", note) for note in plan.notes),
    ]


def rehearsal_rows(plan: Plan, taken: int, spent: Spent, claims: Sequence[PrivacyClaim]) -> list[tuple[str, str]]:
    """What a client's policy makes of a run, for people."""
    many = f"{counted(taken, 'round')} of {plan.scenario.rounds:,}, the most that one client is asked in"
    return [
        ("policy", f"allows it: {many}"),
        ("the client", f"spends {spent} in this run"),
        *_claim_rows(claims),
        ("note", "the claim is that of a server all of whose clients are like this one, and answer in every round"),
    ]


def rounds(scenario: Scenario) -> str:
    """How many there are."""
    return "1 round" if scenario.rounds == 1 else f"{scenario.rounds:,} rounds"


def _and_attacks(scenario: Scenario, attacked: tuple[float, float]) -> str:
    """Attacks may take much longer than what they attack."""
    if not scenario.attacks:
        return ""
    low, high = (float(f"{max(1.0, end):.1g}") for end in attacked)
    most = duration(high) if high > low else ""
    return f", and then {duration(low)}{' to ' if most else ''}{most} for {counted(len(scenario.attacks), 'attack')}"


def clients(population: int, cohort: float, sampling: str) -> str:
    """How many clients take part in a round, of how many."""
    if sampling == "poisson":
        return (
            f"each of {population:,} clients with probability {cohort / population:.4g}, about {cohort:,.4g} in a round"
        )
    return (
        f"{cohort:,.0f} of {population:,} clients in each round"
        if cohort < population
        else f"all {population:,} clients"
    )


def _defence(plan: Plan) -> str:
    defence = plan.scenario.defence
    parts = list(dict.fromkeys(claim.mechanism for claim in plan.claims))
    parts += [f"{name} without a claim" for name in ("example_dp", "client_dp") if getattr(defence, name) and not parts]
    parts += [f"compression by {defence.compression.kind}"] if defence.compression else []
    parts += ["secure aggregation: the server sees sums only"] if defence.secure_aggregation else []
    return ", ".join(parts) or "none"


def duration(seconds: float) -> str:
    """A time for people: 40 seconds, 12 minutes, 3.5 hours."""
    if seconds < 90:
        return f"{max(1, round(seconds))} second{'s' if round(seconds) > 1 else ''}"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
