# SPDX-License-Identifier: Apache-2.0
"""What every estimator asks of its arguments, each refusal one sentence that names the argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.audit.estimate import Selection
from fedsim.audit.limits.ranges import within
from fedsim.errors import AuditError

Floats = NDArray[np.float64]
Scores = Sequence[float] | NDArray[Any]


def count(name: str, value: int, most: int | None = None, least: int = 0, of: str = "") -> int:
    """A whole number from `least` to `most`."""
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        whole = -1
    if whole != value or whole < least:
        raise AuditError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    if most is not None and whole > most:
        raise AuditError(f"{name} is {whole}; it cannot exceed {of or 'the number of trials'}, which is {most}")
    return whole


def confusion(fp: int, fn: int, negatives: int, positives: int) -> tuple[int, int, int, int]:
    """The counts of a membership test: errors among so many trials without, and with, the canary."""
    negatives, positives = count("negatives", negatives, least=1), count("positives", positives, least=1)
    return count("fp", fp, negatives, of="negatives"), count("fn", fn, positives, of="positives"), negatives, positives


def checked_delta(delta: float, *, positive: bool = False) -> float:
    """0 ≤ δ < 1; positive where the model has no finite ε at 0."""
    if not within(delta, 0, 1) or delta == 1:
        raise AuditError(f"delta is {delta!r}; it must be at least 0 and below 1, 1e-5 is usual")
    if positive and delta == 0:
        raise AuditError("delta is 0; Gaussian noise has no finite epsilon there, so name one above 0, such as 1e-5")
    return float(delta)


def error_of(confidence: float, selection: Selection, name: str = "confidence") -> float:
    """The error probability that one choice of threshold is given."""
    if not within(confidence, 0, 1) or confidence in (0, 1):
        raise AuditError(f"{name} is {confidence!r}; it must lie between 0 and 1, 0.95 is usual")
    return selection.share(1 - confidence)


def scores(name: str, values: Scores, least: int = 3) -> Floats:
    """Finite scores, (n,), enough of them to say something about their spread."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise AuditError(f"{name} is no list of numbers; give one score for each trial") from None
    if array.ndim != 1 or len(array) < least:
        raise AuditError(f"{name} has the shape {array.shape}; it must be one row of at least {least} scores")
    if not np.isfinite(array).all():
        odd = int((~np.isfinite(array)).sum())
        raise AuditError(f"{name} holds {odd} scores that are not finite numbers; leave out or repair these trials")
    return array
