# SPDX-License-Identifier: Apache-2.0
"""Which ε a success proves: the bounds turned around. With counts it is an `Estimate`, with rates mere arithmetic.

Adjacency is that of the ε that comes out: a reconstruction under `replace` says nothing about an add/remove ε smaller
than half of it, since an add/remove (ε, δ) is a replace (2ε, (1 + e^ε) δ).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from scipy.optimize import brentq
from scipy.special import betaincinv

from fedsim.audit.estimate import Estimate, Fixed
from fedsim.audit.estimation.arguments import checked_delta, count, error_of
from fedsim.audit.estimation.counts import epsilon_of_rates
from fedsim.audit.limits.attribute import attribute_advantage, attribute_success
from fedsim.audit.limits.ranges import checked, checked_share
from fedsim.audit.limits.rero import rero
from fedsim.privacy.claim import Adjacency

_MOST = 30.0  # the linear program resolves no more


def epsilon_from_rates(tpr: float, fpr: float, delta: float = 0.0) -> float:
    """The least ε at which a test may have these rates: inverse of `tpr_at_fpr`."""
    checked(0.0, 0.0, delta)
    return epsilon_of_rates(checked_share("fpr", fpr), 1 - checked_share("tpr", tpr), delta)


def epsilon_from_advantage(advantage: float, delta: float = 0.0) -> float:
    """ln((1 + a − 2δ)/(1 − a)): inverse of `membership_advantage`."""
    checked(0.0, 0.0, delta)
    checked_share("advantage", advantage)
    return _log_ratio(1 + advantage - 2 * delta, 1 - advantage)


def epsilon_from_accuracy(accuracy: float, delta: float = 0.0, prior: float = 0.5) -> float:
    """ln((a − δ)/(1 − a)) where guessing by the prior (and δ) would not do: inverse of `membership_accuracy`."""
    checked(0.0, 0.0, delta)
    checked_share("accuracy", accuracy)
    checked_share("prior", prior)
    if accuracy <= max(1 - prior + prior * delta, prior + (1 - prior) * delta):
        return 0.0
    return _log_ratio(accuracy - delta, 1 - accuracy)


def epsilon_from_balle(success: float, kappa: float) -> float:
    """ln(γ/κ): inverse of `rero_balle`, which is not tight and hence proves less."""
    checked(0.0, checked_share("kappa", kappa))
    return _log_ratio(checked_share("success", success), kappa)


def epsilon_from_reconstruction(success: float, kappa: float, delta: float = 0.0, *, adjacency: Adjacency) -> float:
    """Inverse of `rero`; under replace ln((s (1 − κ) − δ) / (κ (1 − s))), for m equal records ln((m − 1) s/(1 − s))."""
    checked(0.0, kappa, delta)
    success = checked_share("success", success)
    if adjacency == "add/remove":
        return epsilon_of_rates(kappa, 1 - success, delta)
    if success <= rero(0.0, kappa, delta=delta, adjacency="replace"):
        return 0.0
    return _log_ratio(success * (1 - kappa) - delta, kappa * (1 - success))


def epsilon_from_uniform_advantage(advantage: float, m: int) -> float:
    """ln((1 + u m)/(1 − u m/(m − 1))) for m equally likely values, replace-one, δ = 0 (arXiv 2603.12142, Cor. 5.3)."""
    m = count("m", m, least=2)
    return _log_ratio(1 + checked_share("advantage", advantage) * m, 1 - advantage * m / (m - 1))


def epsilon_from_attribute_advantage(
    advantage: float, delta: float, prior: Sequence[float], *, adjacency: Adjacency = "replace"
) -> float:
    """The least ε at which any adversary could have that advantage with that prior: the linear program turned round."""
    checked_share("advantage", advantage)
    return _inverse(lambda e: attribute_advantage(e, delta, prior, adjacency=adjacency), advantage)


def epsilon_from_attribute_success(
    success: float, delta: float, prior: Sequence[float], *, adjacency: Adjacency = "replace"
) -> float:
    """The least ε at which any adversary could be right so often with that prior."""
    checked_share("success", success)
    return _inverse(lambda e: attribute_success(e, delta, prior, adjacency=adjacency), success)


def epsilon_reconstruction(
    right: int, of: int, kappa: float, delta: float = 0.0, confidence: float = 0.95, *, adjacency: Adjacency
) -> Estimate:
    """The ε that `right` of `of` reconstructions prove, at the one-sided Clopper-Pearson lower end of their rate.

    P[lower ≤ ε] ≥ confidence for any mechanism, if the records were drawn from a prior of which a blind guess is right
    with probability κ at most, and the trials are independent.
    """
    delta, of = checked_delta(delta), count("of", of, least=1)
    right = count("right", right, of, of="the number of trials")
    rate = float(betaincinv(right, of - right + 1, error_of(confidence, Fixed()))) if right else 0.0
    lower = epsilon_from_reconstruction(rate, kappa, delta, adjacency=adjacency)
    notes = (
        "the trials are independent of each other",
        f"records are drawn from a prior of which a blind guess is right with probability {kappa:g} at most",
        f"neighbours are those of {adjacency}",
    )
    return Estimate(lower, None, confidence, "reconstructions", "A", delta, notes)


def _log_ratio(above: float, below: float) -> float:
    if above <= 0:
        return 0.0
    return max(0.0, math.log(above / below)) if below > 0 else math.inf


def _inverse(bound: Callable[[float], float], measured: float) -> float:
    """The largest ε at which the bound is still below what was measured, to 1e-6 and on the smaller side."""
    if bound(0.0) >= measured:
        return 0.0
    if bound(_MOST) <= measured:  # nothing forbids it but certainty
        return _MOST
    return max(0.0, float(brentq(lambda e: bound(e) - measured, 0.0, _MOST, xtol=1e-7)) - 1e-6)
