# SPDX-License-Identifier: Apache-2.0
"""The tests of a claim, on what the server saw of canaries in one run: see the table in `federation`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import ndtr
from scipy.stats import binom

from fedsim.audit.estimation.one_run import GDP, Family, SampledGaussian, fdp_rejects
from fedsim.audit.evidence.federated import Evidence
from fedsim.privacy import PrivacyClaim
from fedsim.privacy.loss import ROUGH

GUESSES = 0.07
"""The share of the canaries that is guessed upon, half of it as present and half as absent; fixed beforehand."""


def guess(evidence: Evidence, share: float = GUESSES) -> tuple[int, int]:
    """(right, all) guesses: the canaries of the largest totals are said to be in, of the smallest to be out."""
    count = len(evidence.included)
    each = min(max(1, round(share * count / 2)), count // 2)
    order = np.argsort(evidence.totals, kind="stable")
    right = evidence.included[order[count - each :]].sum() + (~evidence.included[order[:each]]).sum()
    return int(right), 2 * each


def family_of(claim: PrivacyClaim) -> Family:
    """The curves that the claim is one of.

    A rough grid puts a curve below the true one: what refutes it refutes the true one as well.
    """
    if claim.sample_rate < 1:
        return SampledGaussian(claim.sample_rate, claim.compositions, claimed=True, grid=ROUGH)
    return GDP(claimed=True)


def p_values(evidence: Evidence, guess_share: float = GUESSES) -> dict[str, float]:
    """Of each test, by its name; a true claim has each at most x with probability of at most x."""
    count = len(evidence.included)
    return {
        "one run": _one_run_p_value(*guess(evidence, guess_share), count, evidence.claim) if count else 1.0,
        "per step": _per_step_p_value(evidence),
        "per step, count": _count_p_value(evidence),
        "echo": _echo_p_value(evidence),
    }


def _one_run_p_value(correct: int, guesses: int, canaries: int, claim: PrivacyClaim) -> float:
    """The smallest error probability at which the claimed curve is refuted."""
    family = family_of(claim)
    strength = 1 / claim.noise_multiplier
    if isinstance(family, GDP):
        strength *= math.sqrt(claim.compositions)
    curve = family.curve(strength, claim.delta)
    return _smallest(lambda error: fdp_rejects(correct, guesses, canaries, error, curve))


def _smallest(rejects: Callable[[float], bool], least: float = 1e-12) -> float:
    """The smallest error probability with which a test rejects, from above."""
    if not rejects(0.999):
        return 1.0
    low, high = math.log(least), math.log(0.999)
    if rejects(least):
        return least
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if rejects(math.exp(middle)) else (middle, high)
    return math.exp(high)


def _per_step_p_value(evidence: Evidence) -> float:
    """Of the claimed distance 1/σ against a larger one, and of the rate against a higher one; twice the smaller.

    t = (difference of means)/(spread·u) with u² = 1/n + 1/m has, at distance d, about mean d/u and variance
    1 + t²/2f, f = n + m − 2. The larger of the two spreads is taken, so that unequal ones do not lead to a false alarm.
    """
    x, y, claim = evidence.scores_in, evidence.scores_out, evidence.claim
    if min(len(x), len(y)) < 3:
        return 1.0
    unit = math.sqrt(1 / len(x) + 1 / len(y))
    spread = max(float(x.std(ddof=1)), float(y.std(ddof=1)))
    if spread == 0:
        return 1.0
    t = float(x.mean() - y.mean()) / (spread * unit)
    z = (t - 1 / (claim.noise_multiplier * unit)) / math.sqrt(1 + t * t / (2 * (len(x) + len(y) - 2)))
    more_often = (
        float(binom.sf(evidence.joined - 1, evidence.chances, claim.sample_rate)) if claim.sample_rate < 1 else 1
    )
    return min(1.0, 2 * min(float(ndtr(-z)), more_often))


def _count_p_value(evidence: Evidence) -> float:
    """Of so few errors at the middle threshold: with the claimed noise each has probability Φ(−1/2σ)."""
    errors = int((evidence.scores_in < 0.5).sum() + (evidence.scores_out >= 0.5).sum())
    chance = float(ndtr(-0.5 / evidence.claim.noise_multiplier))
    return float(binom.cdf(errors, len(evidence.scores_in) + len(evidence.scores_out), chance))


def _echo_p_value(evidence: Evidence) -> float:
    """Two-sided, of a correlation r of n independent pairs: r√n is about N(0, 1)."""
    correlation, pairs = evidence.echo
    return float(2 * ndtr(-abs(correlation) * math.sqrt(pairs)))
