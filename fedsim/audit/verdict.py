# SPDX-License-Identifier: Apache-2.0
"""The verdict: does what was measured agree with what was claimed, how sure is that, and what would settle it.

| status       | when                                                                                             |
|--------------|--------------------------------------------------------------------------------------------------|
| violated     | a tier A lower bound is above the claim; equivalently the p-value is at most 1 − confidence       |
| consistent   | not violated, and an ordinary mechanism of `factor` times the claimed ε (and at least `LEAST`    |
|              | more) would have been caught with probability `POWER` by the runs that were made                 |
| inconclusive | neither: the runs were too few for the claim; `settle` says how many are needed                  |

A claim that holds is found `violated` with probability at most 1 − confidence, whatever the mechanism. `consistent` is
no proof of privacy: it says that this adversary, who had a fair chance, found nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from fedsim.audit.estimate import Estimate
from fedsim.errors import AuditError
from fedsim.privacy.claim import Adjacency, Unit
from fedsim.privacy.rounding import p_value_text, rounded_down, rounded_up

Status = Literal["consistent", "violated", "inconclusive"]
POWER = 0.9
"""The probability with which a mechanism `factor` times worse than its claim must be caught."""

LEAST = 0.1
"""The ε by which it must be worse at least, lest a claim of next to nothing need endless runs."""


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


@dataclass(frozen=True)
class Gap:
    """Why less was proved than is claimed, in units of ε; the parts that are known add up to claim − lower bound."""

    accountant: float | None = None
    """Claim minus the exact ε of the mechanism, where that is known: what the accountant gives away."""
    threat_model: float | None = None
    """Exact ε (or claim) minus what a Gaussian fit of the scores suggests: what this adversary does not see."""
    score: float | None = None
    """The Gaussian fit minus the point estimate at the event that was counted: what one event leaves unused."""
    statistics: float | None = None
    """Point estimate minus lower bound: what more runs would gain."""

    def sentence(self) -> str:
        """The parts, largest first."""
        parts = {name.replace("_", " "): part for name, part in dataclasses.asdict(self).items() if part is not None}
        ordered = sorted(parts.items(), key=lambda item: -abs(item[1]))
        return ", ".join(f"{name} {part:+.3f}" for name, part in ordered)


@dataclass(frozen=True)
class Verdict:
    """What an audit found; `estimates[0]` is the tier A bound that decided."""

    status: Status
    claim: Claim
    estimates: tuple[Estimate, ...]
    p_value: float
    confidence: float
    reason: str
    power: float
    """The probability that a mechanism of `factor` times the claimed ε would have been caught."""
    factor: float
    trials: int
    """Runs of the mechanism (or canaries), all together."""
    gap: Gap = dataclasses.field(default_factory=Gap)
    settle: str = ""
    evidence: str = ""
    """The data sets and the event on which most was seen."""

    @property
    def lower(self) -> float:
        """The lower bound on ε that was proved."""
        return self.estimates[0].lower

    def sentence(self) -> str:
        """For people: never epsilon without delta, unit and confidence."""
        proved = (
            f"ε ≥ {rounded_down(self.lower)} at δ = {self.claim.delta:g} with {100 * self.confidence:g}% confidence"
        )
        head = f"{self.status.capitalize()}: claimed is {self.claim}; proved is {proved}, in {self.trials} runs."
        tail = f" {self.settle}" if self.settle else ""
        return f"{head} {self.reason}{tail}"

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "claim": dataclasses.asdict(self.claim),
            "estimates": [estimate.to_dict() for estimate in self.estimates],
            "gap": dataclasses.asdict(self.gap),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Verdict:
        """What `to_dict` wrote."""
        try:
            rest = {field.name: fields[field.name] for field in dataclasses.fields(cls)}
            claim, gap = Claim(**rest.pop("claim")), Gap(**rest.pop("gap"))
            estimates = tuple(_estimate(estimate) for estimate in rest.pop("estimates"))
        except (KeyError, TypeError) as error:
            raise AuditError(
                f"verdict: {error} is missing or unknown; it must be as Verdict.to_dict writes it"
            ) from error
        return cls(claim=claim, gap=gap, estimates=estimates, **rest)


def decide(
    claim: Claim,
    estimates: Sequence[Estimate],
    p_value: float,
    *,
    confidence: float,
    power: float,
    factor: float = 2.0,
    trials: int,
    gap: Gap | None = None,
    settle: str = "",
    evidence: str = "",
) -> Verdict:
    """The verdict on what was measured, by the table above. The first estimate must be of tier A: it decides.

    `p_value` must already pay for everything that was tried, at the same level as the first estimate.
    """
    if not estimates or estimates[0].tier != "A":
        raise AuditError("estimates must begin with one of tier A; only it can refute a claim")
    violated = p_value <= 1 - confidence and estimates[0].lower > claim.epsilon
    suspected = [estimate for estimate in estimates if estimate.tier == "B" and estimate.lower > claim.epsilon]
    quiet = power >= POWER and not suspected
    status: Status = "violated" if violated else "consistent" if quiet else "inconclusive"
    caught = (
        f"An ordinary mechanism of {factor:g} times the claimed ε would have been caught with probability"
        f" {rounded_down(power, 2)}."
    )
    reason = {
        "violated": f"Were the claim true, this would happen with probability at most {p_value_text(p_value)}"
        f" ({evidence or estimates[0].method}).",
        "consistent": caught,
        "inconclusive": caught,
    }[status]
    if suspected and not violated:
        worst = max(suspected, key=lambda estimate: estimate.lower)
        reason += (
            f" But if its model holds, tier B ({worst.method}) proves ε ≥ {rounded_down(worst.lower)} at"
            f" δ = {claim.delta:g}, which is above the claim: look at the noise, and raise the runs."
        )
    return Verdict(
        status=status,
        claim=claim,
        estimates=tuple(estimates),
        p_value=p_value,
        confidence=confidence,
        reason=reason,
        power=power,
        factor=factor,
        trials=trials,
        gap=gap or Gap(),
        settle=settle if status == "inconclusive" else "",
        evidence=evidence,
    )


def _estimate(fields: Mapping[str, Any]) -> Estimate:
    numbers: dict[str, Any] = {k: math.inf if v == "inf" else v for k, v in fields.items()}
    return Estimate(**{**numbers, "assumptions": tuple(fields["assumptions"])})
