# SPDX-License-Identifier: Apache-2.0
"""Neighbouring data sets: two that differ in one record, chosen so that a mechanism's leak, if any, is easy to see."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
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
    """What a record may be: each number between low and high; the norm at most `norm`, where one is given.

    With `values`, such as the codes of categories, each number is one of them, and low and high are their ends.
    """

    low: float = -FAR
    high: float = FAR
    norm: float | None = None
    values: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse an empty domain."""
        if self.values is not None:
            ordered = tuple(sorted({float(value) for value in self.values}))
            if len(ordered) < 2 or not np.isfinite(ordered).all():
                raise AuditError(f"domain has the values {self.values!r}; give at least two finite numbers")
            for field, value in (("values", ordered), ("low", ordered[0]), ("high", ordered[-1])):
                object.__setattr__(self, field, value)
        if not self.low < self.high:
            raise AuditError(f"domain is {self.low:g} to {self.high:g}; low must be below high")

    @classmethod
    def of(cls, domain: Domain | Collection[float]) -> Domain:
        """A `Domain` as it is; (low, high) as an interval; a set, a range or a list as the values that occur."""
        if isinstance(domain, Domain):
            return domain
        return cls(*domain) if isinstance(domain, tuple) else cls(values=tuple(domain))

    @property
    def base(self) -> float:
        """The plainest number that a record may hold: 0, or else the lowest."""
        return 0.0 if self.fits(np.zeros(1)) else self.low

    def fits(self, record: Records) -> bool:
        """Whether a record may be so."""
        inside = bool((record >= self.low).all() and (record <= self.high).all())
        if self.values is not None:
            inside = inside and bool(np.isin(record, self.values).all())
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
    copies. With `size` all others are so many, because a mechanism may be meant for that number only.
    """
    records = _records(shape, domain)
    pairs: list[Pair] = []
    for rest_name, rest in _rests(shape, domain, size):
        for name, record in records:
            what = f"{name} beside {rest_name}"
            if adjacency == "add/remove":
                pairs.append(Pair(_with(rest, record), rest, f"with and without {what}"))
                continue
            if not record.any():
                continue
            if domain.fits(-record):
                pairs.append(Pair(_with(rest, record), _with(rest, -record), f"{what}, or its negative"))
            other = _other(record, domain)  # an even function does not tell a record from its negative
            if other is not None:
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
    numbers of other records have their turn, the small ones more often (where `size` is given: that one only); they are
    equal, alternate or are mixed, and the record that matters comes last, first or in between.
    """
    pairs: list[Pair] = []
    values = sorted({value for value in (*_VALUES, domain.low, domain.high) if domain.low <= value <= domain.high})
    if domain.values is not None:
        values = [*domain.values]
    turns = [*_SMALL] * 4 + [*_LARGE] if size is None else [size]
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


def like_pairs(adjacency: Adjacency, like: Records, domain: Domain, rng: np.random.Generator, most: int) -> list[Pair]:
    """An example data set without one of its records, or with another of its records in that place."""
    pairs: list[Pair] = []
    places = rng.permutation(len(like))[:most]
    for place, other in zip(places.tolist(), np.roll(places, 1).tolist(), strict=True):
        if adjacency == "add/remove":
            pairs.append(Pair(like, np.delete(like, place, axis=0), f"like, with and without record {place}"))
        elif not np.array_equal(like[place], like[other]):
            second = like.copy()
            second[place] = like[other]
            pairs.append(Pair(like, second, f"like, with record {other} in place of record {place}"))
    return [pair for pair in pairs if all(domain.fits(record) for record in pair.first)]


def _other(record: Records, domain: Domain) -> Records | None:
    """Zero, the lowest or the highest record: the first that may occur and is another one."""
    ends = (np.full_like(record, end) for end in (0.0, domain.low, domain.high))
    return next((end for end in ends if domain.fits(end) and (end != record).any()), None)


def _records(shape: tuple[int, ...], domain: Domain) -> list[tuple[str, Records]]:
    width = int(np.prod(shape, dtype=int))
    places = [0] if width == 1 else [0, width - 1]
    inside = [value for value in (7.0, 0.5) if domain.low < value < domain.high]
    numbers = domain.values[:8] if domain.values is not None else inside
    ends = sorted({1.0, domain.high, -1.0, domain.low, *numbers}, key=lambda end: (abs(end), -end))
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


def _rests(shape: tuple[int, ...], domain: Domain, size: int | None) -> Iterator[tuple[str, Records]]:
    many = _SIZE if size is None else size
    base = np.full(shape, domain.base)
    yield f"{many} equal ones", np.repeat(base[None], many, axis=0)
    if size is None:  # a leak may depend on how many there are; what divides by them shows it most where they are few
        for number, name in ((5, "5 equal ones"), (60, "60 equal ones"), (0, "nothing"), (1, "a single other")):
            yield name, np.repeat(base[None], number, axis=0)
    if not many:
        return
    top = np.full(shape, min(domain.high, 1.0) if domain.norm is None else 0.0)
    if domain.fits(top) and (top != base).any():
        yield f"{many} large ones", np.repeat(top[None], many, axis=0)
    ends = max(domain.low, -1.0), min(domain.high, 1.0)
    along = np.linspace(*ends, many) if domain.values is None else np.resize(domain.values, many)
    spread = np.broadcast_to(along.reshape(many, *([1] * len(shape))), (many, *shape)).copy()
    if domain.norm is None and all(domain.fits(record) for record in spread):
        yield f"{many} spread ones", spread
