# SPDX-License-Identifier: Apache-2.0
"""Epsilon from scores that are Gaussian with the same variance, with and without the canary (tier B).

Then the channel is μ-GDP with μ = (mean with − mean without) / standard deviation. Counting errors at one threshold
throws most of what the scores say about μ away; the t-statistic keeps it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaincinv, ndtr, ndtri

from fedsim.audit.estimate import Estimate, Fixed
from fedsim.audit.estimation.arguments import Floats, Scores, checked_delta, error_of, scores
from fedsim.audit.estimation.counts import gdp_epsilon

_NODES, _WEIGHTS = (part / 2 for part in np.polynomial.legendre.leggauss(64))
_STRANGE = 3.3  # standard errors: a Gaussian sample is as far off once in a thousand times
_LEFT = 0.9  # of the error probability
_SEEN = 20_000  # scores looked at for the distance of their distribution; sorting more tells nothing new


@dataclass(frozen=True)
class GaussianFit:
    """What the scores say about μ, and whether they look as the model says."""

    mu_lower: float
    """P[mu_lower ≤ μ] ≥ 1 − error under the model; 0 where the scores refute it."""
    notes: tuple[str, ...]
    refuted: bool


def epsilon_gaussian(scores_in: Scores, scores_out: Scores, delta: float, confidence: float = 0.95) -> Estimate:
    """ε at δ of μ-GDP at the exact lower end of μ, by the noncentral t-distribution of the pooled t-statistic.

    P[lower ≤ ε] ≥ confidence if the scores are independent and Gaussian with one variance. All scores are used, and
    nothing is chosen after they were seen. Skewness, kurtosis, the distribution and the variances are checked; where
    they refute the model beyond what matters, nothing is proved (`lower` is 0), and the assumptions say so.
    """
    checked_delta(delta, positive=True)
    fit = gaussian_fit(scores_in, scores_out, error_of(confidence, Fixed()))
    return Estimate(gdp_epsilon(fit.mu_lower, delta), None, confidence, "Gaussian fit", "B", delta, fit.notes)


def gaussian_fit(scores_in: Scores, scores_out: Scores, error: float) -> GaussianFit:
    """The lower end of μ; where the two variances differ, the larger is taken for both, which makes μ smaller.

    A tenth of the error probability is kept back, because the model is checked on the same scores.
    """
    x, y = scores("scores_in", scores_in), scores("scores_out", scores_out)
    variances = float(x.var(ddof=1)), float(y.var(ddof=1))
    odd, unequal, seen = _check(x - x.mean(), y - y.mean(), variances)
    model = "the scores are independent and Gaussian with the same variance with and without the canary"
    if odd:
        return GaussianFit(0.0, (model, f"REFUTED by the scores, so that nothing is proved: {odd}"), True)
    pooled = (variances[0] * (len(x) - 1) + variances[1] * (len(y) - 1)) / (len(x) + len(y) - 2)
    spread = math.sqrt(max(variances) if unequal else pooled)
    freedom = len(x) + len(y) - 2 if not unequal else (len(x) if variances[0] >= variances[1] else len(y)) - 1
    unit = math.sqrt(1 / len(x) + 1 / len(y))  # of the t-statistic, in μ
    t = float(x.mean() - y.mean()) / (spread * unit)
    return GaussianFit(
        max(0.0, noncentrality_lower(t, freedom, _LEFT * error)) * unit, (model, f"checked: {seen}"), False
    )


def noncentrality_lower(t: float, freedom: int, error: float) -> float:
    """The largest n with P[T ≥ t] ≤ error, for T noncentral t of noncentrality n: an exact lower confidence bound.

    P[T ≥ t] = E Φ(n − t W), W² ~ χ²/freedom: by quadrature over W, which also holds for millions of degrees.
    """
    if t <= 0:
        return min(0.0, t)
    spreads = _chi(freedom)

    def excess(noncentrality: float) -> float:
        return float(np.dot(_WEIGHTS, ndtr(noncentrality - t * spreads))) - error

    reach = 10 + 10 * t / math.sqrt(2 * freedom)
    return float(brentq(excess, -reach - t, t + reach, xtol=1e-10))


@lru_cache(maxsize=1024)
def _chi(freedom: int) -> Floats:
    """√(χ²/freedom) at the quadrature's probabilities."""
    nodes: Floats = np.sqrt(gammaincinv(freedom / 2, 0.5 + _NODES) * 2 / freedom)
    return nodes


# --- does it look Gaussian? -----------------------------------------------------------------------------------------


def _check(x: Floats, y: Floats, variances: tuple[float, float]) -> tuple[str, bool, str]:
    """Why the model is refuted (or nothing), whether the variances differ, and what was seen.

    A deviation counts if it is significant *and* large enough to matter: a million scores always deviate a little.
    """
    if min(variances) <= 0:
        return "the scores do not vary, so there is no Gaussian noise; count errors instead", False, ""
    residuals = np.concatenate([x / math.sqrt(variances[0]), y / math.sqrt(variances[1])])
    n = len(residuals)
    skewness, kurtosis = float((residuals**3).mean()), float((residuals**4).mean()) - 3
    ratio = variances[0] / variances[1]
    # the variance of a sample variance knows the kurtosis
    error = math.sqrt(max(2 + kurtosis, 0.1) * (1 / len(x) + 1 / len(y)))
    sample = np.sort(residuals[:: max(1, n // _SEEN)])
    places = (np.arange(len(sample)) + 0.5) / len(sample)
    distance = float(np.abs(ndtr(sample) - places).max())
    reasons = (
        (abs(skewness) > max(0.3, _STRANGE * math.sqrt(6 / n)), f"their skewness is {skewness:.2f}"),
        (abs(kurtosis) > max(0.6, _STRANGE * math.sqrt(24 / n)), f"their excess kurtosis is {kurtosis:.2f}"),
        (
            distance > max(0.03, 1.2 / math.sqrt(len(sample))),
            f"their distribution is {distance:.3f} off",
        ),
        (abs(math.log(ratio)) > max(math.log(2), _STRANGE * error), f"the ratio of their variances is {ratio:.2f}"),
    )
    unequal = abs(math.log(ratio)) > _STRANGE * error
    seen = f"skewness {skewness:.2f}, excess kurtosis {kurtosis:.2f}, ratio of variances {ratio:.3f}"
    return (
        "; ".join(reason for holds, reason in reasons if holds),
        unequal,
        seen + (" (they differ: the larger is taken)" if unequal else ""),
    )


def mu_of_rates(fpr: float, fnr: float) -> float:
    """μ = Φ⁻¹(1 − FPR) − Φ⁻¹(FNR), at least 0."""
    return max(0.0, -float(ndtri(fpr) + ndtri(fnr)))
