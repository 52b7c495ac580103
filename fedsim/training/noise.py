# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise for many replicas, each from its own stream.

Noise is most of the cost of DP-SGD once the gradients are cheap. NumPy's ziggurat draws one number at a time; here each
replica's generator only supplies random bits, and the Box-Muller transform (1958) turns the bits of all replicas
into normal numbers with vector instructions, about three times faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PIECE = 1 << 16  # pairs that are transformed at a time: the intermediate results stay in the cache
_DRAWN = 1 << 13  # pairs for which the bits are drawn at a time, if a row has fewer
_TAIL = 1 << 10  # of 2^31 values of u the smallest, about one in two million: these are drawn with more bits


class NoiseStreams:
    """The noise of several replicas, rows of n numbers, each from its own stream; a row is a step's noise.

    The random bits of a few short rows are drawn together, for a call costs as much as a thousand bits. How many is a
    question of n alone, so that a replica's noise does not depend on the others.
    """

    def __init__(self, generators: Sequence[np.random.Generator], length: int) -> None:
        self._generators, self._pairs = generators, (length + 1) // 2
        self._rows = max(1, _DRAWN // self._pairs)
        self._drawn: NDArray[np.uint64] = np.empty((0, 0, 0), np.uint64)
        self._next = self._rows

    def write(self, target: Tensor, deviations: Tensor) -> None:
        """Set row k of `target`, of the first replicas, to deviations[k] · N(0, I): see `_transform`."""
        count, together = len(target), max(1, _PIECE // self._pairs)
        if self._next == self._rows and self._rows > 1:
            self._drawn, self._next = np.empty((count, self._rows, self._pairs), np.uint64), 0
            for k in range(count):
                self._drawn[k] = self._draw(k)
        for first in range(0, count, together):
            last = min(first + together, count)
            words = self._words(range(first, last))
            bits = torch.from_numpy(words.view(np.int32))
            _transform(target[first:last], bits, deviations[first:last], self._generators[first:last])
        if self._rows > 1:
            self._next += 1

    def _words(self, replicas: range) -> NDArray[np.uint64]:
        """(k, pairs): the random bits of a row of each of these replicas."""
        if self._rows > 1:
            return self._drawn[replicas.start : replicas.stop, self._next]
        return self._draw(replicas[0]) if len(replicas) == 1 else np.concatenate([self._draw(k) for k in replicas])

    def _draw(self, replica: int) -> NDArray[np.uint64]:
        words: NDArray[np.uint64] = self._generators[replica].bit_generator.random_raw(self._rows * self._pairs)
        return words.reshape(self._rows, self._pairs)


def _transform(target: Tensor, bits: Tensor, deviations: Tensor, generators: Sequence[np.random.Generator]) -> None:
    """Write the normal numbers made of `bits` (K, 2·pairs) int32, times deviations (K,), to `target` (K, n).

    Box-Muller: with u uniform on (0, 1] and θ uniform on [-π, π), √(-2 ln u)·cos θ and √(-2 ln u)·sin θ are independent
    N(0, 1). A 64-bit word gives 31 bits of u and 32 of θ. The first half of a row takes the cosines, the second the
    sines. 31 bits would end the distribution at 6.6 standard deviations, and an output that is impossible for one of
    two neighbours is a privacy loss that no ε covers; so where u is small it gets 53 more bits, and the end is at 10.8.
    """
    scale = deviations.square().mul_(-2).unsqueeze(1)
    length, pairs = target.shape[1], bits.shape[1] // 2
    for first in range(0, pairs, _PIECE):
        last = min(first + _PIECE, pairs)
        radius = bits[:, first:last].to(torch.float32).add_(0.5).abs_()
        if radius.amin() < _TAIL:
            for k, i in (radius < _TAIL).nonzero().tolist():
                radius[k, i] = math.floor(float(radius[k, i])) + max(generators[k].random(), 2.0**-54)
        radius.mul_(2.0**-31).log_().mul_(scale).sqrt_()
        angle = bits[:, pairs + first : pairs + last].to(torch.float32).mul_(math.pi * 2.0**-31)
        torch.mul(radius, angle.cos(), out=target[:, first:last])
        rest = min(last, length - pairs) - first  # an odd row has one sine fewer than cosines
        torch.mul(radius[:, :rest], angle.sin_()[:, :rest], out=target[:, pairs + first : pairs + first + rest])
