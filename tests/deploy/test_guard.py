# SPDX-License-Identifier: Apache-2.0
"""The guard before the SuperLink, and the bounds of a reply: what is refused, and that it is refused unread."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import HTTPException
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree, PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message as Event
from starlette.types import Receive, Scope, Send

from fedsim.deploy.admission import ASKS
from fedsim.deploy.guard import ACCEPTED, UNKNOWN, Budget, Guard, RefusedError
from fedsim.deploy.replies import LARGEST_REPLY, Replies
from fedsim.deploy.server import tidy
from fedsim.deploy.superlink import signer_of

KEY, OTHER = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
CODES: list[int | None] = []
"""Of the refusals, in their order."""
BYTES = public_key_to_bytes(KEY.public_key())


def signed(key: ec.EllipticCurvePrivateKey = KEY, *, seconds: float = 0.0, **changes: str) -> dict[str, str]:
    time = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
    headers = {
        "flwr-public-key": b64encode(public_key_to_bytes(key.public_key())).decode(),
        "flwr-timestamp": time,
        "flwr-signature": b64encode(sign_message(key, time.encode())).decode(),
        "content-length": "10",
    }
    return {name: value for name, value in {**headers, **changes}.items() if value}


def answer(
    headers: Mapping[str, str], path: str = "/v1/fleet/push-object", budget: Budget | None = None
) -> tuple[int, bool]:
    """The status of a request's answer, and whether its body was read."""
    read, statuses = [], []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Event:
        read.append(True)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(event: Event) -> None:
        if event["type"] == "http.response.start":
            statuses.append(event["status"])
        elif event["body"]:
            CODES.append(json.loads(event["body"]).get("code"))

    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    guard = Guard(app, signer_of, lambda key: key == BYTES, budget or Budget())
    asyncio.run(guard({"type": "http", "path": path, "headers": pairs}, receive, send))
    return statuses[0], bool(read)


def test_a_registered_key_passes() -> None:
    assert answer(signed()) == (200, True)
    assert answer({}, "/v1/control/list-runs") == (200, True)  # the operator's own, on loopback


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param(dict, 411, id="nothing"),
        pytest.param(lambda: {"content-length": "10"}, 401, id="no key"),
        pytest.param(lambda: signed(OTHER), 401, id="a key that is not registered"),
        pytest.param(lambda: signed(seconds=306), 401, id="too old"),
        pytest.param(lambda: signed(seconds=-60), 401, id="from the future"),
        pytest.param(lambda: signed(**{"flwr-signature": b64encode(b"no").decode()}), 401, id="no signature"),
        pytest.param(lambda: signed(**{"flwr-signature": "\xff"}), 401, id="a signature that is no base64"),
        pytest.param(
            lambda: signed(**{"flwr-public-key": b64encode(b"no key").decode()}), 401, id="a key that is none"
        ),
        pytest.param(lambda: signed(**{"flwr-public-key": ""}), 401, id="an empty key"),
        pytest.param(lambda: signed(**{"flwr-timestamp": "2026-01-01"}), 401, id="a date without a time"),
        pytest.param(lambda: signed(**{"flwr-timestamp": "yesterday"}), 401, id="no date"),
        pytest.param(lambda: signed(**{"content-length": ""}), 411, id="an empty length"),
        pytest.param(lambda: signed(**{"content-length": "-1"}), 411, id="a negative length"),
        pytest.param(lambda: signed(**{"content-length": "²"}), 411, id="a length that is no number"),
        pytest.param(lambda: signed(**{"transfer-encoding": "chunked"}), 411, id="chunked"),
        pytest.param(lambda: signed(**{"content-length": str(2**40)}), 503, id="too long"),
    ],
)
def test_whoever_is_nobody_is_refused_unread(headers: Callable[[], dict[str, str]], status: int) -> None:
    """Signed when the test runs: a signature is of its time."""
    assert answer(headers()) == (status, False)


@given(st.dictionaries(st.sampled_from(sorted(signed())), st.text(st.characters(max_codepoint=255), max_size=80)))
def test_no_headers_break_the_guard(changes: dict[str, str]) -> None:
    status, read = answer({**signed(OTHER), **changes})
    assert status in (401, 411)
    assert not read


def test_an_unregistered_key_is_told_so_by_flower_itself() -> None:
    assert answer(signed(OTHER), "/v1/fleet/activate-node") == (200, True)


def test_who_only_asks_is_answered_with_flowers_codes() -> None:
    for key, code in ((KEY, ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL), (OTHER, 2004)):
        assert answer(signed(key, **{ASKS: "1"}), "/v1/fleet/activate-node") == (400, False)
        assert CODES[-1] == code
    assert (ACCEPTED, UNKNOWN) == (
        ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL,
        ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED,
    )


def test_bodies_that_are_read_at_once_are_bounded_for_each_key_and_in_all() -> None:
    budget = Budget(from_one=10, from_all=15)
    with budget.reading(b"a", 6):
        with pytest.raises(RefusedError), budget.reading(b"a", 5):
            pass
        with budget.reading(b"b", 9), pytest.raises(RefusedError), budget.reading(b"c", 1):
            pass
        with budget.reading(b"c", 9):  # the one before has given back what it took
            pass
    with budget.reading(b"a", 10):
        pass
    assert not budget._reading


def test_the_budget_is_given_back_when_a_request_fails() -> None:
    budget = Budget()
    for _ in range(2):
        assert answer(signed(**{"content-length": str(budget.from_one)}), budget=budget) == (200, True)


# --- replies --------------------------------------------------------------------------------------------------------


class State:
    """What `Replies` asks of Flower's state."""

    def __init__(self, largest: int | None) -> None:
        self.largest, self.deleted = largest, []  # type: ignore[var-annotated]
        self.object_store = SimpleNamespace(delete=self.deleted.append)

    def get_run_info(self, run_ids: list[int]) -> list[Any]:
        config = {} if self.largest is None else {LARGEST_REPLY: self.largest}
        return [SimpleNamespace(override_config=config) for _ in run_ids]


def replies() -> tuple[Replies, list[int]]:
    taken: list[int] = []

    def push_messages(request: PushMessagesRequest, state: State) -> PushMessagesResponse:
        return PushMessagesResponse(session_id=f"session {request.node.node_id}")

    def push_object(request: PushObjectRequest, state: State) -> PushObjectResponse:
        taken.append(len(request.object_content))
        return PushObjectResponse(stored=True)

    handlers = ModuleType("handlers")
    vars(handlers).update(push_messages=push_messages, push_object=push_object)
    return Replies(handlers, lambda *_: "client-3"), taken


def pushed(node: int, source: int, reply_to: str, messages: int = 1) -> PushMessagesRequest:
    metadata = Metadata(run_id=1, message_id="m", src_node_id=source, dst_node_id=1, reply_to_message_id=reply_to)
    trees = [ObjectTree(object_id="m")] * messages
    return PushMessagesRequest(
        node=Node(node_id=node), messages_list=[Message(metadata=metadata)] * messages, message_object_trees=trees
    )


def piece(node: int, size: int, session: str) -> PushObjectRequest:
    return PushObjectRequest(
        node=Node(node_id=node), run_id=1, session_id=session, object_id="o", object_content=bytes(size)
    )


def test_a_client_can_only_reply_and_only_as_itself(caplog: pytest.LogCaptureFixture) -> None:
    bounded, _ = replies()
    state: Any = State(100)
    for request in (pushed(5, 6, "asked"), pushed(5, 5, ""), pushed(5, 5, "asked", 2), pushed(5, 5, "asked", 0)):
        with pytest.raises(HTTPException):
            bounded.push_messages(request, state)
    assert "client-3 pushed a message that replies to nothing" in caplog.text
    assert bounded.push_messages(pushed(5, 5, "asked"), state).session_id == "session 5"


def test_a_reply_has_no_more_bytes_than_the_run_needs() -> None:
    bounded, taken = replies()
    state: Any = State(100)
    bounded.push_messages(pushed(5, 5, "asked"), state)
    for _ in range(3):
        bounded.push_object(piece(5, 33, "session 5"), state)
    with pytest.raises(HTTPException) as caught:
        bounded.push_object(piece(5, 2, "session 5"), state)
    assert (caught.value.status_code, taken, state.deleted) == (413, [33, 33, 33], ["m"])
    with pytest.raises(HTTPException):  # nor as a part of another's
        bounded.push_object(piece(6, 1, "session 5"), state)
    with pytest.raises(HTTPException):  # a session that the SuperLink no longer knows, after a restart
        bounded.push_object(piece(6, 101, "forgotten"), state)
    State(None).get_run_info([1])
    assert bounded.push_object(piece(7, 1000, "other"), State(None)).stored  # type: ignore[arg-type] # a plain run


# --- the database ---------------------------------------------------------------------------------------------------


def test_the_database_gives_back_what_it_no_longer_holds(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE objects (content BLOB)")
        connection.executemany("INSERT INTO objects VALUES (?)", [(b"secret" * 200_000,)] * 5)
    with sqlite3.connect(file) as connection:
        connection.execute("DELETE FROM objects")
    assert file.stat().st_size > 5_000_000
    tidy(file)  # a folder of an earlier version
    assert file.stat().st_size < 50_000
    with sqlite3.connect(file) as connection:
        connection.executemany("INSERT INTO objects VALUES (?)", [(b"secret" * 200_000,)] * 5)
    with sqlite3.connect(file) as connection:
        connection.execute("DELETE FROM objects")
    connection.close()
    assert file.stat().st_size < 50_000  # from then on by itself
    tidy(tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()


@pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # of alembic, by the way Flower uses it
def test_flowers_database_is_made_so_that_it_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore import sql_mixin
    from flwr.supercore.object_store.sql_object_store import SqlObjectStore
    from flwr.superlink import main
    from flwr.superlink.servicer.fleet import fleet_handlers

    from fedsim.deploy.superlink import prepare_flower

    for module, name in (
        (main, "_get_middleware"),
        (sql_mixin, "SQLITE_PRAGMAS"),
        (fleet_handlers, "push_messages"),
        (fleet_handlers, "push_object"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back after the test
    prepare_flower()
    store = SqlObjectStore(str(tmp_path / "state.db"))
    store.initialize()
    with store.session() as session:
        connection = session.connection().connection.driver_connection
        assert connection is not None
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (1,)
        assert connection.execute("PRAGMA secure_delete").fetchone() == (1,)
    assert main._get_middleware()[0].cls.__name__ == "FlowerGuard"
