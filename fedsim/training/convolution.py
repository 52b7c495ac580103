# SPDX-License-Identifier: Apache-2.0
"""Convolutions of K replicas as batched matrix products.

The patches under the kernel become the rows of a matrix, so that a convolution is a linear map at every position of its
output, and shares the linear layer's gradients and norms. Images are kept channels-last: a patch is then a few
contiguous pieces of memory, the products write their output in place, and PyTorch's pooling is several times faster.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.training.ghost import Product
from fedsim.training.layers import Batch, ReplicaMap


class ReplicaConv(ReplicaMap):
    """K convolutions of one or two dimensions; one dimension is two with height 1."""

    def __init__(self, original: nn.Conv1d | nn.Conv2d, prefix: str, batch: Batch) -> None:
        super().__init__(original, prefix, batch)
        self._flat = isinstance(original, nn.Conv1d)
        self._stride, self._dilation = _two(original.stride, 1), _two(original.dilation, 1)
        across, *down = original._reversed_padding_repeated_twice[::2]
        self._padding = (down[0] if down else 0, across)

    def bind(self, weights: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Use these tensors; kernels are seen as (K, O, h, w, C), the order of a patch."""
        super().bind(weights, targets)
        if self._flat:
            self.weight, self.weight_target = self.weight.unsqueeze(3), self.weight_target.unsqueeze(3)
        self.weight, self.weight_target = (each.permute(0, 1, 3, 4, 2) for each in (self.weight, self.weight_target))

    def compute(self, x: Tensor) -> Tensor:
        """Patches times kernels."""
        image = (x.unsqueeze(2) if self._flat else x).permute(0, 2, 3, 1)
        self._shape = image.shape
        top, left = self._padding
        image = F.pad(image, (0, 0, left, left, top, top)) if top or left else image.contiguous()
        taps = self.weight.shape[2:4]
        self._out = [
            (size - dilation * (tap - 1) - 1) // stride + 1
            for size, tap, stride, dilation in zip(image.shape[1:3], taps, self._stride, self._dilation, strict=True)
        ]
        outputs = self.weight.shape[1]
        y = self.batch.new(x, len(image), *self._out, outputs)
        self._multiply(self._windows(image), self.batch.by_replica(y, -1, outputs))
        output = y.permute(0, 3, 1, 2)
        return output.squeeze(2) if self._flat else output

    def _windows(self, image: Tensor) -> Tensor:
        """The patches under the kernels, (K·B·m, out, out, h, w, C), on the memory of the image (overlapping)."""
        _, _, h, w, channels = self.weight.shape
        rows, high, wide, one = image.stride()
        (down, right), (below, beside) = self._stride, self._dilation
        used = len(image) // self.batch.rows * (self.batch.rows - self.batch.guard)
        return image.as_strided(
            (used, *self._out, h, w, channels), (rows, high * down, wide * right, high * below, wide * beside, one)
        )

    def _multiply(self, windows: Tensor, into: Tensor) -> None:
        """Write the products of patches and kernels into (K, B·L, O), and keep the patches as (K, B, L, h·w·C)."""
        replicas, width = self.batch.replicas, self.batch.width
        rows, high, wide, h, w, channels = windows.shape
        inputs, outputs = h * w * channels, into.shape[2]
        kernels = self.weight.reshape(replicas, outputs, inputs).transpose(1, 2)
        self._kernels = kernels
        if w * channels < wide and rows == replicas * width and h * w > 1:
            # few input channels: copy along the rows of the image, and leave the matrix of patches transposed
            patches = windows.permute(0, 3, 4, 5, 1, 2).reshape(replicas, width, inputs, high * wide).transpose(2, 3)
            each = kernels.unsqueeze(1).expand(-1, width, -1, -1).reshape(rows, inputs, outputs)
            torch.bmm(patches.flatten(0, 1), each, out=into.view(rows, high * wide, outputs))
            self._x = patches
        else:
            self._x = windows.reshape(replicas, width, -1, inputs)
            torch.bmm(self._x.flatten(1, 2), kernels, out=into)
        if self.bias is not None:
            into.add_(self.bias.unsqueeze(1))

    def keep(self, d: Tensor) -> None:
        """Keep d as (K, B·L, O)."""
        image = (d.unsqueeze(2) if self._flat else d).permute(0, 2, 3, 1)
        self._d = self.batch.by_replica(image, -1, image.shape[3])

    def input_gradient(self, d: Tensor) -> Tensor:
        """The transposed convolution of d, replica by replica: oneDNN's is faster than adding up patches."""
        batch, (rows, height, width, channels) = self.batch, self._shape
        gradient = batch.new(d, rows, height, width, channels)
        pieces = batch.by_replica(gradient, -1, height, width, channels)
        shape = (pieces.shape[1], channels, height, width)
        kernels = self._kernels.transpose(1, 2).unflatten(2, self.weight.shape[2:]).permute(0, 1, 4, 2, 3).contiguous()
        outputs = self._d.unflatten(1, (pieces.shape[1], *self._out)).permute(0, 1, 4, 2, 3).contiguous()
        nothing = d.new_empty(1).expand(shape)  # only the shape of the input matters
        for piece, output, kernel in zip(pieces, outputs, kernels, strict=True):
            found, _, _ = torch.ops.aten.convolution_backward(
                output, nothing, kernel, None, self._stride, self._padding, self._dilation, False, [0, 0], 1,
                [True, False, False],
            )  # fmt: skip
            piece.copy_(found.permute(0, 2, 3, 1))
        image = gradient.permute(0, 3, 1, 2)
        return image.squeeze(2) if self._flat else image

    def _product(self) -> Product:
        return Product(self._x, self._d.view(*self._x.shape[:3], -1))


def _two(value: int | tuple[int, ...], first: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else value
    return (pair[0], pair[1]) if len(pair) == 2 else (first, pair[0])
