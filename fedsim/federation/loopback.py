# SPDX-License-Identifier: Apache-2.0
"""A deployed federation on this machine: a SuperLink and its SuperNodes as child processes, on free ports.

For tests, benchmarks and trying things out. It listens on 127.0.0.1 only, without TLS: a real one is made by
`fedsim deploy init`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import httpx

from fedsim.errors import DeployError
from fedsim.scenario import EngineSection


class Loopback:
    """A SuperLink with `clients` SuperNodes; a context, at the end of which all of them are gone."""

    def __init__(self, folder: Path, clients: int, *, node_config: dict[int, str] | None = None) -> None:
        self.folder, self.clients, self.node_config = folder, clients, node_config or {}
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Loopback:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start_link()
        for client in range(self.clients):
            self.start_node(client)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for name in sorted(self.processes, reverse=True):  # nodes before the link, so that they can say goodbye
            self.end(name)

    def engine(self) -> EngineSection:
        """The engine section of a scenario that runs here."""
        return EngineSection(kind="deploy", address=self.address)

    def start_link(self) -> None:
        """Start the SuperLink, with its state in a file so that it survives."""
        self._start(
            "link",
            *("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--database", str(self.folder / "state.db"), "--disable-runtime-dependency-installation"),
        )
        for _ in range(300):
            try:
                if httpx.get(f"http://{self.address}/health", timeout=5).status_code < 500:
                    return
            except httpx.HTTPError:
                if self.processes["link"].poll() is not None:
                    break
            time.sleep(0.2)
        raise DeployError(f"the SuperLink did not start; see {self.folder / 'link.log'}")

    def start_node(self, client: int) -> None:
        """Start the SuperNode of a client."""
        given = self.node_config.get(client, "simulated=true")  # noise from the seed, for results that can be compared
        own = f"partition-id={client} num-partitions={self.clients} {given}"
        self._start(
            f"node-{client}",
            *("flower-supernode", "--insecure", "--superlink", self.address, "--port", str(free_port())),
            *("--node-config", own),
        )

    def kill(self, name: str) -> None:
        """SIGKILL a process and all that it has started, as a power cut would."""
        process = self.processes.pop(name)
        _signal(process, signal.SIGKILL)
        process.wait()

    def end(self, name: str) -> None:
        """End a process and all that it has started, in order if possible."""
        process = self.processes.pop(name)
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        _signal(process, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> str:
        """What a process has printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _start(self, name: str, program: str, *arguments: str) -> None:
        environment = {
            **os.environ,
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_HOME": str(self.folder / name),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(Path(sys.executable).parent / program), *arguments],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process and its children, which are in a session of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
