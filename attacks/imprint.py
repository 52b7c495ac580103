# SPDX-License-Identifier: Apache-2.0
"""Reads what crafted weights have collected: bins, traps, blocks of clients, and the one example that was fished.

Which cells hold exactly one example is decided without the truth. What is read from a cell of one example is itself
an example: its values are in range, it falls into the very cell, its own gradient (for one of the labels) is what the
cell holds, and another query reads the same. A mixture of two fails one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedsim.attacks.cells import Backward, Cells, find_cells, noise_of
from fedsim.attacks.crafting import Front, find_front
from fedsim.attacks.fished import fished
from fedsim.attacks.matching import client_gradient, matching_loss, private_copy
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction, check_observation
from fedsim.errors import AttackError
from fedsim.scenario import ImprintAttack

_FORWARD = 2e-6  # a float32 client's d = dL/dz differs from ours in float64 by at least so much of the usual |d|
_SURE = 6.0  # standard deviations that noise does not reach


@dataclass(frozen=True, eq=False)
class Item:
    """One example: its input (d,), its label (None: not found), and how many queries read it."""

    input: Tensor
    label: int | None
    readings: int
    certified: bool
    score: float


def imprint(
    observation: Observation, knowledge: Knowledge, settings: ImprintAttack, *, seed: int = 0
) -> Reconstruction:
    """Read an update of crafted weights; how they were crafted is seen in the weights, or said by knowledge.active.

    Fowl et al. 2022 (bins), Boenisch et al. 2023 (traps), Wen et al. 2022 (fishing), Zhao et al. 2024 (clients).
    """
    check_observation(observation, knowledge)
    if knowledge.kind == "text":
        raise AttackError("imprint reads images and tables, and this is text; use attack text")
    kind = getattr(knowledge.active, "kind", None)
    if kind == "fishing":
        return fished(observation, knowledge, settings, seed)
    front = find_front(observation.model, knowledge.input_shape)
    cells = find_cells(
        observation.weights[front.weight], observation.weights[front.bias], hat=front.activation == "hardtanh"
    )
    model = private_copy(observation.model, torch.float64)
    if kind == "per-client" and observation.client is None:
        queries = int(getattr(knowledge.active, "queries", 1))
        return _per_client(observation, knowledge, front, cells, model, queries)
    items, notes = _peel(observation, knowledge, front, cells, model, torch.ones_like(cells.bias, dtype=torch.bool))
    return _reconstruction(observation, knowledge, items, notes)


def _per_client(
    observation: Observation, knowledge: Knowledge, front: Front, cells: Cells, model: nn.Module, queries: int
) -> Reconstruction:
    """Every client's block on its own, with the model that this client was sent: all other blocks dead."""
    sizes = torch.bincount(cells.group)
    ladders = [int(number) for number in (sizes >= 2).nonzero().flatten()]
    items: list[Item] = []
    notes: list[str] = []
    bias = model.get_parameter(front.bias)
    alive = bias.detach().clone()
    for block in range(len(ladders) // queries):
        mine = torch.isin(cells.group, torch.tensor(ladders[block * queries : (block + 1) * queries]))
        with torch.no_grad():
            bias.copy_(torch.where(mine, alive, -1e6))
        found, _ = _peel(observation, knowledge, front, cells, model, mine)
        notes.append(f"block {block + 1}: items {len(items) + 1} to {len(items) + len(found)}")
        items += found
    return _reconstruction(observation, knowledge, items, tuple(notes))


# --- peeling --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _State:
    """What is left in the cells: values (m, d) and (m,), the standard error of the latter (m,), and of a model's d."""

    inputs: Tensor
    deltas: Tensor
    error: Tensor
    forward: float = _FORWARD


def _peel(
    observation: Observation, knowledge: Knowledge, front: Front, cells: Cells, model: nn.Module, mine: Tensor
) -> tuple[list[Item], tuple[str, ...]]:
    gradient = client_gradient(observation)
    exact = gradient is not None and knowledge.defence.example_dp is None and knowledge.defence.compression is None
    source = gradient if gradient is not None else observation.gradient
    rows, row_deltas = source[front.weight].double(), source[front.bias].double()
    state = _State(cells.of(rows), cells.of(row_deltas), torch.zeros_like(row_deltas))
    noise = noise_of(state.deltas[mine], row_deltas[mine])
    state.error += noise
    backward = Backward(model, front.weight, knowledge.input_shape)
    items: list[Item] = []
    if exact:
        scales: list[float] = []
        if observation.batch_size and observation.clients == 1 and knowledge.defence.client_dp is None:
            scales.append(1.0 / observation.batch_size)
        while found := _explained(state, knowledge, cells, backward, mine, scales):
            found = [item for item in found if not _known(item.input, items)]
            if not found:
                break
            items += found
            _take_out(state, cells, backward, found, scales[0])
    rest = _leftover(state, knowledge, cells, mine, items, moving=gradient is None)
    silent = float((state.deltas[mine].abs() <= _SURE * state.error[mine]).double().mean())
    if exact and silent == 1.0 and len(items) == observation.batch_size:
        # Every cell is explained, and nobody is missing.
        items = [replace(item, certified=True, score=1.0) for item in items]
    route = "peeled by the model's own gradients" if items else "read cell by cell"
    return items + rest, (f"{route}; {silent:.0%} of the cells are left empty",)


def _candidates(
    state: _State, knowledge: Knowledge, cells: Cells, mine: Tensor, *, moving: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Cells (n,) whose content could be one example, that example (n, d), and its standard error (n,).

    Over several local steps the bounds of the cells move, all in step, so that only the range of the values is tested.
    """
    which = (mine & (state.deltas.abs() > _SURE * state.error)).nonzero().flatten()
    inputs = state.inputs[which] / state.deltas[which, None]
    error = state.error[which] / state.deltas[which].abs()
    good = cells.holds(which, inputs, _SURE * error + 1e-5) | moving
    if knowledge.bounds is not None:
        low, high = (bound.flatten() for bound in knowledge.bounds)
        room = (_SURE * error + (0.1 if moving else 1e-3))[:, None]
        good &= ((inputs >= low - room) & (inputs <= high + room)).all(dim=1)
    return which[good], inputs[good], error[good]


def _explained(
    state: _State, knowledge: Knowledge, cells: Cells, backward: Backward, mine: Tensor, scales: list[float]
) -> list[Item]:
    """Examples whose own gradient is what their cell holds; the factor between them (one over the batch) is found."""
    which, inputs, error = _candidates(state, knowledge, cells, mine)
    if not len(which):
        return []
    own = backward.at_cells(inputs, cells, which)
    ratio = state.deltas[which, None] / torch.where(own.abs() > 1e-12, own, torch.nan)
    usual = 1 + state.deltas[which].abs().median() / state.deltas[which].abs()
    if not scales and (scale := _common(ratio, _SURE * (error + _FORWARD * usual))) is not None:
        scales.append(scale)
    if not scales:
        return []
    apart = torch.nan_to_num((ratio / scales[0] - 1).abs(), nan=torch.inf)
    best = apart.min(dim=1)
    state.forward = max(state.forward, _rounding(best.values / usual))
    room = _SURE * (error + state.forward * usual)
    # A mixture passes by chance with about this probability for each cell: too high under noise to mean anything.
    chance = 2 * room * own.shape[1]
    fits = (best.values < room) & (chance < 0.2)
    items = []
    for members in _clusters(inputs[fits], error[fits], 1e-3):
        chosen = fits.nonzero().flatten()[members]
        weight = error[chosen].clamp_min(1e-12) ** -2
        value = (weight[:, None] * inputs[chosen]).sum(dim=0) / weight.sum()
        lead = int(chosen[error[chosen].argmin()])
        readings = len(set(cells.group[which[chosen]].tolist()))
        # In two queries the same two examples mix in different proportions, unless there are only two classes.
        proven = readings >= 2 and own.shape[1] > 2
        doubt = float(chance[chosen].min()) ** (readings if proven else 1)
        items.append(Item(value, int(best.indices[lead]), readings, proven and doubt < 1e-3, max(0.0, 1 - doubt)))
    return items


def _common(ratio: Tensor, room: Tensor) -> float | None:
    """The factor that most cells agree upon, if at least three do."""
    values, _ = ratio[ratio.isfinite() & (ratio > 0)].sort()
    if not len(values):
        return None
    width = 2 * float(room.median())
    upper = torch.searchsorted(values, values * (1 + width), right=True)
    votes = upper - torch.arange(len(values))
    top = int(votes.argmax())
    return float(values[top : int(upper[top])].median()) if int(votes[top]) >= 3 else None


def _rounding(apart: Tensor) -> float:
    """How far a client's float32 is from ours, from the cells that fit closely: most of those that fit to 1e-3."""
    close = apart[apart < 1e-3]
    return float(close.median()) if len(close) >= 8 else _FORWARD


def _take_out(state: _State, cells: Cells, backward: Backward, items: list[Item], scale: float) -> None:
    """Subtract what known examples have put into every cell."""
    inputs = torch.stack([item.input for item in items])
    labels = torch.tensor([item.label for item in items])
    deltas = scale * cells.of(backward.at_rows(inputs, labels).T)
    state.inputs -= deltas @ inputs
    state.deltas -= deltas.sum(dim=1)
    usual = deltas.abs().sum(dim=1) + deltas.abs().amax(dim=0).median() * (deltas.abs() > 0).any(dim=1)
    state.error += state.forward * usual


def _leftover(
    state: _State, knowledge: Knowledge, cells: Cells, mine: Tensor, known: list[Item], *, moving: bool
) -> list[Item]:
    """Examples that no gradient can confirm (noise, several local steps, clipped examples): by agreement and by odds.

    If occupied cells were filled at random, a cell of rate r holds one example with probability r/(e^r - 1), and of
    the mixtures about half are out of range or in the wrong cell.
    """
    which, inputs, error = _candidates(state, knowledge, cells, mine, moving=moving)
    used = float((state.deltas[mine].abs() > _SURE * state.error[mine]).double().mean())
    rate = -math.log(max(1 - used, 1e-3))
    alone = rate / math.expm1(rate) if rate > 0 else 1.0
    odds = alone / (alone + (1 - alone) / 2)
    items = []
    for members in _clusters(inputs, error, 0.1 if moving else 1e-3):
        readings = len(set(cells.group[which[members]].tolist()))
        if known and readings == 1:  # its gradient was tried and did not fit: a mixture
            continue
        weight = error[members].clamp_min(1e-12) ** -2
        lead = members[error[members].argmin()]
        value = inputs[lead] if moving else (weight[:, None] * inputs[members]).sum(dim=0) / weight.sum()
        if _known(value, known):
            continue
        score = 1 - (1 - odds) ** readings
        items.append(Item(value, None, readings, False, min(score, 0.99)))
    return items


def _known(value: Tensor, items: list[Item]) -> bool:
    return any(bool((value - item.input).norm() < 0.02 * value.norm()) for item in items)


def _clusters(inputs: Tensor, error: Tensor, tolerance: float) -> list[Tensor]:
    """Indices of the inputs (n, d) that are the same within their errors (n,), the most precise first."""
    left = error.argsort().tolist()
    clusters = []
    size = max(inputs.shape[1], 1) ** 0.5
    while left:
        lead, others = left[0], torch.tensor(left)
        apart = (inputs[others] - inputs[lead]).norm(dim=1)
        near = apart < tolerance * inputs[lead].norm() + 2 * size * (error[others] + error[lead])
        clusters.append(others[near])
        left = others[~near].tolist()
    return clusters


# --- the result -----------------------------------------------------------------------------------------------------


def _reconstruction(
    observation: Observation, knowledge: Knowledge, items: list[Item], notes: tuple[str, ...]
) -> Reconstruction:
    inputs = torch.zeros(0, *knowledge.input_shape)
    if items:
        inputs = torch.stack([item.input for item in items]).float().view(-1, *knowledge.input_shape)
    labels = None
    if items and all(item.label is not None for item in items):
        labels = torch.tensor([item.label for item in items])
    loss = math.nan
    if labels is not None and observation.client is not None:
        loss = matching_loss(observation, inputs, labels, share=len(inputs) / (observation.batch_size or len(inputs)))
    return Reconstruction(
        "imprint",
        inputs,
        labels,
        loss,
        score=torch.tensor([item.score for item in items]),
        certified=torch.tensor([item.certified for item in items], dtype=torch.bool),
        notes=notes,
    )
