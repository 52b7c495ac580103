# SPDX-License-Identifier: Apache-2.0
"""A model of K replicas, made from the user's model of one.

The model is copied once, and every layer with weights is replaced by its replica version; its own `forward` runs
unchanged. Whether that is right for a model is not assumed but tried out, on a few examples: see `trial.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from fedsim.training.convolution import ReplicaConv
from fedsim.training.layers import Batch, ReplicaEmbedding, ReplicaLayer, Slot
from fedsim.training.layout import Layout
from fedsim.training.linear import ReplicaLinear
from fedsim.training.norms import ReplicaBatchNorm, ReplicaNorm

_KINDS: dict[type[nn.Module], Any] = {
    nn.Linear: ReplicaLinear,
    nn.Conv1d: ReplicaConv,
    nn.Conv2d: ReplicaConv,
    nn.Embedding: ReplicaEmbedding,
    nn.LayerNorm: ReplicaNorm,
    nn.GroupNorm: ReplicaNorm,
    nn.InstanceNorm1d: ReplicaNorm,
    nn.InstanceNorm2d: ReplicaNorm,
    nn.BatchNorm1d: ReplicaBatchNorm,
    nn.BatchNorm2d: ReplicaBatchNorm,
}


def expressible(model: nn.Module) -> str | None:
    """Why the replicas of a model cannot be trained at once, or None if (as far as its layers tell) they can."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if len(names) > len(list(model.parameters())):
        return "a parameter is used under two names"
    if any(not parameter.requires_grad for parameter in model.parameters()):
        return "a parameter is frozen"
    for name, module in model.named_modules():
        reason = _why_not(module)
        if reason:
            return f"{type(module).__name__} '{name}' {reason}"
    return None


def _why_not(module: nn.Module) -> str | None:
    """Why one module cannot be replaced or kept as it is."""
    if isinstance(module, _DropoutNd) and module.p > 0:
        return "draws random numbers"
    if not (_owns_parameters(module) or isinstance(module, _NormBase)):
        return None
    if type(module) not in _KINDS:
        return "is of another kind than the layers that the kernel knows"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "has hooks"
    if isinstance(module, nn.Conv1d | nn.Conv2d) and (module.groups > 1 or module.padding_mode != "zeros"):
        return "has groups or pads with something else than zeros"
    if isinstance(module, nn.Conv1d | nn.Conv2d) and not _pads_evenly(module):
        return "pads its two sides differently"
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
        return "changes its own weights or gradients"
    if isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d) and module.track_running_stats:
        return "keeps running statistics"
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.momentum is None:
        return "averages over all batches since it was made"
    return None


def _pads_evenly(module: nn.Conv1d | nn.Conv2d) -> bool:
    sides = module._reversed_padding_repeated_twice
    return sides[::2] == sides[1::2]


def packable(model: nn.Module) -> bool:
    """Whether every layer with weights can do with batches that are packed without padding."""
    return all(_KINDS[type(m)].packs for m in model.modules() if _owns_parameters(m) or isinstance(m, _NormBase))


def _owns_parameters(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


class ReplicaModel:
    """A model whose layers hold the weights of K replicas, and that sees a batch of K·B examples."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.layout = layout
        self.batch = Batch()
        self.layers: list[ReplicaLayer] = []
        self._module = self._replica_of(copy.deepcopy(model).train(), "")
        left = dict(self._module.named_buffers())
        self._constants = {name: left[name] for name in layout.names if name in left}

    def _replica_of(self, module: nn.Module, prefix: str) -> nn.Module:
        """A module with every layer below it replaced, in place, or the replacement of the module itself."""
        if _owns_parameters(module) or isinstance(module, _BatchNorm):
            self.layers.append(_KINDS[type(module)](module, prefix, self.batch))
            return Slot(self.layers[-1])
        for name, child in module.named_children():
            setattr(module, name, self._replica_of(child, f"{prefix}{name}."))
        return module

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs of K·B examples (and guard rows)."""
        output: Tensor = self._module(x)
        return output

    def load_constants(self, start: Tensor) -> None:
        """Take the buffers that no replica changes (a table of positions) from the flat vector."""
        views = self.layout.unflatten(start)
        for name, buffer in self._constants.items():
            buffer.copy_(views[name])

    def bind(self, weights: Tensor, targets: Tensor) -> None:
        """Use the rows of (K, P) as the weights of K replicas, and add their gradients to the rows of `targets`."""
        views, target_views = self.layout.unflatten(weights), self.layout.unflatten(targets)
        for layer in self.layers:
            layer.bind(views, target_views)

    def forget(self) -> None:
        """Let go of the inputs and gradients of the last step."""
        for layer in self.layers:
            for name in [name for name, kept in vars(layer).items() if isinstance(kept, Tensor)]:
                setattr(layer, name, torch.empty(0))
            layer.examples = {}
