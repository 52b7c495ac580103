# SPDX-License-Identifier: Apache-2.0
"""Random node ids, and the same bits: the result depends on the clients' numbers only."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

import fedsim
from fedsim.deploy.certificates import make_client
from fedsim.errors import DeployError, ScenarioError
from fedsim.federation import ray as ray_engine
from fedsim.federation.guard import always_answering
from fedsim.federation.inline import InlineGrid, error_reply, node_of
from fedsim.federation.run import Run
from fedsim.scenario import EngineSection, Scenario

SMALL: dict[str, Any] = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [16]},
    "cohort": {"population": 5, "size": 3},
    "partition": {"kind": "dirichlet", "alpha": 0.5},
    "rounds": 3,
}
DEFENCES: list[dict[str, Any]] = [
    {},
    {"example_dp": {"noise_multiplier": 1.0}},
    {"client_dp": {"noise_multiplier": 0.5, "adaptive": {}}},
    {"client_dp": {"noise_multiplier": 0.5}, "secure_aggregation": True},
]


def scenario(**changes: Any) -> Scenario:
    return Scenario.model_validate({**SMALL, **changes})


def sha256(run: Run) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in run.model().values())).hexdigest()


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inline")
    return [sha256(fedsim.run(scenario(defence=d), out=folder / str(n))) for n, d in enumerate(DEFENCES)]


@pytest.mark.parametrize("number", range(len(DEFENCES)))
def test_the_bits_are_those_of_the_inline_engine(number: int, inline: list[str], tmp_path: Path, world: Any) -> None:
    run = fedsim.run(scenario(defence=DEFENCES[number]), out=tmp_path / "run")
    assert sha256(run) == inline[number]
    cohorts = [sorted(client for round_, client in world.trained if round_ == n) for n in (1, 2, 3)]
    assert cohorts == run.summary["cohorts"]


def test_a_client_that_fails_is_the_same_loss_on_every_engine(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(message: Message, context: Context, honest: Any) -> list[Message]:
        fails = context.node_config["partition-id"] == 1
        return [error_reply(message, "battery empty") if fails else honest(message, context)]

    world.behaviour = broken
    scattered = fedsim.run(scenario(cohort={"population": 3}), out=tmp_path / "scattered")
    monkeypatch.undo()
    from fedsim.federation import run as running
    from fedsim.federation.client import answer

    def handle(messages: Any, contexts: Any) -> list[Message]:
        who = [context.node_config["partition-id"] for context in contexts]
        honest = answer(messages, contexts)
        return [error_reply(m, "battery empty") if c == 1 else r for m, r, c in zip(messages, honest, who, strict=True)]

    monkeypatch.setattr(running, "answer", handle)
    inline = fedsim.run(scenario(cohort={"population": 3}), out=tmp_path / "inline")
    assert sha256(scattered) == sha256(inline)
    assert list(scattered.transcript.messages()) == list(inline.transcript.messages())
    assert (scattered.metrics.failures[1:] == 1).all()


def test_a_handler_always_answers_and_keeps_its_old_state_when_it_fails() -> None:
    InlineGrid(1, lambda messages, contexts: [], {})
    message = Message(RecordDict(), node_of(0), MessageType.TRAIN)

    def raising(error: BaseException) -> Any:
        def handle(message: Message, context: Context) -> Message:
            context.state["calls"] = ConfigRecord({"n": 1})
            raise error

        return handle

    for error in (ValueError("no"), SystemExit(3), MemoryError(), RecursionError(), GeneratorExit()):
        context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
        reply = always_answering(raising(error))(message, context)
        assert reply.has_error()
        assert "calls" not in context.state
    with pytest.raises(KeyboardInterrupt):
        always_answering(raising(KeyboardInterrupt()))(message, Context(1, 2, {}, RecordDict(), {}))
    nothing = always_answering(lambda message, context: None)  # type: ignore[arg-type, return-value]
    assert "NoneType in place of a reply" in nothing(message, Context(1, 2, {}, RecordDict(), {})).error.reason
    hidden = always_answering(raising(ValueError("row 7 is odd")), secretive=lambda context: True)
    assert "row 7" not in hidden(message, Context(1, 2, {}, RecordDict(), {})).error.reason


def test_a_ray_cluster_that_does_not_answer_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine.importlib.util, "find_spec", lambda name: object())
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    with pytest.raises(ScenarioError, match=f"engine.address is '{address}', where no Ray cluster answers"):
        fedsim.run(scenario(engine={"kind": "ray", "address": address}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ray_is_asked_for_in_one_sentence_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ScenarioError, match=r"pip install 'fedsim\[ray\]'"):
        fedsim.run(scenario(engine="ray"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_file_of_the_fleet_says_which_client_a_key_is(tmp_path: Path) -> None:
    from fedsim.federation.link import fleet_text, pem, read_fleet

    keys = {f"client-{n}": make_client(f"client-{n}").public for n in (1, 2)}
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(keys))
    assert read_fleet(file) == {pem(keys["client-1"]): 0, pem(keys["client-2"]): 1}
    good = file.read_text()
    for bad in (
        good.replace("partition_id = 1", "partition_id = 0"),
        good.replace("partition_id = 1", 'partition_id = "1"'),
        good.replace("ecdsa", "x"),
        good.replace(keys["client-2"].decode().split()[1], keys["client-1"].decode().split()[1]),
        "client-1 = 0",
        "[",
    ):
        file.write_text(bad)
        with pytest.raises(DeployError, match="does not say which client each key is"):
            read_fleet(file)
    file.unlink()
    with pytest.raises(DeployError, match="restore it"):
        read_fleet(file)


def test_the_nodes_of_a_deployment_are_those_of_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.proto.control_pb2 import ListNodesResponse

    from fedsim.deploy import init
    from fedsim.federation import link

    server = init.create(tmp_path / "fed", 2, ["localhost"])
    keys = [link.pem((tmp_path / "fed" / f"client-{n}" / "key.pub").read_bytes()) for n in (1, 2)]
    listed = ListNodesResponse()
    for node, key in ((70, keys[1]), (71, keys[0]), (72, link.pem(make_client("stranger").public))):
        listed.nodes_info.add(node_id=node, public_key=key)

    @contextmanager
    def control(where: link.Link) -> Iterator[Any]:
        assert where.address == "127.0.0.1:8000"
        yield SimpleNamespace(ListNodes=lambda request: listed)

    monkeypatch.setattr(link, "control", control)
    found = link.owners(EngineSection(kind="deploy", root_certificates=str(server.path / "ca.crt")))
    assert found is not None
    assert found() == {70: 1, 71: 0}
    assert link.owners(EngineSection(kind="deploy")) is None
