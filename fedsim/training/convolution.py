# SPDX-License-Identifier: Apache-2.0
"""Convolutions of K replicas as matrix products.

The patches under the kernel become the rows of a matrix, so that a convolution is a linear map at every position of its
output, and shares the linear layer's gradients and norms. The matrix of patches is many times larger than the image. So
it is made for a few examples at a time, used while it is in the processor's cache, and made again when it is needed
again: writing all of it to memory and reading it back would take longer than the mathematics.

Images are kept channels-last: a patch is then a few contiguous pieces of memory, a product writes its output where it
belongs, and PyTorch's pooling is several times faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.training.ghost import Product
from fedsim.training.layers import Batch, ReplicaLayer

_SCRATCH = 1 << 18  # numbers in a matrix of patches: 1 MB, about the cache of one core


class ReplicaConv(ReplicaLayer):
    """K convolutions of one or two dimensions; one dimension is two with height 1."""

    def __init__(self, original: nn.Conv1d | nn.Conv2d, prefix: str, batch: Batch) -> None:
        super().__init__(original, prefix, batch)
        self._flat = isinstance(original, nn.Conv1d)
        self._stride, self._dilation = _two(original.stride), _two(original.dilation)
        across, *down = original._reversed_padding_repeated_twice[::2]
        self._padding = (down[0] if down else 0, across)

    def bind(self, weights: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Use these tensors; targets are seen as (K, O, h, w, C), the order of a patch."""
        super().bind(weights, targets)
        if self._flat:
            self.weight, self.weight_target = self.weight.unsqueeze(3), self.weight_target.unsqueeze(3)
        self.weight_target = self.weight_target.permute(0, 1, 3, 4, 2)
        self._products: list[Product] = []

    def compute(self, x: Tensor) -> Tensor:
        """Patches times kernels, (K, h·w·C, O)."""
        image = (x.unsqueeze(2) if self._flat else x).permute(0, 2, 3, 1)
        self._shape = image.shape
        top, left = self._padding
        image = F.pad(image, (0, 0, left, left, top, top)) if top or left else image.contiguous()
        self._image = self.batch.by_replica(image, self.batch.width, -1, *image.shape[1:])
        replicas, outputs, _, *taps = self.weight.shape
        self._out = [
            (size - dilation * (tap - 1) - 1) // stride + 1
            for size, tap, stride, dilation in zip(image.shape[1:3], taps, self._stride, self._dilation, strict=True)
        ]
        y = self.batch.new(x, len(image), *self._out, outputs)
        into = self.batch.by_replica(y, self.batch.width, -1, outputs)
        kernels = self.weight.permute(0, 3, 4, 2, 1).reshape(replicas, -1, outputs)
        for k, some in self._pieces():
            torch.mm(self._patches(k, some).flatten(0, 1), kernels[k], out=into[k, some].view(-1, outputs))
        if self.bias is not None:
            into.add_(self.bias[:, None, None])
        output = y.permute(0, 3, 1, 2)
        return output.squeeze(2) if self._flat else output

    def _pieces(self) -> Iterator[tuple[int, slice]]:
        """Some examples of one replica after the other: how many is a question of their size alone."""
        per_example = self._image.shape[2] * self._out[0] * self._out[1] * self.weight[0, 0].numel()
        count = min(self.batch.width, -(-per_example * self.batch.width // _SCRATCH))
        bounds = [self.batch.width * i // count for i in range(count + 1)]
        for k in range(self.batch.replicas):
            for first, last in zip(bounds, bounds[1:], strict=False):
                yield k, slice(first, last)

    def _patches(self, k: int, some: slice) -> Tensor:
        """(b, L, h·w·C): the patches of some examples of replica k, copied from the overlapping windows on the image."""
        image = self._image[k, some]
        _, _, channels, h, w = self.weight.shape
        example, frame, down, right, one = image.stride()
        moves = (down * self._stride[0], right * self._stride[1], down * self._dilation[0], right * self._dilation[1])
        shape = (*image.shape[:2], *self._out, h, w, channels)
        windows = image.as_strided(shape, (example, frame, *moves, one), image.storage_offset())
        inputs = h * w * channels
        if w * channels >= self._out[1] or h * w == 1:
            return windows.reshape(len(image), -1, inputs)
        # few input channels: it is faster to copy along the rows of the image, and the matrix lies transposed
        return windows.permute(4, 5, 6, 0, 1, 2, 3).reshape(inputs, len(image), -1).permute(1, 2, 0)

    def keep(self, d: Tensor) -> None:
        """Keep d as (K, B, L, O)."""
        image = (d.unsqueeze(2) if self._flat else d).permute(0, 2, 3, 1)
        self._d = self.batch.by_replica(image, self.batch.width, -1, image.shape[3])

    def input_gradient(self, d: Tensor) -> Tensor:
        """The transposed convolution of d, replica by replica: oneDNN's is faster than adding up patches."""
        rows, height, width, channels = self._shape
        gradient = self.batch.new(d, rows, height, width, channels)
        pieces = self.batch.by_replica(gradient, -1, height, width, channels)
        nothing = d.new_empty(1).expand(pieces.shape[1], channels, height, width)  # only the shape of the input matters
        outputs = self._d.reshape(len(pieces), pieces.shape[1], *self._out, -1).permute(0, 1, 4, 2, 3)
        for k, piece in enumerate(pieces):
            found, _, _ = torch.ops.aten.convolution_backward(
                outputs[k].contiguous(), nothing, self.weight[k], None, self._stride, self._padding, self._dilation,
                False, [0, 0], 1, [True, False, False],
            )  # fmt: skip
            piece.copy_(found.permute(0, 2, 3, 1))
        image = gradient.permute(0, 3, 1, 2)
        return image.squeeze(2) if self._flat else image

    def _product(self, k: int, some: slice) -> Product:
        return Product(self._patches(k, some).unsqueeze(0), self._d[k : k + 1, some])

    def squared_norms(self) -> Tensor:
        """(K, B), by the factors or by the gradients, whichever are smaller."""
        norms = self._d.new_empty(self.batch.replicas, self.batch.width)
        for k, some in self._pieces():
            product = self._product(k, some)
            norms[k, some] = product.squared_norms(self.bias is not None)[0]
            if self._d.shape[3] * 8 <= self._d.shape[2]:  # the gradients are much smaller than the patches: keep them
                product.let_go()
                self._products.append(product)
        return norms

    def add_gradient(self, scale: float, factors: Tensor | None) -> None:
        """target += scale · Σ_i factor_i · gradient of example i."""
        products = iter(self._products)
        for k, some in self._pieces():
            product = next(products, None) or self._product(k, some)
            bias = None if self.bias_target is None else self.bias_target[k : k + 1]
            each = None if factors is None else factors[k : k + 1, some]
            product.add_to(self.weight_target[k : k + 1], bias, scale, each)
        self._products = []


def _two(value: int | tuple[int, ...]) -> tuple[int, int]:
    """A setting of both dimensions; of a convolution of one dimension, 1 for the height."""
    if isinstance(value, int):
        return value, value
    return (value[0], value[1]) if len(value) == 2 else (1, value[0])
