# SPDX-License-Identifier: Apache-2.0
"""What notices that a process is stuck, and what the server needs of nginx."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsim.deploy import client, init, nodes, server
from fedsim.deploy.contact import STALLED, Contact, contact_file, write_contact
from fedsim.deploy.layout import open_client, open_server
from fedsim.deploy.notify import alive, notify
from fedsim.errors import DeployError


def test_systemd_is_told_and_only_where_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    alive()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify("READY=1", "STATUS=here")
        alive()
        assert (listener.recv(100), listener.recv(100)) == (b"READY=1\nSTATUS=here", b"WATCHDOG=1")
    alive()  # nobody listens any more
    monkeypatch.setenv("NOTIFY_SOCKET", "vsock:2:1234")
    alive()


def test_a_superlink_that_does_not_answer_three_times_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = init.create(tmp_path / "fed", 1, ["localhost"])
    answers = [False, False, True, False, False, False]

    def registered(_: object) -> list[nodes.Node]:
        if not answers.pop(0):
            raise DeployError("it does not answer")
        return []

    monkeypatch.setattr(nodes, "registered", registered)
    monkeypatch.setattr(server, "BEAT", 0.0)
    pulse = server.Pulse(opened)
    assert [pulse.stuck() for _ in range(6)] == [None] * 5 + ["SuperLink"]


def test_a_supernode_that_tries_nothing_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init.create(tmp_path / "fed", 1, ["localhost"])
    opened = open_client(tmp_path / "fed" / "client-1")
    now = time.monotonic()
    found: list[str | None] = []

    class Together:
        def __enter__(self) -> Together:
            return self

        def __exit__(self, *_: object) -> None: ...
        def start(self, _: object) -> None: ...
        def wait_for(self, *_: object) -> None: ...
        def watch(self, check: object) -> tuple[str, str]:
            assert callable(check)
            for tried in (now, now - STALLED - 1):
                write_contact(contact_file(opened.path), Contact(tried, tried))
                found.append(check())
            return "SuperNode", "is stuck"

    monkeypatch.setattr(client, "together", lambda _: Together())
    assert client._run(opened) == ("SuperNode", "is stuck")
    assert found == [None, "SuperNode"]


@pytest.mark.parametrize(
    ("built", "there", "wanted"),
    [
        ("--with-stream --with-http", False, ()),
        ("--modules-path={} --with-stream=dynamic", True, ("-g", "load_module {}/ngx_stream_module.so;")),
        ("--modules-path={} --with-stream=dynamic", False, None),
        ("--modules-path={}", False, None),
    ],
)
def test_nginx_counts_connections_or_the_server_does_not_start(
    built: str, there: bool, wanted: tuple[str, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        (tmp_path / "ngx_stream_module.so").touch()
    said = SimpleNamespace(stderr=f"configure arguments: {built.format(tmp_path)}")
    monkeypatch.setattr(server, "find", lambda *_: "nginx")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    if wanted is None:
        with pytest.raises(DeployError, match="apt-get install libnginx-mod-stream"):
            server.stream_module()
        init.create(tmp_path / "fed", 1, ["localhost"])
        with pytest.raises(DeployError, match="no stream module"):  # and nothing was begun
            server.serve(open_server(tmp_path / "fed"))
    else:
        assert server.stream_module() == tuple(word.format(tmp_path) for word in wanted)
