# SPDX-License-Identifier: Apache-2.0
"""What a search for the examples of FedAvg clients is given: their updates, the local work, the space, the start."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.attacks.fedavg_problem import Problem, Target
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.attacks.relaxation import Relaxation, relaxed_images, relaxed_rows, relaxed_windows
from fedsim.attacks.short_batches import epoch_orders
from fedsim.attacks.simulation import Simulator
from fedsim.attacks.surrogate import surrogate_guess
from fedsim.errors import AttackError
from fedsim.randomness import stream
from fedsim.scenario import FedAvgAttack
from fedsim.training import LocalWork
from fedsim.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Case:
    """One client (or one sum of clients): its rounds, and where the search for its examples begins."""

    rounds: Sequence[Observation]
    knowledge: Knowledge
    labels: Tensor
    """(n,), in an arbitrary order."""
    near: Tensor | None = None
    """(n, *input_shape): inputs from features that determine them."""
    notes: tuple[str, ...] = ()

    @property
    def group(self) -> tuple[object, ...]:
        """Cases of one group are replicas of one computation."""
        first = self.rounds[0]
        sent = tuple(_fingerprint(each) for each in self.rounds)
        return (*sent, first.clients > 1 and id(self), len(self.labels), first.work, first.kind, self.near is None)


def _fingerprint(observation: Observation) -> bytes:
    """The same for clients that were sent the same weights."""
    found = hashlib.sha256()
    for weight in observation.weights.values():
        found.update(weight.contiguous().numpy().tobytes())
    return found.digest()


def round_target(
    observations: Sequence[Observation], cases: Sequence[Case], settings: FedAvgAttack, copies: int
) -> Target:
    """The updates of one round with the local work that is simulated, which the baselines take for less than it was."""
    first = observations[0]
    work, clients = first.work, first.clients
    n = len(cases[0].labels) // clients
    labels = torch.cat([case.labels[: n * clients].view(clients, n) for case in cases])
    batch = work.batch(n)
    in_epoch = math.ceil(n / batch)
    epochs = work.epochs if work.steps is None else math.ceil(work.steps / in_epoch)
    rate = work.learning_rate
    if first.kind == "gradient":
        work, epochs, batch, rate = LocalWork(kind="fedavg"), 1, n, 1.0
    elif settings.simulation == "epochs":
        batch, rate = n, rate * in_epoch
    elif settings.simulation == "gradient":
        batch, rate, epochs = n, rate * in_epoch * epochs, 1
    simulated = replace(work, kind="fedavg", learning_rate=rate, epochs=epochs, steps=None, batch_size=batch)
    sign = -1.0 if first.kind == "gradient" else 1.0
    updates = torch.stack(
        [torch.cat([sign * each.update[name].flatten() for name in each.weights]) for each in observations]
    )
    known = [each for each in zip(observations, cases, strict=True) for _ in range(each[0].clients)]
    orders = torch.stack(
        [
            epoch_orders(observation, case.knowledge, of, epochs=epochs, batch=batch)
            for (observation, case), of in zip(known, labels, strict=True)
        ]
    )
    if clients == 1:
        updates, labels, orders = (each.repeat_interleave(copies, dim=0) for each in (updates, labels, orders))
    text = cases[0].knowledge.kind == "text"
    return Target(Simulator(first.model, simulated, text=text), updates, labels, orders, batch)


def search_space(cases: Sequence[Case], settings: FedAvgAttack) -> Relaxation:
    """The space in which the examples of these clients are looked for."""
    first, knowledge = cases[0].rounds[0], cases[0].knowledge
    if knowledge.kind == "image":
        return relaxed_images(knowledge, settings.start_spread)
    entries = [each.update[name] for case in cases for each in case.rounds for name in list(each.weights)[:1]]
    if knowledge.kind == "table":
        whole = entries[0].dim() == 2 and entries[0].shape[1] == math.prod(knowledge.input_shape)
        present = torch.stack(entries).ne(0).any(0).any(0) if whole else torch.ones(knowledge.input_shape).bool()
        return relaxed_rows(knowledge, present)
    if not isinstance(first.model, Transformer):
        raise AttackError(f"attack fedavg reads text through the model transformer, not {type(first.model).__name__}")
    rows = torch.stack([case.rounds[0].update["tokens.weight"] for case in cases]).ne(0).any(2).any(0)
    return relaxed_windows(knowledge.input_shape[0], knowledge.classes, rows.nonzero().squeeze(1))


def starting_points(problem: Problem, near: Tensor | None, seed: int) -> Tensor:
    """(R, n, *shape): from features; else noise around the middle, drawn nearer by the surrogate model if asked for."""
    first, relaxation, settings = problem.targets[0], problem.relaxation, problem.settings
    replicas = len(first.labels)
    if near is not None:
        return relaxation.feasible(near).repeat_interleave(replicas // len(near), dim=0)
    generator = torch.Generator().manual_seed(int(stream(seed, "attack-start").integers(2**63)))
    # Every client and every weight of the prior has the same starts; the clients of a sum must not begin alike.
    starts = replicas if first.summed else settings.restarts
    noise = torch.randn(starts, first.examples, *relaxation.middle.shape, generator=generator)
    noise = noise.repeat(replicas // starts, *(1 for _ in noise.shape[1:]))
    guess = relaxation.feasible(relaxation.middle + relaxation.spread * noise)
    if not settings.surrogate or first.summed:
        return guess
    # The weights of the prior do not enter yet: what replicas have in common is computed once.
    once = torch.arange(replicas).view(-1, problem.variants)[:, :starts]
    found = surrogate_guess(
        first.simulator,
        first.updates[once.flatten()],
        first.labels[once.flatten()],
        guess[once.flatten()],
        relaxation,
        settings.surrogate,
        settings.learning_rate,
        settings.total_variation,
    ).view(*once.shape, *guess.shape[1:])
    return found.repeat(1, problem.variants // starts, *(1 for _ in guess.shape[1:])).view_as(guess)
