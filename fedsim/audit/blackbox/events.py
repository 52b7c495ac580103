# SPDX-License-Identifier: Apache-2.0
"""One event, chosen among all scores and thresholds: the set of outputs that is written down before it is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import logit

from fedsim.audit.blackbox.distinguishers import Score, named, scores
from fedsim.audit.blackbox.outputs import Floats, Outputs

_MOST = 40_000  # runs of each data set that are learned from
_PLAIN = {
    "length": "count of numbers in the output",
    "NaN": "count of NaN in the output",
    "+inf": "count of +inf in the output",
    "-inf": "count of -inf in the output",
    "coarse": "count of round numbers in the output",
    "whole": "count of whole numbers in the output",
    "no answer": "count of refusals",
}
_CARE, _HOPE = 2.5, 0.8  # standard errors by which a forecast is lowered


@dataclass(frozen=True, eq=False)
class Event:
    """The set S of outputs: score at or beyond a threshold; `first` says for which data set it speaks."""

    score: Score
    threshold: float
    above: bool
    first: bool
    promise: float
    """The lower bound on ε that as many further runs are expected to give, on the careful side."""
    forecast: Callable[[int], float]
    """The same for another number of further runs."""

    def happened(self, outputs: Outputs) -> np.ndarray:
        """For each output, whether it lies in S."""
        score = self.score.of(outputs)
        happened: np.ndarray = score >= self.threshold if self.above else score <= self.threshold
        return happened

    def __str__(self) -> str:
        name = _PLAIN.get(self.score.name, self.score.name)
        return f"{name} {'≥' if self.above else '≤'} {self.threshold:.6g}"


def choose(
    first: Outputs,
    second: Outputs,
    delta: float,
    trials: int,
    *,
    thorough: bool = False,
    exact: bool = False,
    rare: bool = False,
) -> Event | None:
    """The most promising event for `trials` further runs: those that learn do so on even runs only.

    They are then compared on the odd ones. `rare`: only what has a name, such as a length, a word or a value that is no
    number, and with less care: that it was seen on one side only, and seldom, is then reason enough to look for it.
    """
    first, second = _latest(first), _latest(second)
    width = max(first.values.shape[1], second.values.shape[1])
    first, second = first.widened(width), second.widened(width)
    fit, compare = _part(first, second, 0), _part(first, second, 1)
    best: Event | None = None
    found_by = named(*fit) if rare else scores(*fit, thorough=thorough, exact=exact)
    for score in found_by:
        on = compare if score.fitted else (first, second)
        found = _best_threshold(score, score.of(on[0]), score.of(on[1]), delta, trials, _HOPE if rare else _CARE)
        if found is not None and (best is None or found.promise > best.promise):
            best = found
    return best


def _latest(outputs: Outputs) -> Outputs:
    """More runs than these teach little and take long."""
    return outputs.part(slice(max(0, len(outputs) - _MOST), None))


def _part(first: Outputs, second: Outputs, start: int) -> tuple[Outputs, Outputs]:
    every = slice(start, None, 2)
    return first.part(every), second.part(every)


def _best_threshold(
    score: Score, first: Floats, second: Floats, delta: float, trials: int, care: float
) -> Event | None:
    both = np.sort(np.concatenate([first, second]))
    if not len(first) or not len(second) or both[0] == both[-1] or not np.isfinite(both).all():
        return None
    ranks = np.unique(np.geomspace(1, len(both), 60).astype(int)) - 1
    best: Event | None = None
    for above, thresholds in ((True, np.unique(both[::-1][ranks])), (False, np.unique(both[ranks]))):
        rates = [_rate(np.sort(part), thresholds, above) for part in (first, second)]
        for speaks_first in (True, False):
            hit, miss = rates if speaks_first else rates[::-1]
            sizes = (len(first), len(second)) if speaks_first else (len(second), len(first))
            promise = _promise(hit, miss, *sizes, delta, trials, care)
            place = int(promise.argmax())
            if best is None or promise[place] > best.promise:
                forecast = partial(_forecast, float(hit[place]), float(miss[place]), *sizes, delta)
                best = Event(score, float(thresholds[place]), above, speaks_first, float(promise[place]), forecast)
    return best


def _rate(ordered: Floats, thresholds: Floats, above: bool) -> Floats:
    if above:
        return (len(ordered) - np.searchsorted(ordered, thresholds, "left")) / len(ordered)
    return np.searchsorted(ordered, thresholds, "right") / len(ordered)


def _forecast(hit: float, miss: float, hits_of: int, misses_of: int, delta: float, trials: int) -> float:
    return float(_promise(np.array([hit]), np.array([miss]), hits_of, misses_of, delta, trials, _CARE)[0])


def _promise(hit: Floats, miss: Floats, hits_of: int, misses_of: int, delta: float, trials: int, care: float) -> Floats:
    """A forecast of the exact test's lower bound, less what the rates, which were measured too, are uncertain by.

    The counts are shrunk to k = M/(M + m) of themselves, for m runs seen and M to come, which is what both together are
    worth; of the share of right guesses Wilson's lower limit is taken, at `care` standard errors: 2.5 where the best of
    thousands is chosen, because luck would win among rare events otherwise.
    """
    worth = trials / (trials + hits_of + misses_of)
    right = np.maximum(hit - delta, 0.0) * hits_of * worth
    guesses = right + miss * misses_of * worth + 1e-12
    share, z = right / guesses, care
    low = (share + z**2 / (2 * guesses) - z * np.sqrt(share * (1 - share) / guesses + (z / guesses) ** 2 / 4)) / (
        1 + z**2 / guesses
    )
    forecast: Floats = logit(np.clip(low, 1e-12, 1 - 1e-12)) + np.log(misses_of / hits_of)
    return forecast
