# SPDX-License-Identifier: Apache-2.0
"""What the clients of a cohort have in common, what each has of its own, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class CohortResult:
    """What K clients computed."""

    updates: Tensor
    """(K, P): FedAvg: w_end − w_start; FedSGD: the gradient. The entries of buffers are differences in both."""
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
        return cls(updates, torch.zeros(count), sizes, torch.zeros(count, dtype=torch.int64))

    def write(
        self, task: Task, clients: Sequence[Client], write_updates: WriteUpdates, losses: Sequence[float]
    ) -> None:
        """Note what some clients computed, their updates written by `write_updates`, and the sums of their losses."""
        parameters, start = task.layout.parameters, task.start
        for some in _neighbours(clients):
            updates = self.updates[clients[some.start].place :][: some.stop - some.start]
            write_updates(some, updates)
            if parameters < task.layout.size:  # a mask of -inf stays what it is
                updates[:, parameters:].masked_fill_(~start[parameters:].isfinite(), 0)
        used = [sum(map(len, client.schedule)) for client in clients]
        places = torch.tensor([client.place for client in clients])
        self.loss[places] = torch.tensor([loss / max(n, 1) for loss, n in zip(losses, used, strict=True)])
        self.steps[places] = torch.tensor([len(client.schedule) for client in clients])


def _neighbours(clients: Sequence[Client]) -> Iterator[slice]:
    """The longest runs of clients that are neighbours in the cohort."""
    first = 0
    for last in range(1, len(clients) + 1):
        if last == len(clients) or clients[last].place != clients[last - 1].place + 1:
            yield slice(first, last)
            first = last
