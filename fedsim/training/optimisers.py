# SPDX-License-Identifier: Apache-2.0
"""SGD and Adam on K replicas at once: the arithmetic of `torch.optim`, on the rows of one buffer."""

from __future__ import annotations

import math
from typing import Protocol

from torch import Tensor

from fedsim.training.batches import LocalWork
from fedsim.training.layout import replica_rows


class Optimiser(Protocol):
    """Takes a step on the first rows of the weights that it was made for."""

    def step(self, gradient: Tensor) -> None:
        """Move the first len(gradient) replicas along `gradient`, which is overwritten."""
        ...


class Sgd:
    """`torch.optim.SGD`: v ← μv + (g + λw), w ← w − ηv (Sutskever et al. 2013, without dampening)."""

    def __init__(self, weights: Tensor, work: LocalWork) -> None:
        self._weights, self._work = weights, work
        self._velocity = replica_rows(*weights.shape).zero_() if work.momentum else None
        self._steps = 0

    def step(self, gradient: Tensor) -> None:
        """Move the first len(gradient) replicas along `gradient`, which is overwritten."""
        count, work = len(gradient), self._work
        weights = self._weights[:count]
        if work.weight_decay:
            gradient.add_(weights, alpha=work.weight_decay)
        if self._velocity is not None:
            gradient = self._velocity[:count].mul_(work.momentum).add_(gradient)
        weights.add_(gradient, alpha=-work.rate(self._steps))
        self._steps += 1


class Adam:
    """`torch.optim.Adam` with its defaults: β = (0.9, 0.999), ε = 1e-8 (Kingma and Ba 2015, algorithm 1)."""

    def __init__(self, weights: Tensor, work: LocalWork) -> None:
        self._weights, self._work = weights, work
        self._first = replica_rows(*weights.shape).zero_()
        self._second = replica_rows(*weights.shape).zero_()
        self._steps = 0

    def step(self, gradient: Tensor) -> None:
        """Move the first len(gradient) replicas along `gradient`, which is overwritten."""
        count, work = len(gradient), self._work
        weights, first, second = self._weights[:count], self._first[:count], self._second[:count]
        self._steps += 1
        if work.weight_decay:
            gradient.add_(weights, alpha=work.weight_decay)
        first.lerp_(gradient, 1 - 0.9)
        second.mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
        root = math.sqrt(1 - 0.999**self._steps)
        denominator = second.sqrt().div_(root).add_(1e-8)
        weights.addcdiv_(first, denominator, value=-work.rate(self._steps - 1) / (1 - 0.9**self._steps))


def optimiser_for(weights: Tensor, work: LocalWork) -> Optimiser:
    """The client's optimiser, with a state that starts anew, on the trainable part of the replicas' rows."""
    return Adam(weights, work) if work.optimizer == "adam" else Sgd(weights, work)


def is_fused(work: LocalWork) -> bool:
    """Whether a step is w ← w − ηg and nothing else, so that it is fused into the products that give g.

    Not so with noise: added to the weights before the gradient it would be rounded to their precision, in the worst
    case away.
    """
    plain = work.optimizer == "sgd" and work.learning_rate_decay == 1 and not work.momentum and not work.weight_decay
    return plain and work.kind == "fedavg" and work.example_dp is None
