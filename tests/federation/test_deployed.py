# SPDX-License-Identifier: Apache-2.0
"""What goes to a SuperLink, and what is made of its answers; without one (see tests/faults/test_processes.py)."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.cli.config_utils import validate_config
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

import fedsim
from fedsim.deploy.clientapp import REPLACED, take_no_code, write_launchers
from fedsim.deploy.processes import environment
from fedsim.errors import DeployError, FedsimError, PolicyError, RunError
from fedsim.federation import deployed
from fedsim.federation import link as federation_link
from fedsim.federation import run as running
from fedsim.federation.asked import Journal, Rows
from fedsim.federation.bundle import build_bundle, public_scenario, write_bundle
from fedsim.federation.client import _place, app, workplace
from fedsim.federation.folder import create_folder, note_failure
from fedsim.federation.plan import as_told
from fedsim.federation.run import resume
from fedsim.federation.safeguards import Safeguards
from fedsim.federation.server import serve
from fedsim.federation.workplace import check_own_file
from fedsim.following import status
from fedsim.privacy import Mechanism, account
from fedsim.scenario import EngineSection, Scenario
from fedsim.scenario_file import dump_scenario

NAMES = np.array(["red", "green", "blue"])
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
    np.savez(path, x_train=rng.normal(size=(rows, 5)) + y[:, None], y_train=y, class_names=NAMES)
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
        {"data": {"source": "npz", "path": str(theirs), "limit": 30}, "cohort": {"population": 2}, "rounds": 1}
    )
    text = public_scenario(scenario)
    node = {"partition-id": 1, "num-partitions": 2, "data-path": str(own)}
    place = _place(Context(1, 2, node, RecordDict(), {"scenario": text}))
    assert place.partition.size(1) == len(place.dataset.x_train) == 90  # nothing is held out: see the next test
    with pytest.raises(FedsimError, match="data-path"):
        workplace(text)


def test_one_row_more_in_the_owners_file_is_one_row_more_in_training(tmp_path: Path) -> None:
    """Rows that were held out by a draw from all of them would be others: the claim would be for one row, and wrong."""
    text = public_scenario(
        Scenario.model_validate({"data": {"source": "npz", "path": str(npz(tmp_path / "server.npz", 60, 0))}})
    )
    rng, rows = np.random.default_rng(3), []
    x, y = rng.normal(size=(91, 4)).astype(np.float32), np.arange(91) % 2
    for name, count in (("less", 90), ("more", 91)):
        np.savez(tmp_path / f"{name}.npz", x_train=x[:count], y_train=y[:count], class_names=NAMES)
        node = {"partition-id": 0, "num-partitions": 2, "data-path": str(tmp_path / f"{name}.npz")}
        place = _place(Context(1, 2, node, RecordDict(), {"scenario": text}))
        rows.append({row.numpy().tobytes() for row in place.dataset.x_train})
    assert len(rows[1] - rows[0]) == 1
    assert rows[0] <= rows[1]
    np.savez(tmp_path / "more.npz", x_train=x[:80], y_train=y[:80], x_test=x[80:], y_test=y[80:], class_names=NAMES)
    workplace.cache_clear()
    assert len(_place(Context(1, 2, node, RecordDict(), {"scenario": text})).dataset.x_train) == 80


def test_no_row_decides_how_many_classes_there_are(tmp_path: Path) -> None:
    """Else a client whose only row of the last class is gone would fail in a round, and the server would know it."""
    x, y = np.zeros((30, 4), np.float32), np.arange(30) % 3
    np.savez(tmp_path / "own.npz", x_train=x[y < 2], y_train=y[y < 2], class_names=NAMES)
    check_own_file(tmp_path / "own.npz")
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y)
    with pytest.raises(FedsimError, match="has no class_names"):
        check_own_file(tmp_path / "own.npz")
    x[3] = np.nan
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, class_names=NAMES)
    with pytest.raises(FedsimError, match="NaN"):
        check_own_file(tmp_path / "own.npz")


def test_of_several_numbers_of_examples_the_worst_counts() -> None:
    """Ten examples are one batch of all of them; eleven are two, of which an example joins almost every one.

    Either in all rounds can spend less than both in turn, so that the worst of each counts.
    """
    text = {"data": "digits", "model": "logistic", "rounds": 3, "client": {"batch_size": 10}}
    text |= {"cohort": {"population": 2}, "partition": {"kind": "iid", "examples_per_client": 10}}
    plan = fedsim.plan(Scenario.model_validate({**text, "defence": {"example_dp": {"noise_multiplier": 1.0}}}))
    told = {sizes: as_told(plan, {0: set(sizes)}).claims[0].epsilon for sizes in ((10,), (11,), (10, 11))}
    assert told[10,] == plan.claims[0].epsilon < told[11,] < told[10, 11]


def test_two_sizes_in_turn_never_spend_more_than_is_claimed() -> None:
    """With 11 and with 100 examples in turn more is spent (12.995) than with either in both rounds (12.26, 12.80)."""
    text = {"data": "digits", "model": "logistic", "rounds": 2, "client": {"batch_size": 20}}
    text |= {"cohort": {"population": 2}, "partition": {"kind": "iid", "examples_per_client": 11}}
    plan = fedsim.plan(Scenario.model_validate({**text, "defence": {"example_dp": {"noise_multiplier": 0.6}}}))
    whole, sampled = (Mechanism("gaussian", 0.6, "add/remove", "poisson", rate) for rate in (1.0, 0.2))
    spent = account([(whole, 1), (sampled, 5)], 1e-5).epsilon
    either = [as_told(plan, {0: {size}}).claims[0].epsilon for size in (11, 100)]
    assert max(either) < spent <= as_told(plan, {0: {11, 100}}).claims[0].epsilon


def test_a_client_takes_neither_code_nor_files_from_the_server(tmp_path: Path) -> None:
    """Not even for long enough to look at them: the model is not built, the file is not opened."""
    file = npz(tmp_path / "somebody.npz", 60, 0)
    node = {"partition-id": 0, "num-partitions": 2}
    for part, reason in (
        ({"model": "import:antigravity:fly"}, "model import:antigravity:fly is not among"),
        ({"data": {"source": "npz", "path": str(file)}}, "names data that a server chose"),
    ):
        text = Scenario.model_validate({"data": "digits", **part}).model_dump_json(exclude_unset=True)
        with pytest.raises(PolicyError, match=reason):
            _place(Context(1, 2, node, RecordDict(), {"scenario": text}))
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("own.csv", {"source": "text", "path": "x.txt"}, "ask for csv"),
        ("own.csv", {"source": "csv", "path": "x.csv", "target": "y"}, "public_encoding"),
        ("own.npz", {"source": "csv", "path": "x.csv", "target": "y"}, "ask for npz"),
    ],
)
def test_what_an_example_is_the_owners_file_decides(
    name: str, data: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """And the file is not opened for it: there is none."""
    node = {"partition-id": 0, "num-partitions": 2, "data-path": str(tmp_path / name)}
    text = Scenario.model_validate({"data": data}).model_dump_json(exclude_unset=True)
    with pytest.raises(PolicyError, match=reason):
        _place(Context(1, 2, node, RecordDict(), {"scenario": text}))


def test_a_client_with_safeguards_is_never_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_SIMULATED", "1")
    node: dict[str, Any] = {"partition-id": 0, "num-partitions": 2, "simulated": True}
    assert Safeguards.of(Context(1, 2, node, RecordDict(), {})) is None
    assert Safeguards.of(Context(1, 2, {**node, "ledger": "l"}, RecordDict(), {})) is not None
    assert "FEDSIM_SIMULATED" not in environment(Path("home"))


def test_whatever_program_flower_starts_on_a_client_is_fedsims(tmp_path: Path) -> None:
    """For another kind of app it starts another one, which would install and import the server's bundle."""
    path = environment(tmp_path, write_launchers(tmp_path / "bin"))["PATH"]
    assert "flwr-agentapp" in TASK_TYPE_TO_COMMAND.values()
    for name in TASK_TYPE_TO_COMMAND.values():
        assert shutil.which(name, path=path) == str(tmp_path / "bin" / name)
        assert " -I -m fedsim.deploy.clientapp " in (tmp_path / "bin" / name).read_text()


def test_a_clients_process_reports_itself_before_it_imports_what_takes_long() -> None:
    """Flower gives it about a minute, and starts another one beside it if it takes longer: they would pile up."""
    code = (
        "import sys; from flwr.supernode.cli.flwr_clientapp import flwr_clientapp;"
        "from flwr.supernode.runtime import run_clientapp; from fedsim.deploy.clientapp import take_no_code;"
        "take_no_code(run_clientapp); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_bundle_of_a_server_is_never_opened(tmp_path: Path) -> None:
    """Flower would install it, and import what it names: here both are replaced, in Flower's own module."""
    from flwr.supernode.runtime import run_clientapp

    runtime = ModuleType("runtime")
    for name in REPLACED:
        assert callable(getattr(run_clientapp, name))
        setattr(runtime, name, getattr(run_clientapp, name))
    take_no_code(runtime)
    runtime.install_from_fab(b"not even an archive", skip_prompt=True)
    assert runtime.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)("evil", "1", "0") is app
    with pytest.raises(DeployError, match="installs nothing"):
        runtime.install_app_dependencies(tmp_path)
    with pytest.raises(DeployError, match="is gone"):
        take_no_code(ModuleType("another version"))


NOISY = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [8]},
    "cohort": {"population": 3},
    "client": {"batch_size": 32},
    "defence": {"example_dp": {"clipping_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}},
    "rounds": 2,
}


def test_a_client_that_nobody_calls_simulated_never_draws_noise_from_the_scenario(tmp_path: Path, world: Any) -> None:
    scenario = Scenario.model_validate(NOISY)
    seeded = [fedsim.run(scenario, out=tmp_path / f"seeded-{turn}").model() for turn in range(2)]
    world.node_config = {client: {} for client in range(3)}
    real = [fedsim.run(scenario, out=tmp_path / f"real-{turn}").model() for turn in range(2)]
    assert all(torch.equal(seeded[0][name], seeded[1][name]) for name in seeded[0])
    assert not any(torch.equal(real[0][name], real[1][name]) for name in real[0])


def test_a_claim_follows_the_examples_that_clients_say_they_hold(tmp_path: Path, world: Any) -> None:
    """A client with a small file of its own has a larger sampling rate, and spends more than was planned."""
    theirs, own = npz(tmp_path / "server.npz", 600, 0), npz(tmp_path / "own.npz", 75, 1)
    scenario = Scenario.model_validate({**NOISY, "data": {"source": "npz", "path": str(theirs)}})
    planned = fedsim.run(scenario, out=tmp_path / "planned").claim
    world.node_config = {client: {"data-path": str(own if client == 1 else theirs)} for client in range(3)}
    run = fedsim.run(scenario, out=tmp_path / "real")
    assert planned is not None
    assert run.claim is not None
    assert run.claim.sample_rate == pytest.approx(32 / 75)
    assert run.claim.epsilon > 1.3 * planned.epsilon
    assert run.metrics["epsilon"].iloc[-1] == pytest.approx(run.claim.epsilon)


def test_a_round_that_begins_again_is_one_more_release(tmp_path: Path, world: Any) -> None:
    """Real clients draw new noise, so the server has seen two updates where the plan has one."""
    scenario = Scenario.model_validate({**NOISY, "engine": {"kind": "deploy"}})
    planned, folder = fedsim.plan(scenario), tmp_path / "run"
    create_folder(folder, {"scenario.yaml": dump_scenario(scenario), "claims.json": "[]"})
    world.node_config = {client: {} for client in range(3)}
    grid = running.InlineGrid(3, lambda *_: [], {"scenario": public_scenario(scenario), "deployed": True})
    rows = {client: Rows(size, size) for client in range(3) for size in [planned.partition.size(client)]}
    for round_ in (1, 2):  # and then it was killed, before the checkpoint of round 1
        Journal(folder).ask(round_, dict(rows))
    serve(grid, planned, folder)
    (claim,) = json.loads((folder / "claims.json").read_text())
    steps = planned.claims[0].compositions // 2
    assert claim["compositions"] == 4 * steps
    mechanism = Mechanism("gaussian", 1.0, "add/remove", "poisson", claim["sample_rate"])
    assert claim["epsilon"] == pytest.approx(account([(mechanism, 4 * steps)], 1e-5).epsilon, rel=1e-6)


def test_a_superlink_that_does_not_answer_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    scenario = Scenario.model_validate({**SMALL, "engine": {"kind": "deploy", "address": address}})
    with pytest.raises(DeployError, match=f"the SuperLink at {address} does not answer"):
        fedsim.run(scenario, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


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

    def ListNodes(self, request: Any) -> None:  # noqa: N802
        """It answers."""

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

        for module in (deployed, federation_link):
            monkeypatch.setattr(module, "control", control)
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
    assert set(config) == {"scenario", "folder", "deployed", "largest-reply"}
    largest = deployed.largest_reply(fedsim.plan(Scenario.model_validate(SMALL)).layout.size)
    assert config["largest-reply"].sint64 == largest
    assert not (folder / "truth").exists()


def test_the_operator_is_told_what_the_server_counted_and_not_what_was_planned() -> None:
    plan = fedsim.plan(Scenario.model_validate(NOISY))
    planned = plan.claims_after(1)[0]
    spent = {
        key: value for key, value in planned.to_dict().items() if key in ("delta", "unit", "adjacency", "observer")
    }
    line = {"round": 1, "clients": 3, "failures": 0, "privacy": [{**spent, "epsilon": 2 * planned.epsilon}]}
    empty = dict.fromkeys(("train_loss", "loss", "accuracy", "update_norm_mean"))
    (claim,) = deployed._report(plan, {**empty, **line}).claims
    assert claim.epsilon == 2 * planned.epsilon


def test_the_engine_has_its_fields() -> None:
    assert deployed.Link.of(EngineSection(kind="deploy")) == deployed.Link("127.0.0.1:8000", None)
    assert deployed.State("finished", "stopped", "").failed
    assert not deployed.State("finished", "completed", "").failed
