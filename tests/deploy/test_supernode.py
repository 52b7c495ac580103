# SPDX-License-Identifier: Apache-2.0
"""The SuperNode's process: which faults Flower is made to outlive, and that the process ends where Flower lingers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesRequest
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.deploy import contact, supernode
from fedsim.deploy.contact import Contact, contact_file, read_contact, write_contact
from fedsim.deploy.supernode import Note, Steady, keep_steady

TRANSPORT = (
    httpx.ConnectError,
    httpx.ReadError,
    httpx.WriteError,
    httpx.RemoteProtocolError,
    httpx.ConnectTimeout,
    httpx.ReadTimeout,
    httpx.WriteTimeout,
    httpx.PoolTimeout,
)
WORDS = st.sampled_from(["ssl", "TLS", "certificate verify failed", "[SSL: UNEXPECTED_EOF]", "reset", "timed out", ""])
KEY = ec.generate_private_key(ec.SECP384R1())


def context(method: str = "/flwr.proto.Fleet/PullMessages") -> ProtobufRequestContext:
    return ProtobufRequestContext(method, PullMessagesRequest(), httpx.Request("POST", "https://server/x"))


def steady(folder: Path) -> Steady:
    Steady.note = Note(folder / "contact.json")
    return Steady(KEY, KEY.public_key())


def raising(error: Exception) -> Callable[[ProtobufRequestContext], httpx.Response]:
    def call(_: ProtobufRequestContext) -> httpx.Response:
        raise error

    return call


def answering(status: int, content: bytes = b"") -> Callable[[ProtobufRequestContext], httpx.Response]:
    return lambda asked: httpx.Response(status, content=content, request=asked.request)


def gives_up(error: Exception) -> bool:
    """Whether Flower ends its work by an error of a request."""
    invoker = make_simple_http_retry_invoker()
    assert invoker.should_giveup is not None
    return not isinstance(error, invoker.recoverable_exceptions) or invoker.should_giveup(error)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(TRANSPORT), words=st.lists(WORDS, max_size=4), noise=st.text(max_size=20))
def test_no_fault_of_a_connection_ends_flowers_work(
    kind: type[httpx.TransportError], words: list[str], noise: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wrapped = steady(tmp_path_factory.getbasetemp())
    with pytest.raises(httpx.TransportError) as caught:
        wrapped.intercept(context(), raising(kind(" ".join([*words, noise]))))
    assert not gives_up(caught.value)


@pytest.mark.parametrize("text", ["EOF occurred in violation of protocol (_ssl.c:1006)", "certificate has expired"])
def test_flowers_own_client_would_give_up(text: str) -> None:
    """What `Steady` is for: where this fails, Flower has changed, and it may go."""
    with pytest.raises(httpx.ConnectError) as caught:
        NodeAuthHttpInterceptor(KEY, KEY.public_key()).intercept(context(), raising(httpx.ConnectError(text)))
    assert gives_up(caught.value)


@pytest.mark.parametrize("status", [500, 501, 502, 503, 504, 520, 599])
def test_a_server_that_fails_is_asked_again_for_a_while(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = steady(tmp_path)
    for _ in range(2):
        with pytest.raises(httpx.ConnectError) as caught:
            wrapped.intercept(context(), answering(status))
        assert not gives_up(caught.value)
    monkeypatch.setattr(supernode, "BROKEN", -1.0)  # it has failed at this kind of request for too long
    assert wrapped.intercept(context(), answering(status)).status_code == status
    monkeypatch.setattr(supernode, "BROKEN", 120.0)
    with pytest.raises(httpx.ConnectError):  # and then from the beginning
        wrapped.intercept(context(), answering(status))


def test_contact_is_noted_by_answers_and_not_by_refusals(tmp_path: Path) -> None:
    wrapped, file = steady(tmp_path), tmp_path / "contact.json"
    wrapped.intercept(context(), answering(401))
    before = read_contact(file)
    assert before is not None
    assert before.answered is None
    assert "status 401" in before.said(time.monotonic())
    assert not before.healthy(time.monotonic())
    let_in = answering(200, ActivateNodeResponse(node_id=2**64 - 3).SerializeToString())
    wrapped.intercept(context("/flwr.proto.Fleet/ActivateNode"), let_in)
    after = read_contact(file)
    assert after is not None
    assert after.node == 2**64 - 3
    assert after.healthy(time.monotonic())
    assert not after.healthy(time.monotonic() + contact.FRESH + 1)
    assert not after.healthy(time.monotonic() - 1000)  # noted before the machine was started
    with pytest.raises(httpx.ConnectError):
        wrapped.intercept(context(), raising(httpx.ConnectError("[SSL] broken")))
    last = read_contact(file)
    assert last is not None
    assert (last.trouble, last.node) == ("[SSL] broken", 2**64 - 3)


def test_many_threads_note_their_answers_and_every_reader_sees_a_whole_note(tmp_path: Path) -> None:
    note, broken = Note(tmp_path / "contact.json"), []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            if (tmp_path / "contact.json").exists() and read_contact(tmp_path / "contact.json") is None:
                broken.append(1)

    def write() -> None:
        for number in range(200):
            note.failed(f"reason {number}") if number % 2 else note.answered(number)

    threads = [threading.Thread(target=write) for _ in range(4)]
    reader = threading.Thread(target=read)
    for thread in [reader, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    reader.join()
    assert broken == []


def test_the_health_check_follows_the_contact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert contact.main(str(tmp_path)) == 1
    assert "no SuperNode runs here" in capsys.readouterr().out
    (tmp_path / "flower").mkdir()
    now = time.monotonic()
    for noted, code in (
        (Contact(now), 1),
        (Contact(now, now), 0),
        (Contact(now, now - contact.FRESH - 1), 1),
        (Contact(now, now + 1000), 1),
    ):
        write_contact(contact_file(tmp_path), noted)
        assert contact.main(str(tmp_path)) == code
    contact_file(tmp_path).write_text('{"tried": 1, "strange": 2}')
    assert contact.main(str(tmp_path)) == 1


LINGERS = """
import importlib, sys, threading, time
from fedsim.deploy import supernode

def lingering():
    threading.Thread(target=time.sleep, args=(600,)).start()  # as Flower's web server
    {then}

importlib.import_module("flwr.supernode.cli.flower_supernode").flower_supernode = lingering
supernode.main()
"""


def test_the_process_ends_when_flower_stops_its_work(tmp_path: Path) -> None:
    (tmp_path / "flower").mkdir()
    ways = {
        "return": supernode.ENDED,
        "raise RuntimeError('a bug')": supernode.ENDED,
        "sys.exit(1)": 1,
        "threading.Thread(target=lambda: 1 / 0).start(); time.sleep(600)": supernode.ENDED,
    }
    running = {
        then: subprocess.Popen(
            [sys.executable, "-c", LINGERS.format(then=then)], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        for then in ways
    }
    for then, process in running.items():
        _, said = process.communicate(timeout=60)
        assert (process.returncode, "the SuperNode ends" in said) == (ways[then], True), (then, said)


def test_flower_signs_where_steady_is_put() -> None:
    from flwr.supernode import fleet_http_connection

    before = fleet_http_connection.NodeAuthHttpInterceptor
    try:
        keep_steady(Note(Path("contact.json")))
        assert fleet_http_connection.NodeAuthHttpInterceptor is Steady
    finally:
        fleet_http_connection.NodeAuthHttpInterceptor = before
