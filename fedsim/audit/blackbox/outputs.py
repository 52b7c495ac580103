# SPDX-License-Identifier: Apache-2.0
"""What a mechanism returned, as numbers and as a fingerprint, whatever it is.

A number, an array, a tensor, a tuple, list or dict of them (a state dict, all rounds), a table, a word, a truth value,
None, an object of somebody's class: the numbers in it, in order, become a row; the whole of it becomes a fingerprint.
An exception that the mechanism raised is an output too, because whoever waits for an answer sees that it fails.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
Floats = NDArray[np.float64]
_UNREAD = itertools.count()
_DEPTH = 12  # containers within containers
_COARSE = 24  # trailing zero bits of a float64 that an honest one has with probability 2^-24


@dataclass(frozen=True, eq=False)
class Outputs:
    """n outputs: values (n, d), and what was derived from each whole output."""

    values: Floats
    """Missing places (shorter outputs) are 0; so is what is not finite."""
    summary: Floats
    """(n, len(SUMMARY))"""
    fingerprints: NDArray[np.int64]
    """Of the whole output: its numbers and everything else."""
    words: NDArray[np.int64]
    """Of everything but the numbers: texts, names, kinds of numbers, shapes of arrays, lengths of lists."""

    def __len__(self) -> int:
        return len(self.fingerprints)

    @property
    def unanswered(self) -> NDArray[np.bool_]:
        """Which of them are refusals."""
        return np.asarray(self.summary[:, -1] > 0)

    def widened(self, width: int) -> Outputs:
        """With zeros for the numbers that are missing."""
        missing = width - self.values.shape[1]
        if missing <= 0:
            return self
        return dataclasses.replace(self, values=np.pad(self.values, ((0, 0), (0, missing))))

    def part(self, places: slice) -> Outputs:
        """Some of the outputs."""
        return Outputs(self.values[places], self.summary[places], self.fingerprints[places], self.words[places])


SUMMARY = (
    "length", "NaN", "+inf", "-inf", "L1 norm", "L2 norm", "largest", "least", "coarse", "whole", "sum", "no answer"
)  # fmt: skip
"""Of the whole output: how many numbers, how many are no numbers, norms, numbers with few digits, whole numbers."""


@dataclass(frozen=True)
class Raised:
    """The mechanism raised this instead of returning anything."""

    kind: str
    text: str = ""


def is_refusal(output: Any) -> bool:
    """Whether an output is no answer: an exception, None, or numbers of which each is NaN."""
    return bool(read([output]).unanswered[0])


def read(outputs: Sequence[Any] | NDArray[Any], width: int | None = None) -> Outputs:
    """All outputs of a block; `width` numbers are kept of each (by default as many as the longest has)."""
    if isinstance(outputs, np.ndarray) and outputs.dtype.kind in "fiub":
        rows = outputs.reshape(len(outputs), -1).astype(np.float64)
        plain = np.ascontiguousarray(outputs.reshape(len(outputs), -1))
        prints = np.array([_hash(row.tobytes()) for row in plain], dtype=np.int64)
        lengths, silent = np.full(len(rows), rows.shape[1]), np.zeros(len(rows), dtype=bool)
        return _numeric(rows, lengths, silent, prints, np.zeros_like(prints), width)
    flat = [_flatten(output) for output in outputs]
    lengths = np.array([len(numbers_) for numbers_, _ in flat], dtype=np.int64)
    rows = np.zeros((len(flat), int(lengths.max(initial=0))))
    for row, (found, _) in zip(rows, flat, strict=True):
        row[: len(found)] = found
    prints = np.array([_hash(found.tobytes() + text.encode()) for found, text in flat], dtype=np.int64)
    words = np.array([_hash(text.encode()) for _, text in flat], dtype=np.int64)
    silent = np.array([output is None or isinstance(output, Raised) for output in outputs], dtype=bool)
    return _numeric(rows, lengths, silent, prints, words, width)


def joined(parts: Sequence[Outputs]) -> Outputs:
    """All parts below each other, padded to the widest."""
    width = max(part.values.shape[1] for part in parts)
    return Outputs(
        np.concatenate([part.widened(width).values for part in parts]),
        np.concatenate([part.summary for part in parts]),
        np.concatenate([part.fingerprints for part in parts]),
        np.concatenate([part.words for part in parts]),
    )


def single_precision(values: Floats) -> bool:
    """Whether every number is one that float32 can hold: the mechanism calculates so, and rounds so."""
    with np.errstate(over="ignore"):
        return bool((values == values.astype(np.float32)).all())


def lowest_bits(values: Floats) -> Floats:
    """The exponent of the lowest bit that is set: −52 for 1 + 2⁻⁵². Mironov (2012): it gives away what was added."""
    mantissa, exponent = np.frexp(values)
    whole = np.abs(mantissa * 2.0**53).astype(np.int64)
    lowest = np.log2(np.where(whole == 0, 1, whole & -whole).astype(np.float64))
    return np.where(whole == 0, 0.0, lowest + exponent - 53)


def _numeric(
    rows: Floats,
    lengths: NDArray[np.int64],
    silent: NDArray[np.bool_],
    prints: NDArray[np.int64],
    words: NDArray[np.int64],
    width: int | None,
) -> Outputs:
    nan, high, low = np.isnan(rows), np.isposinf(rows), np.isneginf(rows)
    rows = np.clip(np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0), -1e150, 1e150)
    # What pads a short output to its block's width is no part of it: a summary that counted it would depend on what
    # else is in the block, and the runs would not be independent.
    there = np.arange(rows.shape[1]) < lengths[:, None]
    summary = np.stack(
        [
            lengths.astype(np.float64),
            *(np.asarray(mask.sum(1), dtype=np.float64) for mask in (nan, high, low)),
            _total(np.abs(rows)),
            np.sqrt(_total(rows**2)),
            *(_where_any(extreme, lengths) for extreme in _extremes(rows, there)),
            (_coarse(rows) & there).sum(1).astype(np.float64),
            ((rows == np.round(rows)) & there).sum(1).astype(np.float64),
            _total(rows),
            (silent | ((lengths > 0) & (nan.sum(1) == lengths))).astype(np.float64),
        ],
        axis=1,
    )
    kept = rows if width is None else rows[:, :width]
    return Outputs(kept, summary, prints, words)


def _total(rows: Floats) -> Floats:
    """The sum of each row, term by term: numpy's own order of adding, hence its rounding, depends on the width."""
    return rows.cumsum(1)[:, -1] if rows.shape[1] else np.zeros(len(rows))


def _extremes(rows: Floats, there: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    return rows.max(1, initial=-np.inf, where=there), rows.min(1, initial=np.inf, where=there)


def _where_any(extreme: Floats, lengths: NDArray[np.int64]) -> Floats:
    return np.where(lengths > 0, extreme, 0.0)


def _coarse(rows: Floats) -> NDArray[np.bool_]:
    mantissa, _ = np.frexp(rows)
    scaled = np.abs(mantissa) * 2.0 ** (53 - _COARSE)
    return np.asarray(scaled == np.floor(scaled))


def _flatten(output: Any) -> tuple[Floats, str]:
    """The numbers, in order, and everything else as text; the kinds of containers do not matter."""
    found: list[Floats] = []
    text: list[str] = []
    try:
        _collect(output, found, text)
    except Exception as error:  # a generator's, say, or that of somebody's property
        text.append(f"raised {type(error).__name__}: {error}")
    return (np.concatenate(found) if found else np.zeros(0)), "\x1f".join(text)


def _collect(output: Any, found: list[Floats], text: list[str], within: tuple[int, ...] = ()) -> None:
    if id(output) in within or len(within) > _DEPTH:  # an object that holds itself
        return
    inner = partial(_collect, found=found, text=text, within=(*within, id(output)))
    if isinstance(output, numbers.Complex | Decimal):
        _collect_number(output, found, text)
    elif isinstance(output, str):  # a document, perhaps: its numbers, and what is around them
        around = _NUMBER.sub("#", output)
        numbers_ = [_as_float(part) for part in _NUMBER.findall(output)]
        found.append(np.array([_code(around), *numbers_], dtype=np.float64))
        text.append(around)
    elif isinstance(output, bytes | bytearray):
        found.append(np.frombuffer(output, dtype=np.uint8).astype(np.float64))
    elif isinstance(output, Raised):
        text.append(f"raised {output.kind}: {output.text}")
    elif isinstance(output, Mapping):
        for key in output:
            text.append(str(key))
            inner(output[key])
    elif isinstance(output, (list, tuple, Iterator)):
        items = list(output)
        text.append(f"[{len(items)}]")
        for item in items:
            inner(item)
    elif isinstance(output, (set, frozenset)):
        inner(sorted(output, key=repr))
    elif isinstance(output, np.ndarray):
        _collect_array(output, found, text, inner)
    elif (inside := _inside(output)) is not None:
        inner(inside)
    elif hasattr(output, "__code__") or " at 0x" in repr(output):
        text.append(f"unread {next(_UNREAD)}")  # never the same, so that nobody takes it for an answer that always is
    else:
        found.append(np.array([_code(repr(output))]))
        text.append(repr(output))


def _collect_number(output: Any, found: list[Floats], text: list[str]) -> None:
    if isinstance(output, numbers.Real | Decimal):
        found.append(np.array([_as_float(output)]))
        text.append("i" if isinstance(output, numbers.Integral) else "f")  # 3 and 3.0 look different
    else:
        found.append(np.array([output.real, output.imag], dtype=np.float64))


def _collect_array(array: NDArray[Any], found: list[Floats], text: list[str], inner: Callable[[Any], None]) -> None:
    text.append(f"{array.dtype.kind}{array.shape}")
    if array.dtype.kind in "fiub":
        found.append(array.astype(np.float64).reshape(-1))
    elif array.dtype.kind == "c":
        found += [array.real.astype(np.float64).reshape(-1), array.imag.astype(np.float64).reshape(-1)]
    else:
        for item in array.reshape(-1).tolist():
            inner(item)


def _inside(output: Any) -> Any:
    """What an object of somebody else's class holds: a table, a sparse matrix, a tensor, a model; None if unknown."""
    if isinstance(output, type) or hasattr(output, "__code__"):
        return None
    for method in ("state_dict", "to_dict", "toarray"):
        if callable(getattr(output, method, None)):
            return getattr(output, method)()
    if hasattr(output, "__array__"):
        return np.asarray(output.detach().cpu() if hasattr(output, "detach") else output)
    names = [*getattr(output, "__dict__", ()), *getattr(type(output), "__slots__", ())]
    return {name: getattr(output, name) for name in names if hasattr(output, name)} or None


def _as_float(number: numbers.Real | Decimal | str) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf")


def _code(word: str) -> float:
    """A number for a word, the same wherever it occurs: a word at one place of many can be told from another."""
    return (_hash(word.encode()) % 65_521 + 0.5) / 65_536


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
