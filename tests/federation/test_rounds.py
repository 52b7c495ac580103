# SPDX-License-Identifier: Apache-2.0
"""What a federation computes: against plain training, and the same bits whatever the order, chunk or engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fedsim
from fedsim.errors import RunError, ScenarioError
from fedsim.federation import run as running
from fedsim.federation.client import answer, app
from fedsim.federation.inline import error_reply, one_by_one
from fedsim.federation.notes import notes
from fedsim.federation.truth import batches
from fedsim.scenario import Scenario

SMALL: dict[str, Any] = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [16]},
    "cohort": {"population": 6, "size": 4},
    "rounds": 3,
}


def scenario(**changes: Any) -> Scenario:
    return Scenario.model_validate({**SMALL, **changes})


def trained(tmp_path: Path, name: str, **changes: Any) -> dict[str, torch.Tensor]:
    return fedsim.run(scenario(**changes), out=tmp_path / name).model()


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_fedavg_with_one_client_is_plain_training(tmp_path: Path) -> None:
    settings = scenario(cohort={"population": 1}, client={"learning_rate": 0.1, "momentum": 0.5, "epochs": 2}, rounds=1)
    weights = fedsim.run(settings, out=tmp_path / "run").model()
    plan = fedsim.plan(settings)
    model = plan.model
    model.load_state_dict(plan.layout.unflatten(plan.start))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for rows in batches(plan, 1, 0):
        optimizer.zero_grad()
        F.cross_entropy(model(plan.dataset.x_train[rows]), plan.dataset.y_train[rows]).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_fedsgd_is_one_step_of_sgd_on_the_union_of_the_batches(tmp_path: Path) -> None:
    settings = scenario(
        strategy={"name": "fedsgd", "server_learning_rate": 0.3},
        client={"batch_size": None},
        partition={"kind": "quantity", "exponent": 1.0},
        cohort={"population": 6},
        rounds=1,
    )
    weights = fedsim.run(settings, out=tmp_path / "run").model()
    plan = fedsim.plan(settings)
    model = plan.model
    model.load_state_dict(plan.layout.unflatten(plan.start))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer.zero_grad()
    F.cross_entropy(model(plan.dataset.x_train), plan.dataset.y_train).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "defence",
    [
        {},
        {"example_dp": {"noise_multiplier": 1.0}},
        {"client_dp": {"noise_multiplier": 0.5}, "secure_aggregation": True},
        {"client_dp": {"noise_multiplier": 0.5, "adaptive": {}}, "compression": {"kind": "quantise", "bits": 4}},
    ],
)
def test_neither_chunk_nor_cohort_changes_a_bit(
    defence: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ragged = {"defence": defence, "partition": {"kind": "dirichlet", "alpha": 0.5}}
    whole = trained(tmp_path, "whole", **ragged)
    chunked = trained(tmp_path, "chunked", **ragged, engine={"chunk": 1})
    monkeypatch.setattr(running, "answer", one_by_one(app))
    single = trained(tmp_path, "single", **ragged)
    assert same_bits(whole, chunked)
    assert same_bits(whole, single)


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    assert not same_bits(trained(tmp_path, "a"), trained(tmp_path, "b", seed=1))


def test_the_round_goes_on_when_a_client_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "answer", _breaking(0))
    run = fedsim.run(scenario(cohort={"population": 3}), out=tmp_path / "run")
    assert (run.metrics.loc[1:, "failures"] == 1).all()
    assert (run.metrics.loc[1:, "clients"] == 2).all()
    errors = [line for line in run.transcript.messages() if line.kind == "error"]
    assert {line.client for line in errors} == {0}
    assert all(line.reason == "battery empty" for line in errors)


def test_a_run_ends_with_the_reason_when_everybody_fails(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"all 4 clients failed.*not finite"):
        fedsim.run(scenario(client={"learning_rate": 1e30}), out=tmp_path / "run")


def test_under_secure_aggregation_the_transcript_holds_sums_only(tmp_path: Path) -> None:
    run = fedsim.run(scenario(defence={"secure_aggregation": True}), out=tmp_path / "run")
    received = [line for line in run.transcript.messages() if line.direction == "received"]
    assert {line.kind for line in received} == {"sum"}
    assert all(line.client is None and line.clients == 4 for line in received)
    with pytest.raises(RunError, match="does not hold client-"):
        run.transcript.update(1, int(run.summary["cohorts"][0][0]))
    plain = fedsim.run(scenario(), out=tmp_path / "plain")
    for name, tensor in plain.model().items():
        torch.testing.assert_close(run.model()[name], tensor, rtol=1e-4, atol=1e-5)
    total = sum(plain.transcript.update(1, c)["3.weight"] * line.examples for c, line in _round_one(plain).items())
    torch.testing.assert_close(run.transcript.sum(1)["3.weight"], total, rtol=1e-4, atol=1e-4)


def test_a_sum_is_no_single_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = scenario(defence={"secure_aggregation": True}, cohort={"population": 8, "size": 1})
    with pytest.raises(ScenarioError, match="in round 1 there is one client, whose update would be the sum"):
        fedsim.plan(alone)
    drawn = scenario(
        defence={"secure_aggregation": True, "client_dp": {"noise_multiplier": 1.0}},
        cohort={"population": 8, "size": 1, "sampling": "poisson"},
        rounds=20,
    )
    assert any("one client is drawn, whose noised update is then the sum" in note for note in notes(fedsim.plan(drawn)))
    monkeypatch.setattr(running, "answer", _breaking(0, 1))  # of three clients one is left
    lonely = scenario(defence={"secure_aggregation": True}, cohort={"population": 3}, rounds=1)
    run = fedsim.run(lonely, out=tmp_path / "run")
    assert {line.kind for line in run.transcript.messages() if line.direction == "received"} == {"error"}


def test_a_round_in_which_a_share_of_the_noise_is_missing_is_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "answer", _breaking(0))
    defence = {"client_dp": {"noise_multiplier": 1.0}, "secure_aggregation": True}
    run = fedsim.run(scenario(defence=defence, cohort={"population": 3}, rounds=2), out=tmp_path / "run")
    plan = fedsim.plan(run.scenario)
    start = plan.layout.unflatten(plan.start)
    assert all(torch.equal(run.model()[name], start[name]) for name in plan.layout.names)
    # the server does not see the sum of the others either: their shares of the noise are less than is claimed
    assert {line.kind for line in run.transcript.messages() if line.direction == "received"} == {"error"}
    assert run.metrics["clients"].tolist()[1:] == [2, 2]


def test_an_empty_poisson_cohort_does_not_show_in_the_model(tmp_path: Path) -> None:
    defence = {"client_dp": {"noise_multiplier": 1.0}, "secure_aggregation": True}
    cohort = {"population": 3, "rate": 0.2, "sampling": "poisson"}
    run = fedsim.run(scenario(defence=defence, cohort=cohort, rounds=12), out=tmp_path / "run")
    empty = [n for n, clients in enumerate(run.summary["cohorts"], 1) if not clients and n < 12]
    assert empty
    for round_ in empty:
        before, after = run.transcript.model(round_), run.transcript.model(round_ + 1)
        change = torch.cat([(after[name] - before[name]).flatten() for name in before])
        assert change.std().item() == pytest.approx(1.0 / 0.6, rel=0.1)


def test_adaptive_clipping_follows_the_norms(tmp_path: Path) -> None:
    adaptive = {"quantile": 0.5, "learning_rate": 0.3, "bit_noise": 0.01}
    defence = {"client_dp": {"clipping_norm": 20.0, "noise_multiplier": 0.001, "adaptive": adaptive}}
    run = fedsim.run(scenario(defence=defence, cohort={"population": 6}, rounds=30), out=tmp_path / "run")
    norms = [line.config["clipping-norm"] for line in run.transcript.messages() if line.kind == "model"]
    plain = fedsim.run(scenario(cohort={"population": 6}, rounds=30), out=tmp_path / "plain")
    median = np.median([line.norm for line in plain.transcript.messages() if line.round > 25 and line.kind == "update"])
    assert norms[0] == 20.0
    assert median / 3 < norms[-1] < median * 3


def _breaking(*broken: int):  # type: ignore[no-untyped-def]
    def handle(messages, contexts):  # type: ignore[no-untyped-def]
        replies = answer(messages, contexts)
        who = [int(context.node_config["partition-id"]) for context in contexts]
        return [
            error_reply(m, "battery empty") if c in broken else r
            for m, r, c in zip(messages, replies, who, strict=True)
        ]

    return handle


def _round_one(run):  # type: ignore[no-untyped-def]
    return {line.client: line for line in run.transcript.messages() if line.round == 1 and line.kind == "update"}
