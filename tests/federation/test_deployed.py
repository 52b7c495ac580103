# SPDX-License-Identifier: Apache-2.0
"""What goes to a SuperLink, and what is made of its answers; without one (see tests/faults/test_processes.py)."""

from __future__ import annotations

import io
import json
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.cli.config_utils import validate_config

import fedsim
from fedsim.errors import DeployError, FedsimError, RunError
from fedsim.federation import deployed
from fedsim.federation.bundle import build_bundle, public_scenario, write_bundle
from fedsim.federation.client import _place, workplace
from fedsim.federation.folder import note_failure
from fedsim.federation.run import resume
from fedsim.following import status
from fedsim.scenario import EngineSection, Scenario

SMALL: dict[str, Any] = {"data": "digits", "model": {"name": "mlp", "hidden": [8]}, "rounds": 2, "engine": "deploy"}


def test_the_bundle_is_a_pyproject_without_code(tmp_path: Path) -> None:
    names = zipfile.ZipFile(io.BytesIO(build_bundle())).namelist()
    assert {name for name in names if not name.startswith(".info")} == {"pyproject.toml"}
    config = tomllib.loads((write_bundle(tmp_path / "bundle") / "pyproject.toml").read_text())
    valid, errors, _ = validate_config(config)
    assert valid, errors
    assert config["project"]["dependencies"] == []


def npz(path: Path, rows: int, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % 3
    np.savez(path, x_train=rng.normal(size=(rows, 5)) + y[:, None], y_train=y)
    return path


def test_what_is_private_does_not_travel(tmp_path: Path) -> None:
    file = npz(tmp_path / "secret-place.npz", 60, 0)
    scenario = Scenario.model_validate(
        {
            "data": {"source": "npz", "path": str(file)},
            "engine": {"kind": "deploy", "address": "10.1.2.3:8000"},
            "adversary": {"keep_rounds": 1},
            "attacks": ["exact"],
            "question": "is the boss honest?",
        }
    )
    text = public_scenario(scenario)
    for secret in ("secret-place", "10.1.2.3", "keep_rounds", "exact", "boss"):
        assert secret not in text
    again = Scenario.model_validate_json(text)
    assert (again.model, again.client, again.seed) == (scenario.model, scenario.client, scenario.seed)


def test_a_client_trains_on_its_own_file(tmp_path: Path) -> None:
    theirs, own = npz(tmp_path / "server.npz", 60, 0), npz(tmp_path / "own.npz", 90, 1)
    scenario = Scenario.model_validate(
        {"data": {"source": "npz", "path": str(theirs)}, "cohort": {"population": 2}, "rounds": 1}
    )
    text = public_scenario(scenario)
    node = {"partition-id": 1, "num-partitions": 2, "data-path": str(own)}
    place = _place(Context(1, 2, node, RecordDict(), {"scenario": text}))
    assert place.partition.size(1) == len(place.dataset.x_train) == 72  # the rest is held out
    with pytest.raises(FedsimError, match="data-path"):
        workplace(text)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"address": "fl.example.org:8000"}, "root_certificates"),
        ({"address": "127.0.0.1:8000", "root_certificates": "/nowhere/ca.crt"}, "is not a file"),
    ],
)
def test_a_link_that_is_not_safe_or_not_there_is_refused(engine: dict[str, Any], reason: str, tmp_path: Path) -> None:
    scenario = Scenario.model_validate({**SMALL, "engine": {"kind": "deploy", **engine}})
    with pytest.raises(DeployError, match=reason):
        fedsim.run(scenario, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class FakeLink:
    """A control API whose runs go through the given states."""

    def __init__(self, *states: tuple[str, str, str]) -> None:
        self.states, self.started, self.stopped = list(states), [], []  # type: ignore[var-annotated]

    def StartRun(self, request: Any) -> Any:  # noqa: N802 - Flower's name
        self.started.append(request)
        return SimpleNamespace(run_id=40 + len(self.started), HasField=lambda name: True, note="")

    def StopRun(self, request: Any) -> None:  # noqa: N802
        self.stopped.append(request.run_id)

    def ListRuns(self, request: Any) -> Any:  # noqa: N802
        status, ending, details = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        state = SimpleNamespace(status=status, sub_status=ending, details=details)
        return SimpleNamespace(run_dict={request.run_id: SimpleNamespace(status=state)})


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(fake: FakeLink) -> FakeLink:
        @contextmanager
        def control(link: Any) -> Iterator[FakeLink]:
            yield fake

        monkeypatch.setattr(deployed, "control", control)
        monkeypatch.setattr(deployed, "POLL_SECONDS", 0.0)
        return fake

    return use


def test_a_failed_run_is_an_error_with_its_reason_and_can_go_on(tmp_path: Path, link: Any) -> None:
    fake = link(FakeLink(("running", "", ""), ("finished", "failed", "ServerApp raised")))
    folder = tmp_path / "run"
    with pytest.raises(RunError, match=r"ServerApp raised \(deployed run 41; see `fedsim logs"):
        fedsim.run(Scenario.model_validate(SMALL), out=folder)
    note_failure(folder, RunError("round 1: all 3 clients failed"))
    found = status(folder)
    assert (found["state"], found["reason"], found["run"]) == ("failed", "round 1: all 3 clients failed", 41)
    fake.states = [("running", "", ""), ("finished", "completed", "")]
    with pytest.raises(RunError, match="finished:completed"):  # Flower says so also of a run without a model
        resume(folder)
    assert fake.stopped == [41]
    assert json.loads((folder / "deployed.json").read_text())["runs"] == [41, 42]
    config = fake.started[0].override_config
    assert set(config) == {"scenario", "folder", "deployed"}
    assert not (folder / "truth").exists()


def test_the_engine_has_its_fields() -> None:
    assert deployed.Link.of(EngineSection(kind="deploy")) == deployed.Link("127.0.0.1:8000", None)
    assert deployed.State("finished", "stopped", "").failed
    assert not deployed.State("finished", "completed", "").failed
