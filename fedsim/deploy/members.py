# SPDX-License-Identifier: Apache-2.0
"""Adding a client to a federation that is there, and giving one a new key.

The server's file of numbers (`fleet.toml`) is written before a key is let in: no key is ever let in without a number.
"""

from __future__ import annotations

import shutil
import tempfile
import tomllib
from pathlib import Path

from fedsim.deploy import certificates
from fedsim.deploy.compose import compose_text
from fedsim.deploy.init import client_of, write_client
from fedsim.deploy.layout import MOST_CLIENTS, Server, replace_file
from fedsim.deploy.nodes import clients_of, follow_keys
from fedsim.deploy.processes import listens
from fedsim.errors import DeployError
from fedsim.federation.link import FLEET, SERVER_KEY, fleet_text, read_fleet


def add_client(folder: Path, server: Server) -> tuple[Path, bool]:
    """Write the folder of one more client: where it is, and whether the server knows it already (else when it starts).

    The folders of the other clients stay as they are.
    """
    keys = _keys(server)
    number = len(keys) + 1
    if number > MOST_CLIENTS:
        raise DeployError(f"there are {len(keys)} clients, and at most {MOST_CLIENTS} are possible")
    client = client_of(folder.absolute(), server, number, number)
    if client.path.exists():
        raise DeployError(f"{client.path} is already there and is not overwritten; move it away")
    signer = server.path / SERVER_KEY
    if not signer.is_file():
        raise DeployError(f"{signer} is missing; start the server once with fedsim deploy server, which writes it")
    pair = certificates.make_client(client.name)
    work = Path(tempfile.mkdtemp(prefix=f".{client.name}-", dir=client.path.parent))
    try:
        made = client_of(work, server, number, number)
        write_client(made, (server.path / "ca.crt").read_bytes(), signer.read_bytes(), pair)
        made.path.rename(client.path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    replace_file(server.path / FLEET, fleet_text({**keys, client.name: pair.public}), 0o644)
    replace_file(server.keys / f"{client.name}.pub", pair.public.decode(), 0o644)
    compose = folder / "compose.yaml"
    if compose.is_file() and compose.read_text() == compose_text(server, len(keys)):  # else somebody has changed it
        replace_file(compose, compose_text(server, number), 0o644)
    return client.path, _follow(server)


def new_key(folder: Path, server: Server, name: str) -> tuple[Path, bool]:
    """Give a client a new key: the folder that it is in, and whether the server knows it already.

    The old one is shut out. A client that was revoked may take part again. If the client's own folder is no longer
    beside the server's, the key is in a folder of its own, to be carried to the client's machine.
    """
    keys = _keys(server)
    if name not in keys:
        raise DeployError(f"there is no client {name!r}; the clients are {', '.join(clients_of(server)) or 'none'}")
    own = folder.absolute() / name
    place = own if (own / "client.toml").is_file() else own.with_name(f"{name}-key")
    place.mkdir(mode=0o700, exist_ok=True)
    pair = certificates.make_client(name)
    replace_file(place / "key", pair.private.decode())
    replace_file(place / "key.pub", pair.public.decode(), 0o644)
    replace_file(server.path / FLEET, fleet_text({**keys, name: pair.public}), 0o644)
    replace_file(server.keys / f"{name}.pub", pair.public.decode(), 0o644)
    (server.revoked / f"{name}.pub").unlink(missing_ok=True)
    return place, _follow(server)


def _keys(server: Server) -> dict[str, bytes]:
    """The public keys of all clients by name, in the order of their numbers, those that were revoked included."""
    file = server.path / FLEET
    read_fleet(file)  # DeployError where it is damaged
    entries = tomllib.loads(file.read_text("utf-8"))
    return {name: entries[name]["key"].encode() for name in sorted(entries, key=lambda n: entries[n]["partition_id"])}


def _follow(server: Server) -> bool:
    if not listens("127.0.0.1", server.superlink_port):
        return False
    follow_keys(server)
    return True
