# SPDX-License-Identifier: Apache-2.0
"""The model zoo: builders by name.

Every parameter belongs to a leaf module (Linear, Conv2d, Embedding, LayerNorm, GroupNorm, BatchNorm2d) that is used
once in a forward pass, and the first dimension is nothing but a number of independent examples (BatchNorm apart): so
the replica kernel can put batched layers in their place and feed the examples of many clients at once.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fedsim.errors import ModelError
from fedsim.randomness import stream
from fedsim.residual import ResNet, norm_layer
from fedsim.scenario import (
    CnnModel,
    ImportedModel,
    ImprintModel,
    LogisticModel,
    MlpModel,
    ResnetModel,
    TransformerModel,
)
from fedsim.scenario_errors import nearest
from fedsim.transformer import Transformer

if TYPE_CHECKING:
    from fedsim.scenario import ModelSection

Shape = tuple[int, ...]
Kind = Literal["image", "table", "text"]
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
}


class Stack(nn.Sequential):
    """Layers one after another, with a title for people."""

    def __init__(self, title: str, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.title = title


def build_model(
    spec: ModelSection, dataset_shape: Shape, classes: int, seed: int, *, kind: Kind | None = None
) -> nn.Module:
    """The model with initial weights from the stream (seed, "model"); the global random state is left as it was.

    `dataset_shape` is the shape of one example: (C, H, W), (F,) or, for text, (T,) with `classes` the vocabulary.
    `kind` is that of the data set; without it a text and a table cannot be told apart, and are not.
    """
    _check_fit(spec, dataset_shape, kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(seed, "model").integers(2**63)))
        match spec:
            case LogisticModel():
                return _linear_layers("logistic", [math.prod(dataset_shape), classes], nn.Identity)
            case MlpModel():
                widths = [math.prod(dataset_shape), *spec.hidden, classes]
                return _linear_layers("mlp", widths, _ACTIVATIONS[spec.activation])
            case CnnModel():
                return _cnn(spec, dataset_shape, classes)
            case ImprintModel():
                return _imprint(spec, dataset_shape, classes)
            case ResnetModel():
                blocks = {"resnet8": (1, 1, 1), "resnet18": (2, 2, 2, 2)}[spec.name]
                return ResNet(spec.name, dataset_shape[0], classes, blocks, spec.width, spec.norm)
            case TransformerModel():
                return Transformer(classes, dataset_shape[0], spec.dim, spec.heads, spec.layers)
            case ImportedModel():
                return _imported(spec.name, dataset_shape, classes, kind)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients, so that looking at it leaves it as it was."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def describe(model: nn.Module) -> str:
    """One line for people: what the model is, and its number of trainable parameters."""
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{getattr(model, 'title', type(model).__name__)}, {count:,} parameters"


def _check_fit(spec: ModelSection, shape: Shape, kind: Kind | None) -> None:
    """Models and data that cannot go together, in a sentence rather than in a shape error later."""
    if isinstance(spec, ImportedModel):
        return
    if isinstance(spec, TransformerModel):
        if len(shape) != 1 or kind in ("table", "image"):
            raise ModelError(
                f"model.name transformer reads text, but the data has inputs of shape {shape}; use mlp or cnn"
            )
        if spec.dim % spec.heads:
            raise ModelError(f"model.dim {spec.dim} is not a multiple of model.heads {spec.heads}")
    elif kind == "text":
        raise ModelError(f"model.name {spec.name} does not read text; use transformer")
    elif isinstance(spec, CnnModel | ResnetModel | ImprintModel):
        if len(shape) != 3:
            raise ModelError(f"model.name {spec.name} reads images, but the data has inputs of shape {shape}; use mlp")
        smallest = 8 if isinstance(spec, ResnetModel) else 6 if spec.variant == "convnet" else 4
        if min(shape[1:]) < smallest:
            raise ModelError(
                f"model.name {spec.name} needs images of at least {smallest}x{smallest} pixels, but the data has"
                f" {shape[1]}x{shape[2]}; use mlp"
            )


# --- linear and convolutional networks ------------------------------------------------------------------------------


def _linear_layers(title: str, widths: list[int], activation: Callable[[], nn.Module]) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(widths[0], widths[1])]
    for inputs, outputs in pairwise(widths[1:]):
        layers += [activation(), nn.Linear(inputs, outputs)]
    return Stack(f"{title} {'-'.join(map(str, widths))}", *layers)


def _cnn(spec: CnnModel, shape: Shape, classes: int) -> nn.Module:
    build = {"small": _small, "lenet": _lenet, "convnet": _convnet, "averaging": _averaging}[spec.variant]
    body = build(spec, shape)
    with torch.no_grad():
        features = math.prod(nn.Sequential(*body).eval()(torch.zeros(1, *shape)).shape)
    model = Stack(
        f"cnn {spec.variant} for {'x'.join(map(str, shape))}", *body, nn.Flatten(), nn.Linear(features, classes)
    )
    if spec.variant == "lenet":
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    if spec.variant == "convnet":
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model.train()


def _imprint(spec: ImprintModel, shape: Shape, classes: int) -> nn.Module:
    inner = _cnn(CnnModel(name="cnn", variant=spec.variant), shape, classes)
    size = math.prod(shape)
    block = [nn.Flatten(), nn.Linear(size, spec.bins), nn.ReLU() if spec.activation == "relu" else nn.Hardtanh(0, 1)]
    behind = [nn.Linear(spec.bins, size), nn.Unflatten(1, shape), *inner.children()]
    return Stack(f"imprint {spec.bins} before {getattr(inner, 'title', 'cnn')}", *block, *behind).train()


def _small(spec: CnnModel, shape: Shape) -> list[nn.Module]:
    """Two 5x5 convolutions with max-pooling; images below 16x16, which would vanish, are padded."""
    padding = 0 if min(shape[1:]) >= 16 else 2
    return [
        nn.Conv2d(shape[0], 16, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
    ]  # fmt: skip


def _lenet(spec: CnnModel, shape: Shape) -> list[nn.Module]:
    """Zhu, Liu, Han 2019, "Deep Leakage from Gradients": three 5x5 convolutions of 12 channels, strides 2, 2, 1.

    Sigmoids and weights from U(-0.5, 0.5), so that it is twice differentiable and its gradients are not tiny.
    """
    layers: list[nn.Module] = []
    for inputs, stride in ((shape[0], 2), (12, 2), (12, 1)):
        layers += [nn.Conv2d(inputs, 12, 5, stride=stride, padding=2), nn.Sigmoid()]
    return layers


def _averaging(spec: CnnModel, shape: Shape) -> list[nn.Module]:
    """Dimitrov et al. 2022, "Data Leakage in Federated Averaging": two 3x3 convolutions and a hidden layer.

    Channels are 1 and 2 times the width, the hidden layer 25/8 of it: 32, 64, 100 for FEMNIST, 64, 128, 200 for CIFAR.
    """
    width = spec.width
    features = 2 * width * (shape[1] // 4) * (shape[2] // 4)
    return [
        nn.Conv2d(shape[0], width, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(features, max(1, 25 * width // 8)), nn.ReLU(),
    ]  # fmt: skip


def _convnet(spec: CnnModel, shape: Shape) -> list[nn.Module]:
    """Geiping et al. 2020, "Inverting Gradients": eight 3x3 convolutions, 3x3 max-pooling after the 6th and the 8th.

    Channels are 1, 2, 2, 4, 4, 4, 4, 4 times the width; the paper has BatchNorm after each. Images that two poolings
    by 3 would reduce to nothing (below 9 pixels) are pooled by 2 the second time. Weights from
    N(0, 2 / fan_in) (He et al. 2015): with PyTorch's own, eight layers without a norm do not learn.
    """
    channels = [shape[0], *(spec.width * factor for factor in (1, 2, 2, 4, 4, 4, 4, 4))]
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise(channels), start=1):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1)]
        layers += [norm_layer(spec.norm, outputs)] if spec.norm != "none" else []
        layers += [nn.ReLU()]
        if number in (6, 8):
            layers += [nn.MaxPool2d(3 if number == 6 or min(shape[1:]) >= 9 else 2)]
    return layers


# --- the user's own model -------------------------------------------------------------------------------------------

_ANYTHING = (Exception, SystemExit)
"""What can go wrong in code that we did not write; a SystemExit of its own would end the run in silence."""


def _imported(name: str, shape: Shape, classes: int, kind: Kind | None) -> nn.Module:
    """Call `function(input_shape, classes)` of `import:module:function`, and try the result on two examples."""
    _, module_name, function_name = name.split(":")
    try:
        with _working_directory_on_path():
            module = importlib.import_module(module_name)
    except _ANYTHING as error:
        raise ModelError(
            f"model.name {name}: the module {module_name} cannot be imported ({_reason(error)});"
            f" {_remedy(error, module_name)}"
        ) from error
    function: Any = getattr(module, function_name, None)
    if not callable(function):
        named = [word for word, value in vars(module).items() if callable(value) and not word.startswith("_")]
        raise ModelError(
            f"model.name {name}: the module {module_name} has no function {function_name}"
            f"{nearest(function_name, named)}; name one that takes (input_shape, classes) and returns a torch.nn.Module"
        )
    try:
        model = function(shape, classes)
    except _ANYTHING as error:
        raise ModelError(
            f"model.name {name}: calling it with ({shape}, {classes}) failed ({_reason(error)}); mend the function"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model.name {name}: the function returned {type(model).__name__}, not a torch.nn.Module; return one"
        )
    _try_out(model, name, shape, classes, kind)
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(f"model.name {name}: the model has no parameters to train")
    return model.train()


def _try_out(model: nn.Module, name: str, shape: Shape, classes: int, kind: Kind | None) -> None:
    """Two examples through the model; in evaluation mode, so that running statistics stay as they are."""
    examples = torch.zeros(2, *shape, dtype=torch.int64 if kind == "text" else torch.float32)
    expected = (2, *shape, classes) if kind == "text" else (2, classes)
    try:
        with torch.no_grad():
            output = model.eval()(examples)
    except _ANYTHING as error:
        raise ModelError(
            f"model.name {name}: it fails on inputs of shape {tuple(examples.shape)} ({_reason(error)})"
        ) from error
    found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if found != expected:
        raise ModelError(f"model.name {name}: its output for two examples is {found}, where {expected} is needed")


@contextmanager
def _working_directory_on_path() -> Iterator[None]:
    """The user's module may lie in the working directory, which a console script does not have on its path."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _remedy(error: BaseException, module: str) -> str:
    """A module that is not there is looked for elsewhere; one that is there is mended."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return (
            f"it was looked for in the working directory {Path.cwd()} and on Python's path: go to the folder that it is"
            " in, or name that in PYTHONPATH"
        )
    return f"mend it until `python -c 'import {module}'` works"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
