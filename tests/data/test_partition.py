# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from fedsim.data import Dataset, Partition, label_counts, load_dataset, make_partition
from fedsim.data.division import power_law_sizes
from fedsim.data.partition import DividedPartition
from fedsim.errors import ScenarioError
from fedsim.scenario import EmbeddedData, PartitionSection, TextData

SPEC: TypeAdapter[Any] = TypeAdapter(PartitionSection)
KINDS: list[dict[str, Any]] = [
    {"kind": "iid"},
    {"kind": "dirichlet", "alpha": 0.3},
    {"kind": "shards"},
    {"kind": "quantity", "exponent": 1.2},
]
DRAWN: list[dict[str, Any]] = [{**kind, "examples_per_client": 30} for kind in KINDS[:3]]


def toy(labels: np.ndarray, groups: np.ndarray | None = None, table: pd.DataFrame | None = None) -> Dataset:
    y = torch.from_numpy(labels.astype(np.int64))
    names = () if groups is None else tuple(f"g{i}" for i in range(int(groups.max()) + 1))
    x, classes = torch.zeros(len(y), 1), int(y.max()) + 1
    return Dataset("toy", "table", x, y, x, y, classes, tuple(map(str, range(classes))), None, groups, names, table)


def make(spec: dict[str, Any], data: Dataset, population: int | None = None, seed: int = 0) -> Partition:
    return make_partition(SPEC.validate_python(spec), data, population, seed)


def digits() -> Dataset:
    return load_dataset(EmbeddedData(source="digits"), 0)


def shares(partition: Partition, data: Dataset, clients: range) -> np.ndarray:
    counts = label_counts(partition, data.y_train, clients, data.classes)
    result: np.ndarray = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return result


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    labels=st.lists(st.integers(0, 4), min_size=2, max_size=200),
    part=st.floats(0.01, 1),
    seed=st.integers(0, 2**63 - 1),
)
def test_divided_rows_are_disjoint_and_cover_everything(
    kind: dict[str, Any], labels: list[int], part: float, seed: int
) -> None:
    data = toy(np.array(labels))
    shards = 2 if kind["kind"] == "shards" else 1
    population = max(1, int(part * len(labels)) // shards)
    partition = make(kind, data, population, seed)
    members = [partition.members(client) for client in range(population)]
    assert partition.population == population
    assert sorted(np.concatenate(members).tolist()) == list(range(len(labels)))
    for client, rows in enumerate(members):
        assert rows.dtype == np.int64
        assert np.all(np.diff(rows) > 0)
        assert len(rows) == partition.size(client) >= 1


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS[:3]),
    labels=st.lists(st.integers(0, 4), min_size=2, max_size=120),
    examples=st.integers(1, 120),
    alpha=st.sampled_from([1e-30, 0.01, 1.0, 1e30]),
    client=st.integers(0, 999_999),
)
def test_drawn_rows_are_different_and_as_many_as_asked(
    kind: dict[str, Any], labels: list[int], examples: int, alpha: float, client: int
) -> None:
    data = toy(np.array(labels))
    examples = min(examples, len(labels) // 2 * 2 if kind["kind"] == "shards" else len(labels))
    spec = {**kind, "examples_per_client": examples} | ({"alpha": alpha} if kind["kind"] == "dirichlet" else {})
    try:
        partition = make(spec, data, 1_000_000)
    except ScenarioError:
        assert kind["kind"] == "shards"  # two shards of half the rows each, rounded up, may not fit
        assert 2 * -(-examples // 2) > len(labels) or len(labels) // -(-examples // 2) < 2
        return
    rows = partition.members(client)
    assert len(rows) == partition.size(client) == examples
    assert np.all(np.diff(rows) > 0)
    assert rows[0] >= 0
    assert rows[-1] < len(labels)


@pytest.mark.parametrize("spec", [*KINDS, *DRAWN], ids=str)
def test_same_seed_same_rows_other_seed_other_rows(spec: dict[str, Any]) -> None:
    data = digits()
    one, same, other = (make(spec, data, 40, seed) for seed in (5, 5, 6))
    for client in (0, 7, 39):
        assert np.array_equal(one.members(client), same.members(client))
        assert not np.array_equal(one.members(client), other.members(client))
    assert not np.array_equal(one.members(0), one.members(1))


@pytest.mark.parametrize("spec", DRAWN, ids=str)
def test_a_drawn_client_does_not_depend_on_the_population(spec: dict[str, Any]) -> None:
    small, large = make(spec, digits(), 50), make(spec, digits(), 10**9)
    assert np.array_equal(small.members(49), large.members(49))


@pytest.mark.parametrize("spec", DRAWN, ids=str)
def test_a_million_clients_cost_nothing_until_they_are_asked(spec: dict[str, Any]) -> None:
    data = digits()
    begin = time.perf_counter()
    partition = make(spec, data, 1_000_000)
    built = time.perf_counter() - begin
    times = []
    for first in range(5):
        begin = time.perf_counter()
        for client in range(first, 1_000_000, 10_000):
            partition.members(client)
        times.append((time.perf_counter() - begin) / 100)
    assert partition.population == 1_000_000
    assert built < 0.5
    assert min(times) < 1e-3  # tens of microseconds on a quiet machine


def test_drawn_rows_are_uniform() -> None:
    """Chi-square of 2,000 clients' rows: every row equally often (99.99% quantile by Wilson and Hilferty)."""
    labels = np.repeat(np.arange(3), [50, 30, 20])
    for spec in ({"kind": "iid"}, {"kind": "dirichlet", "alpha": 1e6}):
        partition = make({**spec, "examples_per_client": 10}, toy(labels), 2000)
        counts = np.bincount(np.concatenate([partition.members(c) for c in range(2000)]), minlength=100)
        chi2 = ((counts - 200) ** 2 / 200).sum()
        freedom = 99
        assert chi2 < freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom))) ** 3


def test_drawn_rows_are_independent_of_each_other() -> None:
    """In a uniform subset of k of n rows, k(k-1)/n pairs of neighbours are expected."""
    partition = make({"kind": "dirichlet", "examples_per_client": 40}, toy(np.zeros(100)), 2000)
    pairs = np.mean([(np.diff(partition.members(client)) == 1).sum() for client in range(2000)])
    assert abs(pairs - 40 * 39 / 100) < 0.3  # four standard errors


@pytest.mark.parametrize("extra", [{}, {"examples_per_client": 30}], ids=str)
def test_dirichlet_at_the_ends_of_its_range(extra: dict[str, Any]) -> None:
    data = toy(np.arange(3000) % 3)
    for alpha, held in ((1e-30, 1), (1e30, 3)):
        partition = make({"kind": "dirichlet", "alpha": alpha, "min_examples": 0, **extra}, data, 5)
        counts = label_counts(partition, data.y_train, range(5), 3)
        assert (counts > 0).sum(0 if not extra else 1).max() == (held if extra or held == 1 else 5)
        assert held == 1 or counts.min() >= (1 if extra else 199)


def test_dirichlet_of_large_alpha_is_iid_and_of_small_alpha_is_skewed() -> None:
    data = digits()
    prior = np.bincount(data.y_train.numpy()) / len(data.y_train)
    for extra in ({}, {"examples_per_client": 70}):
        spec = {"kind": "dirichlet", **extra}
        distance = [
            np.abs(shares(make({**spec, "alpha": alpha}, data, 20), data, range(20)) - prior).sum(1).mean() / 2
            for alpha in (0.05, 1.0, 1e6)
        ]
        assert distance[0] > 0.6
        assert distance[0] > distance[1] > distance[2]
        assert distance[2] < (0.02 if not extra else 0.2)  # what is left is the sampling of 70 rows


def test_dirichlet_shares_have_the_moments_of_the_distribution() -> None:
    """Drawn clients of balanced classes: the variance of a share is (1/C)(1 - 1/C) / (C alpha + 1), plus sampling."""
    data = toy(np.repeat(np.arange(4), 1000))
    partition = make({"kind": "dirichlet", "alpha": 0.5, "examples_per_client": 400}, data, 3000)
    found = shares(partition, data, range(3000))
    variance = 0.25 * 0.75 / (4 * 0.5 + 1)
    np.testing.assert_allclose(found.mean(0), 0.25, atol=0.02)
    np.testing.assert_allclose(found.var(0), variance, rtol=0.06)


@pytest.mark.parametrize("least", [0, 1, 20, 71])
def test_dirichlet_min_examples_holds(least: int) -> None:
    partition = make({"kind": "dirichlet", "alpha": 0.02, "min_examples": least}, digits(), 20)
    sizes = [partition.size(client) for client in range(20)]
    assert min(sizes) >= least
    assert sum(sizes) == len(digits().x_train)


def test_dirichlet_with_as_many_clients_as_rows() -> None:
    partition = make({"kind": "dirichlet", "alpha": 0.1}, toy(np.arange(300) % 3), 300)
    assert {partition.size(client) for client in range(300)} == {1}


def test_shards_hold_few_classes() -> None:
    data = digits()
    for extra in ({}, {"examples_per_client": 60}):
        seen = shares(make({"kind": "shards", "shards_per_client": 2, **extra}, data, 20), data, range(20)) > 0
        assert seen.sum(1).max() <= 4
        assert seen.sum(1).mean() < 3.1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.floats(0, 1), st.floats(0, 50), st.integers(1, 5))
def test_power_law_sizes(n: int, part: float, exponent: float, least: int) -> None:
    population = max(1, int(part * n / least))
    if population * least > n:
        return
    sizes = power_law_sizes(n, population, exponent, least)
    assert sizes.sum() == n
    assert sizes.min() >= least
    assert np.all(np.diff(sizes) <= 0)


def test_quantity_follows_the_power_law_and_stays_iid() -> None:
    data = toy(np.arange(100_000) % 5)
    partition = make({"kind": "quantity", "exponent": 1.0}, data, 50)
    sizes = np.array([partition.size(client) for client in range(50)])
    np.testing.assert_allclose(sizes / sizes[0], 1 / np.arange(1, 51), atol=1e-3)
    np.testing.assert_allclose(shares(partition, data, range(5)), 0.2, atol=0.02)


# --- natural clients ------------------------------------------------------------------------------------------------


def test_natural_clients_of_the_data() -> None:
    groups = np.array([2, 0, 2, 1, 2, 0])
    partition = make({"kind": "column"}, toy(np.arange(6) % 2, groups))
    assert isinstance(partition, DividedPartition)
    assert partition.names == ("g0", "g1", "g2")
    assert [partition.members(client).tolist() for client in range(3)] == [[1, 5], [3], [0, 2, 4]]
    larger = make({"kind": "column", "min_examples": 2}, toy(np.arange(6) % 2, groups))
    assert isinstance(larger, DividedPartition)
    assert larger.names == ("g0", "g2")
    assert larger.members(1).tolist() == [0, 2, 4]


def test_a_smaller_population_is_chosen_by_the_seed() -> None:
    data = toy(np.arange(600) % 2, np.arange(600) % 100)
    one, other = make({"kind": "column"}, data, 10, seed=1), make({"kind": "column"}, data, 10, seed=2)
    assert isinstance(one, DividedPartition)
    assert isinstance(other, DividedPartition)
    assert len(one.names) == 10
    assert one.names != other.names
    assert all(one.size(client) == 6 for client in range(10))


def test_by_a_column_of_a_table() -> None:
    table = pd.DataFrame({"ward": ["b", "a", "b", "c"], "age": [1, 2, 2, 1], "holes": ["x", None, "x", "y"]})
    data = toy(np.arange(4) % 2, table=table)
    partition = make({"kind": "column", "column": "ward"}, data)
    assert isinstance(partition, DividedPartition)
    assert partition.names == ("a", "b", "c")
    assert partition.members(1).tolist() == [0, 2]
    for column, words in (("floor", "no column of data toy, which has ward, age, holes"), ("holes", "1 missing")):
        with pytest.raises(ScenarioError, match=words):
            make({"kind": "column", "column": column}, data)
    with pytest.raises(ScenarioError, match=r"name partition\.column, one of ward, age, holes"):
        make({"kind": "column"}, data)


def test_text_has_natural_clients_but_no_label_skew(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text('{"A": ["the quick brown fox jumps"], "B": ["over the lazy dog, he said, and so on"]}')
    data = load_dataset(TextData(source="text", path=str(file), length=4), 0)
    partition = make({"kind": "column"}, data)
    assert partition.population == 2
    counts = label_counts(partition, data.y_train, range(2), data.classes)
    assert counts.sum() == data.y_train.numel()
    for kind in ("dirichlet", "shards"):
        with pytest.raises(ScenarioError, match="is text"):
            make({"kind": kind}, data, 2)
    assert make({"kind": "iid"}, data, 2).population == 2


# --- what is impossible ---------------------------------------------------------------------------------------------

IMPOSSIBLE: list[tuple[dict[str, Any], int | None, str]] = [
    ({"kind": "iid"}, 1438 + 1, r"population 1,439 is more than the 1,438 .* set partition\.examples_per_client"),
    ({"kind": "dirichlet", "min_examples": 0}, 5000, "set partition.examples_per_client"),
    ({"kind": "dirichlet", "min_examples": 100}, 20, "min_examples 100 for each of 20 clients"),
    ({"kind": "shards", "shards_per_client": 100}, 20, "shards_per_client 100 for each of 20 clients"),
    ({"kind": "quantity", "min_examples": 100}, 20, "min_examples 100 for each of 20 clients"),
    ({"kind": "iid", "examples_per_client": 1439}, 20, "examples_per_client 1,439 is more than the 1,438"),
    ({"kind": "shards", "shards_per_client": 5, "examples_per_client": 1436}, 20, "needs 5 shards of 288 rows"),
    ({"kind": "column"}, None, "names none; use another partition"),
    ({"kind": "column", "column": "ward"}, None, "which has none"),
]


@pytest.mark.parametrize(("spec", "population", "words"), IMPOSSIBLE)
def test_impossible_partitions(spec: dict[str, Any], population: int | None, words: str) -> None:
    with pytest.raises(ScenarioError, match=words) as caught:
        make(spec, digits(), population)
    assert "\n" not in str(caught.value)


def test_too_few_natural_clients() -> None:
    data = toy(np.arange(6) % 2, np.array([2, 0, 2, 1, 2, 0]))
    with pytest.raises(ScenarioError, match="population 4 is more than the 3 natural clients"):
        make({"kind": "column"}, data, 4)
    with pytest.raises(ScenarioError, match="0 natural clients with at least 9 rows"):
        make({"kind": "column", "min_examples": 9}, data)


@pytest.mark.parametrize("spec", [KINDS[0], DRAWN[0]])
@pytest.mark.parametrize("client", [-1, 20])
def test_unknown_client(spec: dict[str, Any], client: int) -> None:
    partition = make(spec, digits())
    assert partition.population == 20
    with pytest.raises(IndexError, match="population of 20"):
        partition.members(client)
    with pytest.raises(IndexError, match="population of 20"):
        partition.size(client)


def test_members_can_be_changed_without_harm() -> None:
    partition = make({"kind": "iid"}, digits())
    before = partition.members(3).tolist()
    partition.members(3)[:] = 0
    assert partition.members(3).tolist() == before
