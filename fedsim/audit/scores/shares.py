# SPDX-License-Identifier: Apache-2.0
"""So many of so many, with the interval in which the true rate lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scipy.special import betaincinv  # the quantile of the beta distribution; scipy.stats takes half a second

from fedsim.errors import PrivacyError


def clopper_pearson(right: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact two-sided interval of a binomial rate: either end is missed with probability (1 − confidence) / 2."""
    if not 0 <= right <= of:
        raise PrivacyError(f"right is {right}, it must be between 0 and the number of trials, {of}")
    tail = (
        1 - confidence
    ) / 2  # the ends are quantiles of beta distributions; scipy.stats takes half a second to import
    low = float(betaincinv(right, of - right + 1, tail)) if right else 0.0
    high = float(betaincinv(right + 1, of - right, 1 - tail)) if right < of else 1.0
    return low, high


@dataclass(frozen=True)
class Share:
    """`right` of `of`, and its Clopper-Pearson 95% interval, for trials that are independent of each other."""

    right: int
    of: int

    @property
    def share(self) -> float:
        """The rate that was measured; 0 of 0 is 0."""
        return self.right / self.of if self.of else 0.0

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Low and high end at 95%."""
        return clopper_pearson(self.right, self.of)

    def __add__(self, other: Share) -> Share:
        """Both together."""
        return Share(self.right + other.right, self.of + other.of)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.right} of {self.of} ({100 * self.share:.0f}%, 95% interval {100 * low:.0f} to {100 * high:.0f}%)"

    def to_dict(self) -> dict[str, Any]:
        """With the interval, for whoever reads the file."""
        low, high = self.interval
        return {"right": self.right, "of": self.of, "low": low, "high": high}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Share:
        """What `to_dict` wrote; the interval is computed again."""
        return cls(int(fields["right"]), int(fields["of"]))
