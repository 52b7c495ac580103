# SPDX-License-Identifier: Apache-2.0
"""`fedsim check` says in seconds how long attacks may take."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.attack_time import attack_seconds
from fedsim.attacking import attack_run
from fedsim.cli import main
from fedsim.scenario import Scenario
from fedsim.scenario_file import load_scenario, scenario_names

BASE: dict[str, Any] = {
    "data": {"source": "digits", "limit": 200},
    "model": {"name": "mlp", "hidden": [64], "activation": "sigmoid"},
    "strategy": "fedsgd",
    "client": {"batch_size": 2},
    "cohort": {"population": 4},
    "rounds": 2,
}
ATTACKED = [name for name in scenario_names() if load_scenario(name).attacks]


def estimate(**changes: Any) -> tuple[float, float]:
    scenario = Scenario.model_validate({**BASE, **changes})
    return attack_seconds(fedsim.plan(scenario), scenario.attacks)


def test_more_work_is_said_to_take_longer() -> None:
    matching = {"name": "gradient-matching", "iterations": 300, "observations": 2}
    few = estimate(attacks=[matching])
    many = estimate(attacks=[{**matching, "iterations": 30_000}])
    assert few[0] < few[1] < many[1]
    assert many[1] > 10 * few[1]
    assert estimate(attacks=[{**matching, "iterations": 30_000, "seconds": 2}])[1] < 10
    assert estimate(attacks=[matching, matching])[1] > few[1]
    assert estimate() == (0, 0)


def test_updates_that_are_not_kept_take_no_time() -> None:
    attack = {"name": "labels", "observations": 1000}
    assert (
        estimate(attacks=[attack], adversary={"keep_rounds": 1, "keep_clients": 1})[1] < estimate(attacks=[attack])[1]
    )


def test_check_gives_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("data: digits\nmodel: logistic\nrounds: 1\nattacks: [labels, closed-form]\n")
    assert main(["check", "a.yaml"]) == 0
    assert re.search(r"and then \d+ seconds?( to \d+ (seconds|minutes))? for 2 attacks$", capsys.readouterr().out, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKED)
def test_the_attacks_that_come_with_fedsim_take_as_long_as_is_said(name: str, tmp_path: Path) -> None:
    scenario = load_scenario(name)
    run = fedsim.run(name, overrides=["attacks=[]"], out=tmp_path / "run")
    low, high = attack_seconds(fedsim.plan(scenario), scenario.attacks)
    begun = time.process_time()  # of this process alone, whatever else the machine does
    attack_run(run, scenario)
    assert low / 2 <= time.process_time() - begun <= 2 * high
