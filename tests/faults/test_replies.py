# SPDX-License-Identifier: Apache-2.0
"""One client of three answers badly, in every way that we could think of. The round goes on with the other two.

The model must be, to the last bit, the one that results when that client only says that it cannot; and the transcript
must say why its reply was refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

import fedsim
from fedsim.federation.guard import always_answering
from fedsim.federation.inline import error_reply
from fedsim.scenario import Scenario

BAD = 1
SCENARIO = Scenario.model_validate(
    {
        "data": "digits",
        "model": {"name": "mlp", "hidden": [8]},
        "cohort": {"population": 3, "deadline": 0.2},
        "partition": {"kind": "quantity", "exponent": 0.7},
        "rounds": 2,
    }
)
Honest = Callable[[Message, Context], Message]
Fault = Callable[[Message, Context, Honest], list[Message] | None]


def arrays(change: Callable[[dict[str, Array]], dict[str, Array]]) -> Fault:
    """A reply with other arrays."""

    def fault(message: Message, context: Context, honest: Honest) -> list[Message]:
        content = honest(message, context).content
        plain = {name: Array(array.numpy()) for name, array in content.array_records["arrays"].items()}
        record = ArrayRecord(change(plain))
        return [Message(RecordDict({"arrays": record, "metrics": content["metrics"]}), reply_to=message)]

    return fault


def endless_reason(message: Message, context: Context, honest: Honest) -> list[Message]:
    """An error whose reason would fill the transcript, and clear the operator's screen."""
    return [Message(Error(0, "\x1b[2J\n" + "x" * 10**6), reply_to=message)]


def numbers(**change: float) -> Fault:
    """A reply with other numbers."""

    def fault(message: Message, context: Context, honest: Honest) -> list[Message]:
        content = honest(message, context).content
        metrics = MetricRecord(
            {**content.metric_records["metrics"], **{k.replace("_", "-"): v for k, v in change.items()}}
        )
        return [Message(RecordDict({"arrays": content["arrays"], "metrics": metrics}), reply_to=message)]

    return fault


def first(change: Callable[[np.ndarray[Any, Any]], Array]) -> Fault:
    """A reply whose first array is another."""
    return arrays(lambda plain: {n: change(a.numpy()) if k == 0 else a for k, (n, a) in enumerate(plain.items())})


def data(change: Callable[[bytes], bytes]) -> Fault:
    """A reply whose first array has other bytes."""

    def other(array: np.ndarray[Any, Any]) -> Array:
        honest = Array(array)
        return Array(dtype=honest.dtype, shape=honest.shape, stype=honest.stype, data=change(honest.data))

    return first(other)


def raises(error: BaseException) -> Fault:
    def handler(message: Message, context: Context) -> Message:
        raise error

    return lambda message, context, honest: [always_answering(handler)(message, context)]


def records(change: Callable[[RecordDict], RecordDict]) -> Fault:
    return lambda message, context, honest: [Message(change(honest(message, context).content), reply_to=message)]


def from_another_node(message: Message, context: Context, honest: Honest) -> list[Message]:
    reply = honest(message, context)
    reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id + 1
    return [reply]


def announced(shape: str) -> Callable[[bytes], bytes]:
    """Bytes whose header promises more than they hold."""

    def change(_: bytes) -> bytes:
        file = BytesIO()
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
        return file.getvalue()

    return change


def filled(value: float) -> Callable[[np.ndarray[Any, Any]], Array]:
    return lambda array: Array(np.full_like(array, value))


FAULTS: list[tuple[str, Fault, str]] = [
    ("an exception", raises(RuntimeError("CUDA is gone")), "CUDA is gone"),
    ("sys.exit in the client's code", raises(SystemExit(1)), "SystemExit"),
    ("the memory is full", raises(MemoryError("full")), "MemoryError"),
    ("the client's code returns nothing", lambda m, c, h: [always_answering(lambda *_: None)(m, c)], "in place of"),  # type: ignore[arg-type, return-value]
    ("no reply at all", lambda message, context, honest: None, "no reply within 0.2 s"),
    ("two replies", lambda message, context, honest: [honest(message, context)] * 2, "replied 2 times"),
    ("a reply from another node", from_another_node, "came from another node"),
    ("a wrong shape", first(lambda a: Array(a[:-1])), "expected float32"),
    ("a shape that would broadcast", first(lambda a: Array(a[:1])), "expected float32"),
    ("a wrong dtype", first(lambda a: Array(a.astype(np.float64))), "is float64"),
    ("an unknown key", arrays(lambda plain: {f"x{name}": array for name, array in plain.items()}), "do not fit"),
    ("no arrays", arrays(lambda plain: {}), "do not fit"),
    ("a missing record", records(lambda c: RecordDict({"arrays": c["arrays"]})), "'metrics' is missing"),
    ("a wrong record", records(lambda c: RecordDict({"arrays": c["metrics"], "metrics": c["arrays"]})), "not arrays"),
    ("an additional record", records(lambda c: RecordDict({**c, "more": ConfigRecord()})), "nobody asked for"),
    ("an additional number", numbers(age=42), "nobody asked for"),
    ("NaN", first(filled(np.nan)), "not finite"),
    ("infinity", first(filled(np.inf)), "not finite"),
    ("an absurd norm", first(filled(1e12)), "absurd"),
    ("a negative count", numbers(num_examples=-5, weight=-5.0), "not a positive number"),
    ("a huge count", numbers(num_examples=10**9, weight=1e9), "most_examples"),
    ("a weight beyond its examples", numbers(weight=1e5), "its weight is 100000"),
    ("a weight that is NaN", numbers(weight=float("nan")), "not a positive number"),
    ("one that says it is a sum over clients", numbers(clients=3), "a sum over clients"),
    ("corrupt bytes", data(lambda content: os.urandom(len(content))), "corrupt"),
    ("half of the bytes", data(lambda content: content[: len(content) // 2]), "corrupt"),
    ("a header that announces 4 TB", data(announced("(1000000000000,)")), "expected float32"),
    ("a long reason with codes for a terminal", endless_reason, "?[2J"),
    ("bytes of a pickle", data(lambda content: b"\x80\x04K\x01."), "corrupt"),
]  # fmt: skip


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The model without what client 1 has computed, inline."""
    from fedsim.federation import run as running
    from fedsim.federation.client import answer

    def handle(messages: list[Message], contexts: list[Context]) -> list[Message]:
        who = [context.node_config["partition-id"] for context in contexts]
        replies = answer(messages, contexts)
        return [error_reply(m, "no") if c == BAD else r for m, r, c in zip(messages, replies, who, strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "answer", handle)
        return fedsim.run(SCENARIO, out=tmp_path_factory.mktemp("expected") / "run").model()


@pytest.mark.parametrize(("name", "fault", "reason"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_a_bad_reply(
    name: str, fault: Fault, reason: str, expected: Any, tmp_path: Path, world: Any, note: Any
) -> None:
    def behaviour(message: Message, context: Context, honest: Honest) -> list[Message] | None:
        bad = context.node_config["partition-id"] == BAD
        return fault(message, context, honest) if bad else [honest(message, context)]

    world.behaviour = behaviour
    run = fedsim.run(SCENARIO, out=tmp_path / "run")
    errors = [line for line in run.transcript.messages() if line.kind == "error"]
    same = all(torch.equal(tensor, expected[key]) for key, tensor in run.model().items())
    model = "the model is that of the others" if same else "THE MODEL IS ANOTHER"
    note(
        name, "refused with a reason, the round goes on", f"{(errors or [None])[0] and errors[0].reason}; {model}"[:110]
    )
    assert same
    assert [(line.round, line.client) for line in errors] == [(1, BAD), (2, BAD)]
    assert all(reason in str(line.reason) for line in errors)
    assert all(str(line.reason).isprintable() and len(str(line.reason)) < 1100 for line in errors)
    assert (run.metrics.failures[1:] == 1).all()
