# SPDX-License-Identifier: Apache-2.0
"""Beside the exact test: Clopper-Pearson on the same counts, a Gaussian model of the scores, the gap, the figures."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsim.audit.estimate import Estimate, HeldOut
from fedsim.audit.estimation.rates import trade_off
from fedsim.audit.estimators import epsilon_clopper_pearson, epsilon_gaussian
from fedsim.audit.verdict import Claim, Gap
from fedsim.privacy.gaussian import gaussian_epsilon

if TYPE_CHECKING:
    from fedsim.audit.blackbox.search import Count

_LARGEST = 50.0  # an ε beyond which a fit says no more than "no privacy"


def model_based(count: Count, delta: float, confidence: float, error: float) -> tuple[list[Estimate], float | None]:
    """The other lines of a verdict, and the ε of the Gaussian fit as a point (None where there is no such fit).

    `error` is the part of the error probability that this count was given among all that were made.
    """
    own = 1 - error
    counts = _counts(count)
    lines = [epsilon_clopper_pearson(*counts, delta, own, selection=HeldOut())]
    fitted = None
    scores_in, scores_out = _scores(count)
    if delta > 0 and min(len(scores_in), len(scores_out)) > 10 and _continuous(scores_in, scores_out):
        lines.append(epsilon_gaussian(scores_in, scores_out, delta, own))
        spread = math.sqrt((scores_in.var(ddof=1) + scores_out.var(ddof=1)) / 2)
        distance = abs(float(scores_in.mean() - scores_out.mean())) / spread
        fitted = min(_LARGEST, gaussian_epsilon(1 / distance, delta)) if distance else 0.0
    return [dataclasses.replace(line, confidence=confidence) for line in lines], fitted


def gap_of(count: Count, lower: float, claim: Claim, fitted: float | None, exact: float | None) -> Gap:
    """Where claim − lower comes from; parts that cannot be told apart are left out of the row, never guessed."""
    point = _point(count, claim.delta)
    statistics = point - lower
    accountant = None if exact is None else claim.epsilon - exact
    top = claim.epsilon if exact is None else exact
    if fitted is None:
        return Gap(accountant, top - point, None, statistics)
    return Gap(accountant, top - fitted, fitted - point, statistics)


def numbers_of(count: Count) -> dict[str, Any]:
    """What was counted, for figures: the event's confusion matrix, and the errors of its score at all thresholds."""
    fp, fn, negatives, positives = _counts(count)
    first, second = _scores(count)
    scores_in, scores_out = (first, second) if count.event.first else (-second, -first)
    truth = np.arange(positives + negatives) < positives
    rule = f"The event was chosen on other runs: {count.event}"
    return {
        "trials": count.trials,
        "ins": positives,
        "counts": {"tp": positives - fn, "fp": fp, "tn": negatives - fp, "fn": fn, "rule": rule},
        "trade_off": trade_off(np.concatenate([scores_in, scores_out]), truth),
    }


def _counts(count: Count) -> tuple[int, int, int, int]:
    """False positives, false negatives, negatives, positives; positive is the data set that the event speaks for."""
    sizes = len(count.first), len(count.second)
    positives, negatives = sizes if count.event.first else sizes[::-1]
    return count.guesses - count.correct, positives - count.correct, negatives, positives


def _point(count: Count, delta: float) -> float:
    """ln((P − δ) / P') at the event, with half a run added to P' so that it is finite."""
    fp, fn, negatives, positives = _counts(count)
    hit = (positives - fn) / max(positives, 1) - delta
    miss = (fp + 0.5) / (negatives + 1)
    return max(0.0, math.log(hit / miss)) if hit > 0 else 0.0


def _scores(count: Count) -> tuple[np.ndarray, np.ndarray]:
    first, second = count.event.score.of(count.first), count.event.score.of(count.second)
    sign = 1.0 if count.event.above == count.event.first else -1.0
    return sign * first, sign * second


def _continuous(first: np.ndarray, second: np.ndarray) -> bool:
    both = np.concatenate([first, second])
    return len(np.unique(both)) > 0.9 * len(both) and first.std() > 0 and second.std() > 0
