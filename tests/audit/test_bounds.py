# SPDX-License-Identifier: Apache-2.0
"""What DP allows a reconstruction: closed forms, the reference numbers, a linear program, and properties."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.stats import norm

from fedsim.audit import bounds
from fedsim.audit.bounds import Kappa
from fedsim.errors import PrivacyError
from fedsim.privacy import Mechanism, PrivacyClaim, delta, epsilon
from fedsim.privacy.claim import Adjacency

BOTH: tuple[Adjacency, Adjacency] = ("add/remove", "replace")
epsilons = st.floats(0, 30)
kappas = st.floats(1e-6, 1)
deltas = st.sampled_from([0.0, 1e-6, 1e-3])


# --- known values ---------------------------------------------------------------------------------------------------


def test_known_values() -> None:
    # shared/design/audit.md, section 2 (f): m = 10, ε = 4
    assert bounds.rero_balle(4, 0.1) == 1
    assert bounds.rero_wpes(4, 10) == pytest.approx(0.968, abs=5e-4)
    assert bounds.rero_tight(4, 10) == pytest.approx(0.859, abs=1e-3)
    uniform = [0.1] * 10
    assert bounds.urero_prior(4, uniform) == pytest.approx(0.759, abs=1e-3)
    assert bounds.URERO_ROWS[3].value(4, 10) == pytest.approx(0.868, abs=5e-4)
    # (0.9, 0.1), ε = 1: the exact advantage
    assert bounds.urero_prior(1, [0.9, 0.1]) == pytest.approx(0.0832, abs=5e-5)


def test_dpsgd_known_values() -> None:
    # audit.md, row Hayes 2023: prior 1/8, σ = 5, T = 100 (no sampling); and section 2 (f): q = .0819, T = 2500, ε = 4
    assert bounds.rero_dpsgd(5, 1, 100, 1 / 8) == pytest.approx(0.8022, abs=1e-4)
    assert bounds.rero_dpsgd(4.5116, 0.0819, 2500, 0.1) == pytest.approx(0.358, abs=5e-4)
    assert bounds.rero_dpsgd(1, 0.1, 100, 0.1) == pytest.approx(0.469186, abs=2e-6)  # reference/audit.json, dpsgd_rero


def test_the_wrong_row_is_marked_and_really_wrong() -> None:
    wrong = [row for row in bounds.URERO_ROWS if not row.valid]
    assert [row.attack for row in wrong] == ["AIA Informed"]
    prior = [0.45, 0.45, *[0.1 / 18] * 18]
    exact = _advantage_by_linear_program(prior, 1.0)
    assert exact == pytest.approx(0.20795, abs=1e-4)  # reference/audit.json, seed_row_AIA_informed_violation
    assert exact > wrong[0].value(1.0, 20)
    assert exact <= bounds.urero_prior(1.0, prior) + 1e-9


# --- the reference --------------------------------------------------------------------------------------------------


def test_uniform_priors_as_in_the_reference(reference: dict[str, Any]) -> None:
    for row in reference["reconstruction_uniform_prior"]:
        m, eps = row["m"], row["eps"]
        mine = {
            "balle_rero": bounds.rero_balle(eps, 1 / m),
            "wpes_rero0": bounds.rero_wpes(eps, m),
            "tight_rero0_bounded_dp": bounds.rero_tight(eps, m),
            "rero0_addremove_dp": bounds.rero(eps, 1 / m, adjacency="add/remove"),
            "wpes_urero_aia_uniform": bounds.URERO_ROWS[3].value(eps, m),
            "tight_adv_uniform": bounds.urero_prior(eps, [1 / m] * m),
        }
        assert mine == pytest.approx({name: row[name] for name in mine}, rel=1e-9)
        assert bounds.rero(eps, 1 / m, adjacency="replace") == pytest.approx(bounds.rero_tight(eps, m), rel=1e-12)


def test_any_kappa_as_in_the_reference(reference: dict[str, Any]) -> None:
    for row in reference["kappa_grid"]:
        eps, kappa = row["eps"], row["kappa"]
        assert bounds.rero_balle(eps, kappa) == pytest.approx(row["balle_rero"], rel=1e-9)
        assert bounds.rero(eps, kappa, adjacency="add/remove") == pytest.approx(row["rero_fdp_addremove"], rel=1e-9)
        assert bounds.urero(eps, kappa) == pytest.approx(row["wpes_urero"], rel=1e-9)


def test_no_exact_optimum_of_the_reference_exceeds_a_bound(reference: dict[str, Any]) -> None:
    for row in reference["nonuniform_prior"]:
        eps, delta_, kappa = row["eps"], row["delta"], row["kappa0"]
        assert row["lp_exact_rero"] <= bounds.rero(eps, kappa, delta=delta_, adjacency="replace") + 1e-9
        assert row["lp_exact_rad"] <= bounds.urero_tight(eps, kappa, delta=delta_) + 1e-9


def test_dpsgd_as_in_the_reference(reference: dict[str, Any]) -> None:
    for row in reference["dpsgd_rero"]["rows"]:
        mine = bounds.rero_dpsgd(row["sigma"], row["q"], row["T"], row["kappa"])
        assert mine == pytest.approx(row["rero_profile"], abs=1e-4)
        assert mine <= row["rero_profile"] + 1e-9  # ours has the finer grid, and both are upper bounds
        if "closed_form" in row:
            assert mine == pytest.approx(row["closed_form"], abs=1e-6)


# --- oracles --------------------------------------------------------------------------------------------------------


def _success_by_linear_program(prior: list[float], eps: float) -> float:
    """The best success of any ε-DP (replace) mechanism with as many outputs as records: maximise Σ π_z P_z(z)."""
    return -float(_program(prior, eps, np.diag(prior)).fun)


def _advantage_by_linear_program(prior: list[float], eps: float) -> float:
    pi = np.array(prior)
    return -float(_program(prior, eps, np.diag(pi) - np.outer(pi, pi)).fun)


def _program(prior: list[float], eps: float, gain: np.ndarray) -> Any:
    """Variables P[z, o]; gain[z, o] is what output o (answer: o) is worth when z is the truth."""
    m = len(prior)
    rows = []
    for o in range(m):
        for a in range(m):
            for b in range(m):
                if a != b:
                    row = np.zeros((m, m))
                    row[a, o], row[b, o] = 1, -math.exp(eps)
                    rows.append(row.ravel())
    sums = np.kron(np.eye(m), np.ones(m))
    return linprog(-gain.ravel(), np.array(rows), np.zeros(len(rows)), sums, np.ones(m), (0, 1))


@pytest.mark.parametrize("eps", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("prior", [[0.25] * 4, [0.7, 0.2, 0.1], [0.4, 0.3, 0.2, 0.05, 0.05]])
def test_no_mechanism_does_better_than_the_replace_bound(prior: list[float], eps: float) -> None:
    best = _success_by_linear_program(prior, eps)
    bound = bounds.rero(eps, max(prior), adjacency="replace")
    assert best <= bound + 1e-9
    if len(set(prior)) == 1:
        assert best == pytest.approx(bound, abs=1e-9)  # attained
    assert _advantage_by_linear_program(prior, eps) <= bounds.urero_tight(eps, max(prior)) + 1e-9


def test_the_gaussian_mechanism_attains_its_bound() -> None:
    """Two equally likely records against nothing: the likelihood-ratio test succeeds with just that probability."""
    mu, kappa = 1.3, 0.2
    threshold = norm.isf(kappa)  # of all tests that fire with probability κ without the record, the strongest
    assert norm.sf(threshold - mu) == pytest.approx(bounds.rero_gaussian(mu, kappa), abs=1e-12)


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.0, 0.1, 100), (0.8, 0.01, 1000), (2.0, 0.5, 50)])
def test_the_profile_is_never_above_one_epsilon_of_it(sigma: float, rate: float, steps: int) -> None:
    mechanism = Mechanism("gaussian", sigma, "add/remove", "poisson", rate)
    for kappa in (0.5, 0.05, 0.001):
        whole = bounds.rero_dpsgd(sigma, rate, steps, kappa)
        for eps in (0.5, 2.0, 5.0):
            single = bounds.rero(eps, kappa, delta=delta(mechanism, steps, eps), adjacency="add/remove")
            assert kappa <= whole <= single + 1e-9


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.0, 1.0, 1), (2.0, 0.3, 10), (1.0, 0.1, 30)])
def test_the_best_attack_on_dpsgd_stays_below_the_bound(sigma: float, rate: float, steps: int) -> None:
    """A record of m, whose clipped gradients are orthogonal; the adversary sees every step and takes the likeliest."""
    m, trials = 8, 20_000
    rng = np.random.default_rng(0)
    truth = rng.integers(m, size=trials)
    likelihood = np.zeros((trials, m))
    for _ in range(steps):
        seen = rng.normal(0, sigma, (trials, m))
        seen[np.arange(trials), truth] += rng.random(trials) < rate
        likelihood += np.log1p(rate * np.expm1((2 * seen - 1) / (2 * sigma**2)))
    success = float((likelihood.argmax(1) == truth).mean())
    error = 4 * math.sqrt(success * (1 - success) / trials)
    bound = bounds.rero_dpsgd(sigma, rate, steps, 1 / m)
    assert 1 / m + 0.02 < success <= bound + error
    assert success >= 0.7 * bound  # and the bound is no mere formality


def test_sampling_never_helps_the_adversary() -> None:
    values = [bounds.rero_dpsgd(1.0, rate, 50, 0.05) for rate in (0.02, 0.1, 0.5, 1.0)]
    assert values == sorted(values)


# --- properties -----------------------------------------------------------------------------------------------------


@given(a=epsilons, b=epsilons, kappa=kappas, delta_=deltas)
@settings(max_examples=200, deadline=None)
def test_bounds_never_fall_in_epsilon(a: float, b: float, kappa: float, delta_: float) -> None:
    low, high = sorted((a, b))
    for adjacency in BOTH:
        first, second = (bounds.rero(e, kappa, delta=delta_, adjacency=adjacency) for e in (low, high))
        assert kappa - 1e-12 <= first <= second + 1e-12 <= 1 + 1e-9
    assert bounds.rero_balle(low, kappa) <= bounds.rero_balle(high, kappa)
    assert bounds.urero(low, kappa) <= bounds.urero(high, kappa) + 1e-12
    assert bounds.urero_tight(low, kappa) <= bounds.urero_tight(high, kappa) + 1e-9


@given(eps=epsilons, kappa=kappas)
@settings(max_examples=200, deadline=None)
def test_one_bound_beside_the_other(eps: float, kappa: float) -> None:
    tight, loose = bounds.urero_tight(eps, kappa), bounds.urero(eps, kappa)
    success = bounds.rero(eps, kappa, adjacency="replace")
    assert -1e-12 <= tight <= loose + 1e-9  # never above the seed's row
    assert loose <= bounds.rero_balle(eps, kappa) + 1e-12  # an advantage is at most a success
    assert tight <= success + 1e-9
    assert success <= bounds.rero(eps, kappa, adjacency="add/remove") + 1e-12
    assert success <= bounds.rero_balle(eps, kappa) + 1e-12
    assert success == pytest.approx(bounds.rero_tight(eps, 1 / kappa), abs=1e-9)


@given(m=st.integers(2, 500), eps=epsilons)
@settings(max_examples=100, deadline=None)
def test_the_tight_bound_is_below_the_printed_one(m: int, eps: float) -> None:
    assert bounds.rero_tight(eps, m) <= bounds.rero_wpes(eps, m) + 1e-9
    assert bounds.urero_prior(eps, [1 / m] * m) <= bounds.URERO_ROWS[1].value(eps, m) + 1e-9


def test_at_epsilon_zero_only_guessing_is_left() -> None:
    for kappa in (0.001, 0.3, 1.0):
        for adjacency in BOTH:
            assert bounds.rero(0, kappa, adjacency=adjacency) == pytest.approx(kappa)
        assert bounds.urero(0, kappa) == bounds.urero_tight(0, kappa) == 0
    assert bounds.rero_dpsgd(1.0, 0.1, 0, 0.3) == 0.3


def test_replace_counts_twice() -> None:
    assert bounds.as_replace(1.0, 1e-5) == (2.0, pytest.approx((1 + math.e) * 1e-5))


# --- blind guessing -------------------------------------------------------------------------------------------------


def _apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cdist(a, b)


def test_kappa_of_a_small_data_set() -> None:
    rows = torch.tensor([[0.0], [1.0], [2.0], [10.0]]).double()
    assert bounds.kappa(rows, _apart, 0.0) == Kappa(0.25, 0.25, 4)
    # With η = 1 the row 1 is right for three; with η = 0.5 no row is right for another, but the guess 0.5 is for two.
    assert bounds.kappa(rows, _apart, 1.0) == Kappa(0.75, 0.75, 4)
    half = bounds.kappa(rows, _apart, 0.5)
    assert (half.lower, half.upper) == (0.25, 0.75)
    assert half.upper >= 0.5
    assert bounds.kappa(rows, _apart, 100.0).lower == 1


@given(seed=st.integers(0, 100), eta=st.floats(0, 2))
@settings(max_examples=40, deadline=None)
def test_no_guess_beats_kappa(seed: int, eta: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, guesses = torch.rand(30, 2, generator=generator).double(), torch.rand(50, 2, generator=generator).double()
    blind = bounds.kappa(rows, _apart, eta)
    best = (_apart(guesses, rows) <= eta).double().mean(1).max()
    assert blind.lower <= blind.upper
    assert best <= blind.upper + 1e-12


# --- claims ---------------------------------------------------------------------------------------------------------


def _claim(**changes: Any) -> PrivacyClaim:
    fields: dict[str, Any] = {
        "epsilon": epsilon(Mechanism("gaussian", 1.0, "add/remove", "poisson", 0.1), 100, 1e-5),
        "delta": 1e-5,
        "unit": "example",
        "adjacency": "add/remove",
        "sampling": "poisson",
        "released": "gradients",
        "observer": "the server",
        "accountant": "PLD",
        "mechanism": "gaussian noise",
        "noise_multiplier": 1.0,
        "sample_rate": 0.1,
        "compositions": 100,
    }
    return PrivacyClaim(**fields | changes)


def test_a_claim_that_spells_out_its_mechanism_allows_less() -> None:
    allowed, why = bounds.rero_claim(_claim(), 0.1)
    assert (allowed, why) == (pytest.approx(0.469186, abs=1e-5), "privacy profile")
    for changes in ({"mechanism": "laplace noise"}, {"noise_multiplier": 0.5}):  # another, or less noise than it says
        assert bounds.rero_claim(_claim(**changes), 0.1)[1] == "(ε, δ)"
        assert bounds.rero_claim(_claim(**changes), 0.1)[0] > allowed
    assert bounds.rero_claim(_claim(epsilon=math.inf), 0.1)[0] == 1.0
    assert bounds.urero_claim(_claim(), 0.1) <= allowed


def test_amplification_says_nothing_of_whom_was_drawn() -> None:
    """One of m orthogonal records at rate 0.01: those that were drawn are found far more often than the claim's ε."""
    m, sigma, trials = 200, 0.3, 2000
    mechanism = Mechanism("gaussian", sigma, "add/remove", "poisson", 0.01)
    made = _claim(noise_multiplier=sigma, sample_rate=0.01, compositions=1, epsilon=epsilon(mechanism, 1, 1e-5))
    rng = np.random.default_rng(0)
    truth = rng.integers(m, size=trials)
    success = float(((np.eye(m)[truth] + sigma * rng.standard_normal((trials, m))).argmax(1) == truth).mean())
    assert bounds.rero_claim(made, 1 / m)[0] < 0.02 < 0.6 < success
    allowed, _ = bounds.rero_claim(made, 1 / m, drawn=True)
    assert success <= allowed == pytest.approx(bounds.rero_gaussian(1 / sigma, 1 / m))
    assert success - 1 / m <= bounds.urero_claim(made, 1 / m, drawn=True)


def test_without_amplification_the_epsilon_is_that_of_rate_one() -> None:
    full = bounds.without_amplification(_claim())
    assert full.epsilon == epsilon(Mechanism("gaussian", 1.0, "add/remove"), 100, 1e-5)
    assert full.epsilon > 10 * _claim().epsilon
    laplace = bounds.without_amplification(_claim(mechanism="laplace noise", compositions=1, epsilon=0.1))
    assert laplace.epsilon == pytest.approx(1.0, abs=1e-3)
    assert bounds.rero_claim(_claim(mechanism="another noise"), 0.1, drawn=True)[0] == 1  # not the claim's own ε
    alone = _claim(sampling="none", sample_rate=1.0, epsilon=200.0)
    assert bounds.without_amplification(alone) is alone


@pytest.mark.parametrize(
    "call",
    [
        lambda: bounds.rero_balle(-1, 0.1),
        lambda: bounds.rero_balle(1, 1.5),
        lambda: bounds.rero_balle(float("nan"), 0.1),
        lambda: bounds.rero_tight(1, 0.5),
        lambda: bounds.rero(1, 0.1, delta=-0.1, adjacency="replace"),
        lambda: bounds.rero_dpsgd(1, 2.0, 10, 0.1),
        lambda: bounds.rero_dpsgd(1, 0.1, -1, 0.1),
        lambda: bounds.rero_dpsgd(1, 0.1, 1.5, 0.1),  # type: ignore[arg-type]
        lambda: bounds.rero_gaussian(1, 2),
        lambda: bounds.rero_gaussian(-1, 0.5),
        lambda: bounds.rero_wpes(1, 0),
        lambda: bounds.kappa_uniform(0),
        lambda: bounds.membership_advantage("1", 0),  # type: ignore[arg-type]
        lambda: bounds.attribute_advantage(1, None, [0.5, 0.5]),  # type: ignore[arg-type]
        lambda: bounds.attribute_advantage(1, 0, ["a", "b"]),  # type: ignore[list-item]
        lambda: bounds.approximate_dp(1, 1.5),
        lambda: bounds.sampled_gaussian(1, 0.1, -3),
        lambda: bounds.urero_prior(1, [0.5, 0.6]),
        lambda: bounds.kappa(torch.zeros(0, 2), _apart, 0.1),
    ],
)
def test_nonsense_is_refused_in_one_sentence(call: Any) -> None:
    with pytest.raises(PrivacyError, match=r"^[^.]*( is | are |kappa).*"):
        call()
