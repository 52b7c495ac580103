# SPDX-License-Identifier: Apache-2.0
"""Client updates a second, of the whole inline engine, against a bare loop, pfl-research, Flower's Ray and Opacus.

All contestants do the same work (workload.py) in one run of this program, in turns, so that a noisy machine is noisy
for all of them; medians of rounds are compared.

    python benchmarks/simulation.py [--quick] [--only PART ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import peers
import torch
from memory import peak_megabytes
from rich.console import Console
from rich.table import Table
from workload import (
    BATCH,
    CLIENTS,
    CLIPPING_NORM,
    COHORT,
    LEARNING_RATE,
    NOISE_MULTIPLIER,
    SCENARIO_MODELS,
    make_data,
    write_npz,
)

import fedsim
from fedsim.scenario import Scenario

GOALS = {"mlp": {"bare loop": 3, "pfl-research": 3}, "cnn": {"bare loop": 1.3, "pfl-research": 1.3}}


def inline_rounds(
    name: str,
    npz: Path,
    rounds: int,
    *,
    cohort: int = COHORT,
    batch: int = BATCH,
    dp: str | None = None,
    threads: int = 1,
) -> list[float]:
    """Seconds of the rounds of `fedsim.run`: messages, training, transcript lines, aggregation, as a user runs it."""
    example_dp = {"clipping_norm": CLIPPING_NORM, "noise_multiplier": NOISE_MULTIPLIER, "batches": dp}
    scenario = Scenario.model_validate(
        {
            "data": {"source": "npz", "path": str(npz)},
            "partition": {"kind": "column"},
            "model": SCENARIO_MODELS[name],
            "client": {"learning_rate": LEARNING_RATE, "batch_size": batch},
            "cohort": {"size": cohort},
            "defence": {"example_dp": example_dp} if dp else {},
            "adversary": {"keep_rounds": 0},
            "rounds": rounds + 1,
            "evaluate_every": 10**6,
            "engine": {"threads": threads},
        }
    )
    return _progress_seconds(scenario)[1:]


def _progress_seconds(scenario: Scenario) -> list[float]:
    stamps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        fedsim.run(scenario, out=Path(folder) / "run", progress=lambda report: stamps.append(time.perf_counter()))
    # The last round is left out: it is evaluated.
    return [after - before for before, after in itertools.pairwise(stamps)][:-1]


def in_turns(contestants: dict[str, Callable[[], list[float]]], turns: int) -> dict[str, float]:
    """The median seconds of a round of each contestant, over several turns of all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(turns):
        for name, work in contestants.items():
            seconds[name] += work()
    return {name: statistics.median(values) for name, values in seconds.items()}


def compare_simulation(name: str, folder: Path, turns: int, ray: bool) -> list[dict[str, Any]]:
    x, y = make_data()
    npz = folder / "workload.npz"
    write_npz(npz, x, y)
    rounds = 8 if name == "mlp" else 3
    contestants: dict[str, Callable[[], list[float]]] = {
        "fedsim inline": lambda: inline_rounds(name, npz, rounds + 1),
        "bare loop": lambda: peers.bare_loop(name, x, y, rounds)[1:],
        "pfl-research": lambda: peers.pfl_research(name, x, y, rounds),
    }
    torch.set_num_threads(1)
    medians = in_turns(contestants, turns)
    rows = _rows(f"{name}, 1 thread", medians, COHORT, GOALS[name])
    if ray:
        cores = os.cpu_count() or 1
        torch.set_num_threads(cores)
        both = in_turns(
            {
                "fedsim inline": lambda: inline_rounds(name, npz, rounds + 1, threads=cores),
                "Flower Ray": lambda: peers.flower_ray(name, 6, cores),
            },
            turns=1,
        )
        torch.set_num_threads(1)
        rows += _rows(f"{name}, {cores} cores", both, COHORT, {"Flower Ray": 15} if name == "mlp" else {})
    return rows


def compare_dp(folder: Path, turns: int) -> list[dict[str, Any]]:
    """DP-SGD on every client. Both sides draw batches of a fixed size, and then both sides Poisson batches."""
    rows = []
    cases = [("mlp", 28, COHORT, BATCH, CLIENTS, 60, 8), ("cnn", 28, COHORT, BATCH, CLIENTS, 60, 2)]
    cases.append(("tiny", 8, 200, 32, 200, 320, 30))
    for name, side, cohort, batch, clients, examples, goal in cases:
        x, y = make_data(side, clients, examples)
        npz = folder / f"dp-{name}.npz"
        write_npz(npz, x, y)
        for batches in ("shuffle", "poisson"):
            medians = in_turns(
                {
                    "fedsim inline": partial(inline_rounds, name, npz, 5, cohort=cohort, batch=batch, dp=batches),
                    "Opacus loop": partial(peers.opacus_loop, name, x, y, cohort, batch, batches == "poisson", 2),
                },
                turns,
            )
            rows += _rows(f"{name}, K={cohort}, {batches} batches", medians, cohort, {"Opacus loop": goal})
    return rows


def population_cost(population: int) -> dict[str, float]:
    """Median seconds of a round and peak memory, in a process of its own."""
    command = [sys.executable, __file__, "--population", str(population)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare_populations() -> list[dict[str, Any]]:
    """In turns, so that a busy moment of the machine is shared."""
    costs: dict[int, list[dict[str, float]]] = {100: [], 10_000: [], 1_000_000: []}
    for _ in range(3):
        for population, measured in costs.items():
            measured.append(population_cost(population))
    seconds = {n: statistics.median(cost["seconds"] for cost in measured) for n, measured in costs.items()}
    return [
        {
            "population": population,
            "round_ms": round(1e3 * seconds[population], 1),
            "of_100": round(seconds[population] / seconds[100], 2),
            "peak_megabytes": round(max(cost["megabytes"] for cost in measured)),
        }
        for population, measured in costs.items()
    ]


def measure_population(population: int) -> dict[str, float]:
    torch.set_num_threads(1)
    scenario = Scenario.model_validate(
        {
            "data": "mnist",
            "partition": {"kind": "iid", "examples_per_client": 60},
            "cohort": {"population": population, "size": COHORT},
            "client": {"batch_size": BATCH},
            "adversary": {"keep_rounds": 0},
            "rounds": 40,
            "evaluate_every": 10**6,
            "engine": {"threads": 1},
        }
    )
    seconds = _progress_seconds(scenario)[2:]
    return {"seconds": statistics.median(seconds), "megabytes": peak_megabytes()}


def _rows(workload: str, medians: dict[str, float], updates: int, goals: dict[str, float]) -> list[dict[str, Any]]:
    ours = medians["fedsim inline"]
    return [
        {
            "workload": workload,
            "contestant": name,
            "updates_per_second": round(updates / seconds, 1),
            "fedsim_is_faster_by": round(seconds / ours, 2),
            "goal": goals.get(name),
        }
        for name, seconds in medians.items()
    ]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn, and no Ray")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--only", nargs="+", choices=["mlp", "cnn", "dp", "population"], help="some parts only")
    parser.add_argument("--population", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.population:
        print(json.dumps(measure_population(arguments.population)))
        return
    turns = 1 if arguments.quick else 5
    parts = arguments.only or ["mlp", "cnn", "dp", "population"]
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in {"mlp", "cnn"}.intersection(parts):
            results[name] = compare_simulation(name, Path(folder), turns, ray=not arguments.quick)
            show(f"FedAvg, {name}: {COHORT} of {CLIENTS} clients a round", results[name])
        if "dp" in parts:
            results["dp"] = compare_dp(Path(folder), max(1, turns // 2))
            show("DP-SGD on the clients, one epoch, 1 thread", results["dp"])
    if "population" in parts:
        results["population"] = compare_populations()
        show("Cost by population (mlp, 50 clients a round, 1 thread)", results["population"])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
