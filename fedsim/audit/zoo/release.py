# SPDX-License-Identifier: Apache-2.0
"""Broken releases: sums, counts, choices and thresholds."""

from __future__ import annotations

import numpy as np

from fedsim.audit.verdict import Claim
from fedsim.audit.zoo import CLAIM, PURE, SIGMA, Floats, Output, Rng, axis, specimen, with_and_without

_COUNT = with_and_without(np.ones(1), np.ones((9, 1)))
_TENTHS = with_and_without(np.array([0.1]), np.full((9, 1), 0.1))


def _total(x: Floats) -> float:
    return float(np.clip(x, 0, 1).sum())


def _laplace_sum(x: Floats, rng: Rng, n: int) -> Output:
    return _total(x) + rng.laplace(0, 1.0, n)


def _float32_noise(x: Floats, rng: Rng, n: int) -> Output:
    return _total(x) + rng.normal(0, SIGMA, n).astype(np.float32).astype(np.float64)


def _gaussian_sum(x: Floats, rng: Rng, n: int) -> Output:
    return _total(x) + rng.normal(0, SIGMA, n)


def _l1_ball(x: Floats) -> Output:
    return np.asarray(x / np.maximum(1.0, np.abs(x).sum(1, keepdims=True))).sum(0)


def _laplace_l2(x: Floats, rng: Rng, n: int) -> Output:
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return np.asarray(x / np.maximum(1.0, norms)).sum(0) + rng.laplace(0, 1.0, (n, x.shape[1]))


def _laplace_l1(x: Floats, rng: Rng, n: int) -> Output:
    return _l1_ball(x) + rng.laplace(0, 1.0, (n, x.shape[1]))


def _uniform(x: Floats, rng: Rng, n: int) -> Output:
    return _total(x) + rng.uniform(-5, 5, n)


def _until_plausible(x: Floats, rng: Rng, n: int) -> Output:
    """Noise is drawn again until the answer is not negative and not above the true number of records."""
    answers = _laplace_sum(x, rng, n)
    while (wrong := (answers < 0) | (answers > len(x))).any():
        answers[wrong] = _laplace_sum(x, rng, int(wrong.sum()))
    return answers


def _clamped(x: Floats, rng: Rng, n: int) -> Output:
    return np.clip(_laplace_sum(x, rng, n), 0, 100)


_QUERIES = np.array([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]])  # the same four queries on two neighbours


def _sparse_vector(x: Floats, rng: Rng, n: int, query_noise: float) -> Output:
    """Which of four queries are above a noisy threshold; after the first one it stops, if the queries are noised."""
    threshold = 0.5 + rng.laplace(0, 2.0, (n, 1))
    above = _QUERIES[int(x[0, 0])] + rng.laplace(0, max(query_noise, 1e-300), (n, 4)) > threshold
    if query_noise == 0:
        return above.astype(np.float64)
    first = np.where(above.any(1), above.argmax(1), 4)
    return (np.arange(4) == first[:, None]).astype(np.float64)


def _sparse_vector_broken(x: Floats, rng: Rng, n: int) -> Output:
    threshold = 0.5 + rng.laplace(0, 2.0, (n, 1))
    return (_QUERIES[int(x[0, 0])] > threshold).astype(np.float64)


def _exponential(x: Floats, rng: Rng, n: int, factor: float) -> list[str]:
    """One of three candidates with probability ∝ exp(factor · utility); a record moves every utility by 1."""
    utility = np.array([0.0, 0.0, 0.0]) + (np.array([1.0, -1.0, -1.0]) if x[0, 0] else np.array([0.0, 0.0, 0.0]))
    weights = np.exp(factor * utility)
    return [("red", "green", "blue")[place] for place in rng.choice(3, n, p=weights / weights.sum())]


def _randomised_response(x: Floats, rng: Rng, n: int, truth: float) -> Output:
    lie = (int(x[0, 0]) + rng.integers(1, 10, n)) % 10
    return np.where(rng.random(n) < truth, int(x[0, 0]), lie)


_TELLING = float(np.e / (np.e + 9))  # of ten answers


def _exact_winner(x: Floats, rng: Rng, n: int) -> list[tuple[int, float]]:
    """Noisy max, and then the true count of the winner."""
    counts = x.sum(0)
    winners = (counts + rng.laplace(0, 2.0, (n, x.shape[1]))).argmax(1)
    return [(int(winner), float(counts[winner])) for winner in winners]


def _noisy_winner(x: Floats, rng: Rng, n: int) -> list[tuple[int, float]]:
    counts = x.sum(0)
    winners = (counts + rng.laplace(0, 4.0, (n, x.shape[1]))).argmax(1)
    noise = rng.laplace(0, 2.0, n)
    return [(int(winner), float(counts[winner] + extra)) for winner, extra in zip(winners, noise, strict=True)]


def _names(x: Floats, rng: Rng, n: int, hidden: bool) -> list[list[str]]:
    """A histogram of words: without a threshold, a word that one person has is a name."""
    words = [("ann", "bob", "eve")[place] for place in range(3) if x[:, place].sum()]
    shown = rng.random((n, len(words))) < (1e-6 if hidden else 1.0)
    return [[word for word, seen in zip(words, row, strict=True) if seen] for row in shown.tolist()]


_ONE_HOT = with_and_without(axis(3), np.tile(axis(3, 1.0, 1), (3, 1)))
_SWITCH = (np.ones((1, 1)), np.zeros((1, 1)))

RELEASE = (
    specimen(
        "float32 noise",
        "Noise in float32 is added to a sum in float64: the digits below the noise's last are those of the data.",
        _float32_noise, _gaussian_sum, pairs=[_TENTHS],
    ),
    specimen(
        "Laplace with L2 sensitivity",
        "Records of 25 numbers are clipped in the L2 norm, and Laplace noise is calibrated to that.",
        _laplace_l2, _laplace_l1, PURE, [with_and_without(np.full(25, 0.2), np.zeros((9, 25)))],
    ),
    specimen(
        "uniform noise",
        "Bounded noise was found to be more accurate.",
        _uniform, _laplace_sum, PURE, [_COUNT],
    ),
    specimen(
        "drawn until plausible",
        "A noisy count is drawn again until it lies between 0 and the number of records.",
        _until_plausible, _clamped, PURE, [_COUNT],
    ),
    specimen(
        "sparse vector without query noise",
        "The threshold is noisy, the queries are not, and it never stops (Lyu, Su & Li 2017, Algorithm 5).",
        _sparse_vector_broken, lambda x, rng, n: _sparse_vector(x, rng, n, 4.0), PURE, [_SWITCH],
    ),
    specimen(
        "exponential mechanism without its 2",
        "exp(ε u / Δ) instead of exp(ε u / 2Δ), for a utility that may rise and fall.",
        lambda x, rng, n: _exponential(x, rng, n, 1.0), lambda x, rng, n: _exponential(x, rng, n, 0.5), PURE, [_SWITCH],
    ),
    specimen(
        "randomised response for two",
        "The truth is told with probability e^ε / (1 + e^ε), as for two answers, but there are ten.",
        lambda x, rng, n: _randomised_response(x, rng, n, float(np.e / (1 + np.e))),
        lambda x, rng, n: _randomised_response(x, rng, n, _TELLING), Claim(1.0, adjacency="replace"),
        [(np.full((1, 1), 3.0), np.full((1, 1), 7.0))],
    ),
    specimen(
        "the winner's true count",
        "The winner is chosen privately, and its count is published as it is.",
        _exact_winner, _noisy_winner, PURE, [_ONE_HOT],
    ),
    specimen(
        "names in a histogram",
        "Only words that occur are listed.",
        lambda x, rng, n: _names(x, rng, n, False), lambda x, rng, n: _names(x, rng, n, True), CLAIM, [_ONE_HOT],
    ),
)  # fmt: skip
