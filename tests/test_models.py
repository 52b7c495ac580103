# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from fedsim.data import load_dataset
from fedsim.errors import ModelError
from fedsim.models import build_model, describe
from fedsim.scenario import EmbeddedData, ModelSection

SPEC: TypeAdapter[Any] = TypeAdapter(ModelSection)
IMAGE_MODELS: list[dict[str, Any]] = [
    {"name": "logistic"},
    {"name": "mlp", "hidden": [32, 16], "activation": "tanh"},
    {"name": "cnn"},
    {"name": "cnn", "variant": "lenet"},
    {"name": "cnn", "variant": "convnet", "width": 4},
    {"name": "cnn", "variant": "convnet", "width": 4, "norm": "group"},
    {"name": "cnn", "variant": "convnet", "width": 3, "norm": "batch"},
    {"name": "resnet8", "width": 4},
    {"name": "resnet8", "width": 5, "norm": "batch"},
    {"name": "resnet18", "width": 4},
    {"name": "resnet18", "width": 4, "norm": "batch"},
]
TRANSFORMER = {"name": "transformer", "dim": 16, "heads": 2}
LEAVES = (nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d)


def build(spec: dict[str, Any], shape: tuple[int, ...], classes: int = 10, seed: int = 0, **kind: Any) -> nn.Module:
    return build_model(SPEC.validate_python(spec), shape, classes, seed, **kind)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 11), (1, 25, 25), (1, 28, 28), (3, 32, 32)], ids=str)
@pytest.mark.parametrize("spec", IMAGE_MODELS, ids=str)
def test_images_of_any_size(spec: dict[str, Any], shape: tuple[int, ...]) -> None:
    model = build(spec, shape, 7)
    assert model.training
    assert model(rand(3, *shape)).shape == (3, 7)


def zoo() -> list[tuple[nn.Module, torch.Tensor]]:
    models = [(build(spec, (1, 12, 12)), rand(6, 1, 12, 12)) for spec in IMAGE_MODELS]
    tokens = torch.randint(0, 10, (6, 9), generator=torch.Generator().manual_seed(0))
    return [*models, (build(TRANSFORMER, (9,)), tokens)]


def test_parameters_belong_to_known_leaves_that_are_used_once() -> None:
    for model, x in zoo():
        owners = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        assert all(type(m) in LEAVES for m in owners)
        calls = Counter[nn.Module]()
        for m in owners:
            m.register_forward_hook(lambda module, inputs, output, calls=calls: calls.update([module]))
        model(x)
        assert calls == Counter(owners)


def test_the_first_dimension_is_independent_examples() -> None:
    """Each example alone gives what it gives in a batch (BatchNorm in evaluation mode)."""
    for model, x in zoo():
        model.eval()
        whole = model(x)
        for i in range(len(x)):
            torch.testing.assert_close(model(x[i : i + 1])[0], whole[i], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model(torch.cat([x, x]))[len(x) :], whole, atol=1e-5, rtol=1e-5)


def test_weights_come_from_the_seed_and_from_nowhere_else() -> None:
    before = torch.random.get_rng_state()
    for spec in IMAGE_MODELS:
        torch.manual_seed(1)
        one = build(spec, (1, 28, 28), seed=4)
        torch.manual_seed(2)
        same, other = build(spec, (1, 28, 28), seed=4), build(spec, (1, 28, 28), seed=5)
        pairs = list(zip(one.state_dict().values(), same.state_dict().values(), strict=True))
        assert all(torch.equal(a, b) for a, b in pairs)
        assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
        assert torch.equal(torch.random.get_rng_state(), torch.Generator().manual_seed(2).get_state())
    torch.random.set_rng_state(before)


def test_the_benchmark_networks() -> None:
    """The networks of the speed comparison with other frameworks, layer by layer."""
    cnn = nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    for reference, name in ((cnn, "cnn"), (mlp, "mlp")):
        model = build({"name": name}, (1, 28, 28))
        assert [repr(layer) for layer in model.children()] == [repr(layer) for layer in reference.children()]
        reference.load_state_dict(model.state_dict())
        x = rand(2, 1, 28, 28)
        assert torch.equal(model(x), reference(x))


def test_convnet_is_that_of_the_paper() -> None:
    """Inverting Gradients: eight convolutions, and 36 times the width into the head at 32x32."""
    model = build({"name": "cnn", "variant": "convnet", "width": 64, "norm": "batch"}, (3, 32, 32))
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels // 64 for m in convolutions] == [1, 2, 2, 4, 4, 4, 4, 4]
    assert next(m for m in model.modules() if isinstance(m, nn.Linear)).in_features == 36 * 64
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 8


def test_lenet_is_that_of_the_paper() -> None:
    """Deep Leakage from Gradients: 768 features at 32x32, 588 at 28x28, weights in [-0.5, 0.5], no ReLU."""
    for shape, features in (((3, 32, 32), 768), ((1, 28, 28), 588)):
        model = build({"name": "cnn", "variant": "lenet"}, shape)
        assert next(m for m in model.modules() if isinstance(m, nn.Linear)).in_features == features
        assert not any(isinstance(m, nn.ReLU | nn.MaxPool2d) for m in model.modules())
        flat = torch.cat([p.flatten() for p in model.parameters()])
        assert 0.45 < flat.abs().max() <= 0.5


def test_transformer_is_causal_and_twice_differentiable() -> None:
    model = build(TRANSFORMER, (9,), 20)
    x = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[:, 5] = (y[:, 5] + 1) % 20
    before, after = model(x), model(y)
    assert before.shape == (2, 9, 20)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    loss = nn.functional.cross_entropy(before.flatten(0, 1), x.flatten())
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(g.pow(2).sum() for g in gradients).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("spec", "needed"),
    [
        ({"name": "cnn"}, 0.9),
        ({"name": "cnn", "variant": "convnet", "width": 4}, 0.8),
        ({"name": "resnet8", "width": 8}, 0.9),
        ({"name": "mlp"}, 0.9),
        ({"name": "logistic"}, 0.85),
    ],
    ids=str,
)
def test_models_learn_digits(spec: dict[str, Any], needed: float) -> None:
    data = load_dataset(EmbeddedData(source="digits"), 0)
    model = build(spec, data.input_shape, data.classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        rows = torch.randint(0, len(data.x_train), (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(data.x_train[rows]), data.y_train[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (model.eval()(data.x_test).argmax(1) == data.y_test).float().mean()
    assert accuracy > needed


def test_describe() -> None:
    assert describe(build({"name": "mlp"}, (1, 28, 28))) == "mlp 784-128-10, 101,770 parameters"
    assert describe(build({"name": "logistic"}, (30,), 2)) == "logistic 30-2, 62 parameters"
    assert describe(build({"name": "mlp", "hidden": []}, (30,), 2)) == "mlp 30-2, 62 parameters"
    assert describe(build({"name": "cnn"}, (1, 28, 28))) == "cnn small for 1x28x28, 18,378 parameters"
    assert describe(build({"name": "resnet8"}, (1, 28, 28))).startswith("resnet8 of width 16, group norm, ")
    assert describe(nn.Linear(3, 2)) == "Linear, 8 parameters"


@pytest.mark.parametrize(
    ("spec", "shape", "kind", "words"),
    [
        ({"name": "cnn"}, (30,), "table", r"cnn reads images, but .* \(30,\); use mlp"),
        ({"name": "resnet8"}, (30,), None, "resnet8 reads images"),
        ({"name": "cnn"}, (1, 3, 9), "image", "at least 4x4 pixels, but the data has 3x9"),
        ({"name": "resnet18"}, (1, 7, 7), "image", "at least 8x8"),
        ({"name": "cnn", "variant": "convnet"}, (1, 5, 5), "image", "at least 6x6"),
        ({"name": "transformer"}, (1, 8, 8), "image", "transformer reads text"),
        ({"name": "transformer"}, (30,), "table", "transformer reads text"),
        ({"name": "transformer", "dim": 10, "heads": 4}, (30,), "text", r"model\.dim 10 is not a multiple"),
        ({"name": "mlp"}, (32,), "text", "mlp does not read text; use transformer"),
    ],
)
def test_models_that_do_not_fit(spec: dict[str, Any], shape: tuple[int, ...], kind: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        build(spec, shape, kind=kind)
    assert "\n" not in str(caught.value)


# --- the user's own model -------------------------------------------------------------------------------------------

OWN = """
import torch
from torch import nn

def good(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))

def text(shape, classes):
    return nn.Embedding(classes, classes)

def wrong_output(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes + 1))

def wrong_input(shape, classes):
    return nn.Linear(3, classes)

def no_module(shape, classes):
    return lambda x: x

def fails(shape, classes):
    raise RuntimeError("two\\nlines")

def nothing_to_train(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(classes))

def gives_a_tuple(shape, classes):
    return nn.LSTM(64, classes)

def leaves(shape, classes):
    raise SystemExit(0)

class LeavesLater(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(classes))
    def forward(self, x):
        raise SystemExit(0)

a_number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "own_model_for_test"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / "leaves_for_test.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "broken_for_test.py").write_text("def f(:\n")
    (tmp_path / "needs_more_for_test.py").write_text("import no_such_package_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return f"import:{name}"


def test_own_model_from_the_working_directory(own: str) -> None:
    path = list(sys.path)
    model = build({"name": f"{own}:good"}, (1, 8, 8), seed=1)
    assert sys.path == path
    assert model.training
    assert model(rand(4, 1, 8, 8)).shape == (4, 10)
    again = build({"name": f"{own}:good"}, (1, 8, 8), seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    fresh = build({"name": f"{own}:good"}, (1, 8, 8), seed=1)[1]  # type: ignore[index]
    assert torch.equal(fresh.running_var, torch.ones(64))  # trying it out has left no trace
    assert build({"name": f"{own}:text"}, (9,), 20, kind="text")(torch.zeros(3, 9, dtype=torch.int64)).shape == (
        3,
        9,
        20,
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("wrong_output", r"output for two examples is \(2, 11\), where \(2, 10\) is needed"),
        ("wrong_input", r"fails on inputs of shape \(2, 1, 8, 8\)"),
        ("no_module", "returned function, not a torch"),
        ("fails", "two lines"),
        ("nothing_to_train", "no parameters"),
        ("gives_a_tuple", "fails on inputs|tuple"),
        ("leaves", r"calling it .* failed \(SystemExit: 0\)"),
        ("LeavesLater", r"fails on inputs .*SystemExit: 0"),
        ("missing", r"has no function missing; name one that takes \(input_shape, classes\)"),
        ("god", r"has no function god \(did you mean good\?\)"),
        ("a_number", "has no function a_number"),
    ],
)
def test_own_model_that_is_wrong(own: str, function: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        build({"name": f"{own}:{function}"}, (1, 8, 8))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("no_such_module_here", "cannot be imported .ModuleNotFoundError.*working directory .*/.* PYTHONPATH"),
        ("no_such_package_here.module", "cannot be imported .ModuleNotFoundError.*working directory .*/.* PYTHONPATH"),
        ("broken_for_test", "SyntaxError.*; mend it"),
        ("needs_more_for_test", "no_such_package_at_all.*; mend it"),
        ("leaves_for_test", r"cannot be imported \(SystemExit: 0\); mend it"),
    ],
)
def test_own_module_that_is_wrong(own: str, module: str, words: str) -> None:
    path = list(sys.path)
    with pytest.raises(ModelError, match=words):
        build({"name": f"import:{module}:f"}, (1, 8, 8))
    assert sys.path == path
