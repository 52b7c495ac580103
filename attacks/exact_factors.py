# SPDX-License-Identifier: Apache-2.0
"""The gradient of a linear layer as a product of low rank, with its noise, both read off the spectrum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_WHITE = 1.5
"""The largest singular value of noise in units of sigma (sqrt(m) + sqrt(d)), up to which it is white."""


@dataclass(frozen=True, eq=False)
class Factors:
    """G~ = left @ basis^T + noise."""

    left: Tensor
    """Y (m, r)."""
    noise: Tensor
    """(m,) standard deviation of the noise in an entry of row j of G~, over all columns."""
    most: Tensor
    """(m,) as `noise`, of the product of row j's noise with any vector of length 1.

    White noise, whose spectrum is flat, spreads over all columns: it is `noise`, and what it may hide, one vector of no
    larger singular value in the rows that have gradient. What is not white (rounding, which is the same in equal
    columns; the difference of similar examples) may be one vector, of the length of the row."""
    spread: Tensor
    """(r, r): the noise in Y_j a is noise[j] * |spread @ a|; it would be the identity if all columns were alike."""
    basis: Tensor
    """V (d or d + 1, r), orthonormal columns; the last row belongs to the bias."""
    signs: Tensor
    """V^T W~^T (r, m): an input p V^T has preactivations p @ signs."""
    lengths: Tensor
    """(m,) lengths of the rows of W~."""
    biased: bool
    gap: float
    """By which factor the smallest singular value of the signal exceeds the largest of the noise."""

    @property
    def rank(self) -> int:
        """How many independent inputs there are."""
        return self.left.shape[1]


def factorise(
    weight: Tensor, bias: Tensor | None, weight_gradient: Tensor, bias_gradient: Tensor | None, noise: float = 0.0
) -> list[Factors]:
    """Low-rank fits of the gradient, the most plausible rank first: the widest gaps of the spectrum.

    Singular values below what rounding to float32 (or the known noise) makes of zero count as equal.
    """
    biased = bias is not None and bias_gradient is not None
    whole = torch.cat([weight_gradient, bias_gradient[:, None]], 1) if biased else weight_gradient  # type: ignore[index]
    matrix = torch.cat([weight, bias[:, None]], 1) if biased else weight  # type: ignore[index]
    whole, matrix = whole.double(), matrix.double()
    columns = whole.any(0).nonzero()[:, 0]
    _, values, right = torch.linalg.svd(whole[:, columns], full_matrices=False)
    alive = int(whole.any(1).sum())
    total, count = float(whole.norm()), min(alive, len(columns))
    floor = total * max(2.0**-24, noise) / math.sqrt(max(count, 1))
    steps = values[:count].clamp_min(floor)
    ratios = steps[:-1] / steps[1:]
    ratios = ratios[: max(1, int(0.9 * count))]
    order = ratios.argsort(descending=True, stable=True)[:2].tolist()
    found = []
    for index in [k for n, k in enumerate(order) if n == 0 or ratios[k] > 3]:
        basis = whole.new_zeros(whole.shape[1], index + 1)
        basis[columns] = right[: index + 1].T
        left = whole @ basis
        rest = whole - left @ basis.T
        freedom = max(1, len(columns) - index - 1)
        rounding = 2.0**-26 * whole.norm(dim=1) / math.sqrt(len(columns))
        deviation = torch.maximum(rest.norm(dim=1) / math.sqrt(freedom), rounding)
        deviation = deviation.clamp_min(noise * total / math.sqrt(whole.numel()))
        left_over = float(rest.norm())
        edge = left_over * (alive**-0.5 + len(columns) ** -0.5)
        white = index + 1 < len(values) and float(values[index + 1]) <= _WHITE * edge
        hidden = float(values[index + 1]) / total if index + 1 < len(values) else 0.0
        below = deviation.hypot(hidden * whole.norm(dim=1))
        most = below if white else torch.maximum(deviation, rest.norm(dim=1))
        profile = rest.norm(dim=0) ** 2
        profile = profile / profile[columns].mean()
        spread = torch.linalg.cholesky(basis.T @ (profile[:, None] * basis) + 0.1 * torch.eye(index + 1)).T
        found.append(
            Factors(
                left,
                deviation,
                most,
                spread,
                basis,
                basis.T @ matrix.T,
                matrix.norm(dim=1),
                biased,
                float(ratios[index]),
            )
        )
    return found
