# SPDX-License-Identifier: Apache-2.0
"""Noise that protects real people, Gaussian or Laplace: from the operating system's randomness, exact on a grid.

Two things are wrong with ordinary noise outside a simulation. A generator with a seed can be predicted by whoever knows
the seed or enough of its numbers; here every bit comes from the kernel (`os.urandom`), nothing is buffered and nothing
survives a fork. And the sum of a value and a floating-point "Gaussian" has gaps that depend on the value, which give it
away at any ε (Mironov 2012; Jin et al. 2022 for Gaussian noise). Here there are no gaps:

1. The values are rounded to multiples of a power of two g (σ/2²⁹ < g ≤ σ/2²⁸). Rounding moves each of the d entries of
   two neighbours by at most g/2, so the sensitivity grows from Δ to at most Δ + g√d, and σ grows in proportion: the
   noise multiplier that was asked for stays true.
2. An integer drawn as round(σ/g·Z), Z ~ N(0, 1), is added to the integers of step 1, in 64 bits, without rounding.
   As k + round(σ/g·Z) = round(k + σ/g·Z) for an integer k, the result is a rounding of the ideal Gaussian mechanism:
   post-processing, so that every theorem about that mechanism (composition, sampling, PLD) holds for it as it is.
3. Rounding the result to float32 is post-processing again.

Step 2 is exact, not approximate: Z is the Box-Muller transform of uniform numbers with as many bits as it takes. Double
precision decides the integer unless the value is closer to the middle between two integers than its error bound (a few
in a million); then 128 more bits are drawn and the transform is computed with 400 bits. What is left is a chance below
2⁻¹⁰⁰ for a wrong integer. (Opacus' secure mode adds four floating-point Gaussians, Holohan & Braghin 2021, which makes
the gaps hard to find; here there are none.) The work per number does not depend on the values, only on the noise.

Laplace noise of scale b is drawn in the same way, as ±round(b/g·E) with E = −ln u exponential: k + round(b/g·L) is a
rounding of the ideal Laplace mechanism, with L = ±E. Its sensitivity is in L1: it grows to at most Δ + g·d.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import PrivacyError
from fedsim.privacy.mechanisms import Clipped

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]

_FINENESS = 28  # σ is between 2^28 and 2^29 steps of the grid
_LARGEST = 2.0**52  # steps of the grid to which a value is clamped, so that the sum with the noise stays exact
_DOUBLE = 2.0**-40  # of the sensitivity: more than clipping and adding up thousands of rows in double precision is off
_PIECE = 1 << 18  # pairs of numbers that are drawn at a time: the intermediate results stay in the cache


def grid_of(sigma: float) -> float:
    """The step of the grid: the power of two that σ is 2²⁸ to 2²⁹ times as large as."""
    if not 0 < sigma < math.inf:
        raise PrivacyError(f"sigma is {sigma!r}, it must be positive and finite")
    return 2.0 ** (math.frexp(sigma)[1] - 1 - _FINENESS)


def secure_gaussian(shape: Sequence[int], sigma: float) -> Tensor:
    """Noise of standard deviation σ, float64: each entry exactly round(σ/g·Z)·g for the grid's g.

    Only safe where it is added, in float64, to multiples of `grid_of(sigma)`: `add_secure_noise` does that.
    """
    grid = grid_of(sigma)
    drawn = _rounded_normals(math.prod(shape), sigma / grid)
    return torch.from_numpy(drawn * grid).reshape(tuple(shape))


def add_secure_gaussian(clipped: Clipped, noise_multiplier: float) -> Tensor:
    """The counterpart of `mechanisms.add_gaussian` for rows (K, P) of real clients."""
    if not isinstance(clipped, Clipped) or clipped.order != 2:
        raise PrivacyError("noise is added to rows that are clipped in L2 only; call clip(..., order=2)")
    rows = [add_secure_noise(row, noise_multiplier, clipped.clipping_norm) for row in clipped.values]
    return torch.stack(rows) if rows else clipped.values


def add_secure_noise(values: Tensor, noise_multiplier: float, clipping_norm: float, terms: int = 1) -> Tensor:
    """Add N(0, (zC)²), z the noise multiplier, to values that one unit moves by at most C (or 2C, if it is replaced).

    `terms` is how many clipped rows were added up to give the values, or a bound on it that does not depend on the
    data (with Poisson batches say four times the expected number, and 64). A sum of n float32 numbers is off by at most
    n·2⁻²⁴·Σ|xᵢ|, and for two neighbours these errors need not be the same: the sensitivity grows by 2n²·2⁻²⁴·C at most
    (Casacuberta et al. 2022), which is covered by more noise, as the rounding to the grid is. Sums in double precision
    are one term: 2⁻⁴⁰ covers them. Entries that are not numbers count as zero. The result has the type of the values.
    """
    if terms < 1:
        raise PrivacyError(f"terms is {terms!r}, there must be at least one")
    grid = _grid(noise_multiplier, clipping_norm)
    summed = _DOUBLE if terms == 1 else 2.0 * terms**2 * 2.0**-24
    sensitivity = clipping_norm * (1 + summed) + grid * math.sqrt(values.numel())
    return _on_grid(values, grid, _rounded_normals(values.numel(), noise_multiplier * sensitivity / grid))


def add_secure_laplace(values: Tensor, noise_multiplier: float, clipping_norm: float) -> Tensor:
    """Add Laplace noise of scale zC, z the noise multiplier, to values that one unit moves by at most C in L1.

    (Or by 2C, if it is replaced.) Entries that are not numbers count as zero. The result has the type of the values.
    """
    grid = _grid(noise_multiplier, clipping_norm)
    sensitivity = clipping_norm * (1 + _DOUBLE) + grid * values.numel()
    return _on_grid(values, grid, _rounded_laplaces(values.numel(), noise_multiplier * sensitivity / grid))


def _grid(noise_multiplier: float, clipping_norm: float) -> float:
    for name, value in (("noise_multiplier", noise_multiplier), ("clipping_norm", clipping_norm)):
        if not 0 < value < math.inf:
            raise PrivacyError(f"{name} is {value!r}, it must be positive and finite")
    return grid_of(noise_multiplier * clipping_norm)


def _on_grid(values: Tensor, grid: float, noise: Integers) -> Tensor:
    """The values rounded to the grid, and so many steps of it added."""
    wide = values.detach().to(torch.float64).contiguous().numpy()
    most = _LARGEST * grid
    steps = np.rint(np.clip(np.nan_to_num(wide, nan=0.0), -most, most) / grid).astype(np.int64)
    return torch.from_numpy((steps + noise.reshape(steps.shape)) * grid).to(values.dtype)


# --- integers -------------------------------------------------------------------------------------------------------


def _rounded_normals(count: int, scale: float) -> Integers:
    """`count` independent round(scale·Z)."""
    drawn = np.empty(count + count % 2, np.int64)
    for first in range(0, len(drawn), 2 * _PIECE):
        piece = drawn[first : first + 2 * _PIECE].reshape(2, -1)
        words = np.frombuffer(os.urandom(12 * piece.size), np.uint64).reshape(3, -1)
        values, errors = _box_muller(words, scale)
        piece[:] = rounded = np.rint(values)
        unsure = (0.5 - np.abs(values - rounded) <= errors).any(axis=0)
        for k in np.flatnonzero(unsure | (words[0] == 0)):
            piece[:, k] = _exact_pair([int(word) for word in words[:, k]], scale)
    return drawn[:count]


def _rounded_laplaces(count: int, scale: float) -> Integers:
    """`count` independent round(scale·L), L of density e^(−|x|)/2."""
    drawn = np.empty(count, np.int64)
    for first in range(0, count, _PIECE):
        piece = drawn[first : first + _PIECE]
        words = np.frombuffer(os.urandom(24 * piece.size), np.uint64).reshape(3, -1)
        values, errors = _exponential(words, scale)
        piece[:] = rounded = np.rint(values)
        for k in np.flatnonzero((0.5 - np.abs(values - rounded) <= errors) | (words[0] == 0)):
            piece[k] = _exact_exponential([int(word) for word in words[:2, k]], scale)
        piece[:] = np.where(words[2] & np.uint64(1), piece, -piece)
    return drawn


def _exponential(words: Words, scale: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """scale·(−ln u), (n,), and bounds on the errors.

    That of −ln u is at most 2⁻⁵¹ from u and a few units in the last place from the logarithm; the bound leaves a
    factor of about 8 for the functions of the library, as that of `_box_muller` does.
    """
    with np.errstate(divide="ignore"):
        exponential = -np.log(_unit(words))
    return scale * exponential, scale * (1 + exponential) * 2.0**-46


def _exact_exponential(words: Sequence[int], scale: float) -> int:
    """The same integer, computed with 400 bits from the same words and 128 further bits."""
    import mpmath  # type: ignore[import-untyped] # torch needs it too

    with mpmath.workprec(400):
        u = (mpmath.mpf((words[0] << 192) | (words[1] << 128) | secrets.randbits(128)) + 0.5) / 2**256
        return int(mpmath.nint(-mpmath.mpf(scale) * mpmath.log(u)))


def _unit(words: Words) -> NDArray[np.float64]:
    """Uniform in (0, 1) by the bits of two words, precise to 2⁻⁵² of itself however small it is."""
    high, low = words[0].astype(np.float64), words[1].astype(np.float64)
    unit: NDArray[np.float64] = (high + (low + 0.5) * 2.0**-64) * 2.0**-64
    return unit


def _box_muller(words: Words, scale: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """scale·√(−2 ln u)·(cos θ, sin θ), (2, n), and bounds on their errors, (n,).

    u has the bits of the first two words, so that it is precise to 2⁻⁵² of itself however small it is; θ/2π those of
    the third. With r = √(−2 ln u): the error of r² is at most 2⁻⁵¹ from u and a few units in the last place from the
    logarithm, that of the angle 2⁻⁵⁰. The bound leaves a factor of about 8 for the functions of the library.
    """
    with np.errstate(divide="ignore"):
        radius = np.sqrt(-2.0 * np.log(_unit(words)))
        errors = scale * (radius * 2.0**-46 + 2.0**-49 / radius)
    angle = words[2].astype(np.float64) * (2 * math.pi * 2.0**-64)
    return np.stack([np.cos(angle), np.sin(angle)]) * (scale * radius), errors


def _exact_pair(words: Sequence[int], scale: float) -> tuple[int, int]:
    """The same pair of integers, computed with 400 bits from the same words and 128 further bits for each number."""
    import mpmath

    with mpmath.workprec(400):
        u = (mpmath.mpf((words[0] << 192) | (words[1] << 128) | secrets.randbits(128)) + 0.5) / 2**256
        angle = 2 * mpmath.pi * (mpmath.mpf((words[2] << 128) | secrets.randbits(128)) + 0.5) / 2**192
        radius = mpmath.mpf(scale) * mpmath.sqrt(-2 * mpmath.log(u))
        return int(mpmath.nint(radius * mpmath.cos(angle))), int(mpmath.nint(radius * mpmath.sin(angle)))


# --- a NumPy generator ----------------------------------------------------------------------------------------------


class _Bitgen(ctypes.Structure):
    """NumPy's bitgen_t (numpy/random/bitgen.h)."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("next_uint64", ctypes.c_void_p),
        ("next_uint32", ctypes.c_void_p),
        ("next_double", ctypes.c_void_p),
        ("next_raw", ctypes.c_void_p),
    )


class _SystemBits:
    """A NumPy bit generator without a state: every number is asked of the operating system."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        word = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(lambda _: secrets.randbits(64))
        half = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p)(lambda _: secrets.randbits(32))
        real = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)(lambda _: secrets.randbits(53) * 2.0**-53)
        self._functions = (word, half, real)  # the structure holds bare addresses
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (word, half, real, word)]
        self._struct = _Bitgen(None, *addresses)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self._name = ctypes.c_char_p(b"BitGenerator")
        self.capsule: Any = new(ctypes.addressof(self._struct), self._name, None)

    def random_raw(self, size: int) -> Words:
        """`size` words of 64 bits."""
        return np.frombuffer(os.urandom(8 * size), np.uint64)


def secure_generator() -> np.random.Generator:
    """A NumPy generator fed by the operating system, for choices that must be secret (which examples join a batch).

    Not for noise: its floating-point distributions have the gaps that `add_secure_noise` avoids. It cannot be seeded,
    copied or repeated.
    """
    return np.random.Generator(_SystemBits())  # type: ignore[arg-type] # NumPy needs the interface, not the class
