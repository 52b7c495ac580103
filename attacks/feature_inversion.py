# SPDX-License-Identifier: Apache-2.0
"""Inputs from inner features: what entered the first linear layer is read from its gradient, then inverted.

The gradient of a linear layer is dW = sum_i d_i h_i', db = sum_i d_i. For one example h = dW' db / ||db||² exactly; for
a batch the sparsity of the d_i behind a ReLU gives every h_i (`fedsim.attacks.exact`). What lies before the layer is
then inverted by min over x of ||features(x) - h||² / ||h||², each example for itself and without second derivatives:
an order of magnitude cheaper than matching gradients, and better posed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.attacks.descent import Budget, Descent, Value, lbfgs
from fedsim.attacks.matching import Target, private_copy
from fedsim.attacks.network import Layer, leaf_layers
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.attacks.priors import NATURAL_STEP, total_variation


@dataclass(frozen=True, eq=False)
class Features:
    """What entered a linear layer: k of the batch's examples."""

    layer: Layer
    values: Tensor
    """(k, d) float64."""
    known: Tensor
    """(k, d) bool: entries that pruning left no evidence of are False."""
    output_gradients: Tensor
    """(k, m) float64: the gradient of the batch's loss by the layer's output."""
    deviation: float
    """Standard deviation of the noise in a value."""

    def first(self, count: int) -> Features:
        """The first few examples."""
        parts = (self.values[:count], self.known[:count], self.output_gradients[:count])
        return Features(self.layer, *parts, self.deviation)


def first_linear(observation: Observation, knowledge: Knowledge) -> Layer | None:
    """The first linear layer with a bias, if it is used once and sees one vector for each example."""
    layers = leaf_layers(observation.model, knowledge.input_shape)
    linear = [layer for layer in layers if isinstance(layer.module, nn.Linear)]
    if not linear or linear[0].bias is None or sum(layer.module is linear[0].module for layer in layers) != 1:
        return None
    seen = layer_input(
        private_copy(observation.model, torch.float32), linear[0].name, torch.zeros(2, *knowledge.input_shape)
    )
    return linear[0] if seen.dim() == 2 and len(seen) == 2 else None


class _ReachedError(Exception):
    """The forward pass has come to the layer: the rest of it is not needed."""


def layer_input(model: nn.Module, layer: str, inputs: Tensor) -> Tensor:
    """What enters the layer of this name for these inputs."""
    seen: list[Tensor] = []

    def stop(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        seen.append(arguments[0])
        raise _ReachedError

    handle = model.get_submodule(layer).register_forward_pre_hook(stop)
    try:
        model(inputs)
    except _ReachedError:
        pass
    finally:
        handle.remove()
    return seen[0]


def gates_like_relu(model: nn.Module, layer: str, inputs: Tensor) -> bool:
    """Whether exactly the negative outputs of the layer have no influence on the logits, as behind a ReLU."""
    output, logits = _output_and_logits(model, layer, inputs)
    (slope,) = torch.autograd.grad(logits.square().sum(), output, allow_unused=True)
    return slope is not None and bool(((slope == 0) == (output <= 0)).all())


def _output_and_logits(model: nn.Module, layer: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    seen: list[Tensor] = []

    def keep(_module: nn.Module, _arguments: object, output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[0]

    handle = model.get_submodule(layer).register_forward_hook(keep)
    try:
        logits: Tensor = model(inputs)
    finally:
        handle.remove()
    return seen[0], logits


# --- reading the features -------------------------------------------------------------------------------------------


def single_features(layer: Layer, target: Target, weight: Tensor, bias: Tensor) -> Features | None:
    """One example: least squares for h in dW = db h', entry by entry over the rows that were sent.

    Scale-free, and so it does not mind clipping. The values err by noise / ||db||.
    """
    weight, bias = weight.double(), bias.double()
    sent = (weight != 0).double() if target.threshold is not None else torch.ones_like(weight)
    evidence = bias.square() @ sent
    known = evidence > 0
    if target.magnitude is not None or not known.any():
        return None
    values = torch.where(known, (bias @ weight) / evidence.clamp_min(1e-300), 0.0)
    noise = (target.deviation**2 + target.half_step**2 / 3) ** 0.5
    deviation = noise / float(evidence[known].mean().sqrt())
    return Features(layer, values[None], known[None], bias[None], deviation)


def batch_features(
    layer: Layer, target: Target, weight: Tensor, bias: Tensor, seed: int, seconds: float | None
) -> Features | None:
    """A batch behind a ReLU: the exact inversion of the layer, or what it finds of it; None where it finds nothing."""
    from fedsim.attacks.exact_layer import invert_layer

    if target.magnitude is not None or target.threshold is not None:
        return None
    module = layer.module
    assert isinstance(module, nn.Linear)
    noise = (target.deviation**2 + target.half_step**2 / 3) ** 0.5
    relative = noise * weight.numel() ** 0.5 / float(weight.norm())
    found = invert_layer(
        module.weight.detach(), module.bias.detach(), weight, bias, seed=seed, seconds=seconds, noise=relative
    )
    if not len(found.inputs):
        return None
    deviation = noise / float(found.output_gradients.square().sum(1).mean().sqrt())
    return Features(
        layer, found.inputs, torch.ones_like(found.inputs, dtype=torch.bool), found.output_gradients, deviation
    )


# --- inverting them -------------------------------------------------------------------------------------------------


def invert(
    model: nn.Module,
    features: Features,
    start: Tensor,
    decode: Callable[[Tensor], Tensor],
    budget: Budget,
    *,
    together: bool,
) -> Descent:
    """Minimise ||features(x) - h||² / ||h||² + what the noise of h justifies of total variation.

    The range of values is not enforced: features are more numerous than inputs where this works well, and clamping the
    result can only bring it nearer.

    Args:
        model: in the precision to compute in.
        features: k of them.
        start: (k, *shape) in units of a range of 1, as everything that is returned.
        decode: from these units to the model's inputs.
        budget: of each example.
        together: the examples influence each other (BatchNorm in training), and so are one problem.
    """
    shape, rows = start.shape[1:], 1 if together else len(start)
    wanted, known = features.values.to(start.dtype), features.known.to(start.dtype)
    scale = (wanted.square() * known).sum(1)
    weight = 2 * features.deviation**2 * shape.numel() / NATURAL_STEP / float(scale.mean())

    def objective(points: Tensor, which: Tensor, _progress: float) -> Value:
        free = points.detach().requires_grad_()
        units = free.view(-1, *shape)
        items = torch.arange(len(wanted)) if together else which
        seen = layer_input(model, features.layer.name, decode(units))
        apart = ((seen - wanted[items]).square() * known[items]).sum(1) / scale[items]
        score = apart.view(len(points), -1).mean(1)
        if weight:
            score = score + weight * total_variation(units.view(len(points), -1, *shape))
        (slope,) = torch.autograd.grad(score.sum(), free)
        return Value(score.detach(), slope)

    return lbfgs(objective, start.reshape(rows, -1), budget, memory=20)


def item_labels(model: nn.Module, features: Features, inputs: Tensor, classes: int, batch: int) -> Tensor:
    """(k, classes): how badly each class explains the gradient by the layer's output of each item, relative to it."""
    output, logits = _output_and_logits(model, features.layer.name, inputs)
    wanted = features.output_gradients.to(output.dtype) * batch
    costs = []
    for label in range(classes):
        loss = nn.functional.cross_entropy(logits, torch.full((len(logits),), label), reduction="sum")
        (slope,) = torch.autograd.grad(loss, output, retain_graph=True)
        costs.append(1 - nn.functional.cosine_similarity(slope, wanted))
    return torch.stack(costs, 1).detach()
