# SPDX-License-Identifier: Apache-2.0
"""The structure of a network as an attack needs it: which layer comes when, and what follows it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

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
    training = model.training
    try:
        model.eval()  # running statistics stay as they are
        with torch.no_grad():
            model(torch.zeros(1, *input_shape, dtype=torch.int64 if tokens else torch.float32))
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return tuple(called)


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
