# SPDX-License-Identifier: Apache-2.0
"""What differential privacy allows a membership test: TPR − FPR, accuracy, TPR at an FPR, and all pairs of rates.

Each holds for the two neighbouring data sets that ε was accounted for, so the game must be of the claim's adjacency:
add/remove is "in or out", replace is "this record or that one". All are attained by some mechanism.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from scipy.special import ndtr

from fedsim.audit.limits.ranges import checked, checked_share, growth
from fedsim.audit.limits.tradeoff import Curve, approximate_dp, gaussian
from fedsim.privacy.loss import Floats

Game = Literal["strong", "resampling"]


def membership_advantage(epsilon: float, delta: float = 0.0, *, game: Game = "strong") -> float:
    """(e^ε − 1 + 2δ)/(e^ε + 1): the most that TPR − FPR can be (Kairouz et al. 2015; Humphries et al. 2023).

    `strong`: the adversary knows all other records, and both candidates. `resampling`: the record that took part, or
    one that is drawn anew from the same two candidates, which is the same one half of the times: half of it.
    """
    checked(epsilon, 0.0, delta)
    strong = min(1.0, math.tanh(epsilon / 2) + 2 * delta / (growth(epsilon) + 1))
    return strong if game == "strong" else strong / 2


def membership_advantage_yeom(epsilon: float) -> float:
    """min(1, e^ε − 1), as published by Yeom et al. (2018) for ε-DP: true, not tight."""
    checked(epsilon)
    return min(1.0, math.expm1(min(epsilon, 1.0)))


def membership_accuracy(epsilon: float, delta: float = 0.0, prior: float = 0.5) -> float:
    """The most that any test is right if a canary is in with probability `prior`.

    The best test lies at a corner of the trade-off curve: never "in" (but for δ), both errors equal, or always "in".
    """
    checked(epsilon, 0.0, delta)
    prior = checked_share("prior", prior)
    equal = 1 - (1 - delta) / (1 + growth(epsilon))
    return max(equal, 1 - prior + prior * delta, prior + (1 - prior) * delta)


def tpr_at_fpr(epsilon: float, delta: float, fpr: float) -> float:
    """1 − f(fpr) = min{1, e^ε fpr + δ, 1 − e^−ε (1 − δ − fpr)}."""
    return tpr_of_curve(approximate_dp(epsilon, delta), fpr)


# --- f-DP -----------------------------------------------------------------------------------------------------------


def membership_advantage_gdp(mu: float) -> float:
    """2 Φ(μ/2) − 1: the most that TPR − FPR can be under μ-GDP."""
    return float(2 * ndtr(mu / 2) - 1)


def tpr_at_fpr_gdp(mu: float, fpr: float) -> float:
    """Φ(Φ⁻¹(fpr) + μ)."""
    return tpr_of_curve(gaussian(mu), fpr)


def tpr_of_curve(curve: Curve, fpr: float) -> float:
    """1 − f(fpr): the largest true positive rate that a trade-off curve allows at a false positive rate."""
    return 1 - curve(checked_share("fpr", fpr))


def advantage_of_curve(curve: Curve) -> float:
    """1 − 2x where f(x) = x: the most that TPR − FPR can be under a symmetric trade-off curve."""
    low, high = 0.0, 0.5
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if curve(middle) > middle else (low, middle)
    return 1 - 2 * low  # on the side that allows more


def region(curve: Curve, points: int = 201) -> tuple[Floats, Floats, Floats]:
    """FPR from 0 to 1, and the least and the largest FNR that the curve allows at each: what a figure shades."""
    fpr = np.linspace(0.0, 1.0, points)
    least = np.array([curve(float(x)) for x in fpr])
    return fpr, least, 1 - least[::-1]  # the opposite of a test swaps the errors with their complements


def region_dp(epsilon: float, delta: float, points: int = 201) -> tuple[Floats, Floats, Floats]:
    """The region of (ε, δ)-DP (Kairouz, Oh & Viswanath 2015)."""
    return region(approximate_dp(epsilon, delta), points)


def region_gdp(mu: float, points: int = 201) -> tuple[Floats, Floats, Floats]:
    """The region of μ-GDP (Dong, Roth & Su 2022)."""
    return region(gaussian(mu), points)
