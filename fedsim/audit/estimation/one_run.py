# SPDX-License-Identifier: Apache-2.0
"""Epsilon from one run with many canaries, each of which is in with probability 1/2, independently of the others.

Of `canaries`, the auditor guesses the membership of `guesses` (those it is surest of) and `correct` are right. Nothing
is assumed on how the mechanism ties the canaries together. A split into two halves of fixed size breaks the theorems.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import betainc, betaincinv, expit, gammaln

from fedsim.audit.estimate import Estimate, Fixed, Selection, Tier
from fedsim.audit.estimation.arguments import Floats, checked_delta, count, error_of
from fedsim.audit.estimation.counts import gdp_epsilon, threshold_note
from fedsim.audit.limits import tradeoff
from fedsim.privacy.accounting import Mechanism, account
from fedsim.privacy.loss import COARSE, Grid

_COINS = "each canary is in with probability 1/2, independently of the others"
_normal = NormalDist()


# --- (ε, δ): Steinke, Nasr & Jagielski 2023 -------------------------------------------------------------------------


def epsilon_one_run(
    correct: int,
    guesses: int,
    canaries: int,
    delta: float,
    confidence: float = 0.95,
    *,
    selection: Selection = Fixed(),  # noqa: B008 - frozen
) -> Estimate:
    """The largest ε that the test of Steinke, Nasr & Jagielski (2023, Theorem 5.2) rejects; see `one_run_p_value`.

    P[lower ≤ ε] ≥ confidence for any mechanism. `selection` says how the number of guesses was chosen. Where
    2 · canaries · δ is near 1 the test has no power: use fewer canaries, or `epsilon_one_run_fdp`.
    """
    correct, guesses, canaries = _counts(correct, guesses, canaries)
    lower = _steinke(correct, guesses, canaries, checked_delta(delta), error_of(confidence, selection))
    notes = (_COINS, threshold_note(selection, "number of guesses"))
    return Estimate(lower, None, confidence, "one run (Steinke et al. 2023)", "A", delta, notes)


def one_run_p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """min{1, β + 2mδα}: the probability that an (ε, δ)-DP mechanism lets so many guesses be right.

    β = P[B ≥ v], α = max over i of P[v − i ≤ B < v] / i, B ~ Bin(r, e^ε/(1 + e^ε)), for v of r right, m canaries.
    """
    correct, guesses, canaries = _counts(correct, guesses, canaries)
    return _p_value(_log_choices(correct, guesses), correct, guesses, canaries, epsilon, checked_delta(delta))


def _p_value(choices: Floats, v: int, r: int, m: int, epsilon: float, delta: float) -> float:
    if v == 0:
        return 1.0
    q = float(expit(epsilon))
    beta = float(betainc(v, r - v + 1, q))
    if delta == 0 or beta >= 1:
        return beta
    below = np.arange(v - 1, -1, -1)
    with np.errstate(under="ignore"):
        masses = np.exp(choices + below * math.log(q) - (r - below) * (epsilon + math.log1p(math.exp(-epsilon))))
        alpha = float((np.cumsum(masses) / np.arange(1, v + 1)).max())
    return min(1.0, beta + 2 * m * delta * alpha)


def _log_choices(v: int, r: int) -> Floats:
    """The logarithms of (r choose k) for k = v − 1, …, 0."""
    below = np.arange(v - 1, -1, -1)
    logs: Floats = gammaln(r + 1) - gammaln(below + 1) - gammaln(r - below + 1)
    return logs


@lru_cache(maxsize=4096)
def _steinke(v: int, r: int, m: int, delta: float, error: float) -> float:
    if v == 0:
        return 0.0
    choices = _log_choices(v, r)

    def excess(epsilon: float) -> float:
        return _p_value(choices, v, r, m, epsilon, delta) - error

    if excess(0.0) >= 0:
        return 0.0
    # without δ the bound has a closed form, which is the most that it can be
    rate = float(betaincinv(v, r - v + 1, error))
    top = math.log(rate) - math.log1p(-rate)
    if delta == 0 or excess(top) < 0:
        return max(0.0, top)
    return float(brentq(excess, 0.0, top, xtol=1e-12))


# --- f-DP: Mahloujifar, Melis & Chaudhuri 2024 ----------------------------------------------------------------------


@dataclass(frozen=True)
class ApproximateDP:
    """The curves of (ε, δ)-DP itself, at the δ of the question: nothing is assumed."""

    tier: Tier = field(default="A", init=False)
    note = ""

    def curve(self, strength: float, delta: float) -> Callable[[float], float]:
        """The function y -> f(1 − y), of strength ε."""
        f = tradeoff.approximate_dp(strength, delta)
        return lambda y: f(1 - y)

    def epsilon(self, strength: float, delta: float) -> float:
        """ε at δ."""
        return strength


@dataclass(frozen=True)
class GDP:
    """The curves of μ-GDP.

    `claimed`: the claim under audit is this curve itself, and not only the (ε, δ) that follows from it. To refute the
    curve needs no assumption then (tier A). Otherwise that the mechanism's curve has this shape is a model (tier B).
    """

    claimed: bool = False

    @property
    def tier(self) -> Tier:
        """A if the curve is what was claimed."""
        return "A" if self.claimed else "B"

    @property
    def note(self) -> str:
        """What the number rests on."""
        return "the claim is a GDP curve" if self.claimed else "the mechanism is Gaussian differential privacy (GDP)"

    def curve(self, strength: float, delta: float) -> Callable[[float], float]:
        """The function y -> Φ(Φ⁻¹(y) − μ), of strength μ."""

        def inverse(y: float) -> float:
            return 0.0 if y <= 0 else _normal.cdf(_normal.inv_cdf(y) - strength) if y < 1 else 1.0

        return inverse

    def epsilon(self, strength: float, delta: float) -> float:
        """ε at δ."""
        return gdp_epsilon(strength, delta)


@dataclass(frozen=True)
class SampledGaussian:
    """The curves of `steps` Poisson-sampled Gaussian releases, by the noise; `claimed` as for GDP."""

    sample_rate: float
    steps: int
    claimed: bool = False
    grid: Grid = COARSE

    @property
    def tier(self) -> Tier:
        """A if the curve is what was claimed."""
        return "A" if self.claimed else "B"

    @property
    def note(self) -> str:
        """What the number rests on."""
        what = f"{self.steps} Gaussian releases, Poisson sampled at rate {self.sample_rate:g}"
        return f"the claim is the curve of {what}" if self.claimed else f"the mechanism is {what}"

    def curve(self, strength: float, delta: float) -> Callable[[float], float]:
        """The function y -> f(1 − y), of strength 1/σ."""
        f = tradeoff.sampled_gaussian(1 / strength, self.sample_rate, self.steps, grid=self.grid)
        return lambda y: f(1 - y)

    def epsilon(self, strength: float, delta: float) -> float:
        """ε at δ."""
        sampling: Literal["none", "poisson"] = "none" if self.sample_rate == 1 else "poisson"
        mechanism = Mechanism("gaussian", 1 / strength, "add/remove", sampling, self.sample_rate)
        return account([(mechanism, self.steps)], delta, "pld", self.grid).epsilon


Family = ApproximateDP | GDP | SampledGaussian


def epsilon_one_run_fdp(
    correct: int,
    guesses: int,
    canaries: int,
    delta: float,
    confidence: float = 0.95,
    *,
    family: Family = GDP(),  # noqa: B008 - frozen
    selection: Selection = Fixed(),  # noqa: B008 - frozen
) -> Estimate:
    """ε at δ of the strongest curve of `family` that the test of Mahloujifar, Melis & Chaudhuri (2024) rejects.

    P[the mechanism keeps a curve that is rejected] ≤ 1 − confidence, however the mechanism ties the canaries together.
    That ε at δ is then at least `lower` needs that the mechanism's curve is one of the family (see `GDP.claimed`):
    randomised response of ε = 1 keeps no GDP curve of less than ε = 5.6 at δ = 1e-5.
    """
    correct, guesses, canaries = _counts(correct, guesses, canaries)
    checked_delta(delta, positive=not isinstance(family, ApproximateDP))
    lower = _mahloujifar(correct, guesses, canaries, delta, error_of(confidence, selection), family)
    notes = tuple(note for note in (family.note, _COINS, threshold_note(selection, "number of guesses")) if note)
    return Estimate(lower, None, confidence, "one run, f-DP (Mahloujifar et al. 2024)", family.tier, delta, notes)


def fdp_rejects(correct: int, guesses: int, canaries: int, error: float, curve: Callable[[float], float]) -> bool:
    """Whether so many right guesses refute the curve, given as y -> f(1 − y), with probability of error at most so."""
    return _excess(correct, guesses, canaries, error, curve) > 0


def _excess(c: int, r: int, m: int, error: float, curve: Callable[[float], float]) -> float:
    """r₀ + h₀ − c'/m of Algorithm 3 ("audit_rh_with_cap"); positive where the curve is refuted."""
    right, wrong = error * c / m, error * (r - c) / m
    for i in range(c - 1, -1, -1):
        more = max(wrong, curve(right))
        if more == wrong:  # from here on nothing changes
            break
        right, wrong = min(1.0, right + i / (r - i) * (more - wrong)), more
    return right + wrong - r / m


@lru_cache(maxsize=4096)
def _mahloujifar(c: int, r: int, m: int, delta: float, error: float, family: Family) -> float:
    tolerance = 1e-4 if isinstance(family, SampledGaussian) else 1e-10

    def excess(strength: float) -> float:
        return _excess(c, r, m, error, family.curve(strength, delta))

    low, high = 1e-6 if not isinstance(family, SampledGaussian) else 1e-2, 0.5
    if not c or excess(low) <= 0:
        return 0.0
    while excess(high) > 0:
        low, high = high, 2 * high
    strength = float(brentq(excess, low, high, xtol=tolerance))
    while excess(strength) <= 0 and strength > low:  # to the side that is refuted
        strength -= tolerance
    return family.epsilon(max(strength, low), delta)


def _counts(correct: int, guesses: int, canaries: int) -> tuple[int, int, int]:
    canaries = count("canaries", canaries, least=1)
    guesses = count("guesses", guesses, canaries, of="canaries")
    return count("correct", correct, guesses, of="guesses"), guesses, canaries
