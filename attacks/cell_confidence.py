# SPDX-License-Identifier: Apache-2.0
"""A lower bound of the probability that a reconstructed cell is right, and the curve that shows whether it holds.

The histogram of a cell over the ensemble says how far the members agree (TabLeak, Vero et al. 2023, section 4.3). That
is no probability: members agree on what is easy and on what is common. Two questions about the whole batch come first.
Do its rows explain the update? And about as well as a batch that the server made itself and attacked likewise
(`shadow_rows`)? Where either answer is no, cells are withheld: their bound is 0. Where both are yes, a logistic curve
turns what speaks for a cell into log-odds, and a margin is subtracted that covers how batches of tables which the curve
has not seen differ from it. benchmarks/table_calibration.py fits and checks all of this; the truth of the batch under
attack enters nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from scipy.stats import binomtest
from torch import Tensor

from fedsim.attacks.ensemble import Pooled, Problem
from fedsim.attacks.row_proof import Found
from fedsim.data.table import NumericColumn, TableEncoding

if TYPE_CHECKING:
    from fedsim.attacks.shadow_rows import Batch, Shadow

EVENT = (
    "the cell is right in the row that it is paired with: the same category, or a number within 0.319 standard"
    " deviations"
)
PROVED, SEARCHED, POOLED = 0.0, 1.0, 2.0
"""The routes by which a row is found; see `tabular`."""
EVIDENCE = ("route", "number", "log categories", "agreement", "distance", "margin")
"""Of each cell. Agreement is 1 - entropy, shifted and scaled to [-2, 2]; the distance that of the ensemble's gradients,
as its decimal logarithm; the margin, of rows of the search, the decimal logarithm of how far off another category is in
units of what noise explains, or minus that of a number's error."""

SURE = 0.99
"""Of a cell of a proved row, and the most that is said. All of 17,432 such cells were right."""
LEAST = 0.7
"""A bound below this is withheld: a guess from what is common is often as good."""
UNEXPLAINED = 0.05
"""The share of the update that rows may leave; beyond, agreement is no evidence."""
BEYOND_SHADOW = 10.0
"""How many times as much as a shadow batch they may leave; a shadow below 1e-5 counts as 1e-5."""
CURVE = {
    "constant": 0.19,
    "searched": 0.03,
    "number, pooled": -1.38,
    "number, searched": 0.69,
    "agreement": 0.59,
    "margin of a category": 1.11,
    "margin of a number": 0.83,
    "left unexplained": -0.26,
    "log categories": -0.36,
    "log rows": -0.05,
    "log odds of the shadow": 0.45,
}
"""Log-odds, from 52 of 161 attacked batches: those with explained cells without a proof (5,595). Tables: Adult, German
credit, law school, wine, diabetes, breast cancer with and without binned columns, location, and four made-up ones."""
MARGIN = 1.6
"""What is subtracted from the log-odds. By the curve of all other tables one batch of the 52 was worse than that."""
_FLOOR = 1e-6  # of a share that is left: less shows nothing more


def proved_evidence(rows: int, encoding: TableEncoding) -> Tensor:
    """(n, columns, len(EVIDENCE)) of rows with a proof."""
    return torch.zeros(rows, len(encoding.columns), len(EVIDENCE), dtype=torch.float64)


def searched_evidence(found: Found, encoding: TableEncoding) -> Tensor:
    """(n, columns, len(EVIDENCE)) of the rows of the search."""
    number = torch.tensor([isinstance(column, NumericColumn) for column in encoding.columns])
    first = torch.tensor([where.start for where in encoding.slices().values()])
    width = torch.tensor([float(column.width) for column in encoding.columns])
    cells = proved_evidence(len(found.inputs), encoding)
    cells[..., 0] = torch.where(found.proved, PROVED, SEARCHED)[:, None]
    cells[..., 1], cells[..., 2] = number, width.log()
    cells[:, ~number, 5] = found.margin.clamp(1e-3, 1e6).log10()
    cells[:, number, 5] = -found.error[:, first[number]].clamp(1e-6, 1e3).log10()
    return cells


def pooled_evidence(pooled: Pooled, problem: Problem) -> Tensor:
    """(n, columns, len(EVIDENCE)) of the rows of an ensemble."""
    columns = list(zip(problem.encoding.columns, problem.encoding.slices().values(), strict=True))
    number = torch.tensor([isinstance(column, NumericColumn) for column, _ in columns])
    choices = torch.stack([problem.present[where].sum().clamp_min(1) for _, where in columns])
    agreement = 4 * (pooled.agreement.double() - 0.5)
    one = torch.ones_like(agreement)
    distance = one * math.log10(min(max(pooled.loss, _FLOOR), 1.0))
    choices = torch.where(number, 1, choices)
    return torch.stack([one * POOLED, one * number, one * choices.log(), agreement, distance, 0 * one], -1)


def order_of(evidence: Tensor) -> Tensor:
    """(n,): rows that are proved first, then those of the search, then the others by how far the members agree."""
    return (evidence[..., 3] / 10 - evidence[..., 0]).mean(1).float()


# --- from evidence to a bound ---------------------------------------------------------------------------------------


def explains(batch: Batch, shadow: Shadow) -> bool:
    """Whether the rows explain the update, and about as well as the shadow's rows explain theirs."""
    return batch.unexplained <= min(UNEXPLAINED, BEYOND_SHADOW * max(shadow.unexplained, 1e-5))


def explained(batch: Batch, shadow: Shadow) -> Tensor:
    """(n, columns) bool: the cells of which anything is said."""
    return explains(batch, shadow) & (_left(batch) <= math.log10(UNEXPLAINED))


def terms(batch: Batch, shadow: Shadow) -> Tensor:
    """(n, columns, len(CURVE)): what speaks for each cell."""
    route, number, categories, agreement, _, margin = batch.evidence.unbind(-1)
    one, searched = torch.ones_like(route), (route == SEARCHED).double()
    pooled = 1 - searched
    odds = math.log((shadow.right + 1) / (shadow.cells - shadow.right + 1))
    found = [
        one,
        searched,
        number * pooled,
        number * searched,
        agreement * pooled,
        margin * searched * (1 - number),
        margin * searched * number,
        _left(batch),
        categories,
        one * math.log(len(one)),
        one * odds,
    ]
    return torch.stack(found, -1)


def _left(batch: Batch) -> Tensor:
    """(n, columns): the decimal logarithm of what is left, by the ensemble of its part or by all rows of the whole."""
    whole = math.log10(max(batch.unexplained, _FLOOR))
    return torch.where(batch.evidence[..., 0] == POOLED, batch.evidence[..., 4], math.log10(_FLOOR)).clamp_min(whole)


def cell_bounds(batch: Batch, shadow: Shadow | None) -> Tensor:
    """(n, columns) lower bounds of the probability that each cell is right; without a shadow, of proved rows only."""
    proved = batch.evidence[..., 0] == PROVED
    bounds = torch.zeros_like(batch.evidence[..., 0])
    if shadow is not None:
        curve = torch.tensor(list(CURVE.values()), dtype=torch.float64)
        bounds = torch.sigmoid(terms(batch, shadow) @ curve - MARGIN).clamp_max(SURE)
        bounds = torch.where(explained(batch, shadow) & (bounds >= LEAST), bounds, 0.0)
    return torch.where(proved, SURE, bounds)


def mode_shift(logits: Tensor, right: Tensor, variance: float = 4.0) -> float:
    """The constant by which log-odds are too low: the mode, with a prior N(0, variance), by Newton's method."""
    shift = torch.zeros((), dtype=torch.float64)
    for _ in range(40):
        p = torch.sigmoid(logits + shift)
        slope = (right - p).sum() - shift / variance
        shift = shift + (slope / ((p * (1 - p)).sum() + 1 / variance)).clamp(-1, 1)
    return float(shift)


def logistic(x: Tensor, right: Tensor, weight: Tensor, strength: float = 1.0) -> Tensor:
    """Logistic regression by Newton's method with a prior N(0, 1 / strength) on its coefficients."""
    w = x.new_zeros(x.shape[1])
    for _ in range(40):
        p = torch.sigmoid(x @ w)
        slope = x.T @ (weight * (p - right)) + strength * w
        curvature = (x.T * (weight * p * (1 - p))) @ x + strength * torch.eye(len(w), dtype=x.dtype)
        w = w - torch.linalg.solve(curvature, slope)
    return w


@dataclass(frozen=True)
class ReliabilityBin:
    """Cells or items that were said to be right with about the same probability."""

    said: float
    right: float
    cells: int
    low: float
    """Clopper and Pearson's 95% interval of the share that is right."""
    high: float


def reliability(
    confidence: Tensor, right: Tensor, bins: Sequence[float] = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
) -> tuple[ReliabilityBin, ...]:
    """The reliability curve: for every range of stated confidence its mean, and the share that is right."""
    said, true = confidence.flatten().double(), right.flatten().double()
    at = torch.bucketize(said, torch.tensor(bins, dtype=torch.float64), right=True)
    curve = []
    for index in range(len(bins) + 1):
        inside = at == index
        if inside.any():
            hits, cells = int(true[inside].sum()), int(inside.sum())
            interval = binomtest(hits, cells).proportion_ci()
            curve.append(ReliabilityBin(float(said[inside].mean()), hits / cells, cells, interval.low, interval.high))
    return tuple(curve)
