# SPDX-License-Identifier: Apache-2.0
"""Arrays of an `.npz` file, whose headers are believed only as far as the file bears them out.

A header may announce any number of any kind. Before a byte is allocated for it, it is held against the size of its
member, and that against the memory of the machine; arrays of Python objects, which can run code, are never read.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from fedsim.data.dataset import Array
from fedsim.errors import DataError, size
from fedsim.machine import machine_memory

_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, RuntimeError, ValueError, SyntaxError,
    MemoryError, OverflowError, TypeError,
)  # fmt: skip
"""What zipfile and NumPy raise for files that are damaged, encrypted, or compressed in ways that are not known."""
_COPIES = 4
"""Of what is read, while it becomes a data set."""


def read_archive(file: Path, wanted: Sequence[str], called: str) -> dict[str, Array]:
    """Those of the wanted arrays that an `.npz` file holds; `called` is the file in errors."""
    try:
        with file.open("rb") as opened:
            if opened.read(6) == b"\x93NUMPY":
                raise DataError(
                    f"{called} is a single array (.npy), where an archive of arrays (.npz) is needed; write one with"
                    " np.savez(file, x_train=..., y_train=...)"
                )
        with zipfile.ZipFile(file) as archive:
            held = {name: f"{name}.npy" for name in wanted if f"{name}.npy" in archive.namelist()}
            _check_room(sum(archive.getinfo(member).file_size for member in held.values()), called)
            return {name: _array(archive, member, called) for name, member in held.items()}
    except _UNREADABLE as error:
        if isinstance(error, zipfile.BadZipFile) and not zipfile.is_zipfile(file):
            raise DataError(f"{called} cannot be read as .npz (it is no NumPy archive)") from None
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{called} cannot be read as .npz ({reason})") from None


def _check_room(count: int, called: str) -> None:
    if _COPIES * count > (there := machine_memory()):
        raise DataError(
            f"{called} holds {size(count)} of numbers, which take {size(_COPIES * count)} of memory to read, and this"
            f" machine has {size(there)}; use fewer rows"
        )


def _array(archive: zipfile.ZipFile, member: str, called: str) -> Array:
    with archive.open(member) as opened:
        shape, dtype = _header(opened)
        begun = opened.tell()
    if dtype.hasobject:
        raise DataError(
            f"{called} holds Python objects, which are never loaded here because they can run code; save it again with"
            " arrays of numbers"
        )
    announced = math.prod(shape) * dtype.itemsize
    if announced != (there := archive.getinfo(member).file_size - begun):
        raise DataError(
            f"{called}: {member} announces an array of shape {shape} with {announced:,} bytes, but holds {there:,};"
            " write the file again"
        )
    with archive.open(member) as opened:
        found: Array = npy.read_array(opened, allow_pickle=False)
    return found


def _header(opened: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = npy.read_magic(opened)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(opened)
    return shape, dtype
