# SPDX-License-Identifier: Apache-2.0
"""Model weights and updates as Flower records, without copying them while they stay in the process.

Flower's `Array` serialises its tensor when it is constructed. Within one process nobody needs the bytes, so a
`TensorArray` holds the tensor and serialises only when bytes are asked for: in a message that crosses a process or a
machine it is an ordinary Array.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from io import BytesIO
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from torch import Tensor

from fedsim.training import CohortResult, Layout


class Promised(NamedTuple):
    """The update of one client of a cohort, which is computed when somebody asks for its numbers."""

    cohort: CohortResult
    place: int

    def numel(self) -> int:
        """P."""
        return self.cohort.size

    def tensor(self) -> Tensor:
        """The flat vector (P,)."""
        return self.cohort.updates[self.place]


Row = Tensor | Promised
"""A flat vector (P,), or the promise of one."""


def tensor_of(row: Row) -> Tensor:
    """The flat vector (P,)."""
    return row.tensor() if isinstance(row, Promised) else row


class TensorArray(Array):
    """A Flower Array that is a view of a flat row, and that is serialised when somebody reads `data`."""

    row: Row
    start: int
    dtype = "float32"
    stype = "numpy.ndarray"

    def __init__(self, row: Row, start: int, shape: tuple[int, ...]) -> None:
        fields = self.__dict__  # Flower's own way of setting an attribute takes ten times as long
        fields["row"], fields["start"], fields["shape"] = row, start, shape

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The bytes of `np.save`, as Flower writes them."""
        buffer = BytesIO()
        np.save(buffer, self.numpy(), allow_pickle=False)
        return buffer.getvalue()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The array itself, not a copy."""
        part = tensor_of(self.row)[self.start : self.start + math.prod(self.shape)]
        array: np.ndarray[Any, Any] = part.numpy().reshape(self.shape)
        return array

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it is an ordinary Array: Ray's workers get it so."""
        return Array, (self.dtype, self.shape, self.stype, self.data)


# On the wire Flower names an object by its class: to the other side this is an Array like any other.
TensorArray.__qualname__ = Array.__qualname__


@lru_cache(maxsize=8)
def _places(layout: Layout) -> list[tuple[str, int, tuple[int, ...]]]:
    """The name of each tensor, where it begins in the flat vector, and its shape."""
    sizes = [math.prod(shape) for shape in layout.shapes]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [(name, start, tuple(shape)) for name, start, shape in zip(layout.names, starts, layout.shapes, strict=True)]


_Record = TypeVar("_Record", ArrayRecord, MetricRecord, RecordDict)


@cache
def _empty(kind: type[_Record]) -> dict[str, object]:
    """The attributes of a record without entries."""
    return dict(vars(kind()))


def record_of(kind: type[_Record], entries: Mapping[str, object]) -> _Record:
    """A record with these entries, past its own checks of them, which can cost more than a client's training."""
    record = kind.__new__(kind)
    record.__dict__.update(_empty(kind), _data=entries)
    return record


def to_records(rows: Iterable[Row], layout: Layout) -> list[ArrayRecord]:
    """Each of the flat vectors (P,) as named arrays."""
    places = _places(layout)
    return [
        record_of(ArrayRecord, {name: TensorArray(row, start, shape) for name, start, shape in places}) for row in rows
    ]


def to_record(flat: Tensor, layout: Layout) -> ArrayRecord:
    """The flat vector (P,) as named arrays."""
    return to_records([flat], layout)[0]


def to_flat(record: ArrayRecord, layout: Layout) -> Tensor:
    """The flat vector (P,) of a record; a ValueError says what does not fit the model."""
    return tensor_of(to_row(record, layout))


def to_row(record: ArrayRecord, layout: Layout) -> Row:
    """The same, or the promise of it where nobody has computed it yet."""
    arrays: dict[str, Array] = record.__dict__["_data"]
    if tuple(arrays) != layout.names:
        missing, unknown = set(layout.names) - set(arrays), set(arrays) - set(layout.names)
        raise ValueError(f"its arrays do not fit the model (missing: {sorted(missing)}, unknown: {sorted(unknown)})")
    rows = [array.row for array in arrays.values() if isinstance(array, TensorArray)]
    if len(rows) == len(arrays) and rows[0].numel() == layout.size and len(set(map(id, rows))) == 1:
        return rows[0]
    read = {
        name: torch.from_numpy(_read(name, array, tuple(shape)))
        for (name, array), shape in zip(arrays.items(), layout.shapes, strict=True)
    }
    return layout.flatten(read)


def _read(name: str, array: Array, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The numbers of an array that somebody sent; a ValueError says what is wrong with it.

    `np.load` allocates whatever the header of the bytes announces, so the header is held against the model first.
    """
    if isinstance(array, TensorArray):
        content, dtype, found, fortran = array.numpy(), np.dtype(np.float32), array.shape, False
    else:
        file = BytesIO(array.data)
        try:
            np.lib.format.read_magic(file)
            found, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            content = np.frombuffer(array.data, dtype, offset=file.tell())
        except (ValueError, TypeError) as error:
            raise ValueError(f"the bytes of array {name} are corrupt ({str(error).splitlines()[0][:80]})") from None
    if tuple(found) != shape or dtype != np.float32:
        raise ValueError(f"array {name} is {dtype}{list(found)}, expected float32{list(shape)}")
    if content.size != math.prod(shape) or fortran:
        raise ValueError(f"the bytes of array {name} are corrupt ({content.size} numbers for shape {list(shape)})")
    return content.reshape(shape).copy()


def stack(rows: Sequence[Tensor]) -> Tensor:
    """The rows (P,) as one matrix (K, P); no copy where they already lie one after another in one buffer."""
    first, size = rows[0], rows[0].numel()
    step, begin = size * first.element_size(), first.data_ptr()
    buffer = first.untyped_storage()
    inside = begin + len(rows) * step <= buffer.data_ptr() + buffer.nbytes()
    adjacent = inside and [row.data_ptr() for row in rows] == list(range(begin, begin + len(rows) * step, step))
    return first.as_strided((len(rows), size), (size, 1)) if adjacent else torch.stack(list(rows))
