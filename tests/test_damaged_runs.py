# SPDX-License-Identifier: Apache-2.0
"""Damage to a finished run is refused, or shown on the page and on the screen."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refused

import fedsim
from fedsim.cli import main
from fedsim.errors import RunError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


RUN = "data: digits\nmodel: logistic\nrounds: 1\ncohort: {population: 2}"


def _deleted(file: Path) -> None:
    file.unlink()


def _emptied(file: Path) -> None:
    file.write_bytes(b"")


def _flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    (folder / "good.yaml").write_text(RUN + "\nattacks: [labels]")
    assert main(["run", str(folder / "good.yaml"), "--out", str(folder / "run"), "--no-report"]) == 0
    return folder / "run"


@pytest.mark.parametrize("spoil", [_deleted, _emptied, _flipped, _cut_short])
@pytest.mark.parametrize("name", [
    "transcript/messages.jsonl", "transcript/round-00001-received.safetensors", "model.safetensors",
    "truth/round-00001.safetensors", "metrics.jsonl", "claims.json", "attacks/001-labels.safetensors",
])  # fmt: skip
def test_damage_is_refused_or_shown_on_the_page(
    name: str,
    spoil: Callable[[Path], None],
    finished: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copytree(finished, "run")
    spoil(Path("run", name))
    capsys.readouterr()
    code = main(["report", "run"])
    said = capsys.readouterr()
    if code == 2:
        assert "Traceback" not in said.err
        return
    page = Path("run/report.html").read_text()
    if spoil is _deleted and name == "model.safetensors":
        assert "has not ended" in page  # it can go on
    else:
        if name.startswith("transcript/round"):
            assert f"{name} is damaged" in refused(capsys, "attack", "run", "--attack", "labels")
        assert f"Damaged: {name}" in page
        assert name in caplog.text


def test_a_whole_run_is_not_called_damaged(finished: Path) -> None:
    shutil.copytree(finished, "run")
    for command in (
        ["report", "run"],
        ["attack", "run", "--attack", "labels"],
        ["run", "--resume", "run"],
        ["status", "run"],
    ):
        assert main(command) == 0
        assert "Damaged" not in Path("run/report.html").read_text()


def test_the_model_of_a_run_is_known_by_its_checksum(finished: Path) -> None:
    shutil.copytree(finished, "run")
    run = fedsim.open_run("run")
    assert len(run.model()) == 2
    _flipped(Path("run/model.safetensors"))
    with pytest.raises(RunError, match=r"model\.safetensors is damaged.*SHA-256"):
        run.model()


@pytest.mark.parametrize("command", ["status run", "report run", "run --resume run"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\n", b'{"round": "x"}\n', b'{"round": 1e400}\n', b"[]\n", b'{"round": 5}\n', b"{" * 9999 + b"\n"],
)
def test_metrics_that_no_run_writes(
    command: str, content: bytes, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, "run")
    Path("run/metrics.jsonl").write_bytes(content)
    Path("run/SHA256SUMS").unlink()  # as of an earlier version, which had none
    capsys.readouterr()
    code = main(command.split())
    assert "Traceback" not in capsys.readouterr().err
    if command.startswith("report") and not content:
        assert "This run has not ended: 0 of 1 planned round" in Path("run/report.html").read_text()
    else:
        assert code == 2
