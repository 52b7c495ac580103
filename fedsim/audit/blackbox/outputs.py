# SPDX-License-Identifier: Apache-2.0
"""What a mechanism returned, as numbers and as a fingerprint, whatever it is.

A number, an array, a tensor, a tuple, list or dict of them (a state dict, all rounds), a word, a truth value, None, and
whatever else can be written down: the numbers in it, in order, become a row; the whole of it becomes a fingerprint.
An exception that the mechanism raised is an output too, because whoever waits for an answer sees that it fails.
"""

from __future__ import annotations

import dataclasses
import hashlib
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
Floats = NDArray[np.float64]
_COARSE = 24  # trailing zero bits of a float64 that an honest one has with probability 2^-24


@dataclass(frozen=True, eq=False)
class Outputs:
    """n outputs: values (n, d), and what was derived from each whole output."""

    values: Floats
    """Missing places (shorter outputs) are 0; so is what is not finite."""
    summary: Floats
    """(n, len(SUMMARY))"""
    fingerprints: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.fingerprints)

    def widened(self, width: int) -> Outputs:
        """With zeros for the numbers that are missing."""
        missing = width - self.values.shape[1]
        if missing <= 0:
            return self
        return Outputs(np.pad(self.values, ((0, 0), (0, missing))), self.summary, self.fingerprints)


SUMMARY = ("length", "NaN", "+inf", "-inf", "L1 norm", "L2 norm", "largest", "least", "coarse", "whole", "sum")
"""Of the whole output: how many numbers, how many are no numbers, norms, numbers with few digits, whole numbers."""


@dataclass(frozen=True)
class Raised:
    """The mechanism raised this instead of returning anything."""

    kind: str
    text: str = ""


def read(outputs: Sequence[Any] | NDArray[Any], width: int | None = None) -> Outputs:
    """All outputs of a block; `width` numbers are kept of each (by default as many as the longest has)."""
    if isinstance(outputs, np.ndarray) and outputs.dtype.kind in "fiub":
        rows = outputs.reshape(len(outputs), -1).astype(np.float64)
        plain = np.ascontiguousarray(outputs.reshape(len(outputs), -1))
        return _numeric(rows, np.full(len(rows), rows.shape[1]), [_hash(row.tobytes()) for row in plain], width)
    flat = [_flatten(output) for output in outputs]
    lengths = np.array([len(numbers_) for numbers_, _ in flat], dtype=np.int64)
    rows = np.zeros((len(flat), int(lengths.max(initial=0))))
    for row, (found, _) in zip(rows, flat, strict=True):
        row[: len(found)] = found
    prints = [_hash(found.tobytes() + text.encode()) for found, text in flat]
    return _numeric(rows, lengths, prints, width)


def joined(parts: Sequence[Outputs]) -> Outputs:
    """All parts below each other, padded to the widest."""
    width = max(part.values.shape[1] for part in parts)
    return Outputs(
        np.concatenate([part.widened(width).values for part in parts]),
        np.concatenate([part.summary for part in parts]),
        np.concatenate([part.fingerprints for part in parts]),
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


def _numeric(rows: Floats, lengths: NDArray[np.int64], prints: list[int], width: int | None) -> Outputs:
    nan, high, low = np.isnan(rows), np.isposinf(rows), np.isneginf(rows)
    rows = np.clip(np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0), -1e150, 1e150)
    empty = not rows.shape[1]
    summary = np.stack(
        [
            lengths.astype(np.float64),
            *(np.asarray(mask.sum(1), dtype=np.float64) for mask in (nan, high, low)),
            np.abs(rows).sum(1),
            np.sqrt((rows**2).sum(1)),
            np.zeros(len(rows)) if empty else rows.max(1),
            np.zeros(len(rows)) if empty else rows.min(1),
            _coarse(rows).sum(1).astype(np.float64),
            (rows == np.round(rows)).sum(1).astype(np.float64),
            rows.sum(1),
        ],
        axis=1,
    )
    kept = rows if width is None else rows[:, :width]
    return Outputs(kept, summary, np.array(prints, dtype=np.int64))


def _coarse(rows: Floats) -> NDArray[np.bool_]:
    mantissa, _ = np.frexp(rows)
    scaled = np.abs(mantissa) * 2.0 ** (53 - _COARSE)
    return np.asarray(scaled == np.floor(scaled))


def _flatten(output: Any) -> tuple[Floats, str]:
    """The numbers, in order, and everything else as text; the kinds of containers do not matter."""
    found: list[Floats] = []
    text: list[str] = []
    _collect(output, found, text)
    return (np.concatenate(found) if found else np.zeros(0)), "\x1f".join(text)


def _collect(output: Any, found: list[Floats], text: list[str]) -> None:
    if isinstance(output, numbers.Real | Decimal):
        found.append(np.array([_as_float(output)]))
    elif isinstance(output, str):  # a document, perhaps: its numbers, and what is around them
        found.append(np.array([_as_float(part) for part in _NUMBER.findall(output)], dtype=np.float64))
        text.append(_NUMBER.sub("#", output))
    elif dataclasses.is_dataclass(output) and not isinstance(output, type | Raised):
        _collect({field.name: getattr(output, field.name) for field in dataclasses.fields(output)}, found, text)
    elif isinstance(output, Mapping):
        for key in output:
            text.append(str(key))
            _collect(output[key], found, text)
    elif isinstance(output, (list, tuple)):
        text.append(f"[{len(output)}]")
        for item in output:
            _collect(item, found, text)
    elif isinstance(output, (set, frozenset)):
        _collect(sorted(output, key=repr), found, text)
    elif isinstance(output, np.ndarray) or hasattr(output, "__array__"):
        array = np.asarray(output.detach().cpu() if hasattr(output, "detach") else output)
        if array.dtype.kind in "fiub":
            found.append(array.astype(np.float64).reshape(-1))
        elif array.dtype.kind == "c":
            found += [array.real.astype(np.float64).reshape(-1), array.imag.astype(np.float64).reshape(-1)]
        else:
            for item in array.reshape(-1).tolist():
                _collect(item, found, text)
    elif isinstance(output, Raised):
        text.append(f"raised {output.kind}: {output.text}")
    else:
        text.append(repr(output))


def _as_float(number: numbers.Real | Decimal | str) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf")


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
