# SPDX-License-Identifier: Apache-2.0
"""The ladder: which rung's result is shown, and where the climb ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim.attacks import ladder
from fedsim.attacks.ladder import automatic, explains
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction
from fedsim.data import Dataset, load_dataset
from fedsim.errors import AttackError
from fedsim.models import build_model
from fedsim.scenario import AutomaticAttack, CnnModel, EmbeddedData, MlpModel
from fedsim.training import LocalWork

SETTINGS = AutomaticAttack()
Rung = Callable[..., Reconstruction]


def digits() -> Dataset:
    return load_dataset(EmbeddedData(source="digits"), 0)


def observed(spec: Any, data: Dataset, size: int) -> Observation:
    model: nn.Module = build_model(spec, data.input_shape, data.classes, 0, kind=data.kind)
    loss = F.cross_entropy(model(data.x_train[:size]), data.y_train[:size])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    update = {name: entry for (name, _), entry in zip(model.named_parameters(), gradients, strict=True)}
    return Observation(model, update, "gradient", LocalWork("fedsgd", batch_size=size), examples=size, client=0)


def knowledge(data: Dataset) -> Knowledge:
    bounds = (torch.tensor(0.0), torch.tensor(1.0))
    return Knowledge(data.kind, data.input_shape, data.classes, value_range=bounds)


def result(name: str, items: int, certified: int | None, loss: float) -> Reconstruction:
    proven = None if certified is None else torch.arange(items) < certified
    return Reconstruction(name, torch.zeros(items, 1, 8, 8), None, loss, torch.ones(items), certified=proven)


def climb(monkeypatch: pytest.MonkeyPatch, *results: Reconstruction | AttackError) -> Reconstruction:
    """What the ladder shows of a batch of four if its rungs give these results."""

    def attack(each: Reconstruction | AttackError) -> Rung:
        def rung(*_arguments: Any, **_options: Any) -> Reconstruction:
            if isinstance(each, AttackError):
                raise each
            return each

        return rung

    def rungs(*_arguments: Any) -> Iterator[tuple[str, Rung, None]]:
        yield from ((f"rung {number}", attack(each), None) for number, each in enumerate(results))

    monkeypatch.setattr(ladder, "_rungs", rungs)
    data = digits()
    return automatic(observed(MlpModel(name="mlp", hidden=(8,)), data, 4), knowledge(data), SETTINGS)


@pytest.mark.parametrize(
    ("results", "best"),
    [
        ([result("a", 3, 2, math.nan), result("b", 4, None, 0.1)], "a"),
        ([result("a", 4, None, 0.1), result("b", 3, 2, math.nan)], "b"),
        ([result("a", 3, 1, math.nan), result("b", 3, 2, math.nan)], "b"),
        ([result("a", 3, 2, 0.5), result("b", 4, 2, 0.1)], "b"),
        ([result("a", 4, 0, math.nan), result("b", 4, None, 0.9)], "b"),
        ([result("a", 4, 0, 0.1), result("b", 4, None, 0.9)], "a"),
        ([result("a", 1, 1, math.nan), result("b", 3, 1, math.nan)], "b"),
        ([result("a", 0, 0, math.nan), result("b", 2, None, math.nan)], "b"),
    ],
)
def test_proof_comes_before_loss_and_loss_before_number(
    monkeypatch: pytest.MonkeyPatch, results: list[Reconstruction], best: str
) -> None:
    shown = climb(monkeypatch, *results)
    assert shown.attack == best
    assert shown.notes[0].startswith("tried, in this order: a, b;")


def test_the_climb_ends_where_an_update_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = climb(monkeypatch, AttackError("too steep"), result("a", 4, 4, math.nan), result("b", 4, None, 0.0))
    assert shown.attack == "a"
    assert shown.notes[0].startswith("tried, in this order: a;")
    assert not explains(result("a", 3, 3, math.nan), 4)
    assert not explains(result("a", 4, 3, math.nan), 4)
    assert explains(result("a", 4, None, 1e-9), 4)


def test_what_was_not_tried_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = result("b", 4, None, 0.0)
    shown = climb(monkeypatch, AttackError("too steep"), result("a", 4, 4, math.nan), rest)
    assert shown.tried == ("a",)
    assert shown.untried == (
        "imprint: the server did not craft its weights",
        "rung 0: too steep",
        "rung 2: not needed, the update is explained",
    )
    shown = climb(monkeypatch, result("a", 3, 2, math.nan), rest)
    assert (shown.tried, len(shown.untried)) == (("a", "b"), 1)


def test_every_rung_that_is_impossible_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttackError, match=r"rung 0: too steep; rung 1: too deep"):
        climb(monkeypatch, AttackError("too steep"), AttackError("too deep"))


def test_one_example_of_a_dense_network_is_proven_by_the_first_rung() -> None:
    data = digits()
    shown = automatic(observed(MlpModel(name="mlp"), data, 1), knowledge(data), SETTINGS)
    assert shown.attack == "closed-form"
    assert shown.certified is not None
    assert shown.certified.tolist() == [True]
    assert torch.allclose(shown.inputs, data.x_train[:1], atol=1e-4)


def test_one_example_of_a_convolutional_network_is_matched() -> None:
    data = digits()
    shown = automatic(observed(CnnModel(name="cnn"), data, 1), knowledge(data), SETTINGS)
    assert shown.attack == "gradient-matching"
    assert shown.notes[0].startswith("tried, in this order: gradient-matching;")
    assert float((shown.inputs - data.x_train[:1]).square().mean()) < 1e-2
