# SPDX-License-Identifier: Apache-2.0
"""What must hold of every estimator, whatever the counts."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedsim.audit import estimators as e
from fedsim.audit.estimation.one_run import fdp_rejects
from fedsim.audit.limits.tradeoff import approximate_dp, gaussian

trials = st.integers(1, 2000)
deltas = st.sampled_from([0.0, 1e-6, 1e-4, 1e-2])
confidences = st.floats(0.5, 0.999)
quick = settings(max_examples=150, deadline=None)


@given(data=st.data(), n=trials, m=trials, delta=deltas, a=confidences, b=confidences)
@quick
def test_counts(data: st.DataObject, n: int, m: int, delta: float, a: float, b: float) -> None:
    fp, fn = data.draw(st.integers(0, n)), data.draw(st.integers(0, m))
    low, high = sorted((a, b))
    for estimate in (e.epsilon_clopper_pearson, e.epsilon_gdp):
        d = delta or (1e-9 if estimate is e.epsilon_gdp else 0.0)
        mine = estimate(fp, fn, n, m, d, high).lower
        assert 0 <= mine <= estimate(fp, fn, n, m, d, low).lower + 1e-9  # more confidence, less proved
        if fp:
            assert mine <= estimate(fp - 1, fn, n, m, d, high).lower + 1e-9  # fewer errors, more
        if fn:
            assert mine <= estimate(fp, fn - 1, n, m, d, high).lower + 1e-9
        assert mine <= estimate(0, 0, n, m, d, high).lower + 1e-9  # a perfect attack proves the most
        for how in (e.Corrected(7), e.HeldOut()):
            assert estimate(fp, fn, n, m, d, high, selection=how).lower <= mine + 1e-9
        assert estimate(fp, fn, n, m, d, high).lower == pytest.approx(estimate(fn, fp, m, n, d, high).lower, abs=1e-9)
    assert e.epsilon_clopper_pearson(fp, fn, n, m, delta, high).lower <= e.epsilon_point(fp, fn, n, m, delta).lower
    more = e.epsilon_clopper_pearson(fp, fn, n, m, min(0.9, delta + 0.01), high).lower
    assert more <= e.epsilon_clopper_pearson(fp, fn, n, m, delta, high).lower + 1e-12


@given(data=st.data(), m=trials, delta=deltas, a=confidences, b=confidences)
@quick
def test_one_run(data: st.DataObject, m: int, delta: float, a: float, b: float) -> None:
    r = data.draw(st.integers(1, m))
    v = data.draw(st.integers(0, r))
    low, high = sorted((a, b))
    for family in (None, e.ApproximateDP(), e.GDP()):
        mine = _proved(family, v, r, m, delta, high)
        assert 0 <= mine <= _proved(family, v, r, m, delta, low) + 1e-7
        assert mine <= _proved(family, min(v + 1, r), r, m, delta, high) + 1e-7
        assert mine <= _proved(family, r, r, m, delta, high) + 1e-7 < math.inf
    # the most that r right guesses of r can prove: r fair coins, biased by e^ε, that all come up right
    ceiling = math.log(1 / max((1 - high) ** (-1 / r) - 1, 1e-300))
    assert e.epsilon_one_run(v, r, m, delta, high).lower <= max(0.0, ceiling) + 1e-6


def _proved(family: e.Family | None, v: int, r: int, m: int, delta: float, confidence: float) -> float:
    if family is None:
        return e.epsilon_one_run(v, r, m, delta, confidence).lower
    delta = delta or (1e-9 if isinstance(family, e.GDP) else 0.0)
    return e.epsilon_one_run_fdp(v, r, m, delta, confidence, family=family).lower


@given(data=st.data(), m=st.integers(1, 400), delta=deltas)
@settings(max_examples=60, deadline=None)
def test_p_values_rise_in_epsilon_where_they_decide(data: st.DataObject, m: int, delta: float) -> None:
    """The first ε that is not rejected is also the last: below one half the p-value never falls again."""
    r = data.draw(st.integers(1, m))
    v = data.draw(st.integers(r // 2, r))
    values = np.array([e.one_run_p_value(v, r, m, float(x), delta) for x in np.linspace(0, 8, 60)])
    last = int(np.flatnonzero(values < 0.5).max(initial=-1))
    assert (np.diff(values[: last + 2]) >= -1e-12).all()


@given(data=st.data(), m=st.integers(2, 300), mu=st.floats(0.1, 3), more=st.floats(0.01, 1))
@quick
def test_a_stronger_curve_is_harder_to_refute(data: st.DataObject, m: int, mu: float, more: float) -> None:
    r = data.draw(st.integers(1, m))
    v = data.draw(st.integers(0, r))
    for weak, strong in (
        (gaussian(mu), gaussian(mu + more)),
        (approximate_dp(mu, 1e-3), approximate_dp(mu + more, 1e-3)),
    ):
        if fdp_rejects(v, r, m, 0.05, lambda y, f=strong: f(1 - y)):  # type: ignore[misc]
            assert fdp_rejects(v, r, m, 0.05, lambda y, f=weak: f(1 - y))  # type: ignore[misc]


@given(counts=st.tuples(*[st.integers(0, 300)] * 4), delta=st.sampled_from([0.0, 1e-5, 1e-2]))
@settings(max_examples=60, deadline=None)
def test_bayesian(counts: tuple[int, int, int, int], delta: float) -> None:
    tp, fp, tn, fn = counts
    assume(tp + fn and fp + tn)
    wide, narrow = (e.epsilon_bayesian(*counts, delta, level) for level in (0.95, 0.5))
    assert wide.median is not None
    assert wide.upper is not None
    assert narrow.upper is not None
    assert 0 <= wide.lower <= narrow.lower <= wide.median <= narrow.upper <= wide.upper
    opposite = e.epsilon_bayesian(fn, tn, fp, tp, delta)  # whoever always says the opposite knows as much
    assert (opposite.lower, opposite.upper) == pytest.approx((wide.lower, wide.upper), abs=1e-6)
    swapped = e.epsilon_bayesian(tn, fn, tp, fp, delta)
    assert (swapped.lower, swapped.upper) == pytest.approx((wide.lower, wide.upper), abs=1e-6)
    cdf = e.posterior_cdf(*counts, delta)
    values = [cdf(x) for x in (0.0, 0.5, 2.0, 8.0, 40.0)]
    assert all(small <= large + 1e-9 for small, large in pairwise(values))
    assert values[-1] == pytest.approx(1, abs=1e-6)


@given(shift=st.floats(-5, 5), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 50), mu=st.floats(0, 4))
@settings(max_examples=60, deadline=None)
def test_scores_may_be_in_any_unit(shift: float, scale: float, seed: int, mu: float) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(mu, 1, 200), rng.normal(0, 1, 150)
    for estimate in (e.epsilon_gaussian, e.one_shot_federated):
        plain = estimate(x, y, 1e-5).lower
        assert estimate(scale * x + shift, scale * y + shift, 1e-5).lower == pytest.approx(plain, abs=1e-5)
        assert plain <= estimate(x, y, 1e-5, 0.8).lower
    assert e.one_shot_federated(x, y, 1e-5).lower <= e.epsilon_gaussian(x, y, 1e-5).lower
