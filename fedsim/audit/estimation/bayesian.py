# SPDX-License-Identifier: Apache-2.0
"""A credible interval of epsilon from a confusion matrix (Zanella-Béguelin et al., ICML 2023), by exact integration.

With Jeffreys priors, FNR ~ Beta(½ + FN, ½ + TP) and FPR ~ Beta(½ + FP, ½ + TN), independently. P[ε ≤ e] is the mass
of the rates that (e, δ)-DP allows. What it forbids are two corners of the unit square: tests that are too good, and
tests whose opposite is. Each corner is the square [0, x*]², x* = (1 − δ)/(1 + e^e), and two arms,

    ∫ from x* to 1 − δ of density(x) · P[other rate < (1 − δ − x) e^−e] dx,

whose integrands are smooth once x = (1 − δ) σ(t) is written by its logit t.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import betainc, betaincinv, betaln, expit, logit

from fedsim.audit.estimate import Estimate, Fixed, Selection
from fedsim.audit.estimation.arguments import Floats, checked_delta, count, error_of
from fedsim.audit.estimation.counts import threshold_note

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)
_LEAST, _MOST = 1e-15, 1 - 1e-15  # outside these quantiles there is no mass to speak of
_Beta = tuple[float, float]


def epsilon_bayesian(
    tp: int,
    fp: int,
    tn: int,
    fn: int,
    delta: float,
    credibility: float = 0.95,
    *,
    selection: Selection = Fixed(),  # noqa: B008 - frozen
) -> Estimate:
    """The equal-tailed interval of that credibility, and the median, of ε given the confusion matrix.

    The upper end bounds what *this attack* shows, not the ε of the mechanism: a better attack may show more. The lower
    end is credible under the priors (tier B), above 0 whatever the counts, and no confidence bound: ε is the larger of
    two ratios, and where both errors tell the same, the larger is overestimated. It lies above the truth in 4, 6 and
    12% of the audits of randomised response of ε = 0.3, 1 and 3, and in less than 3% for other mechanisms here. A
    verdict should rest on `epsilon_clopper_pearson`, which takes the same counts.
    """
    counts = [count(name, value) for name, value in (("tp", tp), ("fp", fp), ("tn", tn), ("fn", fn))]
    count("tp + fn", tp + fn, least=1)
    count("fp + tn", fp + tn, least=1)
    tail = error_of(credibility, selection, "credibility") / 2
    low, median, high = _quantiles(*counts, checked_delta(delta), tail)
    notes = (
        "the trials are independent of each other",
        "Jeffreys priors on both error rates, independent (credible, not a confidence bound)",
        threshold_note(selection),
    )
    return Estimate(low, high, credibility, "Bayesian (Zanella-Béguelin et al. 2023)", "B", delta, notes, median)


def posterior_cdf(tp: int, fp: int, tn: int, fn: int, delta: float) -> Callable[[float], float]:
    """The function e -> P[ε ≤ e | counts], for e ≥ 0."""
    fnr, fpr = (0.5 + fn, 0.5 + tp), (0.5 + fp, 0.5 + tn)
    pairs = [(fpr, fnr), (fpr[::-1], fnr[::-1])]  # the corner, and that of the opposite test

    def allowed(epsilon: float) -> float:
        return max(0.0, 1 - sum(_corner(x, y, epsilon, delta) for x, y in pairs))

    return allowed


@lru_cache(maxsize=4096)
def _quantiles(tp: int, fp: int, tn: int, fn: int, delta: float, tail: float) -> tuple[float, float, float]:
    allowed = posterior_cdf(tp, fp, tn, fn, delta)
    low = _quantile(allowed, tail, 0.0)
    median = _quantile(allowed, 0.5, low)
    return low, median, _quantile(allowed, 1 - tail, median)


def _quantile(allowed: Callable[[float], float], probability: float, start: float) -> float:
    if allowed(start) >= probability:
        return start
    high = max(1.0, 2 * start)
    while allowed(high) < probability:
        if high > 600:
            return math.inf
        start, high = high, 2 * high
    return float(brentq(lambda e: allowed(e) - probability, start, high, xtol=1e-9))


def _corner(x: _Beta, y: _Beta, epsilon: float, delta: float) -> float:
    edge = (1 - delta) * float(expit(-epsilon))
    return float(betainc(*x, edge) * betainc(*y, edge)) + _arm(x, y, epsilon, delta) + _arm(y, x, epsilon, delta)


def _arm(x: _Beta, y: _Beta, epsilon: float, delta: float) -> float:
    """P[edge < X ≤ 1 − δ, Y < (1 − δ − X) e^−ε]."""
    first, last = _support(x, delta)
    first = max(first, -epsilon)
    if first >= last:
        return 0.0
    t = (first + last) / 2 + (last - first) / 2 * _NODES
    rate = (1 - delta) * expit(t)
    a, b = x
    # the density of X at (1 − δ) σ(t), times dX/dt = rate · σ(−t)
    density = np.exp(a * np.log(rate) + (b - 1) * np.log1p(-rate) - betaln(a, b)) * expit(-t)
    other: Floats = betainc(*y, (1 - delta) * expit(-t) * math.exp(-epsilon))
    return float((last - first) / 2 * np.dot(_WEIGHTS, density * other))


@lru_cache(maxsize=4096)
def _support(x: _Beta, delta: float) -> tuple[float, float]:
    """The t between which all but 1e-15 of the mass lies."""
    ends = np.minimum(betaincinv(*x, [_LEAST, _MOST]) / (1 - delta), 1 - 1e-16)
    low, high = (float(logit(end)) for end in ends)
    return max(low, -700.0), min(high, 36.0)
