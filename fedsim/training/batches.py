# SPDX-License-Identifier: Apache-2.0
"""Which examples a client uses in which local step, and the index tensors of many clients side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
_COINS = 1 << 18  # that are thrown at a time


@dataclass(frozen=True)
class ExampleClipping:
    """Example-level DP-SGD (Abadi et al. 2016, algorithm 1): clip each example's gradient, add noise to the sum."""

    clipping_norm: float
    """C: no example's gradient, over all trainable parameters together, is longer than this."""
    noise_multiplier: float
    """σ: the standard deviation of the noise is σC in every coordinate of the sum."""
    batches: Literal["poisson", "shuffle"]
    """How a step's examples are chosen; an accountant must be told the same."""


@dataclass(frozen=True)
class LocalWork:
    """The local work of a client in one round: the same for every client of a cohort."""

    kind: Literal["fedavg", "fedsgd"]
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = 20
    shuffle: bool = True
    example_dp: ExampleClipping | None = None
    learning_rate_decay: float = 1.0
    """The learning rate of local step t is learning_rate · decay^t."""

    def batch(self, examples: int) -> int:
        """B: the size of a batch of a client with `examples` rows (with Poisson batches: the expected size)."""
        return examples if self.batch_size is None else min(self.batch_size, examples)

    def rate(self, step: int) -> float:
        """The learning rate of local step 0, 1, ..."""
        return self.learning_rate * self.learning_rate_decay**step

    def local_steps(self, examples: int) -> int:
        """The number of local steps of a client with `examples` rows; none if it has no rows."""
        if examples == 0:
            return 0
        if self.kind == "fedsgd":
            return 1
        return self.steps or self.epochs * math.ceil(examples / self.batch(examples))


def batch_schedule(examples: int, work: LocalWork, rng: np.random.Generator) -> list[Rows]:
    """The positions 0..examples-1 in each local step of one client.

    Ordinary batches: every epoch is a new order (if `shuffle`, and always under a claim for examples), cut into
    batches; the last may be incomplete. Poisson batches: every row joins every step independently with probability
    q = min(1, B/n), so a batch may be empty.
    """
    steps = work.local_steps(examples)
    size = work.batch(examples)
    if work.example_dp is not None and work.example_dp.batches == "poisson":
        return _poisson_batches(examples, steps, size, rng)
    # FedSGD's batch is a random one even where local epochs keep the order of the rows. A claim for examples counts one
    # batch of an epoch for one row. In the order of a file another row may shift those between, and many batches with
    # them; in a random order the others keep their batches, as all orders are as likely.
    draws_order = work.shuffle or work.kind == "fedsgd" or work.example_dp is not None
    schedule: list[Rows] = []
    while len(schedule) < steps:
        order = rng.permutation(examples) if draws_order else np.arange(examples)
        schedule.extend(order[first : first + size] for first in range(0, examples, size))
    return schedule[:steps]


def _poisson_batches(examples: int, steps: int, size: int, rng: np.random.Generator) -> list[Rows]:
    """Many steps at a time, which draws the same numbers as one after the other."""
    batches: list[Rows] = []
    while len(batches) < steps:
        count = min(steps - len(batches), max(1, _COINS // examples))
        step, rows = np.nonzero(rng.random((count, examples)) < size / examples)
        batches += np.split(rows, np.searchsorted(step, np.arange(1, count)))
    return batches


def padded_width(schedule: Sequence[Rows], batch: int) -> int:
    """How many rows a client's batches are padded to: a function of this client alone.

    The arithmetic of a replica depends, in its last bits, on the shape of its matrices. So this shape must not depend
    on who else is in the cohort; clients of equal width are computed together. Widths are rounded up to a few values,
    so that there are few groups.
    """
    longest = max(map(len, schedule), default=0)
    step = 1 if longest <= 4 else 4 if longest <= 64 else 2 ** (longest.bit_length() - 4)
    rounded = max(1, math.ceil(longest / step) * step)
    return min(rounded, batch) if longest <= batch else rounded


def poisson_width(schedule: Sequence[Rows], batch: int, examples: int) -> int:
    """The same for Poisson batches, which are all of different sizes: two widths that most clients share.

    The sizes have mean B and standard deviation s = √(B(1 − B/n)); the largest of T is around B + s√(2 ln T).
    """
    longest = max(map(len, schedule), default=0)
    deviation = math.sqrt(batch * (1 - batch / examples))
    usual = math.sqrt(2 * math.log(max(2, len(schedule))))
    common = (min(examples, 4 * math.ceil((batch + deviation * z) / 4)) for z in (usual, usual + 1.5))
    return next((width for width in common if longest <= width), padded_width(schedule, batch))
