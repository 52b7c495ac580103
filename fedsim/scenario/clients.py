# SPDX-License-Identifier: Apache-2.0
"""What the server and the clients of a scenario do, and who takes part."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.scenario.numbers import LARGEST, Count, Positive, Share, Weight
from fedsim.scenario.section import Section


class _Strategy(Section):
    weighting: Literal["examples", "uniform"] | None = None
    """How updates are averaged; null: uniform with client-level privacy (which needs it), else by examples."""
    server_optimizer: Literal["sgd", "adam"] = "sgd"
    """What the server does with the average."""
    server_momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of the server's SGD."""
    most_examples: Count = 1_000_000
    """A client that says it has more is refused: one that lies could outweigh everybody."""
    largest_weight: Annotated[float, Field(ge=1, le=LARGEST)] | None = None
    """A client counts for at most so many times the median weight of its round (the lower of two in the middle); null:
    10 in a deployment, and no bound in a simulation, where nobody lies. Secure aggregation hides weights, and bounds
    none: use weighting uniform there."""


class FedAvgStrategy(_Strategy):
    """Federated averaging (McMahan et al. 2017): clients train locally and send the difference of the weights."""

    name: Literal["fedavg"] = "fedavg"
    """Weight updates."""
    server_learning_rate: Positive = 1.0
    """1.0 with SGD is plain averaging."""


class FedSgdStrategy(_Strategy):
    """Federated SGD: each client sends the gradient of one batch, the server takes the step."""

    name: Literal["fedsgd"]
    """One gradient for each client and round."""
    server_learning_rate: Positive = 0.1
    """The learning rate of the step."""


StrategySection = Annotated[FedAvgStrategy | FedSgdStrategy, Field(discriminator="name")]


class ClientSection(Section):
    """The local work of a client in one round. With fedsgd only `batch_size` applies."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    """The local optimiser; its state starts anew each round."""
    learning_rate: Positive = 0.05
    """The local learning rate."""
    learning_rate_decay: Share = 1.0
    """The learning rate is multiplied by this after every local step, and starts anew each round."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: Weight = 0.0
    """L2 penalty, added to the gradient as torch.optim does."""
    epochs: int = Field(1, ge=1, le=1_000_000)
    """Passes over the client's data in a round."""
    steps: int | None = Field(None, ge=1, le=1_000_000)
    """Number of local steps, in place of epochs."""
    batch_size: Count | None = 20
    """Examples in a batch (with Poisson batches: expected); null: all that the client has."""
    shuffle: bool = True
    """A new order in every epoch."""

    @model_validator(mode="after")
    def _epochs_or_steps(self) -> Self:
        if self.steps is not None and "epochs" in self.model_fields_set:
            raise ValueError(f"give either epochs or steps, here {self.epochs} and {self.steps}; leave one of them out")
        return self


class CohortSection(Section):
    """Who exists, and who takes part in a round."""

    population: Count | None = None
    """The number of clients; null: 20, or as many as the data names itself (partition: column)."""
    size: Count | None = None
    """Clients in a round (expected number, with Poisson sampling); null with null `rate`: everybody."""
    rate: Share | None = None
    """The share of the population in a round, in place of `size`."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """fixed: exactly `size` clients, without replacement; poisson: each client on its own with probability `rate`."""
    deadline: Annotated[float, Field(ge=1e-3, le=1e9)] = 600.0
    """Seconds that a round waits for replies; who has not answered by then has failed in this round. Inline, nobody is
    ever late."""
    least_replies: Count = 1
    """Accepted replies without which a round is not aggregated (everybody's, where fewer are drawn)."""
    retries: Annotated[int, Field(ge=0, le=1_000_000)] = 2
    """How often a round with too few replies is tried again, each time for another deadline: who failed is asked again,
    who is late is waited for. After that the run fails, and can be resumed."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.size is not None and self.rate is not None:
            raise ValueError(f"give either size or rate, here {self.size} and {self.rate:g}; leave one of them out")
        if self.size is not None and self.population is not None and self.size > self.population:
            raise ValueError(
                f"size {self.size} is larger than the population of {self.population}; choose a size of at most"
                f" {self.population}, or raise population"
            )
        return self
