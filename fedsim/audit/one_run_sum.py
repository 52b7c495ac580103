# SPDX-License-Identifier: Apache-2.0
"""Auditing a noisy sum in one run (IIT Madras DA5001/6400, homework 3, questions 2.1 to 2.3).

The mechanism releases θ = Σ_{i: b_i = 1} x_i + σ·N(0, I_d). The m canaries x_i are uniform on the unit sphere and each
is included by a fair coin b_i; the score of a canary is ⟨x_i, θ⟩. The auditor guesses "in" for the k largest scores and
"out" for the k smallest, and v of the r = 2k guesses are right. Under ε-DP, P[right ≥ v] ≤ P[Bin(r, e^ε/(1 + e^ε)) ≥ v]
(Steinke, Nasr, Jagielski 2023), so whatever ε makes this at most 0.05 is refuted.

Every outcome has four numbers, because what the homework asks for is no bound:

| field      | k                 | holds for        | is a lower bound at 95% |
|------------|-------------------|------------------|-------------------------|
| asked      | best of all       | ε-DP, δ ignored  | no: k was chosen by looking |
| corrected  | best of all       | ε-DP, δ ignored  | for pure ε-DP (Bonferroni over all k) |
| registered | m/10, beforehand  | ε-DP, δ ignored  | for pure ε-DP |
| valid      | m/10, beforehand  | (ε, δ)-DP        | yes (tier A) |

The Gaussian mechanism is ε-DP for no ε, so only `valid` can be held against a claim.

Speed: a score needs the inner products of the canaries only. For d ≥ m these are the rows of Bartlett's triangular
factor (1933) of a Wishart matrix: L_ij ~ N(0, 1) below the diagonal, L_ii² ~ χ²(d − i); exact in law, O(m²) for any d.
For d < m the canaries are drawn twice, block by block, in place of being kept.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, logit

from fedsim.audit.estimators import epsilon_one_run
from fedsim.errors import AuditError
from fedsim.privacy import gaussian_epsilon
from fedsim.randomness import stream

Question = Literal["Q2.1", "Q2.2", "Q2.3"]
Numbers = NDArray[np.float64]
EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)
CANARIES = (2**6, 2**8, 2**10, 2**12, 2**14)
DIMENSIONS = (10, 10**2, 10**3, 10**4, 10**5)
MOST_GUESSES = 500  # of each kind, as the homework says
ERROR = 0.05
_BLOCK = 1 << 10  # canaries that are drawn at a time where they are not kept
_KEPT = 1 << 22  # numbers of canaries that are kept


@dataclass(frozen=True)
class Outcome:
    """One audit of one noisy sum."""

    question: Question
    epsilon: float
    """The ε that σ is calibrated to by the classic formula, as the homework asks."""
    true_epsilon: float
    """The ε that the mechanism has at δ with this σ: below it up to about 8, above it beyond."""
    delta: float
    canaries: int
    dimension: int
    seed: int
    asked: float
    asked_guesses: int
    """The k that gave `asked`."""
    corrected: float
    registered: float
    valid: float

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON and for a table."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Setting:
    """What an outcome depends on beside the seed; all epsilons are tried on the same canaries and the same noise."""

    question: Question
    epsilons: tuple[float, ...]
    canaries: int
    dimension: int


QUESTIONS: dict[Question, tuple[Setting, ...]] = {
    "Q2.1": (Setting("Q2.1", EPSILONS, 1000, 10**4),),
    "Q2.2": tuple(Setting("Q2.2", (16.0,), m, 10**4) for m in CANARIES),
    "Q2.3": tuple(Setting("Q2.3", (16.0,), 1000, d) for d in DIMENSIONS),
}


def classic_sigma(epsilon: float, delta: float) -> float:
    """σ = √(2 ln(1.25/δ))/ε, for every ε: beyond about 8 it does not give (ε, δ)-DP, which `true_epsilon` tells."""
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def play_questions(
    questions: Iterable[Question] = tuple(QUESTIONS),
    *,
    repeats: int = 20,
    delta: float = 1e-6,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """All outcomes of these questions, by question, setting and seed; large settings are repeated less often.

    `progress(done, of)` is called after every audit.
    """
    if repeats < 1:
        raise AuditError(f"repeats is {repeats}; it must be at least 1")
    work = [(s, seed + i) for q in questions for s in QUESTIONS[q] for i in range(repeats_of(s, repeats))]
    found: list[Outcome] = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for outcomes in pool.map(lambda each: play(each[0], delta=delta, seed=each[1]), work):
            found += outcomes
            if progress is not None:
                progress(len(found), sum(len(setting.epsilons) for setting, _ in work))
    return found


def repeats_of(setting: Setting, repeats: int) -> int:
    """As many as asked for; of settings with more than 2048 canaries fewer, by their cost, but at least 2."""
    return max(min(2, repeats), min(repeats, repeats * 2**22 // setting.canaries**2))


def play(setting: Setting, *, delta: float = 1e-6, seed: int = 0) -> list[Outcome]:
    """One audit for each of the epsilons of a setting."""
    included = stream(seed, "one-run-sum coins", setting.canaries, setting.dimension).random(setting.canaries) < 0.5
    signal, noise = signal_and_noise(included, setting.dimension, seed)
    return [
        _outcome(setting, epsilon, delta, seed, included, signal + classic_sigma(epsilon, delta) * noise)
        for epsilon in setting.epsilons
    ]


def _outcome(
    setting: Setting, epsilon: float, delta: float, seed: int, included: NDArray[np.bool_], scores: Numbers
) -> Outcome:
    right = correct_guesses(scores, included)
    asked = bound(right, ERROR)
    fixed = max(1, min(setting.canaries // 10, MOST_GUESSES))
    fixed_right = int(correct_guesses(scores, included, fixed)[-1])
    valid = epsilon_one_run(fixed_right, 2 * fixed, setting.canaries, delta, 1 - ERROR)
    return Outcome(
        setting.question,
        epsilon,
        gaussian_epsilon(classic_sigma(epsilon, delta), delta),
        delta,
        setting.canaries,
        setting.dimension,
        seed,
        float(asked.max()),
        int(asked.argmax()) + 1,
        float(bound(right, ERROR / len(right)).max()),
        float(bound(np.array([fixed_right]), ERROR, np.array([2 * fixed]))[0]),
        valid.lower,
    )


def correct_guesses(scores: Numbers, included: NDArray[np.bool_], most: int = 0) -> NDArray[np.int64]:
    """For k = 1, 2, ...: how many of the k largest scores are of included canaries, and of the k smallest of others."""
    most = most or min(len(scores) // 2, MOST_GUESSES)
    order = np.argsort(scores, kind="stable")
    highest, lowest = included[order[::-1][:most]], ~included[order[:most]]
    return np.cumsum(highest.astype(np.int64) + lowest)


def bound(right: NDArray[np.int64], error: float, guesses: NDArray[np.int64] | None = None) -> Numbers:
    """max{ε ≥ 0: P[Bin(r, e^ε/(1 + e^ε)) ≥ v] ≤ error}, the homework's equation (1), for r = 2, 4, 6, ... guesses.

    The probability is that of a beta distribution, so that ε = logit(Beta⁻¹(error; v, r − v + 1)).
    """
    of = 2 * np.arange(1, len(right) + 1) if guesses is None else guesses
    probabilities = np.where(right > 0, betaincinv(np.maximum(right, 1), of - right + 1, error), 0.5)
    return np.maximum(logit(np.maximum(probabilities, 0.5)), 0.0)


# --- the scores -----------------------------------------------------------------------------------------------------


def signal_and_noise(included: NDArray[np.bool_], dimension: int, seed: int) -> tuple[Numbers, Numbers]:
    """(m,) each: ⟨x_i, Σ_{j in} x_j⟩, and ⟨x_i, z⟩ with z ~ N(0, I_d)."""
    count = len(included)
    rng = stream(seed, "one-run-sum canaries", count, dimension)
    directions = np.stack([included.astype(np.float32), np.zeros(count, np.float32)])
    if dimension >= count:
        factor = bartlett_factor(count, dimension, rng)
        seen = directions @ factor
        seen[1] = rng.standard_normal(count, dtype=np.float32)
        scores = factor @ seen.T
    elif count * dimension <= _KEPT:
        x = _on_the_sphere(count, dimension, rng)
        seen = directions @ x
        seen[1] = rng.standard_normal(dimension, dtype=np.float32)
        scores = x @ seen.T
    else:
        scores = _in_blocks(directions, dimension, seed)
    return scores[:, 0].astype(np.float64), scores[:, 1].astype(np.float64)


def bartlett_factor(count: int, dimension: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """(m, m): unit rows with the inner products of m ≤ d uniform points on the sphere of R^d, exact in law.

    The rows are the canaries in an orthonormal basis of their own span, in which the noise is N(0, I_m) again.
    """
    factor = np.tril(rng.standard_normal((count, count), dtype=np.float32), -1)
    np.fill_diagonal(factor, np.sqrt(rng.chisquare(dimension - np.arange(count))))
    factor /= np.linalg.norm(factor, axis=1, keepdims=True)
    return factor


def _on_the_sphere(count: int, dimension: int, rng: np.random.Generator) -> NDArray[np.float32]:
    x = rng.standard_normal((count, dimension), dtype=np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x


def _in_blocks(directions: NDArray[np.float32], dimension: int, seed: int) -> NDArray[np.float32]:
    """The scores of canaries that are drawn twice: first to add them up, then to compare them with the sum."""
    count = directions.shape[1]
    blocks = [slice(first, min(first + _BLOCK, count)) for first in range(0, count, _BLOCK)]

    def canaries(number: int) -> NDArray[np.float32]:
        rng = stream(seed, "one-run-sum block", count, dimension, number)
        return _on_the_sphere(blocks[number].stop - blocks[number].start, dimension, rng)

    seen = np.zeros((2, dimension), np.float32)
    for number, block in enumerate(blocks):
        seen += directions[:, block] @ canaries(number)
    seen[1] = stream(seed, "one-run-sum noise", count, dimension).standard_normal(dimension, dtype=np.float32)
    return np.concatenate([canaries(number) @ seen.T for number in range(len(blocks))])


# --- as tables ------------------------------------------------------------------------------------------------------

VARIED: dict[Question, str] = {"Q2.1": "epsilon", "Q2.2": "canaries", "Q2.3": "dimension"}
MEASURED = ("asked", "corrected", "registered", "valid")


def summarise(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row for each question and value of what it varies: mean and standard deviation of each number, for plots."""
    groups: dict[tuple[Question, float], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.question, getattr(outcome, VARIED[outcome.question])), []).append(outcome)
    rows = []
    for (question, value), group in groups.items():
        row: dict[str, Any] = {
            "question": question,
            "varied": VARIED[question],
            "value": value,
            "repeats": len(group),
            "epsilon": group[0].epsilon,
            "true_epsilon": group[0].true_epsilon,
            "delta": group[0].delta,
        }
        for name in MEASURED:
            numbers = np.array([getattr(outcome, name) for outcome in group])
            row |= {name: float(numbers.mean()), f"{name}_sd": float(numbers.std(ddof=min(1, len(numbers) - 1)))}
        rows.append(row)
    return rows
