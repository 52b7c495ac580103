# SPDX-License-Identifier: Apache-2.0
"""A table's columns as JSON, so that a reconstruction can be read in the table's own words without the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.data.table import CategoricalColumn, NumericColumn, TableEncoding


def columns_to_list(encoding: TableEncoding) -> list[dict[str, Any]]:
    """Each column by its fields; a categorical one has `values`."""
    return [dataclasses.asdict(column) for column in encoding.columns]


def columns_from_list(columns: Sequence[Mapping[str, Any]]) -> TableEncoding:
    """What `columns_to_list` wrote."""
    return TableEncoding(
        tuple(
            CategoricalColumn(column["name"], tuple(column["values"]))
            if "values" in column
            else NumericColumn(**column)
            for column in columns
        )
    )
