# SPDX-License-Identifier: Apache-2.0
"""Inputs by division and linear algebra: exact where they say so, and never certified where they are wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients import data, gradient_of, knowledge_of, model_for, update_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedsim.attacks.closed_form import closed_form
from fedsim.attacks.lone_rows import lone_examples
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction
from fedsim.data import Dataset
from fedsim.errors import AttackError
from fedsim.privacy import prune, quantise, sign
from fedsim.scenario import DefenceSection
from fedsim.scenario.attack import ClosedFormAttack
from fedsim.training import LocalWork

SETTINGS = ClosedFormAttack(name="closed-form")
ACTIVATIONS = ("relu", "sigmoid", "tanh", "gelu")
DENSE: list[dict[str, Any]] = [{"name": "logistic"}, *({"name": "mlp", "activation": each} for each in ACTIVATIONS)]


def compressed(observation: Observation, change: Callable[[Tensor], Tensor]) -> Observation:
    row = change(torch.cat([entry.flatten() for entry in observation.update.values()])[None])[0]
    parts = row.split([entry.numel() for entry in observation.update.values()])
    pairs = zip(observation.update.items(), parts, strict=True)
    return replace(observation, update={name: part.view_as(entry) for (name, entry), part in pairs})


def trained(model: nn.Module, each: Dataset, steps: int = 60) -> nn.Module:
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(model(each.x_train), each.y_train).backward()
        optimiser.step()
    return model


def psnr(found: Reconstruction, originals: Tensor) -> list[float]:
    """Of each item, matched to the originals by optimal assignment; in the order of the items."""
    costs = ((found.inputs[:, None] - originals[None]) ** 2).flatten(2).mean(-1).double()
    items, matched = linear_sum_assignment(costs.numpy())
    return [-10 * math.log10(max(float(costs[i, j]), 1e-20)) for i, j in zip(items, matched, strict=True)]


def some_rows(each: Dataset, count: int, seed: int) -> Any:
    return np.random.default_rng(seed).choice(len(each.x_train), count, replace=False)


def check_certificates(found: Reconstruction, originals: Tensor) -> int:
    """How many items are certified; each of them must be right."""
    assert found.certified is not None
    assert len(found.inputs) == len(found.score) == len(found.certified)
    quality = psnr(found, originals)
    for right, sure, belief in zip(quality, found.certified.tolist(), found.score.tolist(), strict=True):
        assert 0 <= belief <= 1
        assert not sure or right > 50
    return int(found.certified.sum())


# --- one example ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["digits", "mnist", "breast_cancer"])
@pytest.mark.parametrize("spec", DENSE, ids=lambda spec: "-".join(spec.values()))
def test_one_example_through_every_dense_layer(source: str, spec: dict[str, Any]) -> None:
    each = data(source)
    for seed, row in enumerate(some_rows(each, 3, 0)):
        model = model_for(each, seed, **spec)
        for scale in (1.0, 1e-3):
            found = closed_form(gradient_of(model, each, [row], scale), knowledge_of(each), SETTINGS)
            assert min(psnr(found, each.x_train[[row]])) > 100
            assert check_certificates(found, each.x_train[[row]]) == 1
            assert found.labels is not None
            assert found.labels.tolist() == each.y_train[[row]].tolist()
            assert found.loss < 1e-8


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_example_from_local_training(momentum: float) -> None:
    """However many steps were made on it, the quotient is the example."""
    each = data("mnist")
    work = LocalWork("fedavg", epochs=5, batch_size=1, momentum=momentum)
    found = closed_form(update_of(model_for(each, name="mlp"), each, [7], work), knowledge_of(each), SETTINGS)
    assert min(psnr(found, each.x_train[[7]])) > 100
    assert math.isnan(found.loss)


def test_one_example_under_noise_is_not_certified() -> None:
    each = data("digits")
    clean = gradient_of(model_for(each, name="mlp"), each, [3])
    defence = DefenceSection.model_validate({"client_dp": {"clipping_norm": 1.0, "noise_multiplier": 1e-2}})
    generator = torch.Generator().manual_seed(0)
    update = {
        name: entry + 1e-2 * torch.randn(entry.shape, generator=generator) for name, entry in clean.update.items()
    }
    found = closed_form(replace(clean, update=update), knowledge_of(each, defence=defence, client_noise=1e-2), SETTINGS)
    assert found.certified is not None
    assert not found.certified.any()
    assert found.score[0] < 1


@pytest.mark.parametrize("steps", [0, 300])
def test_one_example_under_compression_that_nobody_told_of(steps: int) -> None:
    """One bit leaves rows that agree on something that is no example; a trained model's tiny gradient is still one."""
    each = data("digits")
    model = trained(model_for(each, name="mlp"), each, steps)
    compress: list[Callable[[Tensor], Tensor]] = [
        *(partial(quantise, bits=bits) for bits in (1, 2, 8)),
        *(partial(prune, keep=keep) for keep in (0.02, 0.1)),
        sign,
    ]
    for row in some_rows(each, 12, 1):
        clean = gradient_of(model, each, [row])
        assert check_certificates(closed_form(clean, knowledge_of(each), SETTINGS), each.x_train[[row]]) == 1
        for change in compress:
            found = closed_form(compressed(clean, change), knowledge_of(each), SETTINGS)
            check_certificates(found, each.x_train[[row]])
            assert found.score[0] < 0.5 or psnr(found, each.x_train[[row]])[0] > 20


def test_clipping_by_little_keeps_the_certificate() -> None:
    each = data("digits")
    model = model_for(each, name="mlp")
    for scale in (0.9995, 0.5):
        found = closed_form(gradient_of(model, each, [3], scale), knowledge_of(each), SETTINGS)
        assert check_certificates(found, each.x_train[[3]]) == 1


def test_without_a_bias_up_to_a_factor() -> None:
    each = data("digits")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 50, bias=False), nn.Tanh(), nn.Linear(50, 10))
    found = closed_form(gradient_of(model, each, [5]), knowledge_of(each), SETTINGS)
    original = each.x_train[5].flatten().double()
    cosine = F.cosine_similarity(found.inputs[0].flatten().double(), original, dim=0)
    assert cosine > 1 - 1e-9
    assert found.inputs.max() == pytest.approx(1.0, abs=1e-5)  # the value range is filled
    assert found.certified is not None
    assert not found.certified.any()


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_convolutions_with_sigmoids_layer_by_layer(scale: float) -> None:
    each = data("digits")
    for seed in range(3):
        model = model_for(each, seed, name="cnn", variant="lenet")
        found = closed_form(gradient_of(model, each, [seed], scale), knowledge_of(each), SETTINGS)
        assert min(psnr(found, each.x_train[[seed]])) > 100
        assert check_certificates(found, each.x_train[[seed]]) == 1


def test_a_convolution_that_loses_something_is_refused() -> None:
    """One channel of stride 2 has fewer outputs and gradients than the image has pixels."""
    each = data("mnist")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 1, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(169, 10))
    with pytest.raises(AttackError, match="do not determine"):
        closed_form(gradient_of(model, each, [0]), knowledge_of(each), SETTINGS)


# --- batches ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(0, 10_000), st.booleans(), st.floats(0.05, 1.0))
def test_rows_never_certify_a_mixture(size: int, seed: int, narrow: bool, scale: float) -> None:
    each = data("digits")
    model = model_for(each, seed, name="mlp", hidden=(60,) if narrow else (200, 50))
    rows = some_rows(each, size, seed)
    check_certificates(
        closed_form(gradient_of(model, each, rows, scale), knowledge_of(each), SETTINGS), each.x_train[rows]
    )


@pytest.mark.parametrize("kind", ["same class", "trained", "two classes"])
def test_hard_batches_never_certify_a_mixture(kind: str) -> None:
    """Examples of one class have nearly the same dL/dz, and with two classes all rows mix in the same proportions."""
    each = data("breast_cancer" if kind == "two classes" else "digits")
    base = model_for(each, name="mlp", hidden=(150,))
    model = trained(base, each) if kind == "trained" else base
    for seed in range(12):
        pool = (
            np.flatnonzero(each.y_train == seed % each.classes)
            if kind == "same class"
            else np.arange(len(each.y_train))
        )
        rows = np.random.default_rng(seed).choice(pool, 2 + seed % 4, replace=False)
        found = closed_form(gradient_of(model, each, rows), knowledge_of(each), SETTINGS)
        check_certificates(found, each.x_train[rows])


def test_small_batches_are_found_whole() -> None:
    each = data("mnist")
    model = model_for(each, name="mlp", hidden=(300,))
    whole = 0
    for seed in range(6):
        rows = some_rows(each, 4, seed)
        found = closed_form(gradient_of(model, each, rows), knowledge_of(each), SETTINGS)
        certified = check_certificates(found, each.x_train[rows])
        whole += certified == 4
        if certified == 4:
            assert found.labels is not None
            assert sorted(found.labels.tolist()) == sorted(each.y_train[rows].tolist())
            assert found.loss < 1e-8
    assert whole >= 4


def test_local_training_never_certifies_a_mixture() -> None:
    each = data("digits")
    model = model_for(each, name="mlp", hidden=(200,))
    for seed in range(8):
        rows = some_rows(each, 4, seed)
        work = LocalWork("fedavg", epochs=3, batch_size=2, learning_rate=0.02)
        found = closed_form(update_of(model, each, rows, work), knowledge_of(each), SETTINGS)
        check_certificates(found, each.x_train[rows])


def test_an_example_taken_off_leaves_the_next_alone() -> None:
    """Two examples, of which the second is never alone: rows 0-3 have the first, rows 4-7 both."""
    x = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 2.0]], dtype=torch.float64)
    slopes = torch.zeros(2, 8, dtype=torch.float64)
    slopes[0] = torch.linspace(0.5, 1.5, 8)
    slopes[1, 4:] = torch.tensor([0.9, -2.0, 0.8, 1.1])

    def slopes_of(flat: Tensor) -> Tensor:
        first = bool((flat - x[0]).norm() < (flat - x[1]).norm())
        return slopes[[0 if first else 1]]

    found = lone_examples(slopes.T @ x, slopes.sum(0), slopes_of)
    assert len(found) == 2
    assert torch.allclose(torch.stack([each.flat for each in found]), x, atol=1e-9)
    assert len(lone_examples(slopes.T @ x, slopes.sum(0), None)) == 1


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_logistic_regression_with_fewer_examples_than_classes(size: int, scale: float) -> None:
    each = data("digits")
    certified = 0
    for seed in range(4):
        model = model_for(each, seed, name="logistic")
        rows = some_rows(each, size, seed)
        found = closed_form(gradient_of(model, each, rows, scale), knowledge_of(each), SETTINGS)
        certified += check_certificates(found, each.x_train[rows])
    assert certified >= 3 * size


def test_trained_logistic_regression() -> None:
    each = data("digits")
    model = trained(model_for(each, name="logistic"), each)
    certified = 0
    for seed in range(4):
        rows = some_rows(each, 3, seed)
        found = closed_form(gradient_of(model, each, rows), knowledge_of(each), SETTINGS)
        certified += check_certificates(found, each.x_train[rows])
    assert certified >= 6


def test_logistic_regression_with_more_examples_says_why_not() -> None:
    each = data("digits")
    found = closed_form(gradient_of(model_for(each, name="logistic"), each, range(12)), knowledge_of(each), SETTINGS)
    assert found.inputs.shape == (0, 1, 8, 8)
    assert "rank 9" in found.notes[0]


# --- what is refused --------------------------------------------------------------------------------------------------


class _First(torch.nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return given[0]


def broken(case: str) -> Observation:
    each = data("digits")
    good = gradient_of(model_for(each, name="mlp"), each, [0])
    match case:
        case "shape":
            return replace(good, update=dict(good.update) | {"1.weight": torch.zeros(3, 3)})
        case "missing":
            return replace(good, update={name: entry for name, entry in good.update.items() if name != "1.bias"})
        case "nan":
            return replace(good, update=dict(good.update) | {"1.bias": torch.full((128,), math.nan)})
        case "zero":
            return replace(good, update={name: torch.zeros_like(entry) for name, entry in good.update.items()})
        case "zero bias":
            return replace(good, update=dict(good.update) | {"1.bias": torch.zeros(128)})
        case "adam":
            return replace(good, kind="update", work=LocalWork("fedavg", optimizer="adam"))
        case "tanh batch":
            return gradient_of(model_for(each, name="mlp", activation="tanh"), each, [0, 1])
        case "pooling":
            return gradient_of(model_for(each, name="cnn"), each, [0])
        case "convolution batch":
            return gradient_of(model_for(each, name="cnn", variant="lenet"), each, [0, 1])
        case "unknown layer":
            model = torch.nn.Sequential(torch.nn.Flatten(2), torch.nn.Flatten(0, 1), torch.nn.GRU(64, 10))
            model = torch.nn.Sequential(model, _First(), torch.nn.Linear(10, 10))
            return gradient_of(model, each, [0])
        case _:
            return gradient_of(model_for(each, name="resnet8", width=8), each, [0])


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("shape", "shape"),
        ("missing", "no tensor"),
        ("nan", "NaN"),
        ("zero", "zero in every entry"),
        ("zero bias", "is zero"),
        ("adam", "adam"),
        ("tanh batch", "ReLU"),
        ("pooling", "MaxPool2d"),
        ("convolution batch", "one example only"),
        ("unknown layer", "GRU|chain"),
        ("residual", "chain"),
    ],
)
def test_bad_input_is_one_sentence(case: str, word: str) -> None:
    with pytest.raises(AttackError, match=word) as caught:
        closed_form(broken(case), knowledge_of(data("digits")), SETTINGS)
    assert "\n" not in str(caught.value)


def test_text_is_refused() -> None:
    with pytest.raises(AttackError, match="text"):
        closed_form(broken("tanh batch"), Knowledge("text", (8,), 10), SETTINGS)


def test_linear_regression_of_one_example_is_a_division() -> None:
    """With a squared loss dL/dW = r x' and dL/db = r too: the formula does not ask which loss it was."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(5, 1), torch.randn(1, 5)
    gradient = torch.autograd.grad((model(x) - 2.0).square().mean(), list(model.parameters()))
    update = dict(zip(("weight", "bias"), gradient, strict=True))
    observation = Observation(model, update, "gradient", LocalWork(kind="fedsgd", batch_size=1), examples=1)
    knowledge = Knowledge(kind="table", input_shape=(5,), classes=1)
    found = closed_form(observation, knowledge, ClosedFormAttack(name="closed-form"))
    torch.testing.assert_close(found.inputs, x)
    assert found.certified is not None
    assert not found.certified.any()  # the loss that we know is another one, so the gradient cannot be checked


def test_linear_regression_of_a_batch_is_one_weighted_mean_and_says_so() -> None:
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(5, 1), torch.randn(3, 5), torch.tensor([[2.0], [3.0], [5.0]])
    residuals = (model(x) - y).detach()
    gradient = torch.autograd.grad((model(x) - y).square().mean(), list(model.parameters()))
    update = dict(zip(("weight", "bias"), gradient, strict=True))
    observation = Observation(model, update, "gradient", LocalWork(kind="fedsgd", batch_size=3), examples=3)
    found = closed_form(observation, Knowledge(kind="table", input_shape=(5,), classes=1), SETTINGS)
    torch.testing.assert_close(found.inputs, (residuals * x).sum(0, keepdim=True) / residuals.sum())
    assert found.certified is not None
    assert not found.certified.any()
    assert float(found.score) == 0
    assert "no example" in found.notes[0]

    # Another batch with the same sums: the same gradient, so nobody could tell the two apart.
    other = x + torch.tensor([[1.0], [0.0], [0.0]]) - residuals[0] / residuals[1] * torch.tensor([[0.0], [1.0], [0.0]])
    label = (model(other) - residuals).detach()
    again = torch.autograd.grad((model(other) - label).square().mean(), list(model.parameters()))
    torch.testing.assert_close(again, gradient, rtol=1e-4, atol=1e-5)
