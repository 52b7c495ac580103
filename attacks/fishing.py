# SPDX-License-Identifier: Apache-2.0
"""Fishing for one example of a large batch (after Wen et al. 2022): a head so steep that one gradient drowns the rest.

With the rows w_c = 0 and w_j = -gain·a for all j ≠ c the gradient of an example with features f is a multiple of a: by
sigmoid(-gain·(a·f - t)) if its class is c, and by sigmoid(gain·(a·f - t)) if it is not. This is a detector of the class
c, and so steep a one that of all examples only that with the smallest margin counts: an example of c that looks least
like it. The direction a is fitted to public rows; the threshold t, and the class unless one is named, are those which
isolate an example most often in batches of public rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.attacks.network import head, layer_inputs, leaf_layers
from fedsim.errors import AttackError
from fedsim.randomness import stream
from fedsim.scenario import FishingServer

_RIDGE = 0.1  # of the mean variance of a feature
_TRIALS = 200
_QUANTILES = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.14, 0.2)
_FLOOR = 6e-8  # float32 does not see a smaller share of a gradient


@dataclass(frozen=True, eq=False)
class Detector:
    """score = a·f + offset, for which rows of the class have t on average above; how often it isolates an example."""

    target: int
    direction: Tensor
    threshold: float
    isolates: float


def craft_fishing(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    public: Tensor,
    labels: Tensor,
    section: FishingServer,
    *,
    batch_size: int,
) -> dict[str, Tensor]:
    """The honest weights with such a head; nothing else is changed."""
    last = head(leaf_layers(model, tuple(public.shape[1:])))
    if last is None or last.bias is None:
        raise AttackError("the last layer is not a dense layer with a bias, so there is no head to fish with")
    features = layer_inputs(model, last.module, public, weights).flatten(1).double()
    classes = weights[last.bias].shape[0]
    wanted = range(classes) if section.target is None else [section.target]
    fitted = [_detector(features, labels == c, c, section.gain, batch_size) for c in wanted if _usable(labels == c)]
    if not fitted:
        raise AttackError(f"target {section.target}: the public rows hold no examples of this class to learn it from")
    best = max(fitted, key=lambda each: each.isolates)
    crafted = {name: tensor.clone() for name, tensor in weights.items()}
    matrix, bias = crafted[last.weight], crafted[last.bias]
    others = torch.arange(classes) != best.target
    matrix[others] = (-section.gain * best.direction).float()
    bias[others] = section.gain * best.threshold - math.log(max(classes - 1, 1))
    matrix[best.target], bias[best.target] = 0.0, 0.0
    return crafted


def _usable(own: Tensor) -> bool:
    return 3 <= int(own.sum()) <= len(own) - 3


def _detector(features: Tensor, own: Tensor, target: int, gain: float, batch_size: int) -> Detector:
    """Ridge regression of "is of the class" on the features, with leave-one-out scores to choose the threshold by."""
    truth, mean = own.double(), features.mean(dim=0)
    centred = features - mean
    gram = centred.T @ centred
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    direction = torch.linalg.solve(gram, centred.T @ (truth - truth.mean()))
    leverage = (centred * torch.linalg.solve(gram, centred.T).T).sum(dim=1) + 1 / len(truth)
    fitted = centred @ direction + truth.mean()
    scores = truth - (truth - fitted) / (1 - leverage).clamp_min(1e-3)
    spread = scores[own].std().clamp_min(1e-9)
    scores = scores / spread
    batches = torch.from_numpy(stream(target, "fishing").integers(len(truth), size=(_TRIALS, batch_size)))
    choices = [(_isolated(scores, own, batches, float(t), gain), float(t)) for t in scores[own].quantile(_quantiles())]
    share, threshold = max(choices)
    offset = float((truth.mean() - mean @ direction) / spread)
    return Detector(target, direction / spread, threshold - offset, share)


def _quantiles() -> Tensor:
    return torch.tensor(_QUANTILES, dtype=torch.float64)


def _isolated(scores: Tensor, own: Tensor, batches: Tensor, threshold: float, gain: float) -> float:
    """In which share of the batches (trials, b) one example has a hundred times the weight of all others together."""
    margin = torch.where(own, scores - threshold, threshold - scores)[batches]
    weight = torch.sigmoid(-gain * margin)
    top = weight.amax(dim=1)
    rest = weight.sum(dim=1) - top + _FLOOR * batches.shape[1] ** 0.5
    return float((top > 100 * rest).double().mean())
