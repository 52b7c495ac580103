# SPDX-License-Identifier: Apache-2.0
"""Examples of a batch that are alone in some rows of a linear layer's gradient, found by the agreement of rows.

Behind a ReLU, dL/dW_r = sum of d_ir x_i over the examples that activate unit r. If that is one example, the quotient
dL/dW_r / dL/db_r is the example; otherwise it is a mixture whose proportions differ from row to row. So quotients that
agree with each other to the precision of float32 are examples. One that is found, with its label, can be taken off the
gradient, and then others may be alone (Kariyappa et al. 2023 name the step; here it is exact).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_EPSILON = 2.0**-23
_PRECISE = 2e-5  # relative error of a quotient beyond which a row is not asked: mixtures may agree that well
_SUPPORT = 3  # rows that have to agree

SlopesOf = Callable[[Tensor], Tensor]
"""(d,) -> (classes, m): dL/dz of the layer for this input and each label, of one example's own loss."""


@dataclass(frozen=True, eq=False)
class LoneExample:
    """An input (d,) float64 that several rows agree on."""

    flat: Tensor
    rows: Tensor
    label: int | None
    """The label whose own gradient the rows confirm; None if there is none, or if it could not be tried."""
    share: float
    """What the example counts for in the gradient: 1 / batch size, times the factor of a clipping."""


@dataclass(eq=False)
class RowGradient:
    """A layer's gradient from which examples can be taken off, with the error that this leaves in each row."""

    weight: Tensor
    bias: Tensor
    error: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.error = 16 * _EPSILON * self.bias.abs().max().expand(len(self.bias)).clone()

    def take_off(self, flat: Tensor, slopes: Tensor) -> None:
        """Subtract an example with its dL/dz, which is known to about ten units of float32's precision."""
        self.weight = self.weight - torch.outer(slopes, flat)
        self.bias = self.bias - slopes
        self.error = self.error + 16 * _EPSILON * slopes.abs()


def lone_examples(
    weight: Tensor, bias: Tensor, slopes_of: SlopesOf | None, *, most: int | None = None
) -> list[LoneExample]:
    """All examples that can be found by agreement, alternating with taking them off where `slopes_of` is given.

    Args:
        weight: (m, d) float64, dL/dW.
        bias: (m,) float64, dL/db.
        slopes_of: what an input and a label would contribute; None where the gradient is not that of one step.
        most: how many examples there are.
    """
    gradient = RowGradient(weight, bias)
    found: list[LoneExample] = []
    while most is None or len(found) < most:
        candidates = [_with_label(gradient, one, slopes_of) for one in _agreeing(gradient)]
        new: list[LoneExample] = []
        for each in candidates:
            fits = not found or counts_as(each, found[0])
            if fits and not any(_same(each.flat, other.flat) for other in (*found, *new)):
                new.append(each)
        found += new
        peeled = [each for each in new if each.label is not None and counts_as(each, found[0])]
        if slopes_of is None or not peeled:
            break
        for each in peeled:
            gradient.take_off(each.flat, each.share * slopes_of(each.flat)[each.label])
    return found[:most]


def counts_as(one: LoneExample, other: LoneExample) -> bool:
    """Every example of a batch counts the same; the rounding errors that others have left behind do not."""
    return one.label is not None and abs(one.share - other.share) < 1e-2 * other.share


def _agreeing(gradient: RowGradient) -> list[LoneExample]:
    """Groups of at least three rows whose quotients are equal within their errors; the largest groups first."""
    relative = gradient.error / gradient.bias.abs().clamp_min(1e-300)
    rows = (relative < _PRECISE).nonzero()[:, 0]
    if len(rows) < _SUPPORT:
        return []
    quotients = gradient.weight[rows] / gradient.bias[rows, None]
    lengths = quotients.norm(dim=1)
    allowed = (relative[rows, None] + relative[rows]) * torch.maximum(lengths[:, None], lengths)
    near = torch.cdist(quotients, quotients, compute_mode="donot_use_mm_for_euclid_dist") <= allowed
    groups: list[LoneExample] = []
    taken = torch.zeros(len(rows), dtype=torch.bool)
    for seed in near.sum(1).argsort(descending=True).tolist():
        members = near[seed] & ~taken
        if taken[seed] or int(members.sum()) < _SUPPORT:
            continue
        taken |= members
        slopes = gradient.bias[rows[members]]
        flat = slopes @ gradient.weight[rows[members]] / slopes.square().sum()
        groups.append(LoneExample(flat, rows[members], None, 0.0))
    return groups


def _with_label(gradient: RowGradient, one: LoneExample, slopes_of: SlopesOf | None) -> LoneExample:
    """Find the label for which the example's own dL/dz is proportional to the gradient of its rows."""
    if slopes_of is None:
        return one
    observed = gradient.bias[one.rows]
    slopes = slopes_of(one.flat)[:, one.rows]
    shares = slopes @ observed / slopes.square().sum(1).clamp_min(1e-300)
    left = (shares[:, None] * slopes - observed).norm(dim=1) / observed.norm()
    best = int(torch.where(shares > 0, left, torch.inf).argmin())
    if shares[best] <= 0 or left[best] > 1e-4:
        return one
    return LoneExample(one.flat, one.rows, best, float(shares[best]))


def _same(first: Tensor, second: Tensor) -> bool:
    """Rows in which another example has a tiny part agree on nearly the same input, less precisely."""
    return bool((first - second).norm() <= 2e-2 * torch.maximum(first.norm(), second.norm()))
