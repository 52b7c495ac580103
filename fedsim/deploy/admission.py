# SPDX-License-Identifier: Apache-2.0
"""Whether the server would let this client in now, and leaving it.

Flower 1.41 has no call that only authenticates. The one used here activates a node with a heartbeat interval of 0,
which Flower refuses, but only after it has checked signature, clock and key: nothing is changed by it, and each
outcome has a code of its own. fedsim's server answers it with the same codes before it reaches Flower (`guard`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Literal

import httpx

from fedsim.deploy.layout import Client
from fedsim.errors import DeployError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from flwr.supercore.protobuf.client import ProtobufCall, ProtobufClientInterceptor, ProtobufRequestContext
    from flwr.supernode.fleet_http_client import FleetHttpClient

ASKS = "fedsim-asks"
"""A header of a request that only asks whether its key is accepted."""
CLOCK = 5.0
"""Flower refuses a client whose clock is so many seconds ahead (or 305 behind)."""
Status = Literal["accepted", "unknown", "refused", "unreachable"]


@dataclass(frozen=True)
class Admission:
    """What came of asking."""

    status: Status
    """unknown: the key is not registered, or was revoked; refused: for any other reason."""
    said: str


def ask(client: Client) -> Admission:
    """Ask the server whether it accepts this client's key now."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    public = public_key_to_bytes(_key(client).public_key())
    try:
        with _fleet(client, asking=True) as fleet:
            fleet.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=0.0))
    except httpx.HTTPStatusError as error:
        answer = error.response
        refusal = FlowerError.from_json(answer.text)
        if refusal is not None and refusal.code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
            return Admission("accepted", "the server accepts this client's key")
        if refusal is not None and refusal.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            return Admission("unknown", "the server does not know this client's key, or has revoked it")
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            return Admission("refused", f"the server does not accept the signature{_difference(answer)}")
        return Admission("unreachable", f"the server answers with status {answer.status_code}")
    except (httpx.HTTPError, ValueError, OSError) as error:  # ValueError: an answer that is not Flower's
        return Admission("unreachable", plain(error))
    return Admission("unreachable", "what answers is not fedsim's server")


def leave(client: Client, node: int) -> None:
    """Sign a node off whose SuperNode has ended, so that Flower lets it in again at once, and not after a minute."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest

    with suppress(httpx.HTTPError, ValueError, OSError), _fleet(client) as fleet:
        fleet.DeactivateNode(DeactivateNodeRequest(node_id=node))


def plain(error: Exception) -> str:
    """Why a request had no answer, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _fleet(client: Client, *, asking: bool = False) -> Iterator[FleetHttpClient]:
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key = _key(client)
    try:
        authority = (client.path / "ca.crt").read_bytes()
    except OSError as error:
        raise DeployError(f"{error.filename} cannot be read: {error.strerror}; copy it from the server") from None
    interceptors: list[ProtobufClientInterceptor] = [NodeAuthHttpInterceptor(key, key.public_key())]
    interceptors += [_Asking()] if asking else []
    with FleetHttpClient.from_server_address(client.address, False, authority, interceptors) as fleet:
        yield fleet


class _Asking:
    """Marks a request that only asks."""

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers[ASKS] = "1"
        return call_next(context)


def _key(client: Client) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    file = client.path / "key"
    try:
        key = load_ssh_private_key(file.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise DeployError(f"{file} cannot be read ({error}); bring it back, or have a new key issued") from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise DeployError(f"{file} is not an elliptic-curve key; have a new key issued (`fedsim deploy new-key`)")
    return key


def _difference(answer: httpx.Response) -> str:
    """How far the clocks are apart, where that explains a refusal."""
    try:
        seconds = time.time() - parsedate_to_datetime(answer.headers["Date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return ""
    side = "ahead of" if seconds > 0 else "behind"
    return f": this clock is {abs(seconds):.0f} s {side} the server's" if abs(seconds) > CLOCK else ""
