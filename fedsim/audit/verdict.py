# SPDX-License-Identifier: Apache-2.0
"""The verdict: does what was measured agree with what was claimed, how sure is that, and what would settle it.

| status       | when                                                                                             |
|--------------|--------------------------------------------------------------------------------------------------|
| violated     | the p-value of the test that decided is at most 1 − confidence, and, where the test is of ε, its |
|              | tier A lower bound is above the claim                                                            |
| consistent   | not violated, no tier B bound above the claim, nothing left open, and an ordinary mechanism of   |
|              | `factor` times the claimed ε (and at least `LEAST` more) would have been caught with probability |
|              | `POWER` by the runs that were made                                                               |
| inconclusive | neither; `settle` names what is missing                                                          |

A claim that holds is found `violated` with probability at most 1 − confidence: whatever the mechanism, if the test is
of tier A, and under the model that the test names, if it is of tier B. `consistent` is no proof of privacy: this
adversary, who had a fair chance, found nothing.

`decide` makes all verdicts, of mechanisms, games, federations and transcripts; `Verdict` refuses one that breaks the
table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedsim.audit.claim import Claim, ClaimLike
from fedsim.audit.estimate import Estimate, Tier
from fedsim.errors import AuditError
from fedsim.privacy.rounding import p_value_text, rounded_down

__all__ = [
    "LEAST",
    "POWER",
    "Claim",
    "ClaimLike",
    "DecidingTest",
    "Gap",
    "Status",
    "Verdict",
    "decide",
    "nothing_proved",
]

Status = Literal["consistent", "violated", "inconclusive"]
POWER = 0.9
"""The probability with which a mechanism `factor` times worse than its claim must be caught."""

LEAST = 0.1
"""The ε by which it must be worse at least, lest a claim of next to nothing need endless runs."""


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
class DecidingTest:
    """The test that a p-value belongs to, and what it refutes when it rejects."""

    name: str = "exact test"
    tier: Tier = "A"
    of: Literal["epsilon", "releases"] = "epsilon"
    """epsilon: ε at δ. releases: the noise, rate and number of releases that the claim names; ε may still be kept."""


@dataclass(frozen=True)
class Verdict:
    """What an audit found. `estimates[0]` is of tier A; a `violated` by a test of ε has it above the claim."""

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
    check: str = ""
    """Python that makes the two data sets; empty where there is none, or where they are large."""
    test: DecidingTest = dataclasses.field(default_factory=DecidingTest)
    """What `p_value` is of."""

    def __post_init__(self) -> None:
        """Refuse a verdict that the table does not allow."""
        if not self.estimates or self.estimates[0].tier != "A":
            raise AuditError("estimates must begin with one of tier A: what is proved without a model, if only ε ≥ 0")
        if other := [estimate.delta for estimate in self.estimates if estimate.delta != self.claim.delta]:
            raise AuditError(f"an estimate is at δ = {other[0]:g} and the claim at δ = {self.claim.delta:g}")
        refuted = _refuted(self.claim, self.estimates, self.p_value, self.confidence, self.test)
        if (self.status == "violated") != refuted:
            raise AuditError(
                f"verdict is {self.status}, with p = {self.p_value:g} at confidence {self.confidence:g} and"
                f" ε ≥ {self.lower:g} proved where {self.claim} is claimed; use decide"
            )
        above = _suspected(self.claim, self.estimates)
        if self.status == "consistent" and (self.power < POWER or above):
            raise AuditError(
                f"verdict is consistent, with power {self.power:g} (at least {POWER:g} is needed) and {len(above)}"
                " tier B bounds above the claim (there must be none); use decide"
            )

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
            "test": dataclasses.asdict(self.test),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Verdict:
        """What `to_dict` wrote, also before verdicts had `check` and `test`."""
        try:
            rest = {field.name: fields[field.name] for field in dataclasses.fields(cls) if field.name not in _LATER}
            claim, gap = Claim(**rest.pop("claim")), Gap(**rest.pop("gap"))
            estimates = tuple(_estimate(estimate) for estimate in rest.pop("estimates"))
            test = (
                DecidingTest(**fields["test"]) if "test" in fields else _test_of_old(claim, estimates, fields["status"])
            )
        except (KeyError, TypeError) as error:
            raise AuditError(
                f"verdict: {error} is missing or unknown; it must be as Verdict.to_dict writes it"
            ) from error
        if estimates and estimates[0].tier != "A":
            estimates = (nothing_proved(claim, rest["confidence"]), *estimates)
        return cls(claim=claim, gap=gap, estimates=estimates, test=test, check=str(fields.get("check", "")), **rest)


_LATER = ("check", "test")


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
    check: str = "",
    test: DecidingTest | None = None,
    refuted_by: str = "",
    open_question: str = "",
) -> Verdict:
    """The verdict on what was measured, by the table above.

    Args:
        claim: what is tested.
        estimates: bounds on ε; the first must be of tier A.
        p_value: of `test`; it must already pay for everything that was tried.
        confidence: a true claim is refuted with probability at most 1 − confidence.
        power: the probability that a mechanism `factor` times worse than claimed would have been caught.
        factor: see `power`.
        trials: runs of the mechanism, or canaries.
        gap: why less was proved than is claimed.
        settle: what would give the power that is missing.
        evidence: the data sets and the event on which most was seen.
        check: Python that makes the two data sets.
        test: what the p-value is of; by default the exact test of ε.
        refuted_by: what was seen, for the sentence; by default the evidence.
        open_question: what must be known before the claim can be called consistent, and how to say it.
    """
    test = test or DecidingTest()
    violated = bool(estimates) and _refuted(claim, estimates, p_value, confidence, test)
    suspected = _suspected(claim, estimates)
    quiet = power >= POWER and not suspected and not open_question
    status: Status = "violated" if violated else "consistent" if quiet else "inconclusive"
    missing = (settle if power < POWER else "", open_question)
    return Verdict(
        status=status,
        claim=claim,
        estimates=tuple(estimates),
        p_value=p_value,
        confidence=confidence,
        reason=_reason(claim, estimates, p_value, power, factor, violated, test, refuted_by or evidence),
        power=power,
        factor=factor,
        trials=trials,
        gap=gap or Gap(),
        settle=" ".join(part for part in missing if part) if status == "inconclusive" else "",
        evidence=evidence,
        check=check,
        test=test,
    )


def nothing_proved(claim: Claim, confidence: float) -> Estimate:
    """ε ≥ 0: the tier A bound of evidence without a coin that decided who was in."""
    why = "no coin decided who was in, so that nothing about ε follows without a model"
    return Estimate(0.0, None, confidence, "no test without a model", "A", claim.delta, (why,))


def _refuted(
    claim: Claim, estimates: Sequence[Estimate], p_value: float, confidence: float, test: DecidingTest
) -> bool:
    return p_value <= 1 - confidence and (test.of == "releases" or estimates[0].lower > claim.epsilon)


def _suspected(claim: Claim, estimates: Sequence[Estimate]) -> list[Estimate]:
    """Tier B bounds above the claim: they refute nothing, but must not be passed over."""
    return [estimate for estimate in estimates if estimate.tier == "B" and estimate.lower > claim.epsilon]


def _reason(
    claim: Claim,
    estimates: Sequence[Estimate],
    p_value: float,
    power: float,
    factor: float,
    violated: bool,
    test: DecidingTest,
    seen: str,
) -> str:
    if violated:
        reason = f"Were the claim true, this would happen with probability at most {p_value_text(p_value)}: {seen}."
        if estimates[0].lower <= claim.epsilon:
            reason += " What is refuted is the noise, rate or number of releases that the claim names; ε itself is not."
        return reason
    reason = (
        f"An ordinary mechanism of {factor:g} times the claimed ε would have been caught with probability"
        f" {rounded_down(power, 2)}."
    )
    if suspected := _suspected(claim, estimates):
        bounds = [estimate for estimate in estimates if estimate.tier == "B"]
        among = f", the largest of {len(bounds)} such bounds," if len(bounds) > 1 else ""
        worst = max(suspected, key=lambda estimate: estimate.lower)
        reason += (
            f" But if its model holds, tier B ({worst.method}){among} proves ε ≥ {rounded_down(worst.lower)} at"
            f" δ = {claim.delta:g}, which is above the claim: look at the noise, and raise the runs."
        )
    return reason


def _test_of_old(claim: Claim, estimates: Sequence[Estimate], status: str) -> DecidingTest:
    """Which kind of test decided, in a file that does not say so."""
    decided = status != "violated" or (estimates[0].tier == "A" and estimates[0].lower > claim.epsilon)
    return DecidingTest() if decided else DecidingTest("a test of the claimed releases", "B", "releases")


def _estimate(fields: Mapping[str, Any]) -> Estimate:
    numbers: dict[str, Any] = {k: math.inf if v == "inf" else v for k, v in fields.items()}
    return Estimate(**{**numbers, "assumptions": tuple(fields["assumptions"])})
