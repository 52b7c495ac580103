# SPDX-License-Identifier: Apache-2.0
"""Which clients may take part: the keys in the folder are the truth, and the SuperLink is made to follow them.

A key in `clients/` is registered, any other is not: when the server starts, before the proxy opens its port, and at
once where a command changes it. So a revoked key stays out, whether or not the server ran when it was revoked, and
whatever is in Flower's database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.deploy.layout import Server
from fedsim.deploy.processes import listens
from fedsim.errors import DeployError

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient


@dataclass(frozen=True)
class Node:
    """A client as the SuperLink knows it."""

    node: int
    key: bytes
    status: str
    """registered (never connected), online or offline."""


def clients_of(server: Server) -> dict[str, bool]:
    """Every client by name, and whether it may take part."""
    allowed = {path.stem: True for path in server.keys.glob("*.pub")}
    return dict(sorted({**{path.stem: False for path in server.revoked.glob("*.pub")}, **allowed}.items()))


def follow_keys(server: Server) -> None:
    """Register the keys that may take part and are not, and unregister every node whose key may not."""
    from flwr.proto.control_pb2 import RegisterNodeRequest, UnregisterNodeRequest

    allowed = {public_key(path): path.stem for path in server.keys.glob("*.pub")}
    there = registered(server)
    with _control(server) as control:
        for node in there:
            if node.key not in allowed:
                control.UnregisterNode(UnregisterNodeRequest(node_id=node.node))
        for key in allowed.keys() - {node.key for node in there}:
            control.RegisterNode(RegisterNodeRequest(public_key=key, name=allowed[key]))


def registered(server: Server) -> list[Node]:
    """Every node that the SuperLink knows."""
    from flwr.proto.control_pb2 import ListNodesRequest

    with _control(server) as control:
        found = control.ListNodes(ListNodesRequest()).nodes_info
    nodes = [Node(info.node_id, info.public_key, info.status) for info in found if not info.unregistered_at]
    if not all(node.key for node in nodes):
        raise DeployError("the SuperLink lists nodes without their keys: this version of Flower is not known")
    return nodes


def statuses(server: Server) -> dict[str, str]:
    """Of each client by name: revoked, unknown to the SuperLink, registered, online or offline."""
    known = {node.key: node.status for node in registered(server)}
    found = {name: "revoked" for name, may in clients_of(server).items() if not may}
    for path in server.keys.glob("*.pub"):
        found[path.stem] = known.get(public_key(path), "unknown")
    return dict(sorted(found.items()))


def revoke(server: Server, name: str) -> bool:
    """Shut a client out, now and for good. False, if the server does not run: it is shut out when it starts."""
    key, revoked = server.keys / f"{name}.pub", server.revoked / f"{name}.pub"
    if name not in clients_of(server):
        names = ", ".join(clients_of(server)) or "none"
        raise DeployError(f"there is no client {name!r}; the clients are {names}")
    if key.exists():
        key.replace(revoked)
    if not listens("127.0.0.1", server.superlink_port):
        return False
    follow_keys(server)
    return True


def public_key(path: Path) -> bytes:
    """The public key in a file, as Flower writes it."""
    from fedsim.federation.link import pem

    try:
        return pem(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DeployError(
            f"{path} is not a public key in OpenSSH's format ({error}); remove it, or bring it back"
        ) from None


@contextmanager
def _control(server: Server) -> Iterator[ControlHttpClient]:
    """The SuperLink's control, which is reachable on this machine only."""
    from flwr.supercore.control import ControlHttpClient

    connect: Callable[..., ControlHttpClient] = ControlHttpClient.from_server_address
    control = connect(server.superlink, insecure=False, root_certificates=str(server.path / "ca.crt"), interceptors=())
    try:
        yield control
    except DeployError:
        raise
    except Exception as error:  # of httpx, of Flower, of the operating system
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DeployError(
            f"the SuperLink at {server.superlink} does not answer ({reason}); is the server running? Start it with"
            f" `fedsim deploy server {server.path.parent}`"
        ) from error
    finally:
        control.close()
