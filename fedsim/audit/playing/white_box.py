# SPDX-License-Identifier: Apache-2.0
"""A white-box adversary: whether a row's own gradient lies in the change of the weights.

A row that is trained on pulls the weights along its gradient. So the released change Δ is held against the gradient g
of the row at the weights that training began with, by the matched filter of a shift in Gaussian noise:

    gᵀ Σ⁻¹ (Δ − μ) / √(gᵀ Σ⁻¹ g),

where μ and Σ are the mean and covariance of Δ over shadow models: what everybody's rows do to the weights is noise
here, and weighs little where it is large. A few dozen shadow models span a few dozen of the P dimensions; in all others
Σ is taken to be the mean variance of those. Whoever sees the weights sees the outputs too, so the score that follows
from the loss is added, in the same unit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedsim.audit.playing.arena import Arena, Numbers, Rows
from fedsim.audit.playing.shadows import Shadows, each_own
from fedsim.randomness import stream

LOOKS_AT = "the gradient of the row in the change of the weights, and the loss of the row, compared with shadow models"
_HELD_OUT = 16
"""Shadow models that set the scale of the filter, and take no part in it."""
_AT_ONCE = 1 << 24  # numbers of gradients in memory at once


class WhiteBox:
    """The adversary, with the shadow models that it has trained."""

    def __init__(self, arena: Arena) -> None:
        self._arena, self._shadows = arena, Shadows(arena)
        self._matched = Matched(arena, self._shadows.weights[_HELD_OUT:])
        rows = stream(arena.seed, "game shown").permutation(len(arena.x))[: 8 * _HELD_OUT]
        seen = self._matched.scores(self._shadows.weights[:_HELD_OUT], rows)[self._shadows.without[:_HELD_OUT, rows]]
        self._centre, self._scale = float(seen.mean()), float(seen.std()) + 1e-12

    def score(self, weights: Tensor, rows: Rows) -> Numbers:
        """(K, M): how much more of each row is in each model than in shadow models without it."""
        filtered = (self._matched.scores(weights, rows) - self._centre) / self._scale
        scores: Numbers = self._shadows.score(weights, rows) + filtered
        return scores

    def own(self, weights: Tensor, rows: Rows) -> Numbers:
        """(K,): the score of row k in model k."""
        return each_own(self.score, weights, rows)


class Matched:
    """The matched filter in the noise of other models' changes."""

    def __init__(self, arena: Arena, weights: Tensor) -> None:
        self._arena = arena
        changes = _changes(arena, weights)
        self._mean = changes.mean(0)
        _, spread, self._basis = torch.linalg.svd(changes - self._mean, full_matrices=False)
        variances = spread.square() / (len(weights) - 1)
        self._floor = variances.mean().clamp_min(1e-30)
        self._variances = variances + self._floor

    def scores(self, weights: Tensor, rows: Rows) -> Numbers:
        """(K, M) filtered changes, in standard deviations if Σ is right."""
        changes = _changes(self._arena, weights) - self._mean
        found = []
        for some in np.array_split(rows, max(1, -(-len(rows) * self._arena.layout.size // _AT_ONCE))):
            pulls = -_gradients(self._arena, some)
            weighed = self._weighed(pulls)
            length = (pulls * weighed).sum(1).clamp_min(1e-60).sqrt()
            found.append(changes @ weighed.t() / length)
        return torch.cat(found, 1).numpy()

    def _weighed(self, rows: Tensor) -> Tensor:
        """Σ⁻¹ of each row."""
        parts = rows @ self._basis.t()
        weighed: Tensor = (rows - parts @ self._basis) / self._floor + (parts / self._variances) @ self._basis
        return weighed


def _changes(arena: Arena, weights: Tensor) -> Tensor:
    """(K, P) what training changed of the parameters."""
    return (weights - arena.start)[:, : arena.layout.parameters].double()


def _gradients(arena: Arena, rows: Rows) -> Tensor:
    """(M, P) the gradient of the loss of each row, at the weights that training began with."""
    arena.model.eval()

    def loss(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(arena.model, arena.layout.unflatten(weights), (x[None],), strict=False)
        return F.cross_entropy(outputs, y[None])

    each: Tensor = vmap(grad(loss), (None, 0, 0))(arena.start, arena.x[rows], arena.y[rows])
    return each[:, : arena.layout.parameters].detach().double()
