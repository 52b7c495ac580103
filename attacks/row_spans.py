# SPDX-License-Identifier: Apache-2.0
"""The equations that a row of a batch must satisfy, from the null spaces of the layers' gradients.

See `row_search` for the mathematics. Everything is float64 and batched over candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.attacks.dense_stack import DenseStack, value_and_slope
from fedsim.data.table import NumericColumn, TableEncoding

_FLOOR = 3e-8  # of the largest singular value: float32 rounding
_SPARE = 4  # equations beyond the unknown numbers, below which a root proves nothing


@dataclass(frozen=True, eq=False)
class Span:
    """Row and column space of one layer's gradient."""

    depth: int
    null: Tensor
    """(k, m_(l-1) + 1) orthonormal, k equations."""
    left: Tensor
    """(m_l - rank, m_l) orthonormal."""
    inverse: Tensor
    """(m_(l-1) + 1, m_l) pseudo-inverse of the gradient."""
    noise: float
    rank: int
    drift: float = 0.0
    """How far features may have moved during several local steps, relative to their size."""

    def explained(self, vectors: Tensor, rows: bool) -> Tensor:
        """(n,) the distance from the row (or column) space that the noise of the gradient explains."""
        inverse = self.inverse.T if rows else self.inverse
        rounding = (2e-7 + self.drift) * vectors.norm(dim=1)
        size: Tensor = self.noise * (vectors @ inverse.T).norm(dim=1) + rounding
        return size

    def excess(self, vectors: Tensor, rows: bool) -> Tensor:
        """(n,) the distance in these units."""
        null = self.null if rows else self.left
        distance: Tensor = (vectors @ null.T).norm(dim=1)
        return distance / self.explained(vectors, rows)


@dataclass(frozen=True, eq=False)
class Cells:
    """Where the unknowns lie: numeric places, and the places of the categories that occur in the batch."""

    width: int
    numbers: Tensor
    options: Tensor
    """(O,) places in x."""
    column: Tensor
    """(O,) the categorical column of each."""
    low: Tensor
    high: Tensor

    @property
    def categorical(self) -> int:
        """How many columns are categorical."""
        return int(self.column.max()) + 1 if len(self.column) else 0

    def rows(self, codes: Tensor, numbers: Tensor) -> Tensor:
        """(R, F) from chosen places (R, C) and numbers (R, N)."""
        x = numbers.new_zeros(len(numbers), self.width)
        x[:, self.numbers] = numbers
        return x.scatter_(1, codes, 1.0)

    def codes(self, x: Tensor) -> Tensor:
        """(R, C) the chosen places of valid rows."""
        if not len(self.column):
            return torch.zeros(len(x), 0).long()
        places = [self.options[self.column == c] for c in range(self.categorical)]
        return torch.stack([each[x[:, each].argmax(1)] for each in places], 1)


def noise_of(matrix: Tensor, count: int, known: float) -> float:
    """The largest singular value that must be noise: `count` examples explain no more than `count` of them."""
    values = torch.linalg.svdvals(matrix)
    floor = max(_FLOOR, known) * float(values[0])
    return max(floor, float(values[count])) if count < len(values) else floor


def spans_of(
    stack: DenseStack, rest: list[Tensor], noises: Sequence[float], cells: Cells, drift: float = 0.0
) -> list[Span]:
    """Of the raw input and of each hidden layer, where the gradient's rank is not limited by the layer itself."""
    spans = []
    for depth, (matrix, noise) in enumerate(zip(rest[: max(1, len(rest) - 1)], noises, strict=False)):
        affine = stack.layers[depth].bias is not None
        used = matrix.ne(0).any(0)  # a neuron that is off in the whole batch gives an equation that many rows satisfy
        used[-1] = affine
        if depth == 0:
            used[:-1] = False
            used[cells.numbers] = used[cells.options] = True
        left, values, right = torch.linalg.svd(matrix[:, used])
        rank = int((values > 6.0 * noise).sum())
        if rank == 0 or rank >= min(int(matrix.ne(0).any(1).sum()), int(used.sum())):
            continue
        null = matrix.new_zeros(int(used.sum()) - rank, matrix.shape[1])
        null[:, used] = right[rank:]
        inverse = matrix.new_zeros(matrix.shape[1], len(matrix))
        inverse[used] = right[:rank].T / values[:rank] @ left[:, :rank].T
        spans.append(Span(depth, null, left[:, rank:].T, inverse, noise, rank, drift))
    return spans


def enough(spans: list[Span], cells: Cells) -> bool:
    """More equations than numbers; those that say that a row has one category of each column count for nothing."""
    trivial = len(cells.column.unique())
    return sum(len(span.null) - (trivial if span.depth == 0 else 0) for span in spans) >= len(cells.numbers) + _SPARE


def cells_of(first: Tensor, encoding: TableEncoding, bounds: tuple[Tensor, Tensor] | None, noise: float) -> Cells:
    """A place whose column of the gradient is zero is zero in the whole batch."""
    present = first[:, :-1].norm(dim=0) > 3 * noise
    numbers, options, column = [], [], []
    for index, (each, where) in enumerate(zip(encoding.columns, encoding.slices().values(), strict=True)):
        places = list(range(where.start, where.stop))
        if isinstance(each, NumericColumn):
            numbers += [place for place in places if present[place]]
        else:
            seen = [place for place in places if present[place]] or places
            options += seen
            column += [index] * len(seen)
    group = np.unique(np.array(column, dtype=np.int64), return_inverse=True)[1]
    width = first.shape[1] - 1
    low, high = bounds if bounds is not None else (torch.tensor(-20.0), torch.tensor(20.0))
    at = torch.tensor(numbers, dtype=torch.int64)
    low, high = (torch.broadcast_to(each.double(), (width,))[at] for each in (low, high))
    return Cells(width, at, torch.tensor(options).long(), torch.from_numpy(group), low, high)


def residual(stack: DenseStack, spans: list[Span], x: Tensor, cells: Cells) -> tuple[Tensor, Tensor]:
    """Residuals r = N [h(x), 1] of all spans, (R, K), and its Jacobian in the numbers, (R, K, N)."""
    features, slopes, _ = stack.forward(x)
    inner = stack.weights[0][:, cells.numbers]
    jacobians = [torch.eye(cells.width, dtype=x.dtype)[:, cells.numbers].expand(len(x), -1, -1)]
    for depth in range(1, max(span.depth for span in spans) + 1):
        inner = inner if depth == 1 else stack.weights[depth - 1] @ jacobians[-1]
        jacobians.append(slopes[depth - 1][:, :, None] * inner)
    r = [features[span.depth] @ span.null[:, :-1].T + span.null[:, -1] for span in spans]
    jacobian = [span.null[:, :-1] @ jacobians[span.depth] for span in spans]
    return torch.cat(r, 1), torch.cat(jacobian, 1)


def values(spans: list[Span], features: list[Tensor]) -> Tensor:
    """(..., K) the residuals alone."""
    return torch.cat([features[span.depth] @ span.null[:, :-1].T + span.null[:, -1] for span in spans], -1)


def exchanges(
    stack: DenseStack, spans: list[Span], cells: Cells, codes: Tensor, numbers: Tensor, some: Tensor
) -> tuple[Tensor, Tensor]:
    """||r||^2 after each exchange (R, O) and without one (R,), the numbers refitted to first order in all of them."""
    x = cells.rows(codes, numbers)
    r, jacobian = residual(stack, spans, x, cells)
    fitted = torch.linalg.qr(jacobian).Q
    base = r.square().sum(1) - (r[:, None] @ fitted)[:, 0].square().sum(1)
    new, old = cells.options[some], codes[:, cells.column[some]]
    changed = values(spans, _exchanged(stack, spans, x, old, new))
    f = changed.square().sum(2) - (changed @ fitted).square().sum(2)
    return f.clamp_min(0).masked_fill(old == new, 1e30), base


def _exchanged(stack: DenseStack, spans: list[Span], x: Tensor, old: Tensor, new: Tensor) -> list[Tensor]:
    """Features h_0 .. of every exchange, (R, O, m_l): the place old[r, o] set to zero, new[o] to one."""
    first, deepest = stack.weights[0], max(span.depth for span in spans)
    raw = x.new_zeros(0)
    if spans[0].depth == 0:
        raw = x[:, None].expand(-1, len(new), -1).clone()
        raw.scatter_(2, old[:, :, None], 0.0)
        raw.scatter_(2, new.expand(len(x), -1)[:, :, None], 1.0)
    features = [raw]
    z = torch.addmm(stack.biases[0], x, first.T)[:, None] + first.T[new] - first.T[old]
    for depth in range(1, deepest + 1):
        h = value_and_slope(stack.functions[depth - 1], z)[0]
        features.append(h)
        if depth < deepest:
            z = h @ stack.weights[depth].T + stack.biases[depth]
    return features


def snap(x: Tensor, encoding: TableEncoding) -> Tensor:
    """Numbers rounded to the places that their column has, as `TableEncoding.encode` would write them."""
    x = x.clone()
    for column, where in zip(encoding.columns, encoding.slices().values(), strict=True):
        if isinstance(column, NumericColumn) and column.decimals is not None:
            value = torch.round(x[:, where] * column.scale + column.mean, decimals=column.decimals)
            x[:, where] = ((value - column.mean) / column.scale).float().double()
    return x
