# SPDX-License-Identifier: Apache-2.0
"""In which ranges the numbers of a bound lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.errors import PrivacyError
from fedsim.privacy.loss import Floats

_LARGEST = 700.0  # e^700 is still a number


def growth(epsilon: float) -> float:
    """The factor e^ε, or the largest that can be written."""
    return math.exp(min(epsilon, _LARGEST))


def within(value: Any, least: float, most: float) -> bool:
    """Whether it is a number from least to most; a text, a list or NaN is none."""
    try:
        return bool(least <= value <= most)
    except (TypeError, ValueError):
        return False


def checked(epsilon: float, kappa: float = 0.0, delta: float = 0.0) -> None:
    """Refuse what is no ε, no probability or no δ."""
    for name, value, most in (("epsilon", epsilon, math.inf), ("kappa", kappa, 1.0), ("delta", delta, 1.0)):
        if not within(value, 0, most):
            raise PrivacyError(f"{name} is {value!r}, it must be between 0 and {most:g}")


def checked_share(name: str, value: float) -> float:
    """A number between 0 and 1."""
    if not within(value, 0, 1):
        raise PrivacyError(f"{name} is {value!r}, it must be between 0 and 1")
    return float(value)


def checked_whole(name: str, value: int, least: int) -> int:
    """A whole number of at least so much."""
    if not within(value, least, math.inf) or value == math.inf or int(value) != value:
        raise PrivacyError(f"{name} is {value!r}, it must be a whole number of at least {least}")
    return int(value)


def checked_prior(prior: Sequence[float]) -> Floats:
    """The probability of each possible record."""
    try:
        weights = np.asarray(prior, dtype=np.float64)
    except (TypeError, ValueError):
        weights = np.zeros(0)
    if weights.ndim != 1 or not len(weights) or (weights < 0).any() or not math.isclose(weights.sum(), 1, rel_tol=1e-6):
        raise PrivacyError("prior is not a list of probabilities that sum to 1; give one for each possible record")
    return weights
