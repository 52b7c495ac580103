# SPDX-License-Identifier: Apache-2.0
"""The noise is Gaussian, and each replica's comes from its own stream."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from fedsim.randomness import key
from fedsim.training import box_muller
from fedsim.training.layout import replica_rows
from fedsim.training.noise import NoiseStreams


def draw(rows: int, length: int, deviation: float = 1.0, seed: int = 0) -> torch.Tensor:
    target = replica_rows(rows, length).zero_()
    keys = [key(seed, "noise", k) for k in range(rows)]
    NoiseStreams(keys, length).write(target, torch.full((rows,), deviation))
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
    noise = NoiseStreams([key(0, "noise", 0)], 100)
    first, second = replica_rows(1, 100).zero_(), replica_rows(1, 100).zero_()
    noise.write(first, torch.ones(1))
    noise.write(second, torch.ones(1))
    assert torch.equal(first, draw(1, 100))
    assert abs(np.corrcoef(first[0], second[0])[0, 1]) < 0.45


def test_scale():
    target = torch.full((2, 50), 3.0)
    NoiseStreams([key(0, "noise", k) for k in range(2)], 50).write(target, torch.tensor([1.0, 4.0]))
    torch.testing.assert_close(target, torch.tensor([[1.0], [4.0]]) * draw(2, 50))


class Silent:
    """A cipher whose key stream is zero, the far end of the tail, and where more bits are asked for, these."""

    def __init__(self, more: float) -> None:
        self.more = int(more * 2**64).to_bytes(8)

    def update_into(self, plain: memoryview, into: memoryview) -> None:
        into[: len(plain)] = bytes(len(plain))

    def update(self, plain: bytes) -> bytes:
        assert len(plain) == 8
        return self.more


@pytest.mark.parametrize(("more", "bits"), [(0.0, 31 + 54), (2.0**-20, 31 + 20), (0.5, 32)])
def test_the_tail_goes_beyond_what_a_word_can_say(more: float, bits: int):
    target = torch.zeros(1, 9)
    noise = NoiseStreams([bytes(16)], target.shape[1])
    noise._ciphers = [Silent(more)]  # type: ignore[list-item]
    noise.write(target, torch.ones(1))
    assert target.abs().max() == pytest.approx(np.sqrt(2 * bits * np.log(2)), rel=1e-5)


def test_the_bits_are_the_key_stream_of_aes():
    _, bits = NoiseStreams([bytes(16)], 4)._draw(range(1), 2)
    # AES-128 of a block of zeros under a key of zeros: H of test case 1 in the specification of GCM
    assert bits.tobytes().hex() == "66e94bd4ef8a2c3b884cfa59ca342b2e"


def exact(uniforms: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """The Box-Muller transform in double precision, from 2³¹·u and from the bits of the angle."""
    angles = bits[:, uniforms.shape[1] :].astype(np.int64)
    a = ((angles & (2**30 - 1)) - ((angles & 2**29) << 1)) * np.pi * 2.0**-31
    circle = np.where(angles >= 0, np.cos(a), -np.cos(a)), np.sin(a)
    swapped = (angles >> 30) & 1 == 1
    first, second = np.where(swapped, circle[1], circle[0]), np.where(swapped, circle[0], circle[1])
    radius = np.sqrt(-2 * np.log(uniforms.astype(np.float64) * 2.0**-31))
    return np.concatenate([radius * first, radius * second], axis=1)


def test_box_muller_against_double_precision():
    """Everywhere, the ends of u and of the angle among them, to a few roundings."""
    rng = np.random.default_rng(0)
    bits = rng.integers(-(2**31), 2**31, (3, 200_000), dtype=np.int32)
    bits[0, :4] = [-(2**31), 2**31 - 1, -1, 0]
    bits[1, 100_000:100_006] = [-(2**31), 2**31 - 1, -1, 0, 2**29 - 1, 2**29]
    uniforms = np.empty((3, 100_000), np.float32)
    box_muller.write_uniforms(bits, uniforms)
    uniforms[2, :60] = 2.0 ** np.arange(-54, 6)
    found = np.empty(bits.shape, np.float32)
    box_muller.write_normals(uniforms, bits, np.full(3, -2, np.float32), found)
    truth = exact(uniforms, bits)
    np.testing.assert_allclose(found, truth, rtol=6e-7, atol=1e-7)
    assert box_muller.write_uniforms(np.array([[0, -1, 1, -2]], np.int32), np.empty((1, 4), np.float32)) == 4


def test_the_numbers_are_the_same_on_every_processor():
    """Nothing in them is fused or taken from a library: compiled for a processor without vectors they are the same."""
    program = (
        "import sys, torch; from fedsim.randomness import key; from fedsim.training.noise import NoiseStreams; "
        "row = torch.zeros(1, 1001); NoiseStreams([key(0, 'noise', 0)], 1001).write(row, torch.ones(1)); "
        "sys.stdout.buffer.write(row.numpy().tobytes())"
    )
    plain = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    found = subprocess.run([sys.executable, "-c", program], env=plain, capture_output=True, check=True).stdout
    assert found == draw(1, 1001).numpy().tobytes()


@pytest.mark.parametrize("length", [100, 3001, 40_000, 140_001])
def test_many_steps_do_not_depend_on_who_drops_out(length):
    """Short rows are made several at a time; neither that nor the company changes a replica's noise."""
    together = NoiseStreams([key(0, "noise", k) for k in range(3)], length)
    alone = NoiseStreams([key(0, "noise", 0)], length)
    rows = []
    for step in range(12):
        many, one = torch.zeros(3 if step < 5 else 1, length), torch.zeros(1, length)
        together.write(many, torch.ones(len(many)))
        alone.write(one, torch.ones(1))
        assert torch.equal(many[0], one[0])
        rows.append(one[0])
    assert len({row.numpy().tobytes() for row in rows}) == 12
