# SPDX-License-Identifier: Apache-2.0
"""Normalisation layers of K replicas: x̂ by ordinary differentiable operations, then y = x̂ w + b with w, b per replica.

LayerNorm, GroupNorm and InstanceNorm normalise every example by itself, so PyTorch's own functions serve. BatchNorm
mixes the examples of a batch, so its statistics are taken replica by replica, over the examples that are present.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.training.ghost import squared_lengths
from fedsim.training.layers import Batch, ReplicaLayer


class ReplicaNorm(ReplicaLayer):
    """K normalisation layers; input and gradients are seen as (K, B·m, F, S): F weights, S positions behind them."""

    weight: Tensor

    def __init__(self, original: nn.Module, prefix: str, batch: Batch) -> None:
        super().__init__(original, prefix, batch)
        self._original = [original]  # in a list, so that its parameters do not become this module's

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then scale and shift."""
        return super().forward(self.normalised(x)) if self.names else self.normalised(x)

    def normalised(self, x: Tensor) -> Tensor:
        """x̂, without scale and shift."""
        original = self._original[0]
        if isinstance(original, nn.LayerNorm):
            return F.layer_norm(x, original.normalized_shape, eps=original.eps)
        if isinstance(original, nn.GroupNorm):
            return F.group_norm(x, original.num_groups, eps=original.eps)
        assert isinstance(original, nn.InstanceNorm1d | nn.InstanceNorm2d)
        return F.instance_norm(x, eps=original.eps)

    def _seen(self, x: Tensor) -> Tensor:
        """(rows·m, ...) seen as (K, B·m, F, S), on the same memory where that is possible."""
        x = self.batch.without_guard(x)
        original = self._original[0]
        if isinstance(original, nn.LayerNorm):
            behind = len(original.normalized_shape)
            return x.flatten(1, -1 - behind).flatten(2).unsqueeze(3)
        return x.flatten(3) if x.dim() > 3 else x.unsqueeze(3)

    def compute(self, x: Tensor) -> Tensor:
        """Y = x̂ w + b."""
        y = self.batch.clear_guard(_empty_like(x))
        self._x, into = self._seen(x), self._seen(y)
        if self.bias is None:
            torch.mul(self._x, _spread(self.weight), out=into)
        else:
            torch.addcmul(_spread(self.bias), self._x, _spread(self.weight), out=into)
        return y

    def keep(self, d: Tensor) -> Tensor:
        """Keep d, seen as (K, B·m, F, S)."""
        self._d = self._seen(d)
        return d

    def input_gradient(self, d: Tensor) -> Tensor:
        """D w."""
        gradient = self.batch.clear_guard(_empty_like(d))
        torch.mul(self._d, _spread(self.weight), out=self._seen(gradient))
        return gradient

    def _of_examples(self) -> dict[str, Tensor]:
        """The gradients (K, B, F) of every example: Σ d x̂ for the weight, Σ d for the bias."""
        factors = {"weight": self._x * self._d, "bias": self._d}
        split = (self.batch.width, -1)
        return {name: factors[name].unflatten(1, split).sum(4).sum(2) for name in self.names}

    def squared_norms(self) -> Tensor:
        """(K, B): computed directly, these gradients are small."""
        self._gradients = self._of_examples()
        lengths = [squared_lengths(each) for each in self._gradients.values()]
        return torch.stack(lengths).sum(0)

    def add_gradient(self, views: Mapping[str, Tensor], scale: float, factors: Tensor | None) -> None:
        """views[name] += scale · Σ_i factor_i · gradient of example i."""
        gradients = self._of_examples() if factors is None else self._gradients
        each = torch.ones(self.batch.replicas, self.batch.width) if factors is None else factors
        for name, gradient in gradients.items():
            target = views[self.names[name]]
            target.add_(torch.bmm(each.unsqueeze(1), gradient).view(target.shape), alpha=scale)


class ReplicaBatchNorm(ReplicaNorm):
    """K BatchNorm layers (Ioffe and Szegedy 2015) with the statistics of their own examples, rows of padding left out."""

    def __init__(self, original: nn.BatchNorm1d | nn.BatchNorm2d, prefix: str, batch: Batch) -> None:
        super().__init__(original, prefix, batch)
        self._eps, self._momentum = original.eps, original.momentum or 0.0
        self._statistics = {n: prefix + n for n in ("running_mean", "running_var") if getattr(original, n) is not None}
        self._running: list[Tensor] = []

    def bind(self, views: Mapping[str, Tensor]) -> None:
        """Use these tensors as weights and as running statistics."""
        super().bind(views)
        self._running = [views[name] for name in self._statistics.values()]

    def normalised(self, x: Tensor) -> Tensor:
        """(x − mean)/√(var + ε) over the present examples of each replica; the running statistics move as PyTorch's."""
        self.calls += not self.names
        seen = self._seen(x)
        present = self.batch.present.repeat_interleave(seen.shape[1] // self.batch.width, dim=1)[:, :, None, None]
        count = (present.sum((1, 2, 3), keepdim=True) * seen.shape[3]).clamp_min(1)
        mean = (seen * present).sum((1, 3), keepdim=True) / count
        centred = seen - mean
        variance = (centred.square() * present).sum((1, 3), keepdim=True) / count
        if self._running:
            with torch.no_grad():
                unbiased = variance * count / (count - 1).clamp_min(1)
                for running, now in zip(self._running, (mean, unbiased), strict=True):
                    running.lerp_(now[:, 0, :, 0], self._momentum)
        normal = (centred * (variance + self._eps).rsqrt()).flatten(0, 1).reshape(-1, *x.shape[1:])
        guard = x.shape[0] - normal.shape[0]
        return torch.cat([normal, normal.new_zeros(guard, *x.shape[1:])]) if guard else normal


def _spread(weight: Tensor) -> Tensor:
    """A weight (K, *shape) as (K, 1, F, 1)."""
    return weight.flatten(1)[:, None, :, None]


def _empty_like(x: Tensor) -> Tensor:
    """An uninitialised tensor like x, whose trailing dimensions can be seen as one."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.empty(x.shape, memory_format=torch.channels_last if last else torch.contiguous_format)
