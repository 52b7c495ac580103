# SPDX-License-Identifier: Apache-2.0
"""The table of Dimitrov et al. 2022 ("Data Leakage in Federated Averaging", table 1): what each method reconstructs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from fedavg_clients import Client, clients_of, decibels
from torch import Tensor

from fedsim.attacks.fedavg import fedavg_clients
from fedsim.attacks.observation import Reconstruction
from fedsim.report.attack_comparison import ABOVE, mean_over_clients
from fedsim.scenario import FedAvgAttack
from fedsim.training import LocalWork

METHODS: dict[str, dict[str, object]] = {
    "order-invariant prior": {"prior_weight": (0.1, 1.0, 10.0)},
    "no prior": {"prior_weight": 0.0},
    "shared inputs": {"inputs": "shared"},
    "one step per epoch": {"simulation": "epochs", "inputs": "shared"},
    "one gradient": {"simulation": "gradient", "inputs": "shared"},
}
ALONE = "surrogate alone"
FROM_NOISE: dict[str, object] = {"total_variation": 0.03, "learning_rate": 3.0}
"""Of ten settings the best for one step per epoch, 40 iterations, on a drawer that is not in the table."""


@dataclass(frozen=True)
class Quality:
    """What a method found of one client."""

    above: float
    """The share of the images above 19 dB."""
    psnr: float
    """dB, mean over the images."""
    loss: float
    """||simulated - received||² / ||received||² of the answer, mean over random orders."""
    seconds: float
    """CPU seconds, without those of the common start."""


def table(
    which: range,
    iterations: int,
    surrogate: int,
    settings: Sequence[tuple[int, int]],
    data: Sequence[str],
    weights: Sequence[float],
    methods: Sequence[str],
) -> None:
    """Images above 19 dB and mean PSNR by method, a line for each client as it is done, then means with intervals.

    All methods begin with the images of the surrogate model (Zhu et al. 2023), which are a line of their own, and so is
    one gradient from noise; or, if that has no iterations, with noise as in the paper.
    """
    for name in data:
        for epochs, batch in settings:
            work = LocalWork("fedavg", learning_rate=0.004, epochs=epochs, batch_size=batch)
            title = f"table {name} E={epochs} B={batch}"
            found: dict[str, list[Quality]] = {}
            everybody = clients_of(name, which.stop, work)
            for number in which:
                client = everybody[number]
                for method, quality in _one_client(client, iterations, surrogate, weights, methods):
                    found.setdefault(method, []).append(quality)
                    print(f"{title} n={len(client.labels)} client {number} {method}: {quality}", flush=True)
            for method, each in found.items():
                _print_means(f"{title} clients={len(each)} {method}", each)


def _print_means(title: str, each: Sequence[Quality]) -> None:
    above, psnr, loss = (mean_over_clients([getattr(q, key) for q in each]) for key in ("above", "psnr", "loss"))
    seconds = sum(q.seconds for q in each) / len(each)
    print(f"{title}: above {ABOVE:g} dB {above}, PSNR {psnr}, unexplained {loss}, {seconds:.0f} s a client", flush=True)


def _one_client(
    client: Client, iterations: int, surrogate: int, weights: Sequence[float], methods: Sequence[str]
) -> Iterator[tuple[str, Quality]]:
    """(method, Quality) of the start and of these methods, as they are done."""
    # From a start that is near the attack takes a tenth of its step: with 0.3 it is 0.03 of a standard deviation.
    start, further = None, FROM_NOISE if surrogate == 0 else {"learning_rate": 0.3}
    if surrogate:
        answer, quality = _attempt(client, None, 1, {"simulation": "gradient", "surrogate": surrogate})
        client = replace(client, knowledge=replace(client.knowledge, labels=answer.labels))
        start = answer.inputs
        yield ALONE, quality
        yield "one gradient from noise", _attempt(client, None, surrogate, METHODS["one gradient"])[1]
    for method in methods:
        chosen = METHODS[method]
        if chosen.get("prior_weight"):
            chosen = {"prior_weight": tuple(weights)}
        copies = 1 if chosen.get("inputs") == "shared" else client.observation.work.epochs
        begun = noise(client, copies) if start is None else start
        yield method, _attempt(client, begun, iterations, {**chosen, **further})[1]


def noise(client: Client, copies: int) -> Tensor:
    """(copies, n, *shape): a first guess as in the paper, N(0, 1) for standardised images, another in every epoch."""
    return torch.randn(copies, *client.images.shape, generator=torch.Generator().manual_seed(1))


def _attempt(
    client: Client, start: Tensor | None, iterations: int, chosen: dict[str, object]
) -> tuple[Reconstruction, Quality]:
    settings = FedAvgAttack.model_validate(
        # The graph of 100 local steps is held at once: 3 GB instead of computing everything twice.
        {"name": "fedavg", "features": False, "exact_first": False, "iterations": iterations, "segment": 100, **chosen}
    )
    began = time.process_time()
    near = None if start is None else [start]
    (found,) = fedavg_clients([([client.observation], client.knowledge)], settings, near=near)
    quality = decibels(client.scale(found.inputs), client.images)
    seconds = time.process_time() - began
    return found, Quality(float((quality > ABOVE).double().mean()), float(quality.mean()), found.loss, seconds)
