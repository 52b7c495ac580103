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

from fedsim.attacks.cell_confidence import (
    EVENT,
    POOLED,
    order_of,
    pooled_evidence,
    proved_evidence,
    searched_evidence,
)
from fedsim.attacks.dense_stack import DenseStack, dense_stack
from fedsim.attacks.ensemble import Problem, attack_rows
from fedsim.attacks.labels import count_labels, nearest_counts
from fedsim.attacks.matching import client_gradient, matching_loss, private_copy, target_of
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction, check_observation
from fedsim.attacks.relaxation import project
from fedsim.attacks.row_proof import Found
from fedsim.attacks.row_search import FoundRows, find_rows
from fedsim.attacks.row_spans import snap
from fedsim.attacks.shadow_client import unexplained
from fedsim.attacks.shadow_rows import Batch, bounds_with_shadow
from fedsim.data.table import NumericColumn, TableEncoding
from fedsim.errors import AttackError
from fedsim.randomness import stream
from fedsim.scenario import TabularAttack

_FEW = 10  # rows, up to which exact inversion costs seconds
_CLOSE = 0.05  # standard deviations that a number of a certified row may be off
_WRONG_WEIGHT = 1e-3  # matching loss of a complete batch, above which nothing is proved


@dataclass(frozen=True, eq=False)
class _Part:
    """Some of the rows, from one route."""

    inputs: Tensor
    labels: Tensor
    evidence: Tensor
    """(n, columns, len(EVIDENCE)): see `cell_confidence`."""
    certified: Tensor
    note: str
    member: Tensor | None = None
    """(n, F): the rows of one member of the ensemble, as valid as those of the pool."""


def tabular(
    observation: Observation, knowledge: Knowledge, settings: TabularAttack, *, seed: int = 0
) -> Reconstruction:
    """Valid rows in the encoded space (one category in every column); bounds of the probability that a cell is right.

    A certified row is proved in every category, and its numbers are within 0.03 standard deviations.
    """
    check_observation(observation, knowledge)
    if knowledge.kind != "table":
        raise AttackError(
            f"attack tabular reads tables, but the data are of kind {knowledge.kind}; choose another attack"
        )
    deadline = None if settings.seconds is None else time.monotonic() + settings.seconds

    def attack(seen: Observation) -> Batch:
        return find_batch(seen, knowledge, settings, seed, deadline)

    batch = attack(observation)
    if not settings.calibrate:
        return _reconstruction(knowledge, batch, None, "no probability that a cell is right: calibrate is false")
    cells, note = bounds_with_shadow(batch, attack, observation, knowledge, _encoding(knowledge), seed, deadline)
    return _reconstruction(knowledge, batch, cells, note)


def find_batch(
    observation: Observation, knowledge: Knowledge, settings: TabularAttack, seed: int, deadline: float | None
) -> Batch:
    """All rows, each by the surest route that finds it."""
    encoding = _encoding(knowledge)
    count = observation.batch_size or observation.work.batch(observation.examples or 1)
    gradient = client_gradient(observation)
    several = gradient is None
    steps = max(1, observation.work.local_steps(count)) if several else 1
    gradient = gradient or {name: each / steps for name, each in observation.gradient.items()}
    parts: list[_Part] = []
    stack = dense_stack(observation.model, knowledge.input_shape)
    left, scale = gradient, 1.0
    if stack is not None:
        found = _rows(stack, gradient, encoding, observation, knowledge, settings, count, seed, deadline)
        parts = [_found_part(found.rows, encoding, count)] if len(found.rows.inputs) else []
        inverted, unexplained = ([], found.rest) if several else _inverted(stack, found, encoding, count, seed)
        parts += inverted
        left, scale = stack.split(unexplained), found.scale
    missing = count - sum(len(part.inputs) for part in parts)
    if missing > 0:
        known = torch.cat([part.labels for part in parts]) if parts else torch.zeros(0).long()
        labels = _labels_left(observation, knowledge, known, count, missing)
        mean = {name: each * (count / missing / scale) for name, each in left.items()}
        parts.append(_ensemble(observation, knowledge, settings, encoding, mean, labels, seed, deadline, several))
    return _joined(observation, parts, scale)


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
    size = max(1e-30, *(float(torch.linalg.matrix_norm(matrix, 2)) for matrix in joined))
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
    evidence = searched_evidence(found, encoding).repeat_interleave(times, 0)
    proved = found.proved.repeat_interleave(times)
    off = found.error.amax(1).repeat_interleave(times)
    first = (off - 10 * proved.double()).argsort(stable=True)[:count]
    certified = proved[first]
    return _Part(
        found.inputs.float().repeat_interleave(times, 0)[first],
        found.labels.repeat_interleave(times)[first],
        evidence[first],
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
    x, outputs = x[near][:left], batch.output_gradients[sure][near][:left]
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
    note = f"{len(x)} rows by exact inversion of the first layer"
    proved = proved_evidence(len(x), encoding)
    return [_Part(x.float(), labels, proved, torch.ones(len(x)).bool(), note)], rest


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
) -> _Part:
    """All rows that are left at once; of an update of several steps only the direction is matched."""
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
    x = snap(pooled.inputs.double(), encoding).float()
    member = pooled.members[int(stream(seed, "attack", 8).integers(len(pooled.members)))]
    note = f"{len(labels)} rows by an ensemble of {settings.starts} members"
    return _Part(x, labels, pooled_evidence(pooled, problem), torch.zeros(len(x), dtype=torch.bool), note, member)


def _joined(observation: Observation, parts: list[_Part], scale: float) -> Batch:
    """With the matching loss of the whole; a clipped gradient is compared at the scale that was found."""
    inputs = torch.cat([part.inputs for part in parts])
    labels = torch.cat([part.labels for part in parts])
    certified = torch.cat([part.certified for part in parts])
    sent = {name: each / scale for name, each in observation.update.items()}
    loss = matching_loss(replace(observation, update=sent), inputs, labels)
    notes = tuple(part.note for part in parts)
    candidates = torch.cat([part.inputs if part.member is None else part.member for part in parts])
    left = unexplained(observation, inputs, labels)
    return Batch(inputs, labels, torch.cat([p.evidence for p in parts]), certified, loss, left, candidates, notes)


def _reconstruction(knowledge: Knowledge, batch: Batch, cells: Tensor | None, note: str) -> Reconstruction:
    """What is certified falls where the whole batch contradicts it."""
    certified, notes = batch.certified, batch.notes
    if certified.any() and batch.loss > _WRONG_WEIGHT and not bool((batch.evidence[..., 0] == POOLED).any()):
        certified, cells = torch.zeros_like(certified), None if cells is None else torch.zeros_like(cells)
        note = f"nothing is certified, because the whole batch leaves a matching loss of {batch.loss:.1e}"
    return Reconstruction(
        attack="tabular",
        inputs=batch.inputs,
        labels=batch.labels,
        loss=batch.loss,
        score=order_of(batch.evidence),
        cells=None if cells is None else cells.float(),
        event=EVENT if cells is not None else "",
        certified=certified,
        label_counts=torch.bincount(batch.labels, minlength=knowledge.classes),
        notes=(*notes, note),
    )
