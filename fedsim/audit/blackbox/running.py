# SPDX-License-Identifier: Apache-2.0
"""Run somebody else's mechanism many times on one of two data sets, as a fair coin says, and read what it returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.audit.blackbox.distinguishers import telling
from fedsim.audit.blackbox.outputs import Floats, Outputs, Raised, joined, read
from fedsim.audit.blackbox.pairs import Pair
from fedsim.errors import AuditError

Mechanism = Callable[[Any, np.random.Generator], Any]
_WIDE = 256  # numbers of an output that are kept, once it is known which of them matter
_BLOCK = 2**21  # numbers that are held at once before they are reduced to those


@dataclass(frozen=True, eq=False)
class Lens:
    """For outputs of very many numbers: the places that differed most in the first runs, and one direction."""

    places: NDArray[np.int64]
    direction: Floats

    @classmethod
    def for_outputs(cls, first: Outputs, second: Outputs) -> Lens | None:
        """None where all numbers can be kept."""
        width = max(first.values.shape[1], second.values.shape[1])
        if width <= _WIDE or not len(first) or not len(second):
            return None
        first, second = first.widened(width), second.widened(width)  # outputs may be of any length
        places = telling(first.values, second.values, _WIDE)
        shift = first.values.mean(0) - second.values.mean(0)
        return cls(np.array(places), shift / (np.linalg.norm(shift) or 1.0))

    def apply(self, outputs: Outputs) -> Outputs:
        """The kept numbers, and the product with the direction as the last one."""
        width = len(self.direction)
        values = outputs.values[:, :width]
        values = np.pad(values, ((0, 0), (0, width - values.shape[1])))
        along = values @ self.direction
        return dataclasses.replace(outputs, values=np.column_stack([values[:, self.places], along]))


def run(
    mechanism: Mechanism, pair: Pair, trials: int, rng: np.random.Generator, lens: Lens | None = None
) -> tuple[Outputs, Outputs]:
    """The outputs on the first and on the second data set; which one a run takes is tossed for each run.

    The runs are made in the order of the coin, so that a mechanism that remembers its last answer gains nothing by it.
    Every run has a generator of its own.
    """
    coin = rng.random(trials) < 0.5
    if hasattr(mechanism, "batch"):
        heads = int(coin.sum())
        sides = ((pair.first, heads), (pair.second, trials - heads))
        return _batched(mechanism, *sides[0], rng, lens), _batched(mechanism, *sides[1], rng, lens)
    seeds = rng.integers(2**63, size=trials)
    kept: tuple[list[Outputs], list[Outputs]] = ([], [])
    block: tuple[list[Any], list[Any]] = ([], [])
    size = 512
    for head, seed in zip(coin.tolist(), seeds.tolist(), strict=True):
        output = once(mechanism, pair.first if head else pair.second, np.random.default_rng(seed))
        block[not head].append(output)
        if len(block[0]) + len(block[1]) >= size:
            size = _flush(block, kept, lens)
    _flush(block, kept, lens)
    return _all(kept[0], lens), _all(kept[1], lens)


def _flush(block: tuple[list[Any], list[Any]], kept: tuple[list[Outputs], list[Outputs]], lens: Lens | None) -> int:
    """Read and reduce what was collected; how many runs the next block may hold."""
    widest = 1
    for waiting, done in zip(block, kept, strict=True):
        if waiting:
            outputs = read(waiting)
            widest = max(widest, outputs.values.shape[1])
            done.append(lens.apply(outputs) if lens else outputs)
            waiting.clear()
    return max(8, min(512, _BLOCK // widest))


def _all(parts: list[Outputs], lens: Lens | None) -> Outputs:
    return joined(parts) if parts else (lens.apply(read([])) if lens else read([]))


def once(mechanism: Mechanism, dataset: Any, rng: np.random.Generator) -> Any:
    """One run, on a copy of the data; what it raises is its output."""
    try:
        return mechanism(_copy(dataset), rng)
    except (Exception, SystemExit) as error:
        return Raised(type(error).__name__, str(error))


def runs_on(mechanism: Mechanism, pair: Pair, *, both: bool = False) -> str:
    """What the mechanism raised on one of the two data sets (`both`: on each of them); empty if it answers."""
    outputs = [once(mechanism, dataset, np.random.default_rng(0)) for dataset in (pair.first, pair.second)]
    raised = [f"it raised {output.kind}: {output.text}" for output in outputs if isinstance(output, Raised)]
    return raised[0] if len(raised) >= (2 if both else 1) else ""


def _batched(mechanism: Any, dataset: Any, trials: int, rng: np.random.Generator, lens: Lens | None) -> Outputs:
    parts: list[Outputs] = []
    size = 64
    while trials > 0:
        asked = min(size, trials)
        made = _many(mechanism, dataset, int(rng.integers(2**63)), asked)
        if len(made) != asked:
            raise AuditError(
                f"batch returned {len(made)} outputs where {asked} were asked for; return one for each run"
            )
        outputs = read(made)
        parts.append(lens.apply(outputs) if lens else outputs)
        trials -= asked
        size = max(8, min(2**16, _BLOCK // max(1, outputs.values.shape[1])))
    return _all(parts, lens)


def _many(mechanism: Any, dataset: Any, seed: int, asked: int) -> Any:
    """A batch of outputs; one by one where the batch raises, since what a single run raises is its output."""
    try:
        return mechanism.batch(_copy(dataset), np.random.default_rng(seed), asked)
    except (Exception, SystemExit):
        return [once(mechanism, dataset, rng) for rng in np.random.default_rng(seed).spawn(asked)]


def _copy(dataset: Any) -> Any:
    """A mechanism may work in place; the next run must not see that."""
    if isinstance(dataset, np.ndarray):
        return dataset.copy()
    if hasattr(dataset, "clone"):
        return dataset.clone()
    return copy.deepcopy(dataset) if isinstance(dataset, (list, dict, set, tuple)) else dataset


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of numpy and torch, for mechanisms that use them, and put them back after."""
    import torch

    state = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002


@dataclass(frozen=True, eq=False)
class Vectorised:
    """A mechanism that makes many outputs at once: `many(dataset, rng, trials)` returns (trials, ...)."""

    many: Callable[[Any, np.random.Generator, int], Any]

    def __call__(self, dataset: Any, rng: np.random.Generator) -> Any:
        """One output."""
        return self.many(dataset, rng, 1)[0]

    def batch(self, dataset: Any, rng: np.random.Generator, trials: int) -> Any:
        """As many outputs as asked for."""
        return self.many(dataset, rng, trials)
