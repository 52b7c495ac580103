# SPDX-License-Identifier: Apache-2.0
"""Data sets for a mechanism of which nobody has said what it takes: those on which it answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.audit.blackbox.outputs import Raised
from fedsim.audit.blackbox.pairs import Domain, Pair, varied_pairs, whole_numbers, worst_pairs
from fedsim.audit.blackbox.running import Mechanism, once, runs_on
from fedsim.errors import AuditError
from fedsim.privacy.claim import Adjacency

_SHAPES: tuple[tuple[int, ...], ...] = ((), (4,), (2,), (3,), (8,), (1,))
"""Of a record, tried in turn where nobody says what it looks like."""


def made_pairs(
    mechanism: Mechanism, adjacency: Adjacency, domain: Domain, like: Any, most: int, rng: np.random.Generator
) -> tuple[list[Pair], str]:
    """At most so many pairs on which the mechanism gives an answer, and what the reader should know about them."""
    array = None if like is None else np.asarray(like)
    size = None if array is None else max(1, len(array) - 1)
    shapes = _SHAPES if array is None else (array.shape[1:],)
    kinds = (False, True) if array is None or array.dtype.kind not in "iu" else (True,)
    trouble = ""
    for shape, whole in itertools.product(shapes, kinds):
        worst = worst_pairs(adjacency, shape, domain, size)[:most]
        varied = varied_pairs(adjacency, shape, domain, rng, most - len(worst), size)
        if whole:
            worst, varied = whole_numbers(worst), whole_numbers(varied)
        raised = [runs_on(mechanism, pair) for pair in worst]
        if not all(raised):
            return answered(mechanism, worst, varied)
        trouble = trouble or raised[0]
    raise AuditError(
        f"pairs is missing, and the mechanism takes no arrays of numbers ({trouble}); give pairs or like to"
        " audit_mechanism, or name a Subject that has them"
    )


def answered(mechanism: Mechanism, worst: Sequence[Pair], varied: Sequence[Pair]) -> tuple[list[Pair], str]:
    """The pairs on which it answers, and those where it answers on one side only: then the refusal is the leak.

    Not so where the refused data set is empty. Nor, among the varied pairs, where it has a number of records with which
    every data set is refused: what needs ten records to be trained on is defined for ten and more. The text says so.
    """
    pairs = (*worst, *varied)
    refused = [tuple(_refuses(mechanism, part) for part in (pair.first, pair.second)) for pair in pairs]
    sizes: set[int] = set()  # with which it answers
    for pair, (first, second) in zip(pairs, refused, strict=True):
        sizes |= {len(part) for part, no in ((pair.first, first), (pair.second, second)) if not no}

    def kept(place: int, pair: Pair) -> bool:
        if all(refused[place]) or not any(refused[place]):
            return not any(refused[place])
        if place < len(worst):
            return bool(len(pair.first) and len(pair.second))
        return len(pair.first if refused[place][0] else pair.second) in sizes

    made = {len(part) for pair in pairs for part in (pair.first, pair.second)}
    missing = ", ".join(map(str, sorted(made - sizes - {0})))
    note = f"All data sets of {missing} records were refused, which was not held against the claim." if missing else ""
    return [pair for place, pair in enumerate(pairs) if kept(place, pair)], note


def _refuses(mechanism: Mechanism, dataset: Any) -> bool:
    return isinstance(once(mechanism, dataset, np.random.default_rng(0)), Raised)
