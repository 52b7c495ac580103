# SPDX-License-Identifier: Apache-2.0
"""Flower's processes: their environment, their commands, and keeping them together.

They are told to send no telemetry, to look for no update, to install nothing, and to keep their files in the folder.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedsim.deploy.notify import alive
from fedsim.errors import DeployError

PATIENCE = 15.0  # seconds between asking a process to end and ending it
_NOT_PASSED_ON = ("FLWR_", "FEDSIM_", "NOTIFY_SOCKET", "WATCHDOG_")
log = logging.getLogger("fedsim")


@dataclass(frozen=True)
class Program:
    """A process of a deployment."""

    name: str
    command: tuple[str, ...]
    cwd: Path


def environment(flower_home: Path, first: Path | None = None) -> dict[str, str]:
    """The environment of every Flower process; what the caller has set for Flower and fedsim is left out.

    Programs in the folder `first` come before all others of the same name.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_PASSED_ON)}
    here = os.pathsep.join([*([str(first)] if first else []), str(Path(sys.executable).parent)])
    return {
        **kept,
        "PATH": f"{here}{os.pathsep}{kept.get('PATH', os.defpath)}",  # SuperExec starts flwr-serverapp by its name
        "FLWR_HOME": str(flower_home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONUNBUFFERED": "1",
    }


class _Screen(logging.Handler):
    """Prints to what is standard error when something is logged, not when the handler was made."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):  # nobody reads it any more: what is logged must not end what runs
            self.handleError(record)


def log_to_screen() -> None:
    """Print what fedsim logs, each line once."""
    log.setLevel(logging.INFO)
    if any(isinstance(handler, _Screen) for handler in log.handlers):
        return
    handler = _Screen()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s fedsim: %(message)s"))
    log.addHandler(handler)


def find(name: str, remedy: str) -> str:
    """The path of a program: beside this Python, on the path, or where administrators' programs are."""
    beside = Path(sys.executable).with_name(name)
    found = (
        str(beside) if beside.exists() else shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    )
    if found is None:
        raise DeployError(f"the program {name} is not installed; {remedy}")
    return found


def listens(address: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((address, port), timeout=2):
            return True
    except OSError:
        return False


class Processes:
    """Running processes, which end together."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.running: list[tuple[Program, subprocess.Popen[bytes]]] = []
        self._environment = dict(environment)

    def start(self, program: Program) -> None:
        """Start a process; its output goes where this one's goes."""
        log.info("starting %s", program.name)
        process = subprocess.Popen(program.command, cwd=program.cwd, env=self._environment, stdin=subprocess.DEVNULL)
        self.running.append((program, process))

    def ended(self) -> tuple[str, int] | None:
        """The name and exit code of one that has ended, if one has."""
        for program, process in self.running:
            if (code := process.poll()) is not None:
                return program.name, code
        return None

    def wait_for(self, ready: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until something is true, as long as all processes live."""
        until = time.monotonic() + seconds
        while not ready():
            alive()
            if ended := self.ended():
                raise DeployError(f"{ended[0]} ended with exit code {ended[1]}; what it printed says why")
            if time.monotonic() > until:
                raise DeployError(
                    f"{what} is not ready after {seconds:g} s; see what it printed, and the machine's load"
                )
            time.sleep(0.2)

    def watch(self, check: Callable[[], str | None] = lambda: None) -> tuple[str, str]:
        """Wait until one of them ends, or until a check names one that is stuck: its name, and what became of it."""
        while not (ended := self.ended()):
            alive()
            if stuck := check():
                return stuck, "is stuck"
            time.sleep(0.5)
        return ended[0], f"ended with exit code {ended[1]}"

    def stop(self) -> None:
        """End all of them, the last one first: politely, and then not."""
        for program, process in reversed(self.running):
            if process.poll() is None:
                log.info("stopping %s", program.name)
                process.terminate()
                try:
                    process.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self.running.clear()


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that whatever was begun is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def together(environment: Mapping[str, str]) -> Iterator[Processes]:
    """Processes that are all ended at the end, also by SIGTERM."""
    processes = Processes(environment)
    with interrupted_by_sigterm():
        try:
            yield processes
        finally:
            processes.stop()


SUPEREXEC = (sys.executable, "-I", "-m", "fedsim.deploy.superexec")
"""Flower's SuperExec, which keeps tokens out of the process list."""


def superexec(address: str, folder: Path, security: str) -> tuple[str, ...]:
    """The arguments of a SuperExec, which proves itself to its SuperLink or SuperNode by the secret of the folder."""
    return (
        f"--runtime-api-address={address}",
        security,
        f"--superexec-auth-secret-file={folder / 'superexec.secret'}",
    )
