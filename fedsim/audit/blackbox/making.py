# SPDX-License-Identifier: Apache-2.0
"""Data sets for a mechanism of which nobody has said what it takes: those on which it answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedsim.audit.blackbox.outputs import Raised, is_refusal
from fedsim.audit.blackbox.pairs import (
    Domain,
    Pair,
    Records,
    like_pairs,
    varied_pairs,
    whole_numbers,
    worst_pairs,
)
from fedsim.audit.blackbox.running import Mechanism, once, runs_on
from fedsim.errors import AuditError, counted
from fedsim.privacy.claim import Adjacency

_SHAPES: tuple[tuple[int, ...], ...] = ((), (4,), (2,), (3,), (8,), (1,))
"""Of a record, tried in turn where nobody says what it looks like."""
_LIKE = 16  # pairs of an example data set's own records
_LEFT = 0.5  # of the pairs; with fewer the worst of them may be among those that were refused
_AGAIN = 3  # runs in which a data set must be refused each time


@dataclass(frozen=True)
class Made:
    """Pairs, and what the reader should know about them."""

    pairs: Sequence[Pair]
    note: str = ""
    question: str = ""
    """What must be known before the claim can be called consistent."""


def made_pairs(
    mechanism: Mechanism, adjacency: Adjacency, domain: Domain | None, like: Any, most: int, rng: np.random.Generator
) -> Made:
    """At most so many pairs on which the mechanism gives an answer."""
    array = None if like is None else np.asarray(like)
    size = None if array is None or not len(array) else len(array) - 1
    shapes = _SHAPES if array is None else (array.shape[1:],)
    kinds = (False, True) if array is None or array.dtype.kind not in "iu" else (True,)
    limits, trouble = domain or Domain(), ""
    for shape, whole in itertools.product(shapes, kinds):
        worst = worst_pairs(adjacency, shape, limits, size)[:most]
        varied = varied_pairs(adjacency, shape, limits, rng, most - len(worst), size)
        pairs = [*worst, *varied]
        if whole:
            pairs = whole_numbers(pairs)
        if array is not None:
            pairs = [*like_pairs(adjacency, array, limits, rng, _LIKE), *pairs]
        raised = [runs_on(mechanism, pair) for pair in pairs]
        if not all(raised):
            return answered(mechanism, pairs, invented=domain is None, known=array)
        trouble = trouble or raised[0]
    _refuse_fixed_size(mechanism, array)
    raise AuditError(
        f"pairs is missing, and the mechanism answered on none of the arrays of numbers that were tried ({trouble});"
        " give pairs or like to audit_mechanism, or name a Subject that has them"
    )


def _refuse_fixed_size(mechanism: Mechanism, like: Records | None) -> None:
    """An error where a mechanism answers on `like` itself, but on no data set of one record fewer."""
    if like is not None and len(like) and not isinstance(once(mechanism, like, np.random.default_rng(0)), Raised):
        raise AuditError(
            f"the mechanism answers on like, with {counted(len(like), 'record')}, and on no data set of one record"
            " fewer; claim adjacency replace, under which the number of records stays, or give pairs"
        )


def answered(mechanism: Mechanism, pairs: Sequence[Pair], *, invented: bool, known: Records | None = None) -> Made:
    """The pairs on which the mechanism answers, and those where a refusal is to be counted as an output.

    A refusal is an exception, None, or nothing but NaN. Two kinds of it are not held against the claim. Where every
    data set of a number of records is refused, the mechanism is defined for other numbers: the note names them, and if
    few pairs are left, the question asks for a data set such as it is used on. Where
    the records are `invented` (nobody has given a domain) and every data set that holds a certain record is refused,
    this record may be one that cannot occur: such pairs are left out, and the question asks for the domain. Any other
    refusal depends on what the mechanism must hide. Records of `known` can occur.
    """
    refusals = Refusals(mechanism, pairs, known)
    sizes = {len(part) for pair in pairs for part in (pair.first, pair.second)}
    refused = sizes - refusals.sizes
    fitting = [pair for pair in pairs if not {len(pair.first), len(pair.second)} & refused]
    fitting = [pair for pair in fitting if not all(refusals.of(part) for part in (pair.first, pair.second))]
    kept = [pair for pair in fitting if not (invented and refusals.any and refusals.refused_records(pair))]
    missing = ", ".join(map(str, sorted(refused - {0})))
    note = f"All data sets of {missing} records were refused, which was not held against the claim." if missing else ""
    questions = [refusals.question()]
    if missing and len(kept) < _LEFT * len(pairs):
        questions.append(
            f"Only {len(kept)} of {len(pairs)} pairs of data sets have a number of records that the mechanism takes:"
            " give like, a data set such as it is used on."
        )
    return Made(
        kept or [pair for pair in pairs if not runs_on(mechanism, pair)], note, " ".join(filter(None, questions))
    )


class Refusals:
    """Which of the made data sets a mechanism refuses, and on account of which records."""

    def __init__(self, mechanism: Mechanism, pairs: Sequence[Pair], known: Records | None = None) -> None:
        self._mechanism = mechanism
        self._parts = [part for pair in pairs for part in (pair.first, pair.second)]
        self._seen = {id(part): self._refuses(part, seed) for seed, part in enumerate(self._parts)}
        self._records: dict[bytes, bool] = {record.tobytes(): False for record in (() if known is None else known)}
        self._example: tuple[Records, Any] | None = None

    def of(self, part: Records) -> bool:
        """Whether one of the data sets was refused when it was first tried."""
        return self._seen[id(part)]

    @cached_property
    def any(self) -> bool:
        """Whether there was a refusal at all, also of nothing but copies of a record: a sample of them holds it."""
        distinct = {
            record.tobytes(): np.repeat(record[None], len(part), axis=0) for part in self._parts for record in part
        }
        return any(self._seen.values()) or any(self._refuses(copies) for copies in distinct.values())

    @cached_property
    def sizes(self) -> set[int]:
        """The numbers of records with which an answer came, or comes if they are records of data sets that got one."""
        answered = {len(part) for part in self._parts if not self.of(part)}
        for size in {len(part) for part in self._parts} - answered:
            if any(not self._refuses(host[np.arange(size) % len(host)]) for host in self._hosts):
                answered.add(size)
        return answered

    def refused_records(self, pair: Pair) -> bool:
        """Whether a data set of the pair holds a record on account of which it is refused."""
        distinct = {record.tobytes(): record for part in (pair.first, pair.second) for record in part}
        return any(self._is_refused(record, len(pair.first)) for record in distinct.values())

    def question(self) -> str:
        """What is to be asked about the records that were refused."""
        count = sum(self._records.values())
        if not count or self._example is None:
            return ""
        record, output = self._example
        values = " ".join(f"{value:g}" for value in record.reshape(-1)[:4])
        more = " ..." if record.size > 4 else ""
        why = f"it raised {output.kind}: {output.text}" if isinstance(output, Raised) else f"it returned {output!r}"
        return (
            f"The mechanism refused {count} of {len(self._records)} invented records, such as {values}{more} ({why}),"
            " and data sets that hold one were left out: give domain, within which a refusal counts as an output."
        )

    def _refuses(self, part: Records, seed: int = 0) -> bool:
        return is_refusal(once(self._mechanism, part, np.random.default_rng(seed)))

    def _is_refused(self, record: Records, size: int) -> bool:
        """Whether every data set with the record is refused: copies of it, and two answered ones with it in between."""
        key = record.tobytes()
        if key not in self._records:
            tried = self._with(record, size)
            self._records[key] = all(self._refuses(part, seed) for seed in range(_AGAIN) for part in tried)
            if self._records[key] and self._example is None:
                self._example = record, once(self._mechanism, tried[0], np.random.default_rng(0))
        return self._records[key]

    def _with(self, record: Records, size: int) -> list[Records]:
        """Data sets of which at least half is the record, so that also a sample of them holds it."""
        mixed = []
        for host in self._hosts:
            with_it = host.copy()
            with_it[::2] = record
            mixed.append(with_it)
        return [np.repeat(record[None], max(size, 1), axis=0), *mixed]

    @cached_property
    def _hosts(self) -> list[Records]:
        """Two data sets that are answered time and again."""
        return list(itertools.islice(self._answered_often(), 2))

    def _answered_often(self) -> Iterator[Records]:
        for part in self._parts:
            often = len(part) > 1 and not self.of(part)
            if often and not any(self._refuses(part, seed) for seed in range(1, _AGAIN)):
                yield part
