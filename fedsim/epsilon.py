# SPDX-License-Identifier: Apache-2.0
"""An accountant at the prompt: what so much noise spends, or how much noise a budget needs, by every accountant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fedsim.errors import PrivacyError
from fedsim.privacy.accounting import Accountant, Mechanism, account, noise_multiplier_for
from fedsim.privacy.rounding import rounded_up

ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "prv")


@dataclass(frozen=True)
class Question:
    """`steps` releases of noise, each of which a unit joins with probability `rate`; add/remove one unit."""

    rate: float
    steps: int
    delta: float
    sigma: float | None = None
    target: float | None = None
    noise: Literal["gaussian", "laplace"] = "gaussian"

    def sentence(self) -> str:
        """What every number below it is about."""
        sampling = f"Poisson sampling with rate {self.rate:g}" if self.rate < 1 else "no sampling"
        return (
            f"{self.steps:,} release{'s' if self.steps > 1 else ''} of {self.noise.capitalize()} noise, {sampling}; "
            f"ε at δ = {self.delta:g}, per unit, add/remove one unit:"
        )


@dataclass(frozen=True)
class Answer:
    """What one accountant says; `refusal` is why it says nothing."""

    accountant: str
    noise_multiplier: float | None
    epsilon: float | None
    delta: float
    method: str = ""
    refusal: str = ""

    def sentence(self, target: float | None) -> str:
        """The answer for people; epsilon and sigma are rounded up, so that neither promises more than was computed."""
        if self.epsilon is None or self.noise_multiplier is None:
            return self.refusal
        epsilon = (
            f"ε ≤ {rounded_up(self.epsilon, 4)} at δ = {self.delta:g} per unit"
            if math.isfinite(self.epsilon)
            else "no finite ε"
        )
        if target is None:
            return f"{epsilon}, with σ = {self.noise_multiplier:g}; {self.method}"
        return f"σ = {rounded_up(self.noise_multiplier, 4)}, which spends {epsilon}; {self.method}"


def answers(question: Question, accountants: Sequence[Accountant] = ACCOUNTANTS) -> Iterator[Answer]:
    """What each accountant says, as soon as it is known; one that refuses may do so only if another answers."""
    _check(question)
    refusals = []
    for accountant in accountants:
        try:
            yield _answer(question, accountant)
        except PrivacyError as error:
            refusals.append(str(error))
            if len(refusals) == len(accountants):
                raise
            yield Answer(accountant, None, None, question.delta, refusal=str(error))


def _check(question: Question) -> None:
    if (question.sigma is None) == (question.target is None):
        raise PrivacyError("give exactly one of --sigma (to find ε) and --target (to find σ)")
    ranges: tuple[tuple[str, float | None, Callable[[float], bool], str], ...] = (
        ("sigma", question.sigma, lambda value: 0 <= value < math.inf, "finite and at least 0"),
        ("target", question.target, lambda value: 1e-4 <= value <= 1e4, "from 0.0001 to 10,000; 1 to 10 is usual"),
        ("rate", question.rate, lambda value: 0 < value <= 1, "above 0 and at most 1"),
        ("delta", question.delta, lambda value: 0 < value < 1, "above 0 and below 1; 1e-5 is usual"),
    )
    for name, value, holds, meaning in ranges:
        if value is not None and not holds(value):
            raise PrivacyError(f"--{name} is {value:g}; it must be {meaning}")


def _answer(question: Question, accountant: Accountant) -> Answer:
    sampling: Literal["none", "poisson"] = "poisson" if question.rate < 1 else "none"
    sigma = question.sigma
    if question.target is not None:
        blank = Mechanism(question.noise, 1.0, "add/remove", sampling, question.rate)
        sigma = noise_multiplier_for(question.target, blank, question.steps, question.delta, accountant)
    assert sigma is not None
    mechanism = Mechanism(question.noise, sigma, "add/remove", sampling, question.rate)
    spent = account([(mechanism, question.steps)], question.delta, accountant)
    return Answer(accountant, sigma, spent.epsilon, question.delta, spent.method)


def document(question: Question, found: Sequence[Answer]) -> dict[str, Any]:
    """The question and the answers for programs."""
    return {
        **asdict(question),
        "unit": "unit",
        "adjacency": "add/remove",
        "sampling": "poisson" if question.rate < 1 else "none",
        "answers": [asdict(answer) for answer in found],
    }
