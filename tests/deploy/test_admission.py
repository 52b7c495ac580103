# SPDX-License-Identifier: Apache-2.0
"""What a client makes of whatever answers at its server's address."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import time
from typing import Any

import pytest

from fedsim.deploy import certificates, doctor, init
from fedsim.deploy.admission import ask
from fedsim.deploy.layout import Client, open_client

Start = Callable[..., Client]


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Start]:
    """Starts a server that answers every request so, by TLS; a client that is pointed to it."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int, body: bytes = b"", ahead: float = 0.0) -> Client:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response_only(status)
                self.send_header("Date", formatdate(time() - ahead, usegmt=True))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        folder = tmp_path / "fed"
        init.create(folder, 1, ["127.0.0.1"], server.server_address[1])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server" / "server.crt", folder / "server" / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return open_client(folder / "client-1")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "ahead", "found", "words"),
    [
        (400, json.dumps({"code": 2003, "detail": "x"}).encode(), 0, "accepted", "accepts this client's key"),
        (400, json.dumps({"code": 2004, "detail": "x"}).encode(), 0, "unknown", "does not know this client's key"),
        (401, b"{}", 0, "refused", "does not accept the signature"),
        (401, b"{}", 600, "refused", "this clock is 600 s ahead of the server's"),
        (401, b"{}", -3600, "refused", "this clock is 3600 s behind the server's"),
        (404, b"<html>not here</html>", 0, "unreachable", "status 404"),
        (500, b"", 0, "unreachable", "status 500"),
        (502, b"", 0, "unreachable", "status 502"),
        (400, b'{"code": "2003"}', 0, "unreachable", "status 400"),
        (200, b"<html>please log in</html>", 0, "unreachable", ""),
        (200, b"", 0, "unreachable", "not fedsim's server"),
    ],
)
def test_only_the_server_itself_lets_a_client_in(
    answering: Start, status: int, body: bytes, ahead: float, found: str, words: str
) -> None:
    client = answering(status, body, ahead)
    answer = ask(client)
    assert answer.status == found, answer
    assert words.split(" 600 ")[0].split(" 3600 ")[0] in answer.said
    (finding,) = doctor._admission(client)
    assert (finding.status == "good", bool(finding.remedy)) == (found == "accepted", found != "accepted")


def test_a_server_that_cannot_prove_itself_or_speaks_no_tls_is_not_reached(answering: Start) -> None:
    client = answering(400, json.dumps({"code": 2003, "detail": "x"}).encode())
    assert ask(client).status == "accepted"
    (client.path / "ca.crt").write_bytes(certificates.make_authority("another").public)
    assert ask(client).status == "unreachable"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def speak() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 another service\r\n")

        threading.Thread(target=speak, daemon=True).start()
        file = client.path / "client.toml"
        file.write_text(file.read_text().replace(f"port = {client.port}", f"port = {listener.getsockname()[1]}"))
        assert ask(open_client(client.path)).status == "unreachable"
