# SPDX-License-Identifier: Apache-2.0
"""Whole audits of mechanisms of exactly known ε that the auditor was not developed on: false alarms, and finds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.audit.calibration.exact import FINITE, MADE, WORSE, Finite, counted, tallies
from fedsim.audit.mechanism import audit_mechanism
from fedsim.audit.verdict import Claim


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.5])
def test_the_exact_epsilon_is_the_least_that_holds(name: str, epsilon: float) -> None:
    family, delta = FINITE[name]
    exact = family(epsilon)
    for side in (exact.first, exact.second):
        assert side.sum() == pytest.approx(1.0)
        assert (side >= 0).all()
    found = exact.epsilon(delta)
    if math.isinf(found):  # more than δ lies where the other data set never is
        assert delta > 0
        assert exact.delta(100.0) > delta
        return
    assert exact.delta(found) <= delta + 1e-12
    assert exact.delta(found * 0.999) > delta
    if name in ("discrete Laplace", "randomised response, 5 answers", "optimised unary encoding"):
        assert found == pytest.approx(epsilon)
    if name == "sampled without replacement":
        assert found == pytest.approx(math.log1p(3 / 12 * math.expm1(epsilon)))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 0.2))
def test_the_hockey_stick_is_the_largest_excess_of_any_event(seed: int, delta: float) -> None:
    """All events of seven outcomes, one by one."""
    first, second = np.random.default_rng(seed).dirichlet(np.ones(7), 2)
    exact = Finite(np.arange(7), first, second)
    epsilon = exact.epsilon(delta)
    events = (np.arange(2**7)[:, None] >> np.arange(7)) & 1
    for p, q in ((first, second), (second, first)):
        assert (events @ p <= math.exp(epsilon) * (events @ q) + delta + 1e-9).all()


def test_draws_have_the_probabilities() -> None:
    exact = counted(1.0)
    one = exact.subject(Claim(1.0))
    drawn: Any = one.mechanism.batch(np.ones(1), np.random.default_rng(0), 200_000)  # type: ignore[attr-defined]
    for value in (-1, 0, 1, 2, 5):
        assert (drawn == value).mean() == pytest.approx(exact.first[exact.outcomes == value][0], abs=0.005)


def test_a_few_audits_make_no_false_claim_and_find_twins() -> None:
    found = list(tallies(3, 1000, seed=50))
    assert len(found) == len(FINITE) + len(MADE)
    assert sum(one.violated for one in found) <= 2  # of 39; 2 are allowed on average
    assert sum(one.found for one in found) >= 15


@pytest.mark.slow
def test_hundreds_of_audits_are_as_careful_as_they_say() -> None:
    found = list(tallies(100, 2000, seed=7000))
    assert [one for one in found if not one.acceptable()] == []
    assert sum(one.violated for one in found) <= 0.05 * sum(one.audits for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_with_the_default_runs_what_is_true_is_never_violated(name: str) -> None:
    make, options = MADE[name]
    assert audit_mechanism(make(1.0), Claim(1.0), seed=3, **options).status != "violated"
    if name != "fullest bin":  # of which a pair shows less than ε
        assert audit_mechanism(make(WORSE), Claim(1.0), seed=3, **options).status == "violated"
