# SPDX-License-Identifier: Apache-2.0
"""Tables: columns become numbers that a model can read, and numbers become rows that a person can read."""

from __future__ import annotations

import gzip
import math
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedsim.data.dataset import Array, Dataset, checked, existing_file, split_rows, training_rows
from fedsim.errors import DataError, counted
from fedsim.scenario import CsvData, DataSection

MOST_CATEGORIES = 1000
_PACKED = (".bz2", ".zip", ".xz", ".zst", ".tar")


@dataclass(frozen=True)
class NumericColumn:
    """A number v, encoded as (v - mean) / scale."""

    name: str
    mean: float
    scale: float
    decimals: int | None
    """Places after the point that the column has; null: too many to count."""
    integer: bool

    width = 1

    def encode(self, values: pd.Series) -> Array:
        """(N, 1) standardised."""
        return ((values.to_numpy(np.float64) - self.mean) / self.scale)[:, None]

    def decode(self, x: Array) -> Array:
        """(N,) in the column's own unit, rounded to the places that the column has."""
        values = x[:, 0] * self.scale + self.mean
        if self.decimals is not None:
            values = np.round(values, self.decimals)
        return values.astype(np.int64) if self.integer and np.isfinite(values).all() else values


@dataclass(frozen=True)
class CategoricalColumn:
    """One of a few values, encoded one-hot."""

    name: str
    values: tuple[str | int | float | bool, ...]

    @property
    def width(self) -> int:
        """One place for each value."""
        return len(self.values)

    def encode(self, values: pd.Series) -> Array:
        """(N, width) one-hot."""
        codes = pd.Index(self.values).get_indexer(pd.Index(values))
        if (codes < 0).any():
            unknown = values.iloc[int(np.argmax(codes < 0))]
            raise DataError(f"column {self.name} has the value {unknown!r}, which the encoding does not know")
        return np.eye(self.width)[codes]

    def decode(self, x: Array) -> Array:
        """(N,) the value with the largest entry."""
        values: Array = pd.Index(self.values).to_numpy()
        decoded: Array = values[x.argmax(axis=1)]
        return decoded


@dataclass(frozen=True)
class TableEncoding:
    """The columns of a table in the order in which they lie in x."""

    columns: tuple[NumericColumn | CategoricalColumn, ...]

    def slices(self) -> dict[str, slice]:
        """Where each column lies in x."""
        ends = np.cumsum([column.width for column in self.columns]).tolist()
        return {column.name: slice(end - column.width, end) for column, end in zip(self.columns, ends, strict=True)}

    def encode(self, frame: pd.DataFrame) -> Tensor:
        """(N, F) float32."""
        blocks = [column.encode(frame[column.name]) for column in self.columns]
        return torch.from_numpy(np.concatenate(blocks, axis=1).astype(np.float32))

    def decode(self, x: Tensor) -> pd.DataFrame:
        """Rows again: exact for what `encode` wrote (numbers to float32 precision), nearest for anything else."""
        array = x.detach().to(torch.float64).numpy()
        where = self.slices()
        return pd.DataFrame({column.name: column.decode(array[:, where[column.name]]) for column in self.columns})


def load_csv(spec: CsvData, seed: int) -> Dataset:
    """A `.csv` or `.csv.gz` file with a header line."""
    frame = _read_csv(spec)
    named = {"target": (spec.target,), "drop": spec.drop, "categorical": spec.categorical}
    check_columns(named, list(map(str, frame.columns)), spec.path)
    return from_frame(existing_file(spec.path).name, frame, spec.target, spec, seed, spec.drop, spec.categorical)


def check_columns(named: dict[str, tuple[str, ...]], columns: list[str], where: str) -> None:
    """DataError for a field of `data` that names a column which is not there."""
    for field, names in named.items():
        unknown = [name for name in names if name not in columns]
        if unknown:
            raise DataError(f"data.{field} names the column {unknown[0]}, but {where} has {', '.join(columns)}")


def from_frame(
    name: str,
    frame: pd.DataFrame,
    target: str,
    spec: DataSection,
    seed: int,
    drop: tuple[str, ...] = (),
    categorical: tuple[str, ...] = (),
    test: pd.DataFrame | None = None,
) -> Dataset:
    """Split, encode and wrap.

    Means and scales are those of the training rows. Which categories and classes exist, and how many decimals a number
    has, is read from all rows: it is the schema of the table, which a federation agrees on beforehand.
    """
    everything = frame if test is None else pd.concat([frame, test], ignore_index=True)
    if target in drop:
        raise DataError(f"data.drop leaves out {target}, which is the target")
    used = [str(column) for column in frame.columns if column != target and column not in drop]
    if not used:
        raise DataError(f"data {name} has no columns left beside the target {target}")
    _check_missing(everything[[*used, target]], name)
    codes, class_names = class_codes(everything[target], name)
    if test is None:
        train_rows, test_rows = split_rows(codes, spec, seed)
    else:
        train_rows = training_rows(codes[: len(frame)], spec, seed)
        test_rows = np.arange(len(frame), len(everything))
    train = everything.iloc[train_rows].reset_index(drop=True)
    encoding = TableEncoding(tuple(_column(everything[c], train[c], c in categorical, name) for c in used))
    x, y = encoding.encode(everything[used]), torch.from_numpy(codes)
    dataset = Dataset(
        name, "table", x[train_rows], y[train_rows], x[test_rows], y[test_rows],
        classes=len(class_names), class_names=class_names, encoding=encoding, table=train,
    )  # fmt: skip
    return checked(dataset)


def _read_csv(spec: CsvData) -> pd.DataFrame:
    """Only an empty cell is missing: `?`, `NA` or `None` are text, and mean what the table's author meant."""
    file = existing_file(spec.path)
    try:
        _check_plain(file, spec.path)
        _check_header(file, spec.path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header
            frame = pd.read_csv(
                file, keep_default_na=False, na_values=[""], skipinitialspace=True, index_col=False, low_memory=False
            )
    except (
        pd.errors.EmptyDataError,
        pd.errors.ParserError,
        pd.errors.ParserWarning,
        ValueError,
        OSError,
        EOFError,
        zlib.error,
    ) as e:
        raise DataError(
            f"data.path {spec.path} cannot be read as CSV ({' '.join(str(e).split()).rstrip('.')})"
        ) from None
    if frame.empty:
        raise DataError(f"data.path {spec.path} has a header but no rows")
    return frame


def _check_plain(file: Path, path: str) -> None:
    """A zero byte ends a text for pandas' parser, which would read the rest of the cell as if it were not there."""
    if file.suffix.lower() in _PACKED:
        return
    with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as opened:
        bad = next((number for number, line in enumerate(opened, 1) if b"\0" in line), None)
    if bad is not None:
        raise DataError(
            f"data.path {path} cannot be read as CSV (there is a zero byte in its line {bad:,});"
            " save it as plain text in UTF-8"
        )


def _check_header(file: Path, path: str) -> None:
    """Columns of one name: pandas would call the second a.1, and nobody could say which is meant."""
    header = pd.read_csv(
        file, header=None, nrows=1, dtype=str, keep_default_na=False, skipinitialspace=True, index_col=False
    ).iloc[0]
    twice = header[(header != "") & header.duplicated()]
    if len(twice):
        name = twice.iloc[0]
        raise DataError(
            f"data.path {path} has {(header == name).sum()} columns named {name}; give every column a name of its own"
        )


def _check_missing(frame: pd.DataFrame, name: str) -> None:
    missing = frame.isna().sum()
    if missing.any():
        column = missing.index[int(np.argmax(missing.to_numpy() > 0))]
        raise DataError(
            f"data {name} has {counted(int(missing[column]), 'missing value')} in column {column};"
            " fill in what is missing, leave out such rows, or name the column in data.drop"
        )


def class_codes(values: pd.Series, name: str) -> tuple[Array, tuple[str, ...]]:
    """Class numbers, and class names in sorted order. A class is a text or a whole number."""
    if pd.api.types.is_float_dtype(values):
        if not (values % 1 == 0).all():
            raise DataError(f"data {name} has a target {values.name} of fractional numbers; a target must be classes")
        values = values.astype(np.int64)
    codes, distinct = pd.factorize(values, sort=True)
    if len(distinct) > max(2, len(values) // 2):
        raise DataError(
            f"data {name} has {len(distinct):,} different values in its target {values.name} of {len(values):,} rows;"
            " a target must be classes"
        )
    return codes.astype(np.int64), tuple(map(str, distinct))


def _column(values: pd.Series, train: pd.Series, code: bool, source: str) -> NumericColumn | CategoricalColumn:
    """How to encode a column: `values` are all of its rows, `train` those that statistics are taken from."""
    name = str(values.name)
    if pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values) and not code:
        if not np.isfinite(values.to_numpy(np.float64)).all():
            raise DataError(f"data {source} has infinite values in column {name}; mend them, or name it in data.drop")
        mean, scale = float(train.mean()), float(train.std(ddof=0))
        scale = scale if scale > 1e-12 * abs(mean) else 1.0  # a constant column, up to rounding, is all zeros
        return NumericColumn(name, mean, scale, _decimals(values), pd.api.types.is_integer_dtype(values))
    if not code:
        _check_text(values, source)
    distinct = tuple(pd.Index(values.unique()).sort_values().tolist())
    if len(distinct) > MOST_CATEGORIES:
        raise DataError(
            f"data {source} has {len(distinct):,} different values in the categorical column {name}, more than"
            f" {MOST_CATEGORIES:,}; name it in data.drop"
        )
    return CategoricalColumn(name, distinct)


def _check_text(values: pd.Series, source: str) -> None:
    """A column of text that is mostly numbers is a numeric column with something wrong in it."""
    if pd.api.types.is_bool_dtype(values):
        return
    counts = values.value_counts()
    odd = pd.to_numeric(pd.Series(counts.index), errors="coerce").isna().to_numpy()
    if 0 < counts[odd].sum() < len(values) / 2:  # none: numbers that were stored as text are names, such as post codes
        many = int(counts[odd].sum())
        what = "value that is no number" if many == 1 else "values that are no numbers"
        raise DataError(
            f"data {source} has {many:,} {what} in column {values.name}, such as"
            f" {counts.index[odd][0]!r}; mend them, or name the column in data.categorical or data.drop"
        )


def _decimals(values: pd.Series) -> int | None:
    array = values.to_numpy(np.float64)
    return next((d for d in range(7) if math.isfinite(array[0]) and np.array_equal(np.round(array, d), array)), None)
