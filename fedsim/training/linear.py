# SPDX-License-Identifier: Apache-2.0
"""Linear layers of K replicas."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedsim.training import ghost, products
from fedsim.training.factors import Factors, steps_that_pay
from fedsim.training.layers import ReplicaLayer
from fedsim.training.products import LARGE


class ReplicaLinear(ReplicaLayer):
    """K linear layers: y = x Wᵀ + b, at one position or at every position of a sequence."""

    packs = True
    _start: Tensor
    _steps = 0

    def begin(self, start: Mapping[str, Tensor], steps: int) -> None:
        """Prepare for replicas that share the weights `start`; of their steps `steps` may be kept as factors."""
        super().begin(start, steps)
        self._start = start[self.names["weight"]]
        self._steps = steps if self._start.numel() >= LARGE else 0

    def _use_factors(self) -> None:
        """Begin to keep factors in the first step, where it pays; end when there are too many."""
        if self._steps:
            (outputs, inputs), rows = self._start.shape, self._x.shape[1]
            steps = min(self._steps, steps_that_pay(outputs, inputs, rows))
            self.factors = Factors(self._start, len(self._x), rows, steps) if steps else None
            self._steps = 0
        elif self.factors is not None and self.factors.full:
            self.factors.write(self.weight)
            self.factors = None

    def compute(self, x: Tensor) -> Tensor:
        """Y, for all replicas."""
        self._shape = x.shape
        outputs, inputs = self.weight.shape[1:]
        self._x = self.batch.by_replica(x, -1, inputs)
        self._use_factors()
        y = self.batch.new(x, *x.shape[:-1], outputs)
        into = self.batch.by_replica(y, -1, outputs)
        if (counts := self.batch.counts(self._x)) is not None:
            products.multiply_rows(self._x[0], self.weight.transpose(1, 2), into[0], counts)
        elif self.factors is not None:
            self.factors.times_transposed(self._x, into)
        else:
            products.multiply(self._x, self.weight.transpose(1, 2), into)
        if self.bias is not None:
            into.add_(self.batch.of_rows(self.bias, into))
        return y

    def keep(self, d: Tensor) -> None:
        """Keep d as (K, B·L, O)."""
        self._d = self.batch.by_replica(d, -1, d.shape[-1])

    def input_gradient(self, d: Tensor) -> Tensor:
        """D W."""
        gradient = self.batch.new(d, *self._shape)
        into = self.batch.by_replica(gradient, -1, self._shape[-1])
        if (counts := self.batch.counts(self._d)) is not None:
            products.multiply_rows(self._d[0], self.weight, into[0], counts)
        elif self.factors is not None:
            self.factors.times(self._d, into)
        else:
            products.multiply(self._d, self.weight, into)
        return gradient

    def _by_example(self) -> tuple[Tensor, Tensor]:
        """The factors x (K·B, L, I) and d (K·B, L, O)."""
        shape = (self.batch.replicas * self.batch.width, -1)
        return self._x.view(*shape, self._x.shape[2]), self._d.view(*shape, self._d.shape[2])

    def squared_norms(self) -> Tensor:
        """(K, B), by the factors or by the gradients, whichever are smaller."""
        x, d = self._by_example()
        shape = (self.batch.replicas, self.batch.width, -1)
        self.examples = {}
        if ghost.are_small(x.shape[1], x.shape[2], d.shape[2]):
            self.examples["weight"] = products.product(d.transpose(1, 2), x).view(shape)
            norms = ghost.squared_lengths(self.examples["weight"])
        elif self.bias is not None and x.shape[1] == 1:  # |d xᵀ|² + |d|²
            self.examples["bias"] = d.view(shape)
            whole = ghost.lengths(x).square_().add_(1).sqrt_().mul_(ghost.lengths(d))
            return whole.square_().view(shape[:2])
        else:
            norms = ghost.squared_norms(x, d).view(shape[:2])
        if self.bias is not None:
            self.examples["bias"] = ghost.sum_of_positions(d).view(shape)
            norms.add_(ghost.squared_lengths(self.examples["bias"]))
        return norms

    def forget(self, examples: Tensor) -> None:
        """Take their gradients for zero."""
        super().forget(examples)
        for factor in self._by_example():
            factor[examples.flatten()] = 0

    def add_gradient(self, scale: float, factors: Tensor | None) -> None:
        """Add scale · Σ_i factor_i · gradient of example i to the targets; without factors: 1 each."""
        target, d = self.weight_target, self._d
        if self.bias_target is not None:
            # clipped sums are made of the very gradients that were measured
            rows = d if factors is None else self.examples["bias"]
            self.bias_target.add_(self.batch.weighted_sums(rows, factors), alpha=scale)
        if factors is not None and "weight" in self.examples:
            target.add_(self.batch.weighted_sums(self.examples["weight"], factors).view(target.shape), alpha=scale)
            return
        if factors is not None:
            d = d.view(*factors.shape, -1).mul(factors.unsqueeze(2)).view(d.shape)
        if (counts := self.batch.counts(d)) is not None:
            products.add_products(d[0], self._x[0], target, scale, counts)
        elif self.factors is not None:
            self.factors.add(self._x, d, scale)
        else:
            products.multiply(
                d.transpose(1, 2), self._x, target, scale, add=True
            )  # a step of SGD and the gradient are one
