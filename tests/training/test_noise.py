# SPDX-License-Identifier: Apache-2.0
"""The noise is Gaussian, and each replica's comes from its own stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from fedsim.randomness import stream
from fedsim.training.layout import replica_rows
from fedsim.training.noise import NoiseStreams


def draw(rows: int, length: int, deviation: float = 1.0, seed: int = 0) -> torch.Tensor:
    target = replica_rows(rows, length).zero_()
    generators = [stream(seed, "noise", k) for k in range(rows)]
    NoiseStreams(generators, length).write(target, torch.full((rows,), deviation))
    return target


@pytest.mark.parametrize("length", [1, 2, 7, 1001, 70_001, 200_000])
def test_rows_do_not_depend_on_each_other(length):
    together, fewer = draw(5, length), draw(2, length)
    assert torch.equal(together[:2], fewer)
    assert len({row.numpy().tobytes() for row in together}) == 5


def test_the_distribution_is_normal():
    numbers = draw(4, 250_001).double().numpy()
    assert stats.kstest(numbers.ravel(), "norm").pvalue > 1e-3
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        spread = np.sqrt(float(stats.norm.moment(2 * power)) / numbers.size)
        assert abs((numbers**power).mean() - moment) < 4.5 * spread
    assert 4.4 < np.abs(numbers).max() < 6.7
    for threshold in (3.0, 4.0):
        expected = numbers.size * 2 * stats.norm.sf(threshold)
        assert abs((np.abs(numbers) > threshold).sum() - expected) < 5 * np.sqrt(expected)


def test_the_two_numbers_of_a_pair_are_independent():
    row = draw(1, 400_000)[0].double().numpy()
    cosines, sines = row[:200_000], row[200_000:]
    for f in (lambda z: z, np.abs, lambda z: z**2):
        assert abs(np.corrcoef(f(cosines), f(sines))[0, 1]) < 4.5 / np.sqrt(200_000)
    assert abs(np.corrcoef(row[:-1], row[1:])[0, 1]) < 4.5 / np.sqrt(400_000)


def test_steps_go_on_in_the_stream():
    noise = NoiseStreams([stream(0, "noise", 0)], 100)
    first, second = replica_rows(1, 100).zero_(), replica_rows(1, 100).zero_()
    noise.write(first, torch.ones(1))
    noise.write(second, torch.ones(1))
    assert torch.equal(first, draw(1, 100))
    assert abs(np.corrcoef(first[0], second[0])[0, 1]) < 0.45


def test_scale():
    target = torch.full((2, 50), 3.0)
    NoiseStreams([stream(0, "noise", k) for k in range(2)], 50).write(target, torch.tensor([1.0, 4.0]))
    torch.testing.assert_close(target, torch.tensor([[1.0], [4.0]]) * draw(2, 50))


class Extreme:
    """Bits that are all zero, which is the far end of the tail, and then one more number."""

    bit_generator = property(lambda self: self)

    def __init__(self, more: float) -> None:
        self.more = more

    def random_raw(self, count: int) -> np.ndarray:
        return np.zeros(count, dtype=np.uint64)

    def random(self) -> float:
        return self.more


@pytest.mark.parametrize(("more", "bits"), [(0.0, 31 + 54), (2.0**-20, 31 + 20), (0.5, 32)])
def test_the_tail_goes_beyond_what_a_word_can_say(more: float, bits: int):
    target = torch.zeros(1, 9)
    NoiseStreams([Extreme(more)], target.shape[1]).write(target, torch.ones(1))  # type: ignore[list-item]
    assert target.abs().max() == pytest.approx(np.sqrt(2 * bits * np.log(2)), rel=1e-5)


@pytest.mark.parametrize("length", [100, 3001, 40_000, 140_001])
def test_many_steps_do_not_depend_on_who_drops_out(length):
    """Short rows are drawn several at a time; neither the blocks nor the company change a replica's noise."""
    together = NoiseStreams([stream(0, "noise", k) for k in range(3)], length)
    alone = NoiseStreams([stream(0, "noise", 0)], length)
    rows = []
    for step in range(12):
        many, one = torch.zeros(3 if step < 5 else 1, length), torch.zeros(1, length)
        together.write(many, torch.ones(len(many)))
        alone.write(one, torch.ones(1))
        assert torch.equal(many[0], one[0])
        rows.append(one[0])
    assert len({row.numpy().tobytes() for row in rows}) == 12
