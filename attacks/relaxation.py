# SPDX-License-Identifier: Apache-2.0
"""Images, rows and texts as points of a continuous space, in which an optimiser can move them.

A pixel is itself. A category of a table is a softmax over its values, a number a sigmoid between its bounds (TabLeak,
Vero et al. 2023, section 4.1); a token is a softmax over the tokens that occur.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.attacks.observation import Knowledge
from fedsim.data.table import NumericColumn, TableEncoding

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The free variables z of an example, and what the model is given for them."""

    middle: Tensor
    """z of an example about which nothing is known; its shape is that of z."""
    spread: Tensor
    """By how much a first guess may differ from it, as a standard deviation."""
    decode: Map
    """From z (..., *shape) to what the model is given."""
    feasible: Map
    """The nearest z (..., *shape) that is allowed."""
    settle: Map
    """From what the model was given (n, ...) to valid examples: one category, one token."""


def relaxed_images(knowledge: Knowledge, spread: float) -> Relaxation:
    """Pixels; three standard deviations of standardised data where their range is not known."""
    low, high = value_bounds(knowledge)
    return Relaxation((low + high) / 2, spread * (high - low), lambda z: z, lambda z: z.clamp(low, high), lambda x: x)


def relaxed_rows(knowledge: Knowledge, present: Tensor) -> Relaxation:
    """Rows of a table, of which only the places that are `present` (F,) are not zero in all examples."""
    encoding = knowledge.encoding
    assert isinstance(encoding, TableEncoding)
    zero = torch.zeros(knowledge.input_shape)
    decode = table_relaxation(encoding, present, knowledge.bounds)
    return Relaxation(zero, zero + 1, decode, lambda z: z, lambda x: project(x, encoding))


def relaxed_windows(length: int, vocabulary: int, present: Tensor) -> Relaxation:
    """Windows of `length` tokens and the one after them, each one of the tokens that are `present`."""
    zero = torch.zeros(length + 1, len(present))

    def decode(z: Tensor) -> Tensor:
        tokens = z.new_zeros(*z.shape[:-1], vocabulary)
        return tokens.index_copy(-1, present, z.softmax(dim=-1))

    return Relaxation(zero, zero + 1, decode, lambda z: z, lambda x: x.argmax(dim=-1))


def value_bounds(knowledge: Knowledge) -> tuple[Tensor, Tensor]:
    """The range of each input; three standard deviations of standardised data where it is not known."""
    if knowledge.bounds is None:
        return torch.full(knowledge.input_shape, -3.0), torch.full(knowledge.input_shape, 3.0)
    low, high = knowledge.bounds
    return low.float(), high.float()


def table_relaxation(encoding: TableEncoding, present: Tensor, bounds: tuple[Tensor, Tensor] | None) -> Map:
    """From z to rows: softmax over the present places of a categorical column, a sigmoid between a number's bounds."""
    columns = list(zip(encoding.columns, encoding.slices().values(), strict=True))
    numeric = torch.zeros(len(present), dtype=torch.bool)
    group = torch.zeros(len(present), dtype=torch.int64)
    for index, (column, where) in enumerate(columns):
        numeric[where] = isinstance(column, NumericColumn)
        group[where] = index
    hidden = torch.zeros(len(present)).masked_fill(~present & ~numeric, -1e4)
    low, high = (bound.float() for bound in bounds or (torch.zeros(()), torch.zeros(())))

    def relax(z: Tensor) -> Tensor:
        # |z| stays small under signed steps, so no maximum needs to be subtracted before exp
        power = (z.clamp(-30, 30) + hidden).exp()
        sums = power.new_zeros(*z.shape[:-1], len(columns)).index_add(-1, group, power)
        number = z if bounds is None else low + (high - low) * torch.sigmoid(z)
        number = torch.where(present, number, torch.zeros(()))
        return torch.where(numeric, number, power / sums[..., group])

    return relax


def project(x: Tensor, encoding: TableEncoding) -> Tensor:
    """The nearest valid rows: one-hot where a column is categorical."""
    x = x.clone()
    for column, where in zip(encoding.columns, encoding.slices().values(), strict=True):
        if not isinstance(column, NumericColumn):
            x[..., where] = F.one_hot(x[..., where].argmax(-1), column.width).to(x.dtype)
    return x
