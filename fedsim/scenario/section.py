# SPDX-License-Identifier: Apache-2.0
"""What all parts of a scenario have in common."""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """A part of a scenario: frozen, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def shorthand(field: str) -> BeforeValidator:
    """Let `data: mnist` stand for `data: {source: mnist}`."""
    return BeforeValidator(lambda value: {field: value} if isinstance(value, str) else value)
