# SPDX-License-Identifier: Apache-2.0
"""The connection to a SuperLink's control API, and who the nodes of its fleet are."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedsim.errors import DeployError
from fedsim.federation.fleet import Owners
from fedsim.federation.signature import Signer, read_private
from fedsim.scenario import EngineSection

DEFAULT_ADDRESS = "127.0.0.1:8000"
FLEET = "fleet.toml"
"""Beside the certificate of the authority: which client each key is, as `fedsim deploy init` has written it."""
SIGNING_KEY = "signing.key"
"""Beside it: the key by which the server signs what it sends to clients."""
SERVER_KEY = "server.pub"
"""By which a client knows the server's messages; the same file in the server's folder and in every client's."""
_LOCAL = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Link:
    """Where the SuperLink's control API listens, and the certificate authority to trust; None: no TLS."""

    address: str = DEFAULT_ADDRESS
    root_certificates: Path | None = None

    @classmethod
    def of(cls, engine: EngineSection) -> Link:
        """That of a scenario; DeployError for one that would speak in the clear over a network."""
        address = engine.address or DEFAULT_ADDRESS
        if engine.root_certificates is None and address.rpartition(":")[0] not in _LOCAL:
            raise DeployError(
                f"engine.address {address} is another machine, and without engine.root_certificates everything would"
                " be readable on the way; name the file of the certificate authority"
            )
        certificates = Path(engine.root_certificates).absolute() if engine.root_certificates else None
        if certificates is not None and not certificates.is_file():
            raise DeployError(f"engine.root_certificates {certificates} is not a file; `fedsim deploy init` makes one")
        return cls(address, certificates)


@contextmanager
def control(link: Link) -> Iterator[ControlHttpClient]:
    """A client of the SuperLink's control API; whatever goes wrong with it is one sentence."""
    certificates = link.root_certificates.read_bytes() if link.root_certificates else None
    interceptors = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    client = ControlHttpClient.from_server_address(link.address, certificates is None, certificates, interceptors)
    try:
        yield client
    except httpx.HTTPStatusError as error:
        raise DeployError(
            f"the SuperLink at {link.address} refuses: {error.response.text[:300]}; see `fedsim deploy doctor`"
        ) from error
    except httpx.HTTPError as error:
        raise DeployError(
            f"the SuperLink at {link.address} does not answer ({error}); start it with `fedsim deploy server`, or name"
            " another engine.address"
        ) from error
    finally:
        client.close()


def check_link(engine: EngineSection) -> None:
    """DeployError where no SuperLink answers as a scenario's engine says."""
    with control(Link.of(engine)) as client:
        client.ListNodes(ListNodesRequest())


def owners(engine: EngineSection) -> Owners | None:
    """Who the nodes of a deployment are; None, where no file beside the certificate says which client a key is.

    Flower lets a node in by its key and gives it an id. The key is the only thing that a node cannot make up: which
    client it is must follow from it, and not from what the node says.
    """
    link = Link.of(engine)
    file = link.root_certificates.with_name(FLEET) if link.root_certificates else None
    if file is None or not file.is_file():
        return None
    clients = read_fleet(file)

    def ask() -> dict[int, int]:
        with control(link) as client:
            found = client.ListNodes(ListNodesRequest()).nodes_info
        return {node.node_id: clients[node.public_key] for node in found if node.public_key in clients}

    return ask


def signer(engine: EngineSection, run: int) -> Signer | None:
    """What signs the messages of a run; None, where no key is beside the certificate, as clients then ask for none."""
    link = Link.of(engine)
    file = link.root_certificates.with_name(SIGNING_KEY) if link.root_certificates else None
    if file is None or not file.is_file():
        return None
    try:
        return Signer(read_private(file.read_bytes()), run)
    except OSError as error:
        raise DeployError(f"{file} cannot be read ({error.strerror}); it belongs to who runs the server") from None


def read_fleet(file: Path) -> dict[bytes, int]:
    """The number of each client by its public key, as Flower writes it."""
    try:
        entries = tomllib.loads(file.read_text("utf-8"))
        fleet = {pem(entry["key"].encode()): entry["partition_id"] for entry in entries.values()}
        numbers = sorted(fleet.values())
        if len(numbers) != len(entries) or numbers != list(range(len(numbers))):
            raise ValueError(f"its clients are not numbered from 0, each by a key of its own: {numbers}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DeployError(f"{file} does not say which client each key is ({error}); restore it") from None
    return fleet


def fleet_text(keys: dict[str, bytes]) -> str:
    """The file of `read_fleet`, for clients by name in the order of their numbers."""
    lines = ["# Which client each key is. A node that says that it is another one is refused."]
    for number, (name, key) in enumerate(keys.items()):
        lines += ["", f"[{name}]", f"partition_id = {number}", f'key = "{key.decode().strip()}"']
    return "\n".join(lines) + "\n"


def pem(key: bytes) -> bytes:
    """A public key of OpenSSH's format as Flower writes it; a ValueError for what is none."""
    try:
        return load_ssh_public_key(key).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None
