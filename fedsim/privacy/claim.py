# SPDX-License-Identifier: Apache-2.0
"""The privacy claim: an epsilon together with everything that it means nothing without."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fedsim.errors import PrivacyError
from fedsim.privacy.rounding import rounded_up

Unit = Literal["example", "client"]
Adjacency = Literal["add/remove", "replace"]
Sampling = Literal["none", "poisson", "fixed size"]


@dataclass(frozen=True)
class PrivacyClaim:
    """(epsilon, delta)-differential privacy of one unit against one observer, and what it rests on.

    Guarantees: for any two federations that differ in one `unit` in the sense of `adjacency`, and any set S of what the
    `observer` may see (`released`), P[S] <= e^epsilon P'[S] + delta, if all `assumptions` hold.

    The claim can be recomputed from its own fields: `compositions` releases of a mechanism with `noise_multiplier`
    (noise scale divided by the sensitivity under `adjacency`, which is one or two clipping norms) and `sample_rate`.
    """

    epsilon: float
    delta: float
    unit: Unit
    adjacency: Adjacency
    sampling: Sampling
    released: str
    observer: str
    accountant: str
    mechanism: str
    noise_multiplier: float
    sample_rate: float
    compositions: int
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a claim that cannot mean anything."""
        object.__setattr__(self, "assumptions", tuple(self.assumptions))
        allowed = (("unit", get_args(Unit)), ("adjacency", get_args(Adjacency)), ("sampling", get_args(Sampling)))
        for field, values in allowed:
            if getattr(self, field) not in values:
                raise PrivacyError(f"claim: {field} is {getattr(self, field)!r}, it must be one of {', '.join(values)}")
        ranges = (
            ("epsilon", self.epsilon >= 0, "at least 0"),
            ("delta", 0 <= self.delta < 1, "at least 0 and below 1"),
            ("noise_multiplier", 0 <= self.noise_multiplier < math.inf, "finite and at least 0"),
            ("sample_rate", 0 < self.sample_rate <= 1, "above 0 and at most 1"),
            ("compositions", self.compositions >= 0, "at least 0"),
        )
        for field, holds, meaning in ranges:
            if not holds:  # also when it is not a number
                raise PrivacyError(f"claim: {field} is {getattr(self, field)!r}, it must be {meaning}")

    @property
    def finite(self) -> bool:
        """Whether anything is claimed at all."""
        return math.isfinite(self.epsilon)

    def __str__(self) -> str:
        """The claim as a sentence."""
        return self.sentence()

    def sentence(self) -> str:
        """One sentence for people; never epsilon without delta, unit, adjacency and observer. Epsilon is rounded up."""
        if not self.finite:
            return f"No privacy claim for one {self.unit} against {self.observer}: {self.mechanism}."
        sampling = "" if self.sampling == "none" else f" ({self.sampling} sampling, rate {self.sample_rate:.3g})"
        sampling = sampling.replace("poisson", "Poisson")
        times = "once" if self.compositions == 1 else f"{self.compositions:,} times"
        if self.unit == "client" and self.sampling == "none":  # a client spends in the rounds that it takes part in
            times += " (the rounds of the client that takes part most often)"
        return (
            f"Each {self.unit} is protected with ε ≤ {rounded_up(self.epsilon)} at δ = {self.delta:g}"
            f" ({self.adjacency} one {self.unit}) against {self.observer}. What is released is"
            f" {self.released}, with {self.mechanism}, composed {times}{sampling}, accounted by {self.accountant}."
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON, which knows no infinity: an infinite epsilon becomes the string "inf"."""
        fields = dataclasses.asdict(self)
        return fields | {
            "epsilon": self.epsilon if self.finite else "inf",
            "assumptions": list(self.assumptions),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> PrivacyClaim:
        """The claim that `to_dict` wrote."""
        names = {field.name for field in dataclasses.fields(cls)}
        if odd := names.symmetric_difference(fields):
            raise PrivacyError(f"claim: field {sorted(odd)[0]!r} is missing or unknown; a claim has {sorted(names)}")
        try:
            numbers = {
                "epsilon": float(fields["epsilon"]),
                "delta": float(fields["delta"]),
                "noise_multiplier": float(fields["noise_multiplier"]),
                "sample_rate": float(fields["sample_rate"]),
                "compositions": int(fields["compositions"]),
                "assumptions": tuple(fields["assumptions"]),
            }
        except (TypeError, ValueError) as error:
            raise PrivacyError(f"claim: a number cannot be read ({error}); write it as to_dict does") from error
        return cls(**{**fields, **numbers})
