# SPDX-License-Identifier: Apache-2.0
"""Convolutions of K replicas as batched matrix products.

The patches under the kernel become the rows of a matrix, so that a convolution is a linear map at every position of its
output, and shares the linear layer's gradients and norms. Images are kept channels-last: a patch is then a few
contiguous pieces of memory, the products write their output in place, and PyTorch's pooling is several times faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.training.ghost import Product
from fedsim.training.layers import Batch, ReplicaLayer


class ReplicaConv(ReplicaLayer):
    """K convolutions of one or two dimensions; one dimension is two with height 1."""

    weight: Tensor

    def __init__(self, original: nn.Conv1d | nn.Conv2d, prefix: str, batch: Batch) -> None:
        super().__init__(original, prefix, batch)
        self._flat = isinstance(original, nn.Conv1d)
        self._stride, self._dilation = _two(original.stride, 1), _two(original.dilation, 1)
        # zeros at (left, right, top, bottom)
        pads = [int(pad) for pad in original._reversed_padding_repeated_twice]
        self._pads = pads + [0, 0] if self._flat else pads

    def _kernel(self, weight: Tensor) -> Tensor:
        """(K, O, C, h, w) as (K, O, h, w, C): the order of a patch."""
        return (weight.unsqueeze(3) if self._flat else weight).permute(0, 1, 3, 4, 2)

    def _matrix(self) -> Tensor:
        """The kernels as matrices (K, O, h·w·C)."""
        return self._kernel(self.weight).flatten(2)

    def compute(self, x: Tensor) -> Tensor:
        """Patches times kernels."""
        batch = self.batch
        self._shape = x.shape
        image = (x.unsqueeze(2) if self._flat else x).permute(0, 2, 3, 1)
        kernel = self._kernel(self.weight)
        self._padded = F.pad(image, (0, 0, *self._pads)) if any(self._pads) else image.contiguous()
        rows, height, width, _ = self._padded.shape
        taps = (kernel.shape[2], kernel.shape[3])
        self._out = tuple(
            (size - d * (tap - 1) - 1) // s + 1
            for size, tap, s, d in zip((height, width), taps, self._stride, self._dilation, strict=True)
        )
        y = batch.clear_guard(x.new_empty(rows, *self._out, kernel.shape[1]))
        self._patches_times_kernels(kernel, batch.without_guard(y).flatten(1, 3))
        output = y.permute(0, 3, 1, 2)
        return output.squeeze(2) if self._flat else output

    def _patches_times_kernels(self, kernel: Tensor, into: Tensor) -> None:
        """Write x W (K, B·L, O) into `into`, and keep the patches x as (K, B, L, h·w·C)."""
        image = self.batch.without_guard(self._padded)
        examples = (self.batch.replicas, self.batch.width, -1)
        _, _, h, w, channels = kernel.shape
        s = image.stride()
        shape = (image.shape[0], image.shape[1], *self._out, h, w, channels)
        steps = (s[2] * self._stride[0], s[3] * self._stride[1], s[2] * self._dilation[0], s[3] * self._dilation[1])
        windows = image.as_strided(shape, (s[0], s[1], *steps, s[4]), image.storage_offset())
        matrix = kernel.flatten(2).transpose(1, 2)
        if h * w == 1 or w * channels >= self._out[1] or image.shape[1] != self.batch.width:
            patches = windows.reshape(*shape[:2], self._out[0] * self._out[1], h * w * channels)
            self._x = patches.view(*examples, h * w * channels)
            torch.bmm(patches.flatten(1, 2), matrix, out=into)
            if self.bias is not None:
                into.add_(self.bias.unsqueeze(1))
        else:
            # narrow patches (few input channels): copy along the rows of the image, and leave the matrix transposed
            patches = windows.permute(0, 1, 4, 5, 6, 2, 3).reshape(shape[0] * shape[1], h * w * channels, -1)
            self._x = patches.view(*shape[:2], *patches.shape[1:]).transpose(2, 3)
            each = matrix.unsqueeze(1).expand(-1, shape[1], -1, -1).flatten(0, 1)
            torch.bmm(patches.transpose(1, 2), each, out=into.view(len(each), -1, into.shape[2]))
            if self.bias is not None:
                into.add_(self.bias.unsqueeze(1))

    def keep(self, d: Tensor) -> Tensor:
        """Keep d as (K, B·L, O)."""
        image = (d.unsqueeze(2) if self._flat else d).permute(0, 2, 3, 1)
        self._d = self.batch.without_guard(image.contiguous()).flatten(1, 3)
        return self._d

    def input_gradient(self, d: Tensor) -> Tensor:
        """D Wᵀ gives the gradient of every patch; overlapping patches are added up, first the rows, then the columns."""
        batch = self.batch
        kernel = self._kernel(self.weight)
        _, _, h, w, channels = kernel.shape
        high, wide = self._out
        rows, height, width, _ = self._padded.shape
        used = rows // batch.rows * batch.replicas * batch.width
        patches = torch.bmm(d, kernel.flatten(2)).view(used, high, wide, h, w * channels)
        if h * w == 1 and self._stride == (1, 1):
            padded = patches.view(used, high, wide, channels)
        else:
            columns = d.new_zeros(used, height, wide, w * channels)
            for i in range(h):
                columns[:, _places(i, high, self._stride[0], self._dilation[0])] += patches[:, :, :, i]
            columns = columns.view(used, height, wide, w, channels)
            padded = d.new_zeros(used, height, width, channels)
            for j in range(w):
                padded[:, :, _places(j, wide, self._stride[1], self._dilation[1])] += columns[:, :, :, j]
        if any(self._pads):
            left, right, top, bottom = self._pads
            padded = padded[:, top : height - bottom, left : width - right]
        if used < rows:
            padded = torch.cat([padded, padded.new_zeros(rows - used, *padded.shape[1:])])
        gradient = padded.permute(0, 3, 1, 2)
        return gradient.squeeze(2) if self._flat else gradient

    def _product(self) -> Product:
        return Product(self._x, self._d.view(*self._x.shape[:3], -1))

    def squared_norms(self) -> Tensor:
        """(K, B), by the factors or the gradients, whichever are smaller."""
        self._gradients = self._product()
        return self._gradients.squared_norms(self.bias is not None)

    def add_gradient(self, views: Mapping[str, Tensor], scale: float, factors: Tensor | None) -> None:
        """views[name] += scale · Σ_i factor_i · gradient of example i."""
        weight, bias = self.targets(views)
        assert weight is not None
        product = self._product() if factors is None else self._gradients
        product.add_to(self._kernel(weight), bias, scale, factors)


def _two(value: int | tuple[int, ...], first: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else value
    return cast(tuple[int, int], pair if len(pair) == 2 else (first, pair[0]))


def _places(tap: int, count: int, stride: int, dilation: int) -> slice:
    """Where the tap-th row of the kernel reads, for each of `count` outputs."""
    return slice(tap * dilation, tap * dilation + stride * (count - 1) + 1, stride)
