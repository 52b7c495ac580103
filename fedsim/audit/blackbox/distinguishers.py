# SPDX-License-Identifier: Apache-2.0
"""What tells the outputs on two neighbouring data sets apart: many scores, learned on some runs, one event chosen.

Every score is a function of an output. It may use anything that was learned on the runs that it is fitted to, and is
compared with the others on further runs; what is chosen is then counted on runs that nobody has looked at. So a score
needs no justification: a bad one costs power, never validity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import logit

from fedsim.audit.blackbox.outputs import SUMMARY, Floats, Outputs, lowest_bits, single_precision

Function = Callable[[Outputs], Floats]
_COLUMNS = 24  # places of the output that are looked at one by one
_MOST = 40_000  # runs of each data set that are learned from
_COARSE = SUMMARY.index("coarse")


@dataclass(frozen=True, eq=False)
class Score:
    """A named function of outputs."""

    name: str
    of: Function
    fitted: bool = False
    """Whether it has learned from the runs that it was made with."""


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
        return f"{self.score.name} {'≥' if self.above else '≤'} {self.threshold:.6g}"


def choose(first: Outputs, second: Outputs, delta: float, trials: int, *, thorough: bool, exact: bool) -> Event | None:
    """The most promising event for `trials` further runs: those that learn do so on even runs only.

    They are then compared on the odd ones.
    """
    first, second = _latest(first), _latest(second)
    width = max(first.values.shape[1], second.values.shape[1])
    first, second = first.widened(width), second.widened(width)
    fit, compare = _part(first, second, 0), _part(first, second, 1)
    best: Event | None = None
    for score in scores(*fit, thorough=thorough, exact=exact):
        on = compare if score.fitted else (first, second)
        found = _best_threshold(score, score.of(on[0]), score.of(on[1]), delta, trials)
        if found is not None and (best is None or found.promise > best.promise):
            best = found
    return best


def _latest(outputs: Outputs) -> Outputs:
    """More runs than these teach little and take long."""
    latest = slice(max(0, len(outputs) - _MOST), None)
    return Outputs(outputs.values[latest], outputs.summary[latest], outputs.fingerprints[latest])


def _part(first: Outputs, second: Outputs, start: int) -> tuple[Outputs, Outputs]:
    def part(whole: Outputs) -> Outputs:
        every = slice(start, None, 2)
        return Outputs(whole.values[every], whole.summary[every], whole.fingerprints[every])

    return part(first), part(second)


def scores(first: Outputs, second: Outputs, *, thorough: bool, exact: bool) -> Iterator[Score]:
    """All scores, fitted to these runs. `thorough` adds the expensive one; `exact` looks at single bits."""
    if not len(first) or not len(second):
        return
    yield Score("an output that was seen before", _known(first.fingerprints, second.fingerprints, _prints), True)
    rounded = single_precision(np.concatenate([first.values, second.values]))
    for place, name in enumerate(SUMMARY):
        seen = np.concatenate([first.summary[:, place], second.summary[:, place]])
        if np.ptp(seen) > 0 and not (place == _COARSE and rounded):
            yield Score(name, _summary(place))
    yield from _by_place(first, second, exact, rounded)
    yield from _directions(first.values, second.values)
    if thorough and len(first) + len(second) >= 400:
        yield from _trees(first, second)


def _prints(outputs: Outputs) -> np.ndarray:
    return outputs.fingerprints


def _summary(place: int) -> Function:
    return lambda outputs: outputs.summary[:, place]


def _column(place: int) -> Callable[[Outputs], Floats]:
    return lambda outputs: (
        outputs.values[:, place] if place < outputs.values.shape[1] else np.zeros(len(outputs.values))
    )


def _by_place(first: Outputs, second: Outputs, exact: bool, rounded: bool) -> Iterator[Score]:
    spread = np.concatenate([first.values, second.values]).std(0)
    for rank, place in enumerate(telling(first.values, second.values, _COLUMNS)):
        column = _column(place)
        yield Score(f"number {place}", column)
        seen = column(first), column(second)
        values = np.concatenate(seen)
        if len(np.unique(values)) <= len(values) // 4:
            yield Score(f"a value of number {place} that was seen before", _known(*seen, column), True)
        elif rank < 4 and spread[place] > 0 and (not rounded or _whole(values)):
            digits = _remainder(column) if _whole(values) else _digits(column, float(spread[place]))
            known = _known(digits(first), digits(second), digits)
            yield Score(f"last digits of number {place}", known, True)
        if exact:
            yield Score(f"lowest bit of number {place}", _lowest_bit(column))


def _whole(values: Floats) -> bool:
    return bool((values == np.round(values)).all())


def _remainder(column: Function) -> Function:
    """Whole numbers too many to be seen twice: the last bits."""
    return lambda outputs: column(outputs) % 16


def _digits(column: Function, spread: float) -> Function:
    """Bits 31 to 38 below the spread: evenly distributed, unless noise in float32 was added to a sum in float64."""
    grid = 2.0 ** (np.floor(np.log2(spread)) - 30)
    return lambda outputs: np.floor(column(outputs) / grid % 1.0 * 256)


def _lowest_bit(column: Function) -> Function:
    return lambda outputs: lowest_bits(column(outputs))


def telling(first: Floats, second: Floats, most: int) -> list[int]:
    """The places whose mean or spread differs most between the two, and those that vary least."""
    width = first.shape[1]
    if width <= most:
        return list(range(width))
    spread = (first.std(0) + second.std(0)) / 2
    size = np.abs(first).max(0, initial=0) + np.abs(second).max(0, initial=0)
    floor = spread + 1e-12 * size + 1e-300
    shift = np.abs(first.mean(0) - second.mean(0)) / floor
    widening = np.abs(np.log((first.std(0) + 1e-3 * floor) / (second.std(0) + 1e-3 * floor)))
    orders = (np.argsort(-shift), np.argsort(-widening), np.argsort(spread / (size + 1e-300)))
    ranked = [int(place) for places in zip(*orders, strict=True) for place in places]
    return list(dict.fromkeys(ranked))[:most]


def _known(first: np.ndarray, second: np.ndarray, value_of: Callable[[Outputs], np.ndarray]) -> Function:
    """The logarithm of how much more often a value was seen on the first than on the second; 0 for a new value."""
    values, places = np.unique(np.concatenate([first, second]), return_inverse=True)
    counts = [np.bincount(part, minlength=len(values)) for part in np.split(places.reshape(-1), [len(first)])]
    ratio = np.log((counts[0] + 0.5) / (counts[1] + 0.5)) + np.log((len(second) + 1) / (len(first) + 1))
    ratio[counts[0] + counts[1] < 2] = 0.0  # seen once says nothing, and may be one of endlessly many

    def score(outputs: Outputs) -> Floats:
        found = value_of(outputs)
        place = np.minimum(np.searchsorted(values, found), len(values) - 1)
        return np.where(values[place] == found, ratio[place], 0.0)

    return score


def _directions(first: Floats, second: Floats) -> Iterator[Score]:
    """Linear and quadratic discriminants of fitted Gaussians, on standardised numbers; distances from the means."""
    both = np.concatenate([first, second])
    centre, scale = both.mean(0), both.std(0)
    alive = np.flatnonzero(scale > 1e-14 * (np.abs(centre) + 1e-280))
    if not len(alive):
        return

    def standard(values: Floats) -> Floats:
        missing = max(0, first.shape[1] - values.shape[1])
        wide = np.pad(values, ((0, 0), (0, missing))) if missing else values
        result: Floats = (wide[:, alive] - centre[alive]) / scale[alive]
        return result

    a, b = standard(first), standard(second)
    shift = a.mean(0) - b.mean(0)
    yield Score("difference of the means", _linear(standard, shift), True)
    for middle, name in ((a.mean(0), "first"), (b.mean(0), "second")):
        yield Score(f"distance from the {name} mean", _distance(standard, middle), True)
    deviations = a.std(0) + 1e-6, b.std(0) + 1e-6
    yield Score(
        "Gaussian likelihood ratio, number by number", _diagonal(standard, a.mean(0), b.mean(0), *deviations), True
    )
    if len(alive) > 1 and len(both) > 2 * len(alive):
        within = (np.cov(a.T) + np.cov(b.T)) / 2
        for ridge, name in ((1e-10, "linear discriminant"), (0.1, "linear discriminant, shrunk")):
            weights = np.linalg.solve(within + ridge * np.eye(len(alive)), shift)
            yield Score(name, _linear(standard, weights), True)
        if len(alive) <= 40 and min(len(a), len(b)) > 10 * len(alive):
            yield Score("Gaussian likelihood ratio", _quadratic(standard, a, b), True)


def _linear(standard: Callable[[Floats], Floats], weights: Floats) -> Function:
    return lambda outputs: standard(outputs.values) @ weights


def _distance(standard: Callable[[Floats], Floats], middle: Floats) -> Function:
    return lambda outputs: np.sqrt(((standard(outputs.values) - middle) ** 2).sum(1))


def _diagonal(standard: Callable[[Floats], Floats], m1: Floats, m2: Floats, s1: Floats, s2: Floats) -> Function:
    def score(outputs: Outputs) -> Floats:
        x = standard(outputs.values)
        ratio: Floats = (((x - m2) / s2) ** 2 / 2 - ((x - m1) / s1) ** 2 / 2).sum(1)
        return ratio

    return score


def _quadratic(standard: Callable[[Floats], Floats], a: Floats, b: Floats) -> Function:
    eye = 1e-8 * np.eye(a.shape[1])
    whitening = [np.linalg.cholesky(np.linalg.pinv(np.cov(part.T) + eye, hermitian=True) + eye) for part in (a, b)]

    def score(outputs: Outputs) -> Floats:
        x = standard(outputs.values)
        far = [(((x - part.mean(0)) @ root) ** 2).sum(1) for part, root in zip((a, b), whitening, strict=True)]
        ratio: Floats = (far[1] - far[0]) / 2
        return ratio

    return score


def _trees(first: Outputs, second: Outputs) -> Iterator[Score]:
    """Boosted trees: for what is neither a direction nor a value, such as a gap in the support."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    places = telling(first.values, second.values, 64)

    def features(outputs: Outputs) -> Floats:
        columns = [_column(place)(outputs)[:, None] for place in places]
        return np.concatenate([outputs.summary, *columns], axis=1)

    x = np.concatenate([features(first)[:20_000], features(second)[:20_000]])
    y = np.repeat([1, 0], [min(len(first), 20_000), min(len(second), 20_000)])
    if not np.ptp(x, axis=0).any():
        return
    trees = HistGradientBoostingClassifier(max_iter=40, max_leaf_nodes=8, early_stopping=False, random_state=0)
    trees.fit(x, y)
    yield Score("boosted trees", lambda outputs: np.asarray(trees.decision_function(features(outputs))), True)


def _best_threshold(score: Score, first: Floats, second: Floats, delta: float, trials: int) -> Event | None:
    both = np.sort(np.concatenate([first, second]))
    if not len(both) or both[0] == both[-1] or not np.isfinite(both).all():
        return None
    ranks = np.unique(np.geomspace(1, len(both), 60).astype(int)) - 1
    best: Event | None = None
    for above, thresholds in ((True, np.unique(both[::-1][ranks])), (False, np.unique(both[ranks]))):
        rates = [_rate(np.sort(part), thresholds, above) for part in (first, second)]
        for speaks_first in (True, False):
            hit, miss = rates if speaks_first else rates[::-1]
            sizes = (len(first), len(second)) if speaks_first else (len(second), len(first))
            promise = _promise(hit, miss, *sizes, delta, trials)
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
    return float(_promise(np.array([hit]), np.array([miss]), hits_of, misses_of, delta, trials)[0])


def _promise(hit: Floats, miss: Floats, hits_of: int, misses_of: int, delta: float, trials: int) -> Floats:
    """A forecast of the exact test's lower bound, less what the rates, which were measured too, are uncertain by.

    The counts are shrunk to k = M/(M + m) of themselves, for m runs seen and M to come, which is what both together are
    worth; of the share of right guesses Wilson's lower limit is taken, at 2.5 standard errors, because the best of
    thousands is chosen, and luck would win among rare events otherwise.
    """
    worth = trials / (trials + hits_of + misses_of)
    right = np.maximum(hit - delta, 0.0) * hits_of * worth
    guesses = right + miss * misses_of * worth + 1e-12
    share, z = right / guesses, 2.5
    low = (share + z**2 / (2 * guesses) - z * np.sqrt(share * (1 - share) / guesses + (z / guesses) ** 2 / 4)) / (
        1 + z**2 / guesses
    )
    forecast: Floats = logit(np.clip(low, 1e-12, 1 - 1e-12)) + np.log(misses_of / hits_of)
    return forecast
