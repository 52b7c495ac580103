# SPDX-License-Identifier: Apache-2.0
"""One server and three clients on four machines (network namespaces), over TLS, with keys and the proxy; and outsiders.

The tests run in their order, on one federation: starting Flower's processes takes most of the time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedsim.deploy import certificates, init
from fedsim.privacy.ledger import Ledger

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]
FEDSIM = [sys.executable, "-m", "fedsim"]
CLIENTS = (1, 2, 3)
SCENARIO = """\
data: digits
model: {name: mlp, hidden: [16]}
client: {epochs: 1, batch_size: 64, learning_rate: 0.5}
cohort: {population: 3}
rounds: 2
defence: {example_dp: {noise_multiplier: 1.2, clipping_norm: 1.0}}
seed: 5
"""


@dataclass
class Federation:
    net: Any  # conftest's Network
    folder: Path
    logs: Path
    server: subprocess.Popen[bytes]
    clients: dict[int, subprocess.Popen[bytes]]

    def fedsim(self, *words: str, seconds: float = 400) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.net.run("server", [*FEDSIM, *words], seconds)
        return done

    def statuses(self) -> dict[str, str]:
        """What the server says of its clients."""
        code = (
            "import json, sys; from pathlib import Path; from fedsim.deploy.layout import open_server;"
            "from fedsim.deploy.nodes import registered, public_key; s = open_server(Path(sys.argv[1]));"
            "k = {n.key: n for n in registered(s)};"
            "print(json.dumps({p.stem: [str(k[public_key(p)].node), k[public_key(p)].status]"
            " for p in s.keys.glob('*.pub') if public_key(p) in k}))"
        )
        done = self.net.run("server", [sys.executable, "-c", code, str(self.folder)], 120)
        return {name: f"{status} {node}" for name, (node, status) in json.loads(done.stdout or "{}").items()}

    def wait_online(self, names: set[str], seconds: float = 240) -> dict[str, str]:
        """Wait for clients; each question costs the start of a process, so it is not asked often."""
        until = time.monotonic() + seconds
        while True:
            found = self.statuses()
            if {name for name, status in found.items() if status.startswith("online")} >= names:
                return found
            assert time.monotonic() < until, f"{found}\n{self.log('server')}\n{self.log('client1')}"
            time.sleep(5)

    def wait_for_log(self, text: str, times: int, seconds: float = 240) -> None:
        """Wait until the server has said something so many times."""
        until = time.monotonic() + seconds
        while (self.logs / "server.log").read_text().count(text) < times:
            assert self.server.poll() is None, self.log("server")
            assert time.monotonic() < until, f"{self.log('server')}\n{self.log('client1')}"
            time.sleep(0.5)

    def memory(self) -> int:
        """Bytes that the SuperLink has in memory."""
        for pid in self.net.pids("server"):
            if b"fedsim.deploy.superlink" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                assert found is not None
                return 1024 * int(found[1])
        raise AssertionError("no SuperLink runs")

    def log(self, machine: str) -> str:
        return (self.logs / f"{machine}.log").read_text()[-3000:]


@pytest.fixture(scope="module")
def federation(network: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("deployment") / "fed"
    machines = ["server", *(f"client{number}" for number in CLIENTS), "outsider"]
    with network(machines) as net:
        init.create(folder, len(CLIENTS), [net.addresses["server"]])
        server = net.start("server", [*FEDSIM, "deploy", "server", str(folder)], folder.parent / "server.log")
        clients = {
            number: net.start(
                f"client{number}",
                [*FEDSIM, "deploy", "client", str(folder / f"client-{number}")],
                folder.parent / f"client{number}.log",
            )
            for number in CLIENTS
        }
        found = Federation(net, folder, folder.parent, server, clients)
        found.wait_for_log("INFO fedsim: ready", 1)
        found.wait_for_log("[Fleet.ActivateNode] Activated", len(CLIENTS))
        yield found


def test_a_private_scenario_runs_to_its_end_and_is_charged(federation: Federation, tmp_path: Path) -> None:
    scenario = tmp_path / "private.yaml"
    scenario.write_text(SCENARIO.replace("[16]", "[1000]"))  # arrays that fit no buffer of the proxy
    done = federation.fedsim("deploy", "submit", str(federation.folder), str(scenario), "--no-report", "--json")
    assert done.returncode == 0, (
        f"{done.stdout}\n{done.stderr}\n{federation.log('server')}\n{federation.log('client1')}"
    )
    run = federation.folder / "server" / "runs" / "private-001"
    assert (run / "model.safetensors").is_file()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["clients"] for line in metrics if line["round"]] == [3, 3]
    assert not any(line["failures"] for line in metrics)
    for number in CLIENTS:
        ledger = Ledger(federation.folder / f"client-{number}" / "ledger.sqlite", create=False)
        assert [charge.round for charge in ledger.charges()] == [1, 2]
        assert 0 < ledger.epsilon("data", "example", 1e-5) < 8


def test_what_the_policy_does_not_allow_is_refused_and_the_operator_is_told(
    federation: Federation, tmp_path: Path
) -> None:
    scenario = tmp_path / "weak.yaml"
    scenario.write_text(SCENARIO.replace("noise_multiplier: 1.2", "noise_multiplier: 0.1"))
    done = federation.fedsim(
        "deploy",
        "submit",
        str(federation.folder),
        str(scenario),
        "--set",
        "rounds=1",
        "--set",
        "cohort.retries=0",
        "--no-report",
    )
    assert done.returncode != 0
    told = f"{done.stdout}{done.stderr}{_run_texts(federation.folder / 'server' / 'runs' / 'weak-001')}"
    assert "the noise multiplier for the unit example is 0.1" in told, told
    for number in CLIENTS:  # nothing was computed, so nothing was charged
        assert len(Ledger(federation.folder / f"client-{number}" / "ledger.sqlite").charges()) == 2


def _run_texts(run: Path) -> str:
    return "".join(path.read_text() for path in run.rglob("*.json*") if path.is_file())


def test_secure_aggregation_gives_sums_only(federation: Federation, tmp_path: Path) -> None:
    scenario = tmp_path / "secure.yaml"
    scenario.write_text(SCENARIO.replace("defence: {", "defence: {secure_aggregation: true, "))
    done = federation.fedsim(
        "deploy", "submit", str(federation.folder), str(scenario), "--no-report", "--json", seconds=800
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{federation.log('client1')}"
    lines = _received(federation.folder / "server" / "runs" / "secure-001")
    assert [(line["kind"], line["clients"]) for line in lines] == [("sum", 3), ("sum", 3)]
    for number in CLIENTS:
        assert len(Ledger(federation.folder / f"client-{number}" / "ledger.sqlite").charges()) == 4


def _received(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "transcript" / "messages.jsonl").read_text().splitlines()]
    return [line for line in lines if line["direction"] == "received"]


def test_a_server_cannot_run_its_own_code_on_a_client(federation: Federation, tmp_path: Path) -> None:
    """By a kind of app for which Flower starts another program than for a ClientApp; on the server itself it runs."""
    script = Path(__file__).with_name("hostile_server.py")
    net = federation.net
    done = net.run("server", [sys.executable, str(script), str(federation.folder), str(tmp_path)], 400)
    ran = {path.name for path in tmp_path.iterdir()}
    spaces = {name: net.run(name, ["readlink", "/proc/self/ns/net"]).stdout for name in net.addresses}
    assert {name for name, space in spaces.items() if space.strip("net:[]\n") in ran} == {"server"}, (
        done.stdout + done.stderr
    )
    # What has answered is fedsim's own ClientApp, which answers only what is signed; without an answer a SuperNode
    # waits for ever.
    assert (tmp_path / "replies").read_text().count("not from this client's server: it is not signed") == 3


def test_the_doctors_find_nothing_wrong(federation: Federation) -> None:
    server = federation.fedsim("deploy", "doctor", str(federation.folder))
    assert server.returncode == 0, server.stdout
    assert "control: is not reachable from outside" in server.stdout
    assert "client-1: online" in server.stdout
    client = federation.net.run("client1", [*FEDSIM, "deploy", "doctor", str(federation.folder / "client-1")], 120)
    assert client.returncode == 0, client.stdout
    assert "reached, and its certificate is accepted" in client.stdout


@pytest.mark.parametrize(("kind", "count"), [("silent", 2100), ("half a header", 2100), ("a body", 64)])
def test_one_address_without_a_key_does_not_stop_the_federation(federation: Federation, kind: str, count: int) -> None:
    """While an outsider holds what it can, a client that connects anew is served, and nothing piles up."""
    net, before = federation.net, federation.memory()
    script, output = Path(__file__).with_name("flood.py"), federation.logs / "flood.log"
    output.write_text("")
    command = [sys.executable, str(script), net.addresses["server"], kind, str(count), "30"]
    flood = net.start("outsider", command, output)
    time.sleep(15)  # in the middle of it
    peak = federation.memory()
    doctor = net.run("client1", [*FEDSIM, "deploy", "doctor", str(federation.folder / "client-1")], 120)
    assert flood.wait(60) == 0, output.read_text()
    found = json.loads(output.read_text().splitlines()[-1])
    print(f"\n{kind}: {found}, SuperLink {before / 2**20:.0f} -> {peak / 2**20:.0f} MB")
    assert doctor.returncode == 0, doctor.stdout
    assert "key: the server accepts this client's key" in doctor.stdout
    assert "SuperNode: the server last answered" in doctor.stdout
    assert peak - before < 64 * 2**20
    assert found["connected"] > 0  # else nothing was tried
    assert found["held"] <= 140  # of 128, counted from the accept, and some that are just being closed


def test_an_outsider_can_do_nothing_and_neither_can_a_revoked_client(federation: Federation, tmp_path: Path) -> None:
    before = federation.statuses()
    revoked = federation.fedsim("deploy", "revoke", str(federation.folder), "client-2")
    assert revoked.returncode == 0, revoked.stderr
    assert "client-2 is shut out\n" in revoked.stdout
    found = _outsider(federation, tmp_path, before)
    control = found.pop("CONTROL: a client's key")
    assert control.startswith("OPEN"), control  # else nothing of this would mean anything
    assert {name: said for name, said in found.items() if said.startswith("OPEN")} == {}
    for name in ("list runs", "start a run", "stop a run", "register a key", "take over the ServerApp"):
        assert found[name].startswith("404"), found[name]
    assert "CERTIFICATE_VERIFY_FAILED" in found["another authority"]
    assert found["a body of 17 MB"].endswith("status 413")
    assert found["port 8000"].startswith("ConnectionRefused")
    assert set(federation.statuses()) == {"client-1", "client-3"}
    told = federation.net.run("client2", [*FEDSIM, "deploy", "doctor", str(federation.folder / "client-2")], 120)
    assert told.returncode == 1
    assert "key: the server does not know this client's key, or has revoked it" in told.stdout


def test_an_impostor_of_the_server_is_not_believed(federation: Federation) -> None:
    """A client that is led to another server, with a certificate of another authority, does not talk to it."""
    trusting = federation.folder / "client-1" / "ca.crt"
    original = trusting.read_bytes()
    trusting.write_bytes(certificates.make_authority().public)
    try:
        told = federation.net.run("client1", [*FEDSIM, "deploy", "doctor", str(federation.folder / "client-1")], 120)
    finally:
        trusting.write_bytes(original)
    assert told.returncode == 1
    assert "its certificate is not accepted" in told.stdout


def test_revoked_stays_revoked_and_the_others_come_back_after_a_restart(federation: Federation, tmp_path: Path) -> None:
    net = federation.net
    net.stop(federation.server)
    command = [*FEDSIM, "deploy", "server", str(federation.folder)]
    federation.server = net.start("server", command, federation.logs / "server.log")
    federation.wait_for_log("INFO fedsim: ready", 2)
    found = federation.wait_online({"client-1", "client-3"})
    assert set(found) == {"client-1", "client-3"}
    again = _outsider(federation, tmp_path, found)
    assert not again["revoked key, activate"].startswith("OPEN")
    assert not again["revoked key, messages"].startswith("OPEN")


def test_a_client_that_claims_the_number_of_another_is_refused_by_its_key(
    federation: Federation, tmp_path: Path
) -> None:
    """Client 3, whose number is 2, says that it is number 0; client 2 was revoked before."""
    net, folder = federation.net, federation.folder / "client-3"
    before = len(Ledger(folder / "ledger.sqlite").charges())
    net.stop(federation.clients[3])
    file = folder / "client.toml"
    file.write_text(file.read_text().replace("partition_id = 2", "partition_id = 0"))
    again = net.start("client3", [*FEDSIM, "deploy", "client", str(folder)], federation.logs / "client3.log")
    federation.clients[3] = again
    federation.wait_online({"client-1", "client-3"})
    scenario = tmp_path / "claims.yaml"
    scenario.write_text(SCENARIO)
    words = ("deploy", "submit", str(federation.folder), str(scenario), "--set", "rounds=1", "--no-report", "--json")
    done = federation.fedsim(*words)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = _received(federation.folder / "server" / "runs" / "claims-001")
    assert [line["client"] for line in lines if line["kind"] == "update"] == [0]
    told = [line["reason"] for line in lines if line.get("client") == 2]
    assert any("says that it is client-1, but its key is that of client-3" in reason for reason in told), told
    assert len(Ledger(folder / "ledger.sqlite").charges()) == before  # it was asked for nothing


def test_a_client_can_neither_fill_the_server_nor_order_others_about(federation: Federation, tmp_path: Path) -> None:
    """With client 3's own key, 300 MB where the model has 5 kB; client 2 was revoked before."""
    net, before = federation.net, federation.memory()
    other = federation.statuses()["client-1"].split()[1]
    net.stop(federation.clients[3])
    folder, output = federation.folder / "client-3", federation.logs / "hostile.log"
    output.write_text("")
    address = f"{net.addresses['server']}:8443"
    script = [sys.executable, str(Path(__file__).with_name("hostile_client.py"))]
    hostile = net.start("client3", [*script, address, folder / "ca.crt", folder / "key", "300", other], output)
    until = time.monotonic() + 120
    while "connected" not in output.read_text():  # before the run is there, which does not wait for it for long
        assert time.monotonic() < until, output.read_text()
        time.sleep(0.5)
    scenario = tmp_path / "filled.yaml"
    scenario.write_text(SCENARIO)
    words = ("deploy", "submit", str(federation.folder), str(scenario), "--set", "rounds=1", "--no-report", "--json")
    done = federation.fedsim(*words, seconds=800)
    assert hostile.wait(60) == 0, output.read_text()
    found = json.loads(output.read_text().splitlines()[-1])
    size = sum(file.stat().st_size for file in (federation.folder / "server").glob("state.db*"))
    after = federation.memory()
    print(f"\n{found}; SuperLink {before / 2**20:.0f} -> {after / 2**20:.0f} MB, database {size / 2**20:.0f} MB")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"  # client 1 is enough
    assert found["order another client"].startswith("400 "), found
    assert found["a huge reply"].startswith("413 "), found
    assert "client-3 pushed a reply of more than" in (federation.logs / "server.log").read_text()
    assert after - before < 300 * 2**20
    assert size < 80 * 2**20


def test_a_revoked_client_comes_back_by_a_new_key_and_another_one_is_added(federation: Federation) -> None:
    """While the server runs; client 2 has asked all the time, and needs no restart."""
    old = (federation.folder / "client-2" / "key").read_bytes()
    issued = federation.fedsim("deploy", "new-key", str(federation.folder), "client-2")
    assert "restart client-2\n" in issued.stdout, issued.stdout + issued.stderr  # the server knew of it at once
    assert (federation.folder / "client-2" / "key").read_bytes() != old
    added = federation.fedsim("deploy", "add-client", str(federation.folder))
    assert "delete it here\n" in added.stdout, added.stdout + added.stderr
    command = [*FEDSIM, "deploy", "client", str(federation.folder / "client-4")]
    federation.net.start("outsider", command, federation.logs / "client4.log")
    assert set(federation.wait_online({"client-1", "client-2", "client-4"})) >= {"client-1", "client-2", "client-4"}


def _outsider(federation: Federation, tmp_path: Path, statuses: dict[str, str]) -> dict[str, str]:
    """All that an outsider tries, with its own authority, and the keys of client 2 (revoked) and 1 (to compare)."""
    (tmp_path / "foreign.crt").write_bytes(certificates.make_authority("somebody").public)
    folder = federation.folder
    node, other = (statuses[name].split()[1] for name in ("client-1", "client-3"))
    script = Path(__file__).with_name("outsider.py")
    arguments = [federation.net.addresses["server"], "8443", folder / "client-1" / "ca.crt", tmp_path / "foreign.crt"]
    arguments += [folder / "client-1" / "key", folder / "client-2" / "key", node, other]
    done = federation.net.run("outsider", [sys.executable, str(script), *map(str, arguments)], 120)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found
