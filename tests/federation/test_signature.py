# SPDX-License-Identifier: Apache-2.0
"""A client answers its own server, once, and nobody else: Flower hands it whatever any authenticated node sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given, settings
from hypothesis import strategies as st
from own_clients import VOUCHED, OwnClients, play

from fedsim.errors import DeployError, PolicyError
from fedsim.federation.asked import Rows
from fedsim.federation.inline import InlineGrid
from fedsim.federation.signature import ENVELOPE, Signer, check_signature, counted_rows, read_private, read_public

KEY = Ed25519PrivateKey.generate()
RUN, NODE = 77, 2**62 + 5
VALUES = st.one_of(
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.lists(st.binary(max_size=3), min_size=1, max_size=3),
)


def content(numbers: dict[str, Any]) -> RecordDict:
    array = Array("float32", (2,), "numpy.ndarray", b"12345678")
    return RecordDict({"arrays": ArrayRecord({"w": array}), "config": ConfigRecord(numbers)})


def sent(what: RecordDict, kind: str = "train", node: int = NODE) -> Message:
    InlineGrid(1, lambda *_: [], {})
    return Message(what, node, kind)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), VALUES, max_size=4))
def test_what_the_server_has_signed_is_believed_also_after_the_wire(numbers: dict[str, Any]) -> None:
    signed = Signer(KEY, RUN).signed(content(numbers), NODE, "train", Rows(50, 60))
    message = sent(signed)
    with no_object_id_recompute():  # as Flower sends it: each record, array and piece of an array by itself
        contents = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
        arrived = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(arrived, Message)
    assert len(check_signature(arrived, RUN, NODE, KEY.public_key())) == 32
    assert counted_rows(arrived.content) == Rows(50, 60)


def changed(name: str, **fields: Any) -> Callable[[RecordDict], RecordDict]:
    return lambda whole: RecordDict({**whole, name: ConfigRecord({**whole.config_records[name], **fields})})


CHANGES: dict[str, Callable[[RecordDict], RecordDict]] = {
    "another round": changed("config", **{"server-round": 2}),
    "a number of another kind": changed("config", **{"server-round": 1.0}),
    "a field more": changed("config", other=1),
    "other rows": changed(ENVELOPE, **{"least-rows": 4000}),
    "another number": changed(ENVELOPE, number="0" * 32),
    "no number": lambda whole: RecordDict(
        {**whole, ENVELOPE: ConfigRecord({k: v for k, v in whole.config_records[ENVELOPE].items() if k != "number"})}
    ),
    "another signature": changed(ENVELOPE, signature=b"s" * 64),
    "a text for a signature": changed(ENVELOPE, signature="s"),
    "another model": lambda whole: RecordDict(
        {**whole, "arrays": ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", b"12345679")})}
    ),
    "another shape": lambda whole: RecordDict(
        {**whole, "arrays": ArrayRecord({"w": Array("float32", (2, 1), "numpy.ndarray", b"12345678")})}
    ),
    "a record more": lambda whole: RecordDict({**whole, "secure": ConfigRecord({})}),
    "a record less": lambda whole: RecordDict({name: each for name, each in whole.items() if name != "arrays"}),
    "a record under another name": lambda whole: RecordDict(
        {("arrows" if name == "arrays" else name): each for name, each in whole.items()}
    ),
    "no signature": lambda whole: RecordDict({name: each for name, each in whole.items() if name != ENVELOPE}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_changed_shows(change: str) -> None:
    signed = Signer(KEY, RUN).signed(content({"server-round": 1}), NODE, "train", Rows(50))
    assert check_signature(sent(signed), RUN, NODE, KEY.public_key())
    with pytest.raises(PolicyError, match="is not from this client's server"):
        check_signature(sent(CHANGES[change](signed)), RUN, NODE, KEY.public_key())


def test_a_message_is_for_one_run_one_client_and_one_purpose() -> None:
    signed = Signer(KEY, RUN).signed(content({}), NODE, "train", None)
    for message, run, node, key in (
        (sent(signed), RUN + 1, NODE, KEY),
        (sent(signed), RUN, NODE + 1, KEY),
        (sent(signed, "train.keys"), RUN, NODE, KEY),
        (sent(signed, "query"), RUN, NODE, KEY),
        (sent(signed), RUN, NODE, Ed25519PrivateKey.generate()),
    ):
        with pytest.raises(PolicyError, match="is for another client, run or content"):
            check_signature(message, run, node, key.public_key())


def test_every_message_of_a_signer_has_a_number_of_its_own_and_a_model_is_hashed_anew_when_it_changes() -> None:
    signer, first = Signer(KEY, RUN), content({"server-round": 1})
    numbers = {str(signer.signed(first, NODE, "train", None).config_records[ENVELOPE]["number"]) for _ in range(50)}
    assert len(numbers) == 50
    for value in (b"12345678", b"87654321"):
        what = RecordDict({"arrays": ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", value)})})
        assert check_signature(sent(signer.signed(what, NODE, "train", None)), RUN, NODE, KEY.public_key())


def test_what_is_no_key_is_named() -> None:
    for read, file in ((read_private, "signing.key"), (read_public, "server.pub")):
        with pytest.raises(DeployError, match=f"{file} is not"):
            read(b"-----BEGIN NONSENSE-----")  # type: ignore[operator]


# --- in a federation ------------------------------------------------------------------------------------------------

KINDS = ("query", "train.keys", "train.shares", "train", "train.unmask")


@pytest.mark.parametrize(
    ("attack", "secure"),
    [("forged", True), ("unsigned", True), ("for another client", True), ("replayed", True), ("replayed", False)],
)
def test_a_message_of_another_client_is_not_answered_and_nothing_is_charged(
    attack: str, secure: bool, tmp_path: Path, world: Any
) -> None:
    """With every kind of message there is, each time after the server's own; on the old code it was charged twice."""
    clients = OwnClients(tmp_path / "fed")
    world.node_config = {client: clients.add(client, 60, VOUCHED.format(60)) for client in range(3)}
    told: dict[str, list[str]] = {}
    stranger = Ed25519PrivateKey.generate()

    def behaviour(message: Message, context: Context, honest: Any) -> list[Message]:
        reply = honest(message, context)
        kind, plain = message.metadata.message_type, dict(message.content)
        what = message.content
        if attack == "forged":
            what = Signer(stranger, context.run_id).signed(_without(plain), context.node_id, kind, Rows(1))
        elif attack == "unsigned":
            what = _without(plain)
        elif attack == "for another client":
            key = read_private((clients.folder / "signing.key").read_bytes())
            what = Signer(key, context.run_id).signed(_without(plain), context.node_id + 1, kind, None)
        state = context.state.copy()
        again = honest(Message(what, context.node_id, kind), context)
        assert context.state == state
        told.setdefault(kind, []).append(again.error.reason if again.has_error() else "ANSWERED")
        return [reply]

    world.behaviour = behaviour
    defence = {"example_dp": {"noise_multiplier": 1.0}, "secure_aggregation": secure}
    play(clients.scenario(3, defence=defence, rounds=1), tmp_path / "run")
    assert set(told) == (set(KINDS) - {"query"} if secure else {"train"})
    reason = "has had this message before" if attack == "replayed" else "is not from this client's server"
    assert all(reason in each for kind in told for each in told[kind]), told
    assert [len(clients.ledger(client).charges()) for client in range(3)] == [1, 1, 1]


def _without(records: dict[str, Any]) -> RecordDict:
    return RecordDict({name: record for name, record in records.items() if name != ENVELOPE})


def test_who_is_who_is_told_to_the_server_only(tmp_path: Path, world: Any) -> None:
    from fedsim.federation.client import app

    clients = OwnClients(tmp_path / "fed")
    node: dict[str, Any] = {"partition-id": 0, "num-partitions": 3, **clients.add(0, 60, VOUCHED.format(60))}
    context = Context(RUN, NODE, node, RecordDict(), {"scenario": "{}"})
    key = read_private((clients.folder / "signing.key").read_bytes())
    signed = Signer(key, RUN).signed(RecordDict(), NODE, "query", None)
    answer = app(sent(signed, "query"), context)
    assert dict(answer.content.config_records["client"]) == {
        "partition-id": 0, "num-partitions": 3, "least-rows": 60, "most-rows": 60
    }  # fmt: skip
    for message in (sent(signed, "query"), sent(RecordDict(), "query")):
        assert app(message, context).has_error()


def test_no_node_id_is_in_the_transcript_or_the_log(tmp_path: Path, world: Any, caplog: Any) -> None:
    """With one of them, another client could address a message to it."""
    clients = OwnClients(tmp_path / "fed")
    world.node_config = {client: clients.add(client, 60, VOUCHED.format(60)) for client in range(3)}
    world.extra = [{"partition-id": 1, "num-partitions": 3}, {"partition-id": 9, "num-partitions": 3}]
    play(clients.scenario(3), tmp_path / "run")
    nodes = {str(node) for grid in world.grids for node in grid.configs}
    written = caplog.text + "".join(path.read_text() for path in (tmp_path / "run").rglob("*.json*"))
    assert "says that it is client" in written
    assert not [node for node in nodes if node in written]
