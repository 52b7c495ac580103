# SPDX-License-Identifier: Apache-2.0
"""How many runs, canaries or rounds an audit needs, before it is made.

Planned is for the ideal case: the Gaussian mechanism (randomised response if δ = 0) that spends exactly the claimed ε,
seen directly, with the expected counts. A real audit sees less, so the numbers are the least that may suffice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from scipy.special import expit, ndtr, ndtri

from fedsim.audit.blackbox.distinguishing import epsilon_distinguishing, gaussian_mu, ideal_rates, power
from fedsim.audit.verdict import POWER
from fedsim.errors import AuditError
from fedsim.privacy.accounting import Mechanism, account, smallest_noise
from fedsim.privacy.loss import COARSE

MOST = 10**9
"""What is not reached with so many is not reached."""
_SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)  # of the outputs that are guessed upon, on either side


@dataclass(frozen=True)
class Plan:
    """So many `what` are expected to prove `share` of ε with an estimator; None: not with 10^9 of them."""

    estimator: str
    tier: str
    what: str
    needed: int | None
    share: float
    epsilon: float
    delta: float
    confidence: float

    def __str__(self) -> str:
        number = "more than 10^9" if self.needed is None else f"{self.needed:,}"
        return (
            f"{self.estimator} (tier {self.tier}): {number} {self.what} to prove {self.share:.0%} of"
            f" ε = {self.epsilon:g} at δ = {self.delta:g} with {100 * self.confidence:g}% confidence"
        )


def trials_to_catch(
    epsilon: float, delta: float, *, factor: float = 2.0, confidence: float = 0.95, probability: float = POWER
) -> int | None:
    """Runs (both data sets together) that refute a claim of ε with this probability if the truth is factor·ε."""
    if factor <= 1:
        raise AuditError(f"factor is {factor!r}; it must be above 1: how much worse than claimed must be caught")
    if epsilon == 0:
        return None  # a multiple of nothing is nothing
    caught = partial(power, factor * epsilon, epsilon, delta, error=1 - confidence)
    return fewest(lambda trials: caught(trials) >= probability, start=16)


def trials_to_prove(share: float, epsilon: float, delta: float, *, confidence: float = 0.95) -> int | None:
    """Runs (both data sets together) with which the exact test is expected to prove share·ε at the best threshold."""
    return fewest(lambda n: _exact_lower(n, epsilon, delta, confidence) >= share * epsilon, start=16)


def plan(epsilon: float, delta: float, *, share: float = 0.5, confidence: float = 0.95) -> list[Plan]:
    """What every estimator needs to prove share·ε, cheapest first; runs for tests of pairs, canaries for one run."""
    if not 0 < share < 1:
        raise AuditError(f"share is {share!r}; it must lie between 0 and 1: the part of epsilon that is to be proved")
    if not 0 < epsilon < math.inf:
        raise AuditError(f"epsilon is {epsilon!r}; it must be positive and finite")
    rows: list[tuple[str, str, str, Callable[[int], float]]] = [
        ("exact test", "A", "runs", partial(_exact_lower, epsilon=epsilon, delta=delta, confidence=confidence)),
        ("Clopper-Pearson", "A", "runs", _on_counts("epsilon_clopper_pearson", epsilon, delta, confidence)),
        ("one run (Steinke et al.)", "A", "canaries", _on_guesses("epsilon_one_run", epsilon, delta, confidence)),
    ]
    if delta > 0:
        rows += [
            ("one run, f-DP", "A", "canaries", _on_guesses("epsilon_one_run_fdp", epsilon, delta, confidence)),
            ("GDP on counts", "B", "runs", _on_counts("epsilon_gdp", epsilon, delta, confidence)),
            ("Gaussian scores", "B", "runs or canaries", partial(_gaussian_lower, epsilon, delta, confidence)),
        ]
    most = {"one run, f-DP": 10**5, "one run (Steinke et al.)": 10**6}  # beyond, an estimator takes too long
    plans = [
        Plan(name, tier, what, fewest(partial(_reaches, lower, share * epsilon), 16, most.get(name, MOST)), share,
             epsilon, delta, confidence)
        for name, tier, what, lower in rows
    ]  # fmt: skip
    return sorted(plans, key=lambda one: one.needed or math.inf)


def rounds_to_prove(
    share: float,
    epsilon: float,
    delta: float,
    *,
    sample_rate: float,
    steps: int,
    canaries: int = 1,
    confidence: float = 0.95,
) -> int | None:
    """Rounds with `canaries` Dirac canaries each for the per-step audit (tier B) to prove share·ε of DP-SGD.

    Every round observes each canary once with it and once without; the noise that n such pairs prove, 1/σ less its
    standard error √(2/n) times z, is composed over all `steps`. None: more rounds than there are steps.
    """
    mu, enough = (1 / _sigma(part * epsilon, delta, sample_rate, steps) for part in (1.0, share))
    z = -_ndtri(1 - confidence)
    observations = 2 * (z / (mu - enough)) ** 2 * (1 + mu**2 / 8)
    rounds = math.ceil(observations / canaries)
    return rounds if rounds <= steps else None


@lru_cache(maxsize=256)
def _sigma(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """The noise of DP-SGD that spends ε; a coarse grid is enough for a plan."""
    release = Mechanism("gaussian", 1.0, "add/remove", "poisson", sample_rate)

    def spends(sigma: float) -> float:
        return account([(replace(release, noise_multiplier=sigma), steps)], delta, grid=COARSE).epsilon

    return smallest_noise(spends, epsilon, tolerance=1e-3)


def _ndtri(probability: float) -> float:
    return float(ndtri(probability))


def _reaches(lower: Callable[[int], float], goal: float, n: int) -> bool:
    return lower(n) >= goal


def fewest(enough: Callable[[int], bool], start: int, most: int = MOST) -> int | None:
    """The least number that is enough, within 2%."""
    few, many = 0, start
    while not enough(many):
        few, many = many, 2 * many
        if many > most:
            return None
    while many - few > max(1, many // 50):
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many


def _exact_lower(n: int, epsilon: float, delta: float, confidence: float) -> float:
    hit, miss = (np.round(n / 2 * rate).astype(int) for rate in ideal_rates(epsilon, delta))
    return max(
        epsilon_distinguishing(int(a), int(a + b), n, delta, confidence).lower for a, b in zip(hit, miss, strict=True)
    )


def _on_counts(name: str, epsilon: float, delta: float, confidence: float) -> Callable[[int], float]:
    from fedsim.audit import estimators

    estimate = getattr(estimators, name)

    def lower(n: int) -> float:
        half = n // 2
        counts = (
            (round(half * (1 - hit)), round(half * miss))
            for hit, miss in zip(*ideal_rates(epsilon, delta), strict=True)
        )
        return max(float(estimate(fp, fn, half, half, delta, confidence).lower) for fn, fp in counts)

    return lower


def _on_guesses(name: str, epsilon: float, delta: float, confidence: float) -> Callable[[int], float]:
    """Guesses are made on the canaries with the largest and the smallest scores; how many is fixed beforehand."""
    from fedsim.audit import estimators

    estimate = getattr(estimators, name)

    def lower(n: int) -> float:
        best = 0.0
        for share in _SHARES if delta else (0.5,):
            correct = expit(epsilon) if delta == 0 else _right(share, gaussian_mu(epsilon, delta))
            guesses = max(1, round(2 * share * n))
            best = max(
                best, float(estimate(min(guesses, round(guesses * correct)), guesses, n, delta, confidence).lower)
            )
        return best

    return lower


def _right(share: float, mu: float) -> float:
    """The probability that a guess on the `share` of canaries with the largest scores is right."""
    low, high = -10.0, 10.0 + mu
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (ndtr(-middle) + ndtr(mu - middle)) / 2 > share else (low, middle)
    return float(ndtr(mu - low) / (ndtr(mu - low) + ndtr(-low)))


def _gaussian_lower(epsilon: float, delta: float, confidence: float, n: int) -> float:
    """Scores at the quantiles of the two Gaussians: what is expected, without random numbers."""
    from fedsim.audit.estimators import epsilon_gaussian
    from fedsim.privacy.gaussian import gaussian_epsilon

    mu = gaussian_mu(epsilon, delta)
    half = max(4, n // 2)
    if half > 2000:  # beyond, the estimate is the mean difference less its standard error
        z = -_ndtri(1 - confidence)
        least = mu - z * math.sqrt(2 / half * (1 + mu**2 / 8))
        return gaussian_epsilon(1 / least, delta) if least > 0 else 0.0
    points = ndtri((np.arange(half) + 0.5) / half)
    return float(epsilon_gaussian(mu + points, points, delta, confidence).lower)
