# SPDX-License-Identifier: Apache-2.0
"""What an audit has proved about epsilon, with everything that it means nothing without."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from fedsim.errors import AuditError

Tier = Literal["A", "B"]


@dataclass(frozen=True)
class Fixed:
    """The threshold (or the number of guesses) was written down before any score was seen."""

    def share(self, error: float) -> float:
        """The error probability that is left for the bound."""
        return error


@dataclass(frozen=True)
class HeldOut:
    """It was chosen on other trials than those that are counted."""

    def share(self, error: float) -> float:
        """The error probability that is left for the bound."""
        return error


@dataclass(frozen=True)
class Corrected:
    """The best of `choices` on the same trials: each is given the same part of the error probability (Bonferroni)."""

    choices: int

    def __post_init__(self) -> None:
        """Refuse a choice among nothing."""
        if self.choices < 1:
            raise AuditError(f"choices is {self.choices}; it must be at least 1: the number of thresholds looked at")

    def share(self, error: float) -> float:
        """The error probability that is left for the bound."""
        return error / self.choices


Selection = Fixed | HeldOut | Corrected


@dataclass(frozen=True)
class Estimate:
    """lower <= epsilon with probability `confidence` (and epsilon <= upper, where an upper end is given).

    Tier A holds without assumptions on the mechanism; tier B under the model that `assumptions` names. The two are
    never merged into one number. `delta` is the delta that epsilon belongs to.
    """

    lower: float
    upper: float | None
    confidence: float | None
    """None: a point estimate, that proves nothing."""
    method: str
    tier: Tier
    delta: float
    assumptions: tuple[str, ...] = ()
    median: float | None = None

    def __post_init__(self) -> None:
        """Refuse an estimate that cannot mean anything."""
        if math.isnan(self.lower) or self.lower < 0:
            raise AuditError(f"estimate: lower is {self.lower}; a lower bound on epsilon is a number of at least 0")
        if self.confidence is not None and not 0 < self.confidence < 1:
            raise AuditError(f"estimate: confidence is {self.confidence}; it must lie between 0 and 1")

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON, which knows no infinity."""
        fields = dataclasses.asdict(self)
        fields["assumptions"] = list(self.assumptions)
        return {k: "inf" if isinstance(v, float) and math.isinf(v) else v for k, v in fields.items()}
