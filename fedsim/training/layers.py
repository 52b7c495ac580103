# SPDX-License-Identifier: Apache-2.0
"""Layers that hold the weights of K replicas, and see their input as K batches of B examples.

To the rest of a model (activations, pooling, attention, additions) K replicas are one ordinary batch of K·B examples,
replica after replica. Only layers with weights tell the replicas apart. Their backward pass computes the gradient for
their input alone and keeps the two factors of the weight's gradient; what is made of the factors (a fused step of SGD, a
gradient, per-example norms, a clipped sum) is decided afterwards, without a second backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.training.ghost import Product


class Batch:
    """What all layers of a model must know of the batch that is passing through: K·B rows, then guard rows.

    Guard rows are zeros behind the last replica. PyTorch computes the last few elements of a tensor without vector
    instructions, which for some functions (sigmoid) changes the last bit; with the guard these are nobody's elements.
    """

    def __init__(self) -> None:
        self.replicas, self.width, self.guard = 1, 1, 0
        self.present = torch.ones(1, 1)
        self.anchor = torch.zeros((), requires_grad=True)  # makes autograd call the first layer's backward too

    @property
    def rows(self) -> int:
        """The size of the batch that the model sees."""
        return self.replicas * self.width + self.guard

    def without_guard(self, tensor: Tensor) -> Tensor:
        """(K, B·m, ...): a tensor (rows·m, ...) without its guard rows, seen as K batches."""
        if tensor.shape[0] % self.rows:
            raise ValueError(f"a layer sees a tensor whose first dimension ({tensor.shape[0]}) is not the batch's")
        used = tensor.shape[0] // self.rows * self.width
        return tensor[: self.replicas * used].unflatten(0, (self.replicas, used))

    def clear_guard(self, tensor: Tensor) -> Tensor:
        """Set the guard rows of a tensor (rows·m, ...) to zero, and return it."""
        if self.guard:
            tensor[-(tensor.shape[0] // self.rows * self.guard) :] = 0
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
        d = layer.keep(gradients[0])
        return (layer.input_gradient(d) if ctx.needs_input_grad[0] else None), None, None


class ReplicaLayer(nn.Module):
    """A layer of K replicas; its weights are views on the replicas' rows, given to it by `bind`."""

    def __init__(self, original: nn.Module, prefix: str, batch: Batch) -> None:
        super().__init__()
        self.names = {name: prefix + name for name, _ in original.named_parameters(recurse=False)}
        self.batch = batch
        self.calls = 0
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def bind(self, views: Mapping[str, Tensor]) -> None:
        """Use these tensors, (K, *shape) by full name, as the weights."""
        self.weight, self.bias = self.targets(views)

    def targets(self, views: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """The views that belong to this layer's weight and bias."""
        found = [views[self.names[name]] if name in self.names else None for name in ("weight", "bias")]
        return found[0], found[1]

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for a batch of K·B rows (and guard rows)."""
        self.calls += 1
        output: Tensor = _Apply.apply(x, self.batch.anchor, self)  # type: ignore[no-untyped-call]
        return output

    def compute(self, x: Tensor) -> Tensor:
        """The output, keeping what the gradient will need of the input."""
        raise NotImplementedError

    def keep(self, d: Tensor) -> Tensor:
        """Keep the gradient with respect to the output, in the form that `input_gradient` takes."""
        raise NotImplementedError

    def input_gradient(self, d: Tensor) -> Tensor:
        """The gradient with respect to the input."""
        raise NotImplementedError

    def squared_norms(self) -> Tensor:
        """(K, B): the squared norm of each example's gradient of this layer's weights."""
        raise NotImplementedError

    def add_gradient(self, views: Mapping[str, Tensor], scale: float, factors: Tensor | None) -> None:
        """views[name] += scale · Σ_i factor_i · gradient of example i, for this layer's weights; None: factors of 1."""
        raise NotImplementedError


class ReplicaLinear(ReplicaLayer):
    """K linear layers: y = x Wᵀ + b, at one position or at every position of a sequence."""

    weight: Tensor

    def compute(self, x: Tensor) -> Tensor:
        self._shape = x.shape
        self._x = self.batch.without_guard(x).flatten(1, -2)
        y = self.batch.clear_guard(x.new_empty(*x.shape[:-1], self.weight.shape[1]))
        into = self.batch.without_guard(y).flatten(1, -2)
        _, rows, inputs = self._x.shape
        if 8 <= rows <= 48 and inputs >= 400:
            # W xᵀ: for few rows, MKL spends more on packing the large transposed matrix than on the product
            into.copy_(torch.bmm(self.weight, self._x.transpose(1, 2)).transpose(1, 2))
        else:
            torch.bmm(self._x, self.weight.transpose(1, 2), out=into)
        if self.bias is not None:
            into.add_(self.bias.unsqueeze(1))
        return y

    def keep(self, d: Tensor) -> Tensor:
        self._d = self.batch.without_guard(d).flatten(1, -2)
        return self._d

    def input_gradient(self, d: Tensor) -> Tensor:
        gradient = self.batch.clear_guard(d.new_empty(self._shape))
        torch.bmm(d, self.weight, out=self.batch.without_guard(gradient).flatten(1, -2))
        return gradient

    def _product(self) -> Product:
        per_example = (self.batch.width, self._x.shape[1] // self.batch.width)
        return Product(self._x.unflatten(1, per_example), self._d.unflatten(1, per_example))

    def squared_norms(self) -> Tensor:
        self._gradients = self._product()
        return self._gradients.squared_norms(self.bias is not None)

    def add_gradient(self, views: Mapping[str, Tensor], scale: float, factors: Tensor | None) -> None:
        weight, bias = self.targets(views)
        assert weight is not None
        product = self._product() if factors is None else self._gradients
        product.add_to(weight, bias, scale, factors)


class ReplicaEmbedding(ReplicaLayer):
    """K embedding tables: y_t = W[token t]."""

    weight: Tensor

    def __init__(self, original: nn.Embedding, prefix: str, batch: Batch) -> None:
        super().__init__(original, prefix, batch)
        self._ignored = original.padding_idx

    def compute(self, x: Tensor) -> Tensor:
        tokens = self.batch.without_guard(x).flatten(1)
        replica = torch.arange(len(tokens)).unsqueeze(1)
        self._where = (replica, tokens)
        y = self.batch.clear_guard(self.weight.new_empty(*x.shape, self.weight.shape[2]))
        self.batch.without_guard(y).flatten(1, -2).copy_(self.weight[self._where])
        return y

    def keep(self, d: Tensor) -> Tensor:
        d = self.batch.without_guard(d).flatten(1, -2)
        self._d = d if self._ignored is None else d * (self._where[1] != self._ignored).unsqueeze(2)
        return d

    def squared_norms(self) -> Tensor:
        """Σ_tu [token t = token u] ⟨d_t, d_u⟩: a table's gradient is the product of one-hot inputs and d."""
        tokens = self._where[1].reshape(self.batch.replicas * self.batch.width, -1)
        d = self._d.reshape(*tokens.shape, -1)
        same = tokens.unsqueeze(2) == tokens.unsqueeze(1)
        norms = torch.bmm(d, d.transpose(1, 2)).mul_(same).sum((1, 2)).clamp_min_(0)
        return norms.view(self.batch.replicas, self.batch.width)

    def add_gradient(self, views: Mapping[str, Tensor], scale: float, factors: Tensor | None) -> None:
        weight, _ = self.targets(views)
        assert weight is not None
        d = self._d * scale
        if factors is not None:
            d = d.unflatten(1, (self.batch.width, -1)).mul_(factors[:, :, None, None]).flatten(1, 2)
        weight.index_put_(self._where, d, accumulate=True)


