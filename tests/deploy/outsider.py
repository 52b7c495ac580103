# SPDX-License-Identifier: Apache-2.0
"""Whatever somebody in the network without a valid key can think of, in one process. Run inside a test's namespace.

Prints JSON: for each attempt what came of it, "OPEN: ..." where it worked.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, RegisterNodeFleetRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime.runtime_http_client import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

TRICKS = (
    "/v1/control/list-runs",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/pull-messages/../../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet/pull-messages%2f..%2f..%2fcontrol%2flist-runs",
    "//v1/control/list-runs",
    "/v1//control/list-runs",
    "/V1/CONTROL/list-runs",
    "/v1/fleet/pull-messages;/../../control/list-runs",
    "/v1/runtime/acquire-task",
    "/v1/fleet/register-node",
    "/v1/fleet/unregister-node",
    "/v1/fleet/",
    "/health",
    "/docs",
    "/openapi.json",
    "/",
)


def outcome(attempt: Callable[[], object]) -> str:
    try:
        return f"OPEN: {attempt()!r}"[:300]
    except httpx.HTTPStatusError as error:
        return f"{error.response.status_code} {error.response.text[:120]}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def connect(host: str, port: int) -> str:
    with socket.create_connection((host, port), timeout=3):
        return "connected"


def raw(host: str, port: int, authority: str, path: str, size: int = 0) -> str:
    """A POST with the path exactly as it is; raises unless it is answered by something that worked."""
    connection = http.client.HTTPSConnection(
        host, port, timeout=30, context=ssl.create_default_context(cafile=authority)
    )
    try:
        connection.putrequest("POST", path, skip_accept_encoding=True)
        connection.putheader("Content-Type", "application/protobuf")
        connection.putheader("Content-Length", str(size))
        connection.endheaders()
        with contextlib.suppress(OSError):  # it may close before all of it is there
            connection.send(b"\0" * size)
        answer = connection.getresponse()
    finally:
        connection.close()
    if answer.status >= 400:
        raise PermissionError(f"status {answer.status}")
    return f"status {answer.status}"


def plain(host: str, port: int) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.request("POST", "/v1/fleet/pull-messages", b"")
    answer = connection.getresponse()
    if answer.status >= 400:
        raise PermissionError(f"status {answer.status}")
    return f"status {answer.status}"


def with_key(path: str | None) -> tuple[NodeAuthHttpInterceptor, bytes]:
    key = load_ssh_private_key(Path(path).read_bytes(), None) if path else ec.generate_private_key(ec.SECP384R1())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return NodeAuthHttpInterceptor(key, key.public_key()), public_key_to_bytes(key.public_key())


def keys(address: str, authority: str, stolen: str, revoked: str, own: int, other: int) -> dict[str, str]:
    """Fleet calls with all kinds of keys; the stolen one, a valid client's, shows that a call can work."""

    def fleet(path: str | None, *, signed: bool = True) -> tuple[FleetHttpClient, bytes]:
        signer, public = with_key(path)
        return FleetHttpClient.from_server_address(address, False, authority, [signer] if signed else []), public

    nobody, public = fleet(None, signed=False)
    unknown, unknown_key = fleet(None)
    gone, gone_key = fleet(revoked)
    valid, _ = fleet(stolen)
    interval = 30.0
    return {
        "no key, activate": outcome(
            lambda: nobody.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=interval))
        ),
        "no key, messages": outcome(lambda: nobody.PullMessages(PullMessagesRequest(node=Node(node_id=own)))),
        "unregistered key, activate": outcome(
            lambda: unknown.ActivateNode(ActivateNodeRequest(public_key=unknown_key, heartbeat_interval=interval))
        ),
        "unregistered key, messages": outcome(
            lambda: unknown.PullMessages(PullMessagesRequest(node=Node(node_id=own)))
        ),
        "unregistered key, registers itself": outcome(
            lambda: unknown.RegisterNode(RegisterNodeFleetRequest(public_key=unknown_key))
        ),
        "revoked key, activate": outcome(
            lambda: gone.ActivateNode(ActivateNodeRequest(public_key=gone_key, heartbeat_interval=interval))
        ),
        "revoked key, messages": outcome(lambda: gone.PullMessages(PullMessagesRequest(node=Node(node_id=own)))),
        "a client's key for another client": outcome(
            lambda: valid.PullMessages(PullMessagesRequest(node=Node(node_id=other)))
        ),
        "CONTROL: a client's key": outcome(
            lambda: valid.SendNodeHeartbeat(
                SendNodeHeartbeatRequest(node=Node(node_id=own), heartbeat_interval=interval)
            )
        ),
    }


def main(host: str, port: int, authority: str, foreign: str, stolen: str, revoked: str, own: int, other: int) -> None:
    address = f"{host}:{port}"
    control = ControlHttpClient.from_server_address(address, False, authority, ())
    runtime = RuntimeHttpClient.from_server_address(address, False, authority, ())
    _, public = with_key(None)
    found = {
        "list runs": outcome(lambda: control.ListRuns(ListRunsRequest())),
        "list nodes": outcome(lambda: control.ListNodes(ListNodesRequest())),
        "start a run": outcome(lambda: control.StartRun(StartRunRequest())),
        "stop a run": outcome(lambda: control.StopRun(StopRunRequest(run_id=1))),
        "register a key": outcome(lambda: control.RegisterNode(RegisterNodeRequest(public_key=public))),
        "unregister a client": outcome(lambda: control.UnregisterNode(UnregisterNodeRequest(node_id=own))),
        "take over the ServerApp": outcome(lambda: runtime.AcquireTask(AcquireTaskRequest())),
        "plain HTTP": outcome(lambda: plain(host, port)),
        "another authority": outcome(lambda: raw(host, port, foreign, "/v1/fleet/pull-messages")),
        "a body of 17 MB": outcome(lambda: raw(host, port, authority, "/v1/fleet/push-object", 17 << 20)),
        **{f"path {path}": outcome(lambda path=path: raw(host, port, authority, path)) for path in TRICKS},
        **{
            f"port {other_port}": outcome(lambda p=other_port: connect(host, p))
            for other_port in (80, 8000, 9094, 9095)
        },
        **keys(address, authority, stolen, revoked, own, other),
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(arguments[0], int(arguments[1]), *arguments[2:6], int(arguments[6]), int(arguments[7]))  # type: ignore[misc]
