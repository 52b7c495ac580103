# SPDX-License-Identifier: Apache-2.0
"""What tells the outputs on two neighbouring data sets apart: many scores, learned on some runs.

Every score is a function of an output. It may use anything that was learned on the runs that it is fitted to, and is
compared with the others on further runs (`events`); what is chosen is then counted on runs that nobody has looked at.
So a score needs no justification: a bad one costs power, never validity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fedsim.audit.blackbox.outputs import SUMMARY, Floats, Outputs, lowest_bits, single_precision

Function = Callable[[Outputs], Floats]
_COLUMNS = 24  # places of the output that are looked at one by one
_COARSE = SUMMARY.index("coarse")
_COUNTED = tuple(SUMMARY.index(name) for name in ("no answer", "length", "NaN", "+inf", "-inf", "coarse", "whole"))


@dataclass(frozen=True, eq=False)
class Score:
    """A named function of outputs."""

    name: str
    of: Function
    fitted: bool = False
    """Whether it has learned from the runs that it was made with."""


def scores(first: Outputs, second: Outputs, *, thorough: bool, exact: bool) -> Iterator[Score]:
    """All scores, fitted to these runs. `thorough` adds the expensive one; `exact` looks at single bits."""
    if not len(first) or not len(second):
        return
    yield from named(first, second)
    for place in set(range(len(SUMMARY))) - set(_COUNTED):
        if _varies(first, second, place):
            yield Score(SUMMARY[place], _summary(place))
    rounded = single_precision(np.concatenate([first.values, second.values]))
    yield from _by_place(first, second, exact, rounded)
    yield from _directions(first.values, second.values)
    if thorough and len(first) + len(second) >= 400:
        yield from _trees(first, second)


def named(first: Outputs, second: Outputs) -> Iterator[Score]:
    """What can be told without a threshold among endlessly many: equal outputs, equal words, how many of a kind."""
    if not len(first) or not len(second):
        return
    yield Score("an output that was seen before", _known(first.fingerprints, second.fingerprints, _prints), True)
    if len(np.unique(np.concatenate([first.words, second.words]))) > 1:
        yield Score("words that were seen before", _known(first.words, second.words, _words), True)
    for place in _COUNTED:
        coarse_by_nature = place == _COARSE and single_precision(np.concatenate([first.values, second.values]))
        if _varies(first, second, place) and not coarse_by_nature:
            yield Score(SUMMARY[place], _summary(place))


def _varies(first: Outputs, second: Outputs, place: int) -> bool:
    return bool(np.ptp(np.concatenate([first.summary[:, place], second.summary[:, place]])) > 0)


def _prints(outputs: Outputs) -> np.ndarray:
    return outputs.fingerprints


def _words(outputs: Outputs) -> np.ndarray:
    return outputs.words


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
    if len(alive) > 1 and len(both) > 2 * len(alive) and min(len(a), len(b)) > 1:
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
