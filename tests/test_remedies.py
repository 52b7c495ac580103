# SPDX-License-Identifier: Apache-2.0
"""Default audits fit every scenario, and a remedy is a command that works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsim
from fedsim.auditing import check_audits, fitting_audits
from fedsim.cli import main
from fedsim.errors import AuditError
from fedsim.federation.plan import plan
from fedsim.remedies import settling, single_steps
from fedsim.scenario import ExampleCanaries, GameAudit, Scenario, TranscriptAudit
from fedsim.scenario_file import dump_scenario, load_scenario, parse_scenario, scenario_names

KINDS = ["example-canaries", "client-canaries", "transcript", "{kind: game, game: DPD}", "{kind: game, game: MI}"]
SHIPPED = [*scenario_names()]
COMMAND = re.compile(r"`(fedsim [^`]+)`")
STEPS: dict[str, Any] = {
    "data": "digits",
    "partition": {"kind": "iid", "examples_per_client": 400},
    "model": "logistic",
    "client": {"epochs": 2, "batch_size": 100},
    "cohort": {"population": 3},
    "rounds": 4,
    "defence": {"example_dp": {"noise_multiplier": 1.0}},
    "seed": 5,
}


def passes_the_check(command: str) -> bool:
    """Whether `fedsim check` accepts what the command asks for."""
    words = shlex.split(command)
    assert words[:2] == ["fedsim", "audit"]
    changed = ["--set" if word == "--audit" else word for word in words[2:]]
    for place, word in enumerate(words[2:]):
        if word == "--audit":
            changed[place + 1] = f"audit=[{words[2:][place + 1]}]"
    if Path(changed[0]).is_dir():
        changed[0] = str(Path(changed[0]) / "scenario.yaml")
    return main(["check", *changed]) == 0


@pytest.mark.parametrize("name", SHIPPED)
def test_the_default_audit_fits_and_what_is_refused_comes_with_a_command(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = load_scenario(name)
    planned = plan(scenario)
    check_audits(planned, scenario.audit or fitting_audits(scenario))
    refused = 0
    for kind in KINDS:
        try:
            asked = load_scenario(name, [f"audit=[{kind}]"])
            check_audits(plan(asked), asked.audit)
        except AuditError:
            assert main(["audit", name, "--audit", kind]) == 2
            (command,) = COMMAND.findall(capsys.readouterr().err)
            assert passes_the_check(command), command
            refused += 1
        except fedsim.errors.ScenarioError:
            continue  # a game with the wrong kind of data: refused as a wrong field
    assert refused or planned.claims


def test_the_flagship_has_room_for_its_canaries() -> None:
    planned = plan(load_scenario("dp-fedavg-clients"))
    assert planned.population // 4 > planned.layout.size // 4
    check_audits(planned, fitting_audits(planned.scenario))


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 3), st.integers(20, 400), st.integers(1, 3))
def test_single_steps_are_the_same_releases(epochs: int, batch: int, rounds: int) -> None:
    client = {"epochs": epochs, "batch_size": batch}
    scenario = Scenario.model_validate({**STEPS, "client": client, "rounds": rounds})
    before = plan(scenario).claims[0]
    overrides = single_steps(scenario)
    single = parse_scenario(dump_scenario(scenario), "scenario.yaml", overrides)
    (after,) = (claim for claim in plan(single).claims if claim.observer == before.observer)
    assert after == before


def inconclusive(scenario: Scenario, section: Any, needed: int | None = None) -> dict[str, Any]:
    claim = plan(scenario).claims[0]
    fields = {"epsilon": claim.epsilon, "delta": claim.delta, "unit": claim.unit, "adjacency": claim.adjacency}
    verdict = {"status": "inconclusive", "claim": fields}
    return {"settings": section.model_dump(mode="json"), "verdict": verdict, "numbers": {"needed": needed}}


def test_what_would_settle_an_audit_passes_the_check(tmp_path: Path) -> None:
    """The circle of old: a game sent to canaries, canaries to a strategy that the scenario refuses."""
    scenario = Scenario.model_validate(STEPS)
    (tmp_path / "scenario.yaml").write_text(dump_scenario(scenario))
    for section in (GameAudit(kind="game", game="DPD"), TranscriptAudit(kind="transcript")):
        (command,) = settling(tmp_path, scenario, [inconclusive(scenario, section)])
        assert "--audit example-canaries" in command
        assert passes_the_check(command)
    one_step = Scenario.model_validate({**STEPS, "client": {"steps": 1, "batch_size": 100}})
    (tmp_path / "scenario.yaml").write_text(dump_scenario(one_step))
    canaries = ExampleCanaries(kind="example-canaries", canaries=10)
    (command,) = settling(tmp_path, one_step, [inconclusive(one_step, canaries, 900)])
    assert shlex.split(command)[-1] == "{kind: example-canaries, canaries: 300}"
    assert passes_the_check(command)
    assert settling(tmp_path, one_step, [inconclusive(one_step, canaries, 9000)]) == []  # there is no room for so many


def test_a_weak_claim_of_an_example_is_settled_by_the_command_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("steps.yaml").write_text(dump_scenario(Scenario.model_validate(STEPS)))
    games = ["--audit", "{kind: game, game: DPD, trials: 40}"]
    assert main(["audit", "steps.yaml", "--out", "run", "--no-report", *games]) == 0
    out = capsys.readouterr().out
    (command,) = re.findall(r"^to settle it: (fedsim .*)$", out, re.MULTILINE)
    assert main([*shlex.split(command)[1:], "--out", "again", "--no-report"]) == 0
    assert "example-canaries: Consistent" in capsys.readouterr().out
    assert main(["audit", "run", "--audit", "example-canaries", "--no-report"]) == 2
    assert COMMAND.findall(capsys.readouterr().err) == [command]


def test_a_client_that_holds_everything_is_sent_to_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("all.yaml").write_text("data: {source: digits, test_fraction: 0.005}\ncohort: {population: 1}\nrounds: 1\n")
    assert main(["run", "all.yaml", "--out", "run", "--no-report"]) == 0
    assert main(["audit", "run"]) == 2
    (command,) = COMMAND.findall(capsys.readouterr().err)
    assert passes_the_check(command)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_the_default_audit_of_every_scenario_works(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fedsim.run(name, overrides=["attacks=[]"], out=tmp_path / "run")
    assert main(["audit", str(tmp_path / "run"), "--no-report"]) == 0
    for command in re.findall(r"^to settle it: (fedsim .*)$", capsys.readouterr().out, re.MULTILINE):
        assert passes_the_check(command), command
