# SPDX-License-Identifier: Apache-2.0
"""A client's processes: the SuperNode, which talks to the server, and its SuperExec, which runs the ClientApp.

The client only ever calls out; its runtime listens on loopback. Policy, ledger and data are named in the node's own
configuration, which no message from the server can change, and code never comes from the server: whatever bundle
Flower delivers is left unopened (`clientapp`), and nothing is installed at run time.
"""

from __future__ import annotations

import json
import logging
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from fedsim.deploy.admission import ask, leave
from fedsim.deploy.clientapp import write_launchers
from fedsim.deploy.contact import STALLED, contact_file, read_contact
from fedsim.deploy.encoding import write_encoded
from fedsim.deploy.layout import Client, replace_file
from fedsim.deploy.notify import alive, notify
from fedsim.deploy.processes import (
    SUPEREXEC,
    Program,
    environment,
    interrupted_by_sigterm,
    listens,
    superexec,
    together,
)
from fedsim.errors import DeployError
from fedsim.federation.policy import Policy, load_policy
from fedsim.privacy.ledger import Ledger

log = logging.getLogger("fedsim")
_NUMBER = re.compile(r"\d+")
SECONDS = 120.0
PAUSES = (1.0, 15.0)
"""Seconds before the first repetition, and at most; each pause is up to twice the one before."""
UNKNOWN = 60.0
"""Seconds between two questions of a client whose key the server does not know: somebody has to do something."""
STEADY = 300.0
"""Seconds after which a SuperNode that ran is no repetition of one that failed."""


def join(
    client: Client, data: Path | None, policy: Path | None, schema: Path | None = None, *, restart: bool = True
) -> None:
    """Take part until told to stop. A SuperNode that ends, or is stuck, is started again once the server is there.

    With a schema the data is a table, which is encoded by it, once, into the client's folder.
    """
    if schema is not None:
        data = encoded(client, data, schema)
    configuration = node_configuration(client, data, policy)
    replace_file(client.path / "node.toml", configuration)
    if listens("127.0.0.1", client.runtime_port):
        raise DeployError(
            f"runtime_port {client.runtime_port} is in use; is this client running? Else change it in client.toml"
        )
    client.flower.mkdir(mode=0o700, exist_ok=True)
    with interrupted_by_sigterm():  # the first process of a container has no other way to be ended
        _keep_running(client, restart)


def _keep_running(client: Client, restart: bool) -> NoReturn:
    """Run the processes, and again when one ends; DeployError, unless they may be started again."""
    notify("READY=1")
    pauses, node = pause_lengths(), None
    while True:
        _wait_for_server(client)
        if node is not None:
            leave(client, node)
        contact_file(client.path).unlink(missing_ok=True)
        begun = time.monotonic()
        name, how = _run(client)
        if not restart:
            raise DeployError(f"{name} {how}; what it printed says why")
        contact = read_contact(contact_file(client.path))
        node = contact.node if contact is not None and contact.node is not None else node
        pauses = pause_lengths() if time.monotonic() - begun > STEADY else pauses
        pause = next(pauses)
        log.warning("%s %s; starting again in %.0f s", name, how, pause)
        _sleep(pause)


def pause_lengths() -> Iterator[float]:
    """Growing pauses, each between a half and the whole of its length: clients that fail together do not return so."""
    pause, longest = PAUSES
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, longest)


def _wait_for_server(client: Client) -> None:
    """Ask until the server accepts this client's key; log why not, once for each reason."""
    pauses, before = pause_lengths(), ""
    while (answer := ask(client)).status != "accepted":
        reason = _NUMBER.sub("#", answer.said)
        if reason != before:
            log.warning("%s; asking again until it does", answer.said)
            notify(f"STATUS={answer.said}")
            before = reason
        pause = next(pauses)
        _sleep(max(pause, UNKNOWN * random.uniform(0.5, 1.0)) if answer.status == "unknown" else pause)
    notify("STATUS=the server accepts this client's key")


def _sleep(seconds: float) -> None:
    """Sleep, and keep systemd's watchdog quiet."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        alive()
        time.sleep(min(left, 5.0))


def _run(client: Client) -> tuple[str, str]:
    """Run the processes until one ends or is stuck: its name, and what became of it."""
    begun = time.monotonic()

    def stuck() -> str | None:
        contact = read_contact(contact_file(client.path))
        tried = contact.tried if contact is not None else begun
        return "SuperNode" if time.monotonic() - tried > STALLED else None

    with together(environment(client.flower, write_launchers(client.path / "bin"))) as processes:
        processes.start(Program("SuperNode", supernode_command(client), client.path))
        try:
            processes.wait_for(lambda: listens("127.0.0.1", client.runtime_port), SECONDS, "SuperNode")
        except DeployError as error:
            if ended := processes.ended():
                return ended[0], f"ended with exit code {ended[1]}"
            log.warning("%s", error)
            return "SuperNode", "was not ready in time"
        processes.start(Program("SuperExec", superexec_command(client), client.path))
        return processes.watch(stuck)


def encoded(client: Client, data: Path | None, schema: Path) -> Path:
    """The client's table as arrays, by its schema."""
    if data is None:
        raise DeployError("--schema says how a table is encoded, but --data names none; give both")
    out = client.path / "data.npz"
    found = write_encoded(schema, data, out)
    log.info("%s: %d rows of %d numbers, by %s", data, *found.x.shape, schema)
    return out


def node_configuration(client: Client, data: Path | None, policy: Path | None) -> str:
    """What the ClientApp is told by its own node; checked here, before anything is started."""
    policy = (policy or client.path / "policy.yaml").absolute()
    allowed = load_policy(policy)
    ledger = client.path / "ledger.sqlite"
    Ledger(ledger, create=False)
    from fedsim.federation.link import SERVER_KEY

    key = client.path / SERVER_KEY
    if not key.is_file():
        raise DeployError(
            f"{key} is missing, by which this client knows its server's messages; copy {SERVER_KEY} from the server's"
            " folder (a server whose folder is of an earlier fedsim writes it when it starts)"
        )
    values: dict[str, int | str] = {
        "partition-id": client.partition,
        "num-partitions": client.partitions,
        "policy": str(policy),
        "ledger": str(ledger),
        "server-key": str(key.absolute()),
    }
    if data is not None:
        if not data.is_file():
            raise DeployError(f"--data {data} is not a file; give the file that holds this client's data")
        from fedsim.federation.workplace import check_own_file  # seconds, which only a file of one's own needs

        rows = check_own_file(data)
        if rows is not None:
            log.log(*vouched(allowed, rows, data))
        values["data-path"] = str(data.absolute())
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())  # JSON's strings are TOML's


def vouched(policy: Policy, rows: int, data: Path) -> tuple[int, str]:
    """How important it is for the owner, and what: between which numbers of rows the policy lets the file be used."""
    most = "any number" if policy.largest_examples is None else f"{policy.largest_examples:,}"
    held = f"{data} has {rows:,} rows; the policy vouches for {policy.smallest_examples:,} to {most} of them"
    if rows < policy.smallest_examples or (policy.largest_examples is not None and rows > policy.largest_examples):
        return logging.WARNING, f"{held}, so this client will not train; change smallest_examples or largest_examples"
    if policy.largest_examples is None:
        held += "; set largest_examples, too, so that the server can claim a privacy loss where it sees sums only"
    return logging.INFO, held


def supernode_command(client: Client) -> tuple[str, ...]:
    """The SuperNode, as it is started here: Flower's, in a process that ends with it (`supernode`)."""
    return (sys.executable, "-I", "-m", "fedsim.deploy.supernode", *supernode_arguments(client))


def supernode_arguments(client: Client) -> tuple[str, ...]:
    """Connect to the server by TLS, trusting only its authority, and prove to be this client by its key."""
    return (
        f"--superlink={client.address}",
        f"--root-certificates={client.path / 'ca.crt'}",
        f"--auth-supernode-private-key={client.path / 'key'}",
        f"--node-config={client.path / 'node.toml'}",
        "--host=127.0.0.1",
        f"--port={client.runtime_port}",
        "--isolation=process",
        f"--superexec-auth-secret-file={client.path / 'superexec.secret'}",
    )


def superexec_command(client: Client) -> tuple[str, ...]:
    """The SuperExec, which starts the ClientApp for each message."""
    return (*SUPEREXEC, *superexec_arguments(client))


def superexec_arguments(client: Client) -> tuple[str, ...]:
    """It never leaves the machine, so it needs no TLS."""
    return superexec(f"127.0.0.1:{client.runtime_port}", client.path, "--insecure")
