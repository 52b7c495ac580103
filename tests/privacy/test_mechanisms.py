# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fedsim.errors import PrivacyError
from fedsim.privacy import (
    Clipped,
    add_gaussian,
    add_laplace,
    clip,
    effective_noise_multiplier,
    next_clipping_norm,
    noise_share,
    prune,
    quantise,
    sign,
    within_norm,
)
from fedsim.scenario import AdaptiveClipping

rows = hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=st.floats(width=32))
orders: st.SearchStrategy[Literal[1, 2]] = st.sampled_from([1, 2])


def norms(values: Tensor, order: int) -> np.ndarray:
    wide = values.numpy().astype(np.float64)
    return np.abs(wide).sum(axis=1) if order == 1 else np.sqrt(np.square(wide).sum(axis=1))


def generators(*seeds: int) -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in seeds]


# --- clipping -------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None, derandomize=True)
@given(rows, st.floats(1e-30, 1e30), orders)
@example(np.full((1, 7), 0.1, np.float32), 0.1, 2)
@example(np.array([[np.nan, 1.0], [np.inf, -np.inf]], np.float32), 1.0, 2)
@example(np.full((1, 5), 3e38, np.float32), 1.0, 1)
@example(np.full((1, 3), 1e-45, np.float32), 1.1e-45, 2)
def test_clipped_rows_never_exceed_the_norm(updates: np.ndarray, norm: float, order: Literal[1, 2]) -> None:
    clipped = clip(torch.from_numpy(updates), norm, order)
    assert clipped.values.dtype == torch.float32
    assert (norms(clipped.values, order) <= norm).all()
    finite = np.isfinite(updates).all(axis=1)
    assert not clipped.values[~torch.from_numpy(finite)].any()
    inside = finite.copy()
    inside[finite] = norms(torch.from_numpy(updates[finite]), order) <= norm
    assert torch.equal(clipped.values[torch.from_numpy(inside)], torch.from_numpy(updates[inside]))


def test_clipping_keeps_the_direction_and_nearly_all_of_the_norm() -> None:
    updates = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)) * 10
    clipped = clip(updates, 1.5)
    assert norms(clipped.values, 2) == pytest.approx(1.5, rel=1e-6)
    assert torch.nn.functional.cosine_similarity(clipped.values, updates).min() > 1 - 1e-6
    assert clip(updates, 1.5, 1).order == 1


def test_sensitivity_travels_with_the_clipped_rows() -> None:
    clipped = clip(torch.ones(2, 3), 0.7)
    assert clipped.sensitivity("add/remove") == 0.7
    assert clipped.sensitivity("replace") == 1.4


def test_the_input_is_not_changed() -> None:
    updates = torch.full((2, 4), 5.0)
    for function in (lambda u: clip(u, 1.0), lambda u: prune(u, 0.5), lambda u: quantise(u, 2), sign):
        function(updates)
    assert (updates == 5.0).all()


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf])
def test_clipping_norms_that_are_none(norm: float) -> None:
    with pytest.raises(PrivacyError, match="clipping_norm"):
        clip(torch.ones(1, 2), norm)


# --- noise ----------------------------------------------------------------------------------------------------------


def test_gaussian_noise_has_its_standard_deviation() -> None:
    clipped = clip(torch.zeros(3, 40_000), 0.5)
    noise = add_gaussian(clipped, 1.3, generators(1, 2, 3)).double()
    deviation = 1.3 * 0.5
    assert noise.std(dim=1).numpy() == pytest.approx(deviation, rel=5 / math.sqrt(2 * 40_000))  # 5 standard errors
    assert (noise.mean(dim=1).abs() < 5 * deviation / math.sqrt(40_000)).all()
    assert (torch.corrcoef(noise) - torch.eye(3)).abs().max() < 5 / math.sqrt(40_000)
    assert (noise**4).mean() / (noise**2).mean() ** 2 == pytest.approx(3, abs=0.15)


def test_laplace_noise_has_its_scale() -> None:
    noise = add_laplace(clip(torch.zeros(2, 40_000), 2.0, 1), 0.7, generators(1, 2)).double()
    assert noise.abs().mean(dim=1).numpy() == pytest.approx(1.4, rel=5 / math.sqrt(40_000))
    assert (noise**4).mean() / (noise**2).mean() ** 2 == pytest.approx(6, abs=0.8)


def test_noise_is_added_to_the_values_and_zero_noise_changes_nothing() -> None:
    clipped = clip(torch.randn(2, 50, generator=torch.Generator().manual_seed(1)), 1.0)
    assert torch.equal(add_gaussian(clipped, 0.0, generators(0, 1)), clipped.values)
    noisy, alone = (add_gaussian(c, 1.0, generators(0, 1)) for c in (clipped, clip(torch.zeros(2, 50), 1.0)))
    assert torch.allclose(noisy - clipped.values, alone, atol=1e-6)


def test_shares_add_up() -> None:
    clients = 25
    share = noise_share(2.0, clients)
    noisy = add_gaussian(clip(torch.zeros(clients, 20_000), 1.0), share, generators(*range(clients)))
    assert float(noisy.sum(dim=0).std()) == pytest.approx(2.0, rel=5 / math.sqrt(2 * 20_000))
    with pytest.raises(PrivacyError, match="at least one"):
        noise_share(1.0, 0)


def test_only_rows_clipped_in_the_right_norm_take_noise() -> None:
    updates = torch.ones(2, 3)
    with pytest.raises(PrivacyError, match="L2"):
        add_gaussian(clip(updates, 1.0, 1), 1.0, generators(0, 1))
    with pytest.raises(PrivacyError, match="L1"):
        add_laplace(clip(updates, 1.0, 2), 1.0, generators(0, 1))
    with pytest.raises(PrivacyError, match="clip"):
        add_gaussian(updates, 1.0, generators(0, 1))  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="generators"):
        add_gaussian(clip(updates, 1.0), 1.0, generators(0))
    with pytest.raises(PrivacyError, match="its own"):
        add_gaussian(clip(updates, 1.0), 1.0, generators(0) * 2)  # one generator twice
    with pytest.raises(PrivacyError, match="noise_multiplier"):
        add_gaussian(clip(updates, 1.0), math.nan, generators(0, 1))


# --- rows do not know of each other ---------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "clip": lambda u, seeds: clip(u, 1.0).values,
    "clip in L1": lambda u, seeds: clip(u, 1.0, 1).values,
    "gaussian": lambda u, seeds: add_gaussian(clip(u, 1.0), 0.8, generators(*seeds)),
    "laplace": lambda u, seeds: add_laplace(clip(u, 1.0, 1), 0.8, generators(*seeds)),
    "prune": lambda u, seeds: prune(u, 0.3),
    "quantise": lambda u, seeds: quantise(u, 3),
    "sign": lambda u, seeds: sign(u),
    "within": lambda u, seeds: within_norm(u, 33.0)[:, None],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_depends_on_nothing_but_itself(name: str) -> None:
    operation = OPERATIONS[name]
    updates = torch.randn(6, 1003, generator=torch.Generator().manual_seed(3))
    together = operation(updates, list(range(6)))
    for k in range(6):
        assert torch.equal(operation(updates[k : k + 1], [k])[0], together[k])
    order = [4, 0, 5]
    assert torch.equal(operation(updates[order], order), together[order])
    strided = torch.randn(1003, 12, generator=torch.Generator().manual_seed(4)).T[::2]
    assert torch.equal(operation(strided, list(range(6))), operation(strided.contiguous(), list(range(6))))


# --- adaptive clipping ----------------------------------------------------------------------------------------------


def test_the_clipping_norm_follows_the_quantile() -> None:
    adaptive = AdaptiveClipping(quantile=0.5, learning_rate=0.2)
    assert next_clipping_norm(2.0, 0.5, adaptive) == 2.0
    assert next_clipping_norm(2.0, 1.0, adaptive) == pytest.approx(2.0 * math.exp(-0.1))
    assert next_clipping_norm(2.0, 0.0, adaptive) == pytest.approx(2.0 * math.exp(0.1))
    true = np.random.default_rng(0).lognormal(1.0, 0.5, 2000)
    norm = 0.1
    for _ in range(300):
        norm = next_clipping_norm(norm, float((true <= norm).mean()), adaptive)
    assert norm == pytest.approx(np.median(true), rel=0.02)


@pytest.mark.parametrize("fraction", [math.nan, -math.inf, math.inf, -1e9, 1e9])
def test_a_clipping_norm_that_runs_away_is_an_error(fraction: float) -> None:
    with pytest.raises(PrivacyError, match="bit_noise"):
        next_clipping_norm(1e300, fraction, AdaptiveClipping())


def test_bits_say_what_clip_would_do() -> None:
    updates = torch.tensor([[3.0, 4.0], [0.3, 0.4], [math.nan, 0.0], [5.0, 0.0]])
    assert within_norm(updates, 5.0).tolist() == [1, 1, 1, 1]
    assert within_norm(updates, 1.0).tolist() == [0, 1, 1, 0]


def test_noise_on_update_and_bit_combine() -> None:
    assert effective_noise_multiplier((1.0, 2.0)) == 2.0
    assert effective_noise_multiplier((2.0, 2.0), (1.0, 1.0)) == pytest.approx(1 / math.sqrt(2))
    assert effective_noise_multiplier((1.0, 3.0), (1.0, 4.0)) == pytest.approx(12 / 5)
    assert effective_noise_multiplier((1.0, 0.0), (1.0, 4.0)) == 0.0


# --- compression ----------------------------------------------------------------------------------------------------


def test_prune_keeps_the_largest() -> None:
    updates = torch.tensor([[1.0, -5.0, 2.0, 0.5], [1.0, 1.0, -1.0, 1.0]])
    assert prune(updates, 0.5).tolist() == [[0, -5, 2, 0], [1, 1, 0, 0]]
    assert prune(updates, 0.01).tolist() == [[0, -5, 0, 0], [1, 0, 0, 0]]
    assert torch.equal(prune(updates, 1.0), updates)


def test_quantise_has_so_many_levels_and_is_near() -> None:
    updates = torch.randn(3, 500, generator=torch.Generator().manual_seed(5))
    for bits in (1, 3, 8):
        rounded = quantise(updates, bits)
        assert all(len(row.unique()) <= 2**bits for row in rounded)
        step = (updates.max(dim=1).values - updates.min(dim=1).values) / (2**bits - 1)
        assert ((rounded - updates).abs() <= step[:, None] / 2 + 1e-6).all()
        assert torch.equal(rounded.max(dim=1).values, updates.max(dim=1).values)
    assert torch.equal(quantise(torch.full((1, 4), 0.3), 2), torch.full((1, 4), 0.3))


def test_sign_is_one_bit_with_the_mean_magnitude() -> None:
    assert sign(torch.tensor([[1.0, -3.0, 0.0, 4.0]])).tolist() == [[2, -2, 2, 2]]


def test_compression_leaves_a_broken_row_visible_and_the_others_alone() -> None:
    updates = torch.tensor([[1.0, math.inf, 2.0], [1.0, -2.0, 3.0]])
    for function in (lambda u: prune(u, 0.5), lambda u: quantise(u, 2), sign):
        result = function(updates)
        assert result[0].isnan().all()
        assert torch.equal(result[1:], function(updates[1:]))


def test_an_update_is_a_matrix() -> None:
    with pytest.raises(PrivacyError, match="shape"):
        clip(torch.ones(3), 1.0)
    assert isinstance(clip(torch.zeros(0, 3), 1.0), Clipped)
