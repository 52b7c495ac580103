# SPDX-License-Identifier: Apache-2.0
"""The search for all columns of a linear-ReLU layer's gradient: from their zeros, and from inputs.

In the notation of `exact_layer`, Y (m, b) = D^T P with columns a of A = P^-1 and inputs p, the rows of P. A column is
found from its zeros alone (`sparse_directions`), or together with its input (`_alternated`), since neurons that the
input switches off have no gradient. The more columns are known, the fewer dimensions are left for the other inputs.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from torch import Tensor

from fedsim.attacks import sparse_directions as sparse
from fedsim.attacks.exact_factors import Factors
from fedsim.attacks.sparse_directions import Span

_ROUNDS = 6
_CONTRADICTION = 0.01
_DIVISIONS = 8
_TURNS = 8
_HALFSPACE = 0.9
"""A column whose support a halfspace explains less well is a mixture (true ones: about 1, mixtures: 0.5 to 0.85)."""


# --- from directions to more directions -----------------------------------------------------------------------------


def _alternated(space: Span, factors: Factors, known: Tensor, rng: np.random.Generator, tries: int) -> Tensor:
    """Directions (r, tries) and their inputs, in turns, from random inputs orthogonal to the known directions (r, k).

    An input determines its direction: a minimises sum_j max(0, -w_j p)^2 (l_j a)^2 over |a| = 1, since l_j a = 0 where
    neuron j is off, and the surer the further it is off. A direction determines its input: |l_j a| is zero for
    w_j p < 0 and not otherwise, so that the slope of its regression on w_j (clipped at the mean, against outliers)
    points to p: b - k coefficients from m neurons.
    """
    rank, count = known.shape
    frame, _ = torch.linalg.qr(space.whiten @ known, mode="complete")
    rest = frame[:, count:]
    values, vectors = torch.linalg.eigh(rest.T @ factors.signs @ factors.signs.T @ rest)
    rest = rest @ vectors / values.clamp_min(1e-12 * float(values[-1])).sqrt()
    neurons = (factors.signs.T @ rest)[space.kept]
    centred = neurons - neurons.mean(0)
    normal = centred.T @ centred
    normal = normal + 1e-9 * normal.trace() * torch.eye(len(normal), dtype=torch.float64)
    inputs = torch.from_numpy(rng.standard_normal((rank - count, tries)))
    directions = torch.from_numpy(rng.standard_normal((rank, tries)))
    for turn in range(_TURNS):
        if factors.biased:
            inputs = inputs * torch.sign(factors.basis[-1] @ rest @ inputs)
        off = (-(neurons @ inputs)).clamp_min(0) ** 2
        off = off / off.amax(0).clamp_min(1e-300) + 1e-4
        parts = zip(off.split(64, 1), directions.split(64, 1), strict=True)
        directions = torch.cat([sparse.least(space.rows, w, a, 3 if turn else 6) for w, a in parts], 1)
        size = (space.rows @ directions).abs()
        size = torch.minimum(size, size.mean(0))
        inputs = torch.linalg.solve(normal, centred.T @ (size - size.mean(0)))
    return directions[:, torch.isfinite(directions).all(0)]


def _completed(space: Span, factors: Factors, known: Tensor, rng: np.random.Generator, tries: int) -> Tensor:
    """Directions that belong to inputs orthogonal to the known directions (r, k)."""
    rank, count = known.shape
    guesses = _alternated(space, factors, known, rng, tries if count < rank - 1 else 1)
    guesses = guesses[:, sparse.distinct(guesses, (space.rows @ guesses).abs().sum(0).argsort(), 0.99)]
    guesses = sparse.rounded(space, guesses)
    guesses = guesses[:, sparse.distinct(guesses, sparse.zeros(space, guesses).sum(0).argsort(descending=True))]
    found = sparse.verified(space, guesses, redundant=False)
    if count == rank - 1:
        return found
    firm = sparse.is_redundant(space, found)
    parts = [sparse.divided(space, mixture, rng) for mixture in found[:, ~firm].T[:_DIVISIONS]]
    return torch.cat([found[:, firm], *parts], 1)


def _halfspace(space: Span, factors: Factors, directions: Tensor) -> Tensor:
    """(k,) how well a halfspace of inputs explains which entries of each column are not zero: 1 for a true column.

    Logistic regression of the support on the neurons' weights (seen from the rows' span), by damped Newton steps.
    """
    points = torch.linalg.qr(factors.signs[:, space.kept].T).Q.contiguous() * math.sqrt(len(space.kept))
    if directions.shape[1] == 0:
        return directions[0]
    target = 1 - 2 * sparse.zeros(space, directions).double()
    scores = []
    eye = 1e-3 * torch.eye(space.rank, dtype=torch.float64)
    for part in torch.split(target, 32, dim=1):
        p = torch.zeros(part.shape[1], space.rank, dtype=torch.float64)
        for _ in range(12):
            chance = torch.sigmoid(-part * (points @ p.T))
            weights = (chance * (1 - chance)).clamp_min(1e-6)
            slope = (part * chance).T @ points / len(points) - 1e-3 * p
            normal = (points.T[None] * weights.T.contiguous()[:, None]) @ points / len(points) + eye
            p = p + torch.linalg.solve(normal, slope[:, :, None])[:, :, 0]
        right = (part * (points @ p.T) > 0).double()
        on = (part > 0).double()
        scores.append(((right * on).sum(0) / on.sum(0) + (right * (1 - on)).sum(0) / (1 - on).sum(0)).nan_to_num() / 2)
    return torch.cat(scores)


def _independent(space: Span, factors: Factors, pool: Tensor) -> Tensor:
    """The best independent directions of a pool (r, k): those that a halfspace explains, redundant ones first."""
    merit = _halfspace(space, factors, pool)
    share = sparse.zeros(space, pool).double().mean(0)
    order = (sparse.is_redundant(space, pool) + share).argsort(descending=True)  # a mixture has fewer zeros
    chosen = pool[:, :0]
    for index in order.tolist():
        frame, _ = torch.linalg.qr(chosen)
        left = pool[:, index] - frame @ (frame.T @ pool[:, index])
        if merit[index] > _HALFSPACE and float(left.norm()) > 1e-3 and chosen.shape[1] < space.rank:
            chosen = torch.cat([chosen, pool[:, index : index + 1]], 1)
    return chosen


def _disagreement(space: Span, factors: Factors, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(m', r) where the input of each of r directions switches a neuron off, and (r,) how often its zeros deny it."""
    inputs = torch.linalg.inv(space.whiten @ chosen)
    inputs = inputs * orientation(space, factors, chosen, inputs)[:, None]
    off = (inputs @ factors.signs < 0)[:, space.kept].T
    return off, (off != sparse.zeros(space, chosen)).double().mean(0)


def _repaired(space: Span, factors: Factors, chosen: Tensor) -> Tensor:
    """Replace each of r directions by the one that the signs of its own input determine, where that fits better."""
    for _ in range(4):
        off, wrong = _disagreement(space, factors, chosen)
        trial = chosen
        for index in (wrong > 0).nonzero()[:, 0].tolist():
            rows = space.rows[off[:, index]]
            guess = torch.linalg.eigh(rows.T @ rows).eigenvectors[:, :1]
            refit = sparse.verified(space, guess, redundant=False)
            if refit.shape[1]:
                swapped = torch.cat([trial[:, :index], refit, trial[:, index + 1 :]], 1)
                trial = swapped if torch.linalg.cond(swapped) < 1e6 else trial
        if float(_disagreement(space, factors, trial)[1].sum()) >= float(wrong.sum()):
            break
        chosen = trial
    return chosen


def orientation(space: Span, factors: Factors, chosen: Tensor, inputs: Tensor) -> Tensor:
    """(r,) the sign of each input: its bias coordinate is positive; without bias, it switches on what has gradient."""
    if factors.biased:
        return torch.where(inputs @ factors.basis[-1] < 0, -1.0, 1.0).double()
    on = ~sparse.zeros(space, chosen)
    active = (inputs @ factors.signs)[:, space.kept]
    return torch.where((on == (active > 0).T).double().mean(0) < 0.5, -1.0, 1.0).double()


# --- the whole ------------------------------------------------------------------------------------------------------


def _merged(space: Span, pool: Tensor, fresh: Tensor) -> Tensor:
    """All directions (r, k) of both, of the same one twice the one with more zeros: the other was rounded badly."""
    pool = torch.cat([pool, fresh], 1)
    return pool[:, sparse.distinct(pool, sparse.zeros(space, pool).sum(0).argsort(descending=True, stable=True))]


def _trusted(chosen: Tensor, effort: int, rng: np.random.Generator) -> Tensor:
    """All directions (r, k), the most sparse first; where these led nowhere, three quarters of them, or a random half.

    A mixture among them hides its own columns from inputs that are orthogonal to it; it has fewer zeros than they have,
    so that it goes once they are found.
    """
    count = chosen.shape[1]
    if effort == 0:
        return chosen
    if effort % 2:
        return chosen[:, : 3 * count // 4]
    return chosen[:, torch.from_numpy(rng.permutation(count)[: count // 2])]


def search(space: Span, factors: Factors, rng: np.random.Generator, deadline: float) -> Tensor:
    """As many independent verified directions (r, k) as are found in a bounded number of rounds.

    A full set that contradicts itself holds a mixture: what contradicts is dropped, and the search goes on.
    """
    pool = chosen = best = space.rows.new_zeros(space.rank, 0)
    least = math.inf
    for effort in range(_ROUNDS):
        fresh = sparse.candidates(space, rng, effort, chosen)
        before = -1  # inputs are tried at least once
        for _ in range(space.rank):
            pool = _merged(space, pool, fresh)
            chosen = _independent(space, factors, pool)
            if chosen.shape[1] in (before, space.rank) or time.monotonic() > deadline:
                break
            trusted = chosen if before >= 0 else _trusted(chosen, effort, rng)
            before = chosen.shape[1]
            fresh = _completed(space, factors, trusted, rng, max(128, 4096 // space.rank) << min(effort, 2))
        if chosen.shape[1] == space.rank:
            chosen = _repaired(space, factors, chosen)
            _, wrong = _disagreement(space, factors, chosen)
            if float(wrong.sum()) < least:
                best, least = chosen, float(wrong.sum())
            pool = chosen = chosen[:, wrong <= _CONTRADICTION]
        if chosen.shape[1] == space.rank or time.monotonic() > deadline:
            break
    return best if best.shape[1] >= chosen.shape[1] else chosen
