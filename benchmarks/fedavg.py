# SPDX-License-Identifier: Apache-2.0
"""Reconstruction from FedAvg updates: what it costs by the number of local steps, and what it finds.

    python benchmarks/fedavg.py [cost] [labels] [photographs] [table] [order] [defences] [--clients 4]
        [--iterations 200]

cost: memory and CPU time of one iteration at 5, 50 and 500 local steps, each in a process of its own.
labels: errors of the label counts of 50 images of 100 classes, at E in {1, 5, 10} (design notes, 3.7).
photographs: 8 images, E=2, batches of 4, reshuffled: breaching 0.1.2 reaches 16.2 dB (design notes, 3.3).
table: the table of Dimitrov et al. 2022 on Omniglot by drawer and CIFAR-100 (needs ../shared/data), by method. As in
    docs/attacks.md, from noise: --data omniglot --clients 20 --iterations 60 --surrogate 0 --weights 0.01 0.1, 170 CPU
    seconds a client; its grid: --clients 2 --weights 0.1 --settings 1x5 5x5 1x10 ... and CIFAR-100: --data cifar100
    --clients 8 --iterations 40 --weights 0.1, 390 seconds, both with --methods; from the surrogate model: --clients 2
    --weights 1, and --data omniglot --iterations 12 --surrogate 300 or --data cifar100 --iterations 8 --surrogate 100,
    220 and 300.
order: how much an update depends on the order of the data, by learning rate, and what the prior is worth there
    (as in docs/attacks.md: --clients 6 --iterations 100).
defences: the attack under client-level clipping and noise, beside the accuracy that the federation keeps.
One thread, CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from fedavg_clients import clients_of, local_training
from fedavg_order import order
from fedavg_table import METHODS, table
from inversion_fixtures import MEAN, SHAPE, STD, make_batch, make_model, psnr
from memory import peak_megabytes

from fedsim.attacks.fedavg import fedavg_clients
from fedsim.attacks.labels import count_labels
from fedsim.attacks.observation import Knowledge
from fedsim.attacks.simulation import Simulator, Step
from fedsim.models import build_model
from fedsim.scenario import CnnModel, FedAvgAttack
from fedsim.training import LocalWork

FAST_SERVER = ("strategy.server_optimizer=adam", "strategy.server_learning_rate=0.03")
"""With plain averaging the scenario's small client rate, which the attack likes, learns nothing in 40 rounds."""
NOISES = (None, 0.001, 0.01, 0.1)
"""Noise multipliers of the client's update, clipped to 0.5; None: as it is."""

PROCESSES = 7
"""In which a peak of memory is measured: what the allocator keeps differs from one to the next."""

# --- cost -----------------------------------------------------------------------------------------------------------


def one_iteration(steps: int) -> dict[str, float]:
    """Peak memory (MB, above what it took to build everything) and CPU seconds of one gradient of the objective."""
    model = build_model(CnnModel(name="cnn", variant="averaging"), (1, 28, 28), 62, 0, kind="image")
    simulator = Simulator(model, LocalWork(kind="fedavg", learning_rate=0.004))
    batches = [
        Step(torch.rand(1, 5, 1, 28, 28), torch.randint(62, (1, 5)), torch.full((1, 5), 0.2)) for _ in range(steps)
    ]
    simulator.slope(batches[:1], lambda update: update.square().sum())
    before, began = peak_megabytes(), time.process_time()
    simulator.slope(batches, lambda update: update.square().sum())
    return {"megabytes": peak_megabytes() - before, "seconds": time.process_time() - began}


def cost() -> None:
    """Memory grows no faster than the square root of the steps; time grows with the steps. Medians of processes."""
    peak: dict[int, float] = {}
    for steps in (5, 50, 500):
        command = [sys.executable, __file__, "--one-iteration", str(steps)]
        runs = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(PROCESSES)
        ]
        peaks = [run["megabytes"] for run in runs]
        peak[steps], seconds = statistics.median(peaks), statistics.median(run["seconds"] for run in runs)
        print(
            f"cost steps={steps} peak={peak[steps]:.0f} MB ({min(peaks):.0f} to {max(peaks):.0f} in {PROCESSES} runs)"
            f" cpu={seconds:.2f} s",
            flush=True,
        )
    for few, many in ((5, 50), (50, 500)):
        grew = peak[many] / max(peak[few], 1.0)
        print(f"cost memory from {few} to {many} steps: x {grew:.2f} (square root of that: {(many / few) ** 0.5:.2f})")


# --- quality --------------------------------------------------------------------------------------------------------


def label_errors(clients: int) -> None:
    """How many of 50 labels are counted wrong, mean over clients; an untrained network of 100 classes."""
    for epochs, batch in ((1, 5), (5, 5), (10, 5), (10, 10), (10, 1)):
        errors = []
        for client in clients_of(
            "cifar100", clients, LocalWork("fedavg", learning_rate=0.004, epochs=epochs, batch_size=batch)
        ):
            counts = count_labels(client.observation, client.knowledge).counts
            true = torch.bincount(client.labels, minlength=client.knowledge.classes)
            errors.append(float((counts - true).abs().sum()) / 2)
        print(f"labels E={epochs} B={batch}: {np.mean(errors):.2f} of 50 wrong ({len(errors)} clients)", flush=True)


def photographs(iterations: int) -> None:
    """The fixture of the design notes; labels given to everybody, as there."""
    inputs, labels, pixels = make_batch(8)
    model, low, high = make_model("cnn3"), (0 - MEAN) / STD, (1 - MEAN) / STD
    work = LocalWork("fedavg", learning_rate=0.004, epochs=2, batch_size=4)
    observation = local_training(model, inputs, labels, work, 1)
    knowledge = Knowledge("image", SHAPE, 100, (low, high), labels=labels.sort().values)
    methods = {"exact features": {"features": True, "iterations": 20}, **METHODS}
    for name, chosen in methods.items():
        settings = FedAvgAttack.model_validate(
            {"name": "fedavg", "features": False, "iterations": iterations, "total_variation": 1e-4, **chosen}
        )
        began = time.process_time()
        (found,) = fedavg_clients([([observation], knowledge)], settings)
        quality = psnr(found.inputs, pixels)
        print(
            f"photographs {name}: {quality:.1f} dB, loss {found.loss:.1e}, {time.process_time() - began:.0f} s",
            flush=True,
        )


def defences(folder: Path, iterations: int) -> None:
    """The scenario under client-level clipping and noise, beside the accuracy that training keeps, and for what claim.

    The attack sees one round of four clients; the training that is scored goes on for 40 rounds of 40. The
    clients do the same in both; the claim printed is that of the training, for all its rounds. A client with a privacy
    claim does not say how many images it has, without which there is no attack: here the server knows the labels.
    """
    import fedsim
    from fedsim.report.attack_comparison import ABOVE, mean_over_clients, success
    from fedsim.report.run_files import read_run_files

    best = f"{{name: fedavg, inputs: shared, iterations: {iterations}, learning_rate: 0.05, total_variation: 0.0001}}"
    for noise in NOISES:
        private = f"defence.client_dp={{clipping_norm: 0.5, noise_multiplier: {noise}, delta: 1e-5}}"
        override = [] if noise is None else [private]
        attacked = fedsim.run(
            "fedavg-leakage",
            overrides=[f"attacks=[{best}]", "adversary.knows.labels=known", *override],
            out=folder / f"attacked-{noise}",
        )
        (files,) = read_run_files(attacked.path).attacks
        above = mean_over_clients([success(score) for score in files.scores])
        psnr_found = mean_over_clients([score.metrics["psnr"] for score in files.scores])
        longer = ["attacks=[]", "rounds=40", "cohort.size=40", "adversary.keep_rounds=0", *FAST_SERVER]
        trained = fedsim.run("fedavg-leakage", overrides=[*longer, *override], out=folder / f"trained-{noise}")
        claim = trained.claim.sentence() if trained.claim else "No privacy claim."
        print(
            f"defences noise={noise}: above {ABOVE:g} dB {above}, PSNR {psnr_found} ({len(files.scores)} clients);"
            f" accuracy {trained.metrics['accuracy'].iloc[-1]:.3f}. {claim}",
            flush=True,
        )


def main() -> None:
    """Measure what is named, or everything that is quick."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["cost", "labels", "photographs"])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--first", type=int, default=0, help="the first client of the table")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--surrogate", type=int, default=300, help="of the table's common start; 0: noise")
    parser.add_argument(
        "--weights", nargs="*", type=float, default=[0.1, 1.0, 10.0], help="of the prior, to choose from"
    )
    parser.add_argument("--settings", nargs="*", default=["10x5"], help="epochs x batch size")
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS), help="of the table")
    parser.add_argument("--data", nargs="*", default=["omniglot", "cifar100"])
    parser.add_argument("--folder", type=Path, default=Path("runs/fedavg-defences"))
    parser.add_argument("--one-iteration", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.one_iteration:
        print(json.dumps(one_iteration(chosen.one_iteration)))
        return
    settings = [(int(epochs), int(batch)) for epochs, batch in (each.split("x") for each in chosen.settings)]
    work: dict[str, Callable[[], None]] = {
        "cost": cost,
        "labels": lambda: label_errors(chosen.clients),
        "photographs": lambda: photographs(chosen.iterations),
        "table": lambda: table(
            range(chosen.first, chosen.first + chosen.clients),
            chosen.iterations,
            chosen.surrogate,
            settings,
            chosen.data,
            chosen.weights,
            chosen.methods,
        ),
        "order": lambda: order(chosen.clients, chosen.iterations),
        "defences": lambda: defences(chosen.folder, chosen.iterations),
    }
    for name in chosen.what:
        work[name]()


if __name__ == "__main__":
    main()
