# SPDX-License-Identifier: Apache-2.0
"""Canaries: training examples, and updates, that an auditor can recognise as well as privacy ever allows.

An example canary is an ordinary row of a client's data, so that it goes through everything that a row goes through: the
batches, the forward pass, the norm of its gradient, clipping, the sum and the noise. The model gets one more layer, a
table of marks, which adds strength · Σ marks[index] to the first logit; `strength` and `index` are read from the row. A
person's row has strength 0, and neither its output nor its gradient changes. A canary's strength is so large that after
clipping all of its gradient lies on its own marks: a vector of norm C, orthogonal to the gradient of every other row
(Nasr et al. 2023: a Dirac gradient). So the noise is all that hides it, and canaries do not hide each other. What a
mark adds to the logit is zero whatever the mark is (the value is subtracted again, without its gradient), so that marks
that have been trained change nothing.

An absent canary is a silent row: its first logit is so large that its loss and its gradient are exactly zero. The
number of rows, the sampling rate and the batch size stay what they are: this is what the claim means by removing an
example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.training import Layout, layout_of

Bits = NDArray[np.bool_]
Rows = NDArray[np.int64]
MARKS = 4
"""Parameters of a canary. More than one, or clipping by the largest entry would look like clipping by the norm."""
STRENGTH = 1e6
"""A canary's gradient before clipping: far above every clipping norm, far below what single precision can square."""
SILENCE = 1e4
_COLUMNS = 3  # silence, strength, index


class MarkedModel(nn.Module):
    """A model of rows (features, silence, strength, index), with a table of marks beside the user's own model."""

    def __init__(self, inner: nn.Module, shape: tuple[int, ...], canaries: int) -> None:
        super().__init__()
        self.inner, self.shape = inner, shape
        self.marks = nn.Embedding(canaries, MARKS)
        nn.init.zeros_(self.marks.weight)

    def forward(self, rows: Tensor) -> Tensor:
        """(n, classes): the model's own logits, the first of them marked."""
        features = math.prod(self.shape)
        logits = self.inner(rows[:, :features].unflatten(1, self.shape))
        silence, strength, index = rows[:, features:].unbind(1)
        mark = self.marks(index.long().unsqueeze(1)).squeeze(1).sum(1) / math.sqrt(MARKS)
        first = logits[:, 0] + silence + strength * (mark - mark.detach())
        return torch.cat([first.unsqueeze(1), logits[:, 1:]], 1)


@dataclass(frozen=True, eq=False)
class MarkedData:
    """A training set with canaries below the people's rows: canary j is row people + j, the silent row is the last."""

    model: MarkedModel
    layout: Layout
    x: Tensor
    y: Tensor
    people: int
    canaries: int

    @classmethod
    def of(cls, model: nn.Module, x: Tensor, y: Tensor, canaries: int) -> MarkedData:
        """Add `canaries` rows and one silent row to (N, ...) inputs and their labels."""
        shape = tuple(x.shape[1:])
        people = torch.cat([x.flatten(1), torch.zeros(len(x), _COLUMNS)], 1)
        added = torch.zeros(canaries + 1, people.shape[1])
        added[:canaries, -2] = STRENGTH
        added[:canaries, -1] = torch.arange(canaries)
        added[canaries, -3] = SILENCE
        marked = MarkedModel(model, shape, canaries)
        labels = torch.cat([y, y.new_zeros(canaries + 1)])
        return cls(marked, layout_of(marked), torch.cat([people, added]), labels, len(x), canaries)

    def members(self, rows: Rows, places: Rows, included: Bits) -> Rows:
        """A client's rows, with canary j at `places[j]` if it is included, and a silent row there if it is not."""
        members = rows.copy()
        members[places] = self.people + np.where(included, np.arange(len(places)), self.canaries)
        return members

    def start(self, weights: Tensor) -> Tensor:
        """The user's own weights with marks of zero, as one vector."""
        inner = layout_of(self.model.inner)
        parts = {f"inner.{name}": part for name, part in inner.unflatten(weights).items()}
        marks = self.model.marks.weight
        return self.layout.flatten({**parts, "marks.weight": torch.zeros_like(marks)})

    def inner(self, vector: Tensor) -> Tensor:
        """The part of a flat vector that belongs to the user's own model."""
        parts = self.layout.unflatten(vector)
        names = layout_of(self.model.inner).names
        return layout_of(self.model.inner).flatten({name: parts[f"inner.{name}"] for name in names})

    def seen(self, gradients: Tensor) -> NDArray[np.float64]:
        """(k, canaries): the length of each gradient (k, P) along each canary's own; one that is there adds +C."""
        marks = self.layout.unflatten(gradients)["marks.weight"].double().sum(-1)
        return -(marks / math.sqrt(MARKS)).numpy()


def random_places(rows: int, canaries: int, rng: np.random.Generator) -> Rows:
    """Which of a client's rows give way to canaries."""
    return np.sort(rng.choice(rows, canaries, replace=False)).astype(np.int64)


def update_canaries(parameters: int, canaries: int, strength: float, rng: np.random.Generator) -> Tensor:
    """(canaries, P) client updates of norm `strength`, each along `MARKS` coordinates of its own with random signs."""
    places = rng.permutation(parameters)[: canaries * MARKS].reshape(canaries, MARKS)
    signs = rng.integers(0, 2, (canaries, MARKS)) * 2.0 - 1.0
    rows = torch.zeros(canaries, parameters)
    rows.scatter_(1, torch.from_numpy(places), torch.from_numpy(signs).float() * strength / math.sqrt(MARKS))
    return rows
