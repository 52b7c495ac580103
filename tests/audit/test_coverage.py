# SPDX-License-Identifier: Apache-2.0
"""The auditor is audited: at most 5% false claims on mechanisms of known epsilon, and a broken estimator is caught."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from fedsim.audit.calibration import coverage as c
from fedsim.audit.calibration import known
from fedsim.audit.calibration.known import Known
from fedsim.audit.estimate import Estimate
from fedsim.audit.estimators import epsilon_point, posterior_cdf

AUDITS = 300  # 1,000 where slow tests run, and by `make calibrate`
TIED = [known.correlated(p) for p in (0.06, 0.1, 0.3)]


def _audits(auditor: c.Auditor) -> int:
    return 60 if auditor.name.startswith("Bayesian") else AUDITS  # 10 ms each


@pytest.mark.parametrize("mechanism", known.KNOWN, ids=lambda m: m.name)
@pytest.mark.parametrize("auditor", c.AUDITORS, ids=lambda a: a.name)
def test_false_claims_are_as_rare_as_stated(auditor: c.Auditor, mechanism: Known) -> None:
    found = c.coverage(auditor, mechanism, _audits(auditor), seed=1)
    assert found.acceptable(), found
    if auditor.name != "Gaussian fit" or "Gaussian" in mechanism.name:
        assert found.mean_lower > 0.02 * found.truth  # and something is proved
    else:
        assert found.mean_lower == 0  # it sees that its model is wrong


@pytest.mark.parametrize("mechanism", TIED, ids=lambda m: m.name)
@pytest.mark.parametrize("auditor", [a for a in c.AUDITORS if a.one_run], ids=lambda a: a.name)
def test_one_run_stands_canaries_that_are_tied_together(auditor: c.Auditor, mechanism: Known) -> None:
    found = c.coverage(auditor, mechanism, AUDITS, seed=2)
    assert found.tier == "A"
    assert found.acceptable(), found


@pytest.mark.parametrize("mechanism", [known.gaussian(0.0), known.gaussian(3.0, 2.5), known.laplace(4.0)])
def test_nothing_and_much(mechanism: Known) -> None:
    for auditor in c.AUDITORS:
        if not auditor.name.startswith("Bayesian"):  # its prior gives ε = 0 no probability
            found = c.coverage(auditor, mechanism, 150, seed=3)
            assert found.acceptable(), found


def test_the_epsilon_of_gdp_is_wrong_where_the_model_is() -> None:
    """Read as ε at δ, counts under the GDP model claim too much of randomised response, nearly always."""
    gdp = next(a for a in c.AUDITORS if a.name == "GDP, fixed threshold")
    naive = c.Auditor(gdp.name, gdp.play, gdp=False)
    found = c.coverage(naive, known.randomised_response(1.0), 100, seed=4)
    assert found.tier == "B"
    assert found.rate == 1
    assert not found.acceptable()


def test_the_bayesian_end_is_no_confidence_bound() -> None:
    """Measured, so that it stays written down: where both errors tell the same, 12% instead of 5%."""
    mechanism, rng, n = known.randomised_response(3.0), np.random.default_rng(9), 100
    right = rng.binomial(n, 1 / (1 + math.exp(-3)), (1000, 2))
    truth = mechanism.epsilon(c.DELTA)
    beliefs = [posterior_cdf(int(tp), int(n - tn), int(tn), int(n - tp), c.DELTA)(truth) for tp, tn in right]
    assert 0.08 < np.mean(np.array(beliefs) < 0.025) < 0.16


def test_rates_that_are_taken_as_true_are_caught() -> None:
    def play(mechanism: Known, rng: np.random.Generator, audits: int) -> Iterator[Estimate]:
        for _ in range(audits):
            x, y = (mechanism.draw(rng, np.full(1000, inside)) for inside in (True, False))
            yield epsilon_point(int((y >= 0.5).sum()), int((x < 0.5).sum()), 1000, 1000, c.DELTA)

    found = c.coverage(c.Auditor("point", play), known.randomised_response(1.0), 200, seed=5)
    assert found.rate > 0.5
    assert not found.acceptable()


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("audits", [15, pytest.param(300, marks=pytest.mark.slow)])  # each composes
def test_per_step(joined: bool, audits: int) -> None:
    found = c.per_step_coverage(audits, 6, joined)
    assert found.acceptable(), found
    assert found.mean_lower > 0.7 * found.truth


@pytest.mark.parametrize("sigma", [0.541, 4.22])
@pytest.mark.parametrize("known_null", [False, True])
def test_one_shot(sigma: float, known_null: bool) -> None:
    found = c.one_shot_coverage(100, 7, sigma=sigma, canaries=150, dimension=1500, known_null=known_null)
    assert found.acceptable(error=0.04), found
    assert found.mean_lower > 0.05 * found.truth


def test_the_truth_is_true() -> None:
    """Of each mechanism: no test of its scores exceeds ε at δ, and some come near where ε is pure."""
    rng = np.random.default_rng(8)
    for mechanism in known.KNOWN:
        x, y = (np.sort(mechanism.draw(rng, np.full(400_000, inside))) for inside in (True, False))
        cuts = np.linspace(-3, 4, 141)
        tpr, fpr = (1 - np.searchsorted(s, cuts) / len(s) for s in (x, y))
        seen = fpr > 2e-3
        best = float(np.log((tpr[seen] - 1e-5) / fpr[seen]).max())
        assert best <= mechanism.epsilon(1e-5) + 0.08
        assert best <= mechanism.epsilon_gdp(1e-5)
        if "Gaussian" not in mechanism.name:
            assert best == pytest.approx(mechanism.epsilon(1e-5), abs=0.08)
    assert known.randomised_response(1.0).mu == pytest.approx(1.2316, abs=1e-3)
    assert known.gaussian(1.0).epsilon(1e-5) == pytest.approx(4.3772, abs=1e-4)
    # T1 of the reference: accuracies .9213, .9033 and .8409 for 6, 10 and 30%
    for mechanism, accuracy in zip(TIED, (0.92133, 0.90326, 0.84092), strict=True):
        assert mechanism.epsilon(0.0) == pytest.approx(math.log(accuracy / (1 - accuracy)), abs=1e-3)
        assert mechanism.mu == 1


def test_coverage_counts() -> None:
    found = c.Coverage(5, 100, 1.0, 2.0)
    assert found.rate == 0.05
    assert found.acceptable()
    assert not c.Coverage(20, 100, 1.0, 2.0).acceptable()
    table = c.coverage_table(2, 0)
    assert len(table) == 4 * len(c.AUDITORS) + 2 * 3 + 3
    assert {cell.tier for cell in table} == {"A", "B"}


@pytest.mark.slow
def test_a_thousand_audits_of_everything() -> None:
    wrong = [cell for cell in c.coverage_table(1000, 10) if not cell.acceptable()]
    # the Bayesian end on randomised response, see above, is not stated to be a confidence bound
    assert [cell for cell in wrong if not cell.estimator.startswith("Bayesian")] == []
