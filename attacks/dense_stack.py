# SPDX-License-Identifier: Apache-2.0
"""A fully connected network in closed form: features, their slopes, and the gradient of every example, in float64.

With h_0 = x, z_l = W_l h_(l-1) + b_l and h_l = s(z_l), the gradient of a batch with cross-entropy is

    dL/dW_l = D_l' H_(l-1),  D_L = weight * (softmax(z_L) - y),  D_(l-1) = (D_l W_l) * s'(z_(l-1)),

one term d_i h_i' for each example: all that the exact attacks on tables use. The bias is one more column, of ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.attacks.network import Layer, leaf_layers
from fedsim.models import evaluating

_POINTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus)
_SHAPING = (nn.Flatten, nn.Identity, nn.Dropout)


@dataclass(frozen=True, eq=False)
class DenseStack:
    """Linear layers with a pointwise function after each but the last."""

    layers: tuple[Layer, ...]
    weights: tuple[Tensor, ...]
    """(m_l, m_(l-1)) of each layer, float64."""
    biases: tuple[Tensor, ...]
    """(m_l,), zero where the layer has none."""
    functions: tuple[nn.Module, ...]

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Features h_0 .. h_(L-1) (n, m_l), slopes s'(z_1) .. s'(z_(L-1)), and logits z_L."""
        features, slopes, h = [x], [], x
        for weight, bias, function in zip(self.weights[:-1], self.biases[:-1], self.functions, strict=True):
            h, slope = value_and_slope(function, torch.addmm(bias, h, weight.T))
            features.append(h)
            slopes.append(slope)
        return features, slopes, torch.addmm(self.biases[-1], h, self.weights[-1].T)

    def deltas(self, slopes: list[Tensor], logits: Tensor, labels: Tensor) -> list[Tensor]:
        """D_1 .. D_L (n, m_l): the gradient of each example's own loss with respect to each layer's output."""
        delta = torch.softmax(logits, 1)
        delta[torch.arange(len(labels)), labels] -= 1.0
        deltas = [delta]
        for weight, slope in zip(self.weights[:0:-1], slopes[::-1], strict=True):
            deltas.append(deltas[-1] @ weight * slope)
        return deltas[::-1]

    def gradient(self, x: Tensor, labels: Tensor, weight: Tensor) -> list[Tensor]:
        """sum_i weight_i dL_i/d[W_l, b_l] of each layer, (m_l, m_(l-1) + 1)."""
        features, slopes, logits = self.forward(x)
        deltas = self.deltas(slopes, logits, labels)
        return [(d * weight[:, None]).T @ with_one(h) for d, h in zip(deltas, features, strict=True)]

    def joined(self, gradient: Mapping[str, Tensor]) -> list[Tensor]:
        """The observed gradient of each layer as (m_l, m_(l-1) + 1), weight and bias side by side."""
        parts = []
        for layer in self.layers:
            weight = gradient[layer.weight].to(torch.float64)
            bias = torch.zeros(len(weight)) if layer.bias is None else gradient[layer.bias]
            parts.append(torch.cat([weight, bias.to(weight)[:, None]], 1))
        return parts

    def split(self, joined: list[Tensor]) -> dict[str, Tensor]:
        """The inverse of `joined`, float32."""
        parts: dict[str, Tensor] = {}
        for layer, matrix in zip(self.layers, joined, strict=True):
            parts[layer.weight] = matrix[:, :-1].float()
            if layer.bias is not None:
                parts[layer.bias] = matrix[:, -1].float()
        return parts


def dense_stack(model: nn.Module, input_shape: tuple[int, ...]) -> DenseStack | None:
    """The network as a `DenseStack`, or None if it is not one."""
    called = [layer for layer in leaf_layers(model, input_shape) if not isinstance(layer.module, _SHAPING)]
    linear, functions = called[::2], called[1::2]
    if not all(isinstance(each.module, nn.Linear) for each in linear) or len(linear) != len(functions) + 1:
        return None
    if not all(isinstance(each.module, _POINTWISE) for each in functions):
        return None
    weights = [each.module.get_parameter("weight").detach().double() for each in linear]
    biases = [
        torch.zeros(len(w), dtype=w.dtype) if each.bias is None else each.module.get_parameter("bias").detach().double()
        for each, w in zip(linear, weights, strict=True)
    ]
    stack = DenseStack(tuple(linear), tuple(weights), tuple(biases), tuple(each.module for each in functions))
    return stack if _same_function(stack, model, input_shape) else None


def with_one(h: Tensor) -> Tensor:
    """[h, 1]: the input of a layer as its bias sees it."""
    return torch.cat([h, h.new_ones(*h.shape[:-1], 1)], -1)


def value_and_slope(function: nn.Module, z: Tensor) -> tuple[Tensor, Tensor]:
    """s(z) and s'(z) of a pointwise function."""
    if isinstance(function, nn.ReLU):
        slope = (z > 0).to(z.dtype)
        return z * slope, slope
    with torch.enable_grad():
        free = z.detach().requires_grad_()
        value = function(free)
        (slope,) = torch.autograd.grad(value.sum(), free)
    return value.detach(), slope


def _same_function(stack: DenseStack, model: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether the layers really are applied one after another: a module may do more than call them."""
    probe = torch.linspace(-1, 1, 3 * input_shape[0]).reshape(3, -1)
    with evaluating(model):
        expected = model(probe)
    found = stack.forward(probe.double())[2]
    return found.shape == expected.shape and torch.allclose(found.float(), expected, rtol=1e-3, atol=1e-4)
