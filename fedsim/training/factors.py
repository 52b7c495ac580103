# SPDX-License-Identifier: Apache-2.0
"""Steps of SGD on the matrices of K replicas, kept as factors for as long as these are smaller than the matrices.

All replicas start from one matrix W (O, I). A step adds s·d_tᵀx_t to the matrix of a replica, with a layer's inputs x_t
(R, I) and the gradients d_t (R, O) of its outputs; so after t steps its matrix is W + DᵀX, with the t·R rows of all
steps below each other. Products with it need no matrix of the replica's own:

    x(W + DᵀX)ᵀ = xWᵀ + (xXᵀ)D,        d(W + DᵀX) = dW + (dDᵀ)X.

Here W is the same for everybody and stays in the processor's cache, where K matrices would be read and written in every
step; and the change of the weights is one product, DᵀX, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.training import products


def steps_that_pay(outputs: int, inputs: int, rows: int) -> int:
    """How many steps are kept: until (xXᵀ)D costs as much as xWᵀ, and the factors have as many numbers as W."""
    return outputs * inputs // ((outputs + inputs) * rows)


class Factors:
    """The matrices W + DᵀX of the first replicas; a replica that has finished drops out at the end."""

    def __init__(self, start: Tensor, replicas: int, rows: int, steps: int) -> None:
        outputs, inputs = start.shape
        self._rows = rows
        self._start, self._turned = (w.expand(replicas, -1, -1) for w in (start, start.t().contiguous()))
        self._x, self._d = torch.empty(replicas, steps * rows, inputs), torch.empty(replicas, steps * rows, outputs)
        self._used = 0

    @property
    def full(self) -> bool:
        """Whether there is no room for another step."""
        return self._used == self._x.shape[1]

    def _past(self, replicas: int) -> tuple[Tensor, Tensor]:
        """X (k, t·R, I) and D (k, t·R, O) of the first replicas."""
        return self._x[:replicas, : self._used], self._d[:replicas, : self._used]

    def add(self, x: Tensor, d: Tensor, scale: float) -> None:
        """Add scale · dᵀx, (k, R, O) and (k, R, I), to the matrices of the first k replicas."""
        new = slice(self._used, self._used + self._rows)
        self._x[: len(x), new] = x
        torch.mul(d, scale, out=self._d[: len(d), new])
        self._used += self._rows

    def times_transposed(self, x: Tensor, into: Tensor) -> None:
        """Set `into` to x(W + DᵀX)ᵀ of the first replicas: (k, R, I) gives (k, R, O)."""
        products.multiply(x, self._turned[: len(x)], into)
        if self._used:
            past_x, past_d = self._past(len(x))
            products.multiply(products.product(x, past_x.transpose(1, 2)), past_d, into, add=True)

    def times(self, d: Tensor, into: Tensor) -> None:
        """Set `into` to d(W + DᵀX) of the first replicas: (k, R, O) gives (k, R, I)."""
        products.multiply(d, self._start[: len(d)], into)
        if self._used:
            past_x, past_d = self._past(len(d))
            products.multiply(products.product(d, past_d.transpose(1, 2)), past_x, into, add=True)

    def write_change(self, replicas: slice, into: Tensor) -> None:
        """Set `into` (k, O, I) to DᵀX of these replicas."""
        x, d = self._past(len(self._x))
        products.multiply(d[replicas].transpose(1, 2), x[replicas], into)

    def write(self, into: Tensor) -> None:
        """Set `into` (k, O, I) to the matrices of the first replicas."""
        x, d = self._past(len(into))
        products.multiply(d.transpose(1, 2), x, into.copy_(self._start[: len(into)]), add=True)
