# SPDX-License-Identifier: Apache-2.0
"""The norms of a cohort's updates and their weighted sum, in one pass over them.

Together they are many times larger than the processor's cache, so that every pass is paid for in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.federation.arrays import stack

_BLOCK = 1 << 15  # numbers of the sum, which stay in the cache while all rows are added


def _add_up(
    rows: NDArray[np.float32], weights: NDArray[np.float32], squares: NDArray[np.float64], total: NDArray[np.float32]
) -> None:
    """Add weights[k]·rows[k] to `total`, and the squared lengths of the rows to `squares`."""
    for first in range(0, rows.shape[1], _BLOCK):
        part = total[first : first + _BLOCK]
        for k in range(len(rows)):
            row, weight, square = rows[k, first : first + _BLOCK], weights[k], np.float32(0)
            for i in range(len(row)):
                part[i] += weight * row[i]
                square += row[i] * row[i]
            squares[k] += square


@cache
def _compiled() -> Callable[..., None]:
    from numba import njit  # takes a second to import and to compile this

    compiled: Callable[..., None] = njit(nogil=True, fastmath={"reassoc", "contract"})(_add_up)
    return compiled


def norms_and_sum(rows: Sequence[Tensor], weights: Sequence[float]) -> tuple[list[float], Tensor]:
    """‖u_k‖ for each of the rows (P,), and Σ_k w_k u_k, added up in the order of the rows."""
    squares, total = np.zeros(len(rows)), np.zeros(rows[0].numel(), np.float32)
    _compiled()(stack(rows).numpy(), np.array(weights, np.float32), squares, total)
    return np.sqrt(squares).tolist(), torch.from_numpy(total)
