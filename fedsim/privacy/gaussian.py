# SPDX-License-Identifier: Apache-2.0
"""Closed forms of the Gaussian mechanism (noise of standard deviation σ, sensitivity 1)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from scipy.special import erfcx, log_ndtr

from fedsim.errors import PrivacyError


def check_delta(delta: float) -> None:
    """A delta of 0 or 1 is no approximate differential privacy."""
    if not 0 < delta < 1:
        raise PrivacyError(f"delta is {delta!r}, it must be above 0 and below 1; 1e-5 is usual")


def check_epsilon(epsilon: float) -> None:
    """A target must be a positive number."""
    if not 0 < epsilon < math.inf:
        raise PrivacyError(f"epsilon is {epsilon!r}, it must be positive and finite")


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """The exact δ(ε) = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ) (Balle & Wang 2018, Theorem 8)."""
    return math.exp(_log_delta(noise_multiplier, epsilon))


def _log_delta(sigma: float, epsilon: float) -> float:
    """Logarithm of δ(ε), never too small: what rounding may have taken is added.

    With a = 1/2σ − εσ and b = 1/2σ + εσ: b² − a² = 2ε, so that e^ε Φ(−b) = e^(−a²/2) erfcx(b/√2)/2, in which no large
    number is taken from another. (ε + ln Φ(−b) is off by more than ln δ where ε is beyond 1e17, to the wrong side.)
    Where σ is large, both terms are nearly equal, and their difference has few digits left.
    """
    if sigma == 0:
        return 0.0
    if math.isinf(sigma):
        return -math.inf
    a, b = 0.5 / sigma - epsilon * sigma, 0.5 / sigma + epsilon * sigma
    upper = float(log_ndtr(a))
    lower = -0.5 * a * a + math.log(0.5 * float(erfcx(b / math.sqrt(2))))
    lost = 4 * sys.float_info.epsilon * (1 + abs(upper) + abs(lower))
    return upper + math.log(min(1.0, lost - math.expm1(min(0.0, lower - upper))))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The smallest ε of one Gaussian release (Balle & Wang 2018, exact). T releases are one with σ/√T (Dong et al.)."""
    check_delta(delta)
    if not noise_multiplier >= 0:
        raise PrivacyError(f"noise_multiplier is {noise_multiplier!r}, it must be at least 0")
    if noise_multiplier < 1e-12:  # where even a is no number to speak of
        return math.inf
    goal = math.log(delta)
    if _log_delta(noise_multiplier, 0.0) <= goal:
        return 0.0
    return _safe_root(lambda epsilon: _log_delta(noise_multiplier, epsilon) - goal, 0.0, 1.0)


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """The smallest σ for which one Gaussian release is (ε, δ)-DP (Balle & Wang 2018, exact for every ε > 0)."""
    check_delta(delta)
    check_epsilon(epsilon)
    goal = math.log(delta)
    low = 1.0
    while _log_delta(low, epsilon) <= goal:
        low /= 2
    return _safe_root(lambda sigma: _log_delta(sigma, epsilon) - goal, low, 2 * low)


def classic_gaussian_sigma(epsilon: float, delta: float) -> float:
    """σ = √(2 ln(1.25/δ)) / ε (Dwork & Roth 2014, Theorem A.1), offered by name for comparison; needs ε ≤ 1."""
    check_delta(delta)
    check_epsilon(epsilon)
    if epsilon > 1:
        raise PrivacyError(
            f"epsilon is {epsilon:g}, but the classic formula is proved only up to 1 (numerically it is conservative"
            " to about 8.4 at delta 1e-5 and invalid above); use the analytic gaussian_sigma, which holds for every"
            " epsilon and needs less noise"
        )
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def _safe_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a decreasing function crosses 0, on the side where it is at most 0 (which is the private side)."""
    from scipy.optimize import brentq  # takes a third of a second to import

    while function(high) > 0:
        low, high = high, 2 * high
    root = float(brentq(function, low, high, xtol=1e-14, rtol=1e-14))
    step = 1e-15 * max(root, 1.0)
    while function(root) > 0:
        root, step = root + step, 2 * step
    return root
