# SPDX-License-Identifier: Apache-2.0
"""Per-example gradient norms without per-example gradients, and clipped sums by one batched product.

The gradient of a linear map for one example is G = Σ_l d_l x_lᵀ, over the L positions at which the map is applied (1
for a plain layer, the tokens of a sequence, the pixels of a convolution). Its norm follows from the inputs x (L, I) and
the output gradients d (L, O) alone (Goodfellow 2015; Li et al. 2022, section 4):

    |G|² = |x|² |d|²  for L = 1,    |G|² = ⟨x xᵀ, d dᵀ⟩_F = Σ_lm ⟨x_l, x_m⟩⟨d_l, d_m⟩  in general.

Where G itself has no more numbers than x and d together (small convolutions), G is computed instead (mixed ghost
clipping, Bu et al. 2022): then it costs no extra memory.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import torch
from torch import Tensor

_LARGE = 1 << 14  # entries from which a product should be added in place; PyTorch then calls it replica by replica


def squared_lengths(rows: Tensor) -> Tensor:
    """|r|² over the last dimension."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return lengths.square_()


@lru_cache(64)
def ones(count: int, length: int) -> Tensor:
    """(count, 1, length) ones, for sums by bmm: its order of summation does not depend on the other replicas."""
    return torch.ones(1, 1, length).expand(count, 1, length)


class Product:
    """The gradients of a linear map of K replicas, kept as their factors x (K, B, L, I) and d (K, B, L, O)."""

    def __init__(self, x: Tensor, d: Tensor) -> None:
        self._x, self._d = x, d
        self._shape = (*d.shape[:2], d.shape[3], x.shape[3])
        self._length = x.shape[2]
        # where x lies transposed in memory (I, L), xᵀd is much faster than dᵀx
        self._swapped = x.stride(3) != 1 and x.shape[3] > 1
        outputs, inputs = self._shape[2:]
        self._direct = self._length > 1 and inputs * outputs <= self._length * (inputs + outputs)

    def _times(self, x: Tensor, d: Tensor) -> Tensor:
        """Σ_l d_l x_lᵀ for each of n pairs (n, L, I), (n, L, O), as (n, O·I), or (n, I·O) where swapped."""
        product = torch.bmm(x.transpose(1, 2), d) if self._swapped else torch.bmm(d.transpose(1, 2), x)
        return product.flatten(1)

    @cached_property
    def _weight_of_examples(self) -> Tensor:
        """G of every example: (K, B, O·I), or (K, B, I·O) where swapped."""
        return self._times(self._x.flatten(0, 1), self._d.flatten(0, 1)).unflatten(0, self._shape[:2])

    @cached_property
    def _bias_of_examples(self) -> Tensor:
        """Σ_l d_l of every example: (K, B, O)."""
        if self._length == 1:
            return self._d[:, :, 0]
        d = self._d.flatten(0, 1)
        return torch.bmm(ones(len(d), self._length), d).view(self._shape[:3])

    def let_go(self) -> None:
        """Forget the factors, if the gradients of the examples are there."""
        if "_weight_of_examples" in vars(self):
            self._x = self._d = torch.empty(0)

    def squared_norms(self, bias: bool) -> Tensor:
        """(K, B): the squared norm of each example's gradient of the weight and, if there is one, the bias."""
        x, d = self._x, self._d
        if self._length == 1:
            norms = squared_lengths(x[:, :, 0]).mul_(squared_lengths(d[:, :, 0]))
        elif self._direct:
            norms = squared_lengths(self._weight_of_examples)
        else:
            x, d = x.flatten(0, 1), d.flatten(0, 1)
            grams = torch.bmm(x, x.transpose(1, 2)).mul_(torch.bmm(d, d.transpose(1, 2)))
            norms = grams.sum((1, 2)).clamp_min_(0).view(self._shape[:2])
        return norms.add_(squared_lengths(self._bias_of_examples)) if bias else norms

    def add_to(self, weight: Tensor, bias: Tensor | None, scale: float, factors: Tensor | None) -> None:
        """weight (K, O, ...) += scale · Σ_i factor_i G_i, and the same for bias (K, O); factors None: 1 each."""
        replicas, width, outputs, inputs = self._shape
        each = ones(replicas, width) if factors is None else factors.unsqueeze(1)
        if bias is not None:
            bias.add_(torch.bmm(each, self._bias_of_examples).squeeze(1), alpha=scale)
        if "_weight_of_examples" in vars(self):  # the norms needed them
            total = torch.bmm(each, self._weight_of_examples).squeeze(1)
        else:
            d = self._d if factors is None else self._d * factors[:, :, None, None]
            x, d = self._x.flatten(1, 2), d.flatten(1, 2)
            if weight.dim() == 3 and outputs * inputs >= _LARGE and not self._swapped:
                weight.baddbmm_(d.transpose(1, 2), x, alpha=scale)  # the step of SGD and the gradient in one
                return
            total = self._times(x, d)
        if self._swapped:
            total = total.view(replicas, inputs, outputs).transpose(1, 2).contiguous()
        weight.add_(total.view(weight.shape), alpha=scale)
