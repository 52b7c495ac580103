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
from torch import Tensor

_PIECE = 1 << 16  # pairs that are transformed at a time: the intermediate results stay in the cache
_TAIL = 1 << 10  # of 2^31 values of u the smallest, about one in two million: these are drawn with more bits


def write_noise(target: Tensor, generators: Sequence[np.random.Generator], deviations: Tensor) -> None:
    """Set row k of `target` (K, n) to deviations[k] · N(0, I), drawn from the stream `generators[k]`.

    Box-Muller: with u uniform on (0, 1] and θ uniform on [-π, π), √(-2 ln u)·cos θ and √(-2 ln u)·sin θ are independent
    N(0, 1). A 64-bit word gives 31 bits of u and 32 of θ. The first half of a row takes the cosines, the second the
    sines. 31 bits would end the distribution at 6.6 standard deviations, and an output that is impossible for one of
    two neighbours is a privacy loss that no ε covers; so where u is small it gets 53 more bits, and the end is at 10.8.
    """
    length = target.shape[1]
    pairs = (length + 1) // 2
    together = max(1, _PIECE // pairs)
    for first in range(0, len(generators), together):
        some = generators[first : first + together]
        words = [generator.bit_generator.random_raw(pairs) for generator in some]
        bits = torch.from_numpy((words[0][np.newaxis] if together == 1 else np.stack(words)).view(np.int32))
        _transform(target[first : first + len(some)], bits, deviations[first:][: len(some)], some)


def _transform(target: Tensor, bits: Tensor, deviations: Tensor, generators: Sequence[np.random.Generator]) -> None:
    """Write the normal numbers made of `bits` (K, 2·pairs) int32, times deviations (K,), to `target` (K, n)."""
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
