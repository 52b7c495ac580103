# SPDX-License-Identifier: Apache-2.0
"""An observation is what the transcript holds, and no more; knowledge is what the scenario grants."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedsim
from fedsim.attacks.evidence import knowledge_of, observations, with_labels
from fedsim.attacks.observation import Knowledge, Observation, check_observation
from fedsim.errors import AttackError
from fedsim.federation.client import Workplace, workplace
from fedsim.federation.plan import scenario_json
from fedsim.federation.run import Run
from fedsim.scenario import Scenario
from fedsim.training import LocalWork

PLAIN = Knowledge(kind="table", input_shape=(4,), classes=3)
BASE = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [16]},
    "strategy": "fedsgd",
    "client": {"batch_size": 5},
    "cohort": {"population": 4},
    "rounds": 2,
}


def played(folder: Path, **changes: object) -> tuple[Run, Workplace, list[Observation]]:
    run = fedsim.run(Scenario.model_validate({**BASE, **changes}), out=folder / "run")
    place = workplace(scenario_json(run.scenario))
    return run, place, list(observations(run.transcript, run.scenario, place.model))


def test_every_kept_update_with_the_model_that_was_sent(tmp_path: Path) -> None:
    run, place, seen = played(tmp_path)
    assert [(each.round, each.client) for each in seen] == [(r, c) for r in (1, 2) for c in range(4)]
    truth = load_file(run.path / "truth" / "round-00002.safetensors")
    last = seen[-1]
    rows = truth["client-3/rows"]
    assert last.batch_size == len(rows) == 5
    loss = torch.nn.functional.cross_entropy(last.model(place.dataset.x_train[rows]), place.dataset.y_train[rows])
    expected = torch.autograd.grad(loss, list(last.model.parameters()))
    for name, gradient in zip(last.weights, expected, strict=True):
        torch.testing.assert_close(last.gradient[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_weight_difference_is_the_sum_of_its_steps_gradients(tmp_path: Path) -> None:
    fedavg = {"strategy": "fedavg", "client": {"steps": 1, "batch_size": 5, "learning_rate": 0.1}, "rounds": 1}
    run, place, (first, *_) = played(tmp_path, **fedavg)
    rows = load_file(run.path / "truth" / "round-00001.safetensors")["client-0/rows"]
    loss = torch.nn.functional.cross_entropy(first.model(place.dataset.x_train[rows]), place.dataset.y_train[rows])
    expected = torch.autograd.grad(loss, list(first.model.parameters()))
    for name, gradient in zip(first.weights, expected, strict=True):
        torch.testing.assert_close(first.gradient[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_under_secure_aggregation_there_is_one_average_a_round(tmp_path: Path, weighting: str) -> None:
    strategy = {"name": "fedsgd", "weighting": weighting}
    alone = played(tmp_path / "a", strategy=strategy)[2]
    _, place, summed = played(tmp_path / "b", strategy=strategy, defence={"secure_aggregation": True})
    assert [(each.round, each.client, each.clients) for each in summed] == [(1, None, 4), (2, None, 4)]
    assert summed[0].batch_size == 20
    weights = torch.tensor([float(place.partition.size(c)) if weighting == "examples" else 1.0 for c in range(4)])
    for name, average in summed[0].update.items():
        stacked = torch.stack([each.update[name] for each in alone[:4]])
        expected = torch.einsum("k,k...->...", weights / weights.sum(), stacked)
        torch.testing.assert_close(average, expected, rtol=1e-4, atol=1e-6)


def test_nothing_is_known_that_is_not_granted(tmp_path: Path) -> None:
    grants = {"knows": {"value_range": False, "defence": False}}
    defence = {"client_dp": {"clipping_norm": 1.0, "noise_multiplier": 2.0}}
    run, place, (first, *_) = played(tmp_path, adversary=grants, defence=defence)
    knowledge = knowledge_of(run.scenario, place.dataset, first)
    assert (knowledge.labels, knowledge.value_range, knowledge.mean, knowledge.std) == (None, None, None, None)
    assert knowledge.client_noise == 0.0
    assert knowledge.defence.client_dp is None
    assert set(first.config) == {"server-round"}
    told = run.scenario.model_copy(update={"adversary": Scenario().adversary})
    first = next(observations(run.transcript, told, place.model))
    assert knowledge_of(told, place.dataset, first).client_noise == 2.0


def test_granted_labels_come_without_their_order() -> None:
    dataset = workplace(scenario_json(Scenario.model_validate(BASE))).dataset
    scenario = Scenario.model_validate(BASE)
    model = torch.nn.Linear(64, 10)
    observation = Observation(model, {}, "gradient", LocalWork(kind="fedsgd"))
    knowledge = with_labels(knowledge_of(scenario, dataset, observation), torch.tensor([3, 1, 2, 1]))
    assert knowledge.labels is not None
    assert knowledge.labels.tolist() == [1, 1, 2, 3]


def broken(name: str, tensor: torch.Tensor | None) -> Observation:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    update = {"weight": torch.ones(3, 4), "bias": torch.ones(3)}
    if tensor is None:
        del update[name]
    else:
        update[name] = tensor
    return Observation(model, update, "gradient", LocalWork(kind="fedsgd"), client=7)


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        (broken("bias", None), "no tensor 'bias'"),
        (broken("weight", torch.ones(4, 3)), r"weight has shape \(4, 3\), but the model has \(3, 4\)"),
        (broken("weight", torch.full((3, 4), torch.nan)), "weight holds NaN or infinity"),
    ],
)
def test_an_update_that_does_not_fit_is_one_sentence(observation: Observation, words: str) -> None:
    with pytest.raises(AttackError, match=words) as caught:
        check_observation(observation, PLAIN)
    assert "client 7" in str(caught.value)


def test_a_model_that_diverged_is_one_sentence() -> None:
    observation = broken("bias", torch.ones(3))
    torch.nn.init.constant_(observation.model.get_parameter("weight"), torch.nan)
    with pytest.raises(AttackError, match="weight of the model that was sent holds NaN"):
        check_observation(observation, PLAIN)


def test_a_zero_update_tells_nothing() -> None:
    model = torch.nn.Linear(4, 3)
    zero = {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}
    with pytest.raises(AttackError, match="zero in every entry"):
        check_observation(Observation(model, zero, "gradient", LocalWork(kind="fedsgd")), PLAIN)


def test_granted_labels_must_be_classes() -> None:
    model = torch.nn.Linear(4, 3)
    observation = Observation(
        model, {"weight": torch.ones(3, 4), "bias": torch.ones(3)}, "gradient", LocalWork(kind="fedsgd")
    )
    with pytest.raises(AttackError, match="between 0 and 3, but the model has classes 0 to 2"):
        check_observation(observation, with_labels(PLAIN, torch.tensor([3, 0])))
