# SPDX-License-Identifier: Apache-2.0
"""Where gradient matching begins: how many examples, which labels, and inputs from features where these are exact."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedsim.attacks.descent import Budget
from fedsim.attacks.feature_inversion import (
    Features,
    batch_features,
    first_linear,
    gates_like_relu,
    invert,
    item_labels,
    single_features,
)
from fedsim.attacks.matching import Target, private_copy
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.attacks.units import Units
from fedsim.errors import AttackError
from fedsim.scenario.attack import GradientMatchingAttack


@dataclass(frozen=True, eq=False)
class Guess:
    """A start for the optimiser."""

    inputs: Tensor
    """(n, *shape) float64, in units."""
    labels: Tensor | None
    """(n,); None: to be found together with the inputs."""
    near: bool = False
    """All inputs come from features that determine them and fit well: what is left is polishing."""
    notes: tuple[str, ...] = ()


def first_guess(
    observation: Observation,
    knowledge: Knowledge,
    settings: GradientMatchingAttack,
    target: Target,
    units: Units,
    *,
    seed: int,
    deadline: float,
) -> Guess:
    """Labels, and inputs in the middle of their range, replaced by what the first linear layer reveals."""
    labels, count, notes = _labels(observation, knowledge)
    inputs = units.middle.expand(count, *knowledge.input_shape).clone()
    plain = Guess(inputs, labels, notes=notes)
    if not settings.features:
        return plain
    features, reason = _features(observation, knowledge, target, count, seed, deadline)
    if features is None:
        return Guess(inputs, labels, notes=(*notes, reason) if reason else notes)
    return _from_features(observation, knowledge, settings, features, units, plain, deadline)


def _labels(observation: Observation, knowledge: Knowledge) -> tuple[Tensor | None, int, tuple[str, ...]]:
    """The labels, in ascending order, or None; how many examples there are; and what to tell about it."""
    if knowledge.labels is not None:
        return knowledge.labels.sort().values, len(knowledge.labels), ()
    count = observation.batch_size
    notes: tuple[str, ...] = ()
    if count is None and observation.examples:
        count = observation.work.batch(observation.examples)
        notes = (f"the number of examples is not known: the expected {count} was used",)
    if not count:
        raise AttackError(
            f"client {observation.client} does not say how many examples it has, so that gradient-matching does not"
            " know how many to look for: grant the labels (adversary.knows.labels: known)"
        )
    try:
        from fedsim.attacks.labels import count_labels

        return count_labels(observation, knowledge, count).labels, count, notes
    except AttackError:
        return None, count, (*notes, "labels cannot be counted on this model: they are optimised with the inputs")


# --- features -------------------------------------------------------------------------------------------------------


def _features(
    observation: Observation, knowledge: Knowledge, target: Target, count: int, seed: int, deadline: float
) -> tuple[Features | None, str]:
    """What entered the first linear layer, or a sentence about why it is not known."""
    layer = first_linear(observation, knowledge)
    if layer is None or layer.bias is None:
        return None, "no linear layer with a bias reveals the features of single examples"
    named = dict(zip(observation.weights, target.gradient, strict=True))
    weight, bias = named[layer.weight], named[layer.bias]
    if count == 1:
        return single_features(layer, target, weight, bias), "the linear layer's gradient tells nothing"
    probe = torch.zeros(count, *knowledge.input_shape)
    if not gates_like_relu(private_copy(observation.model, torch.float32), layer.name, probe):
        return None, f"no ReLU follows {layer.name}: its gradient mixes the examples"
    left = None if deadline == math.inf else max(0.1, 0.5 * (deadline - time.monotonic()))
    found = batch_features(layer, target, weight, bias, seed, left)
    return found, f"the gradient of {layer.name} could not be taken apart into examples"


def _from_features(
    observation: Observation,
    knowledge: Knowledge,
    settings: GradientMatchingAttack,
    features: Features,
    units: Units,
    plain: Guess,
    deadline: float,
) -> Guess:
    """Invert the features, find the label of each, and put them in the first places of the guess."""
    model = private_copy(observation.model, torch.float64).requires_grad_(False)
    batch, found = len(plain.inputs), min(len(features.values), len(plain.inputs))
    features = features.first(found)
    together = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in model.modules())
    if together and found < batch:
        return plain
    determined = features.values.shape[1] >= math.prod(knowledge.input_shape)  # else it is a start, and no more
    share = max(1, settings.iterations // (2 if determined else 4))
    budget = Budget(share, settings.patience, 1e-12, deadline)
    descent = invert(model, features, plain.inputs[:found], units.decode, budget, together=together)
    items = descent.points.view(found, *knowledge.input_shape)
    items = items.clamp(0, 1) if units.bounded else items
    costs = item_labels(model, features, units.decode(items), knowledge.classes, batch)
    inputs = plain.inputs.clone()
    inputs[:found] = items
    fit = float(descent.scores.max())
    note = (
        f"{found} of {batch} examples by inverting what entered {features.layer.name or 'the linear layer'},"
        f" {descent.iterations} iterations, misfit {fit:.1e}"
    )
    near = determined and found == batch and fit < 0.1
    return Guess(inputs, _assigned(costs, plain.labels, batch), near, (*plain.notes, note))


def _assigned(costs: Tensor, labels: Tensor | None, batch: int) -> Tensor | None:
    """(n,): the labels in the order of the items; the items without features get what is left."""
    if labels is None:
        return costs.argmin(1) if len(costs) == batch else None
    rows, places = linear_sum_assignment(costs[:, labels].numpy())
    del rows  # 0..k-1: there are never more items than labels
    taken = torch.from_numpy(places)
    left = torch.ones(batch, dtype=torch.bool)
    left[taken] = False
    return torch.cat([labels[taken], labels[left]])
