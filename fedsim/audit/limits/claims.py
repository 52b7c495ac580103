# SPDX-License-Identifier: Apache-2.0
"""What a whole claim allows: its adjacency, its sampling and, where it names its mechanism, its whole profile."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from fedsim.audit.limits.membership import membership_advantage
from fedsim.audit.limits.ranges import checked, growth
from fedsim.audit.limits.rero import rero, rero_dpsgd, rero_gaussian, urero_tight
from fedsim.errors import PrivacyError
from fedsim.privacy.accounting import Mechanism
from fedsim.privacy.accounting import epsilon as accounted_epsilon
from fedsim.privacy.claim import Adjacency, PrivacyClaim


def as_replace(epsilon: float, delta: float = 0.0) -> tuple[float, float]:
    """(2ε, (1 + e^ε) δ): what an add/remove guarantee says about replacing (remove, then add)."""
    checked(epsilon, 0.0, delta)
    return 2 * epsilon, min(1.0, (1 + growth(epsilon)) * delta)


def for_adjacency(epsilon: float, delta: float, given: Adjacency, needed: Adjacency) -> tuple[float, float]:
    """The (ε, δ) under the adjacency that a bound needs: the same, converted, or refused."""
    if given == needed:
        checked(epsilon, 0.0, delta)
        return epsilon, delta
    if needed == "replace":
        return as_replace(epsilon, delta)
    raise PrivacyError(
        f"adjacency is {given}, but the bound needs {needed}: to replace a record says nothing about leaving it out,"
        " so use a bound for replace, or account for add/remove"
    )


Bound = Literal["(ε, δ)", "privacy profile"]


def amplified(claim: PrivacyClaim) -> bool:
    """Whether the claim rests on it that a unit may have been left out, and nobody knows."""
    return claim.sampling != "none" and claim.sample_rate < 1


def without_amplification(claim: PrivacyClaim) -> PrivacyClaim:
    """The same noise for a unit that was drawn: sample rate 1 in all compositions, and the ε that this spends at δ.

    P[success] = q P[success | drawn] + (1 − q) P[success | not drawn], so that an amplified bound on the left says
    little about the first term. Rate 1 in every release is pessimistic, since only the attacked ones were surely drawn.
    Where the mechanism is none that is known here, nothing is claimed (ε = ∞).
    """
    if not amplified(claim):
        return claim
    kinds: tuple[Literal["gaussian", "laplace"], ...] = ("gaussian", "laplace")
    kind = next((kind for kind in kinds if kind in claim.mechanism.lower()), None)
    spent = math.inf
    if kind is not None and claim.noise_multiplier > 0:
        try:
            spent = accounted_epsilon(
                Mechanism(kind, claim.noise_multiplier, claim.adjacency), claim.compositions, claim.delta
            )
        except PrivacyError:  # not accounted for at this δ
            spent = math.inf
    return dataclasses.replace(claim, epsilon=max(claim.epsilon, spent), sampling="none", sample_rate=1.0)


def rero_claim(claim: PrivacyClaim, kappa: float, *, drawn: bool = False) -> tuple[float, Bound]:
    """The success that a claim allows, and what that rests on: the claim's (ε, δ), or the mechanism's whole profile.

    The profile is used only if the claim names Gaussian noise and its own fields spend no more than its ε. `drawn`:
    only units that were drawn are tried, so that amplification by sampling does not count.
    """
    claim = without_amplification(claim) if drawn else claim
    if not claim.finite:
        return 1.0, "(ε, δ)"
    allowed = rero(claim.epsilon, kappa, delta=claim.delta, adjacency=claim.adjacency)
    if not _is_gaussian(claim):
        return allowed, "(ε, δ)"
    if claim.sampling == "none":
        profile = rero_gaussian(math.sqrt(claim.compositions) / claim.noise_multiplier, kappa)
    else:
        profile = rero_dpsgd(claim.noise_multiplier, claim.sample_rate, claim.compositions, kappa)
    return (profile, "privacy profile") if profile < allowed else (allowed, "(ε, δ)")


def urero_claim(claim: PrivacyClaim, kappa: float, *, drawn: bool = False) -> float:
    """The advantage over the same answers on an independent record that a claim allows; `drawn` as above."""
    claim = without_amplification(claim) if drawn else claim
    if not claim.finite:
        return 1.0
    pair = (claim.epsilon, claim.delta)
    epsilon, delta = as_replace(*pair) if claim.adjacency == "add/remove" else pair
    return min(urero_tight(epsilon, kappa, delta=delta), rero_claim(claim, kappa)[0])


def membership_claim(claim: PrivacyClaim, *, drawn: bool = False) -> float:
    """The strong membership advantage (TPR − FPR, of neighbours under the claim's own adjacency) that it allows."""
    claim = without_amplification(claim) if drawn else claim
    return membership_advantage(claim.epsilon, claim.delta) if claim.finite else 1.0


def _is_gaussian(claim: PrivacyClaim) -> bool:
    if "gaussian" not in claim.mechanism.lower() or claim.sampling == "fixed size":
        return False
    if claim.noise_multiplier == 0 or claim.compositions == 0 or claim.delta == 0:
        return False
    mechanism = Mechanism("gaussian", claim.noise_multiplier, claim.adjacency, claim.sampling, claim.sample_rate)
    try:
        spent = accounted_epsilon(mechanism, claim.compositions, claim.delta)
    except PrivacyError:
        return False
    # A claim may say more than its fields spend (another accountant), never less.
    return spent <= claim.epsilon * (1 + 1e-4) + 1e-6
