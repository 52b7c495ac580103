# SPDX-License-Identifier: Apache-2.0
"""`fedsim audit`: of a scenario, of a run, of a function."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.audit.results import audit_paths, read_audits, write_audit
from fedsim.auditing import audit_run, audit_scenario, fitting_audits
from fedsim.cli import main
from fedsim.errors import RunError
from fedsim.report import read_run_files
from fedsim.report.audit_files import read_audit_files
from fedsim.scenario import GameAudit, Scenario

SMALL = """
name: small
data: digits
model: logistic
partition: {kind: iid, examples_per_client: 600}
strategy: fedsgd
client: {batch_size: 120}
cohort: {population: 2}
rounds: 3
defence: {example_dp: {noise_multiplier: 1.0}}
audit: [{kind: example-canaries, canaries: 500}]
seed: 1
"""
HOMEWORK = Scenario.model_validate({"audit": [{"kind": "one-run-sum", "questions": ["Q2.1"], "repeats": 1}]})
# Of seeds 0 to 339, 16 are called violated (4.7%, tests at 5%), 0 among them.


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_scenario_is_run_and_audited(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["audit", str(scenario), "--out", str(folder), "--no-report"]) == 0
    shown = capsys.readouterr().out
    assert "audit=example-canaries number=1 of=1" in shown
    for line in (line for line in shown.splitlines() if "ε" in line):
        assert "δ = 1e-05" in line
        assert "add/remove one example" in line
    (audit,) = read_audits(folder)
    assert audit["settings"]["canaries"] == 500
    assert audit["verdict"]["status"] in ("consistent", "inconclusive")
    assert [estimate["tier"] for estimate in audit["verdict"]["estimates"]] == ["A", "A", "B", "B"]
    assert len(audit["numbers"]["trade_off"]["fpr"]) > 20
    again = document(capsys, "audit", str(folder), "--audit", "{kind: game, game: DPD, trials: 40}", "--no-report")
    assert [entry["settings"]["game"] for entry in again["audits"]] == ["DPD"]
    assert read_audits(folder) == [audit, *again["audits"]]


def test_an_audit_deletes_no_other(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does going on with the run; the same audit again is the same bytes in the same file."""
    folder = tmp_path / "run"
    fedsim.run(scenario, out=folder)
    games = [f"{{kind: game, game: {name}, trials: 20}}" for name in ("MI-Adv", "DPD", "MI-Adv")]
    seen: list[dict[str, bytes]] = []
    for game in games:
        assert main(["audit", str(folder), "--audit", game, "--no-report"]) == 0
        shown = capsys.readouterr().out
        assert re.findall(r"^game ([\w-]+):", shown, re.MULTILINE) == ["MI-Adv" if "MI-Adv" in game else "DPD"]
        seen.append({path.name: path.read_bytes() for path in audit_paths(folder)})
    assert list(seen[0]) == ["001-MI-Adv.json"]
    assert list(seen[1]) == ["001-MI-Adv.json", "002-DPD.json"]
    assert seen[2] == seen[1]
    assert seen[1]["001-MI-Adv.json"] == seen[0]["001-MI-Adv.json"]
    assert main(["run", "--resume", str(folder), "--no-report"]) == 0
    assert {path.name: path.read_bytes() for path in audit_paths(folder)} == seen[2]
    assert [audit.name for audit in read_run_files(folder).audits] == ["the game MI-Adv", "the game DPD"]


def test_the_results_of_an_older_version_are_still_read(scenario: Path, tmp_path: Path) -> None:
    run = fedsim.run(scenario, out=tmp_path / "run")
    one, two = (run.scenario.model_copy(update={"audit": (GameAudit(kind="game", game=name, trials=20),)})
                for name in ("SMI", "MI-Adv"))  # fmt: skip
    (path,) = audit_run(run, one)
    path.rename(run.path / "audit.json")  # the document is the same; it held all audits of a folder
    audit_run(run, two)
    assert (run.path / "audit.json").is_file()
    assert [path.name for path in audit_paths(run.path)] == ["audit.json", "001-MI-Adv.json"]
    assert [audit["settings"]["game"] for audit in read_audits(run.path)] == ["SMI", "MI-Adv"]
    assert [audit.name for audit in read_audit_files(run.path)] == ["the game SMI", "the game MI-Adv"]


def test_audits_keep_their_order_beyond_999(tmp_path: Path) -> None:
    (tmp_path / "audits").mkdir()
    for number in (1000, 999, 2):
        (tmp_path / "audits" / f"{number:03d}-MI.json").write_text('{"audits": []}')
    (tmp_path / "audits" / ".001-MI.json.tmp").write_text("half of it")
    assert [path.name for path in audit_paths(tmp_path)] == ["002-MI.json", "999-MI.json", "1000-MI.json"]
    written = write_audit(tmp_path, "a-name", "MI", {"settings": {}})
    assert written.name == "1001-MI.json"


def test_a_function_is_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nothing_private.py").write_text("def total(data, rng):\n    return sum(data) + rng.normal() * 1e-3\n")
    monkeypatch.chdir(tmp_path)
    words = ["nothing_private:total", "--epsilon", "1", "--delta", "1e-5", "--trials", "2000"]
    found = document(capsys, "audit", *words)
    assert found["verdict"]["status"] == "violated"
    assert found["verdict"]["claim"]["adjacency"] == "add/remove"
    assert found["report"] is None
    kept = document(capsys, "audit", *words, "--out", "kept")
    assert {**kept, "report": None} == found
    page = Path(kept["report"]).read_text()
    assert "the mechanism nothing_private:total" in page
    assert "The trade-off" in page
    assert main(["report", "kept"]) == 0
    assert Path("kept/report.html").read_text() == page
    capsys.readouterr()
    assert main(["audit", *words, "--out", "kept"]) == 2
    assert "--out kept exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no-such-scenario"], "no-such-scenario"),
        (["no_such_module:f", "--epsilon", "1"], "no_such_module"),
        (["audit-dp-sgd", "--epsilon", "1"], "--epsilon 1.0 is for module:function"),
        (["audit-dp-sgd", "--audit", "horoscope"], "horoscope"),
        (["audit-dp-sgd", "--audit", " "], "names no audit"),
    ],
)
def test_what_is_wrong_is_one_sentence(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error


def test_a_scenario_without_audits_gets_those_that_fit() -> None:
    def kinds(**changes: Any) -> list[str]:
        return [section.kind for section in fitting_audits(Scenario.model_validate({"data": "digits", **changes}))]

    examples = {"example_dp": {"noise_multiplier": 1.0}}
    assert kinds(strategy="fedsgd", defence=examples) == ["example-canaries"]
    assert kinds(defence=examples) == ["game", "game"]  # an ordinary row, and the worst one
    assert kinds(defence={"client_dp": {"noise_multiplier": 1.0}}) == ["client-canaries"]
    assert kinds() == ["game"]


def test_the_homework_as_an_audit() -> None:
    scenario = Scenario.model_validate({"audit": [{"kind": "one-run-sum", "questions": ["Q2.3"], "repeats": 2}]})
    seen: list[int] = []
    (result,) = audit_scenario(scenario, progress=lambda report: seen.append(report.done))
    assert [row["value"] for row in result["numbers"]["rows"]] == [10, 100, 1000, 10_000, 100_000]
    assert len(result["numbers"]["outcomes"]) == 10
    assert max(seen) == 10
    assert json.dumps(result)


@pytest.mark.parametrize("content", [b"{}", b"", b"\xff", b'{"audits": [1]}', b'{"audits": 5}', b"[]"])
@pytest.mark.parametrize("name", ["audit.json", "audits/001-MI.json"])
def test_a_damaged_result_is_told(name: str, content: bytes, scenario: Path, tmp_path: Path) -> None:
    run = fedsim.run(scenario, out=tmp_path / "run")
    assert read_audits(run.path) == []
    damaged = run.path / name
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_bytes(content)
    for read in (read_audits, read_audit_files, lambda path: audit_run(run, HOMEWORK)):
        with pytest.raises(RunError, match=f"{damaged.name} is damaged"):
            read(run.path)
    damaged.unlink()
    shutil.rmtree(run.path / "audits", ignore_errors=True)
    (run.path / "audits").write_text("")
    with pytest.raises(RunError, match="in the way"):
        audit_run(run, HOMEWORK)
