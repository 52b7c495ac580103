# SPDX-License-Identifier: Apache-2.0
"""Is a 95% lower bound above the truth in at most 5% of the audits? Every estimator against mechanisms of known ε.

`coverage(estimator, mechanism, audits, seed)` plays that many audits. Every estimator is held against its own truth:
those of tier A, and those that check their model, against ε at δ; those of the GDP model, which cannot check it,
against ε at δ of the least GDP curve that the mechanism keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

from fedsim.audit.calibration import known
from fedsim.audit.calibration.known import Known
from fedsim.audit.estimate import Corrected, Estimate, Fixed, HeldOut, Selection
from fedsim.audit.estimation.arguments import Floats
from fedsim.audit.estimators import (
    GDP,
    ApproximateDP,
    epsilon_bayesian,
    epsilon_clopper_pearson,
    epsilon_gaussian,
    epsilon_gdp,
    epsilon_one_run,
    epsilon_one_run_fdp,
    epsilon_per_step,
    one_shot_federated,
)
from fedsim.privacy.accounting import Mechanism, account
from fedsim.privacy.gaussian import gaussian_epsilon
from fedsim.privacy.loss import ROUGH

DELTA, CONFIDENCE = 1e-5, 0.95
_TRIALS, _CANARIES, _GUESSES = 1000, 1000, 200
_BLOCK = 100  # audits that are drawn at once
_THRESHOLDS = np.linspace(-0.75, 1.25, 9)  # around the fixed one: of which the best is taken
_Counted = Callable[[int, int, int, int, Selection], Estimate]


@dataclass(frozen=True)
class Coverage:
    """How many of so many audits claimed more than is true."""

    false_claims: int
    audits: int
    mean_lower: float
    truth: float
    estimator: str = ""
    mechanism: str = ""
    tier: str = ""

    @property
    def rate(self) -> float:
        """The share of the audits that made a false claim."""
        return self.false_claims / self.audits

    def acceptable(self, error: float = 1 - CONFIDENCE, luck: float = 1e-3) -> bool:
        """Whether a rate of `error` explains so many false claims, but for bad luck."""
        return bool(binom.sf(self.false_claims - 1, self.audits, error) > luck)


@dataclass(frozen=True)
class Auditor:
    """An estimator with a way to play it, and what it must not exceed."""

    name: str
    play: Callable[[Known, np.random.Generator, int], Iterator[Estimate]]
    gdp: bool = False
    """Whether it speaks of the GDP curve."""
    one_run: bool = False
    """Whether it stands canaries that depend on each other."""


def coverage(estimator: Auditor, mechanism: Known, audits: int, seed: int) -> Coverage:
    """Play `audits` independent audits of a mechanism, and count the lower bounds that lie above the truth."""
    rng = np.random.default_rng(seed)
    truth = mechanism.epsilon_gdp(DELTA) if estimator.gdp else mechanism.epsilon(DELTA)
    estimates = list(estimator.play(mechanism, rng, audits))
    return _counted(estimates, truth, estimator.name, mechanism.name)


def coverage_table(audits: int, seed: int) -> list[Coverage]:
    """Every estimator on every mechanism that it can be played on; tier A also on the correlated ones."""
    cells = [coverage(auditor, mechanism, audits, seed) for auditor in AUDITORS for mechanism in known.KNOWN]
    tied = [known.correlated(p) for p in (0.06, 0.3)]
    cells += [
        coverage(auditor, mechanism, audits, seed) for auditor in AUDITORS if auditor.one_run for mechanism in tied
    ]
    few = max(1, audits // 5)  # slower: each composes, or trains a federation of canaries
    return [*cells, *(per_step_coverage(few, seed, joined) for joined in (False, True)), one_shot_coverage(few, seed)]


def _counted(estimates: list[Estimate], truth: float, estimator: str, mechanism: str) -> Coverage:
    lower = np.array([estimate.lower for estimate in estimates])
    tier = estimates[0].tier
    return Coverage(int((lower > truth).sum()), len(lower), float(lower.mean()), truth, estimator, mechanism, tier)


# --- how they are played --------------------------------------------------------------------------------------------


def _pairs(mechanism: Known, rng: np.random.Generator, audits: int) -> Iterator[tuple[Floats, Floats]]:
    """Scores with and without the canary, _TRIALS of each."""
    for start in range(0, audits, _BLOCK):
        shape = min(_BLOCK, audits - start), _TRIALS
        yield from zip(
            mechanism.draw(rng, np.ones(shape, bool)), mechanism.draw(rng, np.zeros(shape, bool)), strict=True
        )


def _errors(x: Floats, y: Floats, threshold: float) -> tuple[int, int, int, int]:
    return int((y >= threshold).sum()), int((x < threshold).sum()), len(y), len(x)


def _fixed(estimate: _Counted) -> Callable[[Known, np.random.Generator, int], Iterator[Estimate]]:
    def play(mechanism: Known, rng: np.random.Generator, audits: int) -> Iterator[Estimate]:
        for x, y in _pairs(mechanism, rng, audits):
            yield estimate(*_errors(x, y, mechanism.threshold), Fixed())

    return play


def _corrected(estimate: _Counted) -> Callable[[Known, np.random.Generator, int], Iterator[Estimate]]:
    def play(mechanism: Known, rng: np.random.Generator, audits: int) -> Iterator[Estimate]:
        choice = Corrected(len(_THRESHOLDS))
        for x, y in _pairs(mechanism, rng, audits):
            several = [estimate(*_errors(x, y, mechanism.threshold + t), choice) for t in _THRESHOLDS]
            yield max(several, key=lambda one: one.lower)

    return play


def _held_out(estimate: _Counted) -> Callable[[Known, np.random.Generator, int], Iterator[Estimate]]:
    def play(mechanism: Known, rng: np.random.Generator, audits: int) -> Iterator[Estimate]:
        for x, y in _pairs(mechanism, rng, audits):
            seen = [
                (estimate(*_errors(x[::2], y[::2], t), HeldOut()).lower, t) for t in mechanism.threshold + _THRESHOLDS
            ]
            yield estimate(*_errors(x[1::2], y[1::2], float(max(seen)[1])), HeldOut())

    return play


def _scored(mechanism: Known, rng: np.random.Generator, audits: int) -> Iterator[Estimate]:
    for x, y in _pairs(mechanism, rng, audits):
        yield epsilon_gaussian(x, y, DELTA, CONFIDENCE)


def _one_run(
    estimate: Callable[[int, int, int], Estimate],
) -> Callable[[Known, np.random.Generator, int], Iterator[Estimate]]:
    """Half of the guesses say "in" of the highest scores, half "out" of the lowest; their number is fixed."""

    def play(mechanism: Known, rng: np.random.Generator, audits: int) -> Iterator[Estimate]:
        for start in range(0, audits, _BLOCK):
            inside = rng.random((min(_BLOCK, audits - start), _CANARIES)) < 0.5
            scores = mechanism.draw(rng, inside) + 1e-9 * rng.random(inside.shape)  # ties are broken by coins
            order = np.argsort(scores, axis=1)
            half = _GUESSES // 2
            out, into = (np.take_along_axis(inside, o, 1) for o in (order[:, :half], order[:, -half:]))
            for correct in (~out).sum(1) + into.sum(1):
                yield estimate(int(correct), _GUESSES, _CANARIES)

    return play


def _bayesian(fp: int, fn: int, negatives: int, positives: int, _: Selection) -> Estimate:
    return epsilon_bayesian(positives - fn, fp, negatives - fp, fn, DELTA, CONFIDENCE)


def _clopper_pearson(fp: int, fn: int, negatives: int, positives: int, how: Selection) -> Estimate:
    return epsilon_clopper_pearson(fp, fn, negatives, positives, DELTA, CONFIDENCE, selection=how)


def _gdp(fp: int, fn: int, negatives: int, positives: int, how: Selection) -> Estimate:
    return epsilon_gdp(fp, fn, negatives, positives, DELTA, CONFIDENCE, selection=how)


def _steinke(correct: int, guesses: int, canaries: int) -> Estimate:
    return epsilon_one_run(correct, guesses, canaries, DELTA, CONFIDENCE)


def _approximate(correct: int, guesses: int, canaries: int) -> Estimate:
    return epsilon_one_run_fdp(correct, guesses, canaries, DELTA, CONFIDENCE, family=ApproximateDP())


def _mahloujifar(correct: int, guesses: int, canaries: int) -> Estimate:
    return epsilon_one_run_fdp(correct, guesses, canaries, DELTA, CONFIDENCE, family=GDP(claimed=True))


AUDITORS = (
    Auditor("Clopper-Pearson, fixed threshold", _fixed(_clopper_pearson)),
    Auditor("Clopper-Pearson, held out", _held_out(_clopper_pearson)),
    Auditor("Clopper-Pearson, best of 9, corrected", _corrected(_clopper_pearson)),
    Auditor("Bayesian, fixed threshold", _fixed(_bayesian)),
    Auditor("one run, Steinke et al.", _one_run(_steinke), one_run=True),
    Auditor("one run, f-DP of (ε, δ)", _one_run(_approximate), one_run=True),
    Auditor("one run, f-DP of GDP, claimed", _one_run(_mahloujifar), gdp=True, one_run=True),
    Auditor("GDP, fixed threshold", _fixed(_gdp), gdp=True),
    Auditor("GDP, held out", _held_out(_gdp), gdp=True),
    Auditor("GDP, best of 9, corrected", _corrected(_gdp), gdp=True),
    Auditor("Gaussian fit", _scored),
)
"""All that can be played on any mechanism."""


# --- those that have a mechanism of their own -----------------------------------------------------------------------


def per_step_coverage(
    audits: int, seed: int, joined: bool, *, sigma: float = 2.0, observations: int = 2000
) -> Coverage:
    """Canaries in every one of 50 steps at rate 0.1; `joined`: whether the rate is tested on 20,000 chances."""
    rng, rate, steps = np.random.default_rng(seed), 0.1, 50
    # the truth on the same rough grid, so that only the statistics can lead to a false claim
    truth = account([(Mechanism("gaussian", sigma, "add/remove", "poisson", rate), steps)], DELTA, "pld", ROUGH).epsilon
    estimates = []
    for _ in range(audits):
        x, y = rng.normal(1, sigma, observations), rng.normal(0, sigma, observations)
        seen = (int(rng.binomial(20_000, rate)), 20_000) if joined else None
        estimates.append(epsilon_per_step(x, y, rate, steps, DELTA, CONFIDENCE, participations=seen, grid=ROUGH))
    name = "per step, rate tested" if joined else "per step, rate as claimed"
    return _counted(estimates, truth, name, f"{steps} subsampled Gaussian steps, σ = {sigma:g}, q = {rate:g}")


def one_shot_coverage(
    audits: int, seed: int, *, sigma: float = 1.0, canaries: int = 200, dimension: int = 4000, known_null: bool = False
) -> Coverage:
    """Random directions of norm 1 summed with noise, so that the canaries do disturb each other."""
    rng = np.random.default_rng(seed)
    estimates = []
    for _ in range(audits):
        directions = rng.standard_normal((canaries, dimension), dtype=np.float32)
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        total = directions.sum(0) + sigma * rng.standard_normal(dimension, dtype=np.float32)
        inside = (directions @ total).astype(np.float64) / float(np.linalg.norm(total))
        outside = None if known_null else rng.standard_normal(canaries) / math.sqrt(dimension)
        estimates.append(one_shot_federated(inside, outside, DELTA, CONFIDENCE, dimension=dimension))
    name = f"one-shot federated{', null known' if known_null else ''}"
    return _counted(estimates, gaussian_epsilon(sigma, DELTA), name, f"{canaries} canaries in {dimension} dimensions")
