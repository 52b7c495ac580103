# SPDX-License-Identifier: Apache-2.0
"""Broken training: what goes wrong between a gradient and its noise. A record stands for an example's gradient."""

from __future__ import annotations

import numpy as np

from fedsim.audit.blackbox.pairs import Domain
from fedsim.audit.verdict import Claim
from fedsim.audit.zoo import CLAIM, SIGMA, Floats, Output, Rng, axis, clipped, specimen, with_and_without
from fedsim.privacy.gaussian import gaussian_sigma

_D = 4
_ZEROS = np.zeros((9, _D))
_FAR = with_and_without(axis(_D, 100.0), _ZEROS)

_OUTVOTED = with_and_without(axis(_D, 1e4), np.tile(-axis(_D, 10.0), (9, 1)))


def _sum(x: Floats, rng: Rng, n: int, sigma: float = SIGMA, norm: float = 1.0) -> Output:
    return clipped(x, norm).sum(0) + rng.normal(0, sigma * norm, (n, x.shape[1]))


def _noise_by_batch_size(x: Floats, rng: Rng, n: int) -> Output:
    return clipped(x).sum(0) / 10 + rng.normal(0, SIGMA / 10 / 10, (n, _D))


def _noise_by_batch_size_right(x: Floats, rng: Rng, n: int) -> Output:
    return clipped(x).sum(0) / 10 + rng.normal(0, SIGMA / 10, (n, _D))


def _clip_batch(x: Floats, rng: Rng, n: int) -> Output:
    mean = clipped(x.sum(0, keepdims=True) / 10)[0]
    return mean + rng.normal(0, SIGMA / 10, (n, _D))


def _forgotten_bias(x: Floats, rng: Rng, n: int) -> Output:
    noisy = _sum(x[:, :-1], rng, n)
    return np.column_stack([noisy, np.full(n, x[:, -1].sum())])


def _forgotten_embedding(x: Floats, rng: Rng, n: int) -> Output:
    """Noise only where the sparse gradient is not zero, so that the rows that were touched are seen."""
    total = clipped(x).sum(0)
    return total + (total != 0) * rng.normal(0, SIGMA, (n, _D))


_ROUNDS = 5
_WEIGHTS = np.array([1.0, -1.0, 1.0, -1.0, 0.5])  # how the gradient of the same record changes from round to round


def _noise_once(x: Floats, rng: Rng, n: int) -> Output:
    noise = rng.normal(0, SIGMA * np.sqrt(_ROUNDS), (n, 1, _D))
    return _WEIGHTS[:, None] * clipped(x).sum(0) + np.repeat(noise, _ROUNDS, axis=1)


def _noise_every_round(x: Floats, rng: Rng, n: int) -> Output:
    return _WEIGHTS[:, None] * clipped(x).sum(0) + rng.normal(0, SIGMA * np.sqrt(_ROUNDS), (n, _ROUNDS, _D))


def _reused_seed(x: Floats, rng: Rng, n: int) -> Output:
    return np.repeat(_sum(x, np.random.default_rng(42), 1), n, axis=0)


def _infinity_norm(x: Floats, rng: Rng, n: int) -> Output:
    return np.clip(x, -1, 1).sum(0) + rng.normal(0, SIGMA, (n, x.shape[1]))


def _layers(x: Floats, rng: Rng, n: int, sigma: float) -> Output:
    parts = [clipped(layer) for layer in np.split(x, 16, axis=1)]
    return np.concatenate(parts, axis=1).sum(0) + rng.normal(0, sigma, (n, x.shape[1]))


def _unscaled_noise(x: Floats, rng: Rng, n: int) -> Output:
    return clipped(x, 5.0).sum(0) + rng.normal(0, SIGMA, (n, _D))


def _unscaled_noise_right(x: Floats, rng: Rng, n: int) -> Output:
    return _sum(x, rng, n, norm=5.0)


def _adaptive_norm(x: Floats, rng: Rng, n: int) -> Output:
    """The clipping norm is the largest norm of the batch, and is published with the model."""
    norm = float(np.linalg.norm(x, axis=1).max(initial=0.1))
    return np.column_stack([_sum(x, rng, n, norm=norm), np.full(n, norm)])


def _public_norm(x: Floats, rng: Rng, n: int) -> Output:
    return np.column_stack([_sum(x, rng, n), np.ones(n)])


def _loss_released(x: Floats, rng: Rng, n: int) -> Output:
    loss = float((clipped(x) ** 2).sum()) / 10
    return np.column_stack([_sum(x, rng, n), np.full(n, loss)])


def _loss_noised(x: Floats, rng: Rng, n: int) -> Output:
    """Each half of the release has its own half of the budget; the loss of an example is at most 1."""
    sigma = SIGMA * np.sqrt(2)
    loss = float((clipped(x) ** 2).sum())
    return np.column_stack([_sum(x, rng, n, sigma), loss + rng.normal(0, sigma, n)])


def _private_size(x: Floats, rng: Rng, n: int) -> Output:
    count = max(len(x), 1)
    return clipped(x).sum(0) / count + rng.normal(0, SIGMA / count, (n, _D))


def _steps_until_small(x: Floats, rng: Rng, n: int) -> Output:
    """It trains until the true gradient is small, and the number of steps is in the log."""
    steps = 1 + int(np.linalg.norm(clipped(x).sum(0)) // 0.5)
    return np.column_stack([_sum(x, rng, n, SIGMA), np.full(n, steps)])


def _steps_fixed(x: Floats, rng: Rng, n: int) -> Output:
    return np.column_stack([_sum(x, rng, n, SIGMA), np.full(n, 3)])


_BOTH = Claim(1.0, 1e-5, adjacency="replace")
_REPLACED = [(np.concatenate([_ZEROS, axis(_D)[None]]), np.concatenate([_ZEROS, -axis(_D)[None]]))]

TRAINING = (
    specimen(
        "noise by batch size",
        "The sum is divided by the batch size before the noise is added, and the noise is divided by it twice.",
        _noise_by_batch_size, _noise_by_batch_size_right, pairs=[_FAR],
    ),
    specimen(
        "clipped batch",
        "The mean gradient of the batch is clipped, not each example's, so one example can turn all of it.",
        _clip_batch, _noise_by_batch_size_right, pairs=[_OUTVOTED],
    ),
    specimen(
        "forgotten bias",
        "The hook that clips and noises is registered for weights; the bias is a parameter too.",
        _forgotten_bias, _sum, pairs=[with_and_without(axis(_D, 1.0, _D - 1), _ZEROS)],
    ),
    specimen(
        "forgotten embedding",
        "Noise is added to the rows of the embedding that have a gradient: which rows those are is in the update.",
        _forgotten_embedding, _sum, pairs=[_FAR],
    ),
    specimen(
        "noise once",
        "The noise is drawn when the optimiser is made, and every step adds the same tensor.",
        _noise_once, _noise_every_round, pairs=[_FAR],
    ),
    specimen(
        "reused seed",
        "A seed was set for reproducibility, inside the function.",
        _reused_seed, _sum, pairs=[_FAR],
    ),
    specimen(
        "infinity norm",
        "Gradients are clamped value by value; the accountant is told the L2 norm.",
        _infinity_norm, _sum, like=np.zeros((10, 25)), domain=Domain(-10, 10),
    ),
    specimen(
        "layers clipped apart",
        "Each of 16 layers is clipped to C, and the noise is calibrated to C instead of 4C.",
        lambda x, rng, n: _layers(x, rng, n, SIGMA), lambda x, rng, n: _layers(x, rng, n, 4 * SIGMA),
        pairs=[with_and_without(np.full(32, 10.0), np.zeros((9, 32)))],
    ),
    specimen(
        "noise without the norm",
        "The noise multiplier was taken for the standard deviation, and the clipping norm is 5.",
        _unscaled_noise, _unscaled_noise_right, pairs=[_FAR],
    ),
    specimen(
        "clipping norm from the data",
        "The clipping norm is the largest norm of the batch, and it is published.",
        _adaptive_norm, _public_norm, pairs=[_FAR],
    ),
    specimen(
        "loss in the clear",
        "The model is private, the training loss in the log is not.",
        _loss_released, _loss_noised, pairs=[_FAR],
    ),
    specimen(
        "private batch size",
        "Sum and noise are divided by the number of records, which is itself private.",
        _private_size, _noise_by_batch_size_right, like=np.zeros((3, _D)),
    ),
    specimen(
        "steps from the data",
        "Training stops when the true gradient is small; the number of steps is logged.",
        _steps_until_small, _steps_fixed, pairs=[_FAR],
    ),
    specimen(
        "adjacency mistaken",
        "Noise for a record that comes or goes; the claim is for a record that is replaced.",
        _sum, lambda x, rng, n: _sum(x, rng, n, 2 * SIGMA), _BOTH, _REPLACED, trials=400_000,
    ),
    specimen(
        "noise per client",
        "Ten clients add the whole noise between them, but each was given 1/10 of it and not 1/√10.",
        lambda x, rng, n: _sum(x, rng, n, SIGMA / np.sqrt(10)), _sum, CLAIM, [_FAR],
    ),
    specimen(
        "composition forgotten",
        "Noise is calibrated to one round, and five are released.",
        lambda x, rng, n: np.stack([_sum(x, rng, n) for _ in range(5)], axis=1),
        lambda x, rng, n: np.stack([_sum(x, rng, n, gaussian_sigma(1.0, 1e-5) * np.sqrt(5)) for _ in range(5)], axis=1),
        pairs=[_FAR], trials=400_000,
    ),
)  # fmt: skip
