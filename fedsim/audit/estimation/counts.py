# SPDX-License-Identifier: Apache-2.0
"""Epsilon from the errors of a membership test, counted over independent trials.

(ε, δ)-DP says of every test: FPR + e^ε FNR ≥ 1 − δ and FNR + e^ε FPR ≥ 1 − δ (Kairouz, Oh & Viswanath 2015). Whoever
measures smaller errors has proved a larger ε.
"""

from __future__ import annotations

import math

from scipy.special import betainccinv, ndtri

from fedsim.audit.estimate import Corrected, Estimate, Fixed, HeldOut, Selection
from fedsim.audit.estimation.arguments import checked_delta, confusion, error_of
from fedsim.privacy.gaussian import gaussian_epsilon

_TRIALS = "the trials are independent of each other"


def epsilon_point(fp: int, fn: int, negatives: int, positives: int, delta: float) -> Estimate:
    """max{ln((1 − δ − FPR)/FNR), ln((1 − δ − FNR)/FPR), 0}: Nasr et al. 2021, equation (1). It proves nothing."""
    fp, fn, negatives, positives = confusion(fp, fn, negatives, positives)
    value = epsilon_of_rates(fp / negatives, fn / positives, checked_delta(delta))
    return Estimate(value, None, None, "rates as measured", "A", delta, ("no confidence: the rates are taken as true",))


def epsilon_clopper_pearson(
    fp: int,
    fn: int,
    negatives: int,
    positives: int,
    delta: float,
    confidence: float = 0.95,
    *,
    selection: Selection = Fixed(),  # noqa: B008 - frozen
) -> Estimate:
    """Equation (1) at the Clopper-Pearson upper ends of both rates: Nasr et al. 2021, equation (2).

    P[lower ≤ ε] ≥ confidence for any mechanism: either rate is given half of the error probability, so that both ends
    hold at once, and with them both directions of the maximum.
    """
    rates = upper_rates(fp, fn, negatives, positives, error_of(confidence, selection))
    value = epsilon_of_rates(*rates, checked_delta(delta))
    return Estimate(value, None, confidence, "Clopper-Pearson", "A", delta, (_TRIALS, threshold_note(selection)))


def epsilon_gdp(
    fp: int,
    fn: int,
    negatives: int,
    positives: int,
    delta: float,
    confidence: float = 0.95,
    *,
    selection: Selection = Fixed(),  # noqa: B008 - frozen
) -> Estimate:
    """ε(δ) of the μ-GDP curve, μ = Φ⁻¹(1 − FPR) − Φ⁻¹(FNR) at the Clopper-Pearson ends (Nasr et al. 2023, equation 6).

    P[lower ≤ ε] ≥ confidence if the mechanism is a Gaussian channel. Of another mechanism it may claim far too much
    (randomised response of ε = 1 looks like μ = 1.23, which has ε = 5.6 at δ = 1e-5), and counts cannot tell.
    """
    checked_delta(delta, positive=True)
    high = upper_rates(fp, fn, negatives, positives, error_of(confidence, selection))
    mu = -float(ndtri(high[0]) + ndtri(high[1]))
    notes = ("the mechanism is Gaussian differential privacy (GDP)", _TRIALS, threshold_note(selection))
    return Estimate(gdp_epsilon(mu, delta), None, confidence, "GDP, Clopper-Pearson", "B", delta, notes)


# --- what others build on -------------------------------------------------------------------------------------------


def epsilon_of_rates(fpr: float, fnr: float, delta: float) -> float:
    """The least ε ≥ 0 at which these rates are allowed."""
    return max(0.0, _one_direction(1 - delta - fpr, fnr), _one_direction(1 - delta - fnr, fpr))


def _one_direction(above: float, below: float) -> float:
    if above <= 0:
        return 0.0
    return math.log(above / below) if below > 0 else math.inf


def upper_rates(fp: int, fn: int, negatives: int, positives: int, error: float) -> tuple[float, float]:
    """Upper ends of both error rates, which hold together with probability 1 − error."""
    fp, fn, negatives, positives = confusion(fp, fn, negatives, positives)
    return upper_rate(fp, negatives, error / 2), upper_rate(fn, positives, error / 2)


def upper_rate(errors: int, trials: int, error: float) -> float:
    """The one-sided Clopper-Pearson upper end: exceeded by the true rate with probability `error` at most."""
    return float(betainccinv(errors + 1, trials - errors, error)) if errors < trials else 1.0


def gdp_epsilon(mu: float, delta: float) -> float:
    """ε(δ) of μ-GDP; 0 where μ is not positive."""
    return gaussian_epsilon(1 / mu, delta) if mu > 1e-12 else 0.0


def threshold_note(selection: Selection, what: str = "threshold") -> str:
    """How the threshold was chosen, for people."""
    match selection:
        case Fixed():
            return f"the {what} was fixed before any score was seen"
        case HeldOut():
            return f"the {what} was chosen on other trials"
        case Corrected(choices):
            return f"the {what} is the best of {choices}, corrected by a union bound"
