# SPDX-License-Identifier: Apache-2.0
"""What a client sees in the model that it is sent: every crafted one, no honest one."""

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedsim
from fedsim.attacks.crafting import craft_imprint, craft_per_client, craft_trap, find_front
from fedsim.attacks.fishing import craft_fishing
from fedsim.data import Dataset, load_dataset
from fedsim.errors import RunError
from fedsim.federation.inspection import inspect_model
from fedsim.models import build_model
from fedsim.scenario import (
    CnnModel,
    EmbeddedData,
    FishingServer,
    ImprintModel,
    ImprintServer,
    LogisticModel,
    MlpModel,
    PerClientServer,
    ResnetModel,
    Scenario,
    TransformerModel,
    TrapServer,
)

HONEST: list[Any] = [
    LogisticModel(name="logistic"),
    MlpModel(name="mlp", hidden=(128,)),
    MlpModel(name="mlp", hidden=(64, 64), activation="tanh"),
    CnnModel(name="cnn"),
    CnnModel(name="cnn", variant="lenet"),
    CnnModel(name="cnn", variant="convnet", width=8, norm="batch"),
    ResnetModel(name="resnet8", width=4),
    ImprintModel(name="imprint", bins=64),
]


@cache
def digits() -> Dataset:
    return load_dataset(EmbeddedData(source="digits"), 0)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def examples(seed: int = 0) -> tuple[Tensor, Tensor]:
    rows = torch.randperm(len(digits().x_train), generator=torch.Generator().manual_seed(seed))[:64]
    return digits().x_train[rows], digits().y_train[rows]


@pytest.mark.parametrize("spec", HONEST, ids=lambda spec: f"{spec.name}-{getattr(spec, 'variant', '')}")
def test_honest_models_raise_no_suspicion(spec: Any) -> None:
    for seed in range(3):
        model = build_model(spec, (1, 8, 8), 10, seed)
        assert inspect_model(model, weights_of(model), examples(seed)) == ()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = digits().x_train[:600], digits().y_train[:600]
    for rows in (
        torch.arange(600).split(30) if spec.name in {"cnn", "resnet8"} else torch.arange(600).repeat(10).split(30)
    ):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    assert inspect_model(model, weights_of(model), examples()) == ()


def test_an_honest_transformer_raises_no_suspicion() -> None:
    for seed in range(3):
        model = build_model(TransformerModel(name="transformer", dim=32), (16,), 60, seed, kind="text")
        tokens = torch.randint(60, (16, 17), generator=torch.Generator().manual_seed(seed))
        assert inspect_model(model, weights_of(model), (tokens[:, :-1], tokens[:, 1:])) == ()


def crafted(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    data = digits()
    model = build_model(MlpModel(name="mlp", hidden=(200,)), (1, 8, 8), 10, 0)
    weights, public = weights_of(model), data.x_test
    if kind == "fishing":
        section = FishingServer(kind="fishing")
        return model, craft_fishing(model, weights, public, data.y_test, section, batch_size=64)
    front = find_front(model, (1, 8, 8))
    if kind == "trap":
        return model, craft_trap(weights, front, public, TrapServer(kind="trap"), batch_size=64, seed=0)
    if kind == "per-client":
        section = PerClientServer(kind="per-client")
        return model, craft_per_client(weights, front, public, section, range(10), seed=0)[1][3]
    settings = ImprintServer(kind="imprint", queries=1 if kind == "imprint-1" else 3)
    return model, craft_imprint(weights, front, public, settings, seed=0, steps=4 if kind == "imprint-fedavg" else 1)


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        ("imprint", "parallel rows"),
        ("imprint-1", "parallel rows"),
        ("imprint-fedavg", "parallel rows"),
        ("trap", "rows that are negative in sum"),
        ("per-client", "absurd biases"),
        ("fishing", "parallel rows"),
    ],
)
def test_every_crafted_model_is_seen_by_its_weights_alone(kind: str, test: str) -> None:
    model, weights = crafted(kind)
    found = {suspicion.test: suspicion for suspicion in inspect_model(model, weights)}
    assert test in found
    assert found[test].value > found[test].threshold
    assert found[test].layer in str(found[test])


@pytest.mark.parametrize(
    ("kind", "test"),
    [("imprint", "rows that sort the examples"), ("trap", "rows that almost no example activates")],
)
def test_and_by_what_it_does_to_examples(kind: str, test: str) -> None:
    model, weights = crafted(kind)
    assert test in {suspicion.test for suspicion in inspect_model(model, weights, examples())}


def test_rows_that_differ_in_dead_pixels_are_missed_by_the_weights_and_seen_on_examples() -> None:
    model, weights = crafted("imprint")
    blank = (digits().x_test.flatten(1).amax(dim=0) == 0) & (digits().x_train.flatten(1).amax(dim=0) == 0)
    blank |= torch.arange(64) % 8 == 0  # the left column is nearly always black
    noise = torch.randn(200, int(blank.sum()), generator=torch.Generator().manual_seed(0))
    weights["1.weight"][:, blank] += noise * weights["1.weight"].norm(dim=1, keepdim=True)
    assert inspect_model(model, weights) == ()
    assert "rows that sort the examples" in {s.test for s in inspect_model(model, weights, examples())}


def settings(inspection: str, **defence: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "data": "digits",
            "model": {"name": "mlp", "hidden": [200]},
            "strategy": "fedsgd",
            "cohort": {"population": 3},
            "rounds": 2,
            "adversary": {"active": {"kind": "imprint", "rounds": [2], "clients": [1]}},
            "defence": {"inspect_model": inspection, **defence},
        }
    )


def test_a_client_refuses_and_the_others_go_on(tmp_path: Path) -> None:
    run = fedsim.run(settings("refuse"), out=tmp_path / "run")
    errors = [line for line in run.transcript.messages() if line.kind == "error"]
    assert [(line.round, line.client) for line in errors] == [(2, 1)]
    assert "parallel rows" in str(errors[0].reason)


def test_a_client_warns_and_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedsim"):
        run = fedsim.run(settings("warn"), out=tmp_path / "run")
    assert [line for line in run.transcript.messages() if line.kind == "error"] == []
    assert [record.getMessage().startswith("client 1 was sent") for record in caplog.records] == [True]


def test_under_a_claim_the_data_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    from fedsim.federation import client as module

    monkeypatch.setattr(module, "inspect_model", lambda model, weights, examples: given.append(examples) or ())
    fedsim.run(settings("refuse", client_dp={"noise_multiplier": 1.0}), out=tmp_path / "private")
    assert given
    assert set(given) == {None}


def test_a_run_in_which_everybody_refuses_ends_with_the_reason(tmp_path: Path) -> None:
    everybody = settings("refuse").model_dump(exclude_unset=True)
    everybody["adversary"]["active"].update(clients="all", rounds=[1])
    with pytest.raises(RunError, match="made to leak"):
        fedsim.run(Scenario.model_validate(everybody), out=tmp_path / "run")


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e6])
def test_weights_that_no_training_gives_are_seen(factor: float) -> None:
    model = build_model(MlpModel(name="mlp", hidden=(32,)), (1, 8, 8), 10, 0, kind="image")
    weights = {name: weight.detach() * factor for name, weight in model.state_dict().items()}
    assert any(suspicion.test.startswith("absurd weights") for suspicion in inspect_model(model, weights))
