# SPDX-License-Identifier: Apache-2.0
"""A data set in memory, and how its rows become a training and a test part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.errors import DataError, counted
from fedsim.randomness import stream

if TYPE_CHECKING:
    import pandas as pd

    from fedsim.data.table import TableEncoding
    from fedsim.data.text import Vocabulary
    from fedsim.scenario import DataSection

Rows = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Kind = Literal["image", "table", "text"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test rows as tensors.

    image: x float32 (N, C, H, W) in [0, 1], y int64 (N,). table: x float32 (N, F), numeric columns standardised by the
    statistics of the training rows, categories one-hot, y int64 (N,). text: x int64 (N, T) tokens, y int64 (N, T) the
    token that follows each.
    """

    name: str
    kind: Kind
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    class_names: tuple[str, ...]
    encoding: TableEncoding | Vocabulary | None = None
    """Turns a row of x into what a person reads, and back."""
    groups: Rows | None = None
    """(N,) the natural client of each training row, where the data names one."""
    group_names: tuple[str, ...] = ()
    table: pd.DataFrame | None = None
    """The training rows of a table as they were read, with the columns that the model does not see."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.x_train.shape[1:])


def pick_rows(strata: Array, count: int, rng: np.random.Generator) -> Rows:
    """`count` rows drawn at random, each stratum by its share (to within one row), in ascending order.

    The rows of a stratum of size n get the keys 0.5/n, 1.5/n, ... in random order, and the smallest keys win: a quota
    for each stratum without rounding it by hand, and a stratum of one row stays in the larger part.
    """
    shuffled = rng.permutation(len(strata))
    _, code, size = np.unique(strata[shuffled], return_inverse=True, return_counts=True)
    order = np.argsort(code, kind="stable")
    first = np.repeat(np.cumsum(size) - size, size)
    key = np.empty(len(strata))
    key[order] = (np.arange(len(strata)) - first + 0.5) / size[code[order]]
    return np.sort(shuffled[np.argsort(key, kind="stable")[:count]])


def training_rows(strata: Array, spec: DataSection, seed: int) -> Rows:
    """All rows, or `data.limit` of them by the seed."""
    rows = np.arange(len(strata))
    if spec.limit is None or spec.limit >= len(rows):
        return rows
    return pick_rows(strata, spec.limit, stream(seed, "limit"))


def split_rows(strata: Array, spec: DataSection, seed: int) -> tuple[Rows, Rows]:
    """Training and test rows by the seed, stratified; `data.limit` applies to the training rows."""
    if len(strata) < 3:
        raise DataError(
            f"data {spec.source} has {counted(len(strata), 'row')}, too few to hold some out; give it at least 3"
        )
    held_out = min(max(round(spec.test_fraction * len(strata)), 1), len(strata) - 2)
    test = pick_rows(strata, held_out, stream(seed, "split"))
    rest = np.setdiff1d(np.arange(len(strata)), test, assume_unique=True)
    return rest[training_rows(strata[rest], spec, seed)], test


def from_arrays(
    name: str,
    kind: Kind,
    x: Tensor,
    y: Tensor,
    spec: DataSection,
    seed: int,
    *,
    class_names: tuple[str, ...],
    test: tuple[Tensor, Tensor] | None = None,
    groups: Rows | None = None,
    group_names: tuple[str, ...] = (),
    encoding: Vocabulary | None = None,
) -> Dataset:
    """Split (unless the source has a test part), check and wrap. Strata are the classes, or the clients of a text."""
    labels = y.numpy() if y.dim() == 1 else np.zeros(len(y), np.int64)
    strata = groups if kind == "text" and groups is not None else labels
    if test is None:
        train_rows, test_rows = split_rows(strata, spec, seed)
        x_test, y_test = x[test_rows], y[test_rows]
    else:
        train_rows, (x_test, y_test) = training_rows(strata, spec, seed), test
    if len(train_rows) < len(x):
        x, y = x[train_rows], y[train_rows]
        groups = None if groups is None else groups[train_rows]
    dataset = Dataset(
        name,
        kind,
        x,
        y,
        x_test,
        y_test,
        len(class_names),
        class_names,
        encoding,
        groups,
        group_names,
    )
    return checked(dataset)


def checked(dataset: Dataset) -> Dataset:
    """The data set itself, once nothing in it would spoil a training run in silence."""
    found = np.unique(np.concatenate([dataset.y_train.numpy().ravel(), dataset.y_test.numpy().ravel()]))
    if len(found) < 2:
        raise DataError(f"data {dataset.name} has {len(found)} class in its target, where learning needs at least 2")
    for part, x in (("training", dataset.x_train), ("test", dataset.x_test)):
        if len(x) == 0:
            raise DataError(f"data {dataset.name} has no {part} rows")
        bad = 0 if x.dtype == torch.int64 else int((~torch.isfinite(x)).sum())
        if bad:
            are = "is" if bad == 1 else "are"
            raise DataError(
                f"data {dataset.name} has {counted(bad, 'value')} that {are} NaN or infinite among its {part} inputs;"
                " fill them or leave their rows out"
            )
    return dataset


def there(path: Path) -> bool:
    """Whether the path exists; what the system cannot have (a name too long) does not."""
    try:
        return path.exists()
    except OSError:
        return False


def existing_file(path: str) -> Path:
    """The path, once it is known to be a readable file."""
    file = Path(path).expanduser()
    if there(file) and file.is_dir():
        raise DataError(f"data.path {path} is a folder, but a file is needed")
    if not there(file) or not file.is_file():
        raise DataError(f"data.path {path} does not exist (relative paths start at {Path.cwd()})")
    return file
