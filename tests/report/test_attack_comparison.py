# SPDX-License-Identifier: Apache-2.0
"""Attacks beside each other: one line for each, means over clients with their intervals, and the answer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.report import read_run_files
from fedsim.report.attack_comparison import Mean, attacks_compared, mean_over_clients
from fedsim.report.blocks import Paragraph, Table
from fedsim.scenario import Scenario

AVERAGED: dict[str, Any] = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [100]},
    "client": {"learning_rate": 0.01, "epochs": 2, "batch_size": 2},
    "partition": {"kind": "iid", "examples_per_client": 4},
    "cohort": {"population": 2},
    "rounds": 2,
    "attacks": [
        {"name": "fedavg", "title": "exactly"},
        {"name": "fedavg", "title": "a few steps", "exact_first": False, "features": False, "iterations": 5},
        {
            "name": "fedavg",
            "title": "all rounds",
            "exact_first": False,
            "features": False,
            "rounds": "together",
            "iterations": 5,
        },
    ],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedsim.run(Scenario.model_validate(AVERAGED), out=tmp_path_factory.mktemp("averaged") / "run").path


def test_a_mean_has_the_interval_of_student() -> None:
    # t(0.975, 3) = 3.182446; the sample standard deviation of 1, 2, 3, 4 is 1.290994
    found = mean_over_clients([1.0, 2.0, 3.0, 4.0])
    assert found.value == 2.5
    assert found.half_width == pytest.approx(3.182446 * 1.290994 / 2, rel=1e-5)
    assert mean_over_clients([7.0]) == Mean(7.0, math.inf)
    assert str(mean_over_clients([7.0])) == "7"


def test_the_table_has_a_line_for_each_method(run: Path) -> None:
    (section,) = attacks_compared(read_run_files(run))
    answer, table = section.blocks
    assert isinstance(answer, Paragraph)
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["exactly", "a few steps", "all rounds"]
    assert table.columns[3:5] == ("recognisable", "above 19 dB")
    for column in (3, 4):
        assert str(table.rows[0][column]).startswith("1")  # every picture, from the dense layer, whatever the order was
        assert str(table.rows[1][column]).startswith("0")
    assert "Most was found by exactly: 100% of the pictures are recognisable." in answer.text
    assert "did not protect" in answer.text


def test_rounds_together_are_one_update_for_each_client(run: Path) -> None:
    files = read_run_files(run).attacks
    assert [update.key for update in files[2].document.observations] == ["round-1/client-0", "round-1/client-1"]
    assert all("from 2 rounds" in " ".join(update.notes) for update in files[2].document.observations)


def test_one_attack_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    alone = Scenario.model_validate({**AVERAGED, "attacks": [{"name": "fedavg"}]})
    assert attacks_compared(read_run_files(fedsim.run(alone, out=tmp_path / "run").path)) == ()
