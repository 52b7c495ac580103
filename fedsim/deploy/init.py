# SPDX-License-Identifier: Apache-2.0
"""Making a deployment folder, and renewing its server's certificate."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fedsim.deploy import certificates, templates
from fedsim.deploy.certificates import Pair
from fedsim.deploy.compose import compose_text
from fedsim.deploy.layout import (
    MOST_CLIENTS,
    PORTS,
    PROXY_PORT,
    RUNTIME_PORT,
    SUPERLINK_PORT,
    Client,
    Server,
    check_host,
    replace_file,
)
from fedsim.errors import DeployError


def create(
    folder: Path, clients: int, hosts: Sequence[str], port: int = PROXY_PORT, superlink_port: int = SUPERLINK_PORT
) -> Server:
    """Write a deployment folder. It appears complete or not at all, and nothing is ever overwritten."""
    if not 1 <= clients <= MOST_CLIENTS:
        raise DeployError(f"--clients is {clients}, it must be a number from 1 to {MOST_CLIENTS}")
    for name, value in (("--port", port), ("--superlink-port", superlink_port)):
        if not PORTS[0] <= value <= PORTS[1]:
            raise DeployError(f"{name} is {value}, it must be a number from {PORTS[0]} to {PORTS[1]}")
    if not hosts:
        raise DeployError("--host is missing; give the name or address at which clients reach the server")
    for host in hosts:
        check_host(host)
    folder = folder.absolute()
    if folder.exists():
        raise DeployError(f"{folder} is already there and is not overwritten; name another folder, or move it away")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise DeployError(f"{folder} cannot be made: {error.strerror}; name another folder") from None
    server = Server(folder / "server", hosts[0], port, superlink_port)
    try:
        _write_all(work, server, hosts, clients)
        work.rename(folder)
    except OSError as error:
        raise DeployError(f"{folder} cannot be written: {error.strerror}; name another folder") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return server


def renew(folder: Path, hosts: Sequence[str], server: Server) -> list[str]:
    """Give the server a new key and certificate by the same authority; clients need nothing. Its names are returned."""
    authority = _authority(folder)
    before = certificates.names_of((server.path / "server.crt").read_bytes())
    names = list(dict.fromkeys([server.host, *hosts, *before]))
    pair = certificates.make_server(authority, [check_host(name) for name in names])
    replace_file(server.path / "server.key", pair.private.decode())
    replace_file(server.path / "server.crt", pair.public.decode(), 0o644)
    return certificates.names_of(pair.public)


def program() -> str:
    """The fedsim command, as a systemd unit needs it."""
    beside = Path(sys.executable).with_name("fedsim")
    return str(beside) if beside.exists() else shutil.which("fedsim") or "/usr/local/bin/fedsim"


def _authority(folder: Path) -> Pair:
    try:
        return Pair((folder / "ca" / "ca.key").read_bytes(), (folder / "ca" / "ca.crt").read_bytes())
    except OSError as error:
        raise DeployError(f"{error.filename} cannot be read: {error.strerror}; bring the authority back") from None


def _write_all(work: Path, server: Server, hosts: Sequence[str], clients: int) -> None:
    from fedsim.federation.link import FLEET, SERVER_KEY, SIGNING_KEY, fleet_text

    authority = certificates.make_authority(f"fedsim {server.host}")
    signing = certificates.make_signer()
    _write_pair(work / "ca", "ca.key", "ca.crt", authority)
    _write_server(work / "server", server, authority, certificates.make_server(authority, hosts))
    _write_pair(work / "server", SIGNING_KEY, SERVER_KEY, signing)
    keys: dict[str, bytes] = {}
    for number in range(1, clients + 1):
        client = client_of(work, server, number, clients)
        pair = certificates.make_client(client.name)
        keys[client.name] = pair.public
        write_client(client, authority.public, signing.public, pair)
        _write(work / "server" / "clients" / f"{client.name}.pub", pair.public, 0o644)
    _write(work / "server" / FLEET, fleet_text(keys), 0o644)
    _write(work / "compose.yaml", compose_text(server, clients), 0o644)
    _write(work / "README.txt", templates.readme(server, clients), 0o644)


def _write_server(place: Path, server: Server, authority: Pair, pair: Pair) -> None:
    _write_pair(place, "server.key", "server.crt", pair)
    _write(place / "ca.crt", authority.public, 0o644)
    _write(place / "superexec.secret", secrets.token_bytes(32))
    _write(place / "server.toml", templates.server_toml(server.host, server.port, server.superlink_port), 0o644)
    _write(place / "nginx.conf", templates.nginx(server), 0o644)
    _write(place / "fedsim-server.service", templates.server_unit(server.path, program()), 0o644)
    for name in ("clients", "revoked", "flower", "tmp", "runs"):
        (place / name).mkdir(mode=0o700, exist_ok=True)


def client_of(folder: Path, server: Server, number: int, clients: int) -> Client:
    """The client with a number, from 1, of a federation of so many, with its folder in this one."""
    name, runtime_port = f"client-{number}", RUNTIME_PORT + number - 1
    return Client(folder / name, name, server.host, server.port, number - 1, clients, runtime_port)


def write_client(client: Client, authority: bytes, signer: bytes, pair: Pair) -> None:
    """Write a client's folder, with the keys by which it knows its server and the messages of its server."""
    from fedsim.federation.link import SERVER_KEY
    from fedsim.federation.policy import policy_text
    from fedsim.privacy.ledger import Ledger

    place = client.path
    _write_pair(place, "key", "key.pub", pair)
    _write(place / "ca.crt", authority, 0o644)
    _write(place / SERVER_KEY, signer, 0o644)
    _write(place / "superexec.secret", secrets.token_bytes(32))
    _write(place / "client.toml", templates.client_toml(client), 0o644)
    _write(place / "policy.yaml", policy_text(), 0o644)
    _write(place / f"fedsim-{client.name}.service", templates.client_unit(client, program()), 0o644)
    (place / "flower").mkdir(mode=0o700)
    Ledger(place / "ledger.sqlite")


def _write_pair(place: Path, private: str, public: str, pair: Pair) -> None:
    _write(place / private, pair.private)
    _write(place / public, pair.public, 0o644)


def _write(path: Path, content: bytes | str, mode: int = 0o600) -> None:
    """Make a new file with its permissions from the start; private unless said otherwise."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask says
        file.write(content if isinstance(content, bytes) else content.encode())
        os.fsync(file.fileno())
