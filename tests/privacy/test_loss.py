# SPDX-License-Identifier: Apache-2.0
"""Our composition against dp-accounting's own, and against the exact Gaussian."""

from __future__ import annotations

import math

import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from fedsim.privacy.gaussian import gaussian_delta, gaussian_epsilon
from fedsim.privacy.loss import COARSE, FINE, ROUGH, Release, composed_delta, composed_epsilon


@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.02, 1.5, 200), (0.3, 2.0, 7), (0.9, 3.0, 50)])
def test_like_dp_accounting(q: float, sigma: float, steps: int) -> None:
    theirs = pld.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=1e-4).self_compose(steps)
    ours = {Release("gaussian", sigma, q): steps}
    for delta in (1e-3, 1e-5, 1e-8):
        expected = theirs.get_epsilon_for_delta(delta)
        assert composed_epsilon(ours, delta) == pytest.approx(expected, abs=2e-6 + 1e-12 / delta)
    assert composed_delta(ours, 0.5) == pytest.approx(theirs.get_delta_for_epsilon(0.5), abs=1e-10)


def test_like_dp_accounting_for_laplace_and_mixtures() -> None:
    laplace = pld.from_laplace_mechanism(2.0, sampling_prob=0.2)
    theirs = laplace.self_compose(30).compose(pld.from_gaussian_mechanism(1.5, sampling_prob=0.1).self_compose(10))
    ours = {Release("laplace", 2.0, 0.2): 30, Release("gaussian", 1.5, 0.1): 10}
    assert composed_epsilon(ours, 1e-5) == pytest.approx(theirs.get_epsilon_for_delta(1e-5), abs=1e-6)


@pytest.mark.parametrize("grid", [FINE, COARSE, ROUGH])
@pytest.mark.parametrize("steps", [1, 100, 10_000])
@pytest.mark.parametrize("mu", [0.1, 2.0, 8.0])
def test_never_below_the_exact_gaussian(mu: float, steps: int, grid: object) -> None:
    release = {Release("gaussian", math.sqrt(steps) / mu): steps}
    for delta in (1e-3, 1e-5, 1e-9):
        exact = gaussian_epsilon(1 / mu, delta)
        found = composed_epsilon(release, delta, grid)  # type: ignore[arg-type]
        assert exact - 1e-12 <= found
        if grid is not ROUGH and delta > 1e-9:
            assert found <= exact + 1e-3 * max(exact, 0.2)
    assert composed_delta(release, mu) >= gaussian_delta(1 / mu, mu) * (1 - 1e-9)


def test_losses_beyond_the_range_of_exp() -> None:
    """dp-accounting rounds up to the loss itself where e^-loss underflows; ours goes on."""
    found = composed_epsilon({Release("gaussian", 0.25): 60}, 1e-5)
    assert found == pytest.approx(gaussian_epsilon(0.25 / math.sqrt(60), 1e-5), rel=1e-6)
    assert found > 500
