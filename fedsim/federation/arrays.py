# SPDX-License-Identifier: Apache-2.0
"""Model weights and updates as Flower records, without copying them while they stay in the process.

Flower's `Array` serialises its tensor when it is constructed. Within one process nobody needs the bytes, so a
`TensorArray` holds the tensor and serialises only when bytes are asked for: in a message that crosses a process or a
machine it is an ordinary Array.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedsim.training import Layout


class TensorArray(Array):
    """A Flower Array that is serialised when somebody reads `data`, and that remembers the flat row it is a view of."""

    def __init__(self, tensor: Tensor, row: Tensor) -> None:
        self.__dict__.update(
            tensor=tensor, row=row, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape)
        )
        self.__dict__["stype"] = "numpy.ndarray"

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The bytes of `np.save`, as Flower writes them."""
        buffer = BytesIO()
        np.save(buffer, self.numpy(), allow_pickle=False)
        return buffer.getvalue()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The array itself, not a copy."""
        array: np.ndarray[Any, Any] = self.__dict__["tensor"].numpy()
        return array


# On the wire Flower names an object by its class: to the other side this is an Array like any other.
TensorArray.__qualname__ = Array.__qualname__


def to_record(flat: Tensor, layout: Layout) -> ArrayRecord:
    """The flat vector (P,) as named arrays."""
    record = ArrayRecord()
    for name, view in layout.unflatten(flat).items():
        record[name] = TensorArray(view, flat)
    return record


def to_flat(record: ArrayRecord, layout: Layout) -> Tensor:
    """The flat vector (P,) of a record; a ValueError says what does not fit the model."""
    if tuple(record) != layout.names:
        missing, unknown = set(layout.names) - set(record), set(record) - set(layout.names)
        raise ValueError(f"its arrays do not fit the model (missing: {sorted(missing)}, unknown: {sorted(unknown)})")
    rows = {id(array.__dict__.get("row")) for array in record.values()}
    first = next(iter(record.values())).__dict__.get("row")
    if first is not None and len(rows) == 1:
        return first if isinstance(first, Tensor) else torch.as_tensor(first)
    arrays = {name: array.numpy() for name, array in record.items()}
    for (name, array), shape in zip(arrays.items(), layout.shapes, strict=True):
        if array.shape != tuple(shape) or array.dtype != np.float32:
            raise ValueError(f"array {name} is {array.dtype}{list(array.shape)}, expected float32{list(shape)}")
    return layout.flatten({name: torch.from_numpy(array) for name, array in arrays.items()})


def stack(rows: Sequence[Tensor]) -> Tensor:
    """The rows (P,) as one matrix (K, P); no copy where they already lie one after another in one buffer."""
    first, size = rows[0], rows[0].numel()
    step = size * first.element_size()
    adjacent = all(
        row.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and row.data_ptr() == first.data_ptr() + k * step
        for k, row in enumerate(rows)
    )
    return first.as_strided((len(rows), size), (size, 1)) if adjacent else torch.stack(list(rows))
