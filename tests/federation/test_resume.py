# SPDX-License-Identifier: Apache-2.0
"""A run that is killed at any moment goes on, and ends with the same bytes as one that was never killed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedsim
from fedsim.errors import RunError
from fedsim.federation import folder
from fedsim.federation.run import resume

SCENARIO = """
data: digits
model: {name: mlp, hidden: [16]}
strategy: {name: fedavg, server_optimizer: adam, server_learning_rate: 0.02}
cohort: {population: 8, size: 4}
defence: {client_dp: {noise_multiplier: 0.3, adaptive: {}}}
rounds: 40
"""
PROGRAM = """
import sys
from pathlib import Path
from fedsim.federation import folder
from fedsim.federation.run import resume, run
folder.CHECKPOINT_SECONDS = 0.0
scenario, out = Path(sys.argv[1]), Path(sys.argv[2])
resume(out) if out.exists() else run(scenario, out=out)
"""


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    file, out = tmp_path / "scenario.yaml", tmp_path / "killed"
    file.write_text(SCENARIO)
    expected = contents(fedsim.run(file, out=tmp_path / "undisturbed").path)
    rng, kills, written, ended = random.Random(0), 0, 0, None
    while ended != 0:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(file), str(out)], env=os.environ)
        while not (out / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.01)
        # From the first line on: die after a few more rounds, at a moment that nobody chose.
        wanted = written + rng.randrange(3000, 5000)
        while process.poll() is None and (out / "metrics.jsonl").stat().st_size < wanted:
            time.sleep(rng.random() / 200)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        ended = process.wait()
        assert ended in (0, -signal.SIGKILL)
        written = (out / "metrics.jsonl").stat().st_size
    assert kills >= 2
    assert contents(out) == expected


def test_what_was_written_after_the_checkpoint_is_cut_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO.replace("rounds: 40", "rounds: 6"))
    expected = contents(fedsim.run(file, out=tmp_path / "undisturbed").path)
    monkeypatch.setattr(folder, "CHECKPOINT_SECONDS", 0.0)

    def stop(report: object) -> None:
        if report.round == 4:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedsim.run(file, out=tmp_path / "run", progress=stop)
    with (tmp_path / "run" / "transcript" / "messages.jsonl").open("a") as messages:
        messages.write('{"half a line')
    for name in ("round-00005-sent.tmp", ".tmpA1b2C3"):  # ours, and one of safetensors' own
        (tmp_path / "run" / "transcript" / name).write_bytes(b"half a file")
    assert resume(tmp_path / "run").complete
    assert contents(tmp_path / "run") == expected


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    run = fedsim.run("quickstart", overrides=["rounds=1", "data=digits"], out=tmp_path / "run")
    before = contents(run.path)
    (run.path / "checkpoint.safetensors").write_bytes(b"killed just before this was removed")
    assert resume(run.path).complete
    assert contents(run.path) == before
    with pytest.raises(RunError, match="already there"):
        fedsim.run("quickstart", overrides=["rounds=1", "data=digits"], out=tmp_path / "run")


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO)
    fedsim.run(file, out=tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(RunError, match="damaged"):
        resume(tmp_path / "run")


def test_two_processes_cannot_write_one_folder(tmp_path: Path) -> None:
    run = fedsim.run("quickstart", overrides=["rounds=1", "data=digits"], out=tmp_path / "run")
    (run.path / "model.safetensors").unlink()
    plan = fedsim.plan(run.scenario)
    writer = folder.RunWriter(run.path, plan.layout, run.scenario.adversary)
    with pytest.raises(RunError, match="another process"):
        resume(run.path)
    writer.close()
