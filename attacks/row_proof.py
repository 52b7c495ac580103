# SPDX-License-Identifier: Apache-2.0
"""Which candidates are rows of the batch: weight, label, and what is proved about each cell.

See `row_search` for the mathematics.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fedsim.attacks.dense_stack import DenseStack, with_one
from fedsim.attacks.row_spans import Cells, Span, exchanges, residual, snap, values
from fedsim.data.table import TableEncoding

_TRUE = 8.0  # how many times the residual that noise explains a true row may show
_ONCE = 2e-3  # by how much the weight of one row may differ from 1, where there is no noise
_CLOSE = 0.03  # standard deviations that a number of a proved row may be off


@dataclass(frozen=True, eq=False)
class Found:
    """Rows of the batch."""

    inputs: Tensor
    """(n, F) float64."""
    labels: Tensor
    copies: Tensor
    """(n,) how often the row is in the batch."""
    proved: Tensor
    """(n,) bool: no other category in any one cell passes, whatever the numbers, the numbers are known closely, and
    the weight is that of one row: the mean of similar rows satisfies the same equations, with their weight. Of several
    local steps, whose weights differ, as many different rows must be found as there are."""
    margin: Tensor
    """(n, categorical columns) least residual of another category in the cell, in units of what noise explains."""
    error: Tensor
    """(n, F) how far a number may be off for all that noise explains; 0 for categories."""

    @staticmethod
    def empty(width: int, categorical: int) -> Found:
        """No rows yet."""
        none, whole = torch.zeros(0, width, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        return Found(none, whole, whole, whole.bool(), none[:, :categorical], none)

    def joined(self, other: Found) -> Found:
        """These rows and those."""
        return Found(*(torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)))


def without(stack: DenseStack, gradient: list[Tensor], found: Found, scale: float, count: int) -> list[Tensor]:
    """The gradient of each layer minus what the rows found contribute to it."""
    parts = stack.gradient(found.inputs, found.labels, found.copies * scale / count)
    return [each - part for each, part in zip(gradient, parts, strict=True)]


def polished(
    stack: DenseStack, gradient: list[Tensor], found: Found, encoding: TableEncoding, cells: Cells, scale: float
) -> Found:
    """With all rows known, D_1 is known, and the numbers solve D_1' X = dL/dW_1; kept where that fits better."""

    def misfit(x: Tensor) -> float:
        parts = stack.gradient(x, found.labels, weight)
        return sum(float((a - b).square().sum()) for a, b in zip(gradient, parts, strict=True))

    if not len(cells.numbers):
        return found
    weight = found.copies * scale / found.copies.sum()
    best, lowest = found.inputs, misfit(found.inputs)
    for _ in range(3):
        _, slopes, logits = stack.forward(best)
        deltas = stack.deltas(slopes, logits, found.labels)[0] * weight[:, None]
        x = best.clone()
        x[:, cells.numbers] = torch.linalg.lstsq(deltas.T, gradient[0][:, cells.numbers], driver="gelsd").solution
        for trial in (x, snap(x, encoding)):
            if misfit(trial) < lowest:
                best, lowest = trial, misfit(trial)
    return replace(found, inputs=best)


def roots(stack: DenseStack, spans: list[Span], encoding: TableEncoding, x: Tensor, known: Tensor) -> Tensor:
    """The new rows among the walkers that pass every equation, with numbers on their column's own grid."""
    x = x[_passing(stack, spans, x)]
    snapped = snap(x, encoding)
    x = torch.where(_passing(stack, spans, snapped)[:, None], snapped, x)
    kept: list[Tensor] = []
    for row in x:
        again = any(bool((row - other).abs().max() < 0.3) for other in known) if spans[-1].drift else False
        if not again and not any((row - other).abs().max() < 1e-3 for other in kept):
            kept.append(row)
    return torch.stack(kept) if kept else x[:0]


def _passing(stack: DenseStack, spans: list[Span], x: Tensor) -> Tensor:
    features = stack.forward(x)[0]
    passing = torch.ones(len(x), dtype=torch.bool)
    for span in spans:
        passing &= span.excess(with_one(features[span.depth]), rows=True) < _TRUE
    return passing


def weighed(
    stack: DenseStack, spans: list[Span], x: Tensor, cells: Cells, count: int, scale: float | None
) -> tuple[Found, float | None]:
    """Rows whose d lies in the column space and whose weight is a whole multiple of scale / count; with labels.

    Different rows of a batch are biorthogonal, d_i' (G^+)' [h_j, 1] = 0, whereas two readings of the same row are not:
    of such, the one with the smaller residual stays.
    """
    span = spans[-1]
    features, slopes, logits = stack.forward(x)
    h = with_one(features[span.depth])
    candidates = [stack.deltas(slopes, logits, torch.full((len(x),), y))[span.depth] for y in range(logits.shape[1])]
    alphas = torch.stack([1.0 / (d @ span.inverse.T * h).sum(1) for d in candidates], 1)
    off = torch.stack([span.excess(d, rows=False) for d in candidates], 1).where(alphas > 0, torch.inf)
    excess, labels = off.min(1)
    alpha = alphas.gather(1, labels[:, None])[:, 0]
    dual = torch.stack(candidates, 1)[torch.arange(len(x)), labels] @ span.inverse.T
    error = span.noise * dual.norm(dim=1) * (h @ span.inverse).norm(dim=1) * alpha
    passing = ((excess < _TRUE) | (span.drift > 0)) & (error < 0.1)  # steps switch neurons on and off, so d jumps
    if scale is None and passing.any():
        scale = float((alpha * count)[passing].median())
    multiple = alpha * count / (scale or 1.0)
    copies = multiple.round()
    passing &= (copies >= 1) & ((multiple - copies).abs() < (0.25 if span.drift else 0.02) + 4 * error)
    crossed = (dual @ h.T * alpha).abs()
    residual = values(spans, features).norm(dim=1)
    kept: list[int] = []
    for i in residual.argsort().tolist():
        if passing[i] and all(crossed[i, j] < 0.1 and crossed[j, i] < 0.1 for j in kept):
            kept.append(i)
    margin, off_by = _proof(stack, spans, cells, x[kept])
    proved = (margin > 2 * _TRUE).all(1) & (off_by.amax(1) < _CLOSE)
    once = (multiple - 1).abs() < _ONCE + 4 * error
    every_one = int(copies[kept].sum()) == count and bool((copies[kept] == 1).all())
    proved &= torch.full_like(proved, every_one) if span.drift else once[kept]
    return Found(x[kept], labels[kept], copies[kept].long(), proved, margin, off_by), scale


def _proof(stack: DenseStack, spans: list[Span], cells: Cells, x: Tensor) -> tuple[Tensor, Tensor]:
    """(n, C) how clearly every other category of a cell is refuted, and (n, F) how far each number may be off."""
    features = stack.forward(x)[0]
    explained = torch.stack([s.explained(with_one(features[s.depth]), rows=True) for s in spans], 1).norm(dim=1)
    _, jacobian = residual(stack, spans, x, cells)
    off_by = torch.zeros_like(x)
    off_by[:, cells.numbers] = explained[:, None] * torch.linalg.pinv(jacobian).norm(dim=2)
    margin = x.new_full((len(x), cells.categorical), torch.inf)
    if len(cells.options) and len(x):
        f, _ = exchanges(stack, spans, cells, cells.codes(x), x[:, cells.numbers], torch.arange(len(cells.options)))
        away = (f.clamp_min(0).sqrt() / explained[:, None]).double()
        margin = margin.scatter_reduce(1, cells.column.expand(len(x), -1), away, "amin")
    return margin, off_by
