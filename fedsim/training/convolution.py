# SPDX-License-Identifier: Apache-2.0
"""Convolutions of K replicas as matrix products.

The patches under the kernel become the rows of a matrix, so that a convolution is a linear map at every position of its
output, and has the linear layer's gradients and norms. The matrix of patches is many times larger than the image. So it
is made for one replica at a time (or a part of its examples), used while it is in the processor's cache, and made again
when it is needed again: writing all of it to memory and reading it back would take longer than the mathematics.

Images are kept channels-last: a patch is then a few contiguous pieces of memory, a product writes its output where it
belongs, and PyTorch's pooling is several times faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.training import ghost
from fedsim.training.layers import Batch, ReplicaLayer

_SCRATCH = 1 << 19  # numbers in a matrix of patches: 2 MB, near the cache of one core


class ReplicaConv(ReplicaLayer):
    """K convolutions of one or two dimensions; one dimension is two with height 1."""

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
        self._examples: Tensor | None = None

    def compute(self, x: Tensor) -> Tensor:
        """Patches times kernels."""
        image = (x.unsqueeze(2) if self._flat else x).permute(0, 2, 3, 1)
        self._shape = image.shape
        top, left = self._padding
        image = F.pad(image, (0, 0, left, left, top, top)) if top or left else image.contiguous()
        self._windows = self._look(self.batch.by_replica(image, self.batch.width, -1, *image.shape[1:]))
        replicas, outputs = self.weight.shape[:2]
        y = self.batch.new(x, image.shape[0], *self._out, outputs)
        into = self.batch.by_replica(y, self.batch.width, -1, outputs)
        kernels = self.weight.permute(0, 3, 4, 2, 1).reshape(replicas, -1, outputs)  # (K, h·w·C, O)
        for kernel, windows, output in self._pieces(kernels.unbind(), self._windows, into):
            patches = self._patches(windows)
            if self._narrow:
                torch.bmm(patches, kernel.expand(patches.shape[0], -1, -1), out=output)
            else:
                torch.mm(patches.flatten(0, 1), kernel, out=output.flatten(0, 1))
        if self.bias is not None:
            into.add_(self.bias[:, None, None])
        output = y.permute(0, 3, 1, 2)
        return output.squeeze(2) if self._flat else output

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
        self._scratch: dict[int, Tensor] = {}
        return windows.permute(0, 1, 5, 6, 7, 2, 3, 4) if self._narrow else windows

    def _pieces(self, of_replicas: Iterable[Tensor], *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """What belongs to a replica, and the parts of tensors (K, B, ...) that are computed at a time.

        How many examples are a part is a question of their size alone, not of the other replicas.
        """
        parts = math.ceil(self.batch.width * self._positions * self._inputs / _SCRATCH)
        size = math.ceil(self.batch.width / parts)
        for own, *replica in zip(of_replicas, *(tensor.unbind() for tensor in tensors), strict=True):
            if parts == 1:
                yield own, *replica
            else:
                for piece in zip(*(each.split(size) for each in replica), strict=True):
                    yield own, *piece

    def _patches(self, windows: Tensor) -> Tensor:
        """(b, L, h·w·C): the patches under some windows, copied; they are overwritten by the next ones."""
        count = windows.shape[0]
        if count not in self._scratch:
            self._scratch[count] = windows.new_empty(windows.shape)
        copied = self._scratch[count].copy_(windows)
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
        nothing = d.new_empty(1).expand(count, channels, height, width)  # only the shape of the input matters
        outputs = self._d.view(self.batch.replicas, count, *self._out, -1).permute(0, 1, 4, 2, 3).contiguous()
        for piece, output, kernel in zip(pieces.unbind(), outputs.unbind(), self.weight.unbind(), strict=True):
            found, _, _ = torch.ops.aten.convolution_backward(
                output, nothing, kernel, None, self._stride, self._padding, self._dilation, False, [0, 0], 1,
                [True, False, False],
            )  # fmt: skip
            piece.copy_(found.permute(0, 2, 3, 1))
        image = gradient.permute(0, 3, 1, 2)
        return image.squeeze(2) if self._flat else image

    def squared_norms(self) -> Tensor:
        """(K, B), by the factors or by the gradients, whichever are smaller."""
        norms = self._d.new_empty(self.batch.replicas, self.batch.width)
        if self._narrow:
            self._examples = self._outer_products()
            torch.linalg.vector_norm(self._examples, dim=2, out=norms).square_()
        else:
            for windows, d, into in self._pieces(self._windows.unbind(), self._windows, self._d, norms):
                into.copy_(ghost.squared_norms(self._patches(windows), d))
        if self.bias is not None:
            norms.add_(ghost.squared_lengths(self._bias_of_examples()))
        return norms

    def _outer_products(self) -> Tensor:
        """(K, B, h·w·C·O): the gradients of every example; with few input channels these are few numbers."""
        shape = (self.batch.replicas, self.batch.width, self._inputs, self._d.shape[3])
        examples = self._d.new_empty(shape)
        for into, windows, d in self._pieces(self._windows.unbind(), self._windows, self._d):
            pass
        return examples.flatten(2)
