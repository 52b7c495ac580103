# SPDX-License-Identifier: Apache-2.0
"""What went into a last layer, example by example, from its gradient, while there are fewer examples than classes.

Of multinomial logistic regression that is the batch itself; of any other network, its features and its labels.

The gradient with respect to [W | b] is G = D' [X | 1] / B with D = softmax(X W' + b) - Y, of rank B if B < classes. So
the rows of [X | 1] lie in the row space of G, spanned by R (B, width + 1): [X | 1] = C R for a matrix C of B x B
numbers, which the equations D(C)' C = B G R' (classes x B of them) determine. They are solved by Levenberg-Marquardt,
for many starts and many guesses of the labels at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.randomness import stream

_ENUMERATED = 30_000  # count vectors that are listed at most
_SOLVED = 3e-6  # relative residual of the equations that float32 leaves
_TOGETHER = 64  # starts that are computed at once
_ITERATIONS = 100


@dataclass(frozen=True, eq=False)
class SoftmaxBatch:
    """Examples that explain the gradient of a last layer."""

    inputs: Tensor
    """(B, width) float64: what went into the layer."""
    labels: Tensor
    """(B,)"""
    scale: float
    """The factor of a clipping."""


def solve_softmax_batch(
    layer: tuple[Tensor, Tensor],
    gradient: tuple[Tensor, Tensor],
    hypotheses: Sequence[Tensor],
    *,
    starts: int = 4,
    seed: int = 0,
) -> SoftmaxBatch | None:
    """The inputs and labels of a batch that explains the gradient of one step; None where none was found.

    Args:
        layer: W (classes, width) and b (classes,) as they were sent, float64.
        gradient: with respect to them.
        hypotheses: labels (B,) in any order, all of the same length, to be tried from the first on.
        starts: random starts for each of them.
        seed: of these.
    """
    if not hypotheses:
        return None
    left, values, right = torch.linalg.svd(torch.cat([gradient[0], gradient[1][:, None]], dim=1), full_matrices=False)
    size = len(hypotheses[0])
    if size > len(values) or values[size - 1] < 1e-6 * values[0]:
        return None  # two examples are the same, or nearly so
    rows, target = right[:size], size * left[:, :size] * values[:size]
    equations = _Equations(rows[:, :-1] @ layer[0].T, layer[1], rows[:, -1], target)
    rng = stream(seed, "attack", 1)
    labels = torch.stack(list(hypotheses)).repeat_interleave(starts, 0)
    chunks = [labels[:starts], *labels[starts:].split(_TOGETHER)]  # the first is the best guess by far
    for some in filter(len, chunks):
        noise = torch.from_numpy(rng.standard_normal((len(some), size, size)))
        levels = 0.1 + 0.2 * torch.arange(len(some)) % starts
        unknowns, left_over = equations.solve(some, equations.start(some, levels[:, None, None] * noise))
        best = int(left_over.argmin())
        if left_over[best] < _SOLVED and unknowns[best, -1] > 0:
            inputs = (unknowns[best, :-1].reshape(size, size) @ rows)[:, :-1]
            return SoftmaxBatch(inputs, some[best], float(unknowns[best, -1]))
    return None


def label_hypotheses(estimate: Tensor, error: Tensor, total: int, most: int) -> list[Tensor]:
    """Labels (total,) of count vectors in the order of their distance to an estimate, in standard errors."""
    classes = len(estimate)
    if math.comb(classes + total - 1, total) > _ENUMERATED:
        return []
    each = torch.tensor(list(itertools.combinations_with_replacement(range(classes), total)))
    counts = F.one_hot(each, classes).sum(1)
    order = ((counts - estimate) / error).square().sum(1).argsort(stable=True)
    return list(each[order[:most]])


@dataclass(frozen=True, eq=False)
class _Equations:
    """s D(C)' C = B G R' and C r = 1 in the unknowns C (B, B) and s, the factor of a clipping, for H starts at once.

    D = softmax(C M + b) - Y with M = R W', all without the last column r of R. The unknowns are rows (B^2 + 1,).
    """

    maps: Tensor
    """M (B, classes)."""
    bias: Tensor
    last: Tensor
    """r (B,)."""
    target: Tensor
    """B G R' (classes, B)."""

    def start(self, labels: Tensor, noise: Tensor) -> Tensor:
        """C for equal features of all examples, which labels alone tell apart, and some noise (H, B, B)."""
        equal = (self.last / self.last.square().sum()).expand_as(noise)
        slopes = self._softmax(equal) - F.one_hot(labels, len(self.bias))
        mixing = torch.linalg.pinv(slopes.mT, rtol=1e-3) @ self.target
        scale = (mixing @ self.last).mean(1).clamp_min(1e-6)
        mixing = mixing / scale[:, None, None]
        mixing = mixing + noise * mixing.flatten(1).norm(dim=1)[:, None, None] / len(self.last)
        return torch.cat([mixing.flatten(1), scale[:, None]], dim=1)

    def solve(self, labels: Tensor, unknowns: Tensor) -> tuple[Tensor, Tensor]:
        """Levenberg-Marquardt (Moré 1978, with the scaling of Marquardt): the unknowns, and |residual| / |B G R'|."""
        residual, jacobian = self._linearised(labels, unknowns)
        damping = torch.full((len(labels),), 1e-2, dtype=torch.float64)
        size = float(self.target.norm())
        for _ in range(_ITERATIONS):
            normal = jacobian.mT @ jacobian
            diagonal = normal.diagonal(dim1=1, dim2=2)
            damped = normal + torch.diag_embed(damping[:, None] * diagonal + 1e-14 * diagonal.amax(1, keepdim=True))
            step = torch.linalg.solve(damped, (jacobian.mT @ residual[:, :, None]))[:, :, 0]
            trial = unknowns - step
            new_residual, new_jacobian = self._linearised(labels, trial)
            better = (new_residual.norm(dim=1) < residual.norm(dim=1))[:, None]
            unknowns = torch.where(better, trial, unknowns)
            residual = torch.where(better, new_residual, residual)
            jacobian = torch.where(better[:, :, None], new_jacobian, jacobian)
            damping = torch.where(better[:, 0], damping / 5, damping * 4).clamp(1e-14, 1e8)
            if float(residual.norm(dim=1).min()) < 1e-2 * _SOLVED * size:
                break
        return unknowns, residual.norm(dim=1) / size

    def _linearised(self, labels: Tensor, unknowns: Tensor) -> tuple[Tensor, Tensor]:
        """The residual (H, classes B + B), with rows (k, b) and b, and its derivatives, with columns (j, l) and s."""
        starts, count = len(labels), len(self.last)
        mixing, scale = unknowns[:, :-1].reshape(starts, count, count), unknowns[:, -1]
        softmax = self._softmax(mixing)
        slopes = softmax - F.one_hot(labels, len(self.bias))
        weight = float(self.target.norm())
        unit = torch.eye(count, dtype=torch.float64)
        explained = slopes.mT @ mixing
        ones = weight * (mixing @ self.last - 1)
        residual = torch.cat([(scale[:, None, None] * explained - self.target).flatten(1), ones], dim=1)
        change = softmax[:, :, None] * (self.maps - (softmax @ self.maps.T)[:, :, :, None])  # (h, j, l, k)
        inner = torch.einsum("hjk,bl->hkbjl", slopes, unit) + torch.einsum("hjlk,hjb->hkbjl", change, mixing)
        above = torch.cat(
            [scale[:, None, None] * inner.reshape(starts, -1, count**2), explained.flatten(1)[:, :, None]], dim=2
        )
        below = weight * torch.einsum("bj,l->bjl", unit, self.last).reshape(count, -1).expand(starts, -1, -1)
        return residual, torch.cat([above, F.pad(below, (0, 1))], dim=1)

    def _softmax(self, mixing: Tensor) -> Tensor:
        return (mixing @ self.maps + self.bias).softmax(-1)
