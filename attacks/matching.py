# SPDX-License-Identifier: Apache-2.0
"""How far the gradient of a guess is from the gradient that was observed.

Gradients of R restarts are lists of (R, *shape) tensors, one for each parameter; the observed one has no R.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.attacks.observation import Knowledge, Observation
from fedsim.scenario import Prune, Quantise, Sign

Distance = Literal["squared", "cosine", "l1", "angular"]

_TINY = 1e-30


def client_gradient(observation: Observation) -> dict[str, Tensor] | None:
    """The gradient of the client's mean loss at the weights that were sent; None where the update is not one gradient.

    A FedAvg update is one gradient if there was one local step of SGD: g = (w0 - w1) / lr - weight decay · w0.
    """
    work = observation.work
    if observation.kind == "gradient":
        return observation.gradient
    if work.optimizer != "sgd" or observation.examples is None or work.local_steps(observation.examples) != 1:
        return None
    decay, weights = work.weight_decay, observation.weights
    return {name: gradient - decay * weights[name] for name, gradient in observation.gradient.items()}


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the batch (of sequences: over all tokens) for classes (n,), (n, T), or probabilities (n, classes)."""
    if labels.is_floating_point():
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def loss_gradient(model: nn.Module, inputs: Tensor, labels: Tensor, *, differentiable: bool = False) -> list[Tensor]:
    """dL/dw for the parameters of a model, in order; zero for a parameter that the loss does not depend on."""
    parameters = list(model.parameters())
    loss = mean_cross_entropy(model(inputs), labels)
    found = torch.autograd.grad(loss, parameters, create_graph=differentiable, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def private_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose parameters all want gradients, and in which dropout, a matter of chance, is off."""
    twin = copy.deepcopy(model).to(dtype)
    for module in twin.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    return twin.requires_grad_(True)


def matching_loss(observation: Observation, inputs: Tensor, labels: Tensor, *, share: float = 1.0) -> float:
    """||share · gradient at (inputs, labels) - observed gradient||² / ||observed gradient||², in float64.

    `share` is below 1 for inputs that are only a part of the batch, whose mean the client has sent.
    The model is used in the mode that it is in. NaN for an update of several local steps, and for no items.
    """
    observed = client_gradient(observation)
    if observed is None or not len(inputs):
        return math.nan
    model = private_copy(observation.model, torch.float64)
    wide = inputs.double() if inputs.is_floating_point() else inputs
    found = dict(zip(observed, loss_gradient(model, wide, labels), strict=True))
    total = sum(float(gradient.double().square().sum()) for gradient in observed.values())
    apart = sum(float((share * found[name] - gradient.double()).square().sum()) for name, gradient in observed.items())
    return apart / max(total, _TINY)


# --- what the defence did -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Target:
    """The observed gradient, with what the defence is known to have done to it."""

    gradient: list[Tensor]
    scaled: bool = False
    """It may have been clipped: multiplied by an unknown factor of at most 1."""
    deviation: float = 0.0
    """Standard deviation of the noise in each entry."""
    threshold: float | None = None
    """Pruned: entries that are zero here were smaller than this."""
    half_step: float = 0.0
    """Quantised: an entry was within this distance of what was sent."""
    magnitude: float | None = None
    """Signs only: the mean magnitude that all entries were given."""

    def to(self, dtype: torch.dtype) -> Target:
        """The same in another precision."""
        return Target(
            [each.to(dtype) for each in self.gradient],
            self.scaled,
            self.deviation,
            self.threshold,
            self.half_step,
            self.magnitude,
        )

    @property
    def noise_share(self) -> float:
        """The share of ||observed||² that is noise, in expectation."""
        entries = sum(each.numel() for each in self.gradient)
        total = sum(float(each.double().square().sum()) for each in self.gradient)
        return min(1.0, entries * self.deviation**2 / max(total, _TINY))

    def as_sent(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients (R, *shape) of a guess as far as they contradict what was sent, entry by entry.

        Pruned entries may be anything below the threshold, quantised ones anything within half a step: there the guess
        is replaced by the observed value. In place of the sign, tanh(10 g / magnitude) has a slope for the optimiser.
        """
        return [self._one_as_sent(mine, sent) for mine, sent in zip(gradients, self.gradient, strict=True)]

    def _one_as_sent(self, mine: Tensor, sent: Tensor) -> Tensor:
        if self.magnitude is not None:
            return self.magnitude * torch.tanh(10 * mine / self.magnitude)
        if self.half_step:
            return sent + F.softshrink(mine - sent, self.half_step)
        if self.threshold is not None:
            return torch.where(sent != 0, mine, F.softshrink(mine, self.threshold))
        return mine


def target_of(observation: Observation, knowledge: Knowledge, gradient: dict[str, Tensor]) -> Target:
    """What `knowledge.defence` and the observation itself say about a gradient."""
    defence, work = knowledge.defence, observation.work
    scale = 1.0 if observation.kind == "gradient" else 1.0 / work.learning_rate
    scaled, variance = False, 0.0
    if defence.client_dp is not None:
        scaled = True
        spread = math.sqrt(2) if defence.client_dp.noise == "laplace" else 1.0
        variance += (scale * spread * knowledge.client_noise * defence.client_dp.clipping_norm) ** 2
    if work.example_dp is not None:
        scaled = True
        size = work.batch(observation.examples or 1)
        variance += (knowledge.example_noise * work.example_dp.clipping_norm / size) ** 2
    entries = torch.cat([scale * each.flatten() for each in observation.update.values()]).double()
    threshold = half_step = magnitude = None
    match defence.compression:
        case Quantise(bits=bits):
            half_step = float(entries.max() - entries.min()) / (2**bits - 1) / 2
        case Prune():
            threshold = float(entries[entries != 0].abs().min())
        case Sign():
            magnitude = float(entries.abs().mean())
    return Target(list(gradient.values()), scaled, math.sqrt(variance), threshold, half_step or 0.0, magnitude)


# --- distances ------------------------------------------------------------------------------------------------------


def _dots(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """<first, second> over all parameters, for each restart."""
    return torch.stack([(a * b).flatten(1).sum(1) for a, b in zip(first, second, strict=True)]).sum(0)


def _squares(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.flatten(1).square().sum(1) for each in gradients]).sum(0)


def squared(mine: Sequence[Tensor], target: Target) -> Tensor:
    """||g - g_obs||² / ||g_obs||² (Zhu et al. 2019, eq. 4); after clipping the least over c of ||c g - g_obs||²."""
    observed = [each.unsqueeze(0) for each in target.gradient]
    total = _squares(observed).clamp_min(_TINY)
    if target.scaled:
        return 1 - _dots(mine, observed).relu().square() / (_squares(mine).clamp_min(_TINY) * total)
    return _squares([a - b for a, b in zip(mine, observed, strict=True)]) / total


def cosine(mine: Sequence[Tensor], target: Target) -> Tensor:
    """1 - <g, g_obs> / (||g|| ||g_obs||) over all parameters together (Geiping et al. 2020, equation 4)."""
    observed = [each.unsqueeze(0) for each in target.gradient]
    lengths = (_squares(mine).clamp_min(_TINY) * _squares(observed).clamp_min(_TINY)).sqrt()
    return 1 - _dots(mine, observed) / lengths


def absolute(mine: Sequence[Tensor], target: Target) -> Tensor:
    """||g - g_obs||_1 / ||g_obs||_1 (Deng et al. 2021 use it for text)."""
    total = torch.stack([each.abs().sum() for each in target.gradient]).sum().clamp_min(_TINY)
    pairs = zip(mine, target.gradient, strict=True)
    return torch.stack([(a - b).abs().flatten(1).sum(1) for a, b in pairs]).sum(0) / total


def angular(mine: Sequence[Tensor], target: Target) -> Tensor:
    """The angle between g and g_obs in each parameter, divided by π, mean over the parameters that moved."""
    angles = []
    for a, b in zip(mine, target.gradient, strict=True):
        if not b.any():
            continue
        first = F.normalize(a.flatten(1), dim=1, eps=_TINY)
        second = F.normalize(b.flatten(), dim=0, eps=_TINY)
        apart, together = (first - second).square().sum(1), (first + second).square().sum(1)
        # atan2 keeps small angles exact; the square root needs a slope at 0
        angles.append(2 * torch.atan2((apart + 1e-14).sqrt(), (together + 1e-14).sqrt()) / math.pi)
    return torch.stack(angles).mean(0)


def distance_left(model: nn.Module, target: Target, inputs: Tensor, labels: Tensor) -> float:
    """The squared distance of a guess as far as the defence leaves it visible: `matching_loss` where there is none."""
    twin = private_copy(model, torch.float64)
    wide = target.to(torch.float64)
    found = [each.unsqueeze(0) for each in loss_gradient(twin, inputs.double(), labels)]
    return float(squared(wide.as_sent(found), wide))


DISTANCES: dict[Distance, Callable[[Sequence[Tensor], Target], Tensor]] = {
    "squared": squared,
    "cosine": cosine,
    "l1": absolute,
    "angular": angular,
}
