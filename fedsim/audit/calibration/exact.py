# SPDX-License-Identifier: Apache-2.0
"""Whole audits of mechanisms whose ε is known exactly, and that neither `known` nor the zoo holds: false alarms, finds.

A finite mechanism is two distributions, on the first data set and on the second; its ε at δ is read off them,

    inf{ε ≥ 0: Σ max(0, P − e^ε P') ≤ δ and Σ max(0, P' − e^ε P) ≤ δ},

and not off the formula of the mechanism, so that both would have to be wrong. A claim of just that ε is true and gives
nothing away: the hardest that an auditor can be asked to leave alone. The broken twin is noised for `WORSE` times ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, hypergeom

from fedsim.audit.blackbox.running import Mechanism, Vectorised
from fedsim.audit.estimation.arguments import Floats
from fedsim.audit.mechanism import Subject, audit_mechanism
from fedsim.audit.verdict import Claim

Rng = np.random.Generator
WORSE = 2.0
_REACH = 40  # beyond which discrete Laplace noise is clamped


@dataclass(frozen=True, eq=False)
class Finite:
    """The probabilities of the outcomes on two neighbouring data sets."""

    outcomes: NDArray[Any]
    first: Floats
    second: Floats

    def epsilon(self, delta: float) -> float:
        """The least ε at δ."""
        low, high = 0.0, 1.0
        while self.delta(high) > delta:
            low, high = high, 2 * high
            if high > 1000:
                return math.inf
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return high

    def delta(self, epsilon: float) -> float:
        """The hockey-stick divergence, the larger of both directions."""
        sides = ((self.first, self.second), (self.second, self.first))
        return max(float(np.maximum(0.0, p - math.exp(epsilon) * q).sum()) for p, q in sides)

    def subject(self, claim: Claim) -> Subject:
        """The mechanism on the data sets [1] and [0]."""

        def many(records: Floats, rng: Rng, trials: int) -> Any:
            chances = self.first if records[0] else self.second
            return self.outcomes[rng.choice(len(chances), size=trials, p=chances)]

        return Subject(Vectorised(many), claim, [(np.ones(1), np.zeros(1))], exact_epsilon=claim.epsilon)


def discrete_laplace(epsilon: float, shift: int = 0, reach: int = _REACH) -> Floats:
    """P[z = k] ∝ e^(−ε|k − shift|), clamped to −reach to reach: what lies beyond is added to the ends."""
    ratio = math.exp(-epsilon)
    places = np.abs(np.arange(-reach, reach + 1) - shift)
    chances = (1 - ratio) / (1 + ratio) * ratio**places
    for end in (0, -1):
        chances[end] = ratio ** places[end] / (1 + ratio)
    return np.asarray(chances, dtype=np.float64)


def counted(epsilon: float) -> Finite:
    """A count with discrete Laplace noise."""
    return Finite(np.arange(-_REACH, _REACH + 1), discrete_laplace(epsilon, 1), discrete_laplace(epsilon))


def cut_off(epsilon: float, reach: int = 6) -> Finite:
    """The same with noise that is cut off and drawn anew, which needs a δ."""
    noise = np.exp(-epsilon * np.abs(np.arange(-reach, reach + 1)))
    chances = noise / noise.sum()
    return Finite(np.arange(-reach, reach + 2), np.append(0.0, chances), np.append(chances, 0.0))


def response(epsilon: float, answers: int = 5) -> Finite:
    """Randomised response among more than two answers."""
    chances = np.full(answers, 1 / (math.exp(epsilon) + answers - 1))
    first, second = chances.copy(), chances.copy()
    first[0] = second[1] = math.exp(epsilon) * chances[0]
    return Finite(np.arange(answers), first, second)


def unary(epsilon: float, answers: int = 4) -> Finite:
    """Optimised unary encoding (Wang et al. 2017): a bit for each answer, the true one kept with probability 1/2."""
    bits = (np.arange(2**answers)[:, None] >> np.arange(answers)) & 1
    other = 1 / (math.exp(epsilon) + 1)
    sides = []
    for true in (0, 1):
        on = np.where(np.arange(answers) == true, 0.5, other)
        sides.append(np.where(bits, on, 1 - on).prod(1))
    return Finite(bits, sides[0], sides[1])


def exponential(epsilon: float) -> Finite:
    """The exponential mechanism, exp(ε u / 2), where one record moves some utilities up and others down."""
    weights = [np.exp(epsilon * np.array(utility) / 2) for utility in ([3.0, 2.0, 0.0, 1.0], [2.0, 3.0, 1.0, 0.0])]
    first, second = (weight / weight.sum() for weight in weights)
    return Finite(np.arange(4), first, second)


def sampled(epsilon: float, chosen: int = 3, of: int = 12) -> Finite:
    """A noisy count of a sample without replacement; one of the records is replaced."""
    noises = [discrete_laplace(epsilon, hits) for hits in range(chosen + 1)]
    sides = [sum(hypergeom.pmf(hits, of, ones, chosen) * noises[hits] for hits in range(chosen + 1)) for ones in (1, 0)]
    return Finite(np.arange(-_REACH, _REACH + 1), *(np.asarray(side, dtype=np.float64) for side in sides))


def binomial(epsilon: float) -> Finite:
    """A count with binomial noise, of about as many coins as a Gaussian would need; needs a δ."""
    coins = max(4, round((4 / epsilon) ** 2))
    chances = binom.pmf(np.arange(coins + 1), coins, 0.5)
    return Finite(np.arange(coins + 2), np.append(0.0, chances), np.append(chances, 0.0))


def mixture(epsilon: float) -> Finite:
    """Mostly half of ε, seldom all of it and a little more, and it shows which."""
    parts = [(0.9, response(epsilon / 2)), (0.1, response(1.2 * epsilon))]
    outcomes = np.concatenate([np.stack([np.full(5, place), np.arange(5)], 1) for place in range(2)])
    first, second = (np.concatenate([share * side for share, side in sides]) for sides in (
        [(share, part.first) for share, part in parts], [(share, part.second) for share, part in parts])
    )  # fmt: skip
    return Finite(outcomes, first, second)


FINITE: dict[str, tuple[Callable[[float], Finite], float]] = {
    "discrete Laplace": (counted, 0.0),
    "discrete Laplace, cut off": (cut_off, 0.01),
    "randomised response, 5 answers": (response, 0.0),
    "optimised unary encoding": (unary, 0.0),
    "exponential mechanism": (exponential, 0.0),
    "sampled without replacement": (sampled, 0.0),
    "binomial noise": (binomial, 0.01),
    "mixture of two": (mixture, 0.005),
}
"""By name, with the δ of the claim."""


# --- on data sets that the auditor makes ----------------------------------------------------------------------------


def staircase(epsilon: float) -> Mechanism:
    """A clipped sum with staircase noise (Geng & Viswanath 2014) for sensitivity 1: ε exactly."""
    ratio, gamma = math.exp(-epsilon), 1 / (1 + math.exp(epsilon / 2))

    def many(records: Floats, rng: Rng, trials: int) -> Any:
        steps, uniform = rng.geometric(1 - ratio, trials) - 1, rng.random(trials)
        low = rng.random(trials) < gamma / (gamma + (1 - gamma) * ratio)
        size = np.where(low, steps + gamma * uniform, steps + gamma + (1 - gamma) * uniform)
        return np.clip(records, 0, 1).sum() + rng.choice((-1.0, 1.0), trials) * size

    return Vectorised(many)


def geometric_count(epsilon: float) -> Mechanism:
    """How many records are above 1/2, with two-sided geometric noise: ε exactly."""

    def many(records: Floats, rng: Rng, trials: int) -> Any:
        noise = [rng.geometric(1 - math.exp(-epsilon), trials) for _ in range(2)]
        return int((np.asarray(records) > 0.5).sum()) + noise[0] - noise[1]

    return Vectorised(many)


def fullest_bin(epsilon: float) -> Mechanism:
    """The exponential mechanism on four counts, exp(ε u), which only rise with a record: less than ε on each pair."""

    def many(records: Floats, rng: Rng, trials: int) -> Any:
        bins = np.clip(np.asarray(records) * 2, 0, 3).astype(int)
        scores = epsilon * np.bincount(bins, minlength=4)
        weights = np.exp(scores - scores.max())
        return rng.choice(4, size=trials, p=weights / weights.sum())

    return Vectorised(many)


def strict_sum(epsilon: float) -> Mechanism:
    """A Laplace sum that refuses records outside of [0, 1], and data sets of fewer than three."""

    def mechanism(records: Floats, rng: Rng) -> float:
        if len(records) < 3 or np.min(records) < 0 or np.max(records) > 1:
            raise ValueError("give three or more numbers between 0 and 1")
        return float(np.sum(records) + rng.laplace(scale=1 / epsilon))

    return mechanism


def some_of_32(epsilon: float) -> Mechanism:
    """Eight of 32 rows, and a Laplace sum of them that is amplified to ε; the number of rows is fixed."""
    inner = math.log1p(math.expm1(epsilon) * 32 / 8)

    def mechanism(records: Floats, rng: Rng) -> float:
        rows = records[rng.choice(len(records), 8, replace=False)]
        return float(np.clip(rows, 0, 1).sum() + rng.laplace(scale=1 / inner))

    return mechanism


LIKE = np.linspace(0, 1, 32)
MADE: dict[str, tuple[Callable[[float], Mechanism], dict[str, Any]]] = {
    "staircase": (staircase, {}),
    "geometric": (geometric_count, {}),
    "fullest bin": (fullest_bin, {}),
    "strict sum": (strict_sum, {}),
    "eight of 32": (some_of_32, {"like": LIKE}),
}
"""By name, with the options of the audit."""


# --- audits of them -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tally:
    """What came of audits of one mechanism under true claims, and of its twin under the same."""

    name: str
    claim: Claim
    audits: int
    above: int
    """Lower bounds above the truth."""
    violated: int
    found: int
    """Twins called violated."""
    mean_lower: float

    def acceptable(self, error: float = 0.05, luck: float = 1e-3) -> bool:
        """Whether so many false alarms are explained by a rate of `error`, but for bad luck."""
        return bool(binom.sf(max(self.above, self.violated) - 1, self.audits, error) > luck)


def tallies(audits: int, trials: int, seed: int, epsilon: float = 1.0) -> Iterator[Tally]:
    """So many audits of each mechanism and of its twin; `trials` runs each, on made data sets four times as many."""
    for name, (family, delta) in FINITE.items():
        exact = family(epsilon)
        claim = Claim(exact.epsilon(delta), delta)
        yield _tally(name, exact.subject(claim), family(WORSE * epsilon).subject(claim), audits, trials, seed)
    for name, (make, options) in MADE.items():
        true, twin = (Subject(make(one), Claim(epsilon), **options) for one in (epsilon, WORSE * epsilon))
        yield _tally(name, true, twin, audits, 4 * trials, seed)


def _tally(name: str, true: Subject, twin: Subject, audits: int, trials: int, seed: int) -> Tally:
    seeds = range(seed, seed + audits)
    verdicts = [audit_mechanism(true, trials=trials, seed=one) for one in seeds]
    found = [audit_mechanism(twin, trials=trials, seed=one).status == "violated" for one in seeds]
    lower = np.array([verdict.lower for verdict in verdicts])
    violated = sum(verdict.status == "violated" for verdict in verdicts)
    above = int((lower > true.claim.epsilon).sum())
    return Tally(name, true.claim, audits, above, violated, sum(found), float(lower.mean()))
