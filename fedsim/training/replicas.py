# SPDX-License-Identifier: Apache-2.0
"""A model of K replicas, made from the user's model of one.

The model is copied once, and every layer with weights is replaced by its replica version; its own `forward` runs
unchanged. Whether that is right for a model is not assumed but tried out, on a few examples: see `ReplicaModel.trial`.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.errors import ModelError
from fedsim.training.convolution import ReplicaConv
from fedsim.training.layers import Batch, ReplicaEmbedding, ReplicaLayer, ReplicaLinear, Slot
from fedsim.training.layout import Layout
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
_VECTOR = 32  # float32 that PyTorch computes at a time: two AVX-512 registers


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


def _owns_parameters(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def mixes_examples(model: nn.Module) -> str | None:
    """The name of a layer by which the examples of a batch influence each other (BatchNorm), if there is one."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            return name
    return None


@dataclass(frozen=True)
class Trial:
    """What was learnt of a model by running it on a few examples."""

    reason: str | None
    """Why it cannot be trained as replicas, if so."""
    pointwise: frozenset[int] = frozenset()
    """The numbers of elements, for one example, of the tensors that element-wise operations compute."""
    elements: int = 0
    """The numbers that are computed for one example, forwards and backwards."""

    def guard(self, width: int) -> int:
        """How many guard rows a batch of replicas of `width` examples needs: see `layers.Batch`."""
        loose = [size for size in self.pointwise if width * size % _VECTOR]
        return max((math.ceil(_VECTOR / size) for size in loose), default=0)


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


def trial(model: nn.Module, layout: Layout, start: Tensor, x: Tensor, y: Tensor) -> Trial:
    """Run a model and its replicas on a few examples, forwards and backwards, and compare the outputs.

    This finds what the list of layers cannot tell: random numbers, a layer that is used twice or never, a forward pass
    that mixes the examples of a batch or counts on its size.
    """
    width = 3
    inputs = x[torch.arange(2 * width) % len(x)]
    alone = copy.deepcopy(model).train()
    alone.load_state_dict(layout.unflatten(start), strict=False)
    try:
        expected = torch.cat([alone(part).detach() for part in inputs.split(width)])
    except Exception as error:
        raise ModelError(f"the model does not take examples of shape {tuple(x.shape[1:])}: {error}") from error
    if expected.dim() != y.dim() + 1 or expected.shape[1:-1] != y.shape[1:]:
        raise ModelError(
            f"the model gives outputs of shape {tuple(expected.shape[1:])} for labels of shape {tuple(y.shape[1:])}: "
            "it must give one number for each class, in the last dimension"
        )
    replicas = ReplicaModel(model, layout)
    replicas.batch.resize(2, width, 0)
    replicas.batch.present = torch.ones(2, width)
    replicas.load_constants(start)
    weights = start.repeat(2, 1)
    replicas.bind(weights, weights)
    watch = _Watch(2 * width)
    random_state = torch.get_rng_state()
    try:
        with watch:
            outputs = replicas(inputs)
            torch.autograd.backward(outputs, torch.ones_like(outputs))
    except Exception as error:
        return Trial(f"its forward pass does not take the examples of several replicas at once ({error})")
    if not torch.equal(random_state, torch.get_rng_state()):
        return Trial("its forward pass draws random numbers")
    if any(layer.calls != 1 for layer in replicas.layers):
        return Trial("a layer is used twice or never")
    if outputs.shape != expected.shape or not torch.allclose(outputs, expected, rtol=1e-3, atol=1e-4):
        return Trial("its forward pass mixes the examples of a batch")
    return Trial(None, frozenset(watch.pointwise), watch.elements // (2 * width))


class _Watch(TorchDispatchMode):
    """Notes what the operations of a forward and backward pass compute, for each of `rows` examples."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self.elements = 0
        self.pointwise: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not func.is_view:
                self.elements += tensor.numel()
                if torch.Tag.pointwise in func.tags and tensor.dim() and tensor.numel() % self._rows == 0:
                    self._note(tensor.shape)
        return result

    def _note(self, shape: torch.Size) -> None:
        if shape[0] % self._rows == 0:
            self.pointwise.add(shape.numel() // self._rows)
        elif len(shape) > 1 and shape[1] % self._rows == 0:  # sequence first: (T, K·B, ...)
            self.pointwise.add(shape[1:].numel() // self._rows)
