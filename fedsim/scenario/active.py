# SPDX-License-Identifier: Apache-2.0
"""The active server of a scenario: which rounds and clients get weights that are made to leak, and how they leak."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.scenario.numbers import Count, CountOrZero, Part, Positive
from fedsim.scenario.section import Section


class _Active(Section):
    rounds: tuple[Count, ...] = (1,)
    """The rounds in which crafted weights are sent. Their updates are read, not trained with: an update of a crafted
    model says nothing about the honest one, which waits for the next round."""
    clients: Literal["all"] | tuple[CountOrZero, ...] = "all"
    """Who gets them; everybody else gets the honest model, and is trained with."""


class _Calibrated(_Active):
    statistics: Literal["public rows", "gaussian"] = "public rows"
    """What the weights are fitted to. public rows: the distribution over the held-out rows, which stand for data that
    the server has of its own; gaussian: only its mean and standard deviation."""


class _Bins(_Calibrated):
    queries: Annotated[int, Field(ge=1, le=1024)] = 3
    """Different questions among which the bins are shared. 1 is the paper; with more, an example that collides in one
    is read in another and taken out of the first, and two answers prove each other."""
    query: Literal["random", "cosine", "average"] = "random"
    """The question: random weights, a cosine wave over the inputs, or their average (which is one query only)."""

    @model_validator(mode="after")
    def _one_average(self) -> Self:
        if self.query == "average" and self.queries > 1:
            raise ValueError(
                f"queries {self.queries} asks different questions, but there is one average; use queries: 1"
            )
        return self


class ImprintServer(_Bins):
    """Robbing the Fed (Fowl et al. 2022): all rows ask the same of an input, and biases sort the answers into bins."""

    kind: Literal["imprint"]
    """Who is alone in a bin is read exactly. The first layer must be dense (model mlp, or imprint, the block that a
    server puts in front)."""
    bins: Annotated[int, Field(ge=2, le=2**24)] | None = None
    """Rows of the layer that are used; null: all."""


class TrapServer(_Calibrated):
    """Trap weights (Boenisch et al. 2023): rows that are negative in a random half, and active for few examples."""

    kind: Literal["trap"]
    """Who is alone in activating a row is read exactly. The first layer must be dense."""
    rate: Part | None = None
    """The share of the examples that activates a row; null: one over the size of the batch."""


class FishingServer(_Active):
    """Fishing (Wen et al. 2022): the head is made so steep that one example's gradient drowns all others."""

    kind: Literal["fishing"]
    """Only the head is changed, so it works with every architecture; what is caught is one example."""
    target: CountOrZero | None = None
    """The class of which one example is wanted (that which looks least like its class); null: the class in which the
    public rows say that this succeeds most often."""
    gain: Positive = 60.0
    """How steep the head is: an example that is one standard deviation more typical weighs exp(-gain) as much."""


class PerClientServer(_Bins):
    """Against secure aggregation (LOKI, Zhao et al. 2024): a block of bins for each client, so that sums fall apart."""

    kind: Literal["per-client"]
    """In the model that a client is sent all blocks but its own are dead. The first layer must be dense."""


ActiveSection = Annotated[ImprintServer | TrapServer | FishingServer | PerClientServer, Field(discriminator="kind")]
