# SPDX-License-Identifier: Apache-2.0
"""The kinds of numbers that a scenario holds, each with bounds on both sides.

Beyond the bounds lies nothing that anybody means: sizes that no machine holds, and numbers that single precision, in
which everything is trained, takes for 0 or for infinity.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

SMALLEST, LARGEST = 1e-30, 1e30
"""The least and the largest positive number of a scenario: single precision holds them with all its digits."""
MOST = 10**9
"""The largest count of a scenario: of rows, clients, iterations."""

Count = Annotated[int, Field(ge=1, le=MOST)]
"""A number of things of which there is at least one."""
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]
"""A number of things, or the number of a thing where the first is 0."""
Width = Annotated[int, Field(ge=1, le=2**24)]
"""Units of one layer."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What randomness comes from."""

Positive = Annotated[float, Field(ge=SMALLEST, le=LARGEST)]
"""A scale: a learning rate, a time, a concentration."""
Weight = Annotated[float, Field(ge=0, le=LARGEST)]
"""The weight of a term; 0 leaves it out."""
Share = Annotated[float, Field(ge=1e-12, le=1)]
"""A part of a whole, or all of it."""
Part = Annotated[float, Field(ge=1e-12, lt=1)]
"""A part of a whole, never all of it."""
Delta = Annotated[float, Field(ge=1e-30, lt=1)]
"""The δ of a privacy claim."""
