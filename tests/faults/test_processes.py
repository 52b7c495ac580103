# SPDX-License-Identifier: Apache-2.0
"""Real processes: Ray's workers, and a SuperLink with three SuperNodes on this machine. Processes are killed.

The scenario has what the engines could disagree about: a torch model, sampling below 1, ragged clients, noise of DP-SGD
from the scenario's seed, and a client that fails because it has no data. Minutes, not seconds: `make faults`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.federation.loopback import Loopback
from fedsim.federation.run import Run, open_run
from fedsim.scenario import Scenario
from fedsim.scenario_file import dump_scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SETTINGS: dict[str, Any] = {
    "name": "parity",
    "data": "breast_cancer",
    "model": {"name": "mlp", "hidden": [16]},
    "partition": {"kind": "dirichlet", "alpha": 0.02, "min_examples": 0},
    "cohort": {"population": 3, "size": 2, "deadline": 240},
    "defence": {"example_dp": {"noise_multiplier": 1.0}},
    "rounds": 3,
    "seed": 1,
}
FEDSIM = [sys.executable, "-m", "fedsim"]


def sha256(run: Run) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in run.model().values())).hexdigest()


def wait_for_round(folder: Path, round_: int, process: subprocess.Popen[str]) -> None:
    file, until = folder / "checkpoint.safetensors", time.monotonic() + 400
    while time.monotonic() < until and process.poll() is None:
        if file.is_file() and f'\\"round\\": {round_}'.encode() in file.read_bytes():
            return
        time.sleep(0.1)
    raise AssertionError(f"round {round_} did not come: {process.communicate(timeout=5)}")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = fedsim.run(Scenario.model_validate(SETTINGS), out=tmp_path_factory.mktemp("inline") / "run")
    assert run.metrics.failures.tolist() == [0, 0, 1, 0]
    return sha256(run)


@pytest.fixture
def quiet() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
def test_ray_gives_the_same_bits(expected: str, tmp_path: Path, quiet: dict[str, str], note: Any) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(dump_scenario(Scenario.model_validate(SETTINGS)))
    command = [*FEDSIM, "run", str(file), "--engine", "ray", "--no-report", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = sha256(open_run(tmp_path / "run"))
    note("(no fault: Ray)", f"sha256 {expected[:12]}", f"sha256 {found[:12]}")
    assert found == expected


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Loopback]:
    with Loopback(tmp_path / "cluster", 3) as running:
        yield running


def start(cluster: Loopback, tmp_path: Path, environment: dict[str, str], **changes: Any) -> subprocess.Popen[str]:
    engine = cluster.engine().model_dump(exclude_unset=True)
    file = tmp_path / "scenario.yaml"
    file.write_text(dump_scenario(Scenario.model_validate({**SETTINGS, **changes, "engine": engine})))
    command = [*FEDSIM, "run", str(file), "--no-report", "--out", str(tmp_path / "run")]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_whole_server_is_killed_and_the_run_resumes_to_the_same_bits(
    expected: str, cluster: Loopback, tmp_path: Path, quiet: dict[str, str], note: Any
) -> None:
    """SuperLink, SuperExec and ServerApp are killed after the first round; one command goes on."""
    process = start(cluster, tmp_path, quiet)
    wait_for_round(tmp_path / "run", 1, process)
    cluster.kill("link")
    cluster.start_link()
    _, complaint = process.communicate(timeout=300)
    assert process.returncode == 2, complaint
    status = [*FEDSIM, "status", "--json", str(tmp_path / "run")]
    found = json.loads(subprocess.run(status, env=quiet, capture_output=True, text=True, check=False).stdout)
    assert found["round"] in (1, 2)
    resume = [*FEDSIM, "run", "--resume", str(tmp_path / "run"), "--no-report"]
    done = subprocess.run(resume, env=quiet, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr + cluster.log("link")[-3000:]
    result = sha256(open_run(tmp_path / "run"))
    note("the server's machine dies after round 1", f"resumes to sha256 {expected[:12]}", f"sha256 {result[:12]}")
    assert result == expected
    log = subprocess.run(
        [*FEDSIM, "logs", str(tmp_path / "run")], env=quiet, capture_output=True, text=True, check=False
    )
    assert log.returncode == 0


def test_a_node_is_killed_in_a_round_and_comes_back(
    cluster: Loopback, tmp_path: Path, quiet: dict[str, str], note: Any
) -> None:
    """The round ends with the others; started again, it takes part again."""
    changes: dict[str, Any] = {"partition": "iid", "cohort": {"population": 3, "deadline": 150}, "rounds": 6}
    process = start(cluster, tmp_path, quiet, **changes)
    wait_for_round(tmp_path / "run", 1, process)
    cluster.kill("node-1")
    wait_for_round(tmp_path / "run", 2, process)
    cluster.start_node(1)
    _, complaint = process.communicate(timeout=700)
    assert process.returncode == 0, complaint
    failures = open_run(tmp_path / "run").metrics.failures.tolist()
    errors = [line for line in open_run(tmp_path / "run").transcript.messages() if line.kind == "error"]
    note(
        "SIGKILL of a SuperNode in a round", "the round goes on; later it takes part again", f"failures {failures[1:]}"
    )
    assert failures[2] == 1
    assert failures[6] == 0
    assert {line.client for line in errors} == {1}
