# SPDX-License-Identifier: Apache-2.0
"""The one example that a steep head (`fishing`) has isolated from its batch: read, and checked before believed."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fedsim.attacks.cells import Backward
from fedsim.attacks.last_layer import noise_deviation
from fedsim.attacks.matching import client_gradient, loss_gradient, matching_loss, private_copy
from fedsim.attacks.network import Layer, dense_front, head, leaf_layers
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction
from fedsim.errors import AttackError
from fedsim.scenario import GradientMatchingAttack, ImprintAttack

_REPRODUCED = 1e-3  # what the rest of the batch and float32 leave between a fished example's gradient and the observed
_ALONE = 0.05  # by how much the weight of a fished example may differ from one in the batch
_IN_RANGE = 1e-3  # how far, as a share of the value range, a fished example may leave it


def fished(observation: Observation, knowledge: Knowledge, settings: ImprintAttack, seed: int) -> Reconstruction:
    """The gradient of one example: x by least squares of dW = d xᵀ on db = d, or by gradient matching for batch 1."""
    layers = leaf_layers(observation.model, knowledge.input_shape)
    front, last = dense_front(layers), head(layers)
    if last is None:
        raise AttackError("the last layer is not dense, so it cannot have been made to fish; use another attack")
    # The row of the wanted class is zero, all others are steep.
    label = observation.weights[last.weight].norm(dim=1).argmin().view(1)
    if front is None or front.bias is None or front.name == last.name:
        return _fished_by_matching(observation, knowledge, settings, label, seed)
    gradient = observation.gradient
    matrix, deltas = gradient[front.weight].double(), gradient[front.bias].double()
    x = matrix.T @ deltas / deltas.square().sum().clamp_min(1e-300)
    impure = float((matrix - deltas[:, None] * x).square().sum() / matrix.square().sum().clamp_min(1e-300)) ** 0.5
    if not deltas.any():  # all of it is pruned or rounded away, and nothing is not an example
        impure = 1.0
    value = x.float().view(1, *knowledge.input_shape)
    apart, times = unlike(observation, last, value, knowledge.classes)
    outside = outside_range(knowledge, x)
    clear = knowledge.defence.compression is None and noise_deviation(observation, knowledge) == 0
    alone = abs(times * (observation.batch_size or math.nan) - 1) < _ALONE  # the mean of two alike counts twice
    own = Backward(private_copy(observation.model, torch.float64), front.weight, knowledge.input_shape)
    wanted = bool((own.at_rows(x[None], label)[0] * deltas).sum() > 0)
    kind = "of the wanted class" if wanted else "not of the wanted class, and of which other one is not seen"
    return Reconstruction(
        "imprint",
        value,
        label if wanted else None,
        matching_loss(observation, value, label, share=1 / (observation.batch_size or 1)) if wanted else math.nan,
        score=torch.tensor([max(0.0, 1 - 10 * max(impure, outside, 0.0 if math.isnan(apart) else apart))]),
        certified=torch.tensor([clear and alone and impure < 1e-4 and outside < _IN_RANGE and apart < _REPRODUCED]),
        notes=(
            f"the first layer's gradient is of rank one up to {impure:.1e}, and the example's own gradient is the"
            f" observed one up to {apart:.1e}; the example is {kind}",
        ),
    )


def _fished_by_matching(
    observation: Observation, knowledge: Knowledge, settings: ImprintAttack, label: Tensor, seed: int
) -> Reconstruction:
    from fedsim.attacks.gradient_matching import gradient_matching

    # The caught example is one of the batch's mean, so its gradient's length is unknown: the cosine does not mind.
    single = replace(observation, examples=1, work=replace(observation.work, batch_size=1))
    granted = replace(knowledge, labels=label)
    matching = GradientMatchingAttack(name="gradient-matching", seconds=settings.seconds)
    result = gradient_matching(single, granted, matching, seed=seed)
    return replace(result, attack="imprint", notes=("one example was fished, then matched", *result.notes))


def unlike(observation: Observation, last: Layer, value: Tensor, classes: int) -> tuple[float, float]:
    """How far the example's own gradient is from the observed one, max over tensors of |s·own - seen| / |seen|; and s.

    The factor s > 0 is one for all tensors, and the label is the best. A wrong x that makes the first layer's gradient
    of rank one, as rounding or pruning can, does not also have this dL/dz. The head is left out: the gradients of all
    examples that are not of the wanted class are in it. NaN for an update of several local steps.
    """
    observed = client_gradient(observation)
    if observed is None:
        return math.nan, math.nan
    model = private_copy(observation.model, torch.float64)
    kept = [name not in (last.weight, last.bias) for name in observed]
    seen = [each.double() for each, keep in zip(observed.values(), kept, strict=True) if keep]
    losses = []
    for label in range(classes):
        found = loss_gradient(model, value.double(), torch.tensor([label]))
        own = [each for each, keep in zip(found, kept, strict=True) if keep]
        dots = sum(float((mine * theirs).sum()) for mine, theirs in zip(own, seen, strict=True))
        if dots <= 0:
            continue
        factor = dots / max(sum(float(mine.square().sum()) for mine in own), 1e-300)
        pairs = [(float((factor * a - b).norm()), float(b.norm())) for a, b in zip(own, seen, strict=True)]
        losses.append((max(left / size if size else left and math.inf for left, size in pairs), factor))
    return min(losses, default=(math.inf, math.nan))


def outside_range(knowledge: Knowledge, x: Tensor) -> float:
    """By how much of the value range a flat input leaves it, at most; 0 where no range is known."""
    if knowledge.bounds is None:
        return 0.0
    low, high = (bound.flatten() for bound in knowledge.bounds)
    span = high - low
    span = torch.where(span > 0, span, span.max().clamp_min(1e-300))  # a value that never varies is rounded, too
    return max(0.0, float((torch.maximum(low - x, x - high) / span).max()))
