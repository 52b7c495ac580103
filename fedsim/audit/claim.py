# SPDX-License-Identifier: Apache-2.0
"""The claim that an audit tests: ε and δ, and what they mean nothing without."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, get_args

from fedsim.errors import AuditError
from fedsim.privacy.claim import Adjacency, Unit
from fedsim.privacy.rounding import rounded_up


class ClaimLike(Protocol):
    """What an audit must know of a claim; a `PrivacyClaim` is one."""

    @property
    def epsilon(self) -> float:
        """ε."""

    @property
    def delta(self) -> float:
        """δ."""

    @property
    def unit(self) -> Unit:
        """Who is protected."""

    @property
    def adjacency(self) -> Adjacency:
        """What neighbours differ by."""


@dataclass(frozen=True)
class Claim:
    """(epsilon, delta)-differential privacy of one unit, for neighbours in the sense of `adjacency`."""

    epsilon: float
    delta: float = 0.0
    unit: Unit = "example"
    adjacency: Adjacency = "add/remove"

    def __post_init__(self) -> None:
        """Refuse what cannot be tested."""
        if not 0 <= self.epsilon < math.inf:
            raise AuditError(f"epsilon is {self.epsilon!r}; a claim that can be tested is a number of at least 0")
        if not 0 <= self.delta < 1:
            raise AuditError(f"delta is {self.delta!r}; it must be at least 0 and below 1")
        for field, kinds in (("unit", get_args(Unit)), ("adjacency", get_args(Adjacency))):
            if getattr(self, field) not in kinds:
                raise AuditError(f"{field} is {getattr(self, field)!r}; it must be one of {', '.join(kinds)}")

    @classmethod
    def of(cls, claim: ClaimLike) -> Claim:
        """The part of any claim that can be tested."""
        return cls(float(claim.epsilon), float(claim.delta), claim.unit, claim.adjacency)

    def __str__(self) -> str:
        return f"ε = {rounded_up(self.epsilon)} at δ = {self.delta:g} ({self.adjacency} one {self.unit})"
