# SPDX-License-Identifier: Apache-2.0
"""Where each tensor of a model lies in one flat vector, and K such vectors as the rows of one buffer.

The state of a replica is one row of P numbers. Every parameter of K replicas is a strided view `(K, *shape)` on the
buffer, so that the update of a whole cohort is one subtraction and nothing is ever packed or unpacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.errors import ModelError

_LINE = 16  # float32 in one cache line


@dataclass(frozen=True)
class Layout:
    """The order of a model's tensors in one flat vector: trainable parameters first, then whatever else has a value."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    parameters: int
    """The first `parameters` entries are trainable; the rest are frozen parameters and floating-point buffers."""
    size: int
    """P, the length of the flat vector."""

    def flatten(self, state: Mapping[str, Tensor]) -> Tensor:
        """The flat vector (P,) of a state dictionary; names that the layout does not know are left out."""
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name not in state:
                raise ModelError(
                    f"the state has no tensor '{name}': give the state of a model of the same architecture"
                )
            if state[name].shape != shape:
                raise ModelError(
                    f"tensor '{name}' has shape {tuple(state[name].shape)} where the model has {tuple(shape)}: "
                    "give the state of a model of the same architecture"
                )
        parts = [state[name].detach().to(torch.float32).reshape(-1) for name in self.names]
        return torch.cat(parts) if parts else torch.empty(0)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors of a model as views on its flat vector (P,), or of K models on the rows of (K, P)."""
        if flat.shape[-1] != self.size:
            raise ModelError(
                f"a flat vector of {flat.shape[-1]} numbers does not fit a model of {self.size}: "
                "give the vector of a model of the same architecture"
            )
        views, offset, leading = {}, 0, flat.shape[:-1]
        for name, shape in zip(self.names, self.shapes, strict=True):
            length = shape.numel()
            views[name] = flat.narrow(-1, offset, length).view(leading + shape)
            offset += length
        return views


def layout_of(model: nn.Module) -> Layout:
    """The layout of a model: its parameters in the order of `named_parameters()`, then its floating-point buffers.

    Integer buffers (BatchNorm's count of batches) and buffers that are not part of the state are left out.
    """
    parameters = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True)
    trainable: dict[str, Tensor] = {name: p for name, p in parameters.items() if p.requires_grad}
    rest: dict[str, Tensor] = {name: p for name, p in parameters.items() if not p.requires_grad}
    rest |= {name: b for name, b in model.named_buffers() if name in persistent and b.is_floating_point()}
    for name, tensor in (trainable | rest).items():
        if tensor.dtype != torch.float32:
            raise ModelError(f"tensor '{name}' of the model is {tensor.dtype}: convert the model with .float()")
    if not trainable:
        raise ModelError("the model has no trainable parameters: give a model with at least one layer to train")
    shapes = tuple(t.shape for t in (trainable | rest).values())
    return Layout(
        names=tuple(trainable | rest),
        shapes=shapes,
        parameters=sum(p.numel() for p in trainable.values()),
        size=sum(shape.numel() for shape in shapes),
    )


def replica_rows(count: int, length: int) -> Tensor:
    """An uninitialised buffer (count, length) whose rows begin on a cache line and never touch each other.

    Because the rows do not touch, PyTorch runs an element-wise operation row by row: which elements it computes with
    vector instructions and which, at the end, without (their last bit may differ) depends on the row alone.
    """
    stride = (length // _LINE + 1) * _LINE
    return torch.empty(count, stride)[:, :length]
