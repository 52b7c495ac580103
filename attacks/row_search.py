# SPDX-License-Identifier: Apache-2.0
"""Rows of a table, one at a time, each proved by the span of the gradients.

The gradient of a linear layer is D'[H, 1], so the features of *every single* example lie in its row space, and its
d in the column space (the fact behind DAGER, Petrov et al. 2024, there for tokens). For a table this decides rows:
a row has few cells, most of them discrete, and must pass one equation for each dimension that the batch leaves free,

    N_l [h_l(x), 1] = 0,  N_l a basis of the null space of layer l's gradient,

for the raw input and for every hidden layer that is wider than the batch. The unknowns of one row replace those of the
whole batch. Walkers search for roots: Gauss-Newton over the numbers, annealed exchange of one category at a time, every
exchange judged after the numbers would have been refitted (variable projection). A root is a row of the batch when
Wedderburn's rank reduction gives it the weight that a row has, 1/b: alpha = 1 / ([h, 1]' G^+ d). Rows found are
subtracted from the gradient, which leaves fewer rows in the same space: the rest becomes easier.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.attacks.dense_stack import DenseStack
from fedsim.attacks.row_proof import Found, polished, roots, weighed, without
from fedsim.attacks.row_spans import Cells, Span, cells_of, enough, exchanges, noise_of, residual, spans_of, values
from fedsim.data.table import TableEncoding
from fedsim.randomness import stream

_OPTIONS = 160  # exchanges looked at in one sweep
_ROUND = 8  # sweeps between two looks at the walkers
_LIFE = 24  # sweeps, after which a walker begins anew
_PATIENCE = 6  # rounds without a new row, after which the search ends


@dataclass(frozen=True, eq=False)
class FoundRows:
    """Rows with their labels, and the gradient that they leave unexplained."""

    rows: Found
    rest: list[Tensor]
    """The gradient of each layer without the rows found."""
    scale: float
    """The factor that the gradient was scaled with (clipping); 1 if it was not."""


def find_rows(
    stack: DenseStack,
    gradient: list[Tensor],
    encoding: TableEncoding,
    *,
    count: int,
    scale: float | None = 1.0,
    bounds: tuple[Tensor, Tensor] | None = None,
    walkers: int = 256,
    sweeps: int = 240,
    seed: int = 0,
    deadline: float | None = None,
    noise: float = 0.0,
    drift: float = 0.0,
) -> FoundRows:
    """Rows of a batch of `count` from the gradient of each layer (m_l, m_(l-1) + 1), weight and bias side by side.

    `scale` is the known factor of the gradient, None for an unknown one. `noise` is the known spectral size of what
    was added to it, relative to it; `drift` the relative movement of the weights, if the gradient is a mean over
    several local steps: then weights of rows are approximate, and nothing is subtracted. Stops after `sweeps` sweeps
    of the walkers, or once no row is left.
    """
    rng = torch.Generator().manual_seed(int(stream(seed, "attack", 5).integers(2**62)))
    noises = [noise_of(matrix, count, noise) for matrix in gradient]
    cells = cells_of(gradient[0], encoding, bounds, noises[0] if noise else 0.0)
    found = Found.empty(cells.width, cells.categorical)
    rest, state, start, idle = gradient, None, 0, 0
    while True:
        left = count - int(found.copies.sum())
        spans = spans_of(stack, rest, noises, cells, drift)
        full = [span for span in spans if span.rank >= left]
        if idle and full:  # two rows with the same d share one dimension there, and neither lies in it
            spans = full
        late = deadline is not None and time.monotonic() > deadline
        if left <= 0 or not enough(spans, cells) or start >= sweeps or idle > _PATIENCE or late:
            break
        state = _walk(stack, spans, cells, state, walkers, start, rng)
        start += _ROUND
        candidates = roots(stack, spans, encoding, cells.rows(*state), found.inputs)
        new, scale = weighed(stack, spans, candidates, cells, count, scale)
        idle = 0 if len(new.inputs) else idle + 1
        found = found.joined(new)
        if not drift:
            rest = without(stack, gradient, found, scale or 1.0, count)
    if left == 0 and not drift:
        found = polished(stack, gradient, found, encoding, cells, scale or 1.0)
        rest = without(stack, gradient, found, scale or 1.0, count)
    return FoundRows(found, rest, scale or 1.0)


def _start(cells: Cells, walkers: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Any present category; numbers around the mean of a standardised column."""
    chosen = [cells.options[cells.column == c] for c in range(cells.categorical)]
    picks = [places[torch.randint(len(places), (walkers,), generator=rng)] for places in chosen]
    codes = torch.stack(picks, 1) if picks else torch.zeros(walkers, 0).long()
    numbers = torch.randn(walkers, len(cells.numbers), generator=rng, dtype=torch.float64).clamp(-1.5, 1.5)
    return codes, numbers.clamp(cells.low, cells.high)


def _walk(
    stack: DenseStack,
    spans: list[Span],
    cells: Cells,
    state: tuple[Tensor, Tensor] | None,
    walkers: int,
    start: int,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """A round of sweeps; walkers that have lived long or stand on a row that is already subtracted begin anew."""
    fresh = _start(cells, walkers, rng)
    if state is None:
        state = fresh
    else:
        done = residual(stack, spans, cells.rows(*state), cells)[0].square().sum(1) < (
            1e-3 if spans[-1].drift else 1e-8
        )
        anew = done | (torch.arange(walkers) * _LIFE // walkers // _ROUND == start // _ROUND % (_LIFE // _ROUND))
        state = (torch.where(anew[:, None], fresh[0], state[0]), torch.where(anew[:, None], fresh[1], state[1]))
    codes, numbers = state
    for sweep in range(_ROUND):
        numbers = _refit(stack, spans, cells, codes, numbers)
        if codes.shape[1]:
            codes = _exchange(stack, spans, cells, codes, numbers, sweep, rng)
    for _ in range(3):
        numbers = _refit(stack, spans, cells, codes, numbers)
    return codes, numbers


def _refit(stack: DenseStack, spans: list[Span], cells: Cells, codes: Tensor, numbers: Tensor) -> Tensor:
    """One Gauss-Newton step of the numbers within their bounds, halved where it would not help."""
    r, jacobian = residual(stack, spans, cells.rows(codes, numbers), cells)
    transposed = jacobian.transpose(1, 2)
    normal = transposed @ jacobian
    ridge = 1e-9 + 1e-6 * normal.diagonal(dim1=1, dim2=2).mean(1)
    normal = normal + ridge[:, None, None] * torch.eye(normal.shape[1], dtype=r.dtype)
    step = torch.linalg.solve(normal, transposed @ r[:, :, None])[:, :, 0]
    best, lowest = numbers, r.square().sum(1)
    for share in (1.0, 0.4, 0.1):
        trial = (numbers - share * step).clamp(cells.low, cells.high)
        value = values(spans, stack.forward(cells.rows(codes, trial))[0]).square().sum(1)
        better = value < lowest
        best, lowest = torch.where(better[:, None], trial, best), torch.where(better, value, lowest)
    return best


def _exchange(
    stack: DenseStack,
    spans: list[Span],
    cells: Cells,
    codes: Tensor,
    numbers: Tensor,
    sweep: int,
    rng: torch.Generator,
) -> Tensor:
    """Each walker changes one category, or none: by chance in proportion to exp(-f/T), greedily in the end."""
    some = torch.randperm(len(cells.options), generator=rng)[:_OPTIONS]
    f, base = exchanges(stack, spans, cells, codes, numbers, some)
    temperature = base.clamp_min(1e-12) * 0.15 * 0.8**sweep
    odds = torch.softmax((f.amin(1, keepdim=True) - f) / temperature[:, None], 1)
    pick = torch.multinomial(odds, 1, generator=rng)[:, 0]
    uphill = torch.rand(len(codes), generator=rng) < (0.3 if sweep < _ROUND - 3 else 0.0)
    go = (f.gather(1, pick[:, None])[:, 0] < base) | (uphill & (base > 1e-6))
    changed = codes.clone()
    changed[torch.arange(len(codes)), cells.column[some][pick]] = cells.options[some][pick]
    return torch.where(go[:, None], changed, codes)
