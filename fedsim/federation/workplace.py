# SPDX-License-Identifier: Apache-2.0
"""What a client works with: the data, its rows of it, the model's architecture, and the work that is asked of it.

A simulated client holds its part of the scenario's data; a deployed one may bring a file of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from torch import nn

from fedsim.data import Dataset, Partition, load_dataset, make_partition
from fedsim.data.dataset import Rows
from fedsim.errors import FedsimError
from fedsim.models import build_model
from fedsim.scenario import Scenario
from fedsim.training import ExampleClipping, Layout, LocalWork, layout_of


@dataclass(frozen=True)
class Workplace:
    """What the clients of a simulation have at hand: the data, its partition, and the model's architecture."""

    scenario: Scenario
    dataset: Dataset
    partition: Partition
    model: nn.Module
    layout: Layout


@dataclass(frozen=True, eq=False)
class OwnData:
    """The partition of a client that brings its own file: all rows in it are its own."""

    population: int
    rows: int

    def members(self, client: int) -> Rows:
        """All rows, whoever asks: there is nobody else's here."""
        return np.arange(self.rows)

    def size(self, client: int) -> int:
        """How many rows there are."""
        return self.rows


PRIVATE_PATH = "of-the-client"
"""What stands for the path of the data in the scenario that goes to deployed clients."""


@lru_cache(maxsize=4)
def workplace(scenario_json: str, data_path: str | None = None, clients: int = 1) -> Workplace:
    """The workplace of a scenario, built once in a process; with a client's own data, where it has a file of it."""
    scenario = Scenario.model_validate_json(scenario_json)
    data = scenario.data
    if data_path is not None:
        data = type(data).model_validate(
            {**data.model_dump(exclude_unset=True), "path": str(Path(data_path).absolute())}
        )
    elif getattr(data, "path", None) == PRIVATE_PATH:
        raise FedsimError("this client has no data: set data-path in its node configuration to the file that holds it")
    dataset = load_dataset(data, scenario.seed)
    partition: Partition
    if data_path is not None:
        partition = OwnData(clients, len(dataset.x_train))
    else:
        partition = make_partition(scenario.partition, dataset, scenario.cohort.population, scenario.seed)
    shape = tuple(dataset.x_train.shape[1:])
    model = build_model(scenario.model, shape, dataset.classes, scenario.seed, kind=dataset.kind)
    return Workplace(scenario, dataset, partition, model, layout_of(model))


def is_private(scenario: Scenario) -> bool:
    """Whether the clients' defence makes a privacy claim."""
    return scenario.defence.example_dp is not None or scenario.defence.client_dp is not None


def local_work(scenario: Scenario, example_noise: float) -> LocalWork:
    """The local work that a scenario asks of a client."""
    client, example_dp = scenario.client, scenario.defence.example_dp
    clipping = None
    if example_dp is not None:
        clipping = ExampleClipping(example_dp.clipping_norm, example_noise, example_dp.batches)
    return LocalWork(
        kind=scenario.strategy.name,
        optimizer=client.optimizer,
        learning_rate=client.learning_rate,
        learning_rate_decay=client.learning_rate_decay,
        momentum=client.momentum,
        weight_decay=client.weight_decay,
        epochs=client.epochs,
        steps=client.steps,
        batch_size=client.batch_size,
        shuffle=client.shuffle,
        example_dp=clipping,
    )
