# SPDX-License-Identifier: Apache-2.0
"""How much an update depends on the order of the client's data, and what the order-invariant prior is worth there.

The order enters an update in the second order of the learning rate r only: two orders differ by about r² times a
commutator of gradients and Hessians where the update itself is about r times a gradient, so that the squared relative
difference grows with r². Where it is below what a reconstruction leaves unexplained, one set of inputs for all epochs
is as good a model of the client as any, and inputs that are free in every epoch are only more unknowns.
"""

from __future__ import annotations

import time

import torch
from fedavg_clients import SHARED, Client, clients_of, decibels, digits_clients

from fedsim.attacks.fedavg import fedavg_clients
from fedsim.attacks.simulation import Simulator, Step
from fedsim.report.attack_comparison import ABOVE, mean_over_clients
from fedsim.scenario import FedAvgAttack
from fedsim.training import LocalWork

ORDERS = 8
RATES = (0.004, 0.02, 0.1, 0.3, 1.0)
PAPER = (*(("omniglot", epochs, batch) for batch in (1, 5, 10) for epochs in (1, 5, 10)), ("cifar100", 10, 5))
"""Data, epochs and batch sizes of the table of the paper."""
TURNS = 3
COMPARED = (0.02, 0.1, 0.3)
PRIOR: dict[str, object] = {"prior_weight": (0.1, 1.0, 10.0)}
FREE: dict[str, object] = {"prior_weight": 0.0}
METHODS = {"shared inputs": {"inputs": "shared"}, "no prior": FREE, "order-invariant prior": PRIOR}
OWN = {"no prior": FREE, "order-invariant prior": PRIOR}
"""Methods that may begin every epoch with noise of its own, as in the paper; else all begin with the same."""


def order(clients: int, iterations: int) -> None:
    """The effect of the order on the true update by rate, epochs and batch size; then the methods beside each other."""
    for epochs, batch in ((5, 2), (10, 2), (5, 1)):
        for rate in RATES:
            work = LocalWork("fedavg", learning_rate=rate, epochs=epochs, batch_size=batch)
            apart = mean_over_clients([between_orders(c) for c in digits_clients(clients, work, 4)])
            print(f"order E={epochs} B={batch} n=4 clients={clients} rate={rate:g}: {apart}", flush=True)
    for name, epochs, batch in PAPER if SHARED.exists() else ():
        work = LocalWork("fedavg", learning_rate=0.004, epochs=epochs, batch_size=batch)
        apart = mean_over_clients([between_orders(c) for c in clients_of(name, 2, work)])
        print(f"order {name} E={epochs} B={batch} clients=2 rate=0.004: {apart}", flush=True)
    for rate in COMPARED:
        work = LocalWork("fedavg", learning_rate=rate, epochs=5, batch_size=2)
        everybody = digits_clients(clients, work, 4)
        for method, chosen in METHODS.items():
            compare(f"order rate={rate:g} {method}", everybody, iterations, chosen)
        for method, chosen in OWN.items():
            compare(f"order rate={rate:g} {method}, own starts", everybody, iterations, chosen, starts=work.epochs)
        compare(f"order rate={rate:g} order searched", everybody, iterations, METHODS["shared inputs"], turns=TURNS)
        # The control: a client that never shuffles, and a server that knows its order.
        fixed = digits_clients(clients, work, 4, shuffles=False)
        compare(f"order rate={rate:g} known order", fixed, iterations, {"inputs": "shared"}, starts=1)


def between_orders(client: Client) -> float:
    """E ||u - u'||² / E ||u||² for the client's own data, u and u' in independent random orders."""
    x, y, work = client.inputs, client.labels, client.observation.work
    generator, steps = torch.Generator().manual_seed(0), []
    for _ in range(work.epochs):
        places = torch.stack([torch.randperm(len(x), generator=generator) for _ in range(ORDERS)])
        for batch in places.split(work.batch(len(x)), dim=1):
            steps.append(Step(x[batch], y[batch], torch.full(batch.shape, 1 / batch.shape[1])))
    updates = Simulator(client.observation.model, work).update(steps)
    return float(2 * updates.var(dim=0).sum() / updates.square().sum(dim=1).mean())


def compare(
    title: str, clients: list[Client], iterations: int, chosen: dict[str, object], *, starts: int = 0, turns: int = 0
) -> None:
    """What one method finds of all clients; with `starts`, from so many noises, in the order of the true labels.

    Each of `turns` of searching the order is followed by as many iterations again.
    """
    near, rate = None, 0.05
    if starts:  # from a start that is given the attack takes a tenth of its step
        noise = torch.randn(starts, *clients[0].images.shape, generator=torch.Generator().manual_seed(1))
        near, rate = [(0.5 + 0.1 * noise).clamp(0, 1)] * len(clients), 0.5
    settings = FedAvgAttack.model_validate(
        {
            "name": "fedavg", "features": False, "exact_first": False, "iterations": iterations, "segment": 20,
            "learning_rate": rate, "total_variation": 1e-4, "order_turns": turns, **chosen,
        }
    )  # fmt: skip
    began = time.process_time()
    found = fedavg_clients([([c.observation], c.knowledge) for c in clients], settings, near=near)
    quality = [decibels(f.inputs, c.images) for f, c in zip(found, clients, strict=True)]
    above = mean_over_clients([float((q > ABOVE).double().mean()) for q in quality])
    psnr = mean_over_clients([float(q.mean()) for q in quality])
    loss = mean_over_clients([f.loss for f in found])
    print(
        f"{title}: above {ABOVE:g} dB {above}, PSNR {psnr}, unexplained {loss}, clients={len(clients)},"
        f" {time.process_time() - began:.0f} s",
        flush=True,
    )
