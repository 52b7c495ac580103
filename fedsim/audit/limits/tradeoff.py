# SPDX-License-Identifier: Apache-2.0
"""Trade-off curves: the least false negative rate f(x) that any test of false positive rate x can have.

A mechanism is f-DP if f bounds the tests of every two neighbouring data sets, in both directions (Dong, Roth & Su
2022). All curves here are convex, symmetric (f is its own inverse) and at most 1 − x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from fedsim.audit.limits.ranges import checked, checked_whole, within
from fedsim.errors import PrivacyError
from fedsim.privacy.accounting import Mechanism
from fedsim.privacy.loss import COARSE, Floats, Grid, Release, _compose, _tails

Curve = Callable[[float], float]
_LARGEST = 700.0  # e^700 is still a number
_LINES = 400  # of the envelope of a composed curve; fewer lie below it, which is the private side


def approximate_dp(epsilon: float, delta: float) -> Curve:
    """f(x) = max{0, 1 − δ − e^ε x, e^−ε (1 − δ − x)} (Wasserman & Zhou 2010; Dong et al., Proposition 2.5)."""
    checked(epsilon, 0.0, delta)
    growth, decay = math.exp(min(epsilon, _LARGEST)), math.exp(-epsilon)
    return lambda x: max(0.0, 1 - delta - growth * x, decay * (1 - delta - x))


def gaussian(mu: float) -> Curve:
    """G_μ(x) = Φ(Φ⁻¹(1 − x) − μ): N(0, 1) against N(μ, 1) (Dong et al., Definition 2.6)."""
    if not within(mu, 0, math.inf):
        raise PrivacyError(f"mu is {mu!r}; it must be at least 0")
    return lambda x: float(ndtr(-ndtri(x) - mu))


@dataclass(frozen=True, eq=False)
class Profile:
    """f(x) = max over ε of the curves of (ε, δ(ε)), δ that of the worse direction (Dong et al., Proposition 2.12)."""

    epsilons: Floats
    deltas: Floats

    def __call__(self, x: float) -> float:
        """The least false negative rate at a false positive rate."""
        left = 1 - self.deltas
        with np.errstate(over="ignore"):
            steep = (left - np.exp(self.epsilons) * x).max()
        return max(0.0, float(steep), float((np.exp(-self.epsilons) * (left - x)).max()))


def sampled_gaussian(noise_multiplier: float, sample_rate: float, steps: int, *, grid: Grid = COARSE) -> Curve:
    """The curve of `steps` Poisson-sampled Gaussian releases under add/remove, from the composed, pessimistic PLD.

    It never lies above the true curve, so that whatever refutes it has refuted the truth as well.
    """
    steps = checked_whole("steps", steps, 0)
    Mechanism("gaussian", noise_multiplier, "add/remove", "poisson", sample_rate)  # refuses what makes no sense
    if noise_multiplier == 0 or steps == 0:
        return lambda x: 0.0 if steps else 1 - x
    if sample_rate == 1:
        return gaussian(math.sqrt(steps) / noise_multiplier)
    lines = _compose({Release("gaussian", noise_multiplier, sample_rate): steps}, grid)
    profiles = []
    for interval, lowest, probabilities, infinite in lines:
        upper, lower = _tails(interval, probabilities, infinite)
        losses = interval * (lowest + np.arange(len(probabilities), dtype=np.float64))
        profiles.append((losses, upper - lower, infinite))
    # beyond this nothing is left to see, and the lines are better spent before it
    top = max(float(x[np.argmax(d <= 2 * i + 1e-12)] if (d <= 2 * i + 1e-12).any() else x[-1]) for x, d, i in profiles)
    epsilons: Floats = np.linspace(0.0, max(top, 0.0), _LINES)
    # δ falls, so that its value at the grid point below is an upper bound
    each = [d[np.clip(np.searchsorted(x, epsilons, "right") - 1, 0, None)] for x, d, _ in profiles]
    deltas: Floats = np.clip(np.max(each, axis=0), max(i for *_, i in profiles), 1.0)
    return Profile(epsilons, deltas)
