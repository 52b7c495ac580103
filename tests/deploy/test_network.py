# SPDX-License-Identifier: Apache-2.0
"""Clients come back after faults of the network: three clients, a load balancer that breaks on command, and a server.

Back is a client that the server calls online, and that has had two answers of the server since the fault ended.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedsim.deploy import certificates, init
from fedsim.deploy.certificates import Pair
from fedsim.deploy.contact import contact_file, read_contact

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]
FEDSIM = [sys.executable, "-m", "fedsim"]
CLIENTS = (1, 2, 3)
NAME = "fl.test"
WITHIN = 60.0
STATUSES = (
    "import json, sys; from pathlib import Path; from fedsim.deploy.layout import open_server;"
    "from fedsim.deploy.nodes import statuses; print(json.dumps(statuses(open_server(Path(sys.argv[1])))))"
)


@dataclass
class Federation:
    net: Any  # conftest's Network
    folder: Path
    work: Path
    server: subprocess.Popen[bytes]

    def mode(self, mode: str) -> None:
        """Change what the load balancer does, and wait until it does."""
        (self.work / "mode").write_text(mode)
        until = time.monotonic() + 10
        while self._seen()["mode"] != mode:
            assert time.monotonic() < until
            time.sleep(0.1)

    def back(self, since: float, *, seconds: float = WITHIN) -> float:
        """Seconds from then until all clients were back; fails where they are not."""
        answers: dict[int, set[float]] = {number: set() for number in CLIENTS}
        asked, online = 0.0, {"": "nothing asked yet"}
        while True:
            for number, times in answers.items():
                times |= self._answers(number, since)
            there = all(len(times) >= 2 for times in answers.values())
            if there and time.monotonic() - asked > 4:
                asked, online = time.monotonic(), self.statuses()
                if set(online.values()) == {"online"}:
                    return max(sorted(times)[1] for times in answers.values()) - since
            now = time.monotonic()
            assert now < since + seconds, f"{ ({n: len(t) for n, t in answers.items()}) } {online}\n{self.logs()}"
            time.sleep(0.5)

    def statuses(self) -> dict[str, str]:
        """What the server says of its clients."""
        done = self.net.run("server", [sys.executable, "-c", STATUSES, str(self.folder)], 60)
        found: dict[str, str] = json.loads(done.stdout or '{"": "no answer"}')
        return found

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.work.glob("*.log")))

    def wait_for_log(self, machine: str, text: str, times: int, seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while (self.work / f"{machine}.log").read_text().count(text) < times:
            assert time.monotonic() < until, self.logs()
            time.sleep(0.5)

    def start_server(self) -> None:
        command = [*FEDSIM, "deploy", "server", str(self.folder)]
        self.server = self.net.start("server", command, self.work / "server.log")

    def _answers(self, number: int, since: float) -> set[float]:
        """When the SuperNode of a client noted an answer; of one that notes none, when the balancer passed one on."""
        contact = read_contact(contact_file(self.folder / f"client-{number}"))
        if os.environ.get("FEDSIM_TEST_OLD"):
            seen = self._seen()["seen"].get(self.net.addresses[f"client{number}"], 0.0)
        else:
            seen = contact.answered if contact is not None and contact.answered is not None else 0.0
        return {seen} if seen > since else set()

    def _seen(self) -> dict[str, Any]:
        file = self.work / "seen.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"mode": "", "seen": {}}
        return found


@pytest.fixture(scope="module")
def federation(network: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    work = tmp_path_factory.mktemp("network")
    folder = work / "fed"
    with network(["server", *(f"client{number}" for number in CLIENTS), "balancer"]) as net:
        init.create(folder, len(CLIENTS), [NAME, net.addresses["server"]])
        _certificates(folder, work)
        (work / "mode").write_text("pass")
        (work / "clock").write_text("0")
        relay = [sys.executable, str(Path(__file__).with_name("relay.py")), str(work), net.addresses["server"]]
        net.start("balancer", relay, work / "balancer.log")
        found = Federation(net, folder, work, net.start("server", ["true"], work / "server.log"))
        found.start_server()
        for number in CLIENTS:
            net.name(f"client{number}", {NAME: net.addresses["balancer"]})
            command = [*_clock(work, number), *FEDSIM, "deploy", "client", str(folder / f"client-{number}")]
            net.start(f"client{number}", command, work / f"client{number}.log")
        begun = time.monotonic()
        found.wait_for_log("server", "[Fleet.ActivateNode] Activated", len(CLIENTS))
        found.back(begun, seconds=240)
        yield found


def _certificates(folder: Path, work: Path) -> None:
    """The server's own for the balancer, and one by the same authority that has expired."""
    authority = Pair(*((folder / "ca" / name).read_bytes() for name in ("ca.key", "ca.crt")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "SERVER_DAYS", 0)
        patch.setattr(certificates.datetime, "timedelta", _Past)
        expired = certificates.make_server(authority, [NAME])
    for kind, pair in (("expired", expired), ("server", _own(folder))):
        (work / f"{kind}.key").write_bytes(pair.private)
        (work / f"{kind}.crt").write_bytes(pair.public)


class _Past(datetime.timedelta):
    """No days from now is ten minutes ago."""

    def __new__(cls, days: float = 0, hours: float = 0) -> _Past:
        return super().__new__(cls, days=days, hours=hours, minutes=-10 if not hours else 0)


def _own(folder: Path) -> Pair:
    return Pair((folder / "server" / "server.key").read_bytes(), (folder / "server" / "server.crt").read_bytes())


def _clock(work: Path, number: int) -> list[str]:
    """Client 1 has a date that a file moves, where a C compiler is there to make that."""
    compiler, library = shutil.which("cc"), work / "clock.so"
    if number != 1 or compiler is None:
        return []
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return ["env", f"LD_PRELOAD={library}", f"CLOCK_FILE={work / 'clock'}"]


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        ("close", 40),
        pytest.param("refuse", 20, marks=pytest.mark.network),
        pytest.param("reset", 20, marks=pytest.mark.network),
        pytest.param("500", 40, marks=pytest.mark.network),
        pytest.param("502", 20, marks=pytest.mark.network),
        pytest.param("slow", 40, marks=pytest.mark.network),
        pytest.param("expired", 20, marks=pytest.mark.network),
        pytest.param("404", 20, marks=pytest.mark.network),  # the page of another backend
        pytest.param("200", 20, marks=pytest.mark.network),
        pytest.param("garbage", 20, marks=pytest.mark.network),
    ],
)
def test_clients_are_back_within_a_minute_after_a_broken_load_balancer(
    federation: Federation, fault: str, seconds: float, record_property: Any
) -> None:
    federation.mode(fault)
    time.sleep(seconds)  # the fault's duration
    federation.mode("pass")
    taken = federation.back(time.monotonic())
    record_property(f"{fault} for {seconds:g} s", f"back after {taken:.0f} s")
    print(f"\n{fault} for {seconds:g} s: all back after {taken:.0f} s")


@pytest.mark.network
def test_clients_are_back_within_a_minute_after_the_name_could_not_be_resolved(federation: Federation) -> None:
    for number in CLIENTS:
        federation.net.name(f"client{number}", {})
    federation.mode("refuse")  # connections that are open need no name
    federation.mode("pass")
    time.sleep(20)
    for number in CLIENTS:
        federation.net.name(f"client{number}", {NAME: federation.net.addresses["balancer"]})
    print(f"\nno name for 20 s: all back after {federation.back(time.monotonic()):.0f} s")


@pytest.mark.network
@pytest.mark.parametrize("jump", ["+600", "-3600"])
def test_a_client_is_back_within_a_minute_after_its_clock_jumped(federation: Federation, jump: str) -> None:
    if not (federation.work / "clock.so").exists():
        pytest.skip("no C compiler is installed, which a clock of its own for one client takes")
    (federation.work / "clock").write_text(jump)
    federation.wait_for_log("client1", "does not accept the signature", 1 if jump.startswith("+") else 2, 60)
    (federation.work / "clock").write_text("0")
    print(f"\nclock {jump} s: all back after {federation.back(time.monotonic()):.0f} s")


@pytest.mark.network
def test_clients_are_back_within_a_minute_after_the_server_was_restarted(federation: Federation) -> None:
    federation.net.stop(federation.server)
    time.sleep(10)
    ready = (federation.work / "server.log").read_text().count("INFO fedsim: ready")
    federation.start_server()
    federation.wait_for_log("server", "INFO fedsim: ready", ready + 1)
    print(f"\nserver restarted: all back after {federation.back(time.monotonic()):.0f} s")
