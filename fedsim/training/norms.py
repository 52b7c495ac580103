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

from fedsim.training import ghost
from fedsim.training.layers import Batch, ReplicaLayer


class ReplicaNorm(ReplicaLayer):
    """K normalisation layers; input and gradients are seen as (K, B·m, F, S): F weights, S positions behind them."""

    def __init__(self, original: nn.Module, prefix: str, batch: Batch) -> None:
        super().__init__(original, prefix, batch)
        self._original = original

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise, then scale and shift."""
        return super().__call__(self.normalised(x))

    def normalised(self, x: Tensor) -> Tensor:
        """x̂, without scale and shift."""
        original = self._original
        if isinstance(original, nn.LayerNorm):
            return F.layer_norm(x, original.normalized_shape, eps=original.eps)
        if isinstance(original, nn.GroupNorm):
            return F.group_norm(x, original.num_groups, eps=original.eps)
        assert isinstance(original, nn.InstanceNorm1d | nn.InstanceNorm2d)
        return F.instance_norm(x, eps=original.eps)

    def _seen(self, x: Tensor) -> Tensor:
        """(rows·m, ...) seen as (K, B·m, F, S), on the same memory where that is possible."""
        x = self.batch.by_replica(x, -1, *x.shape[1:])
        if isinstance(self._original, nn.LayerNorm):
            behind = len(self._original.normalized_shape)
            return x.flatten(1, -1 - behind).flatten(2).unsqueeze(3)
        return x.flatten(3) if x.dim() > 3 else x.unsqueeze(3)

    def compute(self, x: Tensor) -> Tensor:
        """x̂ w + b."""
        y = self._new_like(x)
        self._x, into = self._seen(x), self._seen(y)
        if self.bias is None:
            torch.mul(self._x, _spread(self.weight), out=into)
        else:
            torch.addcmul(_spread(self.bias), self._x, _spread(self.weight), out=into)
        return y

    def _new_like(self, x: Tensor) -> Tensor:
        """An uninitialised tensor like x, whose last dimensions can be seen as one; its guard rows are zero."""
        if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            return self.batch.new(x, *x.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
        return self.batch.new(x, *x.shape)

    def keep(self, d: Tensor) -> None:
        """Keep d, seen as (K, B·m, F, S)."""
        self._d = self._seen(d)

    def input_gradient(self, d: Tensor) -> Tensor:
        """The gradient d w with respect to x̂."""
        gradient = self._new_like(d)
        torch.mul(self._d, _spread(self.weight), out=self._seen(gradient))
        return gradient

    def _of_examples(self) -> dict[str, Tensor]:
        """The gradients (K, B, F) of every example: Σ d x̂ for the weight, Σ d for the bias."""
        factors = {"weight": self._x * self._d, "bias": self._d}
        shape = (self.batch.replicas * self.batch.width, -1, *self._d.shape[2:])
        # the sum over positions first: a sum over both at once is divided by PyTorch as the number of replicas suggests
        sums = {name: factors[name].reshape(shape).sum(3).sum(1) for name in self.names}
        return {name: each.view(self.batch.replicas, self.batch.width, -1) for name, each in sums.items()}

    def squared_norms(self) -> Tensor:
        """(K, B): computed directly, for these gradients are small."""
        self.examples = self._of_examples()
        lengths = [ghost.squared_lengths(each) for each in self.examples.values()]
        return lengths[0] if len(lengths) == 1 else lengths[0] + lengths[1]

    def add_gradient(self, scale: float, factors: Tensor | None) -> None:
        """Add scale · Σ_i factor_i · gradient of example i to the targets; without factors: 1 each."""
        if not self.names:
            return
        for name, each in (self._of_examples() if factors is None else self.examples).items():
            target = self.weight_target if name == "weight" else self.bias_target
            assert target is not None
            target.add_(ghost.weighted_sum(each, factors).view(target.shape), alpha=scale)


class ReplicaBatchNorm(ReplicaNorm):
    """K BatchNorm layers (Ioffe and Szegedy 2015), each with the statistics of its own examples, without padding."""

    def __init__(self, original: nn.BatchNorm1d | nn.BatchNorm2d, prefix: str, batch: Batch) -> None:
        super().__init__(original, prefix, batch)
        self._eps, self._momentum = original.eps, original.momentum or 0.0
        self._statistics = {n: prefix + n for n in ("running_mean", "running_var") if getattr(original, n) is not None}
        self._running: list[Tensor] = []

    def bind(self, weights: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Use these tensors as weights and as running statistics."""
        super().bind(weights, targets)
        self._running = [weights[name] for name in self._statistics.values()]

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise, then scale and shift if there are weights for it."""
        if self.names:
            return super().__call__(x)
        self.calls += 1
        return self.normalised(x)

    def normalised(self, x: Tensor) -> Tensor:
        """(x − mean)/√(var + ε) over the present examples of each replica; the running statistics move as PyTorch's."""
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
        normal = (centred * (variance + self._eps).rsqrt()).reshape(-1, *x.shape[1:])
        guard = x.shape[0] - normal.shape[0]
        return torch.cat([normal, normal.new_zeros(guard, *x.shape[1:])]) if guard else normal


def _spread(weight: Tensor) -> Tensor:
    """A weight (K, *shape) as (K, 1, F, 1)."""
    return weight.flatten(1)[:, None, :, None]
