# SPDX-License-Identifier: Apache-2.0
"""Matrix products by the library that is quickest here.

PyTorch multiplies matrices with MKL, which does without the widest vector instructions (AVX-512) on AMD's processors;
there oneDNN, which PyTorch has as well, takes less than half the time (Zen 5: 266 GFLOP/s on one core where MKL has
118). On Intel's processors both use them, and MKL is called with less ado.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def _onednn_is_quicker() -> bool:
    """Whether this is a processor of AMD's with the widest vector instructions, and PyTorch has oneDNN."""
    file = Path("/proc/cpuinfo")
    processor = file.read_text() if file.is_file() else ""
    wide = "AuthenticAMD" in processor and "avx512f" in processor
    return wide and hasattr(torch.ops.mkldnn, "_linear_pointwise")


ONEDNN = _onednn_is_quicker()
LARGE = 1 << 14  # numbers in a matrix from which a product is worth a call for every replica
_FEW = 8  # rows below which a call of oneDNN costs more than it saves
_DEEP = 32  # terms of a sum from which it makes up for the copy of its result


def times_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """X Wᵀ by oneDNN: (n, I) and (O, I) give (n, O).

    A row of the result has the same bits whatever the other rows are and however many, so that the rows of all replicas
    may be multiplied together; but a row alone is computed by another routine, and so it is doubled. That is nowhere
    promised: it was found in 77,000 random products with AVX-512, as with AVX2, and is tested.
    """
    if len(x) == 1:
        return times_transposed(x.expand(2, -1), weight)[:1]
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def times_shared(x: Tensor, weight: Tensor, into: Tensor) -> Tensor:
    """X Wᵀ with one W (O, I) for all replicas, in `into` or elsewhere: (K, R, I) gives (K, R, O).

    By MKL the bits of a row depend on R, but not on K.
    """
    if ONEDNN:
        return times_transposed(x.flatten(0, 1), weight).view(into.shape)
    # For few rows, MKL spends several times more on packing a large transposed W than on the product itself.
    return torch.bmm(x, weight.t().contiguous().expand(len(x), -1, -1), out=into)


def times_own(x: Tensor, weight: Tensor, into: Tensor) -> None:
    """Set `into` (R, O) to x Wᵀ, of (R, I) and (O, I): the quickest way where W is large."""
    if len(x) < _FEW:
        torch.mm(x, weight.t(), out=into)
    elif ONEDNN:
        into.copy_(times_transposed(x, weight))
    else:
        into.copy_(torch.mm(weight, x.t()).t())  # the small x is packed, not the large W


def write_sum_of_products(d: Tensor, x: Tensor, into: Tensor) -> None:
    """Set `into` (O, I) to dᵀx = Σ_r d_r x_rᵀ, of (R, O) and (R, I)."""
    if ONEDNN and len(d) >= _DEEP:
        into.copy_(times_transposed(d.t(), x.t()))
    else:
        torch.mm(d.t(), x, out=into)
