# SPDX-License-Identifier: Apache-2.0
"""What the clients of a cohort have in common, what each has of its own, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.randomness import ClientRandomness
from fedsim.training.batches import LocalWork, Rows, batch_schedule, padded_width, poisson_width
from fedsim.training.layout import Layout


@dataclass(frozen=True)
class Task:
    """What all clients of a cohort are given: the model, its weights, the training set, and the work."""

    model: nn.Module
    layout: Layout
    start: Tensor
    x: Tensor
    y: Tensor
    work: LocalWork


@dataclass(frozen=True)
class Client:
    """What one client has, and does, in one round."""

    place: int
    """Its place in the cohort."""
    rows: Rows
    """The numbers of its rows in the training set."""
    batch: int
    """B: its batch size, with Poisson batches the expected one."""
    schedule: list[Rows]
    """The positions in `rows` of the examples of each local step."""
    batches: np.random.Generator
    """The stream of its batches, after the schedule was drawn."""
    randomness: ClientRandomness
    width: int
    """The rows to which its batches are padded."""

    @classmethod
    def of(cls, place: int, rows: Rows, work: LocalWork, randomness: ClientRandomness) -> Client:
        """Draw the batches of a client."""
        batches = randomness.batches()
        schedule = batch_schedule(len(rows), work, batches)
        batch = work.batch(len(rows))
        if work.example_dp is not None and work.example_dp.batches == "poisson":
            width = poisson_width(schedule, batch, len(rows))
        else:
            width = padded_width(schedule, batch)
        return cls(place, rows, batch, schedule, batches, randomness, width)


WriteUpdates = Callable[[slice, Tensor], None]
"""Writes the updates (k, P) of the clients in a slice."""
_WAITING = 1 << 26  # numbers of all updates together, beyond which none waits: what it is made from takes memory, too


class _Waiting(NamedTuple):
    """Updates of clients first..last-1 of a cohort that nobody has asked for yet."""

    first: int
    last: int
    write: WriteUpdates


@dataclass(frozen=True, eq=False)
class CohortResult:
    """What K clients computed."""

    _written: Tensor
    _waiting: list[_Waiting]
    loss: Tensor
    """(K,): the mean loss over the examples that were used, each at the weights that it was used with; 0 if none."""
    examples: Tensor
    """(K,) int64: the rows that the client holds."""
    steps: Tensor
    """(K,) int64: the local steps that were done."""

    @classmethod
    def empty(cls, examples: Sequence[int], size: int) -> CohortResult:
        """The result of clients that have done nothing yet."""
        count = len(examples)
        updates = torch.empty(count, size)
        for place, rows in enumerate(examples):
            if not rows:
                updates[place] = 0  # the others are written as they finish
        sizes = torch.tensor(examples, dtype=torch.int64)
        return cls(updates, [], torch.zeros(count), sizes, torch.zeros(count, dtype=torch.int64))

    @property
    def size(self) -> int:
        """P, the length of an update."""
        return self._written.shape[1]

    @property
    def updates(self) -> Tensor:
        """(K, P): FedAvg: w_end − w_start; FedSGD: the gradient. The entries of buffers are differences in both."""
        while self._waiting:
            first, last, write = self._waiting.pop()
            write(slice(0, last - first), self._written[first:last])
        return self._written

    def updates_in_pieces(self, clients: int) -> Iterator[Tensor]:
        """The same, (k, P), so many clients at a time, each piece in place of the one before.

        All updates together are many times larger than the processor's cache: what waits never leaves it.
        """
        room = torch.empty(clients, self.size)
        for first in range(0, len(self._written), clients):
            yield self._piece(first, min(first + clients, len(self._written)), room)

    def _piece(self, first: int, last: int, room: Tensor) -> Tensor:
        found = 0
        for run in self._waiting:
            low, high = max(first, run.first), min(last, run.last)
            if low < high:
                run.write(slice(low - run.first, high - run.first), room[low - first : high - first])
                found += high - low
        return room[:found] if found == last - first else self.updates[first:last]

    def write(
        self,
        task: Task,
        clients: Sequence[Client],
        write_updates: WriteUpdates,
        losses: Sequence[float],
        *,
        later: bool = False,
    ) -> None:
        """Note what some clients computed, their updates written by `write_updates`, and the sums of their losses.

        `later`: not before somebody asks for the updates; what they are computed from must not change.
        """
        for some in _neighbours(clients):
            first, last = clients[some.start].place, clients[some.stop - 1].place + 1
            write = partial(_write_run, task, write_updates, some.start)
            if later and self._written.numel() <= _WAITING:
                self._waiting.append(_Waiting(first, last, write))
            else:
                write(slice(0, last - first), self._written[first:last])
        used = [sum(map(len, client.schedule)) for client in clients]
        places = torch.tensor([client.place for client in clients])
        self.loss[places] = torch.tensor([loss / max(n, 1) for loss, n in zip(losses, used, strict=True)])
        self.steps[places] = torch.tensor([len(client.schedule) for client in clients])


def _write_run(task: Task, write_updates: WriteUpdates, begin: int, some: slice, into: Tensor) -> None:
    """Write the updates of some of a run of clients, of which `write_updates` counts from `begin` on."""
    parameters, start = task.layout.parameters, task.start
    write_updates(slice(begin + some.start, begin + some.stop), into)
    if parameters < task.layout.size:  # a mask of -inf stays what it is
        into[:, parameters:].masked_fill_(~start[parameters:].isfinite(), 0)


def _neighbours(clients: Sequence[Client]) -> Iterator[slice]:
    """The longest runs of clients that are neighbours in the cohort."""
    first = 0
    for last in range(1, len(clients) + 1):
        if last == len(clients) or clients[last].place != clients[last - 1].place + 1:
            yield slice(first, last)
            first = last
