# SPDX-License-Identifier: Apache-2.0
"""Client-level epsilon from canary clients in one training run (after Andrew et al., ICLR 2024), with equal variances.

A canary client sends a random direction of the clipping norm. After the run, the cosine of a canary that took part with
the total update has mean 1/‖Δ‖ and variance 1/d, that of one that did not has mean 0 and the same variance: noise of
multiplier σ makes the run a Gaussian channel with μ = 1/σ.

Why not as published: Andrew et al. fit one Gaussian to each side and take ε at δ of the pair. Two *fitted* variances
are never equal, and at δ = 1e-6 the tails of N(0, 1) and N(μ, 1.02) lie further apart than those of N(0, 1) and
N(μ, 1), whichever is larger. The estimate is therefore biased upwards: 1.36 to 1.39 where ε is 1, and its "95% lower
bound" exceeds the truth in 35 to 39% of the runs (`shared/reference/audit.json`, T7b).
"""

from __future__ import annotations

import math

import numpy as np

from fedsim.audit.estimate import Estimate, Fixed
from fedsim.audit.estimation.arguments import Scores, checked_delta, count, error_of, scores
from fedsim.audit.estimation.counts import gdp_epsilon
from fedsim.audit.estimation.gaussian import gaussian_fit, noncentrality_lower
from fedsim.errors import AuditError

_KEPT_BACK = 0.25  # of the error probability, for the dependence between the canaries of one run


def one_shot_federated(
    scores_in: Scores,
    scores_out: Scores | None,
    delta: float,
    confidence: float = 0.95,
    *,
    dimension: int | None = None,
) -> Estimate:
    """ε at δ of μ-GDP, at the lower end of μ for scores (cosines) of canary clients that took part and that did not.

    `scores_out` may be None if `dimension` is given: the cosine with a random direction has mean 0 (and variance 1/d).
    P[lower ≤ ε] ≥ confidence if the scores are Gaussian of one variance. The canaries of one run disturb each other,
    by k/d of the variance, which makes μ smaller but also ties the scores together: a quarter of the error probability
    is kept back for that.
    """
    delta, error = checked_delta(delta, positive=True), error_of(confidence, Fixed()) * (1 - _KEPT_BACK)
    d = None if dimension is None else count("dimension", dimension, least=2)
    if scores_out is None:
        if d is None:
            raise AuditError("scores_out is None; give the scores of canaries that took no part, or the dimension")
        mu, notes = _against_theory(scores("scores_in", scores_in), d, error)
    else:
        fit = gaussian_fit(scores_in, scores_out, error)
        mu, notes = fit.mu_lower, fit.notes
    notes = (*notes, "canary clients are random directions, each in the run once and for all of it")
    return Estimate(gdp_epsilon(mu, delta), None, confidence, "one-shot federated, equal variance", "B", delta, notes)


def _against_theory(x: np.ndarray, d: int, error: float) -> tuple[float, tuple[str, ...]]:
    """The null is known, N(0, 1/d), so that one-sample statistics do; the larger standard deviation is taken."""
    spread = max(float(x.std(ddof=1)), 1 / math.sqrt(d))
    unit = 1 / math.sqrt(len(x))
    mu = max(0.0, noncentrality_lower(float(x.mean()) / (spread * unit), len(x) - 1, error)) * unit
    note = f"without a canary its cosine is N(0, 1/{d}); the standard deviation seen is {x.std(ddof=1):.3g}"
    return mu, (note,)
