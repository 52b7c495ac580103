# SPDX-License-Identifier: Apache-2.0
"""What an attack is given, and what it gives back.

    attack(observation, knowledge, settings) -> Reconstruction

An `Observation` is what the transcript holds of one client in one round. `Knowledge` is what the adversary is granted
beside it, as the scenario states. The truth is in neither: it is for scoring, elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedsim.data.table import TableEncoding
from fedsim.data.text import Vocabulary
from fedsim.errors import AttackError
from fedsim.scenario import DefenceSection, Section
from fedsim.training import LocalWork


@dataclass(frozen=True, eq=False)
class Observation:
    """One update as the server received it, with the model that it had sent.

    `model` holds the weights that were sent and is never changed by an attack. `update` has one tensor for each
    parameter and buffer of the model, under its name: for `kind` "gradient" (FedSGD) the gradient of the client's mean
    loss, for "update" (FedAvg) the weights after the local work minus those before. Buffers (running statistics) are
    always a difference.
    """

    model: nn.Module
    update: Mapping[str, Tensor]
    kind: Literal["gradient", "update"]
    work: LocalWork
    """What the server asked of the client; it is public."""
    round: int = 1
    client: int | None = None
    """None: the sum of a cohort, under secure aggregation."""
    clients: int = 1
    examples: int | None = None
    """How many examples the client says that it holds; None where it does not say."""
    config: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The parameters that were sent, by name."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """The gradient, by parameter; of an "update" of SGD the sum of its steps' gradients, (w0 - wT) / lr."""
        scale = 1.0 if self.kind == "gradient" else -1.0 / self.work.learning_rate
        return {name: scale * self.update[name] for name in self.weights}

    @property
    def batch_size(self) -> int | None:
        """How many examples the update was computed from, where that is public; with Poisson batches it is not."""
        if self.work.example_dp is not None and self.work.example_dp.batches == "poisson":
            return None
        if self.kind == "update" or self.work.batch_size is None:
            return self.examples
        asked = self.clients * self.work.batch_size
        return asked if self.examples is None else min(asked, self.examples)


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What the adversary knows beside what it sees."""

    kind: Literal["image", "table", "text"]
    input_shape: tuple[int, ...]
    classes: int
    value_range: tuple[Tensor, Tensor] | None = None
    """Lowest and highest value of an input, each broadcastable to `input_shape`."""
    labels: Tensor | None = None
    """The labels of the batch in no particular order, if they were granted."""
    mean: Tensor | None = None
    """Mean of the inputs over public data, of `input_shape`."""
    std: Tensor | None = None
    """Their standard deviation."""
    public: tuple[Tensor, Tensor] | None = None
    """Public examples of the same kind, with their labels."""
    encoding: TableEncoding | Vocabulary | None = None
    """How a table's columns or a text's tokens are encoded: public."""
    defence: DefenceSection = field(default_factory=DefenceSection)
    """What the clients do to protect themselves, as far as the adversary knows."""
    example_noise: float = 0.0
    """Noise multiplier of the example-level defence that was really used."""
    client_noise: float = 0.0
    """Noise multiplier of the client-level defence that was really used."""
    active: Section | None = None
    """How the server made the weights that it sent, if it made them to leak (`adversary.active` of the scenario)."""

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """The lowest and the highest value of every input, each of `input_shape`, in float64; None: not known."""
        if self.value_range is None:
            return None
        low, high = (bound.double().expand(self.input_shape) for bound in self.value_range)
        return low, high


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """What an attack believes that the client had. Items are in no particular order.

    `score` only orders the items, in the attacker's own judgement and without the truth. `confidence` and `cells` are
    lower bounds of a probability, that of `event`; where they were not calibrated, they are None.
    `certified` marks items for which there is a proof: the gradient admits no other explanation.
    """

    attack: str
    inputs: Tensor
    """(n, *input_shape); n may be less than the batch (what was found), and 0."""
    labels: Tensor | None
    """(n,), or (n, T) for text; None where the attack does not find them."""
    loss: float
    """||gradient of the reconstruction - observed gradient||^2 / ||observed gradient||^2; NaN where there is none."""
    score: Tensor
    """(n,) the higher, the surer; its scale means nothing, within one update or between two."""
    confidence: Tensor | None = None
    """(n,) a lower bound of the probability that an item is right; None: not calibrated."""
    cells: Tensor | None = None
    """(n, columns) the same for each cell of a table, in the order of the encoding's columns; None: not calibrated."""
    event: str = ""
    """What `confidence` or `cells` is the probability of, for people; empty where neither was calibrated."""
    certified: Tensor | None = None
    """(n,) bool; None: this attack certifies nothing."""
    radius: Tensor | None = None
    """(n,) no value of a certified item is further from that of an example of the client; infinite where not certified,
    None: not computed."""
    label_counts: Tensor | None = None
    """(classes,) how many examples of each class the attacker counts, where it counts them."""
    notes: tuple[str, ...] = ()
    """What a reader should know: which route was taken, why something was not possible."""
    tried: tuple[str, ...] = ()
    """The attacks that were played, where one chooses among others; empty: this one alone."""
    untried: tuple[str, ...] = ()
    """Those that it chose among and did not play, each with the reason."""


def check_observation(observation: Observation, knowledge: Knowledge) -> None:
    """AttackError, in one sentence, for an update that no attack can begin with."""
    where = f"the update of client {observation.client} in round {observation.round}"
    shapes = {name: parameter.shape for name, parameter in observation.model.named_parameters()}
    for name, shape in shapes.items():
        if name not in observation.update:
            raise AttackError(f"{where} has no tensor {name!r}, which the model has; give the update of this model")
        found = observation.update[name].shape
        if found != shape:
            raise AttackError(
                f"{where}: {name} has shape {tuple(found)}, but the model has {tuple(shape)}; give the"
                " update of this model"
            )
        if not torch.isfinite(observation.update[name]).all():
            raise AttackError(f"{where}: {name} holds NaN or infinity, so nothing can be reconstructed; leave it out")
        if not torch.isfinite(observation.weights[name]).all():
            raise AttackError(
                f"{where}: {name} of the model that was sent holds NaN or infinity, so nothing can be reconstructed;"
                " attack an earlier round"
            )
    granted = knowledge.labels
    if (
        granted is not None
        and granted.numel()
        and not 0 <= int(granted.min()) <= int(granted.max()) < knowledge.classes
    ):
        raise AttackError(
            f"{where}: the labels that were granted lie between {int(granted.min())} and {int(granted.max())}, but the"
            f" model has classes 0 to {knowledge.classes - 1}; grant labels of this model"
        )
    if all(not observation.update[name].any() for name in shapes):
        raise AttackError(f"{where} is zero in every entry, so it tells nothing about the data; attack another")
