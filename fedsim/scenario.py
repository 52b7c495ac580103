# SPDX-License-Identifier: Apache-2.0
"""The scenario: one frozen object that says everything about a run, and the schema of the YAML file that it comes from.

A scenario names the data and how it is divided, the model, what the server and the clients do, who takes part, which
defence the clients use, what the server keeps of what it sees, and the seed. Nothing else decides a result.

Reading a file, overriding fields and naming the line of an error is the work of `fedsim.scenario_file`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator


class Section(BaseModel):
    """A part of a scenario: frozen, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def _shorthand(field: str) -> BeforeValidator:
    """Let `data: mnist` stand for `data: {source: mnist}`."""
    return BeforeValidator(lambda value: {field: value} if isinstance(value, str) else value)


# --- the data -------------------------------------------------------------------------------------------------------


class _Data(Section):
    test_fraction: float = Field(0.2, gt=0, lt=1)
    """The share of the rows held out to evaluate the model, where the source has no test part of its own."""
    limit: int | None = Field(None, ge=2)
    """Use at most this many training rows (drawn by the seed); null uses all."""


class EmbeddedData(_Data):
    """Real data that comes with an installed package: nothing is downloaded."""

    source: Literal["digits", "breast_cancer", "mnist", "faces"]
    """digits: 1,797 8x8; breast_cancer: 569 rows, 30 columns; mnist: 5,000 28x28; faces: 200 25x25, face or not."""


class NpzData(_Data):
    """A local `.npz` file with x_train, y_train and, if it has them, x_test, y_test, client_train, class_names."""

    source: Literal["npz"]
    """A NumPy archive."""
    path: str
    """The file, relative to the working directory."""


class CsvData(_Data):
    """A local `.csv` or `.csv.gz` file: numeric and categorical columns are encoded, and can be decoded again."""

    source: Literal["csv"]
    """A table with a header line."""
    path: str
    """The file, relative to the working directory."""
    target: str
    """The column to predict."""
    drop: tuple[str, ...] = ()
    """Columns to leave out."""
    categorical: tuple[str, ...] = ()
    """Numeric columns that are codes of categories; columns of text are categorical anyway."""


class ImageFolderData(_Data):
    """A local folder with one sub-folder of images for each class."""

    source: Literal["images"]
    """A folder of image files."""
    path: str
    """The folder, relative to the working directory."""
    size: int = Field(32, ge=4, le=512)
    """Every image is scaled to size x size pixels."""
    grey: bool = False
    """One grey channel in place of three colours."""


class TextData(_Data):
    """A local `.txt` file, or `.json[.gz]` that maps a speaker to a list of texts (natural clients)."""

    source: Literal["text"]
    """Text, cut into windows of characters or words; the model predicts each next token."""
    path: str
    """The file, relative to the working directory."""
    tokens: Literal["characters", "words"] = "characters"
    """What a token is."""
    length: int = Field(32, ge=2, le=1024)
    """Tokens in one example."""
    vocabulary: int = Field(2000, ge=2)
    """The most frequent tokens that are kept; the others become one unknown token."""


class HubData(_Data):
    """A data set of the Hugging Face hub through flwr-datasets (extra `hub`); the only source that uses the network."""

    source: Literal["hub"]
    """A data set that is downloaded when the scenario runs."""
    dataset: str
    """The name on the hub, for example `ylecun/mnist`."""
    subset: str | None = None
    """The configuration of the data set, where it has several."""
    x: str = "image"
    """The column with the input; for a table, leave it and name `target`: all other columns are input."""
    target: str = "label"
    """The column to predict."""


DataSection = Annotated[
    EmbeddedData | NpzData | CsvData | ImageFolderData | TextData | HubData, Field(discriminator="source")
]


# --- the partition --------------------------------------------------------------------------------------------------


class _Partition(Section):
    examples_per_client: int | None = Field(None, ge=1)
    """null: the rows are divided, each to one client. A number: every client draws that many rows by the seed, so that
    a population can be larger than the data (rows are then shared between clients)."""


class IidPartition(_Partition):
    """Every client holds a uniform sample."""

    kind: Literal["iid"] = "iid"
    """Uniformly at random."""


class DirichletPartition(_Partition):
    """Label skew: the clients' shares of each class follow Dirichlet(alpha) (Hsu et al. 2019)."""

    kind: Literal["dirichlet"]
    """Dirichlet over labels."""
    alpha: float = Field(0.5, gt=0)
    """Concentration: 0.1 is very uneven, 100 is nearly iid."""
    min_examples: int = Field(1, ge=0)
    """No client has fewer rows than this (only when the rows are divided)."""


class ShardPartition(_Partition):
    """Rows sorted by label are cut into shards, and each client gets a few (McMahan et al. 2017)."""

    kind: Literal["shards"]
    """Shards of sorted rows."""
    shards_per_client: int = Field(2, ge=1)
    """Shards for each client: with 2, a client sees about two classes."""


class ColumnPartition(Section):
    """Natural clients: rows with the same value in a column belong to one client."""

    kind: Literal["column"]
    """By a column of the data."""
    column: str | None = None
    """The column (of a table); null: the clients that the data names itself (`client_train` of an .npz, the speakers of
    a text)."""
    min_examples: int = Field(1, ge=1)
    """Clients with fewer rows are left out."""


class QuantityPartition(Section):
    """Quantity skew: the sizes of the clients follow a power law, their content is iid."""

    kind: Literal["quantity"]
    """Power-law sizes."""
    exponent: float = Field(1.0, ge=0)
    """Size of the client of rank r is proportional to r**-exponent; 0 is even."""
    min_examples: int = Field(1, ge=1)
    """No client has fewer rows than this."""


PartitionSection = Annotated[
    IidPartition | DirichletPartition | ShardPartition | ColumnPartition | QuantityPartition,
    Field(discriminator="kind"),
]


# --- the model ------------------------------------------------------------------------------------------------------


class LogisticModel(Section):
    """Multinomial logistic regression: one linear layer."""

    name: Literal["logistic"]
    """One linear layer."""


class MlpModel(Section):
    """A multilayer perceptron."""

    name: Literal["mlp"]
    """Linear layers with an activation between them."""
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = (128,)
    """The widths of the hidden layers."""
    activation: Literal["relu", "sigmoid", "tanh", "gelu"] = "relu"
    """Between the layers."""


class CnnModel(Section):
    """A small convolutional network."""

    name: Literal["cnn"]
    """Convolutions, pooling, linear head."""
    variant: Literal["small", "lenet", "convnet"] = "small"
    """small: two 5x5 convolutions (16, 32) with max-pooling; lenet: the sigmoid LeNet of Deep Leakage from Gradients;
    convnet: the 8-layer ConvNet of Inverting Gradients."""
    width: int = Field(32, ge=1)
    """Channels of the first convolution of `convnet`."""
    norm: Literal["none", "group", "batch"] = "none"
    """Normalisation after the convolutions of `convnet`."""


class ResnetModel(Section):
    """A residual network for small images (He et al. 2016)."""

    name: Literal["resnet8", "resnet18"]
    """resnet8: three stages of one block; resnet18: four stages of two blocks."""
    width: int = Field(16, ge=1)
    """Channels of the first stage."""
    norm: Literal["group", "batch"] = "group"
    """BatchNorm mixes the examples of a batch, so it cannot be used with a privacy claim."""


class TransformerModel(Section):
    """A small decoder-only transformer for text."""

    name: Literal["transformer"]
    """Causal self-attention; predicts each next token."""
    dim: int = Field(64, ge=4)
    """Width of the embedding; a multiple of `heads`."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    layers: int = Field(2, ge=1)
    """Blocks."""


class ImportedModel(Section):
    """The user's own model."""

    name: Annotated[str, Field(pattern=r"^import:[\w.]+:\w+$")]
    """`import:module:function`; the function takes (input_shape, classes) and returns a torch.nn.Module."""


def _model_tag(value: Any) -> str:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return "import" if isinstance(name, str) and name.startswith("import:") else str(name)


ModelSection = Annotated[
    Annotated[LogisticModel, Tag("logistic")]
    | Annotated[MlpModel, Tag("mlp")]
    | Annotated[CnnModel, Tag("cnn")]
    | Annotated[ResnetModel, Tag("resnet8")]
    | Annotated[ResnetModel, Tag("resnet18")]
    | Annotated[TransformerModel, Tag("transformer")]
    | Annotated[ImportedModel, Tag("import")],
    Discriminator(_model_tag),
]


# --- the server and its clients -------------------------------------------------------------------------------------


class _Strategy(Section):
    weighting: Literal["examples", "uniform"] | None = None
    """How updates are averaged; null: uniform with client-level privacy (which needs it), else by examples."""
    server_optimizer: Literal["sgd", "adam"] = "sgd"
    """What the server does with the average."""
    server_momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of the server's SGD."""


class FedAvgStrategy(_Strategy):
    """Federated averaging (McMahan et al. 2017): clients train locally and send the difference of the weights."""

    name: Literal["fedavg"] = "fedavg"
    """Weight updates."""
    server_learning_rate: float = Field(1.0, gt=0)
    """1.0 with SGD is plain averaging."""


class FedSgdStrategy(_Strategy):
    """Federated SGD: each client sends the gradient of one batch, the server takes the step."""

    name: Literal["fedsgd"]
    """One gradient for each client and round."""
    server_learning_rate: float = Field(0.1, gt=0)
    """The learning rate of the step."""


StrategySection = Annotated[FedAvgStrategy | FedSgdStrategy, Field(discriminator="name")]


class ClientSection(Section):
    """The local work of a client in one round. With fedsgd only `batch_size` applies."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    """The local optimiser; its state starts anew each round."""
    learning_rate: float = Field(0.05, gt=0)
    """The local learning rate."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: float = Field(0.0, ge=0)
    """L2 penalty, added to the gradient as torch.optim does."""
    epochs: int = Field(1, ge=1)
    """Passes over the client's data in a round."""
    steps: int | None = Field(None, ge=1)
    """Number of local steps, in place of epochs."""
    batch_size: int | None = Field(20, ge=1)
    """Examples in a batch (with Poisson batches: expected); null: all that the client has."""
    shuffle: bool = True
    """A new order in every epoch."""

    @model_validator(mode="after")
    def _epochs_or_steps(self) -> Self:
        if self.steps is not None and "epochs" in self.model_fields_set:
            raise ValueError("give either epochs or steps, not both")
        return self


class CohortSection(Section):
    """Who exists, and who takes part in a round."""

    population: int | None = Field(None, ge=1)
    """The number of clients; null: 20, or as many as the data names itself (partition: column)."""
    size: int | None = Field(None, ge=1)
    """Clients in a round (expected number, with Poisson sampling); null with null `rate`: everybody."""
    rate: float | None = Field(None, gt=0, le=1)
    """The share of the population in a round, in place of `size`."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """fixed: exactly `size` clients, without replacement; poisson: each client on its own with probability `rate`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.size is not None and self.rate is not None:
            raise ValueError("give either size or rate, not both")
        if self.size is not None and self.population is not None and self.size > self.population:
            raise ValueError(f"size {self.size} is larger than the population of {self.population}")
        return self


# --- the defence ----------------------------------------------------------------------------------------------------


class _Noise(Section):
    clipping_norm: float = Field(1.0, gt=0)
    """The norm that everything is clipped to (L2; with Laplace noise L1)."""
    noise_multiplier: float | None = Field(None, ge=0)
    """Noise scale divided by the clipping norm; 0 clips only, and supports no claim."""
    target_epsilon: float | None = Field(None, gt=0)
    """Find the smallest noise multiplier that spends at most this, in place of naming it."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """The delta of the claim; well below one over the number of units that are protected."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.noise_multiplier == 0 and self.target_epsilon is not None:
            raise ValueError("noise_multiplier 0 can never reach a finite target_epsilon; leave noise_multiplier out")
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ValueError("give exactly one of noise_multiplier and target_epsilon")
        return self


class ExampleDp(_Noise):
    """DP-SGD on the client (Abadi et al. 2016): each example's gradient is clipped, each step is noised."""

    batches: Literal["poisson", "shuffle"] = "poisson"
    """poisson: each example joins each batch independently, which is what amplification by sampling needs; shuffle:
    batches of an ordinary loader, accounted without amplification."""


class AdaptiveClipping(Section):
    """The clipping norm follows a quantile of the update norms (Andrew et al. 2021, Algorithm 1)."""

    quantile: float = Field(0.5, gt=0, lt=1)
    """The share of the updates that should be below the norm."""
    learning_rate: float = Field(0.2, gt=0)
    """Step of the geometric update of the norm."""
    bit_noise: float = Field(1.0, gt=0)
    """Standard deviation of the noise on a client's indicator bit (with secure aggregation: on the sum of the bits);
    the claim accounts for it."""


class ClientDp(_Noise):
    """The client clips and noises its whole update (fedavg) or gradient (fedsgd) before it leaves."""

    noise: Literal["gaussian", "laplace"] = "gaussian"
    """The distribution; laplace clips in L1."""
    adaptive: AdaptiveClipping | None = None
    """Let the clipping norm follow the norms; `clipping_norm` is where it starts. Gaussian only."""

    @model_validator(mode="after")
    def _adaptive_is_gaussian(self) -> Self:
        if self.adaptive is not None and self.noise != "gaussian":
            raise ValueError("adaptive clipping needs noise: gaussian")
        return self


class Prune(Section):
    """Only the largest entries of the update are sent."""

    kind: Literal["prune"]
    """Top-k sparsification."""
    keep: float = Field(0.1, gt=0, le=1)
    """The share of entries that is kept."""


class Quantise(Section):
    """Entries are rounded to a few levels between the smallest and the largest."""

    kind: Literal["quantise"]
    """Uniform quantisation."""
    bits: int = Field(8, ge=1, le=16)
    """2**bits levels."""


class Sign(Section):
    """Only signs are sent, scaled by the mean magnitude."""

    kind: Literal["sign"]
    """One bit for each entry (Bernstein et al. 2018)."""


Compression = Annotated[Prune | Quantise | Sign, Field(discriminator="kind")]


class DefenceSection(Section):
    """What the client does to protect itself, in this order: example_dp, client_dp, compression, secure aggregation."""

    example_dp: ExampleDp | None = None
    """Protects each example."""
    client_dp: ClientDp | None = None
    """Protects everything that a client holds."""
    compression: Annotated[Compression, _shorthand("kind")] | None = None
    """Sends less. No privacy claim rests on it; after noise it is post-processing and costs none."""
    secure_aggregation: bool = False
    """The server sees the sum of a round only (as an access model). Clients then share the noise between them."""
    accountant: Literal["pld", "rdp", "prv"] = "pld"
    """pld: privacy loss distributions (dp-accounting), tight; rdp: Renyi moments; prv: Opacus, Gaussian only."""


# --- the adversary, the engine, the whole ---------------------------------------------------------------------------


class AdversarySection(Section):
    """What the server keeps of what it sees. Whatever is not kept is still counted, with its norm."""

    keep_rounds: Literal["all"] | Annotated[int, Field(ge=0)] | tuple[int, ...] = "all"
    """Rounds whose tensors are written to the transcript: all, the first n, or a list."""
    keep_clients: Literal["all"] | Annotated[int, Field(ge=0)] | tuple[int, ...] = "all"
    """Clients whose updates are written: all, the first n of each cohort, or a list of clients."""


class EngineSection(Section):
    """Where the clients run. The result does not depend on it."""

    kind: Literal["inline"] = "inline"
    """inline: in this process, a whole cohort at once."""
    threads: int | None = Field(None, ge=1)
    """Threads of the mathematics; null: as many as there are cores."""
    chunk: int | None = Field(None, ge=1)
    """Clients that are trained at once; null: as many as fit the cache."""


class Scenario(Section):
    """Everything that decides a run."""

    name: str = Field("scenario", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    """Names the run folder."""
    question: str = ""
    """The question that the scenario answers, in a sentence."""
    data: Annotated[DataSection, _shorthand("source")] = EmbeddedData(source="mnist")
    """The data."""
    partition: Annotated[PartitionSection, _shorthand("kind")] = IidPartition()
    """How the rows are divided among the clients."""
    model: Annotated[ModelSection, _shorthand("name")] = MlpModel(name="mlp")
    """The model."""
    strategy: Annotated[StrategySection, _shorthand("name")] = FedAvgStrategy()
    """What the server does."""
    client: ClientSection = ClientSection()
    """What a client does."""
    cohort: CohortSection = CohortSection()
    """Who takes part."""
    rounds: int = Field(10, ge=1)
    """Rounds of training."""
    defence: DefenceSection = DefenceSection()
    """How the clients protect themselves."""
    adversary: AdversarySection = AdversarySection()
    """What the server keeps."""
    attacks: tuple[str, ...] = ()
    """Attacks to run on the transcript, by name."""
    audit: tuple[str, ...] = ()
    """Audits to run, by name."""
    evaluate_every: int = Field(1, ge=1)
    """Evaluate the model on held-out data after every so many rounds, and after the last."""
    engine: Annotated[EngineSection, _shorthand("kind")] = EngineSection()
    """Where it runs."""
    seed: int = Field(0, ge=0, lt=2**63)
    """All randomness of the simulation comes from this number."""

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        for check in (_fedsgd_has_one_step, _uniform_under_client_privacy, _no_batch_norm_under_privacy):
            check(self)
        return self


def _fedsgd_has_one_step(scenario: Scenario) -> None:
    local = scenario.client.model_fields_set - {"batch_size", "shuffle"}
    if isinstance(scenario.strategy, FedSgdStrategy) and local:
        raise ValueError(
            f"client.{sorted(local)[0]} has no meaning with strategy fedsgd, where a client sends one gradient;"
            " leave it out, or use strategy.server_learning_rate and client.batch_size"
        )


def _uniform_under_client_privacy(scenario: Scenario) -> None:
    if scenario.defence.client_dp and scenario.strategy.weighting == "examples":
        raise ValueError(
            "strategy.weighting examples lets one client outweigh the clipping norm, so no client-level claim holds;"
            " use uniform"
        )


def _no_batch_norm_under_privacy(scenario: Scenario) -> None:
    private = scenario.defence.example_dp or scenario.defence.client_dp
    if private and getattr(scenario.model, "norm", None) == "batch":
        raise ValueError(
            "model.norm batch mixes the examples of a batch and sends statistics that are not noised;"
            " use norm: group with a privacy claim"
        )
