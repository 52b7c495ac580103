# SPDX-License-Identifier: Apache-2.0
"""A zoo of broken mechanisms: how people really break differential privacy, each with its repaired twin.

The auditor is tested on it (`make calibrate`): every broken one must be found `violated` and every twin `consistent`.
It knows nothing about them but what a user tells it: the function, the claim, and neighbouring data sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.audit.blackbox.pairs import Domain
from fedsim.audit.blackbox.running import Vectorised
from fedsim.audit.mechanism import Subject
from fedsim.audit.verdict import Claim
from fedsim.privacy.gaussian import gaussian_sigma

Floats = NDArray[np.float64]
Rng = np.random.Generator
Output = Any
"""Many outputs: an array (trials, ...) or a list."""

CLAIM = Claim(1.0, 1e-5)
"""What most of them claim."""
SIGMA = gaussian_sigma(1.0, 1e-5)
"""The noise multiplier that keeps it."""
PURE = Claim(1.0)


@dataclass(frozen=True, eq=False)
class Specimen:
    """A broken mechanism, how people come to write it, and the same thing done right."""

    name: str
    story: str
    broken: Subject
    repaired: Subject


def specimen(
    name: str,
    story: str,
    broken: Any,
    repaired: Any,
    claim: Claim = CLAIM,
    pairs: Sequence[Any] | None = None,
    *,
    like: Floats | None = None,
    domain: Domain | None = None,
    trials: int = 240_000,
) -> Specimen:
    """Both under the same claim, on the same data sets, with the same number of runs; made by `many` functions."""
    subjects = (
        Subject(Vectorised(many), claim, pairs, domain=domain, like=like, trials=trials) for many in (broken, repaired)
    )
    return Specimen(name, story, *subjects)


def zoo() -> dict[str, Specimen]:
    """All of them, by name."""
    from fedsim.audit.zoo.accounting import ACCOUNTING
    from fedsim.audit.zoo.release import RELEASE
    from fedsim.audit.zoo.training import TRAINING

    return {one.name: one for one in (*TRAINING, *RELEASE, *ACCOUNTING)}


def clipped(records: Floats, norm: float = 1.0) -> Floats:
    """Every record scaled down to the norm."""
    norms = np.linalg.norm(records, axis=-1, keepdims=True)
    scaled: Floats = records * np.minimum(1.0, norm / np.maximum(norms, 1e-12))
    return scaled


def axis(width: int, value: float = 1.0, place: int = 0) -> Floats:
    """A record along one coordinate."""
    record = np.zeros(width)
    record[place] = value
    return record


def with_and_without(record: Floats, rest: Floats) -> tuple[Floats, Floats]:
    """An add/remove pair."""
    return np.concatenate([rest, record[None]]), rest
