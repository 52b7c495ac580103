# SPDX-License-Identifier: Apache-2.0
"""The objective of the reconstruction from FedAvg updates, for R replicas at once.

    d(Θ̃(x̃), Θ) + α · 1/E² Σ_{e1,e2} R(g(x̃_e1), g(x̃_e2)) + β TV(x̃)        (Dimitrov et al. 2022, equations 5 and 6)

Replicas are clients with an update each, starts on one of them, weights α of the prior that are compared, or clients of
whom only the mean is known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedsim.attacks.descent import Budget, Value, adam
from fedsim.attacks.epochs import epoch_prior
from fedsim.attacks.priors import total_variation
from fedsim.attacks.relaxation import Relaxation
from fedsim.attacks.simulation import Simulator, Step
from fedsim.randomness import stream
from fedsim.scenario import FedAvgAttack

ORDERS = 3  # random orders of the batches over which a reconstruction is judged


@dataclass(frozen=True, eq=False)
class Target:
    """The updates of one round that R replicas have to reproduce."""

    simulator: Simulator
    updates: Tensor
    """(R, P); (1, P) for the mean of R clients."""
    labels: Tensor
    """(R, n): the labels of the guessed examples."""
    orders: Tensor
    """(R, E, n): the order in which the guessed examples are shown in each epoch."""
    batch: int

    @property
    def epochs(self) -> int:
        """The number E of local epochs."""
        return self.orders.shape[1]

    @property
    def examples(self) -> int:
        """The number n of examples that a client has."""
        return self.labels.shape[1]

    @property
    def summed(self) -> bool:
        """Whether only the mean of the replicas' updates was seen."""
        return len(self.updates) < len(self.labels)

    def of(self, rows: Tensor) -> Target:
        """The target of some of the replicas; those of a sum stay together."""
        if self.summed:
            return self
        return replace(self, updates=self.updates[rows], labels=self.labels[rows], orders=self.orders[rows])


@dataclass(frozen=True, eq=False)
class Problem:
    """R replicas over one or several rounds: the later rounds of a client are only more epochs."""

    targets: Sequence[Target]
    relaxation: Relaxation
    settings: FedAvgAttack
    prior_weights: Tensor
    """(R,)"""
    variants: int = 1
    """How many replicas there are of each client: starts, for each weight of the prior."""

    @property
    def copies(self) -> int:
        """How many times the examples are guessed: once, or anew in every epoch of every round."""
        return sum(target.epochs for target in self.targets) if self.settings.inputs == "free" else 1

    def of(self, rows: Tensor) -> Problem:
        """The same for some of the replicas."""
        return replace(self, targets=[t.of(rows) for t in self.targets], prior_weights=self.prior_weights[rows])


def reconstruct(problem: Problem, start: Tensor, *, rate: float) -> tuple[Tensor, Tensor]:
    """From guesses z (R, n, *shape), the same in all epochs, to decoded inputs (R, E, n, ...) and their losses (R,).

    Guesses (R, E, n, *shape) differ by epoch.
    """
    settings, relaxation = problem.settings, problem.relaxation
    if start.dim() == relaxation.middle.dim() + 2:
        start = start[:, None].expand(-1, problem.copies, *start.shape[1:])
    shape = start.shape[1:]
    found = adam(
        lambda points, rows, _: _value(problem.of(rows), points.view(-1, *shape)),
        start.flatten(1),
        Budget(
            settings.iterations,
            patience=settings.iterations,
            deadline=math.inf if settings.seconds is None else time.monotonic() + settings.seconds,
        ),
        rate=rate,
        signed=settings.optimizer == "signed",
        project=lambda points: relaxation.feasible(points.view(-1, *shape)).flatten(1),
    )
    return relaxation.decode(found.points.view(-1, *shape)), found.scores


def _value(problem: Problem, guess: Tensor) -> Value:
    """The mean matching losses of the replicas (R, E, n, *shape), and the slope of the whole objective."""
    free = guess.detach().requires_grad_()
    inputs = problem.relaxation.decode(free)
    losses, slope = _match(problem, inputs.detach())
    prior = _priors(problem, inputs)
    if prior.requires_grad:
        (of_prior,) = torch.autograd.grad(prior, inputs, retain_graph=inputs is not free)
        slope = slope + of_prior
    if inputs is not free:
        (slope,) = torch.autograd.grad(inputs, free, slope)
    return Value(losses, slope.flatten(1))


def _match(problem: Problem, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The matching losses (R,) of inputs (R, E, n, ...), and their slope with respect to these."""
    total, slope, first = torch.zeros(len(inputs)), torch.zeros_like(inputs), 0
    settings = problem.settings
    for target in problem.targets:
        losses: list[Tensor] = []

        def distance(update: Tensor, target: Target = target, losses: list[Tensor] = losses) -> Tensor:
            losses.append(_distance(update, target, settings.distance) / len(problem.targets))
            return losses[-1].sum()

        epochs = slice(first, first + target.epochs) if settings.inputs == "free" else slice(0, 1)
        steps = _steps(target, inputs[:, epochs])
        _, slopes = target.simulator.slope(steps, distance, last=settings.unroll, segment=settings.segment)
        _scatter(target, slopes, slope[:, epochs])
        total += losses[-1].detach()
        first += target.epochs
    return total, slope


def _distance(update: Tensor, target: Target, kind: str) -> Tensor:
    """How far the simulated updates (R, P) are from those that were received, by replica; of a sum, of their mean."""
    if target.summed:
        update = update.mean(dim=0, keepdim=True)
    if kind == "cosine":
        return 1 - cosine_similarity(update, target.updates, dim=1)
    sizes = [update.shape[1]] if kind == "whole" else [s.numel() for s in target.simulator.shapes]
    pairs = zip(update.split(sizes, dim=1), target.updates.split(sizes, dim=1), strict=True)
    relative = [(a - b).square().sum(dim=1) / b.square().sum(dim=1).clamp_min(1e-20) for a, b in pairs]
    return torch.stack(relative).mean(dim=0)


def _steps(target: Target, inputs: Tensor) -> list[Step]:
    """The batches of all epochs, each of `batch` examples, the last of an epoch perhaps incomplete."""
    steps, rows = [], torch.arange(len(inputs))[:, None]
    for epoch, places in _batches(target):
        y = target.labels[rows, places]
        x = inputs[rows, min(epoch, inputs.shape[1] - 1), places]
        steps.append(Step(x, y, torch.full(y.shape, 1 / y.shape[1])))
    return steps


def _batches(target: Target) -> list[tuple[int, Tensor]]:
    """For each local step its epoch and the places (R, B) of the examples that it sees."""
    orders = enumerate(target.orders.unbind(dim=1))
    return [(epoch, places) for epoch, order in orders for places in order.split(target.batch, dim=1)]


def _scatter(target: Target, slopes: Sequence[Tensor], gradient: Tensor) -> None:
    """Add the gradients of all steps' inputs in the places that the inputs came from."""
    rows = torch.arange(len(gradient))[:, None]
    for (epoch, places), slope in zip(_batches(target), slopes, strict=True):
        gradient[rows, min(epoch, gradient.shape[1] - 1), places] += slope


def _priors(problem: Problem, inputs: Tensor) -> Tensor:
    settings, total = problem.settings, torch.zeros(())
    if problem.prior_weights.any() and inputs.shape[1] > 1:
        apart = epoch_prior(inputs.flatten(3), settings.prior, settings.prior_distance)
        total = total + (problem.prior_weights * apart).sum()
    if settings.total_variation and inputs.dim() == 6:
        total = total + settings.total_variation * total_variation(inputs.flatten(1, 2)).sum()
    return total


def unexplained(problem: Problem, pooled: Tensor, *, seed: int) -> Tensor:
    """(R,): ||Θ̃ - Θ||² / ||Θ||² of one set of examples (R, n, ...) for all epochs, mean over random orders.

    What is free in every epoch can be fitted to anything. This judges the examples that an attack answers with, under
    orders that it has not been fitted to, and so compares weights of the prior, starts and numbers of epochs.
    """
    losses = []
    for turn in range(ORDERS):
        for number, target in enumerate(problem.targets):
            random = stream(seed, "attack-order", turn, number)
            orders = torch.stack([order[:, _shuffled(target, random)] for order in target.orders.unbind(1)], dim=1)
            losses.append(mismatch(replace(target, orders=orders), pooled))
    return torch.stack(losses).mean(dim=0)


def mismatch(target: Target, examples: Tensor) -> Tensor:
    """(R,): ||Θ̃ - Θ||² / ||Θ||² of one set of examples (R, n, ...) for all epochs, in the target's orders."""
    return _distance(target.simulator.update(_steps(target, examples[:, None])), target, "whole")


def _shuffled(target: Target, random: np.random.Generator) -> Tensor:
    """(n,): a random order of an epoch that leaves those of the short batch there: they count for more."""
    full = target.examples - target.examples % target.batch
    return torch.from_numpy(np.concatenate([random.permutation(full), np.arange(full, target.examples)]))
