# SPDX-License-Identifier: Apache-2.0
"""Three clients with data of their own, on four machines: what the server claims, and whose messages a client answers.

The server's own file has 27 times the rows of a client, so that a claim that follows from it would be far too small.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from own_clients import npz

from fedsim.deploy import init
from fedsim.privacy.ledger import Ledger

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1500)]
FEDSIM = [sys.executable, "-m", "fedsim"]
SCENARIO = """\
data: {{source: npz, path: {data}}}
model: logistic
client: {{batch_size: 30}}
rounds: 2
defence: {{example_dp: {{noise_multiplier: 2.0, clipping_norm: 1.0}}, secure_aggregation: {secure}}}
"""
NODES = """\
import json, sys
from pathlib import Path
from fedsim.deploy.layout import open_server
from fedsim.deploy.nodes import public_key, registered
server = open_server(Path(sys.argv[1]))
known = {node.key: node.node for node in registered(server)}
print(json.dumps({path.stem: str(known[public_key(path)]) for path in server.keys.glob("*.pub")}))
"""


@dataclass
class Federation:
    net: Any  # conftest's Network
    folder: Path
    clients: list[subprocess.Popen[bytes]]

    def scenario(self, name: str, *, secure: bool) -> Path:
        file = self.folder.parent / f"{name}.yaml"
        file.write_text(SCENARIO.format(data=self.folder.parent / "server.npz", secure=str(secure).lower()))
        return file

    def submit(self, file: Path) -> list[str]:
        return [*FEDSIM, "deploy", "submit", str(self.folder), str(file), "--no-report", "--json"]

    def spent(self, run: int) -> list[float]:
        """What each ledger was charged for one run of Flower."""
        from fedsim.privacy.charges import compose

        ledgers = [Ledger(self.folder / f"client-{n}" / "ledger.sqlite", create=False) for n in (1, 2, 3)]
        return [
            compose([charge for charge in each.charges() if charge.run == str(run)], "example", 1e-5).epsilon
            for each in ledgers
        ]

    def log(self, machine: str) -> str:
        return (self.folder.parent / f"{machine}.log").read_text()


@pytest.fixture(scope="module")
def federation(network: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("trust") / "fed"
    with network(["server", "client1", "client2", "client3"]) as net:
        init.create(folder, 3, [net.addresses["server"]])
        npz(folder.parent / "server.npz", 5000, 9)
        net.start("server", [*FEDSIM, "deploy", "server", str(folder)], folder.parent / "server.log")
        found = Federation(net, folder, [])
        for number in (1, 2, 3):
            place = folder / f"client-{number}"
            (place / "policy.yaml").write_text("smallest_examples: 150\nlargest_examples: 150\n")
            data = npz(place / "own.npz", 150, number)
            words = [*FEDSIM, "deploy", "client", str(place), "--data", str(data)]
            found.clients.append(net.start(f"client{number}", words, folder.parent / f"client{number}.log"))
        until = time.monotonic() + 400
        while found.log("server").count("[Fleet.ActivateNode] Activated") < 3:
            assert time.monotonic() < until, found.log("server") + found.log("client1")
            time.sleep(1)
        yield found


def test_under_sums_the_server_claims_what_the_ledgers_were_charged(federation: Federation) -> None:
    done = federation.net.run("server", federation.submit(federation.scenario("secure", secure=True)), 900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{federation.log('client1')[-3000:]}"
    folder = federation.folder / "server" / "runs" / "secure-001"
    (claim,) = json.loads((folder / "claims.json").read_text())
    (run,) = json.loads((folder / "deployed.json").read_text())["runs"]
    spent = federation.spent(run)
    print(f"claimed {claim['epsilon']}, rate {claim['sample_rate']}; ledgers {spent}")
    assert claim["sample_rate"] == pytest.approx(0.2)
    assert claim["epsilon"] == pytest.approx(max(spent), rel=1e-6)
    assert min(spent) == max(spent)


def test_a_message_of_another_client_is_not_answered_and_not_charged(federation: Federation) -> None:
    """With client 3's key and client 1's node id, while a run goes on; Flower alone would take it.

    That a client knows such a message by its signature, too, is in test_federation (a server's own unsigned messages).
    """
    net, folder = federation.net, federation.folder / "server" / "runs" / "plain-001"
    submitted = net.start("server", federation.submit(federation.scenario("plain", secure=False)), Path("/dev/null"))
    nodes = json.loads(net.run("server", [sys.executable, "-c", NODES, str(federation.folder)], 120).stdout)
    until = time.monotonic() + 400
    while not (folder / "asked.jsonl").is_file():  # the first request is about to leave
        assert submitted.poll() is None
        assert time.monotonic() < until
        time.sleep(0.2)
    (run,) = json.loads((folder / "deployed.json").read_text())["runs"]
    own = federation.folder / "client-3"
    words = [f"{net.addresses['server']}:8443", own / "ca.crt", own / "key", nodes["client-3"], nodes["client-1"]]
    script = Path(__file__).with_name("injector.py")
    done = net.run("client3", [sys.executable, str(script), *map(str, words), str(run), str(folder)], 300)
    assert done.stdout.count("refused: 400") == 2, done.stdout + done.stderr
    assert submitted.wait(900) == 0
    ledgers = [Ledger(federation.folder / f"client-{n}" / "ledger.sqlite", create=False) for n in (1, 2, 3)]
    rounds = [[charge.round for charge in each.charges() if charge.run == str(run)] for each in ledgers]
    print(f"charged for the rounds {rounds}, {done.stdout.strip()}")
    assert rounds == [[1, 2]] * 3
    (claim,) = json.loads((folder / "claims.json").read_text())
    assert claim["epsilon"] == pytest.approx(max(federation.spent(run)), rel=1e-6)


def test_no_token_is_in_a_process_list(federation: Federation) -> None:
    """Of the processes that a machine has while a run goes on."""
    net = federation.net
    submitted = net.start("server", federation.submit(federation.scenario("listed", secure=False)), Path("/dev/null"))
    seen: set[str] = set()
    until = time.monotonic() + 600
    while submitted.poll() is None and time.monotonic() < until:
        for machine in ("server", "client1"):
            for pid in net.pids(machine):
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                except OSError:
                    continue
                seen |= {word for word in words if word.startswith("--token")}
        time.sleep(0.1)
    assert submitted.poll() == 0
    assert seen == {"--token-file"}
