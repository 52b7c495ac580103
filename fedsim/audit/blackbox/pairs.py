# SPDX-License-Identifier: Apache-2.0
"""Neighbouring data sets: two that differ in one record, chosen so that a mechanism's leak, if any, is easy to see."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.errors import AuditError
from fedsim.privacy.claim import Adjacency

Records = NDArray[np.float64]
FAR = 1000.0
"""The magnitude of a record that no sensible clipping norm lets through, where the domain does not say otherwise."""


@dataclass(frozen=True, eq=False)
class Pair:
    """Two data sets that a claim says cannot be told apart, and what they are for people."""

    first: Any
    second: Any
    name: str = "the given pair"


@dataclass(frozen=True)
class Domain:
    """What a record may be: each number between low and high; the norm at most `norm`, where one is given."""

    low: float = -FAR
    high: float = FAR
    norm: float | None = None

    def __post_init__(self) -> None:
        """Refuse an empty domain."""
        if not self.low < self.high:
            raise AuditError(f"domain is {self.low:g} to {self.high:g}; low must be below high")

    def fits(self, record: Records) -> bool:
        """Whether a record may be so."""
        inside = bool((record >= self.low).all() and (record <= self.high).all())
        return inside and (self.norm is None or float(np.linalg.norm(record)) <= self.norm * (1 + 1e-12))


def as_pairs(pairs: Sequence[Any]) -> list[Pair]:
    """Pairs as a user gives them: `Pair` objects, or (first, second), or (first, second, name)."""
    made = [pair if isinstance(pair, Pair) else _tuple_pair(place, pair) for place, pair in enumerate(pairs)]
    if not made:
        raise AuditError("pairs is empty; give at least one (data set, neighbouring data set), or leave it out")
    return made


def _tuple_pair(place: int, pair: Any) -> Pair:
    if not isinstance(pair, (tuple, list)) or len(pair) not in (2, 3):
        raise AuditError(f"pairs[{place}] is {type(pair).__name__}; it must be (data set, neighbouring data set)")
    return Pair(pair[0], pair[1], str(pair[2]) if len(pair) == 3 else f"given pair {place}")


_SIZE = 10  # records beside the one that matters, where nobody says how many there are


def worst_pairs(adjacency: Adjacency, shape: tuple[int, ...], domain: Domain, size: int | None = None) -> list[Pair]:
    """Worst-case pairs of arrays (n, *shape): what is left of one data set without a record is the other.

    Records: along the first and last coordinate, all coordinates at once, on both sides, at magnitude 1 and at the end
    of the domain, and zero (which shows a number of records that is not hidden). The rest: empty, one record, zeros,
    copies.
    """
    records = _records(shape, domain)
    zero = np.zeros(shape)
    pairs: list[Pair] = []
    for rest_name, rest in _rests(shape, domain, size or _SIZE):
        for name, record in records:
            what = f"{name} beside {rest_name}"
            if adjacency == "add/remove":
                pairs.append(Pair(_with(rest, record), rest, f"with and without {what}"))
                continue
            if not record.any():
                continue
            if domain.fits(-record):
                pairs.append(Pair(_with(rest, record), _with(rest, -record), f"{what}, or its negative"))
            other = _other(zero, record, domain)  # an even function does not tell a record from its negative
            pairs.append(Pair(_with(rest, record), _with(rest, other), f"{what}, or another"))
    return pairs


def whole_numbers(pairs: Sequence[Pair]) -> list[Pair]:
    """The same pairs in whole numbers, for what counts or indexes with its records; without those that become equal."""
    rounded = [Pair(_rounded(pair.first), _rounded(pair.second), pair.name) for pair in pairs]
    return [pair for pair in rounded if not np.array_equal(pair.first, pair.second)]


def _rounded(dataset: Records) -> NDArray[np.int64]:
    return np.round(dataset).astype(np.int64)


_SMALL = range(12)
_LARGE = (14, 15, 16, 19, 20, 24, 29, 30, 31, 32, 39, 49, 50, 63, 64, 99, 100, 127, 128, 199, 255)
_VALUES = (0.0, 1.0, -1.0, 0.5, 0.3, 2.0, 3.0, -0.3, 0.9, 10.0, 100.0)
"""Round numbers, where rules change; some with digits that never end, which show what was rounded (0.3, 0.9)."""


def varied_pairs(
    adjacency: Adjacency,
    shape: tuple[int, ...],
    domain: Domain,
    rng: np.random.Generator,
    number: int,
    size: int | None = None,
) -> list[Pair]:
    """Random pairs of a few values, for leaks that need a certain size, mixture or place.

    A rule such as "at least five", "if all agree" or "the first tenth" is seen on few data sets only, but plainly. All
    numbers of other records have their turn, the small ones more often (where `size` is given: that one, and smaller
    ones); they are equal, alternate or are mixed, and the record that matters comes last, first or in between.
    """
    pairs: list[Pair] = []
    values = sorted({value for value in (*_VALUES, domain.low, domain.high) if domain.low <= value <= domain.high})
    turns = [*_SMALL] * 4 + [*_LARGE] if size is None else [size] * size + [*range(size)]
    sizes = itertools.cycle(rng.permutation(turns))
    while len(pairs) < number:
        many, rest, place = _varied_rest(shape, domain, values, rng, int(next(sizes)))
        like_others = len(rest) and rng.random() < 0.3
        record = rest[0] if like_others else _varied_record(shape, domain, values, rng)
        what = f"{_told(record)} at place {place} among {many}"
        if adjacency == "add/remove":
            pairs.append(Pair(np.insert(rest, place, record, axis=0), rest, f"with and without {what}"))
            continue
        other = _varied_record(shape, domain, values, rng)
        if (other != record).any():
            first, second = (np.insert(rest, place, one, axis=0) for one in (record, other))
            pairs.append(Pair(first, second, f"{what}, or {_told(other)}"))
    return pairs


def _varied_rest(
    shape: tuple[int, ...], domain: Domain, values: list[float], rng: np.random.Generator, count: int
) -> tuple[str, Records, int]:
    kinds = int(rng.choice((1, 1, 2, 3, 3)))  # all equal, two in turn, or a mixture
    stock = np.stack([_varied_record(shape, domain, values, rng) for _ in range(kinds if kinds < 3 else 8)])
    picks = np.arange(count) % kinds if kinds < 3 else rng.integers(len(stock), size=count)
    place = int(rng.choice((count, count, 0, count // 2)))
    return f"{count} {('equal', 'alternating', 'mixed')[kinds - 1]} others", stock[picks], place


def _varied_record(shape: tuple[int, ...], domain: Domain, values: list[float], rng: np.random.Generator) -> Records:
    """All coordinates equal, only one of them not zero, or each of its own."""
    width = int(np.prod(shape, dtype=int))
    if not values:
        record = rng.uniform(domain.low, domain.high, size=width)
    elif width == 1 or rng.random() < 0.3:
        record = np.full(width, rng.choice(values))
    elif rng.random() < 0.4 and 0.0 in values:
        record = np.zeros(width)
        record[rng.integers(width)] = rng.choice(values)
    else:
        record = rng.choice(values, size=width)
    norm = float(np.linalg.norm(record))
    if domain.norm is not None and norm > domain.norm:
        record = record * (domain.norm / norm)
    return np.asarray(record, dtype=np.float64).reshape(shape)


def _told(record: Records) -> str:
    shown = " ".join(f"{value:g}" for value in record.reshape(-1)[:4])
    return f"record {shown}" if record.size <= 4 else f"record {shown} ..."


def _with(rest: Records, record: Records) -> Records:
    return np.concatenate([rest, record[None]])


def _other(zero: Records, record: Records, domain: Domain) -> Records:
    low = np.full_like(zero, domain.low)
    if domain.fits(zero):
        return zero
    return low if domain.fits(low) and (low != record).any() else zero


def _records(shape: tuple[int, ...], domain: Domain) -> list[tuple[str, Records]]:
    width = int(np.prod(shape, dtype=int))
    places = [0] if width == 1 else [0, width - 1]
    inside = [value for value in (7.0, 0.5) if domain.low < value < domain.high]
    ends = sorted({1.0, domain.high, -1.0, domain.low, *inside}, key=lambda end: (abs(end), -end))
    found: list[tuple[str, Records]] = []
    for end in ends:
        for place in places:
            record = np.zeros(width)
            record[place] = end
            found.append((f"{end:g} in coordinate {place}", record.reshape(shape)))
        if width > 1:
            scale = 1.0 if domain.norm is None else 1 / np.sqrt(width)
            found.append((f"{end * scale:g} in all coordinates", np.full(shape, end * scale)))
    if domain.norm is not None:
        along = np.zeros(width)
        along[0] = domain.norm
        found.append((f"norm {domain.norm:g} in coordinate 0", along.reshape(shape)))
    found.append(("a record of zeros", np.zeros(shape)))
    kept = [(name, record) for name, record in found if domain.fits(record)]
    return kept or [("the lowest record", np.full(shape, domain.low)), ("the highest", np.full(shape, domain.high))]


def _rests(shape: tuple[int, ...], domain: Domain, size: int) -> Iterator[tuple[str, Records]]:
    base = np.zeros(shape)
    if not domain.fits(base):
        base = np.full(shape, domain.low)
    yield f"{size} equal ones", np.repeat(base[None], size, axis=0)
    for few, many in ((5, 60),) if size == _SIZE else ():  # a leak may depend on how many there are
        yield f"{few} equal ones", np.repeat(base[None], few, axis=0)
        yield f"{many} equal ones", np.repeat(base[None], many, axis=0)
    yield "nothing", np.zeros((0, *shape))
    if size > 1:  # what divides by the number of records shows it most where there are few
        yield "a single other", base[None].copy()
    top = np.full(shape, min(domain.high, 1.0) if domain.norm is None else 0.0)
    if domain.fits(top) and (top != base).any():
        yield f"{size} large ones", np.repeat(top[None], size, axis=0)
    spread = np.linspace(max(domain.low, -1.0), min(domain.high, 1.0), size).reshape(size, *([1] * len(shape)))
    if domain.norm is None and spread.min() >= domain.low and spread.max() <= domain.high:
        yield f"{size} spread ones", np.broadcast_to(spread, (size, *shape)).copy()
