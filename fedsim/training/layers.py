# SPDX-License-Identifier: Apache-2.0
"""Layers that hold the weights of K replicas, and see their input as K batches of B examples.

To the rest of a model (activations, pooling, attention, additions) K replicas are one ordinary batch of K·B examples,
replica after replica. Only layers with weights tell the replicas apart. Their backward pass computes the gradient for
their input alone and keeps the two factors of the weight's gradient; what is made of the factors (a fused step of SGD,
a gradient, per-example norms, a clipped sum) is decided afterwards, without a second backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.training import ghost, products
from fedsim.training.factors import Factors


class Batch:
    """What all layers of a model must know of the batch that is passing through: K·B rows, then guard rows.

    Guard rows are zeros behind the last replica. PyTorch computes the last few elements of a tensor without vector
    instructions, which for some functions (sigmoid) changes the last bit; with the guard these are nobody's elements.
    """

    def __init__(self) -> None:
        self.present = torch.empty(0)
        self.sizes: list[int] | None = None
        self.anchor = torch.zeros((), requires_grad=True)  # makes autograd call the first layer's backward too
        self._scratch = torch.empty(0)
        self.resize(1, 1, 0)

    def resize(self, replicas: int, width: int, guard: int) -> None:
        """From now on the batch has K = `replicas` times B = `width` rows, and `guard` rows."""
        self.replicas, self.width, self.guard, self.sizes = replicas, width, guard, None
        self.rows = replicas * width + guard

    def pack(self, sizes: list[int], guard: int) -> None:
        """From now on the batch is packed: replica k has sizes[k] rows, and nothing is padded.

        All rows together are then seen as those of one replica, and `each` tells the replicas apart.
        """
        self.resize(1, sum(sizes), guard)
        self.sizes = sizes

    def counts(self, tensor: Tensor) -> list[int] | None:
        """How many rows of a tensor (1, R, ...), as `by_replica` gives it, each replica has; None if not packed."""
        if self.sizes is None:
            return None
        times = tensor.shape[1] // max(1, self.width)
        return self.sizes if times == 1 else [times * size for size in self.sizes]

    def each(self, tensor: Tensor) -> Sequence[Tensor]:
        """A tensor (K, B·m, ...), as `by_replica` gives it, replica by replica: K tensors (B·m, ...)."""
        counts = self.counts(tensor)
        pieces: Sequence[Tensor] = tensor.unbind() if counts is None else tensor[0].split(counts)
        return pieces

    def of_rows(self, values: Tensor, tensor: Tensor) -> Tensor:
        """The values (K, n) of the replicas, for every row of a tensor (K, B·m, n): broadcasts with it."""
        counts = self.counts(tensor)
        if counts is None:
            return values.unsqueeze(1)
        return values.repeat_interleave(torch.tensor(counts), 0, output_size=tensor.shape[1]).unsqueeze(0)

    def weighted_sums(self, examples: Tensor, factors: Tensor | None) -> Tensor:
        """(K, n): Σ_i factor_i r_i over the rows of each replica, (K, B, n); factors None: 1 each."""
        if self.sizes is None or factors is None:
            return ghost.weighted_sum(examples, factors)
        sums = examples.new_zeros(len(self.sizes), 1, examples.shape[2])
        products.add_products(factors.view(-1, 1), examples[0], sums, 1.0, self.sizes)
        return sums.squeeze(1)

    def by_replica(self, tensor: Tensor, *shape: int) -> Tensor:
        """A tensor (rows·m, ...) without its guard rows, in shape (K, *shape); one entry of `shape` may be -1."""
        if self.guard:
            tensor = tensor[: tensor.shape[0] // self.rows * (self.rows - self.guard)]
        return tensor.reshape(self.replicas, *shape)

    def scratch(self, shape: torch.Size) -> Tensor:
        """Memory for a result that is used at once: all layers share it, so that it stays in the cache."""
        count = shape.numel()
        if self._scratch.numel() < count:
            self._scratch = torch.empty(count)
        return self._scratch[:count].view(shape)

    def new(self, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised tensor (rows·m, ...) whose guard rows are zero."""
        tensor = like.new_empty(shape)
        if self.guard:
            tensor[shape[0] // self.rows * (self.rows - self.guard) :] = 0
        return tensor


class _Apply(torch.autograd.Function):
    """Calls a replica layer's own forward and backward arithmetic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: ReplicaLayer) -> Tensor:
        ctx.layer = layer
        return layer.compute(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        layer: ReplicaLayer = ctx.layer
        layer.returns += 1
        layer.keep(gradients[0])
        return (layer.input_gradient(gradients[0]) if ctx.needs_input_grad[0] else None), None, None


class ReplicaLayer:
    """A layer of K replicas.

    Its weights, and the targets to which its gradients are added, are views on the replicas' rows, given by `bind`.
    """

    packs = False  # whether it can do with batches that are packed
    weight: Tensor
    bias: Tensor | None
    weight_target: Tensor
    bias_target: Tensor | None

    def __init__(self, original: nn.Module, prefix: str, batch: Batch) -> None:
        self.names = {name: prefix + name for name, p in original.named_parameters(recurse=False) if p is not None}
        self.batch = batch
        self.calls, self.returns = 0, 0  # of the forward and of the backward pass
        self.factors: Factors | None = None  # in their place the weights are out of date
        self.examples: dict[str, Tensor] = {}  # gradients (K, B, n) of every example, where these are few numbers

    def bind(self, weights: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Use these tensors, (K, *shape) by full name."""
        if "weight" in self.names:
            self.weight, self.weight_target = weights[self.names["weight"]], targets[self.names["weight"]]
        bias = self.names.get("bias")
        self.bias, self.bias_target = (weights[bias], targets[bias]) if bias else (None, None)

    def begin(self, start: Mapping[str, Tensor], steps: int) -> None:
        """Prepare for replicas that share the weights `start`; of their steps `steps` may be kept as factors."""
        self.factors = None

    def __call__(self, x: Tensor) -> Tensor:
        """The layer's output for a batch of K·B rows (and guard rows)."""
        if x.shape[0] % self.batch.rows:
            raise ValueError(f"a layer sees an input of {x.shape[0]} rows in a batch of {self.batch.rows}")
        self.calls += 1
        output: Tensor = _Apply.apply(x, self.batch.anchor, self)  # type: ignore[no-untyped-call]
        return output

    def compute(self, x: Tensor) -> Tensor:
        """The output, keeping what the gradients will need of the input."""
        raise NotImplementedError

    def keep(self, d: Tensor) -> None:
        """Keep the gradient with respect to the output."""
        raise NotImplementedError

    def input_gradient(self, d: Tensor) -> Tensor | None:
        """The gradient with respect to the input."""
        raise NotImplementedError

    def squared_norms(self) -> Tensor:
        """(K, B): the squared norm of each example's gradient of this layer's weights."""
        raise NotImplementedError

    def forget(self, examples: Tensor) -> None:
        """Take the gradients of these examples, (K, B) bool, for zero: they are not finite."""
        for each in self.examples.values():
            each[examples] = 0

    def add_gradient(self, scale: float, factors: Tensor | None) -> None:
        """Add scale · Σ_i factor_i · gradient of example i to the targets; without factors: 1 each."""
        raise NotImplementedError


class Slot(nn.Module):
    """Stands in the user's model where the original layer stood."""

    def __init__(self, layer: ReplicaLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The output of the replica layer."""
        return self.layer(x)


class ReplicaEmbedding(ReplicaLayer):
    """K embedding tables: y_t = W[token t]."""

    def __init__(self, original: nn.Embedding, prefix: str, batch: Batch) -> None:
        super().__init__(original, prefix, batch)
        self._ignored = original.padding_idx

    def compute(self, x: Tensor) -> Tensor:
        """The rows of each replica's own table."""
        self._tokens = self.batch.by_replica(x, -1)
        self._where = (torch.arange(self.batch.replicas).unsqueeze(1), self._tokens)
        y = self.batch.new(self.weight, *x.shape, self.weight.shape[2])
        self.batch.by_replica(y, -1, y.shape[-1]).copy_(self.weight[self._where])
        return y

    def keep(self, d: Tensor) -> None:
        """Keep d as (K, B·T, E); the padding token has no gradient."""
        self._d = self.batch.by_replica(d, -1, d.shape[-1])
        if self._ignored is not None:
            self._d = self._d * (self._tokens != self._ignored).unsqueeze(2)

    def input_gradient(self, d: Tensor) -> None:
        """Tokens have no gradient."""

    def squared_norms(self) -> Tensor:
        """Σ_tu [token t = token u] ⟨d_t, d_u⟩: a table's gradient is the product of one-hot inputs and d."""
        shape = (self.batch.replicas * self.batch.width, -1)
        tokens, d = self._tokens.reshape(shape), self._d.reshape(*shape, self._d.shape[2])
        grams = torch.bmm(d.double(), d.double().transpose(1, 2)).mul_(tokens.unsqueeze(2) == tokens.unsqueeze(1))
        spread = ghost.lengths(d).sum(1)
        return ghost.bounded_squares(grams, spread).view(self.batch.replicas, self.batch.width)

    def forget(self, examples: Tensor) -> None:
        """Take their gradients for zero."""
        self._d.unflatten(1, (self.batch.width, -1))[examples] = 0

    def add_gradient(self, scale: float, factors: Tensor | None) -> None:
        """Add scale · factor · d_t to the row of token t."""
        d = self._d * scale
        if factors is not None:
            d.view(self.batch.replicas, self.batch.width, -1).mul_(factors.unsqueeze(2))
        self.weight_target.index_put_(self._where, d, accumulate=True)


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return outputs.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *unused: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def backpropagate(outputs: Tensor, gradient: Tensor) -> None:
    """Run the backward pass with this gradient with respect to the outputs.

    Given a gradient, `torch.autograd.backward` imports half of PyTorch's compiler to compare two shapes; a scalar needs
    none.
    """
    with torch.enable_grad():
        _Pull.apply(outputs, gradient).backward()  # type: ignore[no-untyped-call]
