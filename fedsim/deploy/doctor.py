# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a deployment folder and the machine that it is on, and what to do about each."""

from __future__ import annotations

import ipaddress
import json
import shutil
import socket
import ssl
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from fedsim.deploy import certificates
from fedsim.deploy.admission import CLOCK, ask
from fedsim.deploy.contact import contact_file, read_contact
from fedsim.deploy.layout import Client, Server, open_client, open_server
from fedsim.deploy.processes import find, listens
from fedsim.deploy.server import stream_module
from fedsim.errors import FedsimError

PRIVATE = ("ca/ca.key", "server.key", "signing.key", "superexec.secret", "key", "ledger.sqlite")
_LISTENING = "0A"  # in /proc/net/tcp


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    status: Literal["good", "doubtful", "wrong"]
    what: str
    said: str
    remedy: str = ""


def examine(folder: Path) -> list[Finding]:
    """Everything that can be found out about a server's or a client's folder, on this machine."""
    found = [*_versions(), *_disk(folder)]
    if (folder / "client.toml").is_file():
        client = open_client(folder)
        return [*found, *_private_files(folder), *_authority(folder), *_client(client)]
    server = open_server(folder)
    offline = _private_files(folder) if (folder / "ca").is_dir() else iter(())
    return [*found, *offline, *_private_files(server.path), *_authority(server.path), *_server(server)]


def show(findings: list[Finding], as_json: bool) -> None:
    """Print them, one to a line, with the remedy below."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
        return
    for finding in findings:
        print(f"{finding.status:8}  {finding.what}: {finding.said}")
        if finding.remedy:
            print(f"{'':10}-> {finding.remedy}")


# --- the machine ----------------------------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    for package in ("fedsim", "flwr", "torch"):
        try:
            yield Finding("good", package, f"{version(package)} (Python {sys.version.split()[0]})")
        except PackageNotFoundError:
            yield Finding("wrong", package, "is not installed", f"install {package} in {sys.prefix}")


def _disk(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 2**30
    status: Literal["good", "doubtful", "wrong"] = "good" if free > 5 else "doubtful" if free > 1 else "wrong"
    remedy = "" if status == "good" else "free some: checkpoints, transcripts and Flower's database need gigabytes"
    yield Finding(status, "disk", f"{free:.1f} GiB free", remedy)


def _private_files(folder: Path) -> Iterator[Finding]:
    for name in PRIVATE:
        path = folder / name
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            mode = f"{stat.S_IMODE(path.stat().st_mode):o}"
            yield Finding(
                "wrong", str(path), f"others may read it (mode {mode})", f"`chmod 600 {path}`; was it copied?"
            )
        elif path.exists():
            yield Finding("good", str(path), "only its owner may read it")


def _authority(folder: Path) -> Iterator[Finding]:
    file = folder / "ca.crt"
    try:
        days = certificates.days_left(file.read_bytes())
    except (OSError, FedsimError) as error:
        yield Finding("wrong", str(file), f"cannot be read ({error})", "copy it from the server's folder")
        return
    yield _expiry(str(file), days, "make a new folder: every client needs the new authority")


def _expiry(what: str, days: float, remedy: str) -> Finding:
    if days < 0:
        return Finding("wrong", what, f"expired {-days:.0f} days ago", remedy)
    return Finding("good" if days > 30 else "doubtful", what, f"valid for {days:.0f} days", "" if days > 30 else remedy)


# --- a client -------------------------------------------------------------------------------------------------------


def _client(client: Client) -> Iterator[Finding]:
    from fedsim.federation.policy import load_policy
    from fedsim.privacy.ledger import Ledger

    for foreign in ("ca.key", "ca/ca.key", "server.key", "signing.key"):
        if (client.path / foreign).exists():
            yield Finding("wrong", foreign, "does not belong on a client's machine", "delete it here")
    try:
        policy = load_policy(client.path / "policy.yaml")
        yield Finding("good", "policy.yaml", f"protects each {policy.unit}")
        spent = Ledger(client.path / "ledger.sqlite", create=False).spent(policy.dataset, policy.unit, policy.delta)
        left = spent.epsilon < policy.largest_epsilon
        yield Finding(
            "good" if left else "doubtful",
            "ledger",
            f"{spent} of at most {policy.largest_epsilon:g}",
            "" if left else "nothing more is released; only the owner of the data may raise largest_epsilon",
        )
    except FedsimError as error:
        yield Finding("wrong", "policy and ledger", str(error), "mend it: the client does not start without")
    yield from _reach(client.host, client.port, client.path / "ca.crt", f"{client.host}:{client.port}")
    yield from _admission(client)
    yield _process(client)


def _admission(client: Client) -> Iterator[Finding]:
    """Whether the server accepts this client's key now."""
    remedies = {
        "unknown": "ask the server's operator: was it revoked? `fedsim deploy new-key` there issues a new one",
        "refused": "set both clocks by NTP (`timedatectl set-ntp true`), and see that `key` is this client's own",
        "unreachable": "mend what is said above of the way to the server, and ask again",
    }
    try:
        answer = ask(client)
    except FedsimError as error:
        yield Finding("wrong", "key", str(error), "bring the file back")
        return
    remedy = remedies.get(answer.status, "")
    yield Finding("wrong" if remedy else "good", "key", answer.said, remedy)


def _process(client: Client) -> Finding:
    """Whether the client that runs here, if one does, has answers from the server."""
    contact, start = read_contact(contact_file(client.path)), f"`fedsim deploy client {client.path}`"
    if contact is None or not listens("127.0.0.1", client.runtime_port):
        return Finding("doubtful", "SuperNode", "does not run here", start)
    now = time.monotonic()
    good = contact.healthy(now)
    remedy = "" if good else "it tries again by itself; if that lasts, see above and its log"
    return Finding("good" if good else "wrong", "SuperNode", contact.said(now), remedy)


def _reach(host: str, port: int, authority: Path, what: str) -> Iterator[Finding]:
    """Connect as a client would: by TLS, trusting the authority alone; and see that the control is not passed on."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        remedy = "start the server; open its port to this machine; see that the name resolves to it"
        yield Finding("wrong", what, f"cannot be reached ({error})", remedy)
        return
    try:
        context = ssl.create_default_context(cafile=str(authority))
        seconds, status = _ask(host, port, context)
    except ssl.SSLCertVerificationError as error:
        remedy = f"`fedsim deploy renew DIR --host {host}` on the server, or take ca.crt from the right server"
        yield Finding("wrong", what, f"its certificate is not accepted ({error.verify_message})", remedy)
        return
    except (OSError, ValueError, HTTPException) as error:
        yield Finding("wrong", what, f"does not speak TLS as it should ({error})", "is this fedsim's proxy?")
        return
    yield Finding("good", what, "reached, and its certificate is accepted")
    if status != 404:
        yield Finding("wrong", "control", f"is passed on to the outside (status {status})", "use fedsim's nginx.conf")
    else:
        yield Finding("good", "control", "is not reachable from outside")
    status_of_clock: Literal["good", "wrong"] = "good" if abs(seconds) <= CLOCK else "wrong"
    remedy = "" if abs(seconds) <= CLOCK else "set both clocks by NTP (`timedatectl set-ntp true`)"
    yield Finding(
        status_of_clock, "clock", f"{abs(seconds):.0f} s {'behind' if seconds > 0 else 'ahead of'} the server", remedy
    )


def _ask(host: str, port: int, context: ssl.SSLContext) -> tuple[float, int]:
    """How far this clock is behind the server's, and what the server says to a request for its control."""
    connection = HTTPSConnection(host, port, timeout=10, context=context)
    try:
        connection.request("POST", "/v1/control/list-runs", b"", {"Content-Type": "application/protobuf"})
        answer = connection.getresponse()
        theirs = parsedate_to_datetime(answer.headers["Date"]).timestamp()
        return theirs - time.time(), answer.status
    finally:
        connection.close()


# --- a server -------------------------------------------------------------------------------------------------------


def _server(server: Server) -> Iterator[Finding]:
    try:
        stream_module()
        yield Finding("good", "nginx", find("nginx", "install it"))
    except FedsimError as error:
        yield Finding("wrong", "nginx", str(error), "`apt-get install nginx libnginx-mod-stream`")
    yield from _certificate(server)
    yield from _numbers(server)
    up = listens("127.0.0.1", server.superlink_port)
    start = f"`fedsim deploy server {server.path.parent}`"
    yield Finding("good" if up else "wrong", "SuperLink", "runs" if up else "does not run here", "" if up else start)
    for address in _open_addresses(server.superlink_port):
        yield Finding(
            "wrong",
            "control",
            f"port {server.superlink_port} is open at {address}, where anybody can start runs",
            "let Flower listen on 127.0.0.1 only, as `fedsim deploy server` does",
        )
    if up:
        yield from _reach("127.0.0.1", server.port, server.path / "ca.crt", f"proxy, port {server.port}")
        yield from _fleet(server)


def _certificate(server: Server) -> Iterator[Finding]:
    file = server.path / "server.crt"
    try:
        certificate, authority = file.read_bytes(), (server.path / "ca.crt").read_bytes()
        renew = f"`fedsim deploy renew {server.path.parent}`, and restart the server"
        yield _expiry(str(file), certificates.days_left(certificate), renew)
        names = certificates.names_of(certificate)
        good = server.host in names and certificates.signed_by(certificate, authority)
        yield Finding("good" if good else "wrong", "certificate", f"for {', '.join(names)}", "" if good else renew)
    except (OSError, FedsimError) as error:
        yield Finding("wrong", str(file), f"cannot be read ({error})", "restore it, or renew it")


def _numbers(server: Server) -> Iterator[Finding]:
    """Whether every key that may take part has a number."""
    from fedsim.deploy.nodes import public_key
    from fedsim.federation.link import FLEET, read_fleet

    try:
        fleet = read_fleet(server.path / FLEET)
        without = [path.stem for path in sorted(server.keys.glob("*.pub")) if public_key(path) not in fleet]
    except FedsimError as error:
        yield Finding("wrong", FLEET, str(error), "restore it: without it a client could claim another's number")
        return
    said = f"{', '.join(without)} has no number there, and is never asked" if without else "says which client a key is"
    yield Finding("doubtful" if without else "good", FLEET, said, "add it as the others are" if without else "")


def _fleet(server: Server) -> Iterator[Finding]:
    from fedsim.deploy.nodes import statuses

    try:
        for name, status in statuses(server).items():
            good = status in ("online", "revoked")
            remedy = f"on its machine: `fedsim deploy doctor {name}`"
            yield Finding("good" if good else "doubtful", name, status, "" if good else remedy)
    except FedsimError as error:
        yield Finding("wrong", "clients", str(error), "restart the server")


def _open_addresses(port: int) -> list[str]:
    """The addresses beside loopback at which something listens on a port of this machine; nothing is connected to."""
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            (local, _, state), number = line.split()[1:4], int(line.split()[1].rpartition(":")[2], 16)
            if state == _LISTENING and number == port:
                found.add(_address(local.rpartition(":")[0]))
    return sorted(str(address) for address in found if not address.is_loopback)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as the kernel prints it: words of 32 bits in the machine's byte order."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))
