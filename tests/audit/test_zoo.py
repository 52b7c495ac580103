# SPDX-License-Identifier: Apache-2.0
"""Every broken mechanism of the zoo is found, and its repaired twin is left alone."""

from __future__ import annotations

import pytest

from fedsim.audit.mechanism import audit_mechanism
from fedsim.audit.zoo import zoo

QUICK = ("clipped batch", "noise once", "float32 noise", "randomised response for two", "deltas not added")
ALL = zoo()


def test_there_are_enough_and_each_has_a_story() -> None:
    assert len(ALL) >= 15
    assert all(one.story.endswith(".") and one.broken.claim == one.repaired.claim for one in ALL.values())


@pytest.mark.parametrize("name", QUICK)
def test_the_broken_one_is_found_in_a_minute_of_nobodys_time(name: str) -> None:
    verdict = audit_mechanism(ALL[name].broken)
    assert verdict.status == "violated", verdict.sentence()
    assert verdict.lower > verdict.claim.epsilon


@pytest.mark.parametrize("name", ["randomised response for two", "deltas not added"])
def test_the_twin_is_left_alone(name: str) -> None:
    assert audit_mechanism(ALL[name].repaired, trials=40_000).status == "consistent"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALL])
def test_the_whole_zoo(name: str) -> None:
    assert audit_mechanism(ALL[name].broken, seed=1).status == "violated"
    assert audit_mechanism(ALL[name].repaired, seed=1).status == "consistent"
