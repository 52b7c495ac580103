# SPDX-License-Identifier: Apache-2.0
"""How far an input that was computed from a layer's gradient may be from the client's, given the equations used.

In the notation of `exact_layer`: G~ = Y V^T + N, D^T = Y A, X~ = A^-1 V^T. An input p_l is wrong for three reasons.

- The noise N itself: X~ = D^+ G~, so a value of p_l moves by (D^+ N)_l.
- Each column a_j of A is the null vector of those rows of Y that its input switches off, R_j, and N moves it by
  da_j = -(R_j)^+ N_j. As d(A^-1) = -A^-1 dA A^-1, input l moves by -sum_j (p_l da_j) p_j: also the error of *other*
  columns counts, and most where column l is small (a network that knows its example by heart) or where columns share
  their zeros (similar examples). Of two columns with all zeros in common no row of R_j tells them apart: then p_l da_j
  is not bounded, and neither is the radius.
- The value 1 of the bias coordinate is wrong by as much, and all others are divided by it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.attacks.exact_factors import Factors
from fedsim.attacks.sparse_directions import ZERO

_ROUNDING = 2.0**-26
"""`ZERO` times this is 2^-23: two roundings of float32, which may be the same in all columns and so do not average."""
_SPARED = 2
"""So many rows may be zero by accident; a column must be determined without those on which it rests most."""


def radius(factors: Factors, inputs: Tensor, directions: Tensor, gradients: Tensor, off: Tensor) -> Tensor:
    """(r,) by how much any value of each input may be off: `ZERO` standard deviations.

    Args:
        factors: the gradient.
        inputs: (r, r), in coordinates of V, with bias coordinate 1.
        directions: (r, r), its inverse: the columns of A.
        gradients: (r, m), the columns of D^T.
        off: (r, m) bool, which neurons each input switches off without doubt.
    """
    whole = inputs @ factors.basis.T
    lengths, largest = whole.norm(dim=1), whole.abs().amax(1)
    coherent = torch.maximum(factors.most, _ROUNDING * lengths @ gradients.abs())
    single = torch.maximum(factors.most, _ROUNDING * largest @ gradients.abs())
    direct = ((inputs @ torch.linalg.pinv(factors.left)) ** 2 @ single**2).sqrt()
    moved = torch.stack(
        [_moved(factors, coherent, inputs, a, zero) for a, zero in zip(directions.T, off, strict=True)], 1
    )
    squares = torch.stack([shift**2 @ (whole - one) ** 2 for shift, one in zip(moved, whole, strict=True)])
    off_by: Tensor = ZERO * (squares.amax(1).sqrt() + direct * (1 + largest)) + 2.0**-24 * largest
    return off_by


def _moved(factors: Factors, noise: Tensor, inputs: Tensor, direction: Tensor, off: Tensor) -> Tensor:
    """(r,) standard deviation of p_l da for all inputs p_l, for one column a and the rows in which it is zero."""
    rows = (factors.left / noise.clamp_min(1e-300)[:, None])[off & (noise > 0)]
    if len(rows) > _SPARED and rows.shape[1] > 1:
        weakest = torch.linalg.eigh(rows.T @ rows).eigenvectors[:, 1]
        rows = rows[(rows @ weakest).abs().argsort(descending=True)[_SPARED:]]
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    size = torch.maximum((factors.spread @ direction).norm(), direction.norm())
    others: Tensor = size * ((inputs @ vectors[:, 1:]) ** 2 / values[1:].clamp_min(1e-300)).sum(1).sqrt()
    return others
