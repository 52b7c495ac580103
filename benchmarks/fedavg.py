# SPDX-License-Identifier: Apache-2.0
"""Reconstruction from FedAvg updates: what it costs by the number of local steps, and what it finds.

    python benchmarks/fedavg.py [cost] [labels] [photographs] [table] [defences] [--clients 4] [--iterations 200]

cost: memory and CPU time of one iteration at 5, 50 and 500 local steps, each in a process of its own.
labels: errors of the label counts of 50 images of 100 classes, at E in {1, 5, 10} (design notes, 3.7).
photographs: 8 images, E=2, batches of 4, reshuffled: breaching 0.1.2 reaches 16.2 dB (design notes, 3.3).
table: the table of Dimitrov et al. 2022 on Omniglot by drawer and CIFAR-100 (needs ../shared/data), by method.
defences: the attack under client-level clipping and noise, beside the accuracy that the federation keeps.
One thread, CPU seconds.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from inversion_fixtures import MEAN, SHAPE, STD, make_batch, make_model, psnr
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedsim.attacks.fedavg import fedavg_clients
from fedsim.attacks.labels import count_labels
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.attacks.simulation import Simulator, Step
from fedsim.models import build_model
from fedsim.report.attack_comparison import ABOVE, mean_over_clients
from fedsim.scenario import CnnModel, FedAvgAttack
from fedsim.training import LocalWork

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
METHODS = {
    "order-invariant prior": {"prior_weight": (0.1, 1.0, 10.0)},
    "no prior": {"prior_weight": 0.0},
    "shared inputs": {"inputs": "shared"},
    "one step per epoch": {"simulation": "epochs"},
    "one gradient": {"simulation": "gradient"},
}


def local_training(model: nn.Module, x: Tensor, y: Tensor, work: LocalWork, seed: int) -> Observation:
    """A client in plain PyTorch that shuffles in every epoch."""
    trained, order = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD(trained.parameters(), lr=work.learning_rate)
    for _ in range(work.epochs):
        for batch in torch.randperm(len(x), generator=order).split(work.batch(len(x))):
            optimiser.zero_grad()
            F.cross_entropy(trained(x[batch]), y[batch]).backward()
            optimiser.step()
    after, before = dict(trained.named_parameters()), dict(model.named_parameters())
    return Observation(model, {n: (after[n] - before[n]).detach() for n in before}, "update", work, examples=len(x))


# --- cost -----------------------------------------------------------------------------------------------------------


def one_iteration(steps: int) -> dict[str, float]:
    """Peak memory (MB, above what it took to build everything) and CPU seconds of one gradient of the objective."""
    model = build_model(CnnModel(name="cnn", variant="averaging"), (1, 28, 28), 62, 0, kind="image")
    simulator = Simulator(model, LocalWork(kind="fedavg", learning_rate=0.004))
    batches = [
        Step(torch.rand(1, 5, 1, 28, 28), torch.randint(62, (1, 5)), torch.full((1, 5), 0.2)) for _ in range(steps)
    ]
    simulator.slope(batches[:1], lambda update: update.square().sum())
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    simulator.slope(batches, lambda update: update.square().sum())
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"megabytes": (after - before) / 1024, "seconds": time.process_time() - began}


def cost() -> None:
    """Memory grows no faster than the square root of the steps; time grows with the steps."""
    found = {}
    for steps in (5, 50, 500):
        command = [sys.executable, __file__, "--one-iteration", str(steps)]
        found[steps] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(
            f"cost steps={steps} peak={found[steps]['megabytes']:.0f} MB cpu={found[steps]['seconds']:.2f} s",
            flush=True,
        )
    for few, many in ((5, 50), (50, 500)):
        grew = found[many]["megabytes"] / max(found[few]["megabytes"], 1.0)
        print(f"cost memory from {few} to {many} steps: x {grew:.2f} (square root of that: {(many / few) ** 0.5:.2f})")


# --- quality --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Client:
    """A client's images, in the model's units, and what the server knows of them."""

    images: Tensor
    labels: Tensor
    observation: Observation
    knowledge: Knowledge
    scale: Callable[[Tensor], Tensor]
    """To pixels in [0, 1]."""


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
    methods = {"exact features": {"features": True}, **METHODS}
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


def clients_of(data: str, count: int, work: LocalWork, images: int = 50) -> list[Client]:
    """Clients of 50 images: drawers of Omniglot, or random images of CIFAR-100; the networks of the paper."""
    file = np.load(SHARED / {"omniglot": "omniglot_by_drawer.npz", "cifar100": "cifar100.npz"}[data])
    x = torch.from_numpy(file["x_train"]).float() / 255
    x = x.permute(0, 3, 1, 2) if x.dim() == 4 else x[:, None]
    y = torch.from_numpy(file["y_train"]).long()
    order = np.random.default_rng(0)
    if data == "omniglot":
        drawer = file["client_train"]
        groups = [np.flatnonzero(drawer == each)[:images] for each in np.unique(drawer)]
        groups = sorted(groups, key=len, reverse=True)[:count]
        size = min(len(group) for group in groups)
        groups = [group[:size] for group in groups]
    else:
        groups = [order.choice(len(x), images, replace=False) for _ in range(count)]
    classes, width = int(y.max()) + 1, 32 if data == "omniglot" else 64
    shape = tuple(x.shape[1:])
    model = build_model(CnnModel(name="cnn", variant="averaging", width=width), shape, classes, 0, kind="image")
    mean, std = (x.mean(), x.std())
    known = Knowledge("image", shape, classes, ((0 - mean) / std, (1 - mean) / std))
    clients = []
    for number, group in enumerate(groups):
        rows = torch.from_numpy(group)
        observation = local_training(model, (x[rows] - mean) / std, y[rows], work, number)
        clients.append(Client(x[rows], y[rows], observation, known, lambda z: z * std + mean))
    return clients


def decibels(found: Tensor, truth: Tensor) -> Tensor:
    """(n,): the PSNR of each original under the best assignment."""
    errors = torch.cdist(found.flatten(1).double(), truth.flatten(1).double()).square() / truth[0].numel()
    rows, columns = linear_sum_assignment(errors.numpy())
    return -10 * errors[rows, columns].clamp_min(1e-12).log10()


def table(clients: int, iterations: int, settings: Sequence[tuple[int, int]], data: Sequence[str]) -> None:
    """Images above 19 dB, mean PSNR and labels right, by method, with intervals over clients."""
    for name in data:
        for epochs, batch in settings:
            work = LocalWork("fedavg", learning_rate=0.004, epochs=epochs, batch_size=batch)
            everybody = clients_of(name, clients, work)
            for method, chosen in METHODS.items():
                attack = FedAvgAttack.model_validate(
                    {"name": "fedavg", "features": False, "exact_first": False, "iterations": iterations, **chosen}
                )
                began = time.process_time()
                found = fedavg_clients([([c.observation], c.knowledge) for c in everybody], attack)
                quality = [decibels(c.scale(f.inputs), c.images) for c, f in zip(everybody, found, strict=True)]
                above = mean_over_clients([float((q > ABOVE).double().mean()) for q in quality])
                mean = mean_over_clients([float(q.mean()) for q in quality])
                print(
                    f"table {name} E={epochs} B={batch} n={len(everybody[0].labels)} clients={len(everybody)}"
                    f" {method}: above {ABOVE:g} dB {above}, PSNR {mean}, {time.process_time() - began:.0f} s",
                    flush=True,
                )


def defences(folder: Path) -> None:
    """The scenario under client-level clipping and noise at three levels, beside the accuracy that training keeps."""
    import fedsim

    for noise in (0.0, 0.001, 0.01, 0.1):
        override = (
            [] if not noise else [f"defence.client_dp={{clipping_norm: 0.5, noise_multiplier: {noise}, delta: 1e-5}}"]
        )
        attacked = fedsim.run("fedavg-leakage", overrides=override, out=folder / f"attacked-{noise:g}")
        best = attacked.attacks.groupby("file")["right"].sum() if "right" in attacked.attacks else None
        longer = ["attacks=[]", "rounds=30", "cohort.size=40", "adversary.keep_rounds=0", *override]
        trained = fedsim.run("fedavg-leakage", overrides=longer, out=folder / f"trained-{noise:g}")
        claim = trained.claim.sentence() if trained.claim else "no privacy claim"
        print(f"defences noise={noise:g}: accuracy {trained.metrics['accuracy'].iloc[-1]:.3f}; {claim}")
        print(
            attacked.attacks.groupby("file")[["sentence"]].first().to_string() if best is None else best.to_string(),
            flush=True,
        )


def main() -> None:
    """Measure what is named, or everything that is quick."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["cost", "labels", "photographs"])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--settings", nargs="*", default=["10x5"], help="epochs x batch size")
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
        "table": lambda: table(chosen.clients, chosen.iterations, settings, chosen.data),
        "defences": lambda: defences(chosen.folder),
    }
    for name in chosen.what:
        work[name]()


if __name__ == "__main__":
    main()
