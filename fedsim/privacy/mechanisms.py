# SPDX-License-Identifier: Apache-2.0
"""What a client does to its update before it leaves: clip, add noise, compress.

Everything works on a cohort's updates (K, P), one row for each client, and row by row: the result of a row depends, to
the last bit, on nothing but that row and its own generator.

| a row that is ...          | clip                | prune, quantise, sign  |
|----------------------------|---------------------|------------------------|
| within the clipping norm   | unchanged           | as described           |
| all zero                   | unchanged           | zero (sign: zero)      |
| NaN or infinite somewhere  | becomes zero        | becomes NaN            |

A row that is not finite has no direction to scale down, and to send it, or to refuse it, would tell the server
something about the data that no noise hides. As a zero it is inside the sensitivity and is noised like every other
row. Compression alone claims nothing, so there a broken row stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import PrivacyError
from fedsim.privacy.claim import Adjacency
from fedsim.scenario import AdaptiveClipping

Row = NDArray[Any]
_SAFE = 1 - 2.0**-21  # above the relative rounding error of float32 (2^-24), so that rounding never passes the norm


@dataclass(frozen=True, eq=False)
class Clipped:
    """Rows whose norm is at most `clipping_norm`; only `clip` makes them, and only they can be noised."""

    values: Tensor
    clipping_norm: float
    order: Literal[1, 2]

    def sensitivity(self, adjacency: Adjacency) -> float:
        """How far a sum of rows can move, in the norm of `order`: C if a row comes or goes, 2C if it is another."""
        return self.clipping_norm * {"add/remove": 1.0, "replace": 2.0}[adjacency]


def clip(updates: Tensor, clipping_norm: float, order: Literal[1, 2] = 2) -> Clipped:
    """Scale every row u to u · min(1, C/‖u‖), in the L2 (or L1) norm.

    Guarantees: the norm of every row, computed in float64, is at most C exactly: what is scaled, is scaled to
    C(1 − 2⁻²¹), because rounding to float32 may go up. Rows within C are unchanged; rows that are not finite become 0.
    """
    if not 0 < clipping_norm < math.inf:
        raise PrivacyError(f"clipping_norm is {clipping_norm!r}, it must be positive and finite")

    def scaled(row: Row) -> Row:
        wide = row.astype(np.float64)
        if not np.isfinite(wide).all():
            return np.zeros_like(row)
        for _ in range(3):  # once is enough, except among subnormal numbers, where rounding is coarser
            norm = _norm(wide, order)
            if norm <= clipping_norm:
                return row
            row = (wide * (clipping_norm / norm * _SAFE)).astype(row.dtype)
            wide = row.astype(np.float64)
        return row if _norm(wide, order) <= clipping_norm else np.zeros_like(row)

    return Clipped(_by_row(updates, scaled), float(clipping_norm), order)


def add_gaussian(clipped: Clipped, noise_multiplier: float, generators: Sequence[np.random.Generator]) -> Tensor:
    """Add N(0, (σC)²) to every entry; each row from its own generator. Needs rows that are clipped in L2."""
    _check_noise(clipped, noise_multiplier, generators, order=2)
    return _add_noise(clipped, noise_multiplier, [g.standard_normal for g in generators])


def add_laplace(clipped: Clipped, noise_multiplier: float, generators: Sequence[np.random.Generator]) -> Tensor:
    """Add Laplace noise of scale b = noise_multiplier · C to every entry. Needs rows that are clipped in L1.

    Among all shifts of L1 norm Δ, one entry shifted by Δ is the easiest to see: a shift of s·b has
    δ(ε) = (1 − e^((ε−s)/2))₊, and two shifts s ≤ t have E[δ_t(ε − L_s)] ≤ δ_t(ε − s) = δ_{s+t}(ε), since the loss L_s
    of the first is at most s. So the claim is that of one number, by PLD, whatever the number of entries.
    """
    _check_noise(clipped, noise_multiplier, generators, order=1)
    draws: list[Callable[[int], Row]] = [partial(_standard_laplace, generator) for generator in generators]
    return _add_noise(clipped, noise_multiplier, draws)


def noise_share(noise_multiplier: float, clients: int) -> float:
    """σ/√n: n independent Gaussian shares add up to σ. (Laplace shares do not add up to Laplace noise.)"""
    if clients < 1:
        raise PrivacyError(f"clients is {clients!r}, the noise must be shared by at least one")
    return noise_multiplier / math.sqrt(clients)


def effective_noise_multiplier(*parts: tuple[float, float]) -> float:
    """One Gaussian release that is as revealing as several together: (1/σ)² = Σ (sensitivity/standard deviation)².

    Andrew et al. 2021, Theorem 1, for the update and the bit that says whether it was clipped.
    """
    if any(deviation == 0 and sensitivity > 0 for sensitivity, deviation in parts):
        return 0.0
    return 1 / math.sqrt(math.fsum((sensitivity / deviation) ** 2 for sensitivity, deviation in parts))


def within_norm(updates: Tensor, clipping_norm: float) -> Tensor:
    """The indicator bits (K,) of adaptive clipping, float64: 1 where `clip` would leave the row as it is.

    A row that is not finite is clipped to zero, which is within any norm.
    """

    def bit(row: Row) -> float:
        wide = row.astype(np.float64)
        return float(not np.isfinite(wide).all() or _norm(wide, 2) <= clipping_norm)

    return torch.tensor([bit(row) for row in updates.numpy()], dtype=torch.float64)


def next_clipping_norm(norm: float, noisy_fraction: float, adaptive: AdaptiveClipping) -> float:
    """C ← C · exp(−η (b̃ − γ)), b̃ the noisy share of updates within the norm (Andrew et al. 2021, Algorithm 1)."""
    following = norm * math.exp(min(-adaptive.learning_rate * (noisy_fraction - adaptive.quantile), 700.0))
    if not 0 < following < math.inf:
        raise PrivacyError(
            f"the clipping norm went from {norm:g} to {following:g} (noisy fraction {noisy_fraction:g});"
            " use a smaller learning_rate or bit_noise of adaptive clipping"
        )
    return following


def prune(updates: Tensor, keep: float) -> Tensor:
    """Keep the share `keep` of the entries of each row, those of largest magnitude (at least one), and zero the others.

    Between equal magnitudes the first ones are kept.
    """

    def pruned(row: Row) -> Row:
        kept = max(1, round(keep * row.size))
        largest = np.argsort(-np.abs(row), kind="stable")[:kept]
        result = np.zeros_like(row)
        result[largest] = row[largest]
        return result

    return _by_row(updates, _finite_only(pruned))


def quantise(updates: Tensor, bits: int) -> Tensor:
    """Round each row to the nearest of 2^bits equidistant levels from its smallest to its largest entry."""

    def quantised(row: Row) -> Row:
        wide = row.astype(np.float64)
        low, high = wide.min(), wide.max()
        if low == high:
            return row
        steps = 2**bits - 1
        level = np.rint((wide - low) / (high - low) * steps)
        return np.asarray(low + level / steps * (high - low), dtype=row.dtype)

    return _by_row(updates, _finite_only(quantised))


def sign(updates: Tensor) -> Tensor:
    """Replace each entry by its sign (0 counts as +) times the row's mean magnitude (Bernstein et al. 2018, scaled)."""

    def signs(row: Row) -> Row:
        magnitude = np.abs(row.astype(np.float64)).mean()
        return np.asarray(np.where(row >= 0, magnitude, -magnitude), dtype=row.dtype)

    return _by_row(updates, _finite_only(signs))


def _norm(row: Row, order: Literal[1, 2]) -> float:
    """A norm in float64, by NumPy, whose summation does not depend on threads or on other rows."""
    with np.errstate(over="ignore"):
        return float(np.abs(row).sum()) if order == 1 else math.sqrt(float(np.square(row).sum()))


def _by_row(updates: Tensor, function: Callable[[Row], Row]) -> Tensor:
    if updates.dim() != 2:
        raise PrivacyError(f"updates have the shape {tuple(updates.shape)}, it must be (clients, parameters)")
    result = np.empty(tuple(updates.shape), dtype=updates.numpy().dtype)
    for k, row in enumerate(updates.detach().contiguous().numpy()):
        result[k] = function(row) if row.size else row
    return torch.from_numpy(result)


def _finite_only(function: Callable[[Row], Row]) -> Callable[[Row], Row]:
    return lambda row: function(row) if np.isfinite(row).all() else np.full_like(row, np.nan)


def _check_noise(
    clipped: Clipped, noise_multiplier: float, generators: Sequence[np.random.Generator], order: Literal[1, 2]
) -> None:
    if not isinstance(clipped, Clipped) or clipped.order != order:
        raise PrivacyError(f"noise is added to rows that are clipped in L{order} only; call clip(..., order={order})")
    if not 0 <= noise_multiplier < math.inf:
        raise PrivacyError(f"noise_multiplier is {noise_multiplier!r}, it must be finite and at least 0")
    if len(generators) != len(clipped.values) or len({id(g) for g in generators}) != len(generators):
        raise PrivacyError(f"{len(clipped.values)} rows need as many generators, each its own, not {len(generators)}")


def _standard_laplace(generator: np.random.Generator, size: int) -> Row:
    return generator.laplace(size=size)


def _add_noise(clipped: Clipped, noise_multiplier: float, draws: Sequence[Callable[[int], Row]]) -> Tensor:
    """Row + scale × draw, added in float64 and rounded once."""
    scale = noise_multiplier * clipped.clipping_norm
    values = clipped.values.numpy()
    noisy = np.empty_like(values)
    for k, draw in enumerate(draws):
        noisy[k] = values[k].astype(np.float64) + scale * draw(values.shape[1])
    return torch.from_numpy(noisy)
