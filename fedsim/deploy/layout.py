# SPDX-License-Identifier: Apache-2.0
"""What is where in a deployment folder.

    DIR/ca/          the certificate authority; its key is needed for `renew` only: keep it offline
    DIR/server/      everything that the server's machine needs
    DIR/client-1/    everything that this client's machine needs, and nothing of anybody else
    DIR/compose.yaml the same federation in containers

A client's folder is carried to the client's machine; the server keeps the public keys.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedsim.errors import DeployError

T = TypeVar("T")

PROXY_PORT = 8443
SUPERLINK_PORT = 8000
RUNTIME_PORT = 9094
PORTS = (1, 65535)
MOST_CLIENTS = 10_000
_HOST = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$")


@dataclass(frozen=True)
class Server:
    """The folder of a server."""

    path: Path
    host: str
    port: int
    """Of the proxy: what clients connect to."""
    superlink_port: int
    """Of the SuperLink, on loopback: fleet, control and runtime."""

    @property
    def tls_port(self) -> int:
        """Of the proxy's second half, on loopback: where TLS ends, once a connection was counted."""
        return self.superlink_port + 1 if self.superlink_port < PORTS[1] else self.superlink_port - 1

    @property
    def superlink(self) -> str:
        """The address of the SuperLink on this machine."""
        return f"127.0.0.1:{self.superlink_port}"

    @property
    def keys(self) -> Path:
        """The public keys of the clients that may take part."""
        return self.path / "clients"

    @property
    def revoked(self) -> Path:
        """The public keys of those that may not any more."""
        return self.path / "revoked"

    @property
    def flower(self) -> Path:
        """FLWR_HOME."""
        return self.path / "flower"


@dataclass(frozen=True)
class Client:
    """The folder of a client."""

    path: Path
    name: str
    host: str
    port: int
    partition: int
    partitions: int
    runtime_port: int

    @property
    def address(self) -> str:
        """The server's address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def flower(self) -> Path:
        """FLWR_HOME."""
        return self.path / "flower"


def open_server(folder: Path) -> Server:
    """The server in DIR/server, or in the folder itself."""
    path = folder / "server" if (folder / "server" / "server.toml").is_file() else folder
    found = _read(path / "server.toml", "a server's folder")
    return Server(
        path.absolute(),
        check_host(_get(found, "host", str, path)),
        _number(found, "port", path, *PORTS),
        _number(found, "superlink_port", path, *PORTS),
    )


def open_client(folder: Path) -> Client:
    """The client whose folder this is."""
    found = _read(folder / "client.toml", "a client's folder")
    partitions = _number(found, "num_partitions", folder, 1, MOST_CLIENTS)
    return Client(
        folder.absolute(),
        _get(found, "name", str, folder),
        check_host(_get(found, "host", str, folder)),
        _number(found, "port", folder, *PORTS),
        _number(found, "partition_id", folder, 0, partitions - 1),
        partitions,
        _number(found, "runtime_port", folder, *PORTS),
    )


def check_host(host: str) -> str:
    """A host name or an address, as it can stand in a certificate and in a configuration."""
    if not _HOST.match(host) and not is_address(host):
        raise DeployError(f"host {host!r} is neither a host name nor an address; name the server as clients reach it")
    return host


def is_address(host: str) -> bool:
    """Whether it is an IP address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def replace_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file all or nothing, durably."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _read(file: Path, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise DeployError(
            f"{file.parent} is not {what}: it has no {file.name}; make it with `fedsim deploy init`"
        ) from None
    except (OSError, ValueError) as error:
        raise DeployError(f"{file} cannot be read: {error}; mend it, or make the folder anew") from None


def _number(found: dict[str, Any], key: str, folder: Path, least: int, most: int) -> int:
    value = _get(found, key, int, folder)
    if isinstance(value, bool) or not least <= value <= most:
        raise DeployError(f"{folder}: {key} is {value!r} in its .toml file, it must be a number from {least} to {most}")
    return value


def _get(found: dict[str, Any], key: str, kind: type[T], folder: Path) -> T:
    value = found.get(key)
    if not isinstance(value, kind):
        raise DeployError(f"{folder}: {key} is {value!r} in its .toml file, it must be of type {kind.__name__}")
    return value
