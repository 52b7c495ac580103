# SPDX-License-Identifier: Apache-2.0
"""Normal numbers from random bits, compiled for this processor's vector instructions.

The Box-Muller transform (1958): with u uniform on (0, 1] and θ uniform on the circle, √(-2 ln u)·cos θ and
√(-2 ln u)·sin θ are independent N(0, 1). Vectorised libraries read and write memory between logarithm, root, sine and
cosine, and that takes four times as long as all of them in one loop. Only additions, products and square roots are
used, each rounded as IEEE 754 says and none fused, so that the numbers are the same on every processor.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bits = NDArray[np.int32]
_f, _i = np.float32, np.int32
TAIL = 1 << 10
"""Of the 2³¹ values of u the smallest, about one in two million: these deserve more bits."""


@njit(nogil=True)
def write_uniforms(bits: Bits, into: Floats) -> int:
    """Set `into` (K, m) to 2³¹·u, u uniform on (0, 1], from 31 bits of each of the first m words of a row of `bits`.

    Returns how many are below TAIL.
    """
    small = 0
    for k in range(len(into)):
        words, row = bits[k], into[k]
        for i in range(len(row)):
            row[i] = abs(_f(words[i]) + _f(0.5))
            small += row[i] < _f(TAIL)
    return small


@njit(nogil=True)
def _logarithm(x: np.float32) -> np.float32:
    """ln(2⁻³¹·x): x = 2ᵉ·(1 + m) with 1 + m in [√½, √2), and the polynomial of Cephes (Moshier 1992) for ln(1 + m)."""
    bits = np.float32(x).view(np.int32)
    e = _i(_i(bits - _i(0x3F3504F3)) >> _i(23))
    m = np.int32(bits - _i(e << _i(23))).view(np.float32) - _f(1)
    exponent = _f(e) - _f(31)
    p = _f(7.0376836292e-2) * m - _f(1.1514610310e-1)
    p = p * m + _f(1.1676998740e-1)
    p = p * m - _f(1.2420140846e-1)
    p = p * m + _f(1.4249322787e-1)
    p = p * m - _f(1.6668057665e-1)
    p = p * m + _f(2.0000714765e-1)
    p = p * m - _f(2.4999993993e-1)
    p = p * m + _f(3.3333331174e-1)
    square = m * m
    small = (
        p * m * square - exponent * _f(2.12194440e-4) - _f(0.5) * square
    )  # ln 2 in two parts, the larger of few bits
    return (m + small) + exponent * _f(0.693359375)


@njit(nogil=True)
def _pair(uniform: np.float32, angle: np.int32, scale: np.float32) -> tuple[np.float32, np.float32]:
    """Two normal numbers times √(-scale/2).

    30 bits of the angle are a in [-π/4, π/4); of the other two one turns the sign of its cosine, one swaps cosine and
    sine. Sine and cosine are Taylor-like polynomials (Cephes).
    """
    radius = math.sqrt(_logarithm(uniform) * scale)
    a = _f(_i(_i(angle << _i(2)) >> _i(2))) * _f(math.pi * 2.0**-31)
    z = a * a
    sine = ((_f(-1.9515295891e-4) * z + _f(8.3321608736e-3)) * z - _f(1.6666654611e-1)) * z * a + a
    cosine = (_f(2.443315711809948e-5) * z - _f(1.388731625493765e-3)) * z + _f(4.166664568298827e-2)
    cosine = cosine * z * z - _f(0.5) * z + _f(1)
    cosine = cosine if angle >= 0 else -cosine
    swapped = _i(angle >> _i(30)) & _i(1)
    return radius * (sine if swapped else cosine), radius * (cosine if swapped else sine)


@njit(nogil=True)
def write_normals(uniforms: Floats, bits: Bits, scales: Floats, into: Floats) -> None:
    """Set row k of `into` (K, n) to √(-scale/2)·N(0, I): of m = ⌈n/2⌉ pairs first all first numbers, then the second.

    Row k of `bits` (K, 2m) holds the angles in its second half.
    """
    for k in range(len(into)):
        pairs = uniforms.shape[1]
        row, angles, first, second = uniforms[k], bits[k, pairs:], into[k, :pairs], into[k, pairs:]
        for i in range(len(second)):
            first[i], second[i] = _pair(row[i], angles[i], scales[k])
        for i in range(len(second), pairs):  # an odd row has one number fewer
            first[i], _ = _pair(row[i], angles[i], scales[k])
