# SPDX-License-Identifier: Apache-2.0
"""The attacks of a scenario: which to play on the transcript, with which settings.

The object of the scenario is the very `settings` that the attack function takes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fedsim.scenario.section import Section


class _Attack(Section):
    observations: int = Field(4, ge=1)
    """How many of the kept updates are attacked: the first ones, by round and client."""
    seconds: float | None = Field(None, gt=0)
    """Wall-clock budget for one update, after which the best so far is returned; results then depend on the machine."""


class LabelsAttack(_Attack):
    """Which classes were in the batch, and how many of each, from the last layer's gradient."""

    name: Literal["labels"]
    """Labels only; the other attacks begin with it."""


class ClosedFormAttack(_Attack):
    """Inputs by division and linear algebra: one example, examples alone in a row, linear models."""

    name: Literal["closed-form"]
    """x = dL/dW / dL/db, and its relatives."""


class ExactAttack(_Attack):
    """The whole batch from the low rank and the sparsity of a linear-ReLU layer's gradient (SPEAR, 2024)."""

    name: Literal["exact"]
    """Exact, with a certificate, where the layer is wide enough."""


class GradientMatchingAttack(_Attack):
    """argmin over x of d(gradient of the loss at x, observed gradient) + sum of weighted priors R(x)."""

    name: Literal["gradient-matching"]
    """Optimisation, for whatever can be differentiated twice."""


class TabularAttack(_Attack):
    """Rows of a table: exact where possible, else an ensemble of relaxed starts, matched and pooled (TabLeak, 2023)."""

    name: Literal["tabular"]
    """Rows of a table, with a confidence for every cell."""


class TextAttack(_Attack):
    """Tokens from the embedding's gradient, their order from the span of the attention's gradients (DAGER, 2024)."""

    name: Literal["text"]
    """Sequences of tokens."""


class ImprintAttack(_Attack):
    """Reads what weights made to leak (adversary.active) have collected."""

    name: Literal["imprint"]
    """The second half of an active server's attack."""


class AutomaticAttack(_Attack):
    """The ladder: whatever is exact first, then what fits the kind of data, the best by matching loss."""

    name: Literal["auto"] = "auto"
    """Chooses by what the server sees, never by the truth."""


AttackSection = Annotated[
    Annotated[
        LabelsAttack
        | ClosedFormAttack
        | ExactAttack
        | GradientMatchingAttack
        | TabularAttack
        | TextAttack
        | ImprintAttack
        | AutomaticAttack,
        Field(discriminator="name"),
    ],
    BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value),
]


class KnowledgeSection(Section):
    """What the adversary is granted beyond what it sees: the architecture and the batch size it knows anyway."""

    labels: Literal["inferred", "known"] = "inferred"
    """inferred: the attack finds the labels itself; known: they are given to it, in no particular order."""
    value_range: bool = True
    """It knows the range of the inputs (pixels in [0, 1], the bounds of a table's columns)."""
    statistics: bool = False
    """It knows the mean and standard deviation of each input over the held-out rows."""
    defence: bool = True
    """It knows the settings of the clients' defence and adapts to them."""
