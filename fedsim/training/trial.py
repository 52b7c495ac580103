# SPDX-License-Identifier: Apache-2.0
"""Whether a model may be trained as replicas is tried out, on a few examples.

The layers of a model do not tell what its forward pass does between them. So it is run, as itself and as replicas, and
what it computes is compared and watched.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.errors import ModelError
from fedsim.training.client import Task
from fedsim.training.layers import backpropagate
from fedsim.training.replicas import ReplicaModel

_VECTOR = 32  # float32 that PyTorch computes at a time: two AVX-512 registers
_WIDTH = 3  # examples of each of the two replicas in a trial
_MANY = 48  # examples of a batch of an ordinary size


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

    @property
    def packed_guard(self) -> int:
        """How many guard rows a packed batch needs, of however many rows it is."""
        return self.guard(1)


def trial(task: Task) -> Trial:
    """Run a model and its replicas on a few examples, forwards and backwards, and compare the outputs.

    This finds what the list of layers cannot tell: random numbers, a layer that is used twice or never, a forward pass
    that mixes the examples of a batch or of different replicas, or counts on the batch's size. Weights and inputs are
    perturbed, the two replicas differently, so that neither a zero nor a coincidence can hide anything.
    """
    inputs, weights = _inputs(task), torch.stack([_perturbed(task, seed) for seed in (1, 2)])
    with torch.random.fork_rng(devices=[]):
        models = [_loaded(task, own).train() for own in weights]
        expected = torch.cat([_outputs(m, task, part) for m, part in zip(models, inputs.split(_WIDTH), strict=True)])
        state, watch = torch.get_rng_state(), _Watch(2 * _WIDTH)
        replicas = ReplicaModel(task.model, task.layout)
        try:
            outputs = _replica_outputs(replicas, task.start, weights, inputs, watch)
        except Exception as error:  # whatever a forward pass may do with a layer that is not the one it knows
            return Trial(f"its forward pass does not take the examples of several replicas at once ({error})")
        if not torch.equal(state, torch.get_rng_state()):
            return Trial("its forward pass draws random numbers")
    if any(layer.calls != 1 for layer in replicas.layers):
        return Trial("a layer is used twice or never")
    if any(layer.names and layer.returns != 1 for layer in replicas.layers):
        return Trial("a layer gets no gradient")
    if not _same(outputs, expected):
        return Trial("its forward pass mixes the examples of a batch")
    return Trial(None, frozenset(watch.pointwise), watch.elements // (2 * _WIDTH))


def mixes_examples(task: Task) -> str | None:
    """By what the examples of a batch influence each other, so that none has a gradient of its own; None: they do not.

    BatchNorm is found by its name, anything else by trying, in training mode but without dropout, whether the outputs
    of an example depend on its company. With random inputs and the model's own weights, perturbed: a model that mixes
    is refused, and with the client's rows, or with weights that a server has sent, the refusal could tell of the rows
    (by weights for which rounding in batches of different sizes shows, or not, as a row decides).
    """
    for name, module in task.model.named_modules():
        if isinstance(module, _BatchNorm):
            return f"layer '{name}' ({type(module).__name__})"
    task = replace(task, start=task.layout.flatten(task.model.state_dict()), x=_random_rows(task))
    model, inputs = _loaded(task, _perturbed(task, 1)).train(), task.x
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.eval()
    alone = torch.cat([_outputs(model, task, part) for part in inputs.split(1)])
    many = inputs.repeat(-(-_MANY // len(inputs)), *(1 for _ in inputs.shape[1:]))
    crowds = (_outputs(model, task, inputs), _outputs(model, task, many)[: len(inputs)])
    return None if all(_same(crowd, alone) for crowd in crowds) else "the model's forward pass"


def _random_rows(task: Task) -> Tensor:
    """A few inputs of the shape and type of the data, in which nothing of it shows."""
    rng, shape = torch.Generator().manual_seed(0), (2 * _WIDTH, *task.x.shape[1:])
    if task.x.is_floating_point():
        return torch.rand(shape, generator=rng)  # in [0, 1): a model that takes a column for an index finds one
    tables = [module.num_embeddings for module in task.model.modules() if isinstance(module, nn.Embedding)]
    return torch.randint(min(tables, default=2), shape, generator=rng)


def _inputs(task: Task) -> Tensor:
    """A few examples that differ: rows from all over the data, with noise; tokens drawn from those that occur."""
    rng = torch.Generator().manual_seed(0)
    rows: Tensor = task.x[torch.linspace(0, len(task.x) - 1, 2 * _WIDTH).long()]
    if rows.is_floating_point():
        return rows + 0.3 * (rows.std() + 0.1) * torch.randn(rows.shape, generator=rng)
    tokens: Tensor = task.x[:100].unique()
    return tokens[torch.randint(len(tokens), rows.shape, generator=rng)]


def _perturbed(task: Task, seed: int) -> Tensor:
    """The start weights (P,) with noise on every parameter, in proportion to its own size, and on zeros too."""
    rng, weights = torch.Generator().manual_seed(seed), task.start.clone()
    for name, view in list(task.layout.unflatten(weights).items()):
        if name in dict(task.model.named_parameters()):
            view += (0.3 * view.square().mean().sqrt() + 0.02) * torch.randn(view.shape, generator=rng)
    return weights


def _loaded(task: Task, weights: Tensor) -> nn.Module:
    """A copy of the model with these weights."""
    model = copy.deepcopy(task.model)
    model.load_state_dict(task.layout.unflatten(weights), strict=False)
    return model


def _outputs(model: nn.Module, task: Task, inputs: Tensor) -> Tensor:
    """The outputs of the user's model, if they fit the data."""
    try:
        outputs: Tensor = model(inputs).detach()
    except Exception as error:  # the user's code may raise anything
        raise ModelError(f"the model does not take examples of shape {tuple(inputs.shape[1:])}: {error}") from error
    labels = task.y.shape[1:]
    if outputs.shape[:-1] != (len(inputs), *labels):
        raise ModelError(
            f"the model gives outputs of shape {tuple(outputs.shape[1:])} for labels of shape {tuple(labels)}: "
            "it must give one number for each class, in the last dimension"
        )
    return outputs


def _replica_outputs(replicas: ReplicaModel, start: Tensor, weights: Tensor, inputs: Tensor, watch: _Watch) -> Tensor:
    """The outputs of two replicas with weights (2, P); their backward pass is run, and watched, too."""
    replicas.batch.resize(2, _WIDTH, 0)
    replicas.batch.present = torch.ones(2, _WIDTH)
    replicas.load_constants(start)
    weights = weights.clone()  # BatchNorm changes its statistics
    replicas.bind(weights, weights)
    with watch:
        outputs = replicas(inputs)
        backpropagate(outputs, torch.ones_like(outputs))
    return outputs.detach()


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether outputs are equal but for rounding."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)


class _Watch(TorchDispatchMode):
    """Notes what the operations of a forward and backward pass compute, for each of `rows` examples."""

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows
        self.elements = 0
        self.pointwise: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and PyTorch would import its compiler only to keep it away (seconds)."""
        return False

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
