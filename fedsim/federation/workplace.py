# SPDX-License-Identifier: Apache-2.0
"""What a client works with: the data, its rows of it, the model's architecture, and the work that is asked of it.

A simulated client holds its part of the scenario's data; a deployed one may bring a file of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedsim.data import Dataset, Partition, load_dataset, make_partition
from fedsim.data.dataset import Rows
from fedsim.errors import FedsimError, ModelError, PolicyError
from fedsim.federation.footprint import checked_footprint
from fedsim.models import build_model
from fedsim.scenario import ModelSection, NpzData, Scenario
from fedsim.training import ExampleClipping, Layout, LocalWork, layout_of


@dataclass(frozen=True)
class Workplace:
    """What the clients of a simulation have at hand: the data, its partition, and the model's architecture."""

    scenario: Scenario
    dataset: Dataset
    partition: Partition
    model: nn.Module
    layout: Layout
    memory: int = 0
    """About how many bytes a run needs, where it is this machine that runs it."""


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


_WHY_NAMES = (
    "without them the largest label of a row decides how many classes there are, and so whether the model fits, which"
    " tells the server of that row; add class_names, one name for each class"
)


def check_own_file(file: Path) -> int | None:
    """Refuse, before a client connects, a file that it could not train on: in a round that would tell of its rows.

    The number of rows that it trains on, where that is known before a scenario is.
    """
    if file.suffix != ".npz":
        return None
    return len(_all_rows(load_dataset(NpzData(source="npz", path=str(file.absolute())), 0), file).x_train)


def _all_rows(dataset: Dataset, file: Path) -> Dataset:
    """The data set of a client's own file with every row in its training part, unless the file has a test part itself.

    A claim for examples compares data sets that differ in one row. Rows that are held out, or left out by data.limit,
    are drawn by the seed from as many as there are: with one row more they would be others, and the rows that are
    trained on would differ in many. The server has rows of its own to evaluate with.
    """
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as archive:
            if "class_names" not in archive.files:
                raise FedsimError(f"{file} has no class_names: {_WHY_NAMES}")
            if "x_test" in archive.files:
                return dataset
    x, y = (torch.cat([getattr(dataset, f"{k}_train"), getattr(dataset, f"{k}_test")]) for k in ("x", "y"))
    return replace(dataset, x_train=x, y_train=y)


DEEPEST = 1000
"""Layers of a model that is built for somebody who is not trusted."""


@lru_cache(maxsize=4)
def workplace(
    scenario_json: str, data_path: str | None = None, clients: int = 1, largest: int | None = None
) -> Workplace:
    """The workplace of a scenario, built once in a process; with a client's own data, where it has a file of it.

    `largest` is the size in bytes of the largest model that is built; PolicyError for one that would be larger.
    """
    scenario = Scenario.model_validate_json(scenario_json)
    data = scenario.data
    if data_path is not None:
        data = type(data).model_validate(
            {**data.model_dump(exclude_unset=True), "path": str(Path(data_path).absolute()), "limit": None}
        )
    elif getattr(data, "path", None) == PRIVATE_PATH:
        raise FedsimError("this client has no data: set data-path in its node configuration to the file that holds it")
    dataset = load_dataset(data, scenario.seed)
    partition: Partition
    if data_path is not None:
        dataset = _all_rows(dataset, Path(data_path))
        partition = OwnData(clients, len(dataset.x_train))
    else:
        partition = make_partition(scenario.partition, dataset, scenario.cohort.population, scenario.seed)
    shape = tuple(dataset.x_train.shape[1:])
    memory = 0
    if largest is not None:
        check_size(scenario.model, shape, dataset, largest)
    elif data_path is None:
        memory = checked_footprint(scenario, dataset, partition).total
    try:
        model = build_model(scenario.model, shape, dataset.classes, scenario.seed, kind=dataset.kind)
    except (RuntimeError, OverflowError, MemoryError) as error:  # of torch, for what no memory holds
        raise ModelError(f"model {scenario.model.name} is too large for this machine; ask for a smaller one") from error
    return Workplace(scenario, dataset, partition, model, layout_of(model), memory)


def check_size(model: ModelSection, shape: tuple[int, ...], dataset: Dataset, largest: int) -> None:
    """PolicyError for a model that would have more bytes than allowed, before a byte of it is there.

    It is built on torch's meta device, which has shapes and no memory. How large it would be is not said: the client's
    data has a part in it.
    """
    depth = max(len(getattr(model, "hidden", ())), getattr(model, "layers", 0))
    too_large = PolicyError(
        f"the client's policy refuses the run: model {model.name} would have more than largest_message {largest} bytes"
        f" or {DEEPEST} layers; ask for a smaller one"
    )
    if depth > DEEPEST:
        raise too_large
    try:
        with torch.device("meta"):
            layout = layout_of(build_model(model, shape, dataset.classes, 0, kind=dataset.kind))
    except (RuntimeError, OverflowError, TypeError):  # of torch, where a size is beyond its integers
        raise too_large from None
    if 4 * layout.size > largest:
        raise too_large


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
