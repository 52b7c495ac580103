# SPDX-License-Identifier: Apache-2.0
"""How much memory a run will need, before any of it is taken.

The model is built on torch's meta device, which has shapes and no numbers: its parameters are counted, and what it
computes for one example. The rest follows from how a round is computed (`fedsim.training.local`): a few copies of the
model, a chunk of clients side by side, and the updates of the whole cohort, which the server reads together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.data import Dataset, Partition
from fedsim.data.partition import DividedPartition, DrawnPartition
from fedsim.errors import ModelError, ScenarioError, counted, size
from fedsim.federation.cohorts import expected_size
from fedsim.machine import machine_memory
from fedsim.models import build_model
from fedsim.scenario import ImportedModel, ModelSection, Scenario
from fedsim.training import Layout, layout_of

COPIES = 12
"""Of the model: as built, the start, the server's with its optimiser, those that are tried out, and the one written."""
KEPT = 1.5
"""Copies of each update: what was trained, and what the transcript is written from."""
CHUNK = 32 << 20
"""Bytes that the clients of a chunk have, where two need no more."""
EVALUATED = 1000
"""Examples that are evaluated at once."""


@dataclass(frozen=True)
class Footprint:
    """What takes memory, in bytes."""

    parameters: int
    models: int
    batches: int
    updates: int
    cohorts: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.models + self.batches + self.updates + self.cohorts


def footprint(scenario: Scenario, dataset: Dataset, partition: Partition) -> Footprint:
    """About how much memory a run of the scenario needs, beside its data."""
    shape = tuple(dataset.x_train.shape[1:])
    layout, numbers = _measured(scenario.model, shape, dataset)
    cohort = expected_size(scenario.cohort, partition.population)
    private = scenario.defence.example_dp is not None
    width = min(scenario.client.batch_size or _most_rows(partition), _most_rows(partition)) * (2 if private else 1)
    one = 4 * (2 * layout.size + 2 * numbers * width)
    beside = scenario.engine.chunk or max(2, CHUNK // max(one, 1))
    return Footprint(
        parameters=layout.parameters,
        models=4 * layout.size * COPIES,
        batches=one * max(2, int(min(cohort, beside))) + 4 * numbers * min(EVALUATED, len(dataset.x_test)),
        updates=int(4 * layout.size * cohort * KEPT),
        cohorts=int(8 * cohort * scenario.rounds),
    )


def checked_footprint(scenario: Scenario, dataset: Dataset, partition: Partition) -> Footprint:
    """The footprint of a run; an error with the numbers where the machine has not so much memory."""
    try:
        needed = footprint(scenario, dataset, partition)
    except (RuntimeError, OverflowError, TypeError) as error:  # of torch, where a size is beyond its integers
        raise ModelError(
            f"model.name {scenario.model.name} has more numbers than can be counted; make it smaller"
        ) from error
    if needed.total <= (there := machine_memory()):
        return needed
    numbers = f"needs about {size(needed.total)} of memory, and this machine has {size(there)}"
    largest = max(needed.models, needed.batches, needed.updates, needed.cohorts)
    if largest == needed.cohorts:
        cohort = round(expected_size(scenario.cohort, partition.population))
        raise ScenarioError(
            f"cohort.size: a run of {counted(scenario.rounds, 'round')} with {counted(cohort, 'client')} each {numbers}"
            "; lower cohort.size or rounds"
        )
    what = f"model.name {scenario.model.name}: a run with its {counted(needed.parameters, 'parameter')} {numbers}"
    if largest == needed.updates:
        raise ModelError(f"{what}, most of it for the updates of a round; lower cohort.size, or use a smaller model")
    if largest == needed.batches:
        raise ModelError(f"{what}, most of it for the batches of clients; lower client.batch_size or engine.chunk")
    raise ModelError(f"{what}; use a smaller model")


def _most_rows(partition: Partition) -> int:
    """How many rows the largest client has."""
    if isinstance(partition, DrawnPartition):
        return partition.examples
    return int(np.diff(partition.starts).max()) if isinstance(partition, DividedPartition) else 1


def _measured(model: ModelSection, shape: tuple[int, ...], dataset: Dataset) -> tuple[Layout, int]:
    """The layout of a model, and how many numbers its layers compute for one example.

    The user's own model is built by code that may not know the meta device: it is measured as it is.
    """
    if isinstance(model, ImportedModel):
        return layout_of(build_model(model, shape, dataset.classes, 0, kind=dataset.kind)), 0
    computed: list[int] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        computed.append(output.numel())

    with torch.device("meta"), torch.no_grad():
        built = build_model(model, shape, dataset.classes, 0, kind=dataset.kind).eval()
        for module in built.modules():
            if not any(module.children()):
                module.register_forward_hook(note)
        built(torch.zeros(1, *shape, dtype=dataset.x_train.dtype))
    return layout_of(built), sum(computed)
