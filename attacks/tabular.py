# SPDX-License-Identifier: Apache-2.0
"""The rows of a table from one gradient: exact where the gradient decides them, an ensemble where it does not.

1. Row search (`row_search`): single rows that pass the span test of every wide layer, each with a proof.
2. Exact inversion of the first layer (SPEAR, Dimitrov et al. 2024) of what they leave, where few rows are left.
3. The ensemble (`ensemble`; TabLeak, Vero et al. 2023) on the gradient from which all rows found are subtracted.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.attacks.cell_confidence import SURE, found_confidence, pooled_confidence
from fedsim.attacks.dense_stack import DenseStack, dense_stack
from fedsim.attacks.ensemble import Pooled, Problem, attack_rows
from fedsim.attacks.labels import count_labels, nearest_counts
from fedsim.attacks.matching import client_gradient, matching_loss, private_copy, target_of
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction, check_observation
from fedsim.attacks.relaxation import project
from fedsim.attacks.row_proof import Found
from fedsim.attacks.row_search import FoundRows, find_rows
from fedsim.attacks.row_spans import snap
from fedsim.attacks.shadow_rows import shadow_shift
from fedsim.data.table import NumericColumn, TableEncoding
from fedsim.errors import AttackError
from fedsim.scenario import TabularAttack

_FEW = 10  # rows, up to which exact inversion costs seconds
_UNEXPLAINED = 0.1  # of what the rows found leave, above which agreement on the others is no evidence
_CLOSE = 0.05  # standard deviations that a number of a certified row may be off
_VOID = 0.9  # the most that is said of found cells once the whole batch contradicts some of them
_WRONG_WEIGHT = 1e-3  # matching loss of a complete batch, above which nothing is proved


@dataclass(frozen=True, eq=False)
class _Part:
    """Some of the rows, from one route."""

    inputs: Tensor
    labels: Tensor
    cells: Tensor
    certified: Tensor
    note: str


def tabular(
    observation: Observation, knowledge: Knowledge, settings: TabularAttack, *, seed: int = 0
) -> Reconstruction:
    """Rows in the encoded space, each valid (one category in every column), with a confidence for every cell.

    A certified row is proved in every category, and its numbers are within 0.03 standard deviations.
    """
    check_observation(observation, knowledge)
    if knowledge.kind != "table":
        raise AttackError(
            f"attack tabular reads tables, but the data are of kind {knowledge.kind}; choose another attack"
        )
    deadline = None if settings.seconds is None else time.monotonic() + settings.seconds
    encoding = _encoding(knowledge)
    count = observation.batch_size or observation.work.batch(observation.examples or 1)
    gradient = client_gradient(observation)
    steps = 1 if gradient is not None else max(1, observation.work.local_steps(count))
    gradient = gradient or {name: each / steps for name, each in observation.gradient.items()}
    parts: list[_Part] = []
    stack = dense_stack(observation.model, knowledge.input_shape)
    left, scale = gradient, 1.0
    if stack is not None:
        found = _rows(stack, gradient, encoding, observation, knowledge, settings, count, seed, deadline)
        parts = [_found_part(found.rows, encoding, count)] if len(found.rows.inputs) else []
        inverted, unexplained = _inverted(stack, found, encoding, count, seed)
        parts += inverted
        left, scale = stack.split(unexplained), found.scale
    missing = count - sum(len(part.inputs) for part in parts)
    if missing > 0:
        known = torch.cat([part.labels for part in parts]) if parts else torch.zeros(0).long()
        labels = _labels_left(observation, knowledge, known, count, missing)
        mean = {name: each * (count / missing / scale) for name, each in left.items()}
        several, rest = steps > 1, bool(parts)
        parts.append(_ensemble(observation, knowledge, settings, encoding, mean, labels, seed, deadline, several, rest))
    return _joined(observation, knowledge, parts, scale)


def _encoding(knowledge: Knowledge) -> TableEncoding:
    """That of the table; a table of which nothing is known has numeric columns only."""
    if isinstance(knowledge.encoding, TableEncoding):
        return knowledge.encoding
    width = math.prod(knowledge.input_shape)
    return TableEncoding(tuple(NumericColumn(f"x{i}", 0.0, 1.0, None, integer=False) for i in range(width)))


# --- exact ----------------------------------------------------------------------------------------------------------


def _rows(
    stack: DenseStack,
    gradient: dict[str, Tensor],
    encoding: TableEncoding,
    observation: Observation,
    knowledge: Knowledge,
    settings: TabularAttack,
    count: int,
    seed: int,
    deadline: float | None,
) -> FoundRows:
    """The row search with what is known of the gradient's scale and noise."""
    target = target_of(observation, knowledge, gradient)
    several = client_gradient(observation) is None
    joined = stack.joined(gradient)
    size = max(float(torch.linalg.matrix_norm(matrix, 2)) for matrix in joined)
    # the largest singular value of an m x d matrix of noise is about sigma (sqrt(m) + sqrt(d))
    wide = max(math.sqrt(matrix.shape[0]) + math.sqrt(matrix.shape[1]) for matrix in joined)
    return find_rows(
        stack,
        joined,
        encoding,
        count=count,
        scale=None if target.scaled or (several and observation.work.momentum > 0) else 1.0,
        bounds=knowledge.bounds,
        walkers=settings.walkers,
        sweeps=settings.sweeps,
        seed=seed,
        deadline=deadline,
        noise=(target.deviation + target.half_step) * wide / size,
        drift=_moved(stack, observation) / 8 if several else 0.0,
    )


def _moved(stack: DenseStack, observation: Observation) -> float:
    """The largest relative movement of a layer's weights, in the spectral norm."""
    sizes = [torch.linalg.matrix_norm(weight, 2) for weight in stack.weights]
    moves = [torch.linalg.matrix_norm(observation.update[layer.weight].double(), 2) for layer in stack.layers]
    return max(float(move / size) for move, size in zip(moves, sizes, strict=True))


def _found_part(found: Found, encoding: TableEncoding, count: int) -> _Part:
    """The rows of the search, each as often as it occurs, the surest first; no more than the batch has."""
    times = found.copies
    cells = found_confidence(found, encoding).repeat_interleave(times, 0)
    proved = found.proved.repeat_interleave(times)
    if len(cells) > count:  # then some of them are false, and only the proof tells which are not
        cells = torch.where(proved[:, None], cells, cells.clamp_max(_VOID))
    first = cells.log().sum(1).argsort(descending=True, stable=True)[:count] if len(cells) > count else slice(None)
    certified = proved[first]
    return _Part(
        found.inputs.float().repeat_interleave(times, 0)[first],
        found.labels.repeat_interleave(times)[first],
        cells.float()[first],
        certified,
        f"{len(certified)} rows by the span of the gradients, {int(certified.sum())} of them proved",
    )


def _inverted(
    stack: DenseStack, found: FoundRows, encoding: TableEncoding, count: int, seed: int
) -> tuple[list[_Part], list[Tensor]]:
    """The first layer inverted exactly for the rows that are left, if they are few; only rows with its certificate."""
    from fedsim.attacks.exact_layer import invert_layer

    left = count - int(found.rows.copies.sum())
    if not 0 < left <= _FEW or len(stack.weights) < 2 or not isinstance(stack.functions[0], torch.nn.ReLU):
        return [], found.rest
    weight = found.rest[0] * (count / left)
    bias = None if stack.layers[0].bias is None else weight[:, -1]
    batch = invert_layer(
        stack.weights[0], stack.biases[0] if bias is not None else None, weight[:, :-1], bias, seed=seed
    )
    every_one = batch.rank == left and batch.complete  # else a row may be the mean of several
    sure = batch.certified & (batch.radius <= _CLOSE) & every_one
    x = snap(project(batch.inputs[sure], encoding), encoding)
    near = (x - batch.inputs[sure]).abs().amax(1) < 0.05
    x, outputs = x[near], batch.output_gradients[sure][near]
    if not len(x):
        return [], found.rest
    _, slopes, logits = stack.forward(x)
    fits = [
        torch.nn.functional.cosine_similarity(stack.deltas(slopes, logits, torch.full((len(x),), y))[0], outputs)
        for y in range(logits.shape[1])
    ]
    labels = torch.stack(fits, 1).argmax(1)
    part = stack.gradient(x, labels, torch.full((len(x),), found.scale / count, dtype=x.dtype))
    rest = [each - mine for each, mine in zip(found.rest, part, strict=True)]
    sure_cells = torch.full((len(x), len(encoding.columns)), SURE)
    note = f"{len(x)} rows by exact inversion of the first layer"
    return [_Part(x.float(), labels, sure_cells, torch.ones(len(x)).bool(), note)], rest


# --- ensemble -------------------------------------------------------------------------------------------------------


def _labels_left(observation: Observation, knowledge: Knowledge, known: Tensor, count: int, missing: int) -> Tensor:
    """The labels of the rows that are not found yet."""
    if knowledge.labels is not None:
        counts = torch.bincount(knowledge.labels.flatten().long(), minlength=knowledge.classes)
    else:
        counts = count_labels(observation, knowledge, count).counts
    left = (counts - torch.bincount(known, minlength=knowledge.classes)).clamp_min(0)
    if int(left.sum()) != missing:
        left = nearest_counts(left.double() + 1e-6, missing)
    return torch.repeat_interleave(torch.arange(knowledge.classes), left.long())


def _ensemble(
    observation: Observation,
    knowledge: Knowledge,
    settings: TabularAttack,
    encoding: TableEncoding,
    gradient: dict[str, Tensor],
    labels: Tensor,
    seed: int,
    deadline: float | None,
    several: bool,
    rest: bool,
) -> _Part:
    """All rows that are left at once; of an update of several steps only the direction is matched.

    `rest` says that other rows were subtracted from the gradient.
    """
    target = target_of(observation, knowledge, gradient)
    target = replace(target, scaled=target.scaled or several)
    model = private_copy(observation.model, torch.float32).eval().requires_grad_(False)
    first = next(iter(gradient.values()))
    clean = not target.deviation and knowledge.defence.compression is None
    present = torch.ones(math.prod(knowledge.input_shape), dtype=torch.bool)
    if clean and first.dim() == 2 and first.shape[1] == len(present):
        raw = observation.update[next(iter(gradient))]
        present = raw.ne(0).any(0)
    problem = Problem(model, target, labels, encoding, present, knowledge.bounds)
    pooled = attack_rows(problem, settings.starts, settings.iterations, seed, deadline)
    cells = pooled.agreement
    if settings.calibrate:
        cells = pooled_confidence(pooled, problem, _shift(problem, pooled, settings, seed, deadline))
    if rest and pooled.loss > _UNEXPLAINED:  # what is left is then also the errors of the rows that were subtracted
        cells = cells.clamp_max(0.5)
    note = f"{len(labels)} rows by an ensemble of {settings.starts} members" + (
        "" if settings.calibrate else ", confidence is bare agreement"
    )
    return _pooled_part(pooled, labels, cells, encoding, note)


def _shift(
    problem: Problem, pooled: Pooled, settings: TabularAttack, seed: int, deadline: float | None
) -> float | None:
    """What a shadow batch says about this network and table; None: there was no time to attack it as long."""
    if deadline is not None and time.monotonic() > deadline:
        return None
    shift = shadow_shift(problem, pooled, settings.iterations, seed, deadline)
    return None if deadline is not None and time.monotonic() > deadline else shift


def _pooled_part(pooled: Pooled, labels: Tensor, cells: Tensor, encoding: TableEncoding, note: str) -> _Part:
    x = snap(pooled.inputs.double(), encoding).float()
    return _Part(x, labels, cells.float(), torch.zeros(len(x), dtype=torch.bool), note)


def _joined(observation: Observation, knowledge: Knowledge, parts: list[_Part], scale: float) -> Reconstruction:
    """All parts, with the matching loss of the whole; a clipped gradient is compared at the scale that was found."""
    inputs = torch.cat([part.inputs for part in parts])
    labels = torch.cat([part.labels for part in parts])
    cells = torch.cat([part.cells for part in parts]).clamp(0, 1)
    certified = torch.cat([part.certified for part in parts])
    sent = {name: each / scale for name, each in observation.update.items()}
    loss = matching_loss(replace(observation, update=sent), inputs, labels)
    notes = tuple(part.note for part in parts)
    if len(parts) == 1 and certified.any() and loss > _WRONG_WEIGHT:
        certified, cells = torch.zeros_like(certified), cells.clamp_max(_VOID)
        notes += (f"nothing is certified, because the whole batch leaves a matching loss of {loss:.1e}",)
    return Reconstruction(
        attack="tabular",
        inputs=inputs,
        labels=labels,
        loss=loss,
        confidence=cells.double().prod(1).float(),
        cells=cells,
        certified=certified,
        label_counts=torch.bincount(labels, minlength=knowledge.classes),
        notes=notes,
    )
