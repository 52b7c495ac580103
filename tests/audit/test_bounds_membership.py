# SPDX-License-Identifier: Apache-2.0
"""What DP allows membership inference, all pairs of rates, and which epsilon a success proves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedsim.audit import bounds
from fedsim.errors import AuditError, PrivacyError
from fedsim.privacy import Mechanism, delta

epsilons = st.floats(0, 25)
deltas = st.sampled_from([0.0, 1e-6, 1e-3, 0.1])


# --- known values ---------------------------------------------------------------------------------------------------


def test_membership_known_values() -> None:
    # shared/reference/audit.json, membership, last row
    assert bounds.membership_advantage(10, 1e-5) == pytest.approx(0.9999092051705525)
    assert bounds.membership_advantage(10, 1e-5, game="resampling") == pytest.approx(0.49995460258527624)
    assert bounds.membership_accuracy(10, 1e-5) == pytest.approx(0.9999546025852762)
    assert bounds.tpr_at_fpr(10, 1e-5, 0.01) == pytest.approx(0.9999550545235344)
    assert bounds.membership_advantage(0) == 0
    assert bounds.membership_accuracy(0, prior=0.3) == 0.7


def test_membership_as_in_the_reference(reference: dict[str, Any]) -> None:
    for row in reference["membership"]:
        pair = row["eps"], row["delta"]
        mine = {
            "adv_strong_bound": bounds.membership_advantage(*pair),
            "adv_resampling_bound": bounds.membership_advantage(*pair, game="resampling"),
            "yeom_bound": bounds.membership_advantage_yeom(row["eps"]),
            "max_accuracy_balanced": bounds.membership_accuracy(*pair),
            "tpr_at_fpr_1pct": bounds.tpr_at_fpr(*pair, 0.01),
        }
        assert mine == pytest.approx({name: row[name] for name in mine}, rel=1e-9)


def test_gaussian_channels_as_in_the_reference(reference: dict[str, Any]) -> None:
    for row in reference["gaussian_exact"]:
        assert bounds.membership_advantage_gdp(row["mu"]) == pytest.approx(row["adv"], rel=1e-9)
        assert bounds.membership_advantage(row["eps"], row["delta"]) == pytest.approx(row["adv_eps_delta"], rel=1e-9)
        assert bounds.tpr_at_fpr_gdp(row["mu"], 0.01) == pytest.approx(row["tpr_at_fpr_1pct"], rel=1e-9)
        for kappa in (0.5, 0.1, 0.01, 0.001):
            assert bounds.rero_gaussian(row["mu"], kappa) == pytest.approx(row[f"rero_kappa={kappa:g}"], rel=1e-9)


def test_inverses_as_in_the_reference(reference: dict[str, Any]) -> None:
    for row in reference["inverse_estimators"]["rows"]:
        kappa, right = 1 / row["m"], round(row["success"] * row["n"])
        proved = bounds.epsilon_reconstruction(right, row["n"], kappa, adjacency="replace")
        assert proved.lower == pytest.approx(row["eps_lb"], abs=1e-9)
        assert bounds.epsilon_from_balle(row["p_low"], kappa) == pytest.approx(row["eps_balle_inversion"], abs=1e-9)
        same = bounds.epsilon_from_uniform_advantage(row["p_low"] - kappa, row["m"])
        assert same == pytest.approx(row["eps_lb"], abs=1e-9)


# --- oracles --------------------------------------------------------------------------------------------------------


def test_curves() -> None:
    assert bounds.advantage_of_curve(bounds.approximate_dp(1, 1e-3)) == pytest.approx(
        bounds.membership_advantage(1, 1e-3), abs=1e-12
    )
    assert bounds.advantage_of_curve(bounds.gaussian(1.3)) == pytest.approx(bounds.membership_advantage_gdp(1.3))
    whole, once = bounds.sampled_gaussian(1.0, 1.0, 4), bounds.gaussian(2.0)
    for x in (0.0, 0.01, 0.3, 1.0):
        assert whole(x) == pytest.approx(once(x), abs=1e-12)
    sampled = bounds.sampled_gaussian(1.0, 0.1, 100)
    mechanism = Mechanism("gaussian", 1.0, "add/remove", "poisson", 0.1)
    for eps in (0.5, 2.0, 5.0):  # never above the curve of any one (ε, δ) of it, and near the best of them
        line = bounds.approximate_dp(eps, delta(mechanism, 100, eps))
        assert all(sampled(x) >= line(x) - 2e-3 for x in np.linspace(0, 1, 50))
    # the log-likelihood ratio test of one sampled release attains it
    q, sigma, threshold = 0.3, 1.0, 1.2
    fpr, fnr = norm.sf(threshold / sigma), 1 - q * norm.sf((threshold - 1) / sigma) - (1 - q) * norm.sf(threshold)
    one = bounds.sampled_gaussian(sigma, q, 1)
    assert one(fpr) <= fnr + 1e-9
    assert min(one(fpr), 1) == pytest.approx(fnr, abs=5e-3)


def test_curves_at_their_ends() -> None:
    assert bounds.sampled_gaussian(0.0, 0.1, 5)(0.3) == 0
    assert bounds.sampled_gaussian(1.0, 0.1, 0)(0.3) == 0.7
    for curve in (bounds.gaussian(0.0), bounds.approximate_dp(0.0, 0.0)):
        assert curve(0.25) == pytest.approx(0.75)


def test_regions_are_symmetric_and_hold_the_diagonal() -> None:
    for fpr, least, most in (bounds.region_dp(1.0, 0.1, 101), bounds.region_gdp(1.0, 101)):
        assert (least <= 1 - fpr + 1e-12).all()
        assert (1 - fpr <= most + 1e-12).all()
        assert least[0] == pytest.approx(1 - most[-1])
    fpr, least, most = bounds.region_dp(1.0, 0.1, 11)
    e = math.e
    assert least == pytest.approx([max(0, 0.9 - e * x, (0.9 - x) / e) for x in fpr])
    assert most == pytest.approx(
        [min(1, 1 + (0.1 - x) / e, 0.1 + (1 - x) * e) for x in fpr]
    )  # Zanella-Béguelin's region


def test_adjacency_converts_or_refuses() -> None:
    assert bounds.for_adjacency(1.0, 1e-5, "replace", "replace") == (1.0, 1e-5)
    assert bounds.for_adjacency(1.0, 1e-5, "add/remove", "replace") == bounds.as_replace(1.0, 1e-5)
    with pytest.raises(PrivacyError, match="adjacency is replace"):
        bounds.for_adjacency(1.0, 1e-5, "replace", "add/remove")


def test_kappa_of_a_prior_that_is_given() -> None:
    rows = torch.tensor([[0.0], [1.0], [5.0]]).double()
    given_ = bounds.kappa(rows, torch.cdist, 0.0, prior=[0.2, 0.2, 0.6])
    assert (given_.lower, given_.upper) == pytest.approx((0.6, 0.6))
    assert bounds.kappa(rows, torch.cdist, 1.0, prior=[0.5, 0.2, 0.3]).lower == pytest.approx(0.7)
    even = bounds.kappa(rows, torch.cdist, 0.5, prior=[1 / 3] * 3)
    assert (even.lower, even.upper) == pytest.approx(
        (bounds.kappa(rows, torch.cdist, 0.5).lower, bounds.kappa(rows, torch.cdist, 0.5).upper)
    )
    for wrong in ([0.5, 0.5], [0.5, 0.6, -0.1], [0.1, 0.1, 0.1]):
        with pytest.raises(PrivacyError, match="prior is not a list of 3"):
            bounds.kappa(rows, torch.cdist, 0.0, prior=wrong)


# --- properties -----------------------------------------------------------------------------------------------------


@given(a=epsilons, b=epsilons, delta_=deltas, x=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_bounds_never_fall_in_epsilon(a: float, b: float, delta_: float, x: float) -> None:
    low, high = sorted((a, b))
    pairs = (
        [bounds.membership_advantage(e, delta_) for e in (low, high)],
        [bounds.membership_accuracy(e, delta_, x) for e in (low, high)],
        [bounds.tpr_at_fpr(e, delta_, x) for e in (low, high)],
    )
    for small, large in pairs:
        assert -1e-12 <= small <= large + 1e-12 <= 1 + 2e-12


@given(eps=st.floats(0.01, 12), delta_=deltas, kappa=st.floats(1e-3, 0.8))
@settings(max_examples=200, deadline=None)
def test_inverses_are_inverse(eps: float, delta_: float, kappa: float) -> None:
    back = bounds.epsilon_from_advantage(bounds.membership_advantage(eps, delta_), delta_)
    assert back == pytest.approx(eps, rel=1e-6)
    tpr = bounds.tpr_at_fpr(eps, delta_, kappa)
    if tpr < 1:
        assert bounds.epsilon_from_rates(tpr, kappa, delta_) == pytest.approx(eps, rel=1e-4, abs=1e-9)
    accuracy = bounds.membership_accuracy(eps, delta_)
    assert bounds.epsilon_from_accuracy(accuracy, delta_) == pytest.approx(eps, rel=1e-6)
    for adjacency in ("replace", "add/remove"):
        allowed = bounds.rero(eps, kappa, delta=delta_, adjacency=adjacency)
        if allowed < 1:
            proved = bounds.epsilon_from_reconstruction(allowed, kappa, delta_, adjacency=adjacency)
            assert proved == pytest.approx(eps, rel=1e-4, abs=1e-6)


def test_perfect_and_useless_successes() -> None:
    assert bounds.epsilon_from_advantage(1.0) == math.inf
    assert bounds.epsilon_from_accuracy(0.5) == bounds.epsilon_from_advantage(0.0) == 0
    assert bounds.epsilon_from_reconstruction(0.05, 0.1, adjacency="replace") == 0
    assert bounds.epsilon_reconstruction(0, 10, 0.1, adjacency="replace").lower == 0
    few = bounds.epsilon_reconstruction(10, 10, 0.1, 1e-5, adjacency="replace")
    many = bounds.epsilon_reconstruction(1000, 1000, 0.1, 1e-5, adjacency="replace")
    assert 0 < few.lower < many.lower < math.inf


@pytest.mark.parametrize(
    "call",
    [
        lambda: bounds.membership_advantage(-1),
        lambda: bounds.membership_advantage(1, 2),
        lambda: bounds.membership_accuracy(1, 0, 1.5),
        lambda: bounds.tpr_at_fpr(1, 0, -0.1),
        lambda: bounds.attribute_advantage(1, 0, [0.5, 0.6]),
        lambda: bounds.attribute_success(math.nan, 0, [0.5, 0.5]),
        lambda: bounds.epsilon_from_advantage(1.1),
        lambda: bounds.epsilon_reconstruction(11, 10, 0.1, adjacency="replace"),
        lambda: bounds.gaussian(-1),
        lambda: bounds.sampled_gaussian(1.0, 1.5, 10),
        lambda: bounds.epsilon_from_rates(0.5, 0.1, -0.1),
        lambda: bounds.epsilon_from_accuracy(0.9, 1.5),
    ],
)
def test_nonsense_is_refused_in_one_sentence(call: Any) -> None:
    with pytest.raises((PrivacyError, AuditError), match=" is "):
        call()
