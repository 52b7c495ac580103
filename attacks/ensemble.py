# SPDX-License-Identifier: Apache-2.0
"""An ensemble of relaxed reconstructions of a table, matched and pooled.

TabLeak (Vero et al. 2023, sections 4.1 to 4.3): a categorical cell is a softmax, a number a sigmoid between its bounds;
many starts minimise the distance of gradients; the members' rows are matched to the best member by optimal assignment,
cells are pooled by the median, and the entropy of a cell's histogram over the members says how sure it is. Here all
members are replicas of one batched computation, and categories that the gradient shows to be absent are left out.

Agreement is not probability: members agree on what is easy and on what is common. See `cell_confidence`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedsim.attacks.matching import Target, cosine, squared
from fedsim.attacks.relaxation import project, table_relaxation
from fedsim.data.table import NumericColumn, TableEncoding
from fedsim.randomness import stream

TOLERANCE = 0.319
"""A number is right within this many standard deviations of its column (TabLeak, section 5)."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Rows to find: the gradient of their mean loss, and what is known about them."""

    model: nn.Module
    """With parameters that want no gradient, in evaluation mode."""
    target: Target
    labels: Tensor
    """(n,) of the rows, in any order."""
    encoding: TableEncoding
    present: Tensor
    """(F,) bool: the places that are not zero in the whole batch."""
    bounds: tuple[Tensor, Tensor] | None
    """(F,) each, of the numbers."""


@dataclass(frozen=True, eq=False)
class Pooled:
    """What an ensemble agrees on."""

    inputs: Tensor
    """(n, F) valid rows."""
    agreement: Tensor
    """(n, columns) in [0, 1]: 1 - entropy of the cell's histogram over the members / its largest value."""
    loss: float
    """Distance of the pooled rows' gradient."""
    members: Tensor
    """(R, n, F) the valid rows of every member, in the order of the pooled rows."""


# --- members --------------------------------------------------------------------------------------------------------


def attack_rows(problem: Problem, starts: int, iterations: int, seed: int, deadline: float | None = None) -> Pooled:
    """Optimise all members at once, project them to valid rows, match and pool them."""
    members = _optimise(problem, starts, iterations, seed, deadline)
    valid = project(members, problem.encoding)
    losses = _distances(problem, valid)
    best = int(losses.argmin())
    matched = _match(members, valid, best, problem)
    return _pool(matched, problem)


def gradients(model: nn.Module, x: Tensor, labels: Tensor) -> list[Tensor]:
    """dL/dw of each member's mean cross-entropy, x (R, n, F), labels (n,): a list of (R, *shape), differentiable."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], rows: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (rows,)), labels)

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    return [found[name] for name in parameters]


def _distances(problem: Problem, x: Tensor) -> Tensor:
    with torch.no_grad():
        return squared(gradients(problem.model, x, problem.labels), problem.target)


def _optimise(problem: Problem, starts: int, iterations: int, seed: int, deadline: float | None) -> Tensor:
    """(R, n, F) relaxed rows, by Adam on the sign of the gradient; the step ends at a tenth of where it began."""
    rng = stream(seed, "attack", 6)
    rows, width = len(problem.labels), len(problem.present)
    z = torch.from_numpy(rng.uniform(-1, 1, (starts, rows, width))).float().requires_grad_()
    optimiser = torch.optim.Adam([z], lr=0.06)
    relax = table_relaxation(problem.encoding, problem.present, problem.bounds)
    for step in range(iterations):
        done = step / iterations
        optimiser.param_groups[0]["lr"] = 0.06 * (1 - 0.9 * done)
        found = gradients(problem.model, relax(z), problem.labels)
        objective = cosine(found, problem.target).sum()
        (z.grad,) = torch.autograd.grad(objective, z)
        z.grad.sign_()
        optimiser.step()
        if deadline is not None and time.monotonic() > deadline:
            break
    return relax(z).detach()


# --- matching and pooling -------------------------------------------------------------------------------------------


def wrong_cells(a: Tensor, b: Tensor, encoding: TableEncoding) -> Tensor:
    """(..., columns) bool: which cells of valid rows differ, numbers by more than the tolerance."""
    cells = []
    for column, where in zip(encoding.columns, encoding.slices().values(), strict=True):
        apart = (a[..., where] - b[..., where]).abs().amax(-1)
        cells.append(apart > (TOLERANCE if isinstance(column, NumericColumn) else 0.5))
    return torch.stack(cells, -1)


def _match(members: Tensor, valid: Tensor, best: int, problem: Problem) -> Tensor:
    """The members' rows in the order of the best member's; rows of different labels are never matched."""
    order = []
    foreign = (problem.labels[:, None] != problem.labels[None]).double() * 1e3
    for rows in valid:
        cost = wrong_cells(valid[best][:, None], rows[None], problem.encoding).double().sum(2) + foreign
        order.append(torch.from_numpy(linear_sum_assignment(cost.numpy())[1]))
    return torch.stack([rows[take] for rows, take in zip(members, order, strict=True)])


def _pool(members: Tensor, problem: Problem) -> Pooled:
    """Median of the relaxed cells, projected; the histogram's bins for a number are as wide as its tolerance."""
    encoding = problem.encoding
    pooled = project(members.median(0).values, encoding)
    agreement = []
    for column, where in zip(encoding.columns, encoding.slices().values(), strict=True):
        if isinstance(column, NumericColumn):
            offset = (members[..., where][..., 0] - pooled[..., where][..., 0]) / (2 * TOLERANCE)
            bins = offset.round().clamp(-8, 8).long() + 8
            counts = F.one_hot(bins, 17).double().mean(0)
        else:
            counts = F.one_hot(members[..., where].argmax(-1), column.width).double().mean(0)
        entropy = -torch.xlogy(counts, counts).sum(-1)
        agreement.append(1 - entropy / max(1e-9, torch.tensor(float(min(len(members), counts.shape[-1]))).log().item()))
    valid = project(members, encoding)
    loss = float(_distances(problem, pooled[None])[0])
    return Pooled(pooled, torch.stack(agreement, 1).clamp(0, 1), loss, valid)
