# SPDX-License-Identifier: Apache-2.0
"""What gradient matching minimises: distance + priors, over the variables of all restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.attacks.descent import Value
from fedsim.attacks.guess import Guess
from fedsim.attacks.matching import DISTANCES, Target, private_copy
from fedsim.attacks.observation import Observation
from fedsim.attacks.priors import (
    NATURAL_STEP,
    batch_statistics,
    group_consistency,
    l2,
    outside_range,
    patch,
    total_variation,
)
from fedsim.attacks.replica_gradients import ReplicaGradients, is_smooth
from fedsim.attacks.units import Units
from fedsim.scenario.attack import GradientMatchingAttack


@dataclass(frozen=True, eq=False)
class Problem:
    """The objective over free variables (R, D): inputs in units, and logits of the labels where these are unknown."""

    settings: GradientMatchingAttack
    target: Target
    units: Units
    gradients: ReplicaGradients
    known_labels: Tensor | None
    items: int
    shape: tuple[int, ...]
    bent: bool
    """The variables are angles: a unit is (1 + sin z) / 2, so that L-BFGS cannot leave the range."""
    final_variation: float
    """The weight of total variation that the noise justifies."""

    @property
    def size(self) -> int:
        """How many of the variables are inputs."""
        return self.items * math.prod(self.shape)

    def inputs(self, points: Tensor) -> Tensor:
        """(R, n, *shape), in units."""
        free = points[:, : self.size].view(len(points), self.items, *self.shape)
        return (1 + free.sin()) / 2 if self.bent else free

    def labels(self, points: Tensor) -> Tensor:
        """(R, n) classes or (R, n, classes) probabilities."""
        if self.known_labels is not None:
            return self.known_labels.expand(len(points), -1)
        return points[:, self.size :].view(len(points), self.items, -1).softmax(-1)

    def points(self, inputs: Tensor, logits: Tensor) -> Tensor:
        """The variables of inputs (R, n, *shape) in units, and label logits (R, n, classes or 0)."""
        free = (2 * inputs.clamp(1e-4, 1 - 1e-4) - 1).asin() if self.bent else inputs
        return torch.cat([free.flatten(1), logits.flatten(1)], 1)

    def project(self, points: Tensor) -> Tensor:
        """Back into the range of values."""
        if self.settings.value_range != "hard" or not self.units.bounded or self.bent:
            return points
        return torch.cat([points[:, : self.size].clamp(0, 1), points[:, self.size :]], 1)

    def value(self, points: Tensor, _rows: Tensor, progress: float) -> Value:
        """Distance + priors, and the slope of the same with more total variation at the beginning."""
        free = points.detach().requires_grad_()
        inputs = self.inputs(free)
        gradients, statistics = self.gradients(self.units.decode(inputs), self.labels(free))
        name = self.settings.distance
        distance = DISTANCES["cosine" if name == "auto" else name]
        score = distance(self.target.as_sent(gradients), self.target) + self._priors(inputs)
        score = score + self.settings.batch_norm * statistics
        variation = total_variation(inputs)
        early = self.settings.total_variation * (1 - progress) ** 2
        score = score + self.final_variation * variation
        (slope,) = torch.autograd.grad((score + max(early - self.final_variation, 0.0) * variation).sum(), free)
        return Value(score.detach(), slope)

    def _priors(self, inputs: Tensor) -> Tensor:
        settings, total = self.settings, inputs.new_zeros(len(inputs))
        if settings.l2:
            total = total + settings.l2 * l2(inputs - 0.5 if self.units.bounded else inputs)
        if settings.patch:
            total = total + settings.patch * patch(inputs)
        if settings.value_range == "soft" and self.units.bounded:
            total = total + outside_range(inputs, inputs.new_zeros(()), inputs.new_ones(()))
        if settings.group_consistency:
            total = total + settings.group_consistency * group_consistency(inputs)
        return total


def problem_of(
    observation: Observation, settings: GradientMatchingAttack, target: Target, units: Units, guess: Guess
) -> Problem:
    """Choose what is left to `auto`, and the precision."""
    smooth = is_smooth(observation.model, guess.inputs.shape[1:])
    settings = settings.model_copy(update={"optimizer": _optimizer(settings, smooth, guess)})
    if settings.distance == "auto":
        plain = target.magnitude is None and target.threshold is None
        squared = settings.optimizer == "lbfgs" and plain
        settings = settings.model_copy(update={"distance": "squared" if squared else "cosine"})
    dtype = torch.float64 if settings.optimizer == "lbfgs" else torch.float32
    known = batch_statistics(observation) if settings.batch_norm else {}
    model = private_copy(observation.model, dtype)
    shape = tuple(guess.inputs.shape[1:])
    total = sum(float(each.double().square().sum()) for each in target.gradient)
    pixels = len(guess.inputs) * math.prod(shape)
    likelihood = 2.0 if settings.distance == "squared" else 1.0
    return Problem(
        settings,
        target.to(dtype),
        units.to(dtype),
        ReplicaGradients(model, known),
        guess.labels,
        len(guess.inputs),
        shape,
        settings.optimizer == "lbfgs" and units.bounded and settings.value_range == "hard",
        likelihood * target.deviation**2 * pixels / NATURAL_STEP / total,
    )


def _optimizer(settings: GradientMatchingAttack, smooth: bool, guess: Guess) -> str:
    if settings.optimizer != "auto":
        return settings.optimizer
    return "lbfgs" if smooth or guess.near else "signed-adam"
