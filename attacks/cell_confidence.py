# SPDX-License-Identifier: Apache-2.0
"""How probable it is that a reconstructed cell is right, and the reliability curve that shows whether that is true.

The histogram of a cell over the ensemble says how far the members agree (TabLeak, Vero et al. 2023, section 4.3), which
is not yet a probability: members agree on what is easy, on what is common, and, if few rows are left of a gradient that
something else disturbs, on what is wrong. A logistic curve carries agreement, the distance that the rows leave and the
kind of column over to a probability. It was fitted on simulated attacks on public tables, never on the batch under
attack, and is checked on tables that it was not fitted on: see benchmarks/table_calibration.py, which prints it anew.
Tables and networks differ, and a batch that the attacker makes himself (`shadow_rows`) shows by how much this one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import binomtest
from torch import Tensor

from fedsim.attacks.ensemble import Pooled, Problem
from fedsim.attacks.row_proof import Found
from fedsim.data.table import NumericColumn, TableEncoding

SURE = 1 - 1e-4
"""Of a cell of a proved row (none of 13,835 was wrong), and the most that is said of anything."""

CURVE = {
    "constant": 1.754,
    "number": -1.845,
    "agreement of the cell": 0.284,
    "mean agreement of the row": 0.509,
    "distance of the gradients": -0.391,
    "log of the categories to choose from": -0.671,
    "log of the rows / 2": -0.063,
}
"""Log-odds, from 110 attacked batches (16,641 cells) of seven tables: Adult, German credit, law school, wine, diabetes,
breast cancer with and without binned columns. Agreement is 1 - entropy, shifted and scaled to [-2, 2]; the distance is
its decimal logarithm from 1% (0) to 100% (2), since below that a saturated network shows nothing."""

SHADOW = {"slope": 0.910, "constant with a shadow": -0.198, "shift of a shadow batch": 0.526}
"""Log-odds with a shadow batch = slope * those of the curve + constant + 0.526 * the shift, from the same batches: of
what the curve lacks on a shadow batch it lacks about half on the real one."""

_MARGINS = ((12.0, 16.0), (0.94, 0.99, 0.999))
_ERRORS = ((0.03, 0.1, 0.2, 0.3), (0.999, 0.996, 0.96, 0.91, 0.6))
"""Cells of rows that the search found but could not prove, 38 batches of six tables under noise: up to each bound of a
category's margin (`Found.margin`) or a number's error, the share that is right (of 3,286 and 4,087 cells)."""


def evidence(pooled: Pooled, problem: Problem) -> Tensor:
    """(n * columns, len(CURVE)): what speaks for each cell, without any knowledge of the truth."""
    columns = list(zip(problem.encoding.columns, problem.encoding.slices().values(), strict=True))
    number = torch.tensor([isinstance(column, NumericColumn) for column, _ in columns])
    choices = torch.stack([problem.present[where].sum().clamp_min(1) for _, where in columns]).where(
        ~number, torch.ones(()).long()
    )
    agreement = 4 * (pooled.agreement.double() - 0.5)
    one = torch.ones_like(agreement)
    of_row = agreement.mean(1, keepdim=True)
    distance = torch.tensor(pooled.loss).clamp(1e-2, 1).log10() + 2
    rows = torch.tensor(float(len(agreement))).log() / 2
    terms = [one, one * number, agreement, one * of_row, one * distance, one * choices.log(), one * rows]
    return torch.stack(terms, -1).flatten(0, 1)


def log_odds(cells: Tensor, shift: float | None = None) -> Tensor:
    """(cells,) by the curve, corrected by what it lacked on a shadow batch, if there was one."""
    logits = cells @ torch.tensor(list(CURVE.values()), dtype=torch.float64)
    if shift is None:
        return logits
    slope, constant, trust = SHADOW.values()
    return slope * logits + constant + trust * shift


def mode_shift(logits: Tensor, right: Tensor, variance: float = 4.0) -> float:
    """The constant by which log-odds are too low: the mode, with a prior N(0, variance), by Newton's method."""
    shift = torch.zeros((), dtype=torch.float64)
    for _ in range(30):
        p = torch.sigmoid(logits + shift)
        slope = (right - p).sum() - shift / variance
        shift = shift + (slope / ((p * (1 - p)).sum() + 1 / variance)).clamp(-1, 1)
    return float(shift)


def pooled_confidence(pooled: Pooled, problem: Problem, shift: float | None = None) -> Tensor:
    """(n, columns) probability that each cell of the pooled rows is right; `shift`: of a shadow batch."""
    return torch.sigmoid(log_odds(evidence(pooled, problem), shift)).reshape(pooled.share.shape)


def found_confidence(found: Found, encoding: TableEncoding) -> Tensor:
    """(n, columns) probability that each cell of the rows of the search is right."""
    number = torch.tensor([isinstance(column, NumericColumn) for column in encoding.columns])
    first = torch.tensor([where.start for where in encoding.slices().values()])
    cells = torch.empty(len(found.inputs), len(number), dtype=torch.float64)
    cells[:, ~number] = _measured(found.margin, *_MARGINS)
    cells[:, number] = _measured(found.error[:, first[number]], *_ERRORS)
    return torch.where(found.proved[:, None], SURE, cells)


def _measured(value: Tensor, bounds: Sequence[float], shares: Sequence[float]) -> Tensor:
    """The share of the range that each value lies in."""
    at = torch.bucketize(value.contiguous(), torch.tensor(bounds, dtype=value.dtype), right=True)
    return torch.tensor(shares, dtype=torch.float64)[at]


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
    """Cells that were said to be right with about the same probability."""

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
