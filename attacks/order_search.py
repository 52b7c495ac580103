# SPDX-License-Identifier: Apache-2.0
"""The order of a client's batches, found together with its examples: in turns, one given the other.

The order-invariant prior (Dimitrov et al. 2022) gives up on the order. But an update depends on it, if only in the
second order of the learning rate, and so it can be searched: given a guess of the examples, an order that explains the
update better is kept, epoch by epoch; given the order, the guess is improved with one set of inputs for all epochs,
which has fewer unknowns than one for each. A simulation without a gradient costs a third of one with it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsim.attacks.fedavg_problem import Problem, Target, mismatch, reconstruct
from fedsim.randomness import stream

_PROPOSALS = 8
_SWEEPS = 3


def with_orders(problem: Problem, start: Tensor, *, turns: int, rate: float, seed: int) -> tuple[Tensor, Tensor]:
    """From guesses of images (R, n, *shape) to better ones (R, n, *shape), and what they leave unexplained (R,).

    The problem is one of shared inputs: one set for all epochs.
    """
    guess = start
    for turn in range(turns + 1):
        found, _ = reconstruct(problem, guess, rate=rate if turn == 0 else 0.4 * rate)
        guess, targets = found[:, 0], []
        for number, target in enumerate(problem.targets):
            random = stream(seed, "attack-order-search", turn, number)
            for _ in range(_SWEEPS):
                target = better_orders(target, guess, random)
            targets.append(target)
        problem = replace(problem, targets=targets)
    return guess, torch.stack([mismatch(target, guess) for target in problem.targets]).mean(dim=0)


def better_orders(target: Target, guess: Tensor, random: np.random.Generator) -> Target:
    """The target with orders under which the guess (R, n, ...) explains the updates at least as well as before.

    In every epoch the examples are moved; then the epochs are moved as a whole.
    """
    for epoch in random.permutation(target.epochs):
        proposed = target.orders[:, None].repeat(1, _PROPOSALS, 1, 1)
        moves = torch.stack([_move(target, number, random) for number in range(_PROPOSALS)])
        proposed[:, :, epoch] = target.orders[:, epoch][:, moves]
        target = _best(target, guess, proposed)
    epochs = np.stack([np.arange(target.epochs), *(random.permutation(target.epochs) for _ in range(_PROPOSALS - 1))])
    return _best(target, guess, target.orders[:, torch.from_numpy(epochs)])


def _best(target: Target, guess: Tensor, proposed: Tensor) -> Target:
    """The target with the best of the proposed orders (R, P, E, n), by replica."""
    replicas, count = proposed.shape[:2]
    many = replace(
        target,
        orders=proposed.flatten(0, 1),
        updates=target.updates.repeat_interleave(count, dim=0),
        labels=target.labels.repeat_interleave(count, dim=0),
    )
    losses = mismatch(many, guess.repeat_interleave(count, dim=0)).view(replicas, count)
    return replace(target, orders=proposed[torch.arange(replicas), losses.argmin(dim=1)])


def _move(target: Target, number: int, random: np.random.Generator) -> Tensor:
    """(n,): places in a new order. The first proposal is to stay, half swap two examples, the others shuffle an epoch.

    A swap may change who is in a short batch: at a large rate the last layer says it only roughly.
    """
    places = np.arange(target.examples)
    full = target.examples - target.examples % target.batch
    if number > _PROPOSALS // 2:
        places[:full] = random.permutation(full)
    elif number > 0:
        one, other = random.choice(target.examples, 2, replace=False)
        places[[one, other]] = places[[other, one]]
    return torch.from_numpy(places)
