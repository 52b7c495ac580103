# SPDX-License-Identifier: Apache-2.0
"""The planner's numbers, against the estimators and the design's table of what ideal audits reach."""

from __future__ import annotations

import pytest

from fedsim.audit.blackbox.distinguishing import power
from fedsim.audit.planner import fewest, plan, rounds_to_prove, trials_to_catch, trials_to_prove
from fedsim.errors import AuditError


def test_what_is_planned_catches() -> None:
    needed = trials_to_catch(1.0, 1e-3, factor=2.0)
    assert needed is not None
    assert power(2.0, 1.0, 1e-3, needed) >= 0.9
    assert power(2.0, 1.0, 1e-3, needed // 2) < 0.9


def test_a_large_epsilon_cannot_be_settled_without_a_model() -> None:
    assert trials_to_catch(30.0, 0.0) is None


def test_more_of_epsilon_needs_more() -> None:
    few, many = trials_to_prove(0.3, 1.0, 1e-5), trials_to_prove(0.6, 1.0, 1e-5)
    assert few is not None
    assert many is not None
    assert few < many / 2


def test_every_estimator_is_planned_and_models_are_cheaper() -> None:
    plans = {one.estimator: one for one in plan(4.0, 1e-5, share=0.5)}
    assert set(plans) == {"exact test", "Clopper-Pearson", "one run (Steinke et al.)", "one run, f-DP", "GDP on counts",
                          "Gaussian scores"}  # fmt: skip
    needed = {name: one.needed or 10**12 for name, one in plans.items()}
    assert needed["Gaussian scores"] < needed["GDP on counts"] < needed["exact test"] < needed["Clopper-Pearson"]
    # ../shared/design/audit.md §4.1, ε = 4: Steinke proves 39% with 10^3 canaries and 54% with 10^4, f-DP 58% with 10^3
    assert 10**3 < needed["one run (Steinke et al.)"] < 10**4
    assert needed["one run, f-DP"] < 10**3
    assert "at δ = 1e-05" in str(plans["exact test"])


def test_rounds_of_the_per_step_audit() -> None:
    # §4.2, q = .0819, T = 2500, ε = 4: 2,500 observations prove 74%, 25,000 prove 92%.
    rounds = rounds_to_prove(0.92, 4.0, 1e-5, sample_rate=0.0819, steps=2500, canaries=12)
    assert rounds is not None
    assert 500 < rounds <= 2500
    assert rounds_to_prove(0.92, 4.0, 1e-5, sample_rate=0.0819, steps=2500, canaries=1) is None


def test_mistakes_are_named() -> None:
    with pytest.raises(AuditError, match="share"):
        plan(1.0, 1e-5, share=1.5)
    with pytest.raises(AuditError, match="factor"):
        trials_to_catch(1.0, 1e-5, factor=1.0)
    assert fewest(lambda n: n >= 37, start=2) == 37
