# SPDX-License-Identifier: Apache-2.0
"""Gradient matching against `breaching` 0.1.2: the same gradient, one thread, CPU seconds, labels found by each side.

python benchmarks/inversion.py [--peer .venv-peers/bin/python] [--quick] [--out FILE]

fedsim plays one default setting everywhere; breaching its "Inverting Gradients" with the total variation that was best
for it (0.001, chosen by the truth). Each budget is a whole run from the beginning. Two tables: the seconds in which
fedsim reaches what breaching reached, and what each side has after equal seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from inversion_fixtures import CLASSES, MEAN, SHAPE, STD, digest, gradient, make_batch, make_model, psnr

from fedsim.attacks.gradient_matching import gradient_matching
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.scenario.attack import GradientMatchingAttack
from fedsim.training import LocalWork

# model, batch, iterations of breaching, its total variation
CASES = (
    ("cnn3", 1, (300, 2000), 0.001),
    ("cnn3", 8, (300, 2000), 0.001),
    ("lenet", 1, (2000,), 0.2),
    ("mlp", 8, (2000,), 0.01),
)
BUDGETS = (60, 120, 240, 600)  # iterations of fedsim; the last is its default
Run = dict[str, float | int | str]


def fedsim_run(name: str, batch: int, iterations: int) -> Run:
    model, (inputs, labels, images) = make_model(name), make_batch(batch)
    observed = gradient(model, inputs, labels)
    names = [each for each, _ in model.named_parameters()]
    observation = Observation(
        model=model,
        update=dict(zip(names, observed, strict=True)),
        kind="gradient",
        work=LocalWork(kind="fedsgd", batch_size=batch),
        examples=batch,
    )
    knowledge = Knowledge(
        kind="image", input_shape=SHAPE, classes=CLASSES, value_range=((0 - MEAN) / STD, (1 - MEAN) / STD)
    )
    settings = GradientMatchingAttack(name="gradient-matching", iterations=iterations)
    begun = time.process_time()
    found = gradient_matching(observation, knowledge, settings)
    seconds = time.process_time() - begun
    return {
        "tool": "fedsim",
        "model": name,
        "batch": batch,
        "iterations": iterations,
        "psnr": psnr(found.inputs, images),
        "seconds": seconds,
        "loss": found.loss,
        "digest": digest(observed),
    }


def breaching_run(python: str, name: str, batch: int, iterations: int, variation: float) -> Run:
    script = Path(__file__).with_name("inversion_breaching.py")
    command = [python, str(script), name, str(batch), str(iterations), str(variation)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"breaching failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {"tool": "breaching", "model": name, "batch": batch, "iterations": iterations, **found}


def show(run: Run) -> None:
    said = f"{run['tool']:10} {run['model']:6} batch {run['batch']}  {run['iterations']:5} iterations"
    print(f"{said}  {run['psnr']:6.1f} dB  {run['seconds']:7.2f} CPU s", flush=True)


def compare(ours: list[Run], theirs: list[Run]) -> None:
    """Seconds to the same PSNR, and PSNR after the same seconds."""
    for peer in theirs:
        assert all(run["digest"] == peer["digest"] for run in ours), "the two sides attacked different gradients"
        reached = [float(run["seconds"]) for run in ours if float(run["psnr"]) >= float(peer["psnr"])]
        within = [float(run["psnr"]) for run in ours if float(run["seconds"]) <= float(peer["seconds"])]
        seconds = f"{min(reached):.2f} s ({float(peer['seconds']) / min(reached):.0f}x fewer)" if reached else "never"
        best = f"{max(within):.1f} dB" if within else "nothing"
        print(
            f"  {peer['psnr']:.1f} dB: breaching {peer['seconds']:.1f} s, fedsim {seconds};"
            f" in {peer['seconds']:.1f} s: breaching {peer['psnr']:.1f} dB, fedsim {best}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU seconds to reach a PSNR, and PSNR at equal CPU seconds.")
    parser.add_argument("--peer", help="a Python that has breaching; without it only fedsim is measured")
    parser.add_argument("--quick", action="store_true", help="only the smallest number of iterations of breaching")
    parser.add_argument("--only", help="only this model")
    parser.add_argument("--out", type=Path, help="write all runs to this JSON file")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    fedsim_run("mlp", 1, 10)  # imports and first calls are nobody's seconds
    runs: list[Run] = []
    for name, batch, iterations, variation in CASES:
        if chosen.only not in (None, name):
            continue
        ours = [fedsim_run(name, batch, each) for each in BUDGETS]
        for run in ours:
            show(run)
        theirs = []
        for each in (iterations[:1] if chosen.quick else iterations) if chosen.peer else ():
            theirs.append(breaching_run(chosen.peer, name, batch, each, variation))
            show(theirs[-1])
        compare(ours, theirs)
        runs += ours + theirs
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
