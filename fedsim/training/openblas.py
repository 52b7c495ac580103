# SPDX-License-Identifier: Apache-2.0
"""OpenBLAS' single-precision products, one replica after the other in a compiled loop.

A library of fedsim's own is loaded, beside those of NumPy and SciPy: it must be certain that it computes with one
thread, and with which kernels, so that a product has the same bits in every process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

_KERNELS = "SkylakeX"  # those for AVX-512, which OpenBLAS does not choose by itself on AMD's newest processors
_SMALL = 1_000_000  # m·n·k up to which these kernels read matrices where they are; larger ones are copied first
_ROW_MAJOR, AS_IS, TRANSPOSED = 101, 111, 112  # from cblas.h


def library_file() -> Path | None:
    """The library, if it is installed. Its package is not imported: that would put its symbols before SciPy's own."""
    package = importlib.util.find_spec("scipy_openblas32")
    folders = (package and package.submodule_search_locations) or []
    return next((file for folder in folders for file in Path(folder, "lib").glob("libscipy_openblas.so*")), None)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """The environment with these variables, for as long as a library is being loaded."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _load() -> Any:
    """`cblas_sgemm`: C ← α·op(A)op(B) + β·C."""
    with _environment(OPENBLAS_CORETYPE=_KERNELS, OPENBLAS_NUM_THREADS="1"):
        product = ctypes.CDLL(str(library_file())).scipy_cblas_sgemm
    whole, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    product.argtypes = [*[whole] * 6, real, pointer, whole, pointer, whole, real, pointer, whole]
    product.restype = None
    return product


_sgemm = _load()


@njit(nogil=True)
def _multiply(
    turn_a: int, turn_b: int, m: int, n: int, k: int, alpha: float, a: int, lda: int, b: int, ldb: int, beta: float,
    c: int, ldc: int,
) -> None:  # fmt: skip
    """C ← α·AB + β·C, (m, k) and (k, n), by pieces that are small enough for the kernels that copy nothing.

    Multiples of 8 rows are quickest, or else of 16 columns. The pieces follow from m, n and k alone.
    """
    rows, columns = max(m, 1), max(n, 1)
    if m * n * k > _SMALL:
        fitting_rows, fitting_columns = _SMALL // (n * k), _SMALL // (m * k)
        if fitting_rows >= 4:
            rows = max(4, fitting_rows // 8 * 8)
        elif fitting_columns >= 16:
            columns = fitting_columns // 16 * 16
    down = lda if turn_a == AS_IS else 1
    right = 1 if turn_b == AS_IS else ldb
    for i in range(0, m, rows):
        for j in range(0, n, columns):
            _sgemm(
                _ROW_MAJOR, turn_a, turn_b, min(rows, m - i), min(columns, n - j), k,
                alpha, a + 4 * i * down, lda, b + 4 * j * right, ldb, beta, c + 4 * (i * ldc + j), ldc,
            )  # fmt: skip


@njit("void(i8, i8, i8, i8, i8, i8, f4, i8, i8, i8, i8, i8, i8, f4, i8, i8, i8)", nogil=True)
def multiply_each(
    count: int, turn_a: int, turn_b: int, m: int, n: int, k: int, alpha: float, a: int, lda: int, next_a: int,
    b: int, ldb: int, next_b: int, beta: float, c: int, ldc: int, next_c: int,
) -> None:  # fmt: skip
    """C ← α·AB + β·C for `count` replicas; the next one's matrices are next_a, next_b and next_c numbers further on."""
    for i in range(count):
        at_a, at_b, at_c = a + 4 * i * next_a, b + 4 * i * next_b, c + 4 * i * next_c
        _multiply(turn_a, turn_b, m, n, k, alpha, at_a, lda, at_b, ldb, beta, at_c, ldc)


@njit(nogil=True)
def multiply_rows(
    sizes: NDArray[np.int64], turn_b: int, n: int, k: int, a: int, lda: int, b: int, ldb: int, next_b: int,
    c: int, ldc: int,
) -> None:  # fmt: skip
    """C ← AB for replicas that have sizes[i] rows each of A and C, one after the other, and a B of their own."""
    for i in range(len(sizes)):
        _multiply(AS_IS, turn_b, sizes[i], n, k, 1.0, a, lda, b + 4 * i * next_b, ldb, 0.0, c, ldc)
        a, c = a + 4 * sizes[i] * lda, c + 4 * sizes[i] * ldc


@njit(nogil=True)
def add_products(
    sizes: NDArray[np.int64], m: int, n: int, alpha: float, a: int, lda: int, b: int, ldb: int,
    c: int, ldc: int, next_c: int,
) -> None:  # fmt: skip
    """C ← C + α·AᵀB for replicas that have sizes[i] rows each of A and B, one after the other, and a C of their own."""
    for i in range(len(sizes)):
        at_c = c + 4 * i * next_c
        _multiply(TRANSPOSED, AS_IS, m, n, sizes[i], alpha, a, lda, b, ldb, 1.0, at_c, ldc)
        a, b = a + 4 * sizes[i] * lda, b + 4 * sizes[i] * ldb
