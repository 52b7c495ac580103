# SPDX-License-Identifier: Apache-2.0
"""Per-example gradient norms without per-example gradients.

The gradient of a linear map for one example is G = Σ_l d_l x_lᵀ, over the L positions at which the map is applied (1
for a plain layer, the tokens of a sequence, the pixels of a convolution). Its norm follows from the inputs x (L, I) and
the output gradients d (L, O) alone (Goodfellow 2015; Li et al. 2022, section 4):

    |G|² = |x|² |d|²  for L = 1,    |G|² = ⟨x xᵀ, d dᵀ⟩_F = Σ_lm ⟨x_l, x_m⟩⟨d_l, d_m⟩  in general.

Where G itself has no more numbers than x and d together (small convolutions), G is computed instead (mixed ghost
clipping, Bu et al. 2022): then it costs no extra memory. The sum of clipped gradients is one product of x and c·d, with
c the clipping factors.

Sums over examples or positions are written as products with ones: PyTorch divides the work of a plain sum as the number
of replicas suggests, so that its last bits would depend on them.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def lengths(rows: Tensor) -> Tensor:
    """|r| over the last dimension, or very little more.

    The square of a number below 2⁻⁶³ may be lost in single precision, so that n of them would have length 0, whatever
    they are multiplied by later; √n·2⁻⁶³ is what can be lost at most.
    """
    found: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return found.add_(2.0**-63 * math.sqrt(rows.shape[-1]))


def squared_lengths(rows: Tensor) -> Tensor:
    """|r|² over the last dimension."""
    return lengths(rows).square_()


@lru_cache(64)
def ones(count: int, length: int) -> Tensor:
    """(count, 1, length) ones."""
    return torch.ones(1, 1, length).expand(count, 1, length)


def weighted_sum(examples: Tensor, factors: Tensor | None) -> Tensor:
    """Σ_i factor_i r_i over the B rows of each replica: (K, B, n) gives (K, n); factors None: 1 each."""
    weights = ones(*examples.shape[:2]) if factors is None else factors.unsqueeze(1)
    return torch.bmm(weights, examples).squeeze(1)


def sum_of_positions(d: Tensor) -> Tensor:
    """Σ_l d_l, the gradient of a bias: (n, L, O) gives (n, O)."""
    return d.squeeze(1) if d.shape[1] == 1 else torch.bmm(ones(*d.shape[:2]), d).squeeze(1)


def are_small(length: int, inputs: int, outputs: int) -> bool:
    """Whether the gradients of examples have no more numbers than their factors, so that they may be computed."""
    return length > 1 and inputs * outputs <= length * (inputs + outputs)


def squared_norms(x: Tensor, d: Tensor) -> Tensor:
    """(n,): |Σ_l d_l x_lᵀ|² of n examples, (n, L, I) and (n, L, O), from the factors alone."""
    if x.shape[1] == 1:
        return lengths(x[:, 0]).mul_(lengths(d[:, 0])).square_()  # a product of squares could be 0·∞
    spread = lengths(x).mul_(lengths(d)).sum(1)
    x, d = x.double(), d.double()
    return bounded_squares(torch.bmm(x, x.transpose(1, 2)).mul_(torch.bmm(d, d.transpose(1, 2))), spread)


def bounded_squares(grams: Tensor, spread: Tensor) -> Tensor:
    """(n,): (√(Σ of grams (n, L, L)) + L·u·spread)², at least |G|² of the gradient as it will be computed.

    Where the terms d_l x_lᵀ nearly cancel, G is summed up later in single precision, with an error of at most L·u times
    the sum of their norms (`spread`), u = 2⁻²⁴. A norm without this would be smaller than what it is to bound.
    """
    exact = grams.flatten(1).sum(1).clamp_min_(0).sqrt_()
    return exact.add_(spread, alpha=grams.shape[1] * 2.0**-24).square_().to(spread.dtype)
