# SPDX-License-Identifier: Apache-2.0
"""The norms of a cohort's updates and their weighted sum, in one pass over them.

Together they are many times larger than the processor's cache, so that every pass is paid for in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.federation.arrays import Promised, Row, stack, tensor_of

_BLOCK = 1 << 15  # numbers of the sum, which stay in the cache while all rows are added


def _add_up(
    rows: NDArray[np.float32], weights: NDArray[np.float32], squares: NDArray[np.float64], total: NDArray[np.float32]
) -> None:
    """Add weights[k]·rows[k] to `total`, and the squared lengths of the rows to `squares`: four rows at a time."""
    fours = len(rows) // 4 * 4
    for first in range(0, rows.shape[1], _BLOCK):
        last = min(first + _BLOCK, rows.shape[1])
        part = total[first:last]
        for k in range(0, fours, 4):
            a, b = rows[k, first:last], rows[k + 1, first:last]
            c, d = rows[k + 2, first:last], rows[k + 3, first:last]
            of_a, of_b, of_c, of_d = weights[k], weights[k + 1], weights[k + 2], weights[k + 3]
            aa, bb, cc, dd = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(len(part)):
                part[i] += of_a * a[i] + of_b * b[i] + of_c * c[i] + of_d * d[i]
                aa, bb, cc, dd = aa + a[i] * a[i], bb + b[i] * b[i], cc + c[i] * c[i], dd + d[i] * d[i]
            squares[k] += aa
            squares[k + 1] += bb
            squares[k + 2] += cc
            squares[k + 3] += dd
        for k in range(fours, len(rows)):
            row, weight, square = rows[k, first:last], weights[k], np.float32(0)
            for i in range(len(part)):
                part[i] += weight * row[i]
                square += row[i] * row[i]
            squares[k] += square


@cache
def _compiled() -> Callable[..., None]:
    from numba import njit  # takes a second to import and to compile this

    compiled: Callable[..., None] = njit(nogil=True, fastmath={"reassoc", "contract"})(_add_up)
    return compiled


def norms_and_sum(rows: Sequence[Row], weights: Sequence[float]) -> tuple[list[float], Tensor]:
    """‖u_k‖ for each of the rows (P,), and Σ_k w_k u_k: a function of the rows in their order, to the last bit."""
    squares, total, first = np.zeros(len(rows)), np.zeros(rows[0].numel(), np.float32), 0
    for piece in _pieces(rows):
        some = slice(first, first + len(piece))
        _compiled()(piece.numpy(), np.array(weights[some], np.float32), squares[some], total)
        first = some.stop
    return np.sqrt(squares).tolist(), torch.from_numpy(total)


def _pieces(rows: Sequence[Row]) -> Iterator[Tensor]:
    """All rows as one matrix; or, of a cohort whose updates are only promised, as many at a time as are added."""
    cohort = rows[0].cohort if isinstance(rows[0], Promised) else None
    places = [row.place for row in rows if isinstance(row, Promised) and row.cohort is cohort]
    if cohort is not None and places == list(range(len(cohort.loss))) and len(places) == len(rows):
        yield from cohort.updates_in_pieces(4)
    else:
        yield stack([tensor_of(row) for row in rows])
