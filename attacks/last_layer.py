# SPDX-License-Identifier: Apache-2.0
"""The last layer's gradient as an update holds it, and what the model that was sent says to noise.

An update of local SGD is taken apart into the mean gradient of a step: momentum and weight decay are accounted for.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.attacks.network import Layer, head, leaf_layers
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.errors import AttackError
from fedsim.randomness import stream
from fedsim.scenario import Prune, Quantise, Sign

_GROUP = 64  # noise inputs of one kind
_BRIGHTNESS = (0.1, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, eq=False)
class HeadGradient:
    """The mean gradient of one local step with respect to the last layer, in float64, and its expected noise."""

    layer: Layer
    weight: Tensor
    """(classes, width)"""
    bias: Tensor | None
    """(classes,)"""
    noise: float
    """Standard deviation of the noise in each entry, as far as the defence is known."""


def head_gradient(observation: Observation, knowledge: Knowledge) -> HeadGradient:
    """The gradient of the last layer, and the noise that is in it."""
    last = last_layer(observation, knowledge)
    bias = step_gradient(observation, last.bias) if last.bias is not None else None
    noise = noise_deviation(observation, knowledge) / float(step_weights(observation).sum())
    return HeadGradient(last, step_gradient(observation, last.weight), bias, noise)


def step_gradient(observation: Observation, name: str) -> Tensor:
    """The weighted mean of the local steps' gradients of a parameter, float64.

    Weight decay is taken off at the mean of the weights on the way.
    """
    weights = step_weights(observation)
    gradient = observation.gradient[name].double() / float(weights.sum())
    decay = observation.work.weight_decay if observation.kind == "update" else 0.0
    if not decay:
        return gradient
    between = observation.weights[name].double() + mean_way(weights) * observation.update[name].double()
    return gradient - decay * between


def last_layer(observation: Observation, knowledge: Knowledge) -> Layer:
    """The linear layer whose outputs are the logits; AttackError where there is none."""
    last = head(leaf_layers(observation.model, knowledge.input_shape, tokens=knowledge.kind == "text"))
    if last is None:
        raise AttackError(
            "labels are read from a last layer that is linear, which this model does not have; use gradient-matching"
        )
    outputs = observation.weights[last.weight].shape[0]
    if outputs != knowledge.classes:
        raise AttackError(
            f"the last layer {last.name!r} has {outputs} outputs for {knowledge.classes} classes; labels can only be"
            " read from a layer with one output for each class"
        )
    return last


def step_weights(observation: Observation) -> Tensor:
    """How much the gradient of each of S local steps counts in (w0 - wT) / lr.

    With momentum mu, step k of S counts 1 + mu + ... + mu^(S-k); without, 1.
    """
    work = observation.work
    if observation.kind == "gradient":
        return torch.ones(1, dtype=torch.float64)
    steps = work.local_steps(observation.examples) if observation.examples else max(1, work.steps or work.epochs)
    remaining = torch.arange(steps, 0, -1, dtype=torch.float64)
    return (1 - work.momentum**remaining) / (1 - work.momentum)


def mean_way(weights: Tensor) -> float:
    """Where on the straight way from w0 (0) to wT (1) the gradients were taken, on average."""
    return float((weights * torch.arange(len(weights))).sum() / weights.sum()) / len(weights)


def noise_deviation(observation: Observation, knowledge: Knowledge) -> float:
    """The standard deviation that the defence adds to an entry of `observation.gradient`."""
    defence, work = knowledge.defence, observation.work
    scale = 1.0 if observation.kind == "gradient" else 1.0 / work.learning_rate
    variance = 0.0
    if defence.client_dp is not None:
        spread = math.sqrt(2) if defence.client_dp.noise == "laplace" else 1.0
        variance += (scale * spread * knowledge.client_noise * defence.client_dp.clipping_norm) ** 2
    if work.example_dp is not None and observation.examples:
        each = knowledge.example_noise * work.example_dp.clipping_norm / work.batch(observation.examples)
        variance += float((step_weights(observation) ** 2).sum()) * each**2
    entries = torch.cat([gradient.flatten() for gradient in observation.gradient.values()]).double()
    match defence.compression:
        case Quantise(bits=bits):
            variance += float((entries.max() - entries.min()) / (2**bits - 1)) ** 2 / 12
        case Prune():  # what is missing is smaller than what was sent
            variance += float(entries[entries != 0].abs().min()) ** 2 / 3
        case Sign():
            variance += float(entries.abs().mean()) ** 2
    return math.sqrt(variance)


# --- noise inputs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NoiseOutputs:
    """What the model says to groups of noise inputs, on average over the client's way."""

    softmax: Tensor
    """(groups, classes) the mean softmax."""
    variance: Tensor
    """(classes,) of the softmax of one input, within a group."""
    features: Tensor
    """(groups, n, width) the inputs of the last layer."""


def noise_outputs(observation: Observation, knowledge: Knowledge, last: Layer) -> NoiseOutputs:
    """Pass noise through the model, in training mode as the client does; running statistics are those of a copy.

    For FedAvg on three points of the straight way from w0 to wT (Simpson's rule), as far as the last step's start.
    """
    groups = noise_inputs(knowledge)
    model = copy.deepcopy(observation.model).train()
    seen: list[Tensor] = []
    dict(model.named_modules())[last.name].register_forward_pre_hook(
        lambda _module, inputs: seen.append(inputs[0].detach().flatten(0, -2).double())
    )
    softmax = torch.zeros(len(groups), knowledge.classes, dtype=torch.float64)
    variance = torch.zeros_like(softmax)
    ways = way_points(observation)
    for way, weight in ways:
        weights = weights_on_way(observation, way)
        for number, inputs in enumerate(groups):
            with torch.no_grad():
                each = functional_call(model, weights, (inputs,)).flatten(0, -2).double().softmax(-1)
            softmax[number] += weight * each.mean(0)
            variance[number] += weight * each.var(0)
    features = torch.stack(seen).unflatten(0, (len(ways), -1))
    shares = features.new_tensor([weight for _, weight in ways])
    return NoiseOutputs(softmax, variance.mean(0), torch.tensordot(shares, features, dims=1))


def way_points(observation: Observation) -> tuple[tuple[float, float], ...]:
    """(place, weight) on the way from w0 to wT at which to average what the model says."""
    middle = mean_way(step_weights(observation))
    return ((0.0, 1 / 6), (middle, 4 / 6), (2 * middle, 1 / 6)) if middle else ((0.0, 1.0),)


def weights_on_way(observation: Observation, way: float) -> dict[str, Tensor]:
    """w0 + way (wT - w0)."""
    if way == 0:
        return dict(observation.weights)
    return {name: weight + way * observation.update[name] for name, weight in observation.weights.items()}


def noise_inputs(knowledge: Knowledge) -> list[Tensor]:
    """Groups of noise inputs.

    Random tokens; or normal, with the granted statistics; or within the value range of images, at several levels of
    brightness, white and smooth; or standard normal, at several scales.
    """
    rng = stream(0, "attack", 0)
    shape = knowledge.input_shape
    if knowledge.kind == "text":
        return [torch.from_numpy(rng.integers(knowledge.classes, size=(_GROUP, *shape)))]
    normal = torch.from_numpy(rng.standard_normal((_GROUP, *shape))).float()
    if knowledge.mean is not None and knowledge.std is not None:
        return [_within(knowledge, knowledge.mean + scale * knowledge.std * normal) for scale in (0.5, 1.0)]
    if knowledge.value_range is None or len(shape) != 3:
        return [_within(knowledge, scale * normal) for scale in (0.5, 1.0, 1.5)]
    low, high = knowledge.value_range
    white = torch.from_numpy(rng.random((_GROUP, *shape))).float()
    coarse = torch.from_numpy(rng.random((_GROUP, shape[0], 4, 4))).float()
    smooth = nn.functional.interpolate(coarse, shape[1:], mode="bilinear")
    return [low + (high - low) * (level * kind) for kind in (white, smooth) for level in _BRIGHTNESS]


def _within(knowledge: Knowledge, inputs: Tensor) -> Tensor:
    if knowledge.value_range is None:
        return inputs.float()
    low, high = knowledge.value_range
    return torch.minimum(torch.maximum(inputs, low), high).float()
