# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.attacks.observation import Knowledge, Observation, Reconstruction
from fedsim.attacks.text import text
from fedsim.attacks.text_search import span_of
from fedsim.data import load_dataset
from fedsim.data.dataset import Dataset
from fedsim.errors import AttackError
from fedsim.models import build_model
from fedsim.randomness import ClientRandomness, stream
from fedsim.scenario import ClientDp, DefenceSection, Prune, TextAttack, TransformerModel
from fedsim.scenario.data import DescriptionsData
from fedsim.training import LocalWork, layout_of, train_cohort

Unit = Literal["characters", "words"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def data_of(unit: Unit = "characters", length: int = 16) -> Dataset:
    return load_dataset(DescriptionsData(source="descriptions", tokens=unit, length=length), 0)


def model_of(data: Dataset, dim: int = 128, layers: int = 2) -> nn.Module:
    spec = TransformerModel(name="transformer", dim=dim, layers=layers)
    return build_model(spec, data.input_shape, data.classes, 0, kind="text")


def batch_of(data: Dataset, number: int = 0, size: int = 4) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(stream(0, "test-text", number).permutation(len(data.x_train))[:size])
    return data.x_train[rows], data.y_train[rows]


def gradient_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def observe(model: nn.Module, x: Tensor, y: Tensor) -> Observation:
    work = LocalWork(kind="fedsgd", batch_size=len(x))
    return Observation(model=model, update=gradient_of(model, x, y), kind="gradient", work=work, examples=len(x))


def noisy(observation: Observation, relative: float) -> Observation:
    """Gaussian noise whose norm is `relative` times that of the gradient."""
    norm = math.sqrt(sum(float(part.square().sum()) for part in observation.update.values()))
    scale = relative * norm / math.sqrt(sum(part.numel() for part in observation.update.values()))
    generator = torch.Generator().manual_seed(0)
    update = {k: v + scale * torch.randn(v.shape, generator=generator) for k, v in observation.update.items()}
    return replace(observation, update=update)


def play(observation: Observation, data: Dataset, **fields: Any) -> Reconstruction:
    knowledge = Knowledge(kind="text", input_shape=data.input_shape, classes=data.classes)
    settings = {key: fields.pop(key) for key in ("beam", "seconds") if key in fields}
    return text(observation, replace(knowledge, **fields), TextAttack(name="text", **settings))


def rows(inputs: Tensor, labels: Tensor | None = None) -> list[list[int]]:
    """Sequences in an order of their own, so that two batches can be compared."""
    return sorted(inputs.tolist() if labels is None else torch.cat([inputs, labels], 1).tolist())


def assert_exact(found: Reconstruction, x: Tensor, y: Tensor) -> None:
    assert found.labels is not None
    assert found.certified is not None
    assert rows(found.inputs, found.labels) == rows(x, y)
    assert found.certified.all()
    assert found.score.eq(1).all()
    assert found.label_counts is not None
    assert torch.equal(found.label_counts, torch.bincount(y.flatten(), minlength=len(found.label_counts)))


@pytest.mark.parametrize("unit", ["characters", "words"])
def test_four_sequences_of_32_tokens_are_exact(unit: Unit) -> None:
    data = data_of(unit, 32)
    x, y = batch_of(data)
    found = play(observe(model_of(data, 256), x, y), data)
    assert_exact(found, x, y)
    assert found.loss < 1e-11
    assert found.notes[0].startswith(f"{len(x.unique())} of {data.classes:,} tokens occur")


@pytest.mark.parametrize("layers", [1, 3])
def test_any_number_of_blocks(layers: int) -> None:
    data = data_of()
    for number in range(3):
        x, y = batch_of(data, number)
        assert_exact(play(observe(model_of(data, layers=layers), x, y), data), x, y)


def test_trained_model() -> None:
    data = data_of("words")
    model = model_of(data)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(60):
        x, y = batch_of(data, 100 + step, 8)
        optimiser.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimiser.step()
    for number in range(3):
        x, y = batch_of(data, number)
        assert_exact(play(observe(model, x, y), data), x, y)


def test_nearly_as_many_places_as_the_model_is_wide() -> None:
    data = data_of()
    x, y = batch_of(data, size=7)  # 112 places, width 128
    assert_exact(play(observe(model_of(data), x, y), data), x, y)


def test_first_attention_tells_tokens_and_later_layers_tell_prefixes() -> None:
    """E[v] + P[p] of connected tokens and places span one dimension less than there are tokens and places."""
    data = data_of(length=32)
    x, y = batch_of(data)
    gradient = gradient_of(model_of(data, 256), x, y)
    first, later = span_of(gradient["blocks.0.qkv.weight"], 128), span_of(gradient["blocks.0.mlp.0.weight"], 128)
    assert first is not None
    assert later is not None
    assert first.rank == len(x.unique()) + 32 - 1
    assert later.rank == len({tuple(row[:end]) for row in x.tolist() for end in range(1, 33)})


def test_equal_sequences_and_equal_beginnings() -> None:
    data = data_of()
    model, (x, y) = model_of(data), batch_of(data)
    x, y = x[[0, 0, 0, 1, 2]].clone(), y[[0, 0, 0, 1, 2]].clone()
    y[1, -1] = (y[1, -1] + 1) % data.classes  # the same window, another continuation
    x[4, :9] = x[3, :9]
    y[4, :-1] = x[4, 1:]
    assert_exact(play(observe(model, x, y), data), x, y)


def test_one_token_over_and_over() -> None:
    data = data_of()
    x = torch.full((1, 16), 5)
    assert_exact(play(observe(model_of(data), x, x), data), x, x)


def test_unknown_batch_size() -> None:
    data = data_of()
    x, y = batch_of(data, 1)
    observation = replace(observe(model_of(data), x, y), examples=None, work=LocalWork("fedsgd", batch_size=None))
    assert_exact(play(observation, data), x, y)


def test_clipping_changes_nothing() -> None:
    """Neither of the whole gradient, nor of each example's."""
    data = data_of()
    model, (x, y) = model_of(data), batch_of(data, 2)
    scaled = replace(observe(model, x, y), update={k: v / 9 for k, v in gradient_of(model, x, y).items()})
    defence = DefenceSection(client_dp=ClientDp(clipping_norm=0.1, noise_multiplier=0))
    found = play(scaled, data, defence=defence)
    assert_exact(found, x, y)
    assert found.loss < 1e-9
    each = [gradient_of(model, x[i : i + 1], y[i : i + 1]) for i in range(4)]
    mixed = {name: sum((share * part[name] for share, part in zip((1, 0.5, 0.7, 0.3), each, strict=True)),
                       torch.zeros(())) for name in each[0]}  # fmt: skip
    assert_exact(play(replace(scaled, update=mixed), data), x, y)


def test_too_many_places_give_the_set_of_tokens_only() -> None:
    data = data_of()
    x, y = batch_of(data)
    found = play(observe(model_of(data, 64), x, y), data)
    assert found.inputs.shape == (0, 16)
    assert math.isnan(found.loss)
    assert found.notes[0].startswith(f"{len(x.unique())} of ")
    assert "64 places of the batch fill the model's width of 64" in found.notes[1]
    unknown = replace(observe(model_of(data, 64), x, y), examples=None, work=LocalWork("fedsgd", batch_size=None))
    assert play(unknown, data).inputs.shape == (0, 16)


def test_noise_takes_the_certificate_and_then_the_text() -> None:
    data = data_of()
    x, y = batch_of(data)
    observation = observe(model_of(data), x, y)
    little, much = play(noisy(observation, 3e-4), data), play(noisy(observation, 1.0), data)
    assert rows(little.inputs) == rows(x)
    assert little.certified is not None
    assert not little.certified.any()
    assert little.score.min() > 0.5
    assert much.certified is not None
    assert not much.certified.any()
    assert much.score.max() < 0.01
    assert "blur the spans" in much.notes[1]
    assert rows(much.inputs) != rows(x)


def updates(model: nn.Module, x: Tensor, y: Tensor, work: LocalWork) -> Observation:
    start = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    flat = train_cohort(model, start, x, y, [np.arange(len(x))], work, [ClientRandomness(0, 1, 0)]).updates[0]
    sizes = [parameter.numel() for parameter in model.parameters()]
    parts = zip(model.named_parameters(), flat.split(sizes), strict=True)
    update = {name: part.view(parameter.shape) for (name, parameter), part in parts}
    assert layout_of(model).size == len(flat)
    return Observation(model=model, update=update, kind="update", work=work, examples=len(x))


def test_update_of_one_step_with_weight_decay() -> None:
    data = data_of()
    x, y = batch_of(data, 1)
    work = LocalWork("fedavg", learning_rate=0.1, weight_decay=0.01, batch_size=None)
    found = play(updates(model_of(data), x, y, work), data)
    assert rows(found.inputs, found.labels) == rows(x, y)
    assert found.score.min() > 0.9


def test_update_of_two_steps() -> None:
    """The inputs of the second step come from other weights: those of the first are found, and the rest in part."""
    data = data_of()
    x, y = batch_of(data, 1)
    found = play(updates(model_of(data), x, y, LocalWork("fedavg", learning_rate=0.01, batch_size=2)), data)
    assert math.isnan(found.loss)
    assert found.certified is not None
    assert not found.certified.any()
    places = (found.inputs[:, None] == x[None]).sum(-1).max(1).values
    assert (places[found.score > 0.9] == 16).all()
    assert int((places == 16).sum()) >= 2
    assert int(places.sum()) >= 60
    assert "blur the spans" in found.notes[1]
    assert found.score.max() > 0.9


def test_the_gradient_of_another_text_is_not_certified() -> None:
    """Parameters from two batches: no batch explains them, so nothing may be certified."""
    data = data_of()
    model, (x, y), (other, after) = model_of(data), batch_of(data, 0), batch_of(data, 1)
    observation = observe(model, x, y)
    update = {**observation.update, "head.weight": gradient_of(model, other, after)["head.weight"]}
    found = play(replace(observation, update=update), data)
    assert found.certified is not None
    assert not found.certified.any()


def test_pruning_is_survived_without_a_claim() -> None:
    data = data_of()
    x, y = batch_of(data)
    observation = observe(model_of(data), x, y)
    update = {k: torch.where(v.abs() >= v.abs().flatten().quantile(0.5), v, 0) if v.numel() < 1e5 else v
              for k, v in observation.update.items()}  # fmt: skip
    found = play(replace(observation, update=update), data, defence=DefenceSection(compression=Prune(kind="prune")))
    assert found.certified is not None
    assert not found.certified.any()
    assert found.notes[0].startswith("every token")


def test_deterministic_and_within_its_time() -> None:
    data = data_of()
    observation = observe(model_of(data), *batch_of(data))
    first, second = play(observation, data), play(observation, data)
    assert torch.equal(first.inputs, second.inputs)
    none = play(observation, data, seconds=1e-9)
    assert "the time was over after 0 of 16 places" in none.notes[-1]
    assert none.score.max() == 0
    assert none.labels is None


def test_what_it_cannot_attack() -> None:
    data = data_of()
    model, (x, y) = model_of(data), batch_of(data)
    observation = observe(model, x, y)
    adam = LocalWork("fedavg", optimizer="adam", learning_rate=0.01)
    with pytest.raises(AttackError, match=r"client\.optimizer adam"):
        play(replace(observation, kind="update", work=adam), data)
    with pytest.raises(AttackError, match="not Transformer on data of kind image"):
        play(observation, data, kind="image")
    linear = nn.Linear(16, 3)
    update = {"weight": torch.ones(3, 16), "bias": torch.ones(3)}
    with pytest.raises(AttackError, match="not Linear on data of kind text"):
        play(replace(observation, model=linear, update=update), data)
    with pytest.raises(AttackError, match="NaN"):
        play(
            replace(observation, update={**observation.update, "head.bias": torch.full((data.classes,), np.nan)}), data
        )
