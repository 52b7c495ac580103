# SPDX-License-Identifier: Apache-2.0
"""Every packaged scenario opens with its question, runs, and makes the claim that it says it makes."""

from importlib.resources import files
from pathlib import Path

import pytest

import fedsim
from fedsim.report import write_report
from fedsim.scenario_file import load_scenario, scenario_names

NAMES = scenario_names()
QUICK = ["rounds=2"]


def test_the_promised_scenarios_are_there() -> None:
    promised = "quickstart fedsgd fedavg-dirichlet dp-fedavg-clients dp-sgd-examples tabular million-clients"
    assert set(promised.split()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_opens_with_its_question(name: str) -> None:
    lines = (files("fedsim.scenarios") / f"{name}.yaml").read_text().splitlines()
    comments = [line for line in lines if line.startswith("# ") and "$schema" not in line]
    assert comments[0].endswith("?")
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.question.endswith("?")


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_reports(name: str, tmp_path: Path) -> None:
    brief = ["attacks=[{name: fedavg, iterations: 3, observations: 1}]"] if name == "fedavg-leakage" else []
    run = fedsim.run(name, overrides=[*QUICK, *brief], out=tmp_path / "run")
    assert run.complete
    assert list(run.metrics.index) == [0, 1, 2]
    assert (run.metrics["failures"] == 0).all()
    assert run.transcript.verify() > 0
    assert write_report(run.path).stat().st_size > 50_000
    defence = run.scenario.defence
    promised = {unit for unit, dp in (("example", defence.example_dp), ("client", defence.client_dp)) if dp}
    assert {claim.unit for claim in run.claims} == promised
    assert all(claim.finite for claim in run.claims)


def test_quickstart_learns_mnist(tmp_path: Path) -> None:
    run = fedsim.run("quickstart", out=tmp_path / "run")
    assert run.metrics["accuracy"].iloc[-1] >= 0.90
    assert run.metrics["accuracy"].iloc[0] < 0.3
    assert run.claim is None


@pytest.mark.parametrize(("name", "least", "epsilon"), [("dp-fedavg-clients", 0.8, 4.0), ("dp-sgd-examples", 0.8, 8.0)])
def test_private_training_learns_within_its_claim(name: str, least: float, epsilon: float, tmp_path: Path) -> None:
    run = fedsim.run(name, out=tmp_path / "run")
    assert run.claim is not None
    assert 0.9 * epsilon < run.claim.epsilon <= epsilon
    assert run.metrics["accuracy"].iloc[-1] >= least
    spent = list(run.metrics["epsilon"].iloc[1:])
    assert spent == sorted(spent)
    assert spent[-1] == run.claim.epsilon
