# SPDX-License-Identifier: Apache-2.0
"""Broken accounting: the code does what it says, and the sum of its epsilons is wrong."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from fedsim.audit.verdict import Claim
from fedsim.audit.zoo import CLAIM, PURE, SIGMA, Floats, Output, Rng, specimen, with_and_without
from fedsim.privacy.accounting import Mechanism, epsilon
from fedsim.privacy.gaussian import gaussian_sigma

_ONE = with_and_without(np.ones(1), np.zeros((9, 1)))
_LEAK = 1e-3


def _leaky(x: Floats, rng: Rng, n: int, chance: float) -> Output:
    """20 releases, each of which shows the sum with some probability and nothing at all otherwise."""
    return np.where(rng.random((n, 20)) < chance, x.sum(), -1.0)


def _classic(x: Floats, rng: Rng, n: int, sigma: float) -> Output:
    return x.sum() + rng.normal(0, sigma, n)


_CLASSIC = Claim(7.0, 0.2)
_CLASSIC_SIGMA = math.sqrt(2 * math.log(1.25 / _CLASSIC.delta)) / _CLASSIC.epsilon

_STEPS = 10
_SHUFFLE_SIGMA = 1.0


@cache
def poisson_claim() -> Claim:
    """What an accountant says of ten steps at rate 1/10."""
    release = Mechanism("gaussian", _SHUFFLE_SIGMA, "add/remove", "poisson", 1 / _STEPS)
    return Claim(epsilon(release, _STEPS, 1e-3), 1e-3)


def _shuffled(x: Floats, rng: Rng, n: int) -> Output:
    """Batches of one record each, in random order; the sum of the batch is noised. A missing record is a 0."""
    records = np.zeros(_STEPS)
    records[: len(x)] = x[:, 0]
    order = rng.permuted(np.tile(records, (n, 1)), axis=1)
    return order + rng.normal(0, _SHUFFLE_SIGMA, (n, _STEPS))


def _poisson(x: Floats, rng: Rng, n: int) -> Output:
    taken = rng.random((n, _STEPS, len(x))) < 1 / _STEPS
    return taken @ x[:, 0] + rng.normal(0, _SHUFFLE_SIGMA, (n, _STEPS))


_RATE = 0.1
_AMPLIFIED = Claim(math.log1p(_RATE * math.expm1(1.0)))


def _sampled(x: Floats, rng: Rng, n: int, secret: bool) -> Output:
    """One Laplace release of a sample of a tenth: the first tenth of the file, or a secret one."""
    if secret:
        return (rng.random((n, len(x))) < _RATE) @ np.clip(x[:, 0], 0, 1) + rng.laplace(0, 1, n)
    return np.clip(x[::10, 0], 0, 1).sum() + rng.laplace(0, 1, n)


ACCOUNTING = (
    specimen(
        "deltas not added",
        "The epsilons of 20 releases are added, their deltas are not.",
        lambda x, rng, n: _leaky(x, rng, n, _LEAK), lambda x, rng, n: _leaky(x, rng, n, _LEAK / 20),
        Claim(1.0, _LEAK), [_ONE],
    ),
    specimen(
        "classic sigma beyond its range",
        "σ = √(2 ln(1.25/δ)) / ε is proved for ε ≤ 1 and used for ε = 7.",
        lambda x, rng, n: _classic(x, rng, n, _CLASSIC_SIGMA),
        lambda x, rng, n: _classic(x, rng, n, gaussian_sigma(7.0, 0.2)), _CLASSIC, [_ONE], trials=800_000,
    ),
    specimen(
        "shuffled, accounted as Poisson",
        "The loader shuffles and cuts into batches; the accountant assumes that every example joins independently.",
        _shuffled, _poisson, poisson_claim(), [with_and_without(np.ones(1), -np.ones((9, 1)))], trials=400_000,
    ),
    specimen(
        "amplified by no sampling",
        "The claim is amplified by the sampling rate, but who is in the sample is known: it is the top of the file.",
        lambda x, rng, n: _sampled(x, rng, n, False), lambda x, rng, n: _sampled(x, rng, n, True), _AMPLIFIED,
        [(np.ones((10, 1)), np.concatenate([np.zeros((1, 1)), np.ones((9, 1))]))],
    ),
    specimen(
        "epsilon of one release for two",
        "A sum and a count of the same records are released, each with all of ε.",
        lambda x, rng, n: np.column_stack([x.sum() + rng.laplace(0, 1, n), len(x) + rng.laplace(0, 1, n)]),
        lambda x, rng, n: np.column_stack([x.sum() + rng.laplace(0, 2, n), len(x) + rng.laplace(0, 2, n)]),
        PURE, [_ONE],
    ),
    specimen(
        "variance for deviation",
        "The noise generator takes a variance and is given a standard deviation.",
        lambda x, rng, n: _classic(x, rng, n, math.sqrt(SIGMA)), lambda x, rng, n: _classic(x, rng, n, SIGMA),
        CLAIM, [_ONE],
    ),
)  # fmt: skip
