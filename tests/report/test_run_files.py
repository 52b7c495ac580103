# SPDX-License-Identifier: Apache-2.0
"""Run folders that are growing are read as far as they got; damaged ones are refused in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsim.errors import RunError
from fedsim.report import read_run_files, write_report
from fedsim.report.server_view import kept


def test_reads_what_is_there(dp_run: Path) -> None:
    run = read_run_files(dp_run)
    assert run.scenario.name == "dp-fedavg-clients"
    assert run.rounds_done == 10
    assert run.finished
    assert [claim.unit for claim in run.claims] == ["client", "example"]
    assert len(run.received) == 99
    assert [m.round for m in run.failures] == [3]
    assert sum(len(messages) for messages in run.messages_by_round.values()) == len(run.messages) == 110


def test_a_line_that_is_still_being_written_is_left_out(dp_run: Path) -> None:
    for file in (dp_run / "metrics.jsonl", dp_run / "transcript" / "messages.jsonl"):
        text = file.read_text()
        file.write_text(text[:-20])
    run = read_run_files(dp_run)
    assert run.rounds_done == 9
    assert not run.finished
    assert len(run.messages) == 109


def test_a_run_that_has_only_begun(dp_run: Path) -> None:
    for entry in dp_run.iterdir():
        if entry.name != "scenario.yaml":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    text = write_report(dp_run).read_text()
    assert "0 of 10 planned rounds are done" in text
    assert "nothing has been accounted for yet" in text
    assert "The transcript holds no message yet." in text
    assert "ε ≤ " not in text


def test_unfinished_run_says_so_and_shows_what_was_spent(report_of: Callable[[str], Path]) -> None:
    header = report_of("unfinished").read_text().partition("</header>")[0]
    assert "5 of 12 planned rounds are done" in header
    assert "Privacy spent so far, after round 5" in header
    assert "ε ≤ 2.761" in header  # 1.234567 * sqrt(5) = 2.76057
    assert "The claims hold for all 12 planned rounds" in report_of("unfinished").read_text()


def test_missing_tensors_are_told(dp_run: Path) -> None:
    (dp_run / "transcript" / "round-00002-received.safetensors").unlink()
    assert "missing: round-00002-received.safetensors" in kept(read_run_files(dp_run)).text


def _truncate(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text((run / name).read_text()[:40])


def _spoil_line(name: str, number: int, line: str) -> Callable[[Path], object]:
    def spoil(run: Path) -> None:
        lines = (run / name).read_text().splitlines()
        lines[number - 1] = line
        (run / name).write_text("\n".join(lines) + "\n")

    return spoil


def _spoil_summary(**changes: object) -> Callable[[Path], object]:
    def spoil(run: Path) -> None:
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | changes))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (shutil.rmtree, "is not a run folder"),
        (lambda run: (run / "scenario.yaml").unlink(), "holds no scenario.yaml"),
        (lambda run: (run / "scenario.yaml").write_text("rounds: [1"), "scenario"),
        (lambda run: (run / "scenario.yaml").write_text("rounds: -3\n"), "rounds"),
        (lambda run: (run / "scenario.yaml").write_bytes(b"\xff\xfe\x00"), "scenario.yaml"),
        (_truncate("summary.json"), "summary.json is damaged"),
        (_truncate("claims.json"), "claims.json is damaged"),
        (lambda run: (run / "claims.json").write_text("[1]"), "claims.json is damaged"),
        (lambda run: (run / "claims.json").write_text("3"), "claims.json is damaged"),
        (lambda run: (run / "claims.json").write_text('[{"epsilon": 1}]'), "claims.json is damaged"),
        (_spoil_line("metrics.jsonl", 4, "{nonsense"), "metrics.jsonl is damaged (line 4"),
        (_spoil_line("metrics.jsonl", 4, '{"round": "three"}'), "line 4: round"),
        (_spoil_line("transcript/messages.jsonl", 7, "[]"), "messages.jsonl is damaged (line 7"),
        (_spoil_line("transcript/messages.jsonl", 2, ""), "line 2"),
        (_spoil_summary(partition={"clients": [1, 2], "sizes": [3]}), "not equally long"),
        (_spoil_summary(partition={"clients": [1, 2], "sizes": [3, 4], "counts": [[1], [1, 2]]}), "not equally long"),
        (_spoil_summary(population="many"), "population"),
    ],
)
def test_damage_is_told_in_one_sentence(dp_run: Path, spoil: Callable[[Path], object], words: str) -> None:
    spoil(dp_run)
    with pytest.raises(RunError) as caught:
        write_report(dp_run)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert not (dp_run / "report.html").exists()
