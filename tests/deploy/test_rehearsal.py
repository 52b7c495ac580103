# SPDX-License-Identifier: Apache-2.0
"""A scenario held against a policy before anybody is asked; and every scenario of the documentation passes its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from own_clients import VOUCHED, OwnClients, play

import fedsim
from fedsim.cli import main
from fedsim.deploy import init
from fedsim.deploy.rehearsal import rehearse
from fedsim.errors import PolicyError
from fedsim.federation.policy import policy_text
from fedsim.privacy import rounded_up

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "deployment.md"
BLOCKS = {
    name: text
    for block in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for name, text in [(block.split("\n")[0].removeprefix("# ").split(",")[0], block)]
}
POLICIES = {"scenario.yaml": "init", "secure.yaml": "policy.yaml of a client with 500 rows"}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the guide, and test rows that its schema encodes."""
    monkeypatch.chdir(tmp_path)
    for name in ("schema.yaml", *POLICIES):
        (tmp_path / name).write_text(BLOCKS[name])
    rows = [f"{20 + n % 60},{'fm'[n % 2]},{('benign', 'malignant')[n % 3 == 0]}" for n in range(90)]
    (tmp_path / "test.csv").write_text("\n".join(["age,sex,diagnosis", *rows]))
    init.create(tmp_path / "fed", 3, ["localhost"])
    assert main(["deploy", "encode", "schema.yaml", "test.csv", "test.npz"]) == 0
    return tmp_path


def test_every_scenario_of_the_guide_is_held_against_a_policy() -> None:
    assert {name for name, text in BLOCKS.items() if "rounds:" in text} == set(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_a_scenario_of_the_guide_passes_the_policy_that_it_names(
    name: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = policy_text() if POLICIES[name] == "init" else BLOCKS[POLICIES[name]]
    (files / "policy.yaml").write_text(text)
    words = ["deploy", "check", name, "--policy", "policy.yaml", "--deployment", "fed", "--rows", "500"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "allows it: 10 rounds of 10" in told
    for epsilon in re.findall(r"ε ≤ ([\d.]+)", told):  # the numbers that the guide prints
        assert epsilon in GUIDE.read_text()


def test_the_server_evaluates_on_all_of_its_rows(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["check", "scenario.yaml", "--deployment", "fed"]) == 0
    told = capsys.readouterr().out
    assert "90 rows to train on, 90 held out" in told
    assert "all 3 clients" in told  # and not the 20 of a simulation
    assert "supposes that each client holds 30 rows" in told


@pytest.mark.parametrize(
    ("policy", "more", "words"),
    [
        ("", ["--set", "defence.example_dp.noise_multiplier=0.1"], "noise multiplier for the unit example is 0.1"),
        ("largest_epsilon_a_run: 1.0\n", [], "refuses round 3 of 10: largest_epsilon_a_run is 1"),
        ("smallest_examples: 600\n", ["--rows", "599"], "does not hold as many"),
        ("models: [logistic]\n", [], "model mlp is not among logistic"),
        ("largest_message: 100\n", [], "bytes, at most 100 are allowed"),
        ("smallest_cohort: 4\n", ["--set", "defence.secure_aggregation=true"], "would add up 3 clients, at least 4"),
    ],
)
def test_what_a_client_would_refuse_is_said_before(
    policy: str, more: list[str], words: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "policy.yaml").write_text(policy)
    common = ["deploy", "check", "scenario.yaml", "--policy", "policy.yaml", "--deployment", "fed"]
    assert main([*common, *([] if "--rows" in more else ["--rows", "500"]), *more]) == 2
    assert words in capsys.readouterr().err


def test_a_rehearsal_gives_what_a_run_then_spends_and_claims(tmp_path: Path, world: object) -> None:
    clients = OwnClients(tmp_path / "fed")
    policy = VOUCHED.format(60)
    world.node_config = {client: clients.add(client, 60, policy) for client in range(3)}  # type: ignore[attr-defined]
    scenario = clients.scenario(3, defence={"example_dp": {"noise_multiplier": 1.5}, "secure_aggregation": True})
    file = clients.folder / "client-0" / "policy.yaml"
    taken, spent, (claim,) = rehearse(fedsim.plan(scenario), file, None)
    run = play(scenario, tmp_path / "run")
    assert run.claim is not None
    assert taken == 2
    assert rounded_up(run.claim.epsilon) == rounded_up(claim.epsilon)
    assert clients.ledger(0).epsilon("data", "example", 1e-5) == pytest.approx(spent.epsilon, rel=1e-9)
    file.write_text("largest_epsilon_a_day: 0.5\n")
    with pytest.raises(PolicyError, match="refuses round 1 of 2: largest_epsilon_a_day"):
        rehearse(fedsim.plan(scenario), file, 60)
