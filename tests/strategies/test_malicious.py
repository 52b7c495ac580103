# SPDX-License-Identifier: Apache-2.0
"""An active server in a whole federation: what it sends, what is written down, and that training goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedsim
from fedsim.attacks.imprint import imprint
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.errors import ScenarioError
from fedsim.federation import folder
from fedsim.federation import run as running
from fedsim.federation.client import app, local_work
from fedsim.federation.inline import one_by_one
from fedsim.federation.run import Run, resume
from fedsim.scenario import ImprintAttack, Scenario

BASE: dict[str, Any] = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [200]},
    "strategy": "fedsgd",
    "client": {"batch_size": 8},
    "cohort": {"population": 4},
    "rounds": 3,
    "adversary": {"active": "imprint"},
}


def scenario(**changes: Any) -> Scenario:
    return Scenario.model_validate({**BASE, **changes})


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def read(run: Run, client: int | None) -> tuple[int, int]:
    """How many of a client's (or of all clients') images of round 1 are read exactly, and how many there are."""
    plan = fedsim.plan(run.scenario)
    truth = load_file(run.path / "truth" / "round-00001.safetensors")
    who = [client] if client is not None else list(range(plan.population))
    originals = plan.dataset.x_train[torch.cat([truth[f"client-{k}/rows"] for k in who])]
    plan.model.load_state_dict(run.transcript.model(1, client))
    update = run.transcript.update(1, client) if client is not None else run.transcript.sum(1)
    seen = Observation(
        model=plan.model,
        update=update,
        kind="gradient",
        work=local_work(run.scenario, 0.0),
        client=client,
        clients=len(who),
    )
    bounds = (torch.tensor(0.0), torch.tensor(1.0))
    active = run.scenario.adversary.active
    result = imprint(
        seen,
        Knowledge("image", plan.dataset.input_shape, plan.dataset.classes, bounds, active=active),
        ImprintAttack(name="imprint"),
    )
    apart = torch.cdist(result.inputs.flatten(1), originals.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
    return int((apart.amin(dim=0) < 1e-3).sum()) if len(apart) else 0, len(originals)


def test_what_was_sent_is_written_down_and_read(tmp_path: Path) -> None:
    run = fedsim.run(scenario(), out=tmp_path / "run")
    plan = fedsim.plan(run.scenario)
    honest = plan.layout.unflatten(plan.start)
    sent = run.transcript.model(1)
    rows = sent["1.weight"][:66]
    assert float(torch.nn.functional.cosine_similarity(rows, rows[:1]).min()) > 0.999
    # The crafted updates are not trained with, and the next round is honest again.
    assert all(torch.equal(run.transcript.model(2)[name], honest[name]) for name in honest)
    assert not torch.equal(run.transcript.model(3)["1.weight"], honest["1.weight"])
    assert run.transcript.verify() == 3 * (1 + 4)
    found = [read(run, client) for client in range(4)]
    assert sum(exact for exact, _ in found) >= 30
    assert all(total == 8 for _, total in found)


@pytest.mark.parametrize("strategy", ["fedsgd", "fedavg"])
@pytest.mark.parametrize("active", ["trap", "fishing", {"kind": "per-client", "rounds": [2]}])
def test_every_kind_runs_one_by_one_to_the_same_bytes(
    strategy: str, active: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = scenario(strategy=strategy, adversary={"active": active}, rounds=2)
    whole = fedsim.run(settings, out=tmp_path / "whole")
    monkeypatch.setattr(running, "answer", one_by_one(app))
    single = fedsim.run(settings, out=tmp_path / "single")
    assert contents(whole.path) == contents(single.path)


def test_each_client_has_its_own_model_and_the_sum_falls_apart(tmp_path: Path) -> None:
    settings = scenario(adversary={"active": "per-client"}, defence={"secure_aggregation": True}, rounds=1)
    run = fedsim.run(settings, out=tmp_path / "run")
    sent = [line for line in run.transcript.messages() if line.direction == "sent"]
    assert [line.client for line in sent] == [0, 1, 2, 3]
    assert len({line.sha256 for line in sent}) == 4
    assert run.transcript.verify() == 4 + 1
    biases = torch.stack([run.transcript.model(1, client)["1.bias"] for client in range(4)])
    everybody = run.transcript.model(1)["1.bias"]
    for client in range(4):
        assert torch.equal(biases[client, 50 * client : 50 * client + 50], everybody[50 * client : 50 * client + 50])
    assert int(((biases - everybody).abs() > 0).sum()) == 3 * 200
    exact, total = read(run, None)
    assert total == 32
    assert exact >= 26


def test_only_the_clients_that_are_named_are_attacked(tmp_path: Path) -> None:
    active = {"kind": "imprint", "clients": [2], "rounds": [1, 2]}
    run = fedsim.run(scenario(adversary={"active": active}), out=tmp_path / "run")
    plan = fedsim.plan(run.scenario)
    honest = plan.layout.unflatten(plan.start)["1.weight"]
    assert torch.equal(run.transcript.model(1, 0)["1.weight"], honest)
    assert not torch.equal(run.transcript.model(1, 2)["1.weight"], honest)
    # The others are trained with.
    assert not torch.equal(run.transcript.model(2, 0)["1.weight"], honest)
    assert read(run, 2)[0] >= 6


def test_an_attacked_run_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adversary = {"active": {"kind": "per-client", "rounds": [1, 3]}}
    settings = scenario(adversary=adversary, rounds=4, strategy={"name": "fedsgd", "server_momentum": 0.5})
    expected = contents(fedsim.run(settings, out=tmp_path / "undisturbed").path)
    monkeypatch.setattr(folder, "CHECKPOINT_SECONDS", 0.0)

    def stop(report: Any) -> None:
        if report.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedsim.run(settings, out=tmp_path / "run", progress=stop)
    resume(tmp_path / "run")
    assert contents(tmp_path / "run") == expected


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "cnn"}, "not dense"),
        ({"model": "logistic"}, "not followed"),
        ({"model": {"name": "mlp", "hidden": [4]}}, "too few"),
        ({"adversary": {"active": {"kind": "per-client"}}, "cohort": {"population": 60}}, "too few"),
        ({"adversary": {"active": {"kind": "fishing", "target": 11}}}, "target 11"),
    ],
)
def test_an_attack_that_does_not_fit_is_named_before_the_run(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ScenarioError, match=sentence):
        fedsim.plan(scenario(**changes))


@pytest.mark.parametrize(
    ("active", "sentence"),
    [
        ({"kind": "imprint", "rounds": [9]}, "names round 9"),
        ({"kind": "imprint", "query": "average"}, "one average"),
        ({"kind": "per-client", "query": "average"}, "one average"),
    ],
)
def test_sections_that_contradict_themselves(active: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        scenario(adversary={"active": active})
