# SPDX-License-Identifier: Apache-2.0
"""κ: how often the best guess is right that somebody makes who has seen nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.audit.limits.ranges import checked_whole
from fedsim.errors import PrivacyError

Distance = Callable[[Tensor, Tensor], Tensor]
_ROUNDING = 1e-6  # of a distance, so that a row is at distance 0 of itself


@dataclass(frozen=True)
class Kappa:
    """κ_η of a prior over the rows of a data set, all equally likely unless it says otherwise.

    The best guess need not be a row of the data. `lower` is what the best row achieves as a guess; no guess achieves
    more than `upper`, because all rows that one guess is right for lie within twice the distance of each other.
    """

    lower: float
    upper: float
    rows: int

    def of_list(self, guesses: int) -> float:
        """No list of so many guesses holds a right one with a larger probability (union bound)."""
        return min(1.0, guesses * self.upper)


def kappa(
    rows: Tensor,
    distance: Distance,
    eta: float,
    *,
    doubled: Distance | None = None,
    prior: Sequence[float] | None = None,
) -> Kappa:
    """κ_η(π, ℓ) for rows (N, ...) and a metric distance(a (n, ...), b (N, ...)) -> (n, N).

    Where ℓ is no metric (cells within a tolerance), `doubled` is the distance that is at most 2η between any two rows
    for which one guess is right (cells within twice the tolerance). `prior` is the probability of each row, N of them.
    """
    if not len(rows):
        raise PrivacyError("kappa: there are no rows to guess from; give at least one public row")
    weights = None if prior is None else _given(prior, len(rows))
    within, around = 0.0, 0.0
    for start in range(0, len(rows), 256):
        block = rows[start : start + 256]
        near = distance(block, rows)
        wide = near if doubled is None else doubled(block, rows)
        within = max(within, _mass(near <= eta + _ROUNDING, weights))
        around = max(around, _mass(wide <= 2 * eta + _ROUNDING, weights))
    return Kappa(within, max(within, around), len(rows))


def _mass(right: Tensor, weights: Tensor | None) -> float:
    """The largest probability of the rows (n, N) that one of n guesses is right for."""
    return int(right.sum(1).max()) / right.shape[1] if weights is None else float((right.double() @ weights).max())


def kappa_uniform(m: int) -> Kappa:
    """κ_0 of m equally likely records: 1/m."""
    m = checked_whole("m", m, 1)
    return Kappa(1 / m, 1 / m, m)


def _given(prior: Sequence[float], rows: int) -> Tensor:
    weights = torch.as_tensor(prior, dtype=torch.float64)
    fits = weights.shape == (rows,) and bool((weights >= 0).all())
    if not fits or not math.isclose(float(weights.sum()), 1, rel_tol=1e-6):
        raise PrivacyError(f"prior is not a list of {rows} probabilities that sum to 1; give one for each row")
    return weights
