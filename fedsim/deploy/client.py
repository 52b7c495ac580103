# SPDX-License-Identifier: Apache-2.0
"""A client's processes: the SuperNode, which talks to the server, and its SuperExec, which runs the ClientApp.

The client only ever calls out; its runtime listens on loopback. Policy, ledger and data are named in the node's own
configuration, which no message from the server can change, and code never comes from the server: whatever bundle
Flower delivers is left unopened (`clientapp`), and nothing is installed at run time.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from fedsim.deploy.clientapp import write_launchers
from fedsim.deploy.encoding import write_encoded
from fedsim.deploy.layout import Client, replace_file
from fedsim.deploy.processes import SUPEREXEC, Program, environment, find, listens, superexec, together
from fedsim.errors import DeployError
from fedsim.federation.policy import Policy, load_policy
from fedsim.privacy.ledger import Ledger

log = logging.getLogger("fedsim")
SECONDS = 120.0
PAUSES = (5.0, 60.0)
"""Seconds before the first restart, and at most; each pause is twice the one before."""


def join(
    client: Client, data: Path | None, policy: Path | None, schema: Path | None = None, *, restart: bool = True
) -> None:
    """Take part until told to stop. A SuperNode that ends is started again, after a pause.

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
    pause, longest = PAUSES
    while True:
        begun = time.monotonic()
        name, code = _run(client)
        if not restart:
            raise DeployError(f"{name} ended with exit code {code}; what it printed says why")
        pause = PAUSES[0] if time.monotonic() - begun > 300 else pause
        log.warning(
            "%s ended with exit code %d; a server does not take a client whose key it does not know, that was revoked,"
            " or that was connected less than a minute ago; trying again in %g s", name, code, pause
        )  # fmt: skip
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _run(client: Client) -> tuple[str, int]:
    """Run the processes until one ends: its name and exit code."""
    client.flower.mkdir(mode=0o700, exist_ok=True)
    with together(environment(client.flower, write_launchers(client.path / "bin"))) as processes:
        processes.start(Program("SuperNode", supernode_command(client), client.path))
        try:
            processes.wait_for(lambda: listens("127.0.0.1", client.runtime_port), SECONDS, "SuperNode")
        except DeployError:
            if ended := processes.ended():
                return ended
            raise
        processes.start(Program("SuperExec", superexec_command(client), client.path))
        return processes.watch()


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
    """The SuperNode, as it is started here."""
    return (find("flower-supernode", "install fedsim in this environment"), *supernode_arguments(client))


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
