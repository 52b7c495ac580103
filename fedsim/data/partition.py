# SPDX-License-Identifier: Apache-2.0
"""Which rows each client holds.

Rows are either divided (each belongs to at most one client; arrays as long as the data), or drawn (each client draws
its own from its own random stream, when it is asked for; nothing is stored, so a population may have any size).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fedsim.data.dataset import Array, Dataset, Rows
from fedsim.data.division import (
    Rng,
    dirichlet_owner,
    dirichlet_rows,
    even_owner,
    labelled,
    lift_smallest,
    power_law_sizes,
    rows_by_label,
    shard_owner,
)
from fedsim.errors import ScenarioError, counted
from fedsim.randomness import stream
from fedsim.scenario import ColumnPartition, DirichletPartition, IidPartition, QuantityPartition, ShardPartition

if TYPE_CHECKING:
    from torch import Tensor

    from fedsim.scenario import PartitionSection

DEFAULT_POPULATION = 20


class Partition(Protocol):
    """The rows of every client of a population."""

    @property
    def population(self) -> int:
        """The number of clients; they are numbered from 0."""

    def members(self, client: int) -> Rows:
        """The rows of a client, ascending."""

    def size(self, client: int) -> int:
        """How many rows a client has."""


@dataclass(frozen=True, eq=False)
class DividedPartition:
    """Rows grouped by client: client c holds rows[starts[c]:starts[c + 1]]."""

    rows: Rows
    starts: Rows
    names: tuple[str, ...] = ()
    """What natural clients are called."""

    @property
    def population(self) -> int:
        """The number of clients."""
        return len(self.starts) - 1

    def members(self, client: int) -> Rows:
        """The rows of a client, ascending."""
        client = _known(client, self.population)
        return self.rows[self.starts[client] : self.starts[client + 1]].copy()

    def size(self, client: int) -> int:
        """How many rows a client has."""
        client = _known(client, self.population)
        return int(self.starts[client + 1] - self.starts[client])


@dataclass(frozen=True, eq=False)
class DrawnPartition:
    """Every client draws `examples` different rows from the stream (seed, "partition", client)."""

    population: int
    examples: int
    draw: Callable[[Rng], Rows]
    seed: int

    def members(self, client: int) -> Rows:
        """The rows of a client, ascending."""
        return np.sort(self.draw(stream(self.seed, "partition", _known(client, self.population))))

    def size(self, client: int) -> int:
        """How many rows a client has: all have the same number."""
        _known(client, self.population)
        return self.examples


def _known(client: int, population: int) -> int:
    if not 0 <= client < population:
        raise IndexError(f"client {client} of a population of {population}")
    return client


def make_partition(spec: PartitionSection, dataset: Dataset, population: int | None, seed: int) -> Partition:
    """The partition that a scenario asks for; `population` null: 20, or as many as the data names itself."""
    n = len(dataset.x_train)
    if isinstance(spec, ColumnPartition):
        return _by_column(spec, dataset, population, seed)
    population = DEFAULT_POPULATION if population is None else population
    if isinstance(spec, DirichletPartition | ShardPartition):
        _check_labels(spec.kind, dataset)
    labels = dataset.y_train.numpy()
    if not isinstance(spec, QuantityPartition) and spec.examples_per_client is not None:
        return DrawnPartition(population, spec.examples_per_client, _draw(spec, labels, seed), seed)
    least = getattr(spec, "shards_per_client", max(getattr(spec, "min_examples", 1), 1))
    if population * least > n:
        raise ScenarioError(_too_many_clients(spec, population, least, n))
    rng = stream(seed, "partition")
    match spec:
        case IidPartition():
            owner = even_owner(n, population, rng)
        case DirichletPartition():
            owner = dirichlet_owner(labels, population, spec.alpha, rng)
            lift_smallest(owner, population, spec.min_examples, rng)
        case ShardPartition():
            owner = shard_owner(labels, population, spec.shards_per_client, rng)
        case QuantityPartition():
            sizes = power_law_sizes(n, population, spec.exponent, spec.min_examples)
            owner = rng.permutation(np.repeat(np.arange(population), sizes))
    return _grouped(owner, population)


def label_counts(partition: Partition, labels: Tensor, clients: Sequence[int], classes: int) -> Rows:
    """(len(clients), classes): how often each class (or token) occurs in the rows of each client."""
    array = labels.numpy()
    counts = [np.bincount(array[partition.members(client)].ravel(), minlength=classes) for client in clients]
    return np.array(counts, dtype=np.int64).reshape(len(clients), classes)


def _grouped(owner: Rows, population: int, names: tuple[str, ...] = ()) -> DividedPartition:
    """Rows by owner, ascending for each; rows of owner -1 belong to nobody."""
    rows = np.argsort(owner, kind="stable").astype(np.int64)
    starts = np.searchsorted(owner[rows], np.arange(population + 1))
    return DividedPartition(rows, starts.astype(np.int64), names)


# --- natural clients ------------------------------------------------------------------------------------------------


def _by_column(spec: ColumnPartition, dataset: Dataset, population: int | None, seed: int) -> DividedPartition:
    """Natural clients; if the population is smaller than their number, the seed says which take part."""
    codes, names = _natural_clients(spec, dataset)
    enough = np.flatnonzero(np.bincount(codes, minlength=len(names)) >= spec.min_examples)
    wanted = len(enough) if population is None else population
    if not len(enough) or wanted > len(enough):
        raise ScenarioError(
            f"cohort.population {wanted} is more than the {len(enough)} natural clients with at least"
            f" {spec.min_examples} rows; lower it or partition.min_examples"
        )
    chosen = np.sort(stream(seed, "partition").choice(enough, wanted, replace=False))
    client = np.full(len(names), -1)
    client[chosen] = np.arange(wanted)
    return _grouped(client[codes], wanted, tuple(names[group] for group in chosen))


def _natural_clients(spec: ColumnPartition, dataset: Dataset) -> tuple[Rows, tuple[str, ...]]:
    if spec.column is None:
        if dataset.groups is None:
            columns = [] if dataset.table is None else list(map(str, dataset.table.columns))
            remedy = f"name partition.column, one of {', '.join(columns)}" if columns else "use another partition"
            raise ScenarioError(
                f"partition.kind column needs natural clients, and data {dataset.name} names none; {remedy}"
            )
        return dataset.groups, dataset.group_names
    if dataset.table is None or spec.column not in dataset.table.columns:
        known = "none" if dataset.table is None else ", ".join(map(str, dataset.table.columns))
        raise ScenarioError(f"partition.column {spec.column} is no column of data {dataset.name}, which has {known}")
    values, names = dataset.table[spec.column].factorize(sort=True)
    if (values < 0).any():
        missing = counted(int((values < 0).sum()), "missing value")
        raise ScenarioError(
            f"partition.column {spec.column} has {missing}; fill in what is missing, leave out such rows, or name"
            " another column"
        )
    return values.astype(np.int64), tuple(map(str, names))


# --- rows that are drawn --------------------------------------------------------------------------------------------


def _draw(spec: IidPartition | DirichletPartition | ShardPartition, labels: Array, seed: int) -> Callable[[Rng], Rows]:
    """How one client draws its rows from its own stream."""
    n, m = len(labels), spec.examples_per_client or 0
    if m > n:
        raise ScenarioError(
            f"partition.examples_per_client {m:,} is more than the {n:,} training rows; set it to at most {n:,}"
        )
    match spec:
        case IidPartition():
            return lambda rng: rng.choice(n, m, replace=False, shuffle=False)
        case DirichletPartition():
            by_label = labelled(labels)
            return lambda rng: dirichlet_rows(by_label, m, spec.alpha, rng)
        case ShardPartition():
            length = -(-m // spec.shards_per_client)
            shards = n // length
            if shards < spec.shards_per_client:
                raise ScenarioError(
                    f"partition.shards_per_client {spec.shards_per_client} with examples_per_client {m:,} needs"
                    f" {spec.shards_per_client} shards of {length:,} rows, but there are {n:,} training rows;"
                    " lower either"
                )
            order = rows_by_label(labels, stream(seed, "partition"))
            inside = np.arange(length)
            return lambda rng: order[
                (rng.choice(shards, spec.shards_per_client, replace=False)[:, None] * length + inside).ravel()[:m]
            ]


# --- what is impossible ---------------------------------------------------------------------------------------------


def _check_labels(kind: str, dataset: Dataset) -> None:
    if dataset.y_train.dim() != 1:
        raise ScenarioError(
            f"partition.kind {kind} needs one class for each row, and data {dataset.name} is text;"
            " use iid, quantity or column"
        )


def _too_many_clients(spec: PartitionSection, population: int, least: int, n: int) -> str:
    """Blame the field that asks for too much: the least number of rows (or shards) of a client, or the population."""
    if least > 1:
        field = "shards_per_client" if isinstance(spec, ShardPartition) else "min_examples"
        return (
            f"partition.{field} {least:,} for each of {population:,} clients is more than the {n:,} training rows;"
            f" at most {n // population:,} can be had, or lower cohort.population"
        )
    remedy = (
        "use partition iid with examples_per_client"
        if isinstance(spec, QuantityPartition)
        else "set partition.examples_per_client so that clients share rows"
    )
    return f"cohort.population {population:,} is more than the {n:,} training rows; lower it, or {remedy}"
