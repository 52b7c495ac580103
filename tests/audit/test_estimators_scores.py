# SPDX-License-Identifier: Apache-2.0
"""The estimators that take scores: near the truth where their model holds, silent where it does not; and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.audit import estimators as e
from fedsim.audit.estimation.counts import gdp_epsilon
from fedsim.errors import AuditError
from fedsim.privacy import Mechanism, epsilon
from fedsim.privacy.loss import COARSE

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "audit.json"

# --- per step and one shot --------------------------------------------------------------------------------------------


def _scores(sigma: float, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(1, sigma, n), rng.normal(0, sigma, n)


def test_per_step_comes_near_the_truth_and_tests_the_rate_apart() -> None:
    mechanism = Mechanism("gaussian", 1.76, "add/remove", "poisson", 0.1)
    truth = epsilon(mechanism, 200, 1e-5)
    x, y = _scores(1.76, 20_000)
    blind = e.epsilon_per_step(x, y, 0.1, 200, 1e-5, grid=COARSE)
    assert 0.9 * truth < blind.lower < truth
    tested = e.epsilon_per_step(x, y, 0.1, 200, 1e-5, participations=(30_000, 300_000), grid=COARSE)
    assert 0.95 * blind.lower < tested.lower < blind.lower
    assert "p = 1" in tested.assumptions[-1]
    # twice as often as claimed: the rate alone proves a violation; half as often: no false claim
    often = e.epsilon_per_step(x, y, 0.1, 200, 1e-5, participations=(60_000, 300_000), grid=COARSE)
    rarely = e.epsilon_per_step(x, y, 0.1, 200, 1e-5, participations=(15_000, 300_000), grid=COARSE)
    half = epsilon(Mechanism("gaussian", 1.76, "add/remove", "poisson", 0.05), 200, 1e-5)
    assert often.lower > truth > blind.lower > half > rarely.lower
    assert e.participation_p_value(15_000, 300_000, 0.1) < 1e-9
    assert e.epsilon_per_step(y, x, 0.1, 200, 1e-5).lower == 0


def test_means_as_in_the_reference() -> None:
    """Table T6: the mean bound of 400 audits of N(μ, 1) against N(0, 1), with the threshold at the midpoint."""
    if not REFERENCE.is_file():
        pytest.skip(f"{REFERENCE} is not here: the reference numbers belong to the design, not to the package")
    rng = np.random.default_rng(0)
    for row in json.loads(REFERENCE.read_text())["h_tightness_and_validity"]["T6_selection_bias"]:
        n, mu = row["n_each"], row["mu"]
        x, y = rng.normal(mu, 1, (150, n)), rng.normal(0, 1, (150, n))
        errors = list(zip((y >= mu / 2).sum(1).tolist(), (x < mu / 2).sum(1).tolist(), strict=True))
        mine = {
            "cp_fixed": np.array([e.epsilon_clopper_pearson(fp, fn, n, n, 1e-5).lower for fp, fn in errors]),
            "gdp_fixed": np.array([e.epsilon_gdp(fp, fn, n, n, 1e-5).lower for fp, fn in errors]),
            "gauss_fit": np.array([e.epsilon_gaussian(a, b, 1e-5).lower for a, b in zip(x, y, strict=True)]),
        }
        for name, values in mine.items():
            noise = 4 * float(values.std()) * math.sqrt(1 / 150 + 1 / row["reps"]) + 0.02
            kept_back = 0.02 * row[name]["mean"]  # of the error probability
            assert values.mean() == pytest.approx(row[name]["mean"], abs=noise + kept_back)


def test_scores_that_are_not_gaussian_prove_nothing() -> None:
    rng = np.random.default_rng(0)
    for x, y in [
        (rng.laplace(1, 1, 1000), rng.laplace(0, 1, 1000)),
        (rng.random(1000) < 0.73, rng.random(1000) < 0.27),
        (np.ones(50), np.zeros(50)),
        (rng.normal(1, 3, 1000), rng.normal(0, 1, 1000)),
    ]:
        for estimate in (e.epsilon_gaussian(x, y, 1e-5), e.one_shot_federated(x, y, 1e-5)):
            assert estimate.lower == 0
            assert "REFUTED" in estimate.assumptions[1]
    x, y = rng.normal(1, 1.2, 1000), rng.normal(0, 1, 1000)
    unequal = e.epsilon_gaussian(x, y, 1e-5)
    assert "differ" in unequal.assumptions[1]
    assert 0 < unequal.lower < gdp_epsilon(1 / 1.2, 1e-5)


def test_one_shot_with_and_without_the_null_that_is_known() -> None:
    d, k, sigma = 10_000, 1000, 1.5438614177756425  # ε = 3 at δ = 1e-6
    rng = np.random.default_rng(0)
    inside, outside = rng.normal(1 / sigma, 1, k) / math.sqrt(d), rng.normal(0, 1, k) / math.sqrt(d)
    for estimate in (
        e.one_shot_federated(inside, outside, 1e-6),
        e.one_shot_federated(inside, None, 1e-6, dimension=d),
    ):
        assert 2.2 < estimate.lower < 3
        assert estimate.tier == "B"
    with pytest.raises(AuditError, match="dimension"):
        e.one_shot_federated(inside, None, 1e-6)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: e.epsilon_clopper_pearson(-1, 0, 10, 10, 1e-5), "fp"),
        (lambda: e.epsilon_clopper_pearson(11, 0, 10, 10, 1e-5), "negatives"),
        (lambda: e.epsilon_clopper_pearson(0, 11, 10, 10, 1e-5), "positives"),
        (lambda: e.epsilon_clopper_pearson(0, 0, 0, 10, 1e-5), "negatives"),
        (lambda: e.epsilon_clopper_pearson(0.5, 0, 10, 10, 1e-5), "whole"),  # type: ignore[arg-type]
        (lambda: e.epsilon_clopper_pearson(math.nan, 0, 10, 10, 1e-5), "whole"),  # type: ignore[arg-type]
        (lambda: e.epsilon_point(0, 0, 10, 10, 1.0), "delta"),
        (lambda: e.epsilon_point(0, 0, 10, 10, -1e-9), "delta"),
        (lambda: e.epsilon_point(0, 0, 10, 10, math.nan), "delta"),
        (lambda: e.epsilon_point(0, 0, 10, 10, None), "delta"),  # type: ignore[arg-type]
        (lambda: e.epsilon_clopper_pearson(0, 0, 10, 10, 1e-5, "95%"), "confidence"),  # type: ignore[arg-type]
        (lambda: e.epsilon_gaussian(["a", "b", "c"], [0.0, 1.0, 2.0], 1e-5), "scores_in"),  # type: ignore[list-item]
        (lambda: e.epsilon_per_step([1, 2, 3], [0, 1, 2], "0.1", 10, 1e-5), "sample_rate"),  # type: ignore[arg-type]
        (lambda: e.epsilon_clopper_pearson(0, 0, 10, 10, 1e-5, 1.0), "confidence"),
        (lambda: e.epsilon_clopper_pearson(0, 0, 10, 10, 1e-5, 95), "confidence"),
        (lambda: e.epsilon_bayesian(1, 1, 1, 1, 1e-5, 0.0), "credibility"),
        (lambda: e.epsilon_bayesian(0, 1, 1, 0, 1e-5), "tp"),
        (lambda: e.epsilon_gdp(0, 0, 10, 10, 0.0), "delta"),
        (lambda: e.epsilon_one_run(11, 10, 20, 1e-5), "guesses"),
        (lambda: e.epsilon_one_run(5, 30, 20, 1e-5), "canaries"),
        (lambda: e.epsilon_one_run_fdp(5, 10, 20, 0.0), "delta"),
        (lambda: e.epsilon_gaussian([1.0, 2.0, math.nan], [0.0, 1.0, 2.0], 1e-5), "finite"),
        (lambda: e.epsilon_gaussian([1.0], [0.0, 1.0, 2.0], 1e-5), "scores_in"),
        (lambda: e.epsilon_per_step([1, 2, 3], [0, 1, 2], 0.0, 10, 1e-5), "sample_rate"),
        (lambda: e.epsilon_per_step([1, 2, 3], [0, 1, 2], 0.1, 0, 1e-5), "steps"),
        (lambda: e.epsilon_per_step([1, 2, 3], [0, 1, 2], 0.1, 1, 1e-5, participations=(3, 2)), "participations"),
        (lambda: e.Corrected(0), "choices"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(call: Any, names: str) -> None:
    with pytest.raises(AuditError, match=names) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert " is " in str(caught.value) or " has " in str(caught.value) or " holds " in str(caught.value)
