# SPDX-License-Identifier: Apache-2.0
"""Run folders as the simulator writes them, without the simulator: plausible numbers from fixed seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import attack_runs
import audit_runs
import numpy as np
import pytest

from fedsim.privacy.claim import PrivacyClaim
from fedsim.report import write_report
from fedsim.scenario import Scenario
from fedsim.scenario_file import dump_scenario

PARAMETERS = 101_770
CLIENT_DP = {"client_dp": {"clipping_norm": 0.8, "noise_multiplier": 1.1}}
BOTH_DP = CLIENT_DP | {"example_dp": {"clipping_norm": 1.0, "noise_multiplier": 0.9}}
SECURE = CLIENT_DP | {"secure_aggregation": True}

SCENARIOS: dict[str, dict[str, Any]] = {
    "dp": {
        "name": "dp-fedavg-clients",
        "question": "How much accuracy does it cost to hide each client's whole update from the server?",
        "partition": {"kind": "dirichlet", "alpha": 0.3},
        "cohort": {"population": 20, "size": 10},
        "defence": BOTH_DP,
    },
    "plain": {"name": "quickstart", "question": "What does the server see?", "cohort": {"population": 20}},
    "secure": {
        "name": "million-clients",
        "question": "What is left to see for the server of a very large federation under secure aggregation?",
        "partition": {"kind": "iid", "examples_per_client": 60},
        "cohort": {"population": 1_000_000, "size": 50},
        "defence": SECURE,
    },
    "one-round": {
        "name": "one-round",
        "rounds": 1,
        "cohort": {"population": 5},
        "strategy": "fedsgd",
        "defence": CLIENT_DP,
    },
    "unfinished": {"name": "unfinished", "rounds": 12, "cohort": {"population": 20, "rate": 0.4}, "defence": CLIENT_DP},
    "long": {
        "name": "long",
        "rounds": 400,
        "evaluate_every": 5,
        "cohort": {"population": 300, "size": 20, "sampling": "poisson"},
        "defence": {"compression": "sign"},
        "adversary": {"keep_rounds": 3, "keep_clients": [1, 2]},
    },
    "text": {
        "name": "text",
        "data": {"source": "text", "path": "plays.txt"},
        "model": "transformer",
        "partition": {"kind": "column"},
        "client": {"steps": 3},
    },
}
ROUNDS_DONE = {"unfinished": 5}
VARIANTS = tuple(SCENARIOS)


@pytest.fixture(scope="session")
def make_run() -> Callable[[Path, str], Path]:
    return write_run


@pytest.fixture(scope="session")
def report_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The report of a variant, written once for all tests that only read it: drawing takes most of a test's time."""

    @cache
    def report(variant: str) -> Path:
        return write_report(write_run(tmp_path_factory.mktemp("runs") / variant, variant))

    return report


@pytest.fixture(params=VARIANTS)
def any_report(request: pytest.FixtureRequest, report_of: Callable[[str], Path]) -> Path:
    """The report of each variant in its turn; not to be changed."""
    return report_of(request.param)


@pytest.fixture(scope="session")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with claims, on which four attacks were played, the last without a truth; not to be changed."""
    run = write_run(tmp_path_factory.mktemp("attacked") / "dp", "dp")
    attack_runs.play_all(run)
    return run


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one audit of each kind and outcome, without a report; not to be changed."""
    return audit_runs.write_audits(write_run(tmp_path_factory.mktemp("audited") / "dp", "dp"))


@pytest.fixture(scope="session")
def audit_report(audited: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with three of these audits; not to be changed."""
    run = write_run(tmp_path_factory.mktemp("audit-report") / "dp", "dp")
    document = json.loads((audited / "audit.json").read_text())
    document["audits"] = [document["audits"][number] for number in (1, 4, 6)]
    (run / "audit.json").write_text(json.dumps(document))
    return write_report(run)


@pytest.fixture
def dp_run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "dp-001", "dp")


def write_run(path: Path, variant: str, **changes: Any) -> Path:
    """Write a run folder; `changes` override fields of the scenario."""
    scenario = Scenario.model_validate(SCENARIOS[variant] | changes)
    done = ROUNDS_DONE.get(variant, scenario.rounds)
    rng = np.random.default_rng(len(variant))
    population = scenario.cohort.population or 20
    cohorts = [_cohort(scenario, population, rng) for _ in range(done)]
    (path / "transcript").mkdir(parents=True)
    (path / "scenario.yaml").write_text(dump_scenario(scenario), encoding="utf-8")
    (path / "summary.json").write_text(json.dumps(_summary(scenario, population, cohorts, rng)))
    failures = {(3, cohorts[2][1])} if done > 2 and variant in ("dp", "unfinished") else set()
    lines = [line for r in range(1, done + 1) for line in _messages(scenario, r, cohorts[r - 1], failures, rng)]
    _write_lines(path / "transcript" / "messages.jsonl", lines)
    for name in {line["file"] for line in lines if line.get("file")}:
        (path / "transcript" / name).write_bytes(b"\0" * 4096)
    _write_lines(path / "metrics.jsonl", [_metrics(scenario, r, cohorts, failures, rng) for r in range(done + 1)])
    claims = [claim.to_dict() for claim in _claims(scenario, scenario.rounds)]  # planned, from the start
    (path / "claims.json").write_text(json.dumps(claims))
    if done == scenario.rounds:
        (path / "model.safetensors").write_bytes(b"\0" * 64)
    return path


def _cohort(scenario: Scenario, population: int, rng: np.random.Generator) -> list[int]:
    section = scenario.cohort
    size = section.size or round((section.rate or 1.0) * population)
    return sorted({int(client) for client in rng.choice(population, size, replace=False, shuffle=False)})


def _summary(scenario: Scenario, population: int, cohorts: list[list[int]], rng: np.random.Generator) -> dict[str, Any]:
    shown = list(range(min(population, 40)))
    text = scenario.data.source == "text"
    shares = rng.dirichlet([getattr(scenario.partition, "alpha", 50.0)] * 10, len(shown))
    rows = (
        60
        if population > 1000
        else 200 + 400 * (rng.random(len(shown)) - 0.5) * (scenario.partition.kind == "dirichlet")
    )
    totals = np.broadcast_to(np.asarray(rows, dtype=int), len(shown))
    counts = [[int(n) for n in rng.multinomial(total, row)] for total, row in zip(totals, shares, strict=True)]
    sizes = [sum(row) + (7 * k if text else 0) for k, row in enumerate(counts)]
    return {
        "name": scenario.name,
        "rounds": scenario.rounds,
        "parameters": PARAMETERS,
        "classes": 80 if text else 10,
        "train_rows": 4000,
        "test_rows": 1000,
        "population": population,
        "input_shape": [32] if text else [1, 28, 28],
        "data": scenario.data.source,
        "model_text": "Sequential(\n  (0): Linear(in_features=784, out_features=128)\n  (1): ReLU()\n)",
        "partition": {"clients": shown, "counts": [] if text else counts, "sizes": sizes},
        "cohorts": cohorts,
    }


def _messages(
    scenario: Scenario, round_: int, cohort: list[int], failures: set[tuple[int, int]], rng: np.random.Generator
) -> list[dict[str, Any]]:
    keep = scenario.adversary.keep_rounds == "all" or round_ <= 3
    name = f"round-{round_:05d}"
    size = 4 * PARAMETERS
    sent = {"round": round_, "direction": "sent", "kind": "model", "clients": len(cohort), "norm": 11.5, "bytes": size}
    lines: list[dict[str, Any]] = [sent | ({"file": f"{name}-sent.safetensors"} if keep else {})]
    received = {"round": round_, "direction": "received", "bytes": size}
    file = {"file": f"{name}-received.safetensors", "sha256": "0" * 64} if keep else {}
    if scenario.defence.secure_aggregation:
        return [*lines, received | file | {"kind": "sum", "clients": len(cohort), "norm": 30 + float(rng.normal())}]
    kind = "gradient" if scenario.strategy.name == "fedsgd" else "update"
    for client in cohort:
        if (round_, client) in failures:
            reason = "the update holds values that are not numbers; it was left out of the average"
            lines.append(
                {"round": round_, "direction": "received", "kind": "error", "client": client, "reason": reason}
            )
        else:
            norm = float(2.0 / round_**0.3 * rng.lognormal(0, 0.2) * (1.8 if client == 7 else 1.0))
            facts = {"kind": kind, "client": client, "norm": norm, "examples": 200, "loss": 2.3 / round_**0.5}
            lines.append(received | file | facts)
    return lines


def _metrics(
    scenario: Scenario, round_: int, cohorts: list[list[int]], failures: set[tuple[int, int]], rng: np.random.Generator
) -> dict[str, Any]:
    evaluated = round_ % scenario.evaluate_every == 0
    accuracy = 0.93 - 0.83 * float(np.exp(-0.4 * round_)) + float(rng.normal(0, 0.004))
    spent = [
        {"epsilon": c.epsilon, "delta": c.delta, "unit": c.unit, "adjacency": c.adjacency, "observer": c.observer}
        for c in _claims(scenario, round_)
    ]
    return {
        "round": round_,
        "clients": len(cohorts[round_ - 1]) if round_ else 0,
        "failures": sum(r == round_ for r, _ in failures),
        "train_loss": 0.2 + 2.1 * float(np.exp(-0.35 * round_)) if round_ else None,
        "loss": 0.28 + 2.03 * float(np.exp(-0.33 * round_)) if evaluated else None,
        "accuracy": round(accuracy, 3) if evaluated else None,
        "update_norm_mean": 2.0 / (round_ + 1) ** 0.3 if round_ else None,
        "privacy": spent,
    }


def _claims(scenario: Scenario, rounds: int) -> list[PrivacyClaim]:
    shared: dict[str, Any] = {"delta": 1e-5, "accountant": "PLD (dp-accounting)", "noise_multiplier": 1.1}
    claims = []
    if scenario.defence.client_dp:
        claims.append(
            PrivacyClaim(
                epsilon=1.234567 * rounds**0.5,
                unit="client",
                adjacency="add/remove",
                sampling="none",
                released="each noised update",
                observer="the server and whoever sees its transcript",
                mechanism="the Gaussian mechanism on the clipped update",
                sample_rate=1.0,
                compositions=rounds,
                assumptions=("the client's noise is not known to the server", "cohorts are weighted uniformly"),
                **shared,
            )
        )
    if scenario.defence.example_dp:
        claims.append(
            PrivacyClaim(
                epsilon=0.7 * rounds**0.5,
                unit="example",
                adjacency="add/remove",
                sampling="poisson",
                released="each step's noised gradient",
                observer="the server",
                mechanism="DP-SGD",
                sample_rate=0.1,
                compositions=10 * rounds,
                assumptions=("batches are drawn independently of each other",),
                **shared,
            )
        )
    return claims


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
