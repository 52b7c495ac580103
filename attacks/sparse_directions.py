# SPDX-License-Identifier: Apache-2.0
"""Sparse vectors in the span of a matrix: all directions a for which Y a has many more zeros than algebra forces.

Y (m, r) holds r sparse columns, mixed: Y = D^T P with unknown sparse D (r, m) and invertible P. A generic a gives r - 1
zeros at best; a column of P^-1 gives a column of D^T, with as many zeros as that has. Three ways to find them, each of
them thousands of starts in one batched computation:

- descent of the smoothed l1 norm on the sphere (Qu, Sun and Wright 2014; Spielman, Wang and Wright 2012), on whitened
  rows of equal length, so that neither the size of a row nor the correlation of the columns misleads it;
- null vectors of random sets of r - 1 rows (SPEAR, Dimitrov et al. 2024), r of them from one inverse;
- rounding of any guess: reweighted least squares with log penalty (Chartrand and Yin 2008), down to the noise.

What is returned has passed a test (`verified`): the zeros determine the direction, also if any one of them is left out,
and there are more of them than chance explains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import poisson
from torch import Tensor

ZERO = 8.0
"""An entry is zero if it is within so many standard deviations of its noise."""
_CHANCE = 1e-12
_NEEDED = 1 - 1e-3
_SAME = 0.999
_DIVIDED = 8
_SAMPLED = 18
"""Up to this rank, null vectors of random rows are worth their time: a column is hit with probability 2^-(r - 1)."""


@dataclass(frozen=True, eq=False)
class Span:
    """The rows of Y, of length 1, in coordinates in which they are white: rows = Y / lengths @ whiten."""

    rows: Tensor
    """(m', r) float64; rows that are nothing but noise are left out."""
    noise: Tensor
    """(m',) standard deviation of the noise of a row, relative to its length."""
    kept: Tensor
    """(m',) which rows of Y these are."""
    whiten: Tensor
    """(r, r): `whiten` times a direction in these coordinates is one in those of Y."""
    spread: Tensor
    """(r, r): the noise of an entry in direction a is `noise` times the length of `spread @ a`."""

    @property
    def rank(self) -> int:
        """Dimension r of the span."""
        return self.rows.shape[1]


def span(matrix: Tensor, noise: Tensor, spread: Tensor) -> Span | None:
    """Normalise and whiten a matrix (m, r) whose entry j in direction a has noise noise[j] * |spread @ a|."""
    lengths = matrix.norm(dim=1)
    kept = (lengths > ZERO * noise * math.sqrt(matrix.shape[1])).nonzero()[:, 0]
    rank = matrix.shape[1]
    if len(kept) <= rank:
        return None
    unit = matrix[kept] / lengths[kept, None]
    left, values, right = torch.linalg.svd(unit, full_matrices=False)
    if values[-1] <= 1e-10 * values[0]:
        return None
    whiten = right.T / values
    return Span(left.contiguous(), noise[kept] / lengths[kept], kept, whiten, spread @ whiten)


# --- the test -------------------------------------------------------------------------------------------------------


def zeros(space: Span, directions: Tensor) -> Tensor:
    """(m', k) bool: which entries of Y a are zero, up to noise, for directions (r, k)."""
    values = (space.rows @ directions).abs()
    tolerance: Tensor = ZERO * space.noise[:, None] * (space.spread @ directions).norm(dim=0)
    return values <= tolerance


def excess_needed(space: Span) -> int:
    """How many zeros beyond the r - 1 forced ones are not chance (probability 1e-12 for a given direction).

    An entry of unit rows is, for a random direction, about normal with variance 1/r: it lies within its tolerance with
    probability 2 * ZERO * noise * sqrt(r / 2 pi).
    """
    near = 2 * ZERO * space.noise * math.sqrt(space.rank / (2 * math.pi))
    return max(3, int(poisson.isf(_CHANCE, float(near.clamp(max=1).sum()))) + 1)


def verified(space: Span, directions: Tensor, *, redundant: bool = True) -> Tensor:
    """Refit each direction to its zeros and test it; returns the directions (r, k') that pass.

    The zeros Z of a true column have a null space of dimension 1. Those of a mixture of s columns are the zeros that
    all of them share, with null space of dimension s, and s - 1 rows by accident: without one of these (leverage 1) the
    direction is not determined. `redundant` False: a row may be needed, because the guess is from elsewhere.
    """
    need = space.rank - 1 + excess_needed(space)
    passed = []
    for direction in directions.T:
        for _ in range(3):
            zero = zeros(space, direction[:, None])[:, 0]
            if int(zero.sum()) < need:
                break
            sharp = space.rows[zero] * (space.noise.min() / space.noise[zero, None])
            direction = torch.linalg.eigh(sharp.T @ sharp).eigenvectors[:, 0]
        else:
            if not redundant or bool(is_redundant(space, direction[:, None])):
                passed.append(direction)
    return torch.stack(passed, 1) if passed else space.rows.new_zeros(space.rank, 0)


def _leverage(rows: Tensor) -> Tensor:
    """(n,) leverage of each row in the span of rows (n, r) without their null direction: 1 where it is needed."""
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    leverage: Tensor = ((rows @ vectors[:, 1:]) ** 2 / values[1:].clamp_min(1e-300)).sum(1)
    return leverage


def is_redundant(space: Span, directions: Tensor) -> Tensor:
    """(k,) bool: whether the zeros of a direction still determine it when any one of them is left out."""
    needed = [float(_leverage(space.rows[zero]).max()) if zero.any() else 1.0 for zero in zeros(space, directions).T]
    return torch.tensor([leverage < _NEEDED for leverage in needed], dtype=torch.bool)


def distinct(directions: Tensor, order: Tensor, same: float = _SAME, most: int | None = None) -> Tensor:
    """Indices of directions (r, k), in the given order, none of which has |cos| > `same` with one before it."""
    units = directions / directions.norm(dim=0)
    chosen: list[int] = []
    free = torch.ones(units.shape[1], dtype=torch.bool)
    for index in order.tolist():
        if free[index]:
            chosen.append(index)
            free &= (units.T @ units[:, index]).abs() <= same
            if most is not None and len(chosen) == most:
                break
    return torch.tensor(chosen, dtype=torch.int64)


# --- the search -----------------------------------------------------------------------------------------------------


def candidates(space: Span, rng: np.random.Generator, effort: int, known: Tensor) -> Tensor:
    """Directions (r, k) that pass the test, most zeros first; `effort` 0, 1, 2, ... searches ever longer, elsewhere.

    Where some directions (r, k') are known, descents begin orthogonal to them: in white coordinates the columns are
    nearly so, and from there nearly all descents lead to columns that are missing, not to known ones again.
    """
    starts = torch.from_numpy(rng.standard_normal((max(256, 8 * space.rank) << min(effort, 3), space.rank))).T
    if effort == 0:
        chosen = torch.from_numpy(rng.permutation(len(space.rows))[: starts.shape[1]])
        starts = space.rows[chosen].T
    elif 0 < known.shape[1] < space.rank:
        frame = torch.linalg.qr(known).Q
        starts = (starts - frame @ (frame.T @ starts))[:, : max(256, 8 * space.rank)]
    ends = descend(space, starts / starts.norm(dim=0))
    ends = ends[:, ((known.T @ ends).abs() <= 0.99).all(0)]
    ends = ends[:, distinct(ends, (space.rows @ ends).abs().sum(0).argsort(), 0.99)]
    found = _tested(space, ends, 6 * space.rank)
    if space.rank <= _SAMPLED and found.shape[1] + known.shape[1] < space.rank:
        hits = sampled(space, rng, max(64, min(2**space.rank, 2**18) >> max(0, 4 - effort)))
        hits = hits[:, distinct(hits, zeros(space, hits).sum(0).argsort(descending=True), _SAME, 12 * space.rank)]
        found = torch.cat([found, _tested(space, hits, 12 * space.rank)], 1)
    return found[:, distinct(found, zeros(space, found).sum(0).argsort(descending=True))]


def _tested(space: Span, guesses: Tensor, most: int) -> Tensor:
    """Round and test guesses (the best first), in parts, until as many as the rank are found."""
    found = space.rows.new_zeros(space.rank, 0)
    for part in torch.split(guesses[:, :most], max(32, space.rank), dim=1):
        found = torch.cat([found, verified(space, rounded(space, part))], 1)
        found = found[:, distinct(found, torch.arange(found.shape[1]))]
        if found.shape[1] >= space.rank:
            break
    return found


def descend(space: Span, starts: Tensor, iterations: int = 400, first: float = 0.5, last: float = 0.02) -> Tensor:
    """Minimise over |a| = 1 sum_j mu log cosh(l_j a / mu), with mu falling, from many starts (r, k) at once."""
    rows, a = space.rows.float(), starts.float()
    scale = 1 / math.sqrt(len(rows))
    for t in range(iterations):
        mu = scale * first * (last / first) ** (t / (iterations - 1))
        slope = rows.T @ torch.tanh((rows @ a) / mu)
        slope -= a * (a * slope).sum(0)
        a = a - mu * slope
        a = a / a.norm(dim=0)
    return a.double()


def rounded(space: Span, guesses: Tensor) -> Tensor:
    """Reweighted least squares, w_j = 1 / (u_j^2 + mu^2) with mu falling to the noise, from guesses (r, k)."""
    out = [guesses[:, :0]]
    for a in guesses.split(32, 1):
        for t in range(14):
            u = space.rows @ a
            mu = u.abs().median(dim=0).values * 10.0 ** (-0.5 - 0.5 * t)
            floor = ZERO * space.noise[:, None] * (space.spread @ a).norm(dim=0)
            weights = 1 / (u * u + torch.maximum(mu, floor) ** 2)
            a = least(space.rows, weights / weights.amax(0), a, 2 if t else 4)
        out.append(a[:, torch.isfinite(a).all(0)])
    return torch.cat(out, 1)


def least(rows: Tensor, weights: Tensor, guesses: Tensor, iterations: int) -> Tensor:
    """The smallest eigenvectors of sum_j w_j l_j l_j^T, one for each column of weights, by inverse iteration."""
    # each factor in the layout in which the product is quick: five times
    normal = (rows.T[None] * weights.T.contiguous()[:, None]) @ rows
    factor, _ = torch.linalg.cholesky_ex(normal + 1e-15 * torch.eye(rows.shape[1], dtype=rows.dtype))
    a = guesses.T[:, :, None]
    for _ in range(iterations):
        a = torch.cholesky_solve(a, factor)
        a = a / a.norm(dim=1, keepdim=True)
    return a[:, :, 0].T


def sampled(space: Span, rng: np.random.Generator, bases: int) -> Tensor:
    """Null vectors of random sets of r - 1 rows that have more zeros than forced: r of them from each inverse."""
    need = space.rank - 1 + excess_needed(space)
    found = []
    step = max(1, 1_000_000 // (len(space.rows) * space.rank))
    for first in range(0, bases, step):
        chosen = torch.from_numpy(rng.random((min(step, bases - first), len(space.rows))).argsort(1)[:, : space.rank])
        inverse, bad = torch.linalg.inv_ex(space.rows[chosen])
        null = inverse[bad == 0].transpose(0, 1).reshape(space.rank, -1)
        null = null / null.norm(dim=0)
        null = null[:, torch.isfinite(null).all(0)]
        found.append(null[:, zeros(space, null).sum(0) >= need])
    return torch.cat(found, 1) if found else space.rows[:0].T


def divided(space: Span, mixture: Tensor, rng: np.random.Generator) -> Tensor:
    """The columns (r, k) of which a direction (r,) is a mixture, if they are few.

    Similar inputs share most of their zeros. Those span a null space of a few dimensions, in which the columns are
    found by sampling rows, as in the whole, with far fewer rows to hit.
    """
    zero = zeros(space, mixture[:, None])[:, 0]
    shared = space.rows[zero][_leverage(space.rows[zero]) < _NEEDED]
    values, vectors = torch.linalg.eigh(shared.T @ shared)
    size = int((values < 1e-6 * values[-1]).sum())
    if not 2 <= size <= _DIVIDED:
        return space.rows.new_zeros(space.rank, 0)
    inside: Tensor = vectors[:, :size]
    rows = space.rows @ inside
    kept = (rows.norm(dim=1) > ZERO * space.noise * torch.linalg.matrix_norm(space.spread @ inside)).nonzero()[:, 0]
    if len(kept) <= size:
        return space.rows.new_zeros(space.rank, 0)
    part = Span(rows[kept], space.noise[kept], kept, space.whiten @ inside, space.spread @ inside)
    hits = sampled(part, rng, 4096)
    hits = inside @ hits[:, distinct(hits, zeros(part, hits).sum(0).argsort(descending=True), _SAME, 8 * size)]
    return verified(space, hits)
