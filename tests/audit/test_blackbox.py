# SPDX-License-Identifier: Apache-2.0
"""What was missed when strangers' mechanisms were audited blindly (docs/audit.md, "Blind trial"), and is found now."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedsim.audit.blackbox.outputs import SUMMARY, read
from fedsim.audit.blackbox.pairs import Domain, Pair, varied_pairs, whole_numbers
from fedsim.audit.mechanism import audit_mechanism
from fedsim.audit.verdict import Claim
from fedsim.errors import AuditError

Rng = np.random.Generator


def noisy_sum(records: Any, rng: Rng) -> float:
    return float(np.clip(records, 0, 1).sum() + rng.laplace())


def test_an_output_is_read_the_same_whatever_else_is_in_its_block() -> None:
    """Were it not, runs would not be independent, and the longest output of a block would speak for all of it."""
    short, long = [-1.5, 2.0], [0.0] * 9
    alone, beside = read([short]), read([short, long])
    assert alone.summary[0].tolist() == beside.summary[0].tolist()
    assert alone.summary[0, SUMMARY.index("whole")] == 1
    assert read([[-3.0], long]).summary[0, SUMMARY.index("largest")] == -3.0
    tenths = [0.1] * 10  # numpy adds ten numbers in another order than ten of two hundred, and rounds otherwise
    assert read([tenths]).summary[0].tolist() == read([tenths, [0.1] * 200]).summary[0].tolist()


def rare_length(records: Any, rng: Rng) -> list[float]:
    """ε = 1 at δ = 0: how often it says more than usual is randomised response on a rare answer."""
    more = 0.004 if len(records) % 2 else 0.004 / math.e
    return [-1.0 - rng.random()] * (9 if rng.random() < more else 2)


def test_a_rare_long_output_is_no_false_alarm() -> None:
    assert audit_mechanism(rare_length, Claim(1.0), [([1], [1, 2])], trials=40_000).status != "violated"


def rare_tenths(records: Any, rng: Rng) -> list[float]:
    """ε = 1 at δ = 0, as above, with numbers whose sum is rounded."""
    return [0.1] * (200 if rng.random() < (0.01 if len(records) % 2 else 0.01 / math.e) else 10)


def test_the_rounding_of_a_sum_is_no_false_alarm() -> None:
    assert audit_mechanism(rare_tenths, Claim(1.0), [([1], [1, 2])], trials=20_000, seed=2).status != "violated"


def test_very_long_outputs_may_differ_in_length() -> None:
    def noisy_length(records: Any, rng: Rng) -> list[float]:
        return [0.5] * max(0, 300 + len(records) + int(rng.geometric(1 - 1 / math.e) - rng.geometric(1 - 1 / math.e)))

    assert audit_mechanism(noisy_length, Claim(1.0), [([1], [1, 2])], trials=2_000).status != "violated"


class Model:
    """Somebody's estimator."""

    def __init__(self, weights: Any, bias: float) -> None:
        self.coef_, self.intercept_, self.itself = weights, bias, self


def test_what_an_object_holds_is_read() -> None:
    first, second = read([Model(np.ones(2), 1.0)]), read([Model(np.ones(2), 2.0)])
    assert first.values.tolist() == [[1.0, 1.0, 1.0]]
    assert second.values.tolist() == [[1.0, 1.0, 2.0]]
    series = [pd.Series([1.0, 2.0], index=names) for names in (["a", "b"], ["a", "z"])]
    assert len(set(read(series).words.tolist())) == 2
    assert len(set(read([3, 3.0, True + 0j, b"3"]).fingerprints.tolist())) == 4


def test_what_cannot_be_read_is_never_called_consistent() -> None:
    verdict = audit_mechanism(lambda records, rng: lambda: records, Claim(1.0), trials=2000)
    assert verdict.status == "inconclusive"
    assert "could not be read" in verdict.settle


def test_a_word_beside_noisy_numbers_is_seen() -> None:
    def warns(records: Any, rng: Rng) -> tuple[str, float]:
        return ("clipped" if np.any(records > 5) else "fine", noisy_sum(records, rng))

    assert audit_mechanism(warns, Claim(1.0), trials=30_000).status == "violated"


def test_a_generator_is_an_output_and_so_is_what_it_raises() -> None:
    def stream(records: Any, rng: Rng) -> Iterator[float]:
        yield noisy_sum(records, rng)
        if np.any(np.abs(records) > 5):
            raise ValueError("too large")

    assert audit_mechanism(stream, Claim(1.0), trials=30_000).status == "violated"


@pytest.mark.parametrize("shape", [(), (3,)])
def test_varied_pairs_are_neighbours_within_the_domain(shape: tuple[int, ...]) -> None:
    domain = Domain(0, 1, norm=1.0 if shape else None)
    for pair in varied_pairs("add/remove", shape, domain, np.random.default_rng(0), 200):
        assert len(pair.first) == len(pair.second) + 1
        without = [np.delete(pair.first, place, axis=0) for place in range(len(pair.first))]
        assert any(np.array_equal(one, pair.second) for one in without)
        assert all(domain.fits(record) for record in pair.first)
    for pair in varied_pairs("replace", shape, domain, np.random.default_rng(0), 200):
        differ = (pair.first != pair.second).reshape(len(pair.first), -1).any(1)
        assert differ.sum() == 1
    assert max(len(p.second) for p in varied_pairs("add/remove", shape, domain, np.random.default_rng(0), 99, 7)) == 7


def few_are_hidden(records: Any, rng: Rng) -> float:
    return float(len(records) + rng.laplace()) if len(records) >= 4 else 0.0


def first_tenth(records: Any, rng: Rng) -> float:
    """Claimed is the amplification by a random tenth."""
    return noisy_sum(records[: len(records) // 10], rng)


def unanimous(records: Any, rng: Rng) -> int:
    votes = np.bincount(records > 0.5, minlength=2)
    agreed = abs(votes[0] - votes[1]) > 5
    return int(np.argmax(votes if agreed else votes + rng.laplace(scale=2, size=2)))


def coarse_noise(records: Any, rng: Rng) -> float:
    return float(np.clip(records, 0, 1).sum() + np.float16(rng.laplace()))


@pytest.mark.parametrize(
    ("mechanism", "epsilon"), [(few_are_hidden, 1.0), (first_tenth, 0.16), (unanimous, 1.0), (coarse_noise, 1.0)]
)
def test_a_rule_that_few_data_sets_show_is_found(mechanism: Any, epsilon: float) -> None:
    verdict = audit_mechanism(mechanism, Claim(epsilon))
    assert verdict.status == "violated", verdict.sentence()


def test_its_repaired_twin_is_left_alone() -> None:
    assert audit_mechanism(noisy_sum, Claim(1.0), seed=3).status == "consistent"


def test_what_is_no_mechanism_gets_a_sentence() -> None:
    def three(records: Any, rng: Rng, scale: float) -> float:
        return float(records.sum() + rng.laplace(scale=scale))

    with pytest.raises(AuditError, match=r"called as mechanism\(dataset, rng\), so wrap it"):
        audit_mechanism(three, Claim(1.0))  # type: ignore[arg-type]
    with pytest.raises(AuditError, match="name a Subject that has them"):
        audit_mechanism(lambda table, rng: table["age"], Claim(1.0))


def test_a_mechanism_that_exits_has_said_something() -> None:
    def leaves(records: Any, rng: Rng) -> float:
        if np.any(np.abs(records) > 5):
            raise SystemExit(3)
        return noisy_sum(records, rng)

    assert audit_mechanism(leaves, Claim(1.0), trials=30_000, domain=(-10, 10)).status == "violated"


def test_records_may_be_whole_numbers() -> None:
    def histogram(records: Any, rng: Rng) -> Any:
        return np.bincount(records, minlength=4) + rng.laplace(size=4)

    domain = (0.0, 3.0)
    assert audit_mechanism(histogram, Claim(1.0), trials=30_000, domain=domain).status == "consistent"
    replaced = Claim(1.0, adjacency="replace")
    assert audit_mechanism(histogram, replaced, trials=30_000, domain=domain).status == "violated"
    halves = [Pair(np.array([0.2]), np.array([0.4])), Pair(np.array([0.2]), np.array([0.9]))]
    assert [pair.second.tolist() for pair in whole_numbers(halves)] == [[1]]
