# SPDX-License-Identifier: Apache-2.0
"""The pair that a verdict rests on can be made again, and is what the sentence describes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.audit.blackbox.pairs import Domain, Pair, varied_pairs, whole_numbers, worst_pairs
from fedsim.audit.blackbox.witness import difference, recipe
from fedsim.audit.mechanism import Subject, audit_mechanism, examine
from fedsim.audit.verdict import Claim
from fedsim.audit_command import audit_function

Rng = np.random.Generator


def leaky(records: Any, rng: Rng) -> float:
    return float(np.clip(records, 0, 1).sum() + rng.laplace(scale=0.2))


def made(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["add/remove", "replace"]),
    st.sampled_from([(), (1,), (3,), (2, 2)]),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_recipe_makes_the_pair(adjacency: Any, shape: tuple[int, ...], whole: bool, seed: int) -> None:
    pairs = worst_pairs(adjacency, shape, Domain())
    pairs += varied_pairs(adjacency, shape, Domain(), np.random.default_rng(seed), 40)
    written = 0
    for pair in whole_numbers(pairs) if whole else pairs:
        code = recipe(pair)
        if code:
            names, written = made(code), written + 1
            assert np.array_equal(names["first"], pair.first)
            assert np.array_equal(names["second"], pair.second)
            assert names["first"].dtype == pair.first.dtype
        else:
            assert pair.first.size > 200
        assert difference(pair) != "as it was given"
    assert written > 20


def test_the_difference_in_words() -> None:
    rest = np.zeros((3, 2))
    with_it = np.insert(rest, 1, [1.0, 2.0], axis=0)
    assert (
        difference(Pair(with_it, rest))
        == "the first has 4 records, the second lacks record 1, which is [1, 2]; all 3 others are [0, 0]"
    )
    other = with_it.copy()
    other[1] = [5.0, 6.0]
    assert difference(Pair(with_it, other)).startswith(
        "both have 4 records, and record 1 is [1, 2] in the first and [5, 6]"
    )
    mixed = difference(Pair(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0])))
    assert mixed.endswith("the 2 others hold 2 different records, from 1 to 2")
    assert difference(Pair([1, 2], [1])) == "as it was given"
    assert recipe(Pair(np.zeros(3), np.ones(3))) == ""


def test_a_violated_verdict_names_its_pair_and_the_counts_can_be_checked() -> None:
    subject = Subject(leaky, Claim(1.0))
    verdict, count = examine(subject, trials=20_000)
    assert verdict.status == "violated"
    assert count is not None
    names = made(verdict.check)
    assert np.array_equal(names["first"], count.pair.first)
    assert np.array_equal(names["second"], count.pair.second)
    found = re.search(
        r"seen in (\d+) of (\d+) runs on the first data set and in (\d+) of (\d+) on the second", verdict.reason
    )
    assert found
    hits, runs, others, others_of = map(int, found.groups())
    assert hits == count.event.happened(count.first).sum()
    assert others == count.event.happened(count.second).sum()
    assert (runs, others_of) == (len(count.first), len(count.second))
    assert "The mechanism answered in all these runs" in verdict.reason
    assert "The auditor made up this pair" in verdict.reason
    again = audit_mechanism(leaky, Claim(1.0), [(names["first"], names["second"])], trials=20_000, seed=9)
    assert again.status == "violated"


def test_nothing_is_asked_about_a_pair_that_was_given() -> None:
    verdict = audit_mechanism(leaky, Claim(1.0), [(np.ones(3), np.ones(2), "three or two")], trials=4000)
    assert verdict.status == "violated"
    assert "three or two" in verdict.reason
    assert "made up" not in verdict.reason


@pytest.mark.parametrize("no_report", [True])
def test_the_pair_is_kept_beside_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_report: bool
) -> None:
    options: dict[str, Any] = {"epsilon": 1.0, "trials": 4000}
    audit_function("tests.audit.test_witness:leaky", options, False, tmp_path / "out", no_report)
    with np.load(tmp_path / "out" / "pair.npz", allow_pickle=False) as kept:
        assert len(kept["first"]) == len(kept["second"]) + 1
    assert "np.delete(first" in capsys.readouterr().out.replace("\n", "").replace(" ", "").replace(
        "np.delete(first", "np.delete(first"
    )
