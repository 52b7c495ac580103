# SPDX-License-Identifier: Apache-2.0
"""Counts of labels: exact where they can be, honest where they cannot."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients import data, gradient_of, knowledge_of, model_for, update_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor, nn

from fedsim.attacks.labels import LabelCounts, count_labels, count_prior, labels, nearest_counts
from fedsim.attacks.last_layer import step_weights
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.data import Dataset
from fedsim.errors import AttackError
from fedsim.models import build_model
from fedsim.scenario import DefenceSection, ModelSection
from fedsim.scenario.attack import LabelsAttack
from fedsim.training import LocalWork

ZOO: dict[str, dict[str, Any]] = {
    "logistic": {"name": "logistic"},
    **{f"mlp-{each}": {"name": "mlp", "activation": each} for each in ("relu", "sigmoid", "tanh", "gelu")},
    "cnn-small": {"name": "cnn"},
    "cnn-lenet": {"name": "cnn", "variant": "lenet"},
    "cnn-convnet": {"name": "cnn", "variant": "convnet", "width": 8},
    "resnet8-group": {"name": "resnet8", "width": 8},
    "resnet8-batch": {"name": "resnet8", "width": 8, "norm": "batch"},
}


@cache
def zoo(name: str, source: str = "digits", seed: int = 0) -> nn.Module:
    return model_for(data(source), seed, **ZOO[name])


def truth(each: Dataset, rows: Any) -> Tensor:
    return torch.bincount(each.y_train[rows].flatten(), minlength=each.classes)


def some_rows(each: Dataset, count: int, seed: int) -> Any:
    return np.random.default_rng(seed).choice(len(each.x_train), count, replace=False)


def wrong(found: LabelCounts, counts: Tensor) -> int:
    return int((found.counts - counts).abs().sum()) // 2


# --- what always holds ------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=12), st.integers(1, 64))
def test_rounding_gives_counts_of_the_sum(values: list[float], total: int) -> None:
    counts = nearest_counts(torch.tensor(values, dtype=torch.float64), total)
    assert counts.sum() == total
    assert (counts >= 0).all()
    assert torch.equal(counts, counts.round())


def test_rounding_is_the_nearest() -> None:
    estimate = torch.tensor([1.9, 0.2, -0.3, 1.4], dtype=torch.float64)
    assert nearest_counts(estimate, 3).tolist() == [2, 0, 0, 1]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["logistic", "mlp-relu", "mlp-tanh", "cnn-lenet"]),
    st.integers(1, 24),
    st.floats(1e-3, 1.0),
    st.integers(0, 1000),
)
def test_counts_sum_to_the_batch(name: str, size: int, scale: float, seed: int) -> None:
    each = data("digits")
    rows = some_rows(each, size, seed)
    found = count_labels(gradient_of(zoo(name), each, rows, scale), knowledge_of(each))
    assert int(found.counts.sum()) == size
    assert (found.counts >= 0).all()
    assert found.counts.dtype == torch.int64
    assert (found.error >= 0).all()
    assert not found.exact or wrong(found, truth(each, rows)) == 0


@pytest.mark.parametrize("name", ZOO)
def test_one_label_is_exact(name: str) -> None:
    each = data("digits")
    for row in some_rows(each, 6, 1):
        for scale in (1.0, 1e-3):
            found = count_labels(gradient_of(zoo(name), each, [row], scale), knowledge_of(each))
            assert found.exact
            assert torch.equal(found.counts, truth(each, [row]))


def test_one_label_without_a_bias() -> None:
    each = data("digits")
    torch.manual_seed(0)
    for activation in (nn.ReLU(), nn.Tanh()):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), activation, nn.Linear(40, 10, bias=False))
        for row in range(10):
            found = count_labels(gradient_of(model, each, [row]), knowledge_of(each))
            assert torch.equal(found.counts, truth(each, [row]))


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ZOO if name != "cnn-convnet"])
def test_batches_of_an_untrained_network(name: str) -> None:
    each = data("digits")
    for seed in range(4):
        rows = some_rows(each, 8, seed)
        for scale in (1.0, 0.02):  # clipped by a factor that the server does not know
            found = count_labels(gradient_of(zoo(name), each, rows, scale), knowledge_of(each))
            assert wrong(found, truth(each, rows)) == 0


def test_a_large_batch_states_its_error() -> None:
    each = data("digits")
    errors, covered = 0, []
    for seed in range(12):
        rows = some_rows(each, 64, seed)
        found = count_labels(gradient_of(zoo("mlp-relu"), each, rows), knowledge_of(each))
        errors += wrong(found, truth(each, rows))
        covered.append(((found.estimate - truth(each, rows)).abs() <= 2 * found.error).double().mean())
    assert errors <= 0.03 * 12 * 64
    assert torch.stack(covered).mean() > 0.85


@pytest.mark.parametrize("steps", [0, 20])
def test_an_unknown_clipping_factor_is_in_the_error(steps: int) -> None:
    """A large batch leaves the factor open: integers explain every one of them."""
    each = data("digits")
    model = copy.deepcopy(zoo("cnn-small"))
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for rows in torch.arange(64 * steps).reshape(-1, 64) % len(each.x_train):
        optimiser.zero_grad()
        F.cross_entropy(model(each.x_train[rows]), each.y_train[rows]).backward()
        optimiser.step()
    inside = []
    for seed in range(6):
        rows = some_rows(each, 256, seed)
        clipped = gradient_of(model, each, rows, 0.1)
        size = math.sqrt(sum(float(entry.square().sum()) for entry in clipped.update.values()))
        defence = DefenceSection.model_validate({"client_dp": {"clipping_norm": size, "noise_multiplier": 1e-9}})
        found = count_labels(clipped, knowledge_of(each, defence=defence))
        inside.append(((found.estimate - truth(each, rows)).abs() <= 2 * found.error).double().mean())
        assert float(found.error.mean()) < 20  # of 26 a class
    assert torch.stack(inside).mean() > 0.85


@pytest.mark.parametrize("classes", [2, 5])
def test_the_prior_of_counts_is_a_distribution(classes: int) -> None:
    every = [c for c in itertools.product(range(7), repeat=classes) if sum(c) == 6]
    assert float(count_prior(torch.tensor(every).double()).exp().sum()) == pytest.approx(1)


def test_a_trained_network_is_exact_or_says_that_it_is_not() -> None:
    each = data("digits")
    model = copy.deepcopy(zoo("logistic"))
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(30):
        optimiser.zero_grad()
        F.cross_entropy(model(each.x_train), each.y_train).backward()
        optimiser.step()
    exact, errors = 0, 0
    for seed in range(6):
        rows = some_rows(each, 3, seed)
        found = count_labels(gradient_of(model, each, rows), knowledge_of(each))
        exact += found.exact
        errors += found.exact and wrong(found, truth(each, rows)) > 0
    assert exact >= 3
    assert errors == 0


def test_noise_is_in_the_error() -> None:
    """Over many draws of the noise, about 95% of the counts are within two standard errors."""
    each = data("digits")
    rows = some_rows(each, 20, 0)
    clean = gradient_of(zoo("mlp-relu"), each, rows)
    size = math.sqrt(sum(float(entry.square().sum()) for entry in clean.update.values()))
    noise = 0.02
    defence = DefenceSection.model_validate({"client_dp": {"clipping_norm": 2 * size, "noise_multiplier": noise}})
    knowledge = knowledge_of(each, defence=defence, client_noise=noise)
    generator = torch.Generator().manual_seed(0)
    inside, sizes = [], []
    for _ in range(30):
        update = {
            name: entry + noise * 2 * size * torch.randn(entry.shape, generator=generator)
            for name, entry in clean.update.items()
        }
        found = count_labels(replace(clean, update=update), knowledge)
        inside.append(((found.estimate - truth(each, rows)).abs() <= 2 * found.error).double().mean())
        sizes.append(found.error.mean())
    assert 0.85 < torch.stack(inside).mean() <= 1
    assert torch.stack(sizes).mean() < 4  # and it is not so large that it says nothing


def test_text_counts_the_tokens_to_come() -> None:
    vocabulary, length = 30, 12
    spec: ModelSection = TypeAdapter(ModelSection).validate_python({"name": "transformer", "dim": 32})
    model = build_model(spec, (length,), vocabulary, 0, kind="text")
    tokens = torch.from_numpy(np.random.default_rng(0).integers(vocabulary, size=(3, length + 1)))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    update = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))
    observation = Observation(model, update, "gradient", LocalWork("fedsgd", batch_size=3), examples=3)
    found = count_labels(observation, Knowledge("text", (length,), vocabulary))
    assert int(found.counts.sum()) == 3 * length
    assert wrong(found, torch.bincount(tokens[:, 1:].flatten(), minlength=vocabulary)) == 0


# --- local training ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "work",
    [
        LocalWork("fedavg", batch_size=10),
        LocalWork("fedavg", batch_size=10, epochs=5),
        LocalWork("fedavg", batch_size=10, epochs=5, learning_rate=0.01, momentum=0.9, weight_decay=1e-3),
        LocalWork("fedavg", batch_size=7, epochs=5),  # an incomplete last batch
    ],
    ids=["one-epoch", "five-epochs", "momentum", "incomplete"],
)
@pytest.mark.parametrize("name", ["mlp-relu", "cnn-small"])
def test_local_epochs(name: str, work: LocalWork) -> None:
    each = data("digits")
    errors = 0
    for seed in range(3):
        rows = some_rows(each, 20, seed)
        errors += wrong(count_labels(update_of(zoo(name), each, rows, work), knowledge_of(each)), truth(each, rows))
    assert errors <= 0.05 * 60


def test_local_epochs_without_a_bias() -> None:
    """By the formula of Dimitrov et al. 2022, section 4.3."""
    each, errors = data("digits"), 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10, bias=False))
    work = LocalWork("fedavg", batch_size=5, epochs=10, learning_rate=0.05)
    for seed in range(3):
        rows = some_rows(each, 20, seed)
        errors += wrong(count_labels(update_of(model, each, rows, work), knowledge_of(each)), truth(each, rows))
    assert errors <= 3


def test_momentum_counts_early_steps_more() -> None:
    work = LocalWork("fedavg", batch_size=1, momentum=0.5)
    observation = Observation(zoo("logistic"), {}, "update", work, examples=3)
    assert step_weights(observation).tolist() == [1.75, 1.5, 1.0]


def test_few_steps_see_few_examples() -> None:
    each = data("digits")
    rows = some_rows(each, 30, 0)
    observation = update_of(zoo("mlp-relu"), each, rows, LocalWork("fedavg", batch_size=5, steps=2))
    found = count_labels(observation, knowledge_of(each))
    assert int(found.counts.sum()) == 10


# --- the attack, and what it refuses ----------------------------------------------------------------------------------


def test_the_attack_returns_counts_without_inputs() -> None:
    each = data("digits")
    rows = some_rows(each, 4, 0)
    found = labels(gradient_of(zoo("mlp-relu"), each, rows), knowledge_of(each), LabelsAttack(name="labels"))
    assert found.inputs.shape == (0, 1, 8, 8)
    assert found.label_counts is not None
    assert torch.equal(found.label_counts, truth(each, rows))


def test_the_model_is_left_as_it_was() -> None:
    each = data("digits")
    model = zoo("resnet8-batch")
    before = {name: entry.clone() for name, entry in model.state_dict().items()}
    count_labels(gradient_of(model, each, some_rows(each, 8, 0)), knowledge_of(each))
    assert all(torch.equal(before[name], entry) for name, entry in model.state_dict().items())


def broken(case: str) -> Observation:
    each = data("digits")
    good = gradient_of(zoo("logistic"), each, [0, 1])
    match case:
        case "shape":
            return replace(good, update=dict(good.update) | {"1.bias": torch.zeros(3)})
        case "nan":
            return replace(good, update=dict(good.update) | {"1.bias": torch.full((10,), math.nan)})
        case "zero":
            return replace(good, update={name: torch.zeros_like(entry) for name, entry in good.update.items()})
        case "adam":
            return replace(good, kind="update", work=LocalWork("fedavg", optimizer="adam"), examples=2)
        case "no size":
            return replace(good, work=LocalWork("fedsgd", batch_size=None), examples=None)
        case "outputs":
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
            return replace(good, model=model, update={name: torch.ones_like(p) for name, p in model.named_parameters()})
        case _:
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.LogSoftmax(-1))
            return replace(good, model=model, update={name: torch.ones_like(p) for name, p in model.named_parameters()})


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("shape", "shape"),
        ("nan", "NaN"),
        ("zero", "zero"),
        ("adam", "adam"),
        ("no size", "batch_size"),
        ("outputs", "7 outputs"),
        ("not linear", "linear"),
    ],
)
def test_bad_input_is_one_sentence(case: str, word: str) -> None:
    with pytest.raises(AttackError, match=word) as caught:
        count_labels(broken(case), knowledge_of(data("digits")))
    assert "\n" not in str(caught.value)


def test_a_batch_size_of_nothing_is_refused() -> None:
    each = data("digits")
    with pytest.raises(AttackError, match="batch_size 0"):
        count_labels(gradient_of(zoo("logistic"), each, [0]), knowledge_of(each), 0)
