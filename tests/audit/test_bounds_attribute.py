# SPDX-License-Identifier: Apache-2.0
"""What DP allows attribute inference, for any prior: the reference, a naive program, and properties."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from fedsim.audit import bounds
from fedsim.errors import PrivacyError
from fedsim.privacy.claim import Adjacency

ZIPF = [60 / 137, 30 / 137, 20 / 137, 15 / 137, 12 / 137]
PRIORS = {
    "biased2": [0.9, 0.1],
    "biased3": [0.7, 0.2, 0.1],
    "zipf5": ZIPF,
    "uniform5": [0.2] * 5,
    "adult_sex": [0.67, 0.33],
    "peaked8": [0.65, *[0.05] * 7],
}
deltas = st.sampled_from([0.0, 1e-6, 1e-3, 0.1])


def test_attribute_known_values() -> None:
    # shared/design/audit.md, section 2 (f)
    assert bounds.attribute_advantage(1, 0, [0.9, 0.1]) == pytest.approx(0.0832, abs=5e-5)
    assert bounds.attribute_advantage(1, 0, [0.45, 0.45, *[0.1 / 18] * 18]) == pytest.approx(0.20795, abs=5e-6)
    assert bounds.attribute_success(4, 0, [0.1] * 10) == pytest.approx(0.859, abs=1e-3)
    assert bounds.attribute_advantage(4, 0, [0.1] * 10) == pytest.approx(0.759, abs=1e-3)
    assert bounds.attribute_advantage(2, 1e-5, ZIPF) == pytest.approx(0.40350135940721427, abs=1e-9)
    assert bounds.attribute_success(2, 1e-5, ZIPF) == pytest.approx(0.6489401841985873, abs=1e-9)


def test_attributes_as_in_the_reference(reference: dict[str, Any]) -> None:
    for row in reference["nonuniform_prior"]:
        prior, pair = PRIORS[row["prior"]], (row["eps"], row["delta"])
        assert bounds.attribute_advantage(*pair, prior) == pytest.approx(row["lp_exact_rad"], abs=1e-9)
        assert bounds.attribute_success(*pair, prior) == pytest.approx(row["lp_exact_rero"], abs=1e-9)
        if "wpes_aia_general" in row:
            assert bounds.urero_wpes(row["eps"], prior) == pytest.approx(row["wpes_aia_general"], rel=1e-9)
    for row in reference["reconstruction_uniform_prior_LP_check"]:
        prior = [1 / row["m"]] * row["m"]
        assert bounds.attribute_success(row["eps"], 0, prior) == pytest.approx(row["lp_rero"], abs=1e-12)
        assert bounds.attribute_advantage(row["eps"], 0, prior) == pytest.approx(row["lp_rad"], abs=1e-12)
    for row in reference["seed_row_AIA_informed_violation"]["rows"]:
        m, heads = row["m"], row["heads"]
        prior = [0.9 / heads] * heads + [0.1 / (m - heads)] * (m - heads)
        exact = bounds.attribute_advantage(row["eps"], 0, prior)
        assert exact == pytest.approx(row["exact_rad_LP"], abs=1e-9)
        printed = next(r for r in bounds.URERO_ROWS if not r.valid).value(row["eps"], m)
        assert (exact > printed) == row["violated"]


def _naive(prior: list[float], eps: float, d: float, adjacency: Adjacency) -> tuple[float, float]:
    """Success and advantage, with a variable for every value and answer, and a slack for every pair and answer."""
    m, pi = len(prior), np.array(prior)
    people = m + (adjacency == "add/remove")  # the last one is nobody
    pairs = [(a, b) for a in range(people) for b in range(people) if a != b]
    if adjacency == "add/remove":
        pairs = [(a, b) for a, b in pairs if m in (a, b)]
    size = people * m + len(pairs) * m
    rows, limits = [], []
    for k, (a, b) in enumerate(pairs):
        total = np.zeros(size)
        for o in range(m):
            slack, row = people * m + k * m + o, np.zeros(size)
            row[a * m + o], row[b * m + o], row[slack] = 1, -math.exp(eps), -1
            total[slack] = 1
            rows.append(row)
            limits.append(0.0)
        rows.append(total)
        limits.append(d)
    sums = np.hstack([np.kron(np.eye(people), np.ones(m)), np.zeros((people, len(pairs) * m))])
    answers = []
    for gain in (np.diag(pi), np.diag(pi) - np.outer(pi, pi)):
        costs = np.zeros(size)
        costs[: m * m] = -gain.ravel()
        best: Any = linprog(costs, np.array(rows), limits, sums, np.ones(people), (0, 1))
        answers.append(-best.fun)
    return answers[0], answers[1]


@pytest.mark.parametrize("adjacency", ["replace", "add/remove"])
@pytest.mark.parametrize("pair", [(0.3, 0.0), (1.0, 1e-2), (3.0, 1e-3)])
@pytest.mark.parametrize("prior", [[0.25] * 4, [0.4, 0.4, 0.1, 0.1], [0.5, 0.3, 0.15, 0.05], [0.7, 0.1, 0.1, 0.1]])
def test_grouping_equal_values_changes_nothing(
    prior: list[float], pair: tuple[float, float], adjacency: Adjacency
) -> None:
    success, advantage = _naive(prior, *pair, adjacency)
    assert bounds.attribute_success(*pair, prior, adjacency=adjacency) == pytest.approx(success, abs=1e-8)
    assert bounds.attribute_advantage(*pair, prior, adjacency=adjacency) == pytest.approx(advantage, abs=1e-8)


def test_a_prior_of_many_values_is_no_trouble() -> None:
    m = 100_000
    assert bounds.attribute_success(3, 0, [1 / m] * m) == pytest.approx(bounds.rero_tight(3, m), rel=1e-9)
    with pytest.raises(PrivacyError, match="different probabilities"):
        bounds.attribute_advantage(1, 1e-5, list(np.arange(1, 101) / 5050))


@given(a=st.floats(0, 12), b=st.floats(0, 12), delta_=deltas, raw=st.lists(st.integers(1, 5), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_attribute_bounds_never_fall_and_stay_below_the_closed_ones(
    a: float, b: float, delta_: float, raw: list[int]
) -> None:
    low, high = sorted((a, b))
    prior = [x / sum(raw) for x in raw]
    for adjacency in ("replace", "add/remove"):
        small, large = (bounds.attribute_advantage(e, delta_, prior, adjacency=adjacency) for e in (low, high))
        assert -1e-9 <= small <= large + 1e-8
        success = bounds.attribute_success(high, delta_, prior, adjacency=adjacency)
        assert large <= success + 1e-9
        assert success <= bounds.rero(high, max(prior), delta=delta_, adjacency=adjacency) + 1e-8
    exact = bounds.attribute_advantage(high, delta_, prior)
    assert exact <= bounds.urero_prior(high, prior, delta=delta_) + 1e-8
    assert exact <= bounds.urero_tight(high, max(prior), delta=delta_) + 1e-8
    assert exact <= bounds.attribute_advantage(high, delta_, prior, adjacency="add/remove") + 1e-8
    converted = bounds.attribute_advantage(*bounds.as_replace(high, delta_), prior)
    assert bounds.attribute_advantage(high, delta_, prior, adjacency="add/remove") <= converted + 1e-7


def test_inverses_of_the_linear_program() -> None:
    settings_: list[tuple[float, Adjacency]] = [(0.0, "replace"), (1e-3, "replace"), (1e-3, "add/remove")]
    for delta_, adjacency in settings_:
        advantage = bounds.attribute_advantage(1.5, delta_, ZIPF, adjacency=adjacency)
        success = bounds.attribute_success(1.5, delta_, ZIPF, adjacency=adjacency)
        proved = (
            bounds.epsilon_from_attribute_advantage(advantage, delta_, ZIPF, adjacency=adjacency),
            bounds.epsilon_from_attribute_success(success, delta_, ZIPF, adjacency=adjacency),
        )
        assert proved == pytest.approx((1.5, 1.5), abs=1e-5)
        assert max(proved) <= 1.5
    assert bounds.epsilon_from_attribute_advantage(0.0, 0.0, ZIPF) == 0
    assert bounds.epsilon_from_attribute_success(1.0, 0.0, ZIPF) == 30
