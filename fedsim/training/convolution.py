# SPDX-License-Identifier: Apache-2.0
"""Convolutions of K replicas as matrix products.

The patches under the kernel become the rows of a matrix, so that a convolution is a linear map at every position of its
output, and has the linear layer's gradients and norms. The matrix of patches is many times larger than the image. So it
is made for one replica at a time (or a part of its examples), used while it is in the processor's cache, and made again
when it is needed again: writing all of it to memory and reading it back would take longer than the mathematics.

Images are kept channels-last: a patch is then a few contiguous pieces of memory, a product writes its output where it
belongs, and PyTorch's pooling is several times faster.

That is so with MKL's products on Intel's processors. On some of AMD's (see `products`) oneDNN's own convolutions take
less than half the time, replica by replica; only the gradients of single examples are products there, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.training import ghost, products
from fedsim.training.layers import Batch, ReplicaLayer

_SCRATCH = 1 << 19  # numbers in a matrix of patches: 2 MB, near the cache of one core


class ReplicaConv(ReplicaLayer):
    """K convolutions of one or two dimensions; one dimension is two with height 1."""

    packs = True

    def __init__(self, original: nn.Conv1d | nn.Conv2d, prefix: str, batch: Batch) -> None:
        super().__init__(original, prefix, batch)
        self._flat = isinstance(original, nn.Conv1d)
        self._stride, self._dilation = _two(original.stride), _two(original.dilation)
        across, *down = original._reversed_padding_repeated_twice[::2]
        self._padding = (down[0] if down else 0, across)

    def bind(self, weights: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Use these tensors, (K, O, C, h, w)."""
        super().bind(weights, targets)
        if self._flat:
            self.weight, self.weight_target = self.weight.unsqueeze(3), self.weight_target.unsqueeze(3)

    def compute(self, x: Tensor) -> Tensor:
        """Patches times kernels."""
        image = (x.unsqueeze(2) if self._flat else x).permute(0, 2, 3, 1)
        self._shape = image.shape
        top, left = self._padding
        image = F.pad(image, (0, 0, left, left, top, top)) if top or left else image.contiguous()
        self._image = self.batch.by_replica(image, self.batch.width, -1, *image.shape[1:])
        self._windows = self._look(self._image)
        outputs = self.weight.shape[1]
        y = self.batch.new(x, image.shape[0], *self._out, outputs)
        into = self.batch.by_replica(y, self.batch.width, -1, outputs)
        (self._convolve if products.BEYOND_MKL else self._multiply)(into)
        output = y.permute(0, 3, 1, 2)
        return output.squeeze(2) if self._flat else output

    def _convolve(self, into: Tensor) -> None:
        """The outputs (K, B, m·L, O), by oneDNN."""
        biases = [None] * len(self.weight) if self.bias is None else self.bias.unbind()
        replicas = zip(self._images(), self.weight.unbind(), biases, self.batch.each(into), strict=True)
        for images, kernel, bias, own in replicas:
            if len(own):
                found = F.conv2d(images, kernel, bias, self._stride, 0, self._dilation)
                own.copy_(found.permute(0, 2, 3, 1).reshape(own.shape))

    def _images(self) -> list[Tensor]:
        """The padded images of each replica, (B·m, C, H, W).

        By the stride of the channels oneDNN is told that these come last; where there is one, any stride would do.
        """
        height, width, channels = self._image.shape[-3:]
        strides = (height * width * channels, 1, width * channels, channels)
        return [
            own.as_strided((own.shape[0] * own.shape[1], channels, height, width), strides)
            for own in self.batch.each(self._image)
        ]

    def _multiply(self, into: Tensor) -> None:
        """The outputs (K, B, m·L, O), by products of patches."""
        replicas, outputs = self.weight.shape[:2]
        kernels = self.weight.permute(0, 3, 4, 2, 1).reshape(replicas, -1, outputs).unbind()  # each (h·w·C, O)
        for k, windows, output in self._pieces(self._windows, into):
            patches = self._patches(windows)
            if self._narrow:
                torch.bmm(patches, kernels[k].expand(patches.shape[0], -1, -1), out=output)
            else:
                torch.mm(patches.flatten(0, 1), kernels[k], out=output.flatten(0, 1))
        if self.bias is not None:
            for own, bias in zip(self.batch.each(into), self.bias.unbind(), strict=True):
                own.add_(bias)

    def _look(self, image: Tensor) -> Tensor:
        """The windows (K, B, m, out, out, h, w, C) of the kernel on an image (K, B, m, H, W, C): overlapping views."""
        _, _, channels, *taps = self.weight.shape
        self._out = [
            (size - dilation * (tap - 1) - 1) // stride + 1
            for size, tap, stride, dilation in zip(image.shape[3:5], taps, self._stride, self._dilation, strict=True)
        ]
        *outer, down, right, one = image.stride()
        moves = (down * self._stride[0], right * self._stride[1], down * self._dilation[0], right * self._dilation[1])
        windows = image.as_strided((*image.shape[:3], *self._out, *taps, channels), (*outer, *moves, one))
        self._inputs, self._positions = math.prod(windows.shape[5:]), math.prod(windows.shape[2:5])
        # few input channels: it is faster to copy along the rows of the image, and the matrix lies transposed
        self._narrow = taps[1] * channels < self._out[1] and image.shape[2] == 1
        return windows.permute(0, 1, 5, 6, 7, 2, 3, 4) if self._narrow else windows

    def _pieces(self, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Each replica k, and what of its examples in tensors (K, B, ...) is computed at a time.

        How many examples these are is a question of their size alone, not of the other replicas.
        """
        for k, replica in enumerate(zip(*(self.batch.each(tensor) for tensor in tensors), strict=True)):
            examples = len(replica[0])
            parts = min(examples, math.ceil(examples * self._positions * self._inputs / _SCRATCH))
            if parts == 1:
                yield k, *replica
            elif parts:
                size = math.ceil(examples / parts)
                for piece in zip(*(each.split(size) for each in replica), strict=True):
                    yield k, *piece

    def _patches(self, windows: Tensor) -> Tensor:
        """(b, L, h·w·C): the patches under some windows, copied; they are overwritten by the next ones."""
        copied, count = self.batch.scratch(windows.shape).copy_(windows), windows.shape[0]
        if self._narrow:
            return copied.view(count, self._inputs, self._positions).transpose(1, 2)
        return copied.view(count, self._positions, self._inputs)

    def keep(self, d: Tensor) -> None:
        """Keep d as (K, B, L, O)."""
        image = (d.unsqueeze(2) if self._flat else d).permute(0, 2, 3, 1)
        self._d = self.batch.by_replica(image, self.batch.width, -1, image.shape[3])

    def input_gradient(self, d: Tensor) -> Tensor:
        """The transposed convolution of d, replica by replica: oneDNN's is faster than adding up patches."""
        rows, height, width, channels = self._shape
        gradient = self.batch.new(d, rows, height, width, channels)
        pieces = self.batch.by_replica(gradient, -1, height, width, channels)
        count = pieces.shape[1]
        outputs = self._d.view(self.batch.replicas, count, *self._out, -1).permute(0, 1, 4, 2, 3).contiguous()
        each = self.batch.each
        for piece, output, kernel in zip(each(pieces), each(outputs), self.weight.unbind(), strict=True):
            if not len(piece):
                continue
            nothing = d.new_empty(1).expand(len(piece), channels, height, width)  # only the input's shape matters
            found, _, _ = torch.ops.aten.convolution_backward(
                output, nothing, kernel, None, self._stride, self._padding, self._dilation, False, [0, 0], 1,
                [True, False, False],
            )  # fmt: skip
            piece.copy_(found.permute(0, 2, 3, 1))
        image = gradient.permute(0, 3, 1, 2)
        return image.squeeze(2) if self._flat else image

    def squared_norms(self) -> Tensor:
        """(K, B), by the factors or by the gradients, whichever are smaller."""
        self.examples = {}
        if self._narrow or ghost.are_small(self._positions, self._inputs, self._d.shape[3]):
            self.examples["weight"] = self._gradients()
            norms = ghost.squared_lengths(self.examples["weight"])
        else:
            norms = self._d.new_empty(self.batch.replicas, self.batch.width)
            for _, windows, d, into in self._pieces(self._windows, self._d, norms):
                into.copy_(ghost.squared_norms(self._patches(windows), d))
        if self.bias is not None:
            self.examples["bias"] = self._bias_gradients()
            norms.add_(ghost.squared_lengths(self.examples["bias"]))
        return norms

    def forget(self, examples: Tensor) -> None:
        """Take their gradients for zero."""
        super().forget(examples)
        self._image[examples] = 0
        self._d[examples] = 0

    def _gradients(self) -> Tensor:
        """(K, B, O·h·w·C): the gradients of every example, or (K, B, h·w·C·O) where the patches lie transposed."""
        outputs = self._d.shape[3]
        shape = (self._inputs, outputs) if self._narrow else (outputs, self._inputs)
        found = self._d.new_empty(*self._d.shape[:2], *shape)
        for _, windows, d, into in self._pieces(self._windows, self._d, found):
            x = self._patches(windows)
            first, second = (x, d) if self._narrow else (d, x)
            products.multiply(first.transpose(1, 2), second, into)
        return found.flatten(2)

    def _bias_gradients(self) -> Tensor:
        """(K, B, O): the gradients of every example."""
        return ghost.sum_of_positions(self._d.flatten(0, 1)).view(*self._d.shape[:2], -1)

    def add_gradient(self, scale: float, factors: Tensor | None) -> None:
        """Add scale · Σ_i factor_i · gradient of example i to the targets; without factors: 1 each."""
        examples = self.examples if factors is not None else {}
        if "weight" in examples:
            total = self._as_kernels(self.batch.weighted_sums(examples["weight"], factors))
        else:
            total = self._sum(self._d if factors is None else self._d * factors[:, :, None, None])
        self.weight_target.add_(total, alpha=scale)
        if self.bias_target is not None:
            rows = examples["bias"] if examples else self._bias_gradients()
            self.bias_target.add_(self.batch.weighted_sums(rows, factors), alpha=scale)

    def _as_kernels(self, total: Tensor) -> Tensor:
        """Gradients (K, n) in the order of `_gradients`, as (K, O, C, h, w)."""
        replicas, outputs, channels, *taps = self.weight.shape
        if self._narrow:
            return total.view(replicas, *taps, channels, outputs).permute(0, 4, 3, 1, 2)
        return total.view(replicas, outputs, *taps, channels).permute(0, 1, 4, 2, 3)

    def _sum(self, d: Tensor) -> Tensor:
        """(K, O, C, h, w): the sum of the gradients of all examples of each replica."""
        if products.BEYOND_MKL:
            return self._sum_by_convolution(d)
        if self._narrow:
            return self._as_kernels(self.batch.weighted_sums(self._gradients(), None))
        total = d.new_zeros(len(self.weight), d.shape[3], self._inputs)
        totals = total.unbind()
        for k, windows, some in self._pieces(self._windows, d):
            totals[k].addmm_(some.flatten(0, 1).t(), self._patches(windows).flatten(0, 1))
        return self._as_kernels(total.flatten(1))

    def _sum_by_convolution(self, d: Tensor) -> Tensor:
        """The same by oneDNN."""
        total = torch.zeros(self.weight.shape)
        for images, kernel, own, sums in zip(
            self._images(), self.weight.unbind(), self.batch.each(d), total.unbind(), strict=True
        ):
            if len(own):
                outputs = own.reshape(len(images), *self._out, -1).permute(0, 3, 1, 2)
                _, found, _ = torch.ops.aten.convolution_backward(
                    outputs, images, kernel, None, self._stride, [0, 0], self._dilation, False, [0, 0], 1,
                    [False, True, False],
                )  # fmt: skip
                sums.copy_(found)
        return total


def _two(value: int | tuple[int, ...]) -> tuple[int, int]:
    """A setting of both dimensions; of a convolution of one dimension, 1 for the height."""
    if isinstance(value, int):
        return value, value
    return (value[0], value[1]) if len(value) == 2 else (1, value[0])
