# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import os
from collections.abc import Iterator

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from fedsim.errors import PrivacyError
from fedsim.privacy import clip, secure_noise
from fedsim.privacy.secure_noise import (
    add_secure_gaussian,
    add_secure_laplace,
    add_secure_noise,
    grid_of,
    secure_gaussian,
    secure_generator,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def known_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[np.random.Generator]:
    """The system's bits replaced by known ones: statistics of random tests would fail once in a while."""
    rng = np.random.default_rng(7)
    monkeypatch.setattr(os, "urandom", rng.bytes)
    return rng


@pytest.mark.usefixtures("known_bits")
def test_the_noise_is_gaussian_with_its_standard_deviation() -> None:
    drawn = secure_gaussian((400, 1001), 0.3).flatten().numpy()
    assert stats.kstest(drawn, stats.norm(scale=0.3).cdf).pvalue > 0.01
    assert abs(np.corrcoef(drawn[: len(drawn) // 2], drawn[len(drawn) // 2 : 2 * (len(drawn) // 2)])[0, 1]) < 0.01


@pytest.mark.parametrize("sigma", [0.3, 1.0, 1e-6, 12345.6])
def test_every_number_is_on_the_grid(sigma: float) -> None:
    grid = grid_of(sigma)
    assert math.frexp(grid)[0] == 0.5
    assert 2**28 <= sigma / grid < 2**29
    steps = secure_gaussian((1000,), sigma).numpy() / grid
    assert (steps == np.rint(steps)).all()


@pytest.mark.usefixtures("known_bits")
def test_the_integers_are_the_rounding_of_the_real_transform() -> None:
    """Against 400 bits: the error bound holds with room, and so the integers outside of it are right."""
    words = np.frombuffer(os.urandom(24 * 3000), np.uint64).reshape(3, -1).copy()
    words[0, :50] >>= np.arange(14, 64, dtype=np.uint64)  # the far tail
    words[0, 50:90] = np.array([2**64 - 2**bit for bit in range(11, 51)], np.uint64)  # near the centre
    scale = 2.0**28 * 1.7
    values, errors = secure_noise._box_muller(words, scale)
    worst = 0.0
    with mpmath.workprec(400):
        for k in range(words.shape[1]):
            w = [int(word) for word in words[:, k]]
            u = (mpmath.mpf((w[0] << 64) | w[1]) + 0.5) / 2**128
            radius = scale * mpmath.sqrt(-2 * mpmath.log(u))
            angle = 2 * mpmath.pi * (mpmath.mpf(w[2]) + 0.5) / 2**64
            for exact, value in zip(
                (radius * mpmath.cos(angle), radius * mpmath.sin(angle)), values[:, k], strict=True
            ):
                worst = max(worst, float(abs(exact - mpmath.mpf(float(value))) / errors[k]))
    assert worst < 0.5


def test_what_is_close_to_a_half_is_decided_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    exact = secure_noise._exact_pair
    monkeypatch.setattr(secure_noise, "_exact_pair", lambda words, scale: asked.append(words) or exact(words, scale))
    monkeypatch.setattr(os, "urandom", np.random.default_rng(3).bytes)
    secure_noise._rounded_normals(1_000_000, 2.0**28)
    assert 1 <= len(asked) < 100
    for words in asked:
        value, _ = secure_noise._box_muller(np.array(words, np.uint64)[:, None], 2.0**28)
        assert np.abs(np.array(exact(words, 2.0**28)) - value[:, 0]).max() < 0.5 + 1e-4


def test_outputs_have_no_gaps_that_depend_on_the_value() -> None:
    """The attack of Mironov (2012): outputs that one of two neighbours can never give. Here all are on one grid."""
    grid = grid_of(1.0)
    for value in (0.0, 1.0, 0.1, math.pi / 7):
        noisy = add_secure_noise(torch.full((2000,), value, dtype=torch.float64), 1.0, 1.0).numpy() / grid
        assert (noisy == np.rint(noisy)).all()
        assert (np.rint(noisy).astype(np.int64) & 1).mean() == pytest.approx(0.5, abs=0.1)  # odd and even alike


@pytest.mark.usefixtures("known_bits")
def test_the_noise_covers_the_sensitivity_of_rounding_and_of_summation() -> None:
    seen: list[float] = []
    real = secure_noise._rounded_normals
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure_noise, "_rounded_normals", lambda n, scale: seen.append(scale) or real(n, scale))
        add_secure_noise(torch.zeros(10_000), 0.8, 0.5)
        add_secure_noise(torch.zeros(10_000), 0.8, 0.5, terms=64)
    grid = grid_of(0.4)
    assert seen[0] * grid == pytest.approx(0.8 * (0.5 + grid * 100), rel=1e-11)
    assert seen[1] * grid == pytest.approx(0.8 * (0.5 * (1 + 2 * 64**2 / 2**24) + grid * 100), rel=1e-11)
    assert 0.4 < seen[0] * grid < seen[1] * grid < 0.4 * 1.001


def test_rows_are_noised_in_their_own_type_and_whatever_they_hold() -> None:
    rows = torch.tensor([[3.0, 4.0], [float("nan"), 1.0]])
    noisy = add_secure_gaussian(clip(rows, 1.0), 1e-6)
    assert noisy.dtype == torch.float32
    assert torch.allclose(noisy, torch.tensor([[0.6, 0.8], [0.0, 0.0]]), atol=1e-4)
    huge = add_secure_noise(torch.tensor([float("inf"), -1e30, float("nan")]), 1.0, 1.0)
    assert huge.isfinite().all()


@pytest.mark.parametrize(
    ("noise", "norm", "terms", "field"),
    [
        (0.0, 1.0, 1, "noise_multiplier"),
        (math.nan, 1.0, 1, "noise_multiplier"),
        (1.0, 0.0, 1, "clipping_norm"),
        (1.0, 1.0, 0, "terms"),
    ],
)
def test_nothing_weaker_is_computed(noise: float, norm: float, terms: int, field: str) -> None:
    with pytest.raises(PrivacyError, match=field):
        add_secure_noise(torch.zeros(3), noise, norm, terms)
    with pytest.raises(PrivacyError, match="L2 only"):
        add_secure_gaussian(clip(torch.zeros(1, 3), 1.0, 1), 1.0)


def test_the_generator_is_numpys_and_never_repeats() -> None:
    first, second = secure_generator(), secure_generator()
    assert first.random(1000).tolist() != second.random(1000).tolist()
    assert first.bit_generator.random_raw(4).shape == (4,)
    assert sorted(first.permutation(100)) == list(range(100))
    assert 0 <= first.random(1000).min() <= first.random(1000).max() < 1
    assert stats.kstest(first.standard_normal(5000), stats.norm.cdf).pvalue > 1e-9
    assert 4500 < (first.random(10_000) < 0.5).sum() < 5500


def test_a_forked_process_draws_other_numbers() -> None:
    generator = secure_generator()
    generator.random(3)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, generator.random(4).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 32) != generator.random(4).tobytes()
    os.close(reader)
    os.close(writer)


# --- Laplace noise --------------------------------------------------------------------------------------------------


def test_laplace_noise_has_its_distribution(known_bits: np.random.Generator) -> None:
    """P(round(sL) = 0) = 1 − e^(−1/2s), P(±n) = (e^(−(n−½)/s) − e^(−(n+½)/s))/2: exact, for a coarse grid."""
    scale, count = 2.5, 200_000
    drawn = secure_noise._rounded_laplaces(count, scale)
    for n in range(-6, 7):
        tail = [math.exp(-(abs(n) + shift) / scale) for shift in (-0.5, 0.5)]
        expected = 1 - math.exp(-0.5 / scale) if n == 0 else (tail[0] - tail[1]) / 2
        assert abs(np.mean(drawn == n) - expected) < 5 * math.sqrt(expected / count)
    far = np.mean(np.abs(drawn) > 10)
    assert abs(far - math.exp(-10.5 / scale)) < 5 * math.sqrt(far / count)


def test_where_double_precision_cannot_decide_laplace_noise_is_computed_with_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways give the same integer for the same bits, and the error bound covers how far they are apart."""
    words = np.frombuffer(np.random.default_rng(0).bytes(24 * 300), np.uint64).reshape(3, -1).copy()
    words[:, 0], words[:2, 1] = 2**64 - 1, (1, 0)  # u next to 1, and next to 2^-64
    scale = 2.0**29
    values, errors = secure_noise._exponential(words, scale)
    with mpmath.workprec(400):
        for k in range(300):
            u = (mpmath.mpf((int(words[0, k]) << 64) | int(words[1, k])) + 0.5) / 2**128
            assert abs(float(-scale * mpmath.log(u) - mpmath.mpf(values[k]))) <= errors[k] / 4
    sure = 0.5 - np.abs(values - np.rint(values)) > errors
    exact = [secure_noise._exact_exponential([int(w) for w in words[:2, k]], scale) for k in range(300)]
    assert np.rint(values)[sure].astype(int).tolist() == [e for e, s in zip(exact, sure, strict=True) if s]
    monkeypatch.setattr(
        secure_noise, "_exponential", lambda words, scale: (values[: words.shape[1]], np.full(300, 1.0))
    )
    asked: list[int] = []
    monkeypatch.setattr(secure_noise, "_exact_exponential", lambda words, scale: asked.append(1) or 7)
    assert set(np.abs(secure_noise._rounded_laplaces(300, scale)).tolist()) == {7}
    assert len(asked) == 300


def test_laplace_noise_lies_on_the_grid_and_has_its_scale(known_bits: np.random.Generator) -> None:
    values = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noisy = add_secure_laplace(values, 2.0, 0.5)
    steps = noisy / grid_of(1.0)
    assert torch.equal(steps, steps.round())
    noise = (noisy - values).numpy()
    grown = 1 + grid_of(1.0) * 100_000 / 0.5  # the L1 sensitivity, by what rounding adds to every entry
    assert np.mean(np.abs(noise)) == pytest.approx(1.0 * grown, rel=0.02)
    assert abs(np.mean(noise)) < 0.03
    assert np.median(np.abs(noise)) == pytest.approx(math.log(2) * grown, rel=0.03)
    assert torch.equal(add_secure_laplace(torch.tensor([math.nan]), 1e-6, 1.0).isnan(), torch.tensor([False]))
    for multiplier, norm in ((0.0, 1.0), (1.0, 0.0), (math.inf, 1.0), (1.0, math.nan)):
        with pytest.raises(PrivacyError, match="must be positive and finite"):
            add_secure_laplace(values, multiplier, norm)
