# SPDX-License-Identifier: Apache-2.0
"""Machines of a test: network namespaces around a switch, which nothing outside of them reaches."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import pytest

from fedsim.deploy.server import stream_module
from fedsim.errors import DeployError

_CONFIGURATION = Path("/etc/netns")
"""What `ip netns exec` puts over /etc."""


class Network:
    """One namespace for each name, at 10.77.0.1, 10.77.0.2, ... in their order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
        self._prefix = f"fedsim{os.getpid()}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            self.stop(process)
        self._remove()

    def run(self, machine: str, command: Sequence[str], seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine and wait for it."""
        return subprocess.run(
            [*self._inside(machine), *command], capture_output=True, text=True, timeout=seconds, check=False
        )

    def start(self, machine: str, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a command on a machine; it is ended with the network."""
        with output.open("ab") as file:
            process = subprocess.Popen([*self._inside(machine), *command], stdout=file, stderr=subprocess.STDOUT)
        self._processes.append(process)
        return process

    def stop(self, process: subprocess.Popen[bytes], seconds: float = 40) -> None:
        """End a process that was started here, and what it started."""
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def name(self, machine: str, hosts: dict[str, str]) -> None:
        """Let a machine know these names and no others, from now on; its name server answers nothing."""
        folder = _CONFIGURATION / self._namespace(machine)
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in hosts.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")  # in place: it is mounted by its inode
        (folder / "resolv.conf").write_text("nameserver 10.77.0.250\n")

    def pids(self, machine: str) -> list[str]:
        """The processes of a machine."""
        return self._ip("netns", "pids", self._namespace(machine), check=False).split()

    def kill(self, machine: str) -> None:
        """End whatever still runs in a machine of this test, by its process ids."""
        for pid in self.pids(machine):
            subprocess.run(["kill", "-9", pid], check=False, capture_output=True)

    def _namespace(self, machine: str) -> str:
        return f"{self._prefix}-{machine}"

    def _inside(self, machine: str) -> list[str]:
        return ["ip", "netns", "exec", self._namespace(machine)]

    def _build(self) -> None:
        switch = self._namespace("switch")
        self._ip("netns", "add", switch)
        self._ip("-n", switch, "link", "add", "br0", "type", "bridge")
        self._ip("-n", switch, "link", "set", "br0", "up")
        for machine, address in self.addresses.items():
            space, port = self._namespace(machine), f"p-{machine}"[:15]
            self._ip("netns", "add", space)
            self._ip("-n", space, "link", "set", "lo", "up")
            self._ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("-n", switch, "link", "set", port, "master", "br0", "up")
            self._ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")

    def _remove(self) -> None:
        for machine in [*self.addresses, "switch"]:
            self.kill(machine)
            self._ip("netns", "delete", self._namespace(machine), check=False)
            shutil.rmtree(_CONFIGURATION / self._namespace(machine), ignore_errors=True)

    def _ip(self, *arguments: str, check: bool = True) -> str:
        return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True).stdout


def why_not() -> str | None:
    """Why this machine cannot have such networks; None if it can."""
    missing = [name for name in ("ip", "nginx") if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        return f"{' and '.join(missing)} not installed; `make test-deploy` installs what it needs"
    try:
        stream_module()
    except DeployError as error:
        return f"{error}; `make test-deploy` installs what it needs"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Network(["trial"]):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are not allowed here: {getattr(error, 'stderr', '') or error}"


@pytest.fixture(scope="session")
def network() -> Callable[[Sequence[str]], Network]:
    """Makes networks; skips with the reason where they cannot be."""
    if reason := why_not():
        pytest.skip(reason)
    return Network
