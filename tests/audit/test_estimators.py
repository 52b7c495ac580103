# SPDX-License-Identifier: Apache-2.0
"""Every estimator against numbers that were computed elsewhere, and against slow oracles; and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, nct, norm

from fedsim.audit import estimators as e
from fedsim.audit.estimation.counts import gdp_epsilon
from fedsim.audit.estimation.gaussian import noncentrality_lower
from fedsim.audit.estimation.one_run import fdp_rejects
from fedsim.privacy.loss import COARSE, ROUGH

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "audit.json"


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    if not REFERENCE.is_file():
        pytest.skip(f"{REFERENCE} is not here: the reference numbers belong to the design, not to the package")
    whole: dict[str, Any] = json.loads(REFERENCE.read_text())
    return whole


# --- known values, from shared/reference/audit.json, which is not needed for them ------------------------------------


@pytest.mark.parametrize(
    ("counts", "delta", "expected"),
    [
        ((0, 0, 1000, 1000), 1e-5, 5.6005774942916355),  # the seed's 5.60
        ((2, 983, 1000, 1000), 1e-5, 0.3200152933323934),
        ((20, 30, 1000, 1000), 1e-5, 3.4393),  # the larger of both directions; the seed's 3.2 is the other
        ((0, 0, 100, 100), 1e-5, 3.2813359732686576),
        ((5, 25, 100, 100), 1e-5, 1.7563211093176634),
        ((100, 5000, 10000, 10000), 0.0, 3.6974258645342326),
        ((1000, 1000, 1000, 1000), 1e-5, 0.0),
    ],
)
def test_clopper_pearson_known(counts: tuple[int, int, int, int], delta: float, expected: float) -> None:
    estimate = e.epsilon_clopper_pearson(*counts, delta)
    assert estimate.lower == pytest.approx(expected, abs=5e-5)
    assert (estimate.tier, estimate.confidence, estimate.delta) == ("A", 0.95, delta)


def test_point_known() -> None:
    assert e.epsilon_point(20, 30, 1000, 1000, 1e-5).lower == pytest.approx(3.8816, abs=5e-5)
    assert e.epsilon_point(0, 0, 1000, 1000, 1e-5).lower == math.inf
    assert e.epsilon_point(500, 500, 1000, 1000, 0).lower == 0
    assert e.epsilon_point(1000, 0, 1000, 1000, 1e-5).lower == 0
    assert e.epsilon_point(20, 30, 1000, 1000, 1e-5).confidence is None


@pytest.mark.parametrize(
    ("tp", "fp", "tn", "fn", "low", "median", "high"),
    [
        (3, 1, 2, 1, 0.0525419, 1.0679152, 3.4818592),
        (31, 12, 42, 11, 0.7442925, 1.2409319, 1.8177122),
        (487, 512, 1, 0, 0.0668744, 1.7199867, 7.8025352),  # privacy-estimates says 6.41 for the upper end
        (1000, 0, 1000, 0, 6.9105990, 9.5581717, 15.9004055),  # a perfect attack, at which it raises ValueError
    ],
)
def test_bayesian_known(tp: int, fp: int, tn: int, fn: int, low: float, median: float, high: float) -> None:
    estimate = e.epsilon_bayesian(tp, fp, tn, fn, 1e-5)
    assert (estimate.lower, estimate.median, estimate.upper) == pytest.approx((low, median, high), abs=3e-6)


@pytest.mark.parametrize(
    ("correct", "guesses", "canaries", "delta", "steinke", "mahloujifar"),
    [
        (90, 100, 1000, 1e-5, 1.6261434806960529, 2.4564048930385383),
        (490, 500, 5000, 1e-5, 3.3356696890926814, 4.950),
        (900, 1000, 1000, 1e-5, 2.0206455958626193, 3.779338332553377),
        (930, 1000, 16384, 1e-5, 2.3659658003614914, 3.1685152333631357),
        (500, 1000, 1000, 1e-5, 0.0, 0.0),
        (1, 1, 1, 1e-5, 0.0, 0.0),
    ],
)
def test_one_run_known(
    correct: int, guesses: int, canaries: int, delta: float, steinke: float, mahloujifar: float
) -> None:
    assert e.epsilon_one_run(correct, guesses, canaries, delta).lower == pytest.approx(steinke, abs=1e-6)
    assert e.epsilon_one_run_fdp(correct, guesses, canaries, delta).lower == pytest.approx(mahloujifar, abs=5e-4)


def test_one_run_without_delta_is_a_beta_quantile() -> None:
    assert e.epsilon_one_run(90, 100, 1000, 0.0).lower == pytest.approx(1.6308231927421302, abs=1e-9)
    assert e.epsilon_one_run(100, 100, 100, 0.0).lower == pytest.approx(3.493, abs=5e-4)


def test_gdp_known() -> None:
    assert gdp_epsilon(1, 1e-5) == pytest.approx(4.377178095681224)
    assert e.epsilon_gdp(159, 159, 1000, 1000, 1e-5).lower == pytest.approx(8.827162555358209, abs=1e-6)
    assert e.epsilon_gdp(0, 0, 1000, 1000, 1e-5).lower == pytest.approx(36.48948789301771, abs=1e-6)
    assert e.epsilon_gdp(500, 500, 1000, 1000, 1e-5).lower == 0
    assert e.epsilon_gdp(159, 159, 1000, 1000, 1e-5).tier == "B"


# --- every row of the reference ---------------------------------------------------------------------------------------


def test_counts_as_in_the_reference(reference: dict[str, Any]) -> None:
    confidences = {"two_sided_95_each__joint_95": 0.95, "one_sided_95_each__joint_90": 0.9, "joint_99": 0.99}
    rows = reference["a_clopper_pearson"]["rows"]
    assert len(rows) >= 13
    for row in rows:
        counts = row["fp"], row["fn"], row["n_neg"], row["n_pos"], row["delta"]
        assert e.epsilon_point(*counts).lower == pytest.approx(float(row["raw"]), abs=1e-9)
        for name, confidence in confidences.items():
            expected = row[name]
            assert e.epsilon_clopper_pearson(*counts, confidence).lower == pytest.approx(expected["eps"], abs=1e-8)
            if expected["eps_gdp"] is not None:
                assert e.epsilon_gdp(*counts, confidence).lower == pytest.approx(expected["eps_gdp"], rel=1e-8)


def test_bayesian_as_in_the_reference(reference: dict[str, Any]) -> None:
    for row in reference["b_bayesian"]["rows"]:
        counts = row["TP"], row["FP"], row["TN"], row["FN"], row["delta"]
        mine = e.epsilon_bayesian(*counts)
        expected = row["eps_lo_95"], row["eps_median"], row["eps_hi_95"]
        assert (mine.lower, mine.median, mine.upper) == pytest.approx(expected, abs=5e-6)  # the reference's own error
        assert e.epsilon_bayesian(*counts, 0.9).lower == pytest.approx(row["eps_lo_one_sided_95"], abs=5e-6)
        assert e.posterior_cdf(*counts)(1.0) == pytest.approx(row["P_eps_le_1"], abs=1e-6)


def test_one_run_as_in_the_reference(reference: dict[str, Any]) -> None:
    for row in reference["c_one_run"]["rows"]:
        counts = row["v"], row["r"], row["m"]
        for name in (0, 1e-6, 1e-5, 1e-4):
            expected = row[f"eps_delta={name}"]
            assert e.epsilon_one_run(*counts, name, 1 - row["p"]).lower == pytest.approx(expected, abs=1e-6)
        assert e.one_run_p_value(*counts, 1.0, 1e-5) == pytest.approx(row["pvalue_eps1_delta1e-5"], abs=1e-12)
        fdp = e.epsilon_one_run_fdp(*counts, 1e-5, 1 - row["p"]).lower
        assert fdp == pytest.approx(row["fdp_eps_delta1e-5"], abs=1e-6)
        assert fdp == pytest.approx(row["fdp_jax_privacy_delta1e-5"], abs=1e-5)


def test_jax_privacy_goldens(reference: dict[str, Any]) -> None:
    """10,000 scores each at the quantiles of N(0, 1) and N(shift, 1); the best of all thresholds, corrected."""
    published = reference["c_one_run"]["jax_privacy_goldens"]["published_test_values"]
    for shift, expected in published.items():
        quantiles = norm.ppf((np.arange(10_000) + 0.5) / 10_000)
        assert _best_threshold(quantiles + float(shift), quantiles) == pytest.approx(expected, abs=1e-5)


def _best_threshold(inside: np.ndarray, outside: np.ndarray) -> tuple[float, float]:
    """Steinke and f-DP at the best point of the convex hull of the ROC curve, among as many choices as it has."""
    scores = np.unique(np.concatenate([inside, outside, [math.inf]]))
    points = np.stack([np.searchsorted(s, scores) for s in (inside, outside)], 1)  # FN and TN
    hull: list[np.ndarray] = []
    for point in points:
        while len(hull) > 1 and _turns_left(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    n, choice = len(inside), e.Corrected(len(hull))
    counts = [(int(n - fn), int(2 * n - fn - tn), 2 * n, 1e-6) for fn, tn in hull if n > fn]
    return (
        _peak([lambda c=c: e.epsilon_one_run(*c, selection=choice).lower for c in counts]),
        _peak([lambda c=c: e.epsilon_one_run_fdp(*c, selection=choice).lower for c in counts]),
    )


def _peak(values: list[Any]) -> float:
    """The largest of values that rise and then fall, more or less, without computing all."""
    best, reach = len(values) // 2, len(values)
    for step in (512, 128, 32, 8, 4, 1):
        near = range(max(0, best - reach), min(len(values), best + reach + 1), step)
        best, reach = max(near, key=lambda i: values[i]()), 2 * step
    return float(values[best]())


def _turns_left(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> bool:
    return bool((b[1] - a[1]) * (c[0] - b[0]) <= (c[1] - b[1]) * (b[0] - a[0]))


def test_gdp_as_in_the_reference(reference: dict[str, Any]) -> None:
    section = reference["d_gdp"]
    for row in section["eps_from_mu"]:
        assert gdp_epsilon(row["mu"], row["delta"]) == pytest.approx(row["eps"], rel=1e-9)
    for row in section["mu_from_eps"]:
        assert gdp_epsilon(row["mu"], row["delta"]) == pytest.approx(row["eps"], rel=1e-6)
    for row in section["audit"]:
        counts = row["fp"], row["fn"], row["n_each"], row["n_each"], row["delta"], 1 - row["alpha_total"]
        assert e.epsilon_gdp(*counts).lower == pytest.approx(row["eps_gdp"], abs=1e-8)
        assert e.epsilon_clopper_pearson(*counts).lower == pytest.approx(row["eps_cp_same_threshold"], abs=1e-8)


def test_published_one_run_numbers(reference: dict[str, Any]) -> None:
    for row in reference["h_tightness_and_validity"]["xiang_repo_check"]:
        counts = row["r"] - row["u"], row["r"], row["n"]
        assert e.epsilon_one_run(*counts, 1e-5).lower == pytest.approx(row["ours"][0], abs=1e-6)
        assert e.epsilon_one_run_fdp(*counts, 1e-5).lower == pytest.approx(row["ours"][2], abs=1e-6)


def test_expected_outcomes_of_a_gaussian_channel(reference: dict[str, Any]) -> None:
    """Planning table T2: so many of the surest guesses are right, rounded; and both errors at the midpoint."""
    for row in reference["h_tightness_and_validity"]["T2_one_run_planning"]:
        m, mu, d = row["m"], row["mu"], row["delta"]
        for name, prove in (("steinke", e.epsilon_one_run), ("mahloujifar", e.epsilon_one_run_fdp)):
            if name in row:
                guesses = round(row[f"{name}_r_over_m"] * m)
                correct = round(_right_of_the_surest(guesses / m, mu) * guesses)
                assert prove(correct, guesses, m, d).lower == pytest.approx(row[name], abs=1e-6)
        wrong = round(norm.sf(mu / 2) * m / 2)
        assert e.epsilon_gdp(wrong, wrong, m // 2, m // 2, d).lower == pytest.approx(row["gdp_cp"], abs=1e-6)


def _right_of_the_surest(share: float, mu: float) -> float:
    """Of scores N(±μ/2, 1), those of the largest magnitude are guessed by their sign."""
    cut = brentq(lambda c: norm.sf(c - mu / 2) + norm.sf(c + mu / 2) - share, 0, 20)
    return float(norm.sf(cut - mu / 2)) / share


def test_per_step_at_the_expected_scores(reference: dict[str, Any]) -> None:
    """Scores at the quantiles, so that the outcome is the expected one, against the means of 60 simulations."""
    for row in reference["h_tightness_and_validity"]["T5_per_step_dirac"]:
        if row["n_obs_each"] > 25_000:
            continue
        quantiles = row["sigma"] * norm.ppf((np.arange(row["n_obs_each"]) + 0.5) / row["n_obs_each"])
        setting = quantiles + 1, quantiles, row["q"], row["T"], row["delta"]
        fitted = e.epsilon_per_step(*setting, grid=COARSE).lower
        # a mean of 60 with a standard deviation of a few per cent of epsilon; ours keeps a tenth of the error back
        assert fitted / row["eps"] == pytest.approx(row["gauss_fit"]["ratio"], abs=0.04)
        counted = e.epsilon_per_step(*setting, method="clopper-pearson", grid=COARSE).lower
        assert counted / row["eps"] == pytest.approx(row["gdp_cp_mid"]["ratio"], abs=0.04)


# --- oracles ----------------------------------------------------------------------------------------------------------


def test_the_p_value_is_the_sum_that_the_theorem_says() -> None:
    for v, r, m, eps, delta in [(9, 10, 20, 0.5, 1e-2), (60, 80, 500, 1.0, 1e-4), (0, 5, 5, 1.0, 0.1)]:
        b = binom(r, 1 / (1 + math.exp(-eps)))
        alpha = max((b.cdf(v - 1) - b.cdf(v - i - 1)) / i for i in range(1, v + 1)) if v else 0
        expected = min(1, b.sf(v - 1) + 2 * m * delta * alpha)
        assert e.one_run_p_value(v, r, m, eps, delta) == pytest.approx(expected, rel=1e-10)


def test_the_noncentral_t_bound_is_exact() -> None:
    for t, freedom in [(2, 4), (3, 10), (5, 198), (30, 1998)]:
        assert nct.sf(t, freedom, noncentrality_lower(t, freedom, 0.05)) == pytest.approx(0.05, abs=1e-5)


def test_bayesian_agrees_with_drawing() -> None:
    rng = np.random.default_rng(0)
    fnr, fpr = rng.beta(11.5, 31.5, 200_000), rng.beta(12.5, 42.5, 200_000)
    d = 1e-3
    both = [np.log((1 - d - x) / y) for x, y in ((fpr, fnr), (fnr, fpr), (1 - fpr, 1 - fnr), (1 - fnr, 1 - fpr))]
    drawn = np.maximum(0, np.nanmax(both, axis=0))
    mine = e.epsilon_bayesian(31, 12, 42, 11, d)
    assert (mine.lower, mine.median, mine.upper) == pytest.approx(np.quantile(drawn, [0.025, 0.5, 0.975]), abs=0.01)


def test_the_composed_curve_is_the_gaussian_one_without_sampling_and_proves_more_with_it() -> None:
    counts = 450, 500, 5000, 1e-5
    gdp = e.epsilon_one_run_fdp(*counts).lower
    assert e.epsilon_one_run_fdp(*counts, family=e.SampledGaussian(1.0, 10)).lower == pytest.approx(gdp, abs=2e-3)
    sampled = e.epsilon_one_run_fdp(*counts, family=e.SampledGaussian(0.1, 50, grid=ROUGH)).lower
    assert gdp < sampled < 1.1 * gdp


def test_families_say_what_they_assume() -> None:
    assert e.epsilon_one_run_fdp(90, 100, 1000, 1e-5).tier == "B"
    assert e.epsilon_one_run_fdp(90, 100, 1000, 1e-5, family=e.GDP(claimed=True)).tier == "A"
    plain = e.epsilon_one_run_fdp(90, 100, 1000, 1e-5, family=e.ApproximateDP())
    assert plain.tier == "A"
    assert plain.lower == pytest.approx(e.epsilon_one_run(90, 100, 1000, 1e-5).lower, abs=0.02)
    # where 2 m δ is large, the sum of Steinke et al. collapses, and the recursion does not
    assert e.epsilon_one_run(450, 500, 5000, 1e-3).lower < 1.5
    assert e.epsilon_one_run_fdp(450, 500, 5000, 1e-3, family=e.ApproximateDP()).lower > 1.7
    assert fdp_rejects(90, 100, 1000, 0.05, e.GDP().curve(0.5, 0.0))
    assert not fdp_rejects(90, 100, 1000, 0.05, e.GDP().curve(0.7, 0.0))
