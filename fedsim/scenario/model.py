# SPDX-License-Identifier: Apache-2.0
"""The model of a scenario."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from fedsim.scenario.numbers import Width
from fedsim.scenario.section import Section


class LogisticModel(Section):
    """Multinomial logistic regression: one linear layer."""

    name: Literal["logistic"]
    """One linear layer."""


class MlpModel(Section):
    """A multilayer perceptron."""

    name: Literal["mlp"]
    """Linear layers with an activation between them."""
    hidden: Annotated[tuple[Width, ...], Field(max_length=1000)] = (128,)
    """The widths of the hidden layers."""
    activation: Literal["relu", "sigmoid", "tanh", "gelu"] = "relu"
    """Between the layers."""


class CnnModel(Section):
    """A small convolutional network."""

    name: Literal["cnn"]
    """Convolutions, pooling, linear head."""
    variant: Literal["small", "lenet", "convnet", "averaging"] = "small"
    """small: two 5x5 convolutions (16, 32) with max-pooling; lenet: the sigmoid LeNet of Deep Leakage from Gradients;
    convnet: the 8-layer ConvNet of Inverting Gradients; averaging: two 3x3 convolutions and a hidden layer, of Data
    Leakage in Federated Averaging."""
    width: Width = 32
    """Channels of the first convolution of `convnet` and `averaging`."""
    norm: Literal["none", "group", "batch"] = "none"
    """Normalisation after the convolutions of `convnet`."""


class ResnetModel(Section):
    """A residual network for small images (He et al. 2016)."""

    name: Literal["resnet8", "resnet18"]
    """resnet8: three stages of one block; resnet18: four stages of two blocks."""
    width: Width = 16
    """Channels of the first stage."""
    norm: Literal["group", "batch"] = "group"
    """BatchNorm mixes the examples of a batch, so it cannot be used with a privacy claim."""


class TransformerModel(Section):
    """A small decoder-only transformer for text."""

    name: Literal["transformer"]
    """Causal self-attention; predicts each next token."""
    dim: Annotated[int, Field(ge=4, le=2**24)] = 64
    """Width of the embedding; a multiple of `heads`."""
    heads: Width = 4
    """Attention heads."""
    layers: Annotated[int, Field(ge=1, le=1000)] = 2
    """Blocks."""


class ImprintModel(Section):
    """A cnn behind the block by which a malicious server reads its inputs (Robbing the Fed, Fowl et al. 2022)."""

    name: Literal["imprint"]
    """Dense to `bins` units, activation, dense back to the input's shape, then the cnn; see adversary.active."""
    bins: Annotated[int, Field(ge=2, le=2**24)] = 512
    """Units of the block."""
    activation: Literal["relu", "hardtanh"] = "relu"
    """relu: bins are differences of neighbouring rows; hardtanh: each row is a bin, which noise and several local steps
    disturb far less (the sparse variant)."""
    variant: Literal["small", "lenet", "convnet"] = "small"
    """The network behind the block, as of model cnn."""


class ImportedModel(Section):
    """The user's own model."""

    name: Annotated[str, Field(pattern=r"^import:[\w.]+:\w+$", examples=["import:mymodule:build"])]
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
    | Annotated[ImprintModel, Tag("imprint")]
    | Annotated[ImportedModel, Tag("import")],
    Discriminator(_model_tag),
]
