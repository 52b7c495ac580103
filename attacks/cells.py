# SPDX-License-Identifier: Apache-2.0
"""Bins and rows of a dense first layer as cells that are peeled one example after another.

A cell is a row of the layer's gradient, or the difference of two rows, to which only the examples within certain bounds
contribute: dW = sum of d_k x_k, db = sum of d_k. Who is alone in a cell is x = dW / db. Whoever is known can be taken
out of all other cells, since d = dL/dz follows from the model, and frees those that shared a cell with it: the decoder
of an invertible Bloom lookup table (Goodrich, Mitzenmacher 2011).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_ROUNDING = 2.0**-23


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells (m,) of a layer's gradient, in float64, with bounds: z_i(x) > 0 and z_following(x) < 0."""

    weight: Tensor
    """(m, d) the layer's weights as they were sent."""
    bias: Tensor
    """(m,)"""
    following: Tensor
    """(m,) the row that is subtracted from row i; -1: none."""
    hat: bool
    """Hardtanh: the second bound is z_i(x) < 1."""
    group: Tensor
    """(m,) rows of one query have the same number."""

    def of(self, rows: Tensor) -> Tensor:
        """Values (m, ...) of the rows as values of the cells."""
        known = self.following >= 0
        return rows - rows[self.following] * known.view(-1, *[1] * (rows.dim() - 1))

    def holds(self, cells: Tensor, inputs: Tensor, slack: Tensor) -> Tensor:
        """Whether input k (n, d) lies within the bounds of cell k (n,), up to slack (n,) in units of the input."""
        room = slack * self.weight[cells].norm(dim=1)
        answer = (self.weight[cells] * inputs).sum(dim=1) + self.bias[cells]
        after = self.following[cells]
        beyond = (self.weight[after] * inputs).sum(dim=1) + self.bias[after]
        below = answer < 1 + room if self.hat else (after < 0) | (beyond < room)
        inside: Tensor = (answer > -room) & below
        return inside


def find_cells(weight: Tensor, bias: Tensor, *, hat: bool) -> Cells:
    """The cells of a layer (m, d): neighbouring rows that are parallel, with rising thresholds, are a query's bins."""
    weight, bias = weight.double(), bias.double()
    scale = weight.norm(dim=1).clamp_min(1e-300)
    units, lower = weight / scale[:, None], -bias / scale
    runs = ((units[:-1] * units[1:]).sum(dim=1) > 1 - 1e-6) & (lower[1:] >= lower[:-1])
    count = len(bias)
    group = torch.cat([torch.zeros(1, dtype=torch.int64), (~runs).cumsum(0)])
    following = torch.full((count,), -1, dtype=torch.int64)
    if not hat:
        following[:-1] = torch.where(runs, torch.arange(1, count), -1)
    return Cells(weight, bias, following, hat, group)


def noise_of(values: Tensor, rows: Tensor) -> float:
    """The standard deviation of what is in empty cells: from the smallest 5% of the values, at least rounding.

    The 5% quantile of |N(0, s)| is 0.0627 s. It is too large where fewer than 5% of the cells are empty.
    """
    small = float(torch.quantile(values.abs(), 0.05)) / 0.0627
    return max(small, 2 * _ROUNDING * float(rows.abs().max()))


class Backward:
    """dL/dz of the front layer's output z, for one example at a time: d(x, y) = J(x)ᵀ(softmax(logits) - e_y)."""

    def __init__(self, model: nn.Module, weight: str, input_shape: tuple[int, ...]) -> None:
        self.model, self.shape = model, input_shape
        self.layer = model.get_submodule(weight.rpartition(".")[0])

    def at_cells(self, inputs: Tensor, cells: Cells, which: Tensor) -> Tensor:
        """(n, classes): what input k (n, d) puts into cell which[k], for every label that it could have."""
        logits, output = self._forward(inputs)
        p = logits.detach().softmax(dim=1)
        columns = []
        for label in range(p.shape[1]):
            rows = torch.autograd.grad(logits[:, label].sum(), output, retain_graph=True)[0]
            columns.append(cells.of(rows.T)[which, torch.arange(len(which))])
        jacobian = torch.stack(columns, dim=1)
        return (p * jacobian).sum(dim=1, keepdim=True) - jacobian

    def at_rows(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """(n, m): d of input k (n, d) with its label, for every row."""
        logits, output = self._forward(inputs)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return torch.autograd.grad(loss, output)[0]

    def _forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        handle = self.layer.register_forward_hook(lambda _module, _given, output: seen.append(output))
        try:
            logits = self.model(inputs.view(-1, *self.shape))
        finally:
            handle.remove()
        return logits, seen[0]
