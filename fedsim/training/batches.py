# SPDX-License-Identifier: Apache-2.0
"""Which examples a client uses in which local step, and the index tensors of many clients side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Rows = NDArray[np.int64]


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

    def batch(self, examples: int) -> int:
        """B: the size of a batch of a client with `examples` rows (with Poisson batches: the expected size)."""
        return examples if self.batch_size is None else min(self.batch_size, examples)

    def local_steps(self, examples: int) -> int:
        """The number of local steps of a client with `examples` rows; none if it has no rows."""
        if examples == 0:
            return 0
        if self.kind == "fedsgd":
            return 1
        return self.steps or self.epochs * math.ceil(examples / self.batch(examples))


def batch_schedule(examples: int, work: LocalWork, rng: np.random.Generator) -> list[Rows]:
    """The positions 0..examples-1 in each local step of one client.

    Ordinary batches: every epoch is a new order (if `shuffle`), cut into batches; the last may be incomplete. Poisson
    batches: every row joins every step independently with probability q = min(1, B/n), so a batch may be empty.
    """
    steps = work.local_steps(examples)
    size = work.batch(examples)
    if work.example_dp is not None and work.example_dp.batches == "poisson":
        return [np.flatnonzero(rng.random(examples) < size / examples) for _ in range(steps)]
    schedule: list[Rows] = []
    while len(schedule) < steps:
        # FedSGD's batch is a random one even where local epochs keep the order of the rows
        order = rng.permutation(examples) if work.shuffle or work.kind == "fedsgd" else np.arange(examples)
        schedule.extend(order[first : first + size] for first in range(0, examples, size))
    return schedule[:steps]


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


@dataclass(frozen=True)
class BatchPlan:
    """The batches of K clients side by side, for T steps of B rows."""

    rows: Tensor
    """(T, K, B) int64: row numbers in the training set; where there is no example, some row of the same client."""
    present: Tensor
    """(T, K, B) float32: 1 where there is an example, 0 where there is not."""

    def shares(self, private: bool) -> Tensor:
        """(T, K, B): what an example's loss counts for: its share of the batch or, before clipping, 1; padding 0."""
        return self.present if private else self.present / self.present.sum(-1, keepdim=True).clamp_min_(1)

    @classmethod
    def of(cls, schedules: Sequence[Sequence[Rows]], members: Sequence[Rows], width: int) -> BatchPlan:
        """Lay the schedules of clients (which have at least one row each) side by side, padded to `width` rows."""
        steps = max(map(len, schedules), default=0)
        rows = np.empty((steps, len(schedules), width), dtype=np.int64)
        present = np.zeros(rows.shape, dtype=np.float32)
        for k, (schedule, own) in enumerate(zip(schedules, members, strict=True)):
            rows[:, k] = own[0]
            if not schedule:
                continue
            taken = own[np.concatenate(schedule)]
            if len(taken) == len(schedule) * width:  # all batches are full
                rows[: len(schedule), k] = taken.reshape(-1, width)
                present[: len(schedule), k] = 1
                continue
            lengths = np.fromiter(map(len, schedule), dtype=np.int64, count=len(schedule))
            step = np.repeat(np.arange(len(schedule)), lengths)
            place = np.arange(len(step)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            rows[step, k, place] = taken
            present[step, k, place] = 1
        return cls(torch.from_numpy(rows), torch.from_numpy(present))
