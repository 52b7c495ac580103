# SPDX-License-Identifier: Apache-2.0
"""Which examples are in which local step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.randomness import stream
from fedsim.training import ExampleClipping, LocalWork, batch_schedule
from fedsim.training.batches import padded_width, poisson_width
from fedsim.training.laying import BatchPlan


def schedule(examples: int, seed: int = 0, **options) -> list[np.ndarray]:
    return batch_schedule(examples, LocalWork(**({"kind": "fedavg"} | options)), stream(seed, "test"))


@given(examples=st.integers(1, 60), batch=st.integers(1, 25), epochs=st.integers(1, 3), seed=st.integers(0, 99))
def test_every_epoch_uses_every_row_once(examples, batch, epochs, seed):
    batches = schedule(examples, seed, batch_size=batch, epochs=epochs)
    each = -(-examples // batch)
    assert len(batches) == epochs * each
    for epoch in range(epochs):
        some = batches[epoch * each : (epoch + 1) * each]
        assert sorted(np.concatenate(some)) == list(range(examples))
        assert all(len(b) == min(batch, examples) for b in some[:-1])


def test_orders_differ_between_epochs_unless_they_should_not():
    first, second = np.split(np.concatenate(schedule(40, epochs=2, batch_size=8)), 2)
    assert list(first) != list(second)
    assert list(np.concatenate(schedule(40, epochs=2, batch_size=8, shuffle=False))) == [*range(40), *range(40)]


def test_steps_in_place_of_epochs():
    batches = schedule(10, batch_size=4, steps=7)
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2, 4]
    assert len(schedule(10, batch_size=None, steps=3)) == 3


def test_fedsgd_takes_one_random_batch():
    (batch,) = schedule(50, kind="fedsgd", batch_size=7, shuffle=False)
    assert len(set(batch)) == 7
    assert list(batch) != list(range(7))
    assert len(schedule(50, kind="fedsgd", batch_size=None)[0]) == 50


def test_no_rows_no_steps():
    dp = ExampleClipping(1.0, 1.0, "poisson")
    assert schedule(0) == schedule(0, steps=5) == schedule(0, kind="fedsgd") == schedule(0, example_dp=dp) == []


def test_poisson_batches_have_the_stated_inclusion_frequencies():
    """Each row joins each step with probability B/n, independently: check frequency, variance of sizes, pairs."""
    n, batch, steps = 50, 10, 4000
    batches = schedule(n, batch_size=batch, steps=steps, example_dp=ExampleClipping(1.0, 1.0, "poisson"))
    joined = np.zeros((steps, n))
    for step, rows in enumerate(batches):
        joined[step, rows] = 1
    q = batch / n
    assert np.abs(joined.mean(0) - q).max() < 4.5 * np.sqrt(q * (1 - q) / steps)
    assert joined.sum(1).var() == pytest.approx(n * q * (1 - q), rel=4.5 * np.sqrt(2 / steps))
    correlation = np.corrcoef(joined.T) - np.eye(n)
    assert np.abs(correlation).max() < 5.5 / np.sqrt(steps)
    assert np.abs(np.corrcoef(joined[:-1].ravel(), joined[1:].ravel())[0, 1]) < 4.5 / np.sqrt(steps * n)


def test_poisson_epochs_and_certain_inclusion():
    dp = ExampleClipping(1.0, 1.0, "poisson")
    assert len(schedule(50, batch_size=20, epochs=2, example_dp=dp)) == 6
    assert all(len(b) == 5 for b in schedule(5, batch_size=20, steps=9, example_dp=dp))


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=5), batch=st.integers(1, 300))
def test_width_holds_every_batch_and_wastes_little(lengths, batch):
    width = padded_width([np.arange(n) for n in lengths], batch)
    longest = max(lengths)
    assert width >= max(1, longest)
    assert width <= max(longest * 1.25, longest + 3)
    if longest == batch:
        assert width == batch


def test_plan_lays_schedules_side_by_side():
    schedules = [[np.array([2, 0]), np.array([1])], [], [np.array([0, 1])]]
    members = [np.array([10, 11, 12]), np.array([20]), np.array([30, 31])]
    plan = BatchPlan.of(schedules, members, 2)
    assert plan.rows.tolist() == [[[12, 10], [20, 20], [30, 31]], [[11, 10], [20, 20], [30, 30]]]
    assert plan.present.tolist() == [[[1, 1], [0, 0], [1, 1]], [[1, 0], [0, 0], [0, 0]]]
    assert plan.shares(private=False).tolist() == [[[0.5, 0.5], [0, 0], [0.5, 0.5]], [[1, 0], [0, 0], [0, 0]]]
    assert plan.shares(private=True) is plan.present


def test_poisson_batches_are_those_of_one_step_at_a_time(monkeypatch):
    work = LocalWork("fedavg", batch_size=7, steps=50, example_dp=ExampleClipping(1.0, 1.0, "poisson"))
    monkeypatch.setattr("fedsim.training.batches._COINS", 200)
    rng = stream(0, "test")
    expected = [np.flatnonzero(rng.random(30) < 7 / 30) for _ in range(50)]
    found = batch_schedule(30, work, stream(0, "test"))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_most_clients_share_a_width_and_every_batch_fits():
    work = LocalWork("fedavg", batch_size=32, example_dp=ExampleClipping(1.0, 1.0, "poisson"))
    schedules = [batch_schedule(320, work, stream(k, "test")) for k in range(200)]
    widths = [poisson_width(schedule, 32, 320) for schedule in schedules]
    assert all(max(map(len, s)) <= width <= 64 for s, width in zip(schedules, widths, strict=True))
    assert len(set(widths)) <= 3
    assert poisson_width([np.arange(20)], 20, 20) == 20  # everybody joins: nothing to pad


def test_under_a_claim_for_examples_the_order_is_always_drawn() -> None:
    """One row more in a file may shift all that follow: in the order of the file every batch would then be another."""
    plain = schedule(8, batch_size=4, shuffle=False)
    assert np.concatenate(plain).tolist() == list(range(8))
    clipping = ExampleClipping(1.0, 1.0, "shuffle")
    drawn = [schedule(8, seed, batch_size=4, shuffle=False, example_dp=clipping) for seed in range(9)]
    assert len({tuple(np.concatenate(batches)) for batches in drawn}) > 5
