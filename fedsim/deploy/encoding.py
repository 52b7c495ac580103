# SPDX-License-Identifier: Apache-2.0
"""A client's own table as numbers, by a schema that is public: nothing of the encoding comes from the private rows.

    target: diagnosis                     # the column to predict
    classes: [benign, malignant]          # its values, which are numbered in this order
    columns:                              # the others, in the order in which the model sees them
      age: {range: [0, 120]}              # a number v becomes 2 v / 120 - 1; beyond the range it is the nearest end
      sex: {categories: [f, m]}           # one of these, one-hot

Each row is encoded by itself, so that two tables which differ in one row differ in one example. Columns that the schema
does not name are left out. A value that is no number, is missing, or is none of the categories is refused with its
line; the owner mends it before the client takes part. The result is the `.npz` that every scenario with `source: npz`
reads; the server encodes the rows that it evaluates with by the same schema.
"""

from __future__ import annotations

import csv
import gzip
import io
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedsim.errors import DataError
from fedsim.federation.policy import load_section
from fedsim.scenario.section import Section

Text = Annotated[str | int, Field(union_mode="left_to_right")]


class Column(Section):
    """A column of numbers, or of a few values."""

    range: tuple[float, float] | None = None
    """The least number and the largest; what is beyond is taken as the nearest of the two."""
    categories: tuple[Text, ...] = ()
    """The values, as they stand in the file."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.range is None) == (not self.categories):
            raise ValueError("a column has either a range or categories")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError("the first number of a range must be below the second")
        _check_distinct(self.categories)
        return self


class Schema(Section):
    """What the columns of a table are."""

    target: str
    """The column to predict."""
    classes: tuple[Text, ...] = Field(min_length=2)
    """Its values, as they stand in the file."""
    columns: dict[str, Column] = Field(min_length=1)
    """The columns that a model sees."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_distinct(self.classes)
        if self.target in self.columns:
            raise ValueError(f"the target {self.target} is among the columns; leave it out there")
        return self


@dataclass(frozen=True)
class Encoded:
    """The rows of a table as a model reads them."""

    x: NDArray[np.float32]
    """(N, F): numbers in [-1, 1], categories one-hot."""
    y: NDArray[np.int64]
    """(N,) the class of each row."""
    clipped: int
    """How many numbers were beyond their ranges."""


def load_schema(path: Path) -> Schema:
    """The schema in a YAML file."""
    return load_section(path, Schema, "schema", "docs/deployment.md shows one")


def encode(schema: Schema, file: Path) -> Encoded:
    """The rows of a `.csv` or `.csv.gz` file; a DataError names the line of what does not fit the schema."""
    classes = {str(value): number for number, value in enumerate(schema.classes)}
    rows, labels, clipped = [], [], 0
    for line, cells in _rows(file, [*schema.columns, schema.target]):
        row: list[float] = []
        for name, column in schema.columns.items():
            if column.range is not None:
                number = _number(cells[name], f"{file} line {line}: column {name}")
                low, high = column.range
                clipped += not low <= number <= high
                row.append(2 * (min(max(number, low), high) - low) / (high - low) - 1)
            else:
                known = [str(value) for value in column.categories]
                _check_known(cells[name], known, f"{file} line {line}: column {name}", "categories")
                row += [float(cells[name] == value) for value in known]
        _check_known(cells[schema.target], classes, f"{file} line {line}: column {schema.target}", "classes")
        rows.append(row)
        labels.append(classes[cells[schema.target]])
    if not rows:
        raise DataError(f"{file} has no rows below its header; give the file that holds the data")
    return Encoded(np.array(rows, np.float32), np.array(labels, np.int64), clipped)


def write_encoded(schema: Path, file: Path, out: Path, *, held_out: bool = False) -> Encoded:
    """Encode a file into an `.npz` that only its owner can read; all or nothing.

    With `held_out` the rows are there as those to evaluate with, too, so that all of them are: a server has no others.
    """
    loaded = load_schema(schema)
    found = encode(loaded, file)
    if found.clipped:
        logging.getLogger("fedsim").warning("%s: %d numbers are beyond their ranges", file, found.clipped)
    content = io.BytesIO()
    test: dict[str, Any] = {"x_test": found.x, "y_test": found.y} if held_out else {}
    names = np.array([str(name) for name in loaded.classes])
    np.savez(content, x_train=found.x, y_train=found.y, class_names=names, **test)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as opened:
            opened.write(content.getvalue())
            os.fsync(opened.fileno())
        partial.replace(out)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}; name another file") from None
    finally:
        partial.unlink(missing_ok=True)
    return found


def _rows(file: Path, names: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """The number of each line, and its cells by column."""
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, skipinitialspace=True, strict=True)
            header = [name.strip() for name in next(reader, [])]
            for name in names:
                if header.count(name) != 1:
                    raise DataError(f"{file} has {header.count(name)} columns {name}, the schema needs one")
            for cells in reader:
                if len(cells) not in (0, len(header)):
                    raise DataError(f"{file} line {reader.line_num} has {len(cells)} cells, its header {len(header)}")
                if cells:
                    yield reader.line_num, dict(zip(header, map(str.strip, cells), strict=True))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as CSV ({error}); give a table with a header line") from None


def _number(text: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where} is {text!r}, which is not a number; mend it, or leave the row out")
    return number


def _check_known(value: str, known: object, where: str, what: str) -> None:
    if value not in known:  # type: ignore[operator]
        raise DataError(f"{where} is {value!r}, which is not among the {what} of the schema; mend it, or the schema")


def _check_distinct(values: tuple[str | int, ...]) -> None:
    if len(set(map(str, values))) < len(values):
        raise ValueError(f"a value is there twice among {', '.join(map(str, values))}")
