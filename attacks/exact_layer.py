# SPDX-License-Identifier: Apache-2.0
"""The whole batch that went through a linear layer and a ReLU, from the gradient of that layer alone.

With X~ = [X 1] and D = dL/dZ for Z = X~ W~^T, the gradient is G~ = D^T X~ of rank b, and D_ij = 0 where Z_ij <= 0
(SPEAR, Dimitrov et al. 2024, theorem 3.1). From G~ = Y V^T with V orthonormal: D^T = Y A and X~ = A^-1 V^T for one
matrix A (b, b), whose columns are the sparse directions of Y. Their scale is that of the column of ones.

Two facts beyond the paper make the search quick and the result certain:
- Every row p of A^-1 is orthogonal to the other columns of A. So, once k columns are known, the inputs that are missing
  lie in b - k dimensions; and an input says through its own signs, p V^T W~^T < 0, where its column of Y A is zero,
  which determines that column, as the column determines the input: columns that are not sparse enough to be found by
  their zeros are found by turns between the two (`exact_search`).
- An item is certified if the zeros of its column and the signs of its input, which are computed from different sides of
  the factorisation, agree on all neurons, except those too close to zero for the noise to tell. An input depends on all
  columns: one wrong column c = sum_k c_k a_k leaves -(c_k / c_j) x_j in input k. Without noise c_k is zero or large,
  and the signs tell; with noise it may be small, so that then all columns must agree, or none is certified.

Nothing is tuned by hand: noise is read off the residual of the low-rank fit, row by row.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from scipy.stats import poisson
from torch import Tensor

from fedsim.attacks import sparse_directions as sparse
from fedsim.attacks.exact_error import radius
from fedsim.attacks.exact_factors import Factors, factorise
from fedsim.attacks.exact_search import orientation, search
from fedsim.attacks.sparse_directions import ZERO, Span
from fedsim.randomness import stream

_EXACT = 1e-5
"""A standard error, relative to the input, that is that of rounding and not of noise."""


@dataclass(frozen=True, eq=False)
class LayerBatch:
    """What went into the layer, as far as it was found."""

    inputs: Tensor
    """(n, d) float64."""
    output_gradients: Tensor
    """(n, m) float64: the gradient of the loss by the layer's output; inputs^T of these sum to the layer's gradient."""
    certified: Tensor
    """(n,) bool: gradient and input agree. An input may still be the mean of several, which `exact_certificate`
    excludes."""
    rank: int
    """How many different inputs the gradient holds."""
    complete: bool
    """All of them were found, and all are certified."""
    consistency: float
    """Share of (item, neuron) pairs in which the gradient is zero just where the input switches the neuron off."""
    error: Tensor
    """(n,) standard error of an input's values, by the noise."""
    radius: Tensor
    """(n,) by how much any value of an input may be off, if it is that of one example and not of several."""
    notes: tuple[str, ...]


def _batch(space: Span, factors: Factors, chosen: Tensor, drift: float) -> LayerBatch:
    """Inputs, gradients, errors and certificates of k directions.

    If k < r, the rest is filled with directions orthogonal to them: inputs are then right up to a mixture with the
    inputs that are missing, and none is certified.
    """
    count = chosen.shape[1]
    chosen = torch.cat([chosen, torch.linalg.qr(chosen, mode="complete").Q[:, count:]], 1)
    inputs = torch.linalg.inv(space.whiten @ chosen)
    inputs = inputs * orientation(space, factors, chosen, inputs)[:, None]
    scale = inputs @ factors.basis[-1] if factors.biased else (inputs @ factors.basis.T).norm(dim=1)
    inputs = inputs / scale[:, None]
    directions = torch.linalg.inv(inputs)
    gradients = (factors.left @ directions).T
    error = ((inputs @ torch.linalg.pinv(factors.left)) ** 2 @ factors.noise**2).sqrt()
    agree, proven, off = _agreement(factors, inputs, directions, gradients, error, drift)
    whole = inputs @ factors.basis.T
    relative = error / whole.std(dim=1)
    alone = relative < _EXACT  # whether other columns may be wrong
    whole_batch, unknown = factors.biased and count == space.rank, torch.full_like(error, math.inf)
    certified = proven & (relative < 1e-2) & (alone | proven.all()) & whole_batch
    notes = []
    if count < space.rank:
        notes.append(f"{count} of {space.rank} directions were found, so inputs are mixed with those that are missing")
    elif not factors.biased:
        notes.append("the layer has no bias gradient, so the scale of each input is unknown: they have length 1")
    elif not bool(certified.all()):
        notes.append(f"{int((~certified).sum())} of {count} inputs are not certified: the noise leaves room for others")
    return LayerBatch(
        inputs=(whole[:, :-1] if factors.biased else whole)[:count],
        output_gradients=gradients[:count],
        certified=certified[:count],
        rank=space.rank,
        complete=bool(certified.all()),
        consistency=float(agree[:count].double().mean()) if count else 0.0,
        error=error[:count],
        radius=radius(factors, inputs, directions, gradients, off)[:count] if whole_batch else unknown[:count],
        notes=tuple(notes),
    )


def _agreement(
    factors: Factors, inputs: Tensor, directions: Tensor, gradients: Tensor, error: Tensor, drift: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(r, m) where gradient and input agree about a neuron, (r,) for which inputs this is a proof, (r, m) what is off.

    Neurons whose preactivation is within its own error, or which local steps may have switched, are left out. A
    gradient at a neuron that is off refutes an input; none at a neuron that is on does so unless chance explains it: a
    gradient lies within its tolerance with probability of about tolerance / size.
    """
    whole = inputs @ factors.basis.T
    active = inputs @ factors.signs
    tolerance = ZERO * factors.noise * (factors.spread @ directions).norm(dim=0)[:, None]
    vague = (ZERO * error[:, None] + 2.0**-20 * whole.norm(dim=1)[:, None]) * factors.lengths
    vague = vague + drift * (whole @ whole.T).abs() @ gradients.abs()  # no step moves a preactivation further
    clear = active.abs() > vague
    on = gradients.abs() > tolerance
    refuted = (clear & (active < 0) & (gradients.abs() > 3 * tolerance)).any(1)
    size = (gradients**2).mean(1, keepdim=True).sqrt()
    expected = (clear * (tolerance / size).clamp(max=1)).sum(1)
    silent = (clear & (active > 0) & ~on).sum(1)
    likely = silent <= torch.from_numpy(poisson.isf(1e-6, expected.numpy())).double().nan_to_num()
    return (active > 0) == on, ~refuted & likely & (clear.sum(1) >= 2 * len(inputs)), clear & (active < 0)


def invert_layer(
    weight: Tensor,
    bias: Tensor | None,
    weight_gradient: Tensor,
    bias_gradient: Tensor | None,
    *,
    seed: int = 0,
    seconds: float | None = None,
    noise: float = 0.0,
    drift: float = 0.0,
) -> LayerBatch:
    """All inputs of a linear-ReLU layer from its gradient.

    `noise` is the known norm of noise relative to that of the gradient (0: it is estimated from the spectrum alone),
    `drift` the learning rate if the gradient is a sum over local steps: weights have then moved by up to drift *
    gradient, and neurons that this may have switched prove nothing.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    best: LayerBatch | None = None
    for trial, factors in enumerate(factorise(weight, bias, weight_gradient, bias_gradient, noise)):
        space = sparse.span(factors.left, factors.noise, factors.spread)
        if space is None:
            continue
        batch = _batch(space, factors, search(space, factors, stream(seed, "attack", trial), deadline), drift)
        if best is None or int(batch.certified.sum()) > int(best.certified.sum()):
            best = batch
        if batch.complete or time.monotonic() > deadline:
            break
    return _nothing(weight) if best is None else best


def _nothing(weight: Tensor) -> LayerBatch:
    none = torch.zeros(0, dtype=torch.float64)
    return LayerBatch(
        inputs=none.reshape(0, weight.shape[1]),
        output_gradients=none.reshape(0, weight.shape[0]),
        certified=none.bool(),
        rank=0,
        complete=False,
        consistency=0.0,
        error=none,
        radius=none,
        notes=("the gradient of the layer has no low rank: there are too many examples for its width",),
    )
