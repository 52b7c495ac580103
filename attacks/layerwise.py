# SPDX-License-Identifier: Apache-2.0
"""The input of a convolutional network from the gradient of one example, layer by layer from the end.

R-GAP (Zhu and Blaschko 2021, sections 3.2 and 3.3). Behind the last layer everything is known: its input h is
dL/dW / dL/db, and dL/dz = dL/db. Given a layer's output z and dL/dz, its input x solves linear equations: the layer
itself, W * x + b = z, and its gradient, dL/dW = x correlated with dL/dz. Then dL/dx = W' dL/dz, the activation before
is inverted, and so on to the input. It works as far as the equations have full rank and the activations an inverse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap

from fedsim.attacks.last_layer import last_layer, step_gradient
from fedsim.attacks.matching import private_copy
from fedsim.attacks.network import Layer
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.errors import AttackError
from fedsim.models import evaluating

_RANK = 1e-7  # of a Cholesky factor: the smallest entry of the diagonal over the largest, below which it is singular
_REFINEMENTS = 8
_ENTRIES = 3 * 10**7  # of a matrix of derivatives
_MOST = 4096  # unknowns of a layer


@dataclass(frozen=True, eq=False)
class _State:
    """A layer's output and dL/d(output), both without the batch dimension, float64."""

    values: Tensor
    slopes: Tensor


def invert_layers(observation: Observation, knowledge: Knowledge, layers: tuple[Layer, ...]) -> Tensor:
    """The flat input (d,) float64 of the one example of a gradient; AttackError where a layer has no inverse."""
    last = last_layer(observation, knowledge)
    if last.bias is None or not step_gradient(observation, last.bias).any():
        raise AttackError(f"the last layer {last.name!r} has no bias gradient to divide by; use gradient-matching")
    weight, bias = step_gradient(observation, last.weight), step_gradient(observation, last.bias)
    state = _State(bias @ weight / bias.square().sum(), observation.weights[last.weight].double().T @ bias)
    shapes = _shapes(observation.model, knowledge, layers)
    for layer, (before, after) in reversed(list(zip(layers, shapes, strict=True))[:-1]):
        given_out = _State(state.values.reshape(after), state.slopes.reshape(after))
        state = _before(observation, layer, given_out, before)
    return state.values.flatten()


def _shapes(model: nn.Module, knowledge: Knowledge, layers: tuple[Layer, ...]) -> list[tuple[torch.Size, torch.Size]]:
    """The shapes of what goes into each layer and comes out, after a check that the layers are a plain chain."""
    shapes: list[tuple[torch.Size, torch.Size]] = []
    values = torch.linspace(0, 1, math.prod(knowledge.input_shape)).reshape(1, *knowledge.input_shape)
    try:
        with evaluating(model):
            expected = model(values)
            for layer in layers:
                inputs = values.flatten(1) if isinstance(layer.module, nn.Linear) else values
                values = layer.module(inputs)
                shapes.append((inputs.shape[1:], values.shape[1:]))
    except (RuntimeError, ValueError, TypeError, AttributeError):  # a layer that wants, or gives, other than one tensor
        values = torch.empty(0)
    if values.shape != expected.shape or not torch.allclose(values, expected, atol=1e-5):
        raise AttackError(
            "the layers of this model are not a plain chain, so they cannot be inverted one by one; use"
            " gradient-matching"
        )
    return shapes


def _before(observation: Observation, layer: Layer, after: _State, shape: torch.Size) -> _State:
    """The state before a layer, from the state after it."""
    module = layer.module
    match module:
        case nn.Flatten() | nn.Unflatten():
            return _State(after.values.reshape(shape), after.slopes.reshape(shape))
        case nn.Identity() | nn.Dropout():
            return after
        case nn.Sigmoid():
            inner = after.values.clamp(1e-12, 1 - 1e-12)
            return _State(inner.logit(), after.slopes * inner * (1 - inner))
        case nn.Tanh():
            inner = after.values.clamp(-1 + 1e-12, 1 - 1e-12)
            return _State(inner.atanh(), after.slopes * (1 - inner**2))
        case nn.LeakyReLU(negative_slope=slope) if slope > 0:
            factor = torch.where(after.values > 0, 1.0, 1 / slope)
            return _State(after.values * factor, after.slopes / factor)
        case nn.Conv2d(padding=tuple() as padding) if module.groups == 1 and module.padding_mode == "zeros":
            return _before_convolution(observation, layer, module, padding, after, shape)
        case _:
            raise AttackError(
                f"layer {layer.name!r} ({type(module).__name__}) has no inverse that closed-form knows; use"
                " gradient-matching"
            )


def _before_convolution(
    observation: Observation,
    layer: Layer,
    module: nn.Conv2d,
    padding: tuple[int, ...],
    after: _State,
    shape: torch.Size,
) -> _State:
    """Solve W * x + b = z together with dL/dW = sum over places of dL/dz x (their own x each), for x."""
    if shape.numel() > _MOST:
        raise AttackError(
            f"layer {layer.name!r} has {shape.numel()} inputs, more than the {_MOST} that closed-form solves for; use"
            " gradient-matching"
        )
    weight = observation.weights[layer.weight].double()
    bias = observation.weights[layer.bias].double() if layer.bias is not None else None
    unit = torch.eye(shape.numel(), dtype=torch.float64).reshape(-1, *shape)
    forward = F.conv2d(unit, weight, None, module.stride, padding, module.dilation).flatten(1).T
    wanted = after.values if bias is None else after.values - bias[:, None, None]
    place = torch.eye(shape[1:].numel(), dtype=torch.float64).reshape(-1, 1, *shape[1:])
    patches = F.unfold(place, module.kernel_size, module.dilation, padding, module.stride)  # (pixels, k, places)
    single = torch.einsum("pkl,ol->okp", patches, after.slopes.flatten(1)).flatten(0, 1)  # for one input channel
    size = after.slopes.norm().clamp_min(1e-300) / weight.norm()
    backward = torch.block_diag(*[single / size] * shape[0])
    observed = step_gradient(observation, layer.weight).transpose(0, 1).flatten() / size
    equations, right = torch.cat([forward, backward]), torch.cat([wanted.flatten(), observed])
    values = _solve(equations, right, layer)
    slopes = (forward.T @ after.slopes.flatten()).reshape(shape)
    return _State(values.reshape(shape), slopes)


def _solve(equations: Tensor, right: Tensor, layer: Layer | None = None) -> Tensor:
    """Least squares by the normal equations (they have structure zeros to spare), corrected by their own residuals."""
    normal = equations.T @ equations
    normal.diagonal().mul_(1 + 1e-15)
    factor, failed = torch.linalg.cholesky_ex(normal)
    diagonal = factor.diagonal()
    if failed or diagonal.min() < _RANK * diagonal.max():
        where = "of the whole gradient" if layer is None else f"for the input of layer {layer.name!r}"
        raise AttackError(
            f"the linear equations {where} do not determine all {equations.shape[1]} unknowns; use gradient-matching"
        )
    answer = torch.zeros(equations.shape[1], dtype=torch.float64)
    for _ in range(4):
        left = right - equations @ answer
        answer = answer + torch.cholesky_solve((equations.T @ left)[:, None], factor)[:, 0]
    return answer


def refine(observation: Observation, flat: Tensor, labels: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Gauss-Newton on the whole gradient, each parameter's part scaled to length one: x - (J'J)^-1 J' (g(x) - g).

    The layers' solutions inherit each other's rounding errors; from them a few steps end at the precision of float32.
    """
    model = private_copy(observation.model, torch.float64)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    observed = {name: step_gradient(observation, name) for name in _smallest(weights, len(flat))}
    unit = torch.eye(len(flat), dtype=torch.float64)

    def difference(point: Tensor) -> Tensor:
        def loss(at: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(functional_call(model, weights | at, (point.reshape(1, *shape),)), labels)

        found = grad(loss)({name: weights[name] for name in observed})
        return torch.cat([((found[name] - each) / each.norm()).flatten() for name, each in observed.items()])

    def derivative(point: Tensor) -> Tensor:
        pull = vjp(difference, point)[1]  # J'u, which is linear in u: its derivative along v is J v
        push = vjp(lambda along: pull(along)[0], torch.zeros_like(best))[1]
        columns: Tensor = vmap(lambda along: push(along)[0], chunk_size=64)(unit)
        return columns.T

    best = difference(flat)
    for _ in range(_REFINEMENTS):
        step = _solve(derivative(flat), best)
        trials = [flat - factor * step for factor in (1.0, 0.3, 0.1)]
        trial = min(trials, key=lambda point: float(difference(point).norm()))
        left = difference(trial)
        if not left.norm() < 0.9 * best.norm():
            break
        best, flat = left, trial
    return flat


def _smallest(weights: Mapping[str, Tensor], unknowns: int) -> list[str]:
    """Parameters whose derivatives fit in memory: the small ones, which belong to convolutions, tell the most."""
    chosen, entries = [], 0
    for name in sorted(weights, key=lambda name: weights[name].numel()):
        entries += weights[name].numel() * unknowns
        if entries <= _ENTRIES:
            chosen.append(name)
    return chosen
