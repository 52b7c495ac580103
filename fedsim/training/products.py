# SPDX-License-Identifier: Apache-2.0
"""Matrix products by the library that is quickest here.

PyTorch multiplies matrices with MKL, which does without the widest vector instructions on AMD's processors; there
oneDNN, which PyTorch has as well, takes less than half the time (Zen 5: 266 GFLOP/s on one core where MKL has 118).
On Intel's processors both use them, and MKL is called with less ado.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

_CPU = Path("/proc/cpuinfo")
ONEDNN = _CPU.is_file() and "AuthenticAMD" in _CPU.read_text() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_DEEP = 32  # terms of a sum from which oneDNN's product makes up for its call, and for a copy of the result


def times_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """X Wᵀ: (n, I) and (O, I) give (n, O).

    In oneDNN a row of the result has the same bits whatever the other rows are and however many, so that the rows of
    all replicas may be multiplied together; but a row alone is computed by another routine, and so it is doubled.
    """
    if len(x) == 1:
        return times_transposed(x.expand(2, -1), weight)[:1]
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def write_sum_of_products(d: Tensor, x: Tensor, into: Tensor) -> None:
    """Set `into` (O, I) to dᵀx = Σ_r d_r x_rᵀ, of (R, O) and (R, I)."""
    if ONEDNN and len(d) >= _DEEP:
        into.copy_(times_transposed(d.t(), x.t()))
    else:
        torch.mm(d.t(), x, out=into)
