# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise for many replicas, each from its own stream.

Noise is most of the cost of DP-SGD once the gradients are cheap. NumPy's ziggurat draws one number at a time; here a
cipher for which the processor has instructions (AES in counter mode) supplies each replica's random bits, and they
become normal numbers with vector instructions (`box_muller`), eight times faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

_PIECE = 1 << 17  # numbers that are made at a time, so that they and their bits stay in the cache


class NoiseStreams:
    """The noise of several replicas, rows of n numbers, each from its own stream; a row is a step's noise.

    A stream is the key stream of AES-128 in counter mode, under the key of the replica.
    """

    def __init__(self, keys: Sequence[bytes], length: int) -> None:
        start = modes.CTR(bytes(16))
        self._ciphers = [Cipher(algorithms.AES(key), start).encryptor() for key in keys]
        longest = min(length, _PIECE)
        self._together = max(1, min(len(keys), _PIECE // max(1, length)))  # short rows are made several at a time
        pairs = (longest + 1) // 2
        self._plain = memoryview(bytes(8 * pairs))
        self._bits = bytearray(8 * pairs * self._together + 16)  # a cipher wants a block more than it writes
        self._uniforms = np.empty(pairs * self._together, np.float32)

    def write(self, target: Tensor, deviations: Tensor) -> None:
        """Set row k of `target` to deviations[k] · N(0, I), for the first replicas."""
        numbers, scales = target.numpy(), -2 * deviations.numpy() ** 2
        for start in range(0, len(numbers), self._together):
            replicas = range(start, min(start + self._together, len(numbers)))
            rows = numbers[start : replicas.stop]
            for first in range(0, rows.shape[1], _PIECE):
                self._write_piece(rows[:, first : first + _PIECE], scales[start : replicas.stop], replicas)

    def _write_piece(self, target: NDArray[np.float32], scales: NDArray[np.float32], replicas: range) -> None:
        """The next numbers of these replicas."""
        from fedsim.training.box_muller import write_normals  # takes half a second to import and compile

        uniforms, bits = self._draw(replicas, (target.shape[1] + 1) // 2)
        into = target if target.flags.c_contiguous else np.empty(target.shape, np.float32)
        write_normals(uniforms, bits, scales, into)
        if into is not target:
            np.copyto(target, into)

    def _draw(self, replicas: range, pairs: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """2³¹·u (k, pairs), and the words (k, 2·pairs) of which they were made and whose second half are the angles.

        31 bits of u would end the distribution at 6.6 standard deviations, and an output that is impossible for one of
        two neighbours is a privacy loss that no ε covers; so where u is small it gets 53 more bits, and the end is at
        10.8. (Between there are gaps, as in all floating-point noise: who knows the bits of a pair can tell. This is
        the noise of simulations; a real client adds that of `privacy.secure_noise`.)
        """
        from fedsim.training.box_muller import TAIL, write_uniforms

        size, room = 8 * pairs, memoryview(self._bits)
        for place, replica in enumerate(replicas):
            self._ciphers[replica].update_into(self._plain[:size], room[place * size :])
        bits = np.frombuffer(self._bits, np.int32, len(replicas) * 2 * pairs).reshape(len(replicas), -1)
        uniforms = self._uniforms[: len(replicas) * pairs].reshape(len(replicas), -1)
        if write_uniforms(bits, uniforms):
            for k, i in np.argwhere(uniforms < TAIL).tolist():
                more = int.from_bytes(self._ciphers[replicas[k]].update(bytes(8))) >> 11
                uniforms[k, i] = math.floor(float(uniforms[k, i])) + max(more, 0.5) * 2.0**-53
        return uniforms, bits
