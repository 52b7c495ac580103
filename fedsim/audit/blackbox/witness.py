# SPDX-License-Identifier: Apache-2.0
"""The pair of data sets on which most was seen, in words that a reader can check and as Python that makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.audit.blackbox.pairs import Pair
from fedsim.errors import counted

if TYPE_CHECKING:
    from fedsim.audit.blackbox.search import Count

_SHOWN = 6  # numbers of a record
_WRITTEN = 240  # numbers of a data set that are written out in Python


def witness(count: Count) -> str:
    """What differs, the event, how often it was seen on each side, and whether the mechanism answered."""
    seen = (count.correct, count.guesses - count.correct)
    first, second = seen if count.event.first else seen[::-1]
    return (
        f"the event ({count.event}) was seen in {first} of {counted(len(count.first), 'run')} on the first data set and"
        f" in {second} of {len(count.second)} on the second. The pair ({count.pair.name}): {difference(count.pair)}."
        f" {answers(count)}"
    )


def answers(count: Count) -> str:
    """Whether the mechanism accepts the pair: whether it answered on both data sets."""
    silent = int(count.first.unanswered.sum()), int(count.second.unanswered.sum())
    if not any(silent):
        return "The mechanism answered in all these runs"
    return (
        f"The mechanism refused (an exception, None or NaN) in {silent[0]} of the runs on the first data set and in"
        f" {silent[1]} on the second; here a refusal counts as an output"
    )


def difference(pair: Pair) -> str:
    """In which record two data sets differ, and what the others are."""
    found = _differing(pair)
    if found is None:
        return "as it was given"
    first, second, place, removed = found
    size = counted(len(first), "record")
    others = np.delete(first, place, axis=0)
    rest = f"; {_others(others)}" if len(others) else ""
    if removed:
        return f"the first has {size}, the second lacks record {place}, which is {_told(first[place])}{rest}"
    return (
        f"both have {size}, and record {place} is {_told(first[place])} in the first and {_told(second[place])} in the"
        f" second{rest}"
    )


def recipe(pair: Pair) -> str:
    """Python that makes `first` and `second`; empty where they are no arrays of numbers, or large mixtures."""
    found = _differing(pair)
    if found is None:
        return ""
    first, second, place, removed = found
    others = np.delete(first, place, axis=0)
    if len(others) and (others == others[0]).all():
        made = f"first = np.full({first.shape}, {others[0].tolist()}, dtype=np.{first.dtype})"
        made += f"; first[{place}] = {first[place].tolist()}"
    elif first.size <= _WRITTEN:
        made = f"first = np.array({first.tolist()}, dtype=np.{first.dtype})"
    else:
        return ""
    then = f"second = np.delete(first, {place}, axis=0)"
    if not removed:
        then = f"second = first.copy(); second[{place}] = {second[place].tolist()}"
    return f"import numpy as np; {made}; {then}"


def _differing(pair: Pair) -> tuple[NDArray[Any], NDArray[Any], int, bool] | None:
    """The larger data set first, the place of the one record that differs, and whether the other lacks it."""
    first, second = pair.first, pair.second
    if not all(isinstance(part, np.ndarray) and part.ndim and part.dtype.kind in "fiub" for part in (first, second)):
        return None
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype or abs(len(first) - len(second)) > 1:
        return None
    least = min(len(first), len(second))
    differs = (first[:least] != second[:least]).any(axis=tuple(range(1, first.ndim)))
    places = np.flatnonzero(differs)
    if len(first) == len(second):
        return (first, second, int(places[0]), False) if len(places) == 1 else None
    place = int(places[0]) if len(places) else least
    if len(first) > len(second) and np.array_equal(np.delete(first, place, axis=0), second):
        return first, second, place, True
    return None


def _others(others: NDArray[Any]) -> str:
    distinct = np.unique(others, axis=0)
    if len(distinct) == 1:
        return (
            f"all {len(others)} others are {_told(others[0])}"
            if len(others) > 1
            else f"the other is {_told(others[0])}"
        )
    ends = f"from {_told(distinct[0])} to {_told(distinct[-1])}"
    return f"the {len(others)} others hold {len(distinct)} different records, {ends}"


def _told(record: Any) -> str:
    values = np.asarray(record).reshape(-1)
    shown = ", ".join(f"{value:.17g}" for value in values[:_SHOWN].tolist())
    more = f", ... ({counted(len(values), 'number')})" if len(values) > _SHOWN else ""
    return shown if not np.ndim(record) else f"[{shown}{more}]"
