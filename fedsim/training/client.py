# SPDX-License-Identifier: Apache-2.0
"""One client of a cohort, and what a cohort computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.randomness import ClientRandomness
from fedsim.training.batches import LocalWork, Rows, padded_width
from fedsim.training.layout import Layout


@dataclass(frozen=True)
class Client:
    """What one client has and does in one round."""

    place: int
    """Its place in the cohort."""
    rows: Rows
    """The numbers of its rows in the training set."""
    schedule: list[Rows]
    """The positions in `rows` of the examples of each local step."""
    work: LocalWork
    randomness: ClientRandomness
    batches: np.random.Generator
    """The stream of its batches, after the schedule was drawn."""

    @property
    def batch(self) -> int:
        """B: its batch size, with Poisson batches the expected one."""
        return self.work.batch(len(self.rows))

    @property
    def width(self) -> int:
        """The rows to which its batches are padded."""
        return padded_width(self.schedule, self.batch)


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
    def empty(cls, examples: Sequence[int], layout: Layout) -> CohortResult:
        """The result of clients that have done nothing yet."""
        count = len(examples)
        sizes = torch.tensor(examples, dtype=torch.int64)
        updates = torch.empty(count, layout.size)
        updates[sizes == 0] = 0  # the others are written as they finish
        return cls(updates, torch.zeros(count), sizes, torch.zeros(count, dtype=torch.int64))

    def write(self, client: Client, layout: Layout, start: Tensor, end: Tensor, gradient: Tensor | None, loss: float) -> None:
        """Note what a client computed: its weights at the end or, FedSGD, its gradient, and the sum of its losses."""
        used = sum(map(len, client.schedule))
        update = self.updates[client.place]
        torch.sub(end, start, out=update)
        if gradient is not None:
            update[: layout.parameters] = gradient
        if layout.parameters < layout.size:  # a mask of -inf stays what it is
            update[layout.parameters :].masked_fill_(~start[layout.parameters :].isfinite(), 0)
        self.loss[client.place] = loss / used if used else 0.0
        self.steps[client.place] = len(client.schedule)
