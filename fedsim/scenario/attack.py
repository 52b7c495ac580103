# SPDX-License-Identifier: Apache-2.0
"""The attacks of a scenario: which to play on the transcript, with which settings.

The object of the scenario is the very `settings` that the attack function takes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fedsim.scenario.numbers import Count, CountOrZero, Positive, Weight
from fedsim.scenario.section import Section


class _Attack(Section):
    title: str = ""
    """What the report calls it, where several settings of one attack are compared."""
    observations: Count = 4
    """How many of the kept updates are attacked: the first ones, by round and client."""
    seconds: Positive | None = None
    """Wall-clock budget for one update, after which the best so far is returned; results then depend on the machine."""


class _ImageAttack(_Attack):
    shadows: int = Field(0, ge=0, le=1000)
    """So many batches of public images (adversary.knows.public_rows) are attacked likewise, to give each image a lower
    bound of the probability that it is right; 60 can show 95%. Each costs as much as the attack; 0: no probability."""


class LabelsAttack(_Attack):
    """Which classes were in the batch, and how many of each, from the last layer's gradient."""

    name: Literal["labels"]
    """Labels only; the other attacks begin with it."""


class ClosedFormAttack(_ImageAttack):
    """Inputs by division and linear algebra: one example, examples alone in a row, linear models."""

    name: Literal["closed-form"]
    """x = dL/dW / dL/db, and its relatives."""


class ExactAttack(_ImageAttack):
    """The whole batch from the low rank and the sparsity of a linear-ReLU layer's gradient (SPEAR, 2024)."""

    name: Literal["exact"]
    """Exact, with a certificate, where the layer is wide enough."""


class GradientMatchingAttack(_ImageAttack):
    """argmin over x of d(gradient of the loss at x, observed gradient) + sum of weighted priors R(x)."""

    name: Literal["gradient-matching"]
    """Optimisation, for whatever can be differentiated twice."""
    distance: Literal["auto", "squared", "cosine", "l1", "angular"] = "auto"
    """d; angular: the mean angle over the parameters. auto: squared for L-BFGS, else cosine."""
    optimizer: Literal["auto", "adam", "signed-adam", "lbfgs"] = "auto"
    """auto: L-BFGS in float64 for networks that are twice differentiable, else Adam on the signs of the gradient."""
    iterations: Count = 600
    """At most so many evaluations of each restart; early stopping may need less."""
    learning_rate: Positive = 0.05
    """Of Adam, as a share of the range of values (or of their standard deviation, where no range is known)."""
    decay: Literal["cosine", "steps", "none"] = "cosine"
    """How the learning rate falls; steps: a tenth at 3/8, 5/8 and 7/8."""
    restarts: int = Field(1, ge=1, le=64)
    """Starts that descend side by side; the first is grey, or what the features say, the others are random."""
    patience: Count = 150
    """A restart that has not improved by 1% in so many iterations stops."""
    features: bool = True
    """First read the inputs of the first linear layer exactly from its gradient, where possible, and invert the layers
    before it; matching goes on from there."""
    total_variation: Weight = 1e-3
    """Weight at the start, for values scaled to a range of 1; it falls to what the known noise justifies: without noise
    to 0."""
    l2: Weight = 0.0
    """Weight of the mean square of the inputs."""
    patch: Weight = 0.0
    """Weight of the jumps across the borders of 4x4 patches."""
    batch_norm: Weight = 1e-3
    """Weight of the batch's own BatchNorm statistics, which the update reveals; without such layers it does nothing."""
    value_range: Literal["hard", "soft", "off"] = "hard"
    """How the known range of the inputs is used: never left, left at a price, or not used."""
    group_consistency: Weight = 0.0
    """Weight of the distance from the mean of all restarts."""


class TabularAttack(_Attack):
    """Rows of a table: exact where possible, else an ensemble of relaxed starts, matched and pooled (TabLeak, 2023)."""

    name: Literal["tabular"]
    """Rows of a table, with a lower bound of the probability that a cell is right."""
    walkers: Annotated[int, Field(ge=1, le=2**20)] = 256
    """Walkers that search the span of the gradients for single rows, all at once."""
    sweeps: CountOrZero = 240
    """Most sweeps of the walkers; 0: no search for single rows."""
    starts: Annotated[int, Field(ge=2, le=10_000)] = 30
    """Members of the ensemble, for the rows that the search does not find."""
    iterations: Count = 600
    """Steps of every member."""
    calibrate: bool = True
    """A lower bound of the probability that a cell is right, from other tables and a batch that the server makes itself
    and attacks likewise, which doubles the time; false: no probability."""


class TextAttack(_Attack):
    """Tokens from the embedding's gradient, their order from the span of the attention's gradients (DAGER, 2024)."""

    name: Literal["text"]
    """Sequences of tokens."""
    beam: Annotated[int, Field(ge=1, le=2**20)] = 64
    """The most beginnings of sequences that are followed at once."""


class ImprintAttack(_ImageAttack):
    """Reads what weights made to leak (adversary.active) have collected."""

    name: Literal["imprint"]
    """The second half of an active server's attack."""


class FedAvgAttack(_ImageAttack):
    """Simulates the client's local training on guessed inputs, and differentiates through it (Dimitrov et al. 2022)."""

    name: Literal["fedavg"]
    """Inputs from a weight update of several epochs, whatever the order of the batches was."""
    exact_first: bool = True
    """Try exact inversion first, which the order of the batches does not concern."""
    features: bool = True
    """Begin with what the update of a dense layer behind the convolutions shows of each image, where it can be read."""
    surrogate: CountOrZero = 0
    """Iterations of the surrogate model (Zhu et al. 2023) for a first guess; 0: none."""
    simulation: Literal["steps", "epochs", "gradient"] = "steps"
    """steps: every local step as it is; the baselines: one step for an epoch, one gradient for everything."""
    inputs: Literal["free", "shared"] = "free"
    """free: guessed anew in every epoch; shared: one set for all epochs, which assumes a known order."""
    order_turns: CountOrZero = 0
    """So many times the order of the batches is searched, too, between searches of the images, which are then the same
    in all epochs; for clients of a few images and larger learning rates. 0: the order is not searched."""
    prior: Literal["mean", "max", "sorted", "moments"] = "mean"
    """What all epochs must have in common: a statistic of their inputs that does not depend on the order."""
    prior_distance: Literal["l2", "l1", "cosine"] = "l2"
    """How far apart two epochs' statistics are."""
    prior_weight: Weight | tuple[Weight, ...] = 1.0
    """Weight of the order-invariant prior; 0 leaves it out. Of several, that whose reconstruction explains the update
    best is kept: the server can see that, and no truth is needed."""
    distance: Literal["whole", "layers", "cosine"] = "cosine"
    """Squared distance of the updates, relative to the norm of the whole or of each layer; or 1 - their cosine."""
    total_variation: Weight = 0.001
    """Weight of the total variation of images."""
    optimizer: Literal["adam", "signed"] = "signed"
    """Adam on the gradient, or on its signs (Geiping et al. 2020)."""
    iterations: Count = 400
    """Steps of the optimiser."""
    learning_rate: Positive = 0.1
    """Of Adam, with cosine decay."""
    start_spread: Weight = 0.1
    """Standard deviation of the first guess, as a share of the inputs' range."""
    restarts: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Starts, as replicas; the best by matching loss is returned."""
    rounds: Literal["each", "together"] = "each"
    """together: all kept rounds of a client are taken for more epochs of the same examples."""
    epochs: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = ()
    """Numbers of local epochs to try, where clients choose their own; empty: as many as the server asked for."""
    batch_sizes: tuple[Count, ...] = ()
    """Batch sizes to try; empty: what the server asked for."""
    unroll: Count | None = None
    """Differentiate through the last so many local steps only; null: through all."""
    segment: Count | None = None
    """Local steps whose graph is held at once; null: the square root of their number."""


class AutomaticAttack(_ImageAttack):
    """The ladder: whatever is exact first, then what fits the data; most certified, then the best matching loss."""

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
        | FedAvgAttack
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
    public_rows: bool = False
    """It holds the held-out rows as public examples of the same kind, to calibrate attacks on images (`shadows`)."""
    defence: bool = True
    """It knows the settings of the clients' defence and adapts to them."""
