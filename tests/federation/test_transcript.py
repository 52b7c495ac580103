# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsim
from fedsim.errors import RunError
from fedsim.federation.run import Run
from fedsim.federation.transcript import Transcript
from fedsim.scenario import Scenario


def run(tmp_path: Path, **adversary: Any) -> Run:
    settings = {
        "data": "digits",
        "model": "logistic",
        "cohort": {"population": 5, "size": 3},
        "rounds": 3,
        "adversary": adversary,
    }
    return fedsim.run(Scenario.model_validate(settings), out=tmp_path / "run")


def test_the_next_model_is_the_last_one_plus_the_average_update(tmp_path: Path) -> None:
    result = run(tmp_path)
    lines = [line for line in result.transcript.messages() if line.round == 1 and line.kind == "update"]
    total = sum(line.examples or 0 for line in lines)
    for name, before in result.transcript.model(1).items():
        average = sum(result.transcript.update(1, line.client)[name] * line.examples / total for line in lines)  # type: ignore[operator, arg-type]
        torch.testing.assert_close(result.transcript.model(2)[name], before + average)
    assert [line.client for line in lines] == result.summary["cohorts"][0]
    assert result.transcript.verify() == 3 * (1 + 3)


@pytest.mark.parametrize(
    ("adversary", "rounds", "updates"),
    [
        ({"keep_rounds": 0}, 0, 0),
        ({"keep_rounds": 2}, 2, 6),
        ({"keep_rounds": [3], "keep_clients": 1}, 1, 1),
        ({"keep_clients": []}, 3, 0),
    ],
)
def test_it_holds_what_the_adversary_keeps_and_counts_the_rest(
    tmp_path: Path, adversary: dict[str, Any], rounds: int, updates: int
) -> None:
    result = run(tmp_path, **adversary)
    lines = list(result.transcript.messages())
    assert len(lines) == 3 * (1 + 3)
    assert sum(line.kind == "model" and line.file is not None for line in lines) == rounds
    assert sum(line.kind == "update" and line.file is not None for line in lines) == updates
    assert all(line.norm is not None and line.norm > 0 for line in lines if line.kind == "update")
    assert len(list((result.path / "truth").glob("*"))) == (rounds if updates else 0)


def test_the_ground_truth_is_kept_apart(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert not any("truth" in file.name or "rows" in file.name for file in (result.path / "transcript").iterdir())


def test_damage_and_absence_are_told(tmp_path: Path) -> None:
    result = run(tmp_path, keep_rounds=1)
    with pytest.raises(RunError, match="round 99 is not in the transcript"):
        result.transcript.update(99, 0)
    with pytest.raises(RunError, match="was not kept"):
        result.transcript.model(2)
    file = result.path / "transcript" / "round-00001-received.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match="is damaged"):
        result.transcript.verify()
    with pytest.raises(RunError, match="holds no transcript"):
        Transcript(tmp_path)


def test_it_can_be_read_while_it_grows(tmp_path: Path) -> None:
    seen = []

    def look(report: Any) -> None:
        if report.round:
            seen.append(len(list(Transcript(tmp_path / "run" / "transcript").messages())))

    settings = {"data": "digits", "model": "logistic", "cohort": {"population": 2}, "rounds": 3}
    fedsim.run(Scenario.model_validate(settings), out=tmp_path / "run", progress=look)
    assert seen == [3, 6, 9]
