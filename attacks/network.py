# SPDX-License-Identifier: Apache-2.0
"""The structure of a network as an attack needs it: which layer comes when, and what follows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.models import evaluating

_SHAPING = (nn.Flatten, nn.Identity, nn.Dropout, nn.Unflatten)


@dataclass(frozen=True, eq=False)
class Layer:
    """A leaf module with its name, in the order of execution."""

    name: str
    module: nn.Module

    @property
    def weight(self) -> str:
        """The name of its weight among the model's parameters."""
        return f"{self.name}.weight" if self.name else "weight"

    @property
    def bias(self) -> str | None:
        """The name of its bias, if it has one."""
        if getattr(self.module, "bias", None) is None:
            return None
        return f"{self.name}.bias" if self.name else "bias"


def leaf_layers(model: nn.Module, input_shape: tuple[int, ...], *, tokens: bool = False) -> tuple[Layer, ...]:
    """The leaf modules in the order in which a forward pass of one example calls them."""
    called: list[Layer] = []
    handles = [
        module.register_forward_hook(lambda module, _in, _out, name=name: called.append(Layer(name, module)))
        for name, module in model.named_modules()
        if not any(module.children())
    ]
    try:
        with evaluating(model):
            model(torch.zeros(1, *input_shape, dtype=torch.int64 if tokens else torch.float32))
    finally:
        for handle in handles:
            handle.remove()
    return tuple(called)


def layer_inputs(
    model: nn.Module, layer: nn.Module, inputs: Tensor, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """What enters a layer of the model for these inputs; with other weights than its own, where they are given."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    try:
        with evaluating(model):
            functional_call(model, dict(weights or {}), (inputs,))
    finally:
        handle.remove()
    return seen[0]


def head(layers: tuple[Layer, ...]) -> Layer | None:
    """The last layer, if it is linear: its output are the logits."""
    last = [layer for layer in layers if not isinstance(layer.module, _SHAPING)][-1:]
    return last[0] if last and isinstance(last[0].module, nn.Linear) else None


def dense_front(layers: tuple[Layer, ...]) -> Layer | None:
    """The first layer, if it is linear and sees the raw input."""
    for layer in layers:
        if isinstance(layer.module, nn.Linear):
            return layer
        if not isinstance(layer.module, _SHAPING):
            return None
    return None


def layer_after(layers: tuple[Layer, ...], layer: Layer) -> Layer | None:
    """What the output of a layer goes into next."""
    names = [each.name for each in layers]
    rest = [each for each in layers[names.index(layer.name) + 1 :] if not isinstance(each.module, _SHAPING)]
    return rest[0] if rest else None
