# SPDX-License-Identifier: Apache-2.0
"""The data of a scenario, and how it is divided among the clients."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsim.scenario.numbers import MOST, Count, CountOrZero, Part, Positive
from fedsim.scenario.section import Section


class _Data(Section):
    test_fraction: Part = 0.2
    """The share of the rows held out to evaluate the model, where the source has no test part of its own."""
    limit: Annotated[int, Field(ge=2, le=MOST)] | None = None
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


class _Text(_Data):
    tokens: Literal["characters", "words"] = "characters"
    """What a token is."""
    length: int = Field(32, ge=2, le=1024)
    """Tokens in one example."""
    vocabulary: Annotated[int, Field(ge=2, le=2**24)] = 2000
    """The most frequent tokens that are kept; the others become one unknown token."""


class DescriptionsData(_Text):
    """Real English that comes with an installed package: what scikit-learn says of its data sets."""

    source: Literal["descriptions"]
    """14 texts, 43,000 characters, each a natural client; the model predicts each next token."""


class TextData(_Text):
    """A local `.txt` file, or `.json[.gz]` that maps a speaker to a list of texts (natural clients)."""

    source: Literal["text"]
    """Text, cut into windows of characters or words; the model predicts each next token."""
    path: str
    """The file, relative to the working directory."""


class HubData(_Data):
    """A data set of the Hugging Face hub through flwr-datasets (extra `hub`); the only source that uses the network."""

    source: Literal["hub"]
    """A data set that is downloaded when the scenario runs."""
    dataset: str = Field(pattern=r"^\w[\w.-]*/\w[\w.-]*$", examples=["ylecun/mnist"])
    """Owner and name on the hub, for example `ylecun/mnist`."""
    subset: str | None = None
    """The configuration of the data set, where it has several."""
    x: str | None = None
    """The column with the input; null: the only column of images, or, for a table, all columns but the target."""
    target: str = "label"
    """The column to predict."""
    size: int | None = Field(None, ge=4, le=512)
    """Every image is scaled to size x size pixels; null: all have one size already."""
    drop: tuple[str, ...] = ()
    """Columns of a table to leave out."""
    categorical: tuple[str, ...] = ()
    """Numeric columns of a table that are codes of categories; texts and classes of the hub are categorical anyway."""


DataSection = Annotated[
    EmbeddedData | DescriptionsData | NpzData | CsvData | ImageFolderData | TextData | HubData,
    Field(discriminator="source"),
]


class _Partition(Section):
    examples_per_client: Count | None = None
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
    alpha: Positive = 0.5
    """Concentration: 0.1 is very uneven, 100 is nearly iid."""
    min_examples: CountOrZero = 1
    """No client has fewer rows than this (only when the rows are divided)."""


class ShardPartition(_Partition):
    """Rows sorted by label are cut into shards, and each client gets a few (McMahan et al. 2017)."""

    kind: Literal["shards"]
    """Shards of sorted rows."""
    shards_per_client: Count = 2
    """Shards for each client: with 2, a client sees about two classes."""


class ColumnPartition(Section):
    """Natural clients: rows with the same value in a column belong to one client."""

    kind: Literal["column"]
    """By a column of the data."""
    column: str | None = None
    """The column (of a table); null: the clients that the data names itself (`client_train` of an .npz, the speakers of
    a text)."""
    min_examples: Count = 1
    """Clients with fewer rows are left out."""


class QuantityPartition(Section):
    """Quantity skew: the sizes of the clients follow a power law, their content is iid."""

    kind: Literal["quantity"]
    """Power-law sizes."""
    exponent: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Size of the client of rank r is proportional to r**-exponent; 0 is even."""
    min_examples: Count = 1
    """No client has fewer rows than this."""


PartitionSection = Annotated[
    IidPartition | DirichletPartition | ShardPartition | ColumnPartition | QuantityPartition,
    Field(discriminator="kind"),
]
