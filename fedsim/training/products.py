# SPDX-License-Identifier: Apache-2.0
"""Matrix products of K replicas, by the library that is quickest here.

PyTorch multiplies matrices with MKL, which does without the widest vector instructions (AVX-512) on AMD's processors.
OpenBLAS uses them: on one core of Zen 5 the products of replicas run at 200 to 250 GFLOP/s, where MKL has 50 to 100. On
Intel's processors both use them, and MKL is called with less ado.

A replica's product has the same bits whoever the others are.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

_WIDE = {"AuthenticAMD", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AS_IS, _TRANSPOSED = 111, 112  # from cblas.h
LARGE = 1 << 14  # numbers in a matrix from which a product is worth a call for every replica
_FEW, _MANY = 8, 48  # rows for which MKL takes longer to copy a large transposed matrix than to multiply it
_NARROW = 16  # columns below which MKL takes half the time for the transposed product


def _is_beyond_mkl() -> bool:
    file = Path("/proc/cpuinfo")
    processor = set(file.read_text().split()) if file.is_file() else set()
    return processor >= _WIDE and find_spec("scipy_openblas32") is not None


BEYOND_MKL = _is_beyond_mkl()
"""Whether this processor has vector instructions that MKL does not use, but other libraries do."""


@cache
def _openblas() -> ModuleType:
    from fedsim.training import openblas  # takes half a second to import and compile

    return openblas


def multiply(a: Tensor, b: Tensor, into: Tensor, scale: float = 1.0, *, add: bool = False) -> None:
    """Set `into` (K, m, n) to scale·AB, of (K, m, k) and (K, k, n); `add`: add that to it."""
    if not BEYOND_MKL:
        _multiply_by_mkl(a, b, into, scale, add)
        return
    count, m, n = into.shape
    _check_shapes(a, (count, m, a.shape[2]), b, (count, a.shape[2], n), into)
    (a, turn_a, lda), (b, turn_b, ldb) = _matrices(a), _matrices(b)
    ldc = _distance_of_rows(into)
    _openblas().multiply_each(
        count, turn_a, turn_b, m, n, a.shape[2], scale, a.data_ptr(), lda, a.stride(0), b.data_ptr(), ldb, b.stride(0),
        float(add), into.data_ptr(), ldc, into.stride(0),
    )  # fmt: skip


def product(a: Tensor, b: Tensor) -> Tensor:
    """AB: (K, m, n), of (K, m, k) and (K, k, n)."""
    into = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    multiply(a, b, into)
    return into


def multiply_rows(a: Tensor, b: Tensor, into: Tensor, sizes: list[int]) -> None:
    """Set `into` (R, n) to AB, of (R, k) and (K, k, n): the first sizes[0] rows with the first matrix, and so on."""
    if BEYOND_MKL:
        _, inner, columns = b.shape
        _check_shapes(a, (sum(sizes), inner), b, (len(sizes), inner, columns), into)
        b, turn_b, ldb = _matrices(b)
        a = a.contiguous()
        _openblas().multiply_rows(
            np.array(sizes), turn_b, columns, inner, a.data_ptr(), inner, b.data_ptr(), ldb, b.stride(0),
            into.data_ptr(), _distance_of_rows(into),
        )  # fmt: skip
        return
    for own, matrix, output in zip(a.split(sizes), b.unbind(), into.split(sizes), strict=True):
        if len(own) < _FEW or matrix.stride(1) == 1:
            torch.mm(own, matrix, out=output)
        else:
            output.copy_(torch.mm(matrix.t(), own.t()).t())  # the few rows are copied, not the matrix


def add_products(a: Tensor, b: Tensor, into: Tensor, scale: float, sizes: list[int]) -> None:
    """Add scale·AᵀB to each of `into` (K, m, n): the first sizes[0] rows of A (R, m) and B (R, n) to the first..."""
    if BEYOND_MKL:
        _, m, n = into.shape
        _check_shapes(a, (sum(sizes), m), b, (sum(sizes), n), into)
        a, b = a.contiguous(), b.contiguous()
        _openblas().add_products(
            np.array(sizes), m, n, scale, a.data_ptr(), m, b.data_ptr(), n,
            into.data_ptr(), _distance_of_rows(into), into.stride(0),
        )  # fmt: skip
        return
    for left, right, own in zip(a.split(sizes), b.split(sizes), into.unbind(), strict=True):
        own.addmm_(left.t(), right, alpha=scale)


def _check_shapes(a: Tensor, of_a: tuple[int, ...], b: Tensor, of_b: tuple[int, ...], into: Tensor) -> None:
    """OpenBLAS is given addresses: it would read and write whatever is there."""
    if a.shape != of_a or b.shape != of_b:
        raise ValueError(f"matrices {tuple(a.shape)} and {tuple(b.shape)} where {of_a} and {of_b} are multiplied")
    if not a.dtype == b.dtype == into.dtype == torch.float32:
        raise TypeError(f"matrices of {a.dtype} and {b.dtype} into {into.dtype}: all must be torch.float32")


def _distance_of_rows(into: Tensor) -> int:
    """How far apart the rows of a result are, each of which is contiguous."""
    *_, rows, columns = into.shape
    *_, down, right = into.stride()
    if (right != 1 and columns > 1) or (down < columns and rows > 1):
        raise ValueError(f"a result {tuple(into.shape)} with strides {into.stride()}, whose rows are not contiguous")
    return max(down, columns, 1)


def _matrices(tensor: Tensor) -> tuple[Tensor, int, int]:
    """K matrices (or a copy of them), whether their rows or their columns are contiguous, and how far apart these are.

    A row (or column) that is alone may be said to be any distance from the next.
    """
    (_, rows, columns), (_, down, right) = tensor.shape, tensor.stride()
    if (right == 1 or columns <= 1) and (down >= columns or rows <= 1):
        return tensor, _AS_IS, max(down, columns, 1)
    if (down == 1 or rows <= 1) and (right >= rows or columns <= 1):
        return tensor, _TRANSPOSED, max(right, rows, 1)
    return tensor.contiguous(), _AS_IS, columns


def _multiply_by_mkl(a: Tensor, b: Tensor, into: Tensor, scale: float, add: bool) -> None:
    """The same by MKL, which is quickest when it may copy the smaller matrix, or a matrix once for all.

    It computes a batch of one product by another routine, with other last bits: a replica that is alone is doubled.
    """
    (rows, inner), columns = a.shape[1:], b.shape[2]
    if len(a) == 1:
        both = torch.empty_strided((2, *into.shape[1:]), into.stride()).copy_(into)
        _multiply_by_mkl(a.expand(2, -1, -1), b.expand(2, -1, -1), both, scale, add)
        into.copy_(both[:1])
        return
    turned = b.stride(1) == 1 and b.stride(2) > 1
    if add or scale != 1:
        into.baddbmm_(a, b, alpha=scale, beta=float(add))
    elif turned and inner * columns >= LARGE and _FEW <= rows <= _MANY:
        if b.stride(0) == 0:
            torch.bmm(a, b[0].contiguous().expand(b.shape), out=into)
        else:
            into.copy_(torch.bmm(b.transpose(1, 2), a.transpose(1, 2).contiguous()).transpose(1, 2))
    elif turned and columns < _NARROW:
        into.copy_(torch.bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2))
    else:
        torch.bmm(a, b, out=into)
