# SPDX-License-Identifier: Apache-2.0
"""The batches of many clients, laid out for the model: padded to one width, or packed without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedsim.training.batches import Rows
from fedsim.training.layers import Batch


class Examples(NamedTuple):
    """The examples of one step of all clients."""

    rows: Tensor
    """(n,) int64: row numbers in the training set."""
    labels: Tensor
    """(n, ..., 1) int64."""
    shares: Tensor
    """What the loss of each counts for; broadcasts with labels."""


class Batches(Protocol):
    """The batches of K clients in all their steps, and the losses that are noted for them."""

    def lay(self, step: int, count: int, batch: Batch) -> Examples:
        """The examples of the first `count` clients; the model is told how they lie."""
        ...

    def note(self, step: int, log_likelihoods: Tensor) -> None:
        """Note the log-likelihoods of the labels of a step, (n, ..., 1)."""
        ...

    def divided(self, factors: Tensor, sizes: Tensor) -> Tensor:
        """The factors of examples divided by their clients' sizes (K,); 0 for padding."""
        ...

    def losses(self, clients: slice) -> list[float]:
        """For each of these clients, the sum of the losses of its examples."""
        ...


class PaddedBatches:
    """Batches of the same width: one product for all replicas."""

    def __init__(
        self, schedules: Sequence[Sequence[Rows]], members: Sequence[Rows], y: Tensor, width: int, guard: int,
        private: bool,
    ) -> None:  # fmt: skip
        self._width, self._guard = width, guard
        self._plan = BatchPlan.of(schedules, members, width)
        self._labels = y[self._plan.rows.flatten(1)].unsqueeze(-1)
        self._log_likelihoods = torch.zeros(self._labels.shape)
        shares = self._plan.shares(private) / self._labels[0, 0].numel()
        self._shares = shares.view(self._labels.shape[:2] + (1,) * (self._labels.dim() - 2))

    def lay(self, step: int, count: int, batch: Batch) -> Examples:
        """The examples of the first `count` clients, replica after replica."""
        batch.resize(count, self._width, self._guard)
        batch.present = self._present = self._plan.present[step, :count]
        used = count * self._width
        rows = self._plan.rows[step, :count].view(-1)
        return Examples(rows, self._labels[step, :used], self._shares[step, :used])

    def note(self, step: int, log_likelihoods: Tensor) -> None:
        """Note them."""
        self._log_likelihoods[step, : len(log_likelihoods)] = log_likelihoods

    def divided(self, factors: Tensor, sizes: Tensor) -> Tensor:
        """(K, B)."""
        return factors.mul_(self._present).div_(sizes.unsqueeze(1))

    def losses(self, clients: slice) -> list[float]:
        """The mean over a sequence's tokens, summed over examples."""
        losses = -self._log_likelihoods.unflatten(1, (-1, self._width))[:, clients].flatten(3).mean(3)
        sums: list[float] = (losses * self._plan.present[:, clients]).sum((0, 2), dtype=torch.float64).tolist()
        return sums


class PackedBatches:
    """Batches of any sizes, one after the other: worth it where a replica's own work is large (Poisson batches)."""

    def __init__(self, schedules: Sequence[Sequence[Rows]], members: Sequence[Rows], y: Tensor, guard: int) -> None:
        self._schedules, self._members, self._y, self._guard = schedules, members, y, guard
        self._losses = torch.zeros(len(members), dtype=torch.float64)
        self._share = torch.tensor(1 / y[0].numel())

    def lay(self, step: int, count: int, batch: Batch) -> Examples:
        """The examples of the first `count` clients, replica after replica."""
        clients = zip(self._schedules[:count], self._members[:count], strict=True)
        own = [rows[schedule[step]] if step < len(schedule) else rows[:0] for schedule, rows in clients]
        sizes = [len(rows) for rows in own]
        batch.pack(sizes, self._guard)
        self._owners = torch.repeat_interleave(torch.arange(count), torch.tensor(sizes))
        rows = torch.from_numpy(np.concatenate(own))
        return Examples(rows, self._y[rows].unsqueeze(-1), self._share)

    def note(self, step: int, log_likelihoods: Tensor) -> None:
        """Add the losses up at once, client by client in the order of their examples."""
        self._losses.index_add_(0, self._owners, -log_likelihoods.flatten(1).mean(1).double())

    def divided(self, factors: Tensor, sizes: Tensor) -> Tensor:
        """(1, n)."""
        return factors.div_(sizes[self._owners])

    def losses(self, clients: slice) -> list[float]:
        """The mean over a sequence's tokens, summed over examples."""
        sums: list[float] = self._losses[clients].tolist()
        return sums


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
        lengths = np.array([[*map(len, schedule), *[0] * (steps - len(schedule))] for schedule in schedules], np.int64)
        owners = np.repeat(np.arange(len(schedules)), lengths.sum(1))
        firsts = np.cumsum([0, *map(len, members[:-1])])  # where each client's rows begin, when all are in one array
        positions = np.concatenate([batch for schedule in schedules for batch in schedule])
        taken = np.concatenate(members)[firsts[owners] + positions]
        if (lengths == width).all():
            rows = np.ascontiguousarray(taken.reshape(len(schedules), steps, width).swapaxes(0, 1))
            return cls(torch.from_numpy(rows), torch.ones(rows.shape))
        present = np.arange(width) < lengths[:, :, None]
        rows = np.empty(present.shape, np.int64)
        rows[:] = np.array([own[0] for own in members])[:, None, None]
        rows[present] = taken
        rows, present = (np.ascontiguousarray(each.swapaxes(0, 1)) for each in (rows, present.astype(np.float32)))
        return cls(torch.from_numpy(rows), torch.from_numpy(present))
