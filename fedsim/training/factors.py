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
        self._start, self._rows = start, rows
        self._turned = start if products.ONEDNN else start.t().contiguous().t()  # as `times_shared` wants it
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

    def times_transposed(self, x: Tensor, into: Tensor) -> Tensor:
        """x(W + DᵀX)ᵀ of the first replicas, in `into` or elsewhere: (k, R, I) gives (k, R, O)."""
        into = products.times_shared(x, self._turned, into)
        if self._used:
            past_x, past_d = self._past(len(x))
            into.baddbmm_(torch.bmm(x, past_x.transpose(1, 2)), past_d)
        return into

    def times(self, d: Tensor, into: Tensor) -> None:
        """d(W + DᵀX) of the first replicas: (k, R, O) gives (k, R, I)."""
        torch.bmm(d, self._start.expand(len(d), -1, -1), out=into)
        if self._used:
            past_x, past_d = self._past(len(d))
            into.baddbmm_(torch.bmm(past_d, d.transpose(1, 2)).transpose(1, 2), past_x)

    def write_change(self, replicas: slice, into: Tensor) -> None:
        """Set `into` (k, O, I) to DᵀX of these replicas: one by one, so that it does not matter how many they are."""
        x, d = self._past(len(self._x))
        for one_x, one_d, one in zip(x[replicas].unbind(), d[replicas].unbind(), into.unbind(), strict=True):
            products.write_sum_of_products(one_d, one_x, one)

    def write(self, into: Tensor) -> None:
        """Set `into` (k, O, I) to the matrices of the first replicas."""
        x, d = self._past(len(into))
        into.copy_(self._start).baddbmm_(d.transpose(1, 2), x)
