# SPDX-License-Identifier: Apache-2.0
"""The SuperNode's process: Flower's own, which here outlives passing faults, and ends where it would linger.

Flower 1.41 retries most faults of a connection. But any error whose text has "ssl", "tls" or "certificate" in it, and
an answer of status 500, ends its main thread for good, or that of its heartbeat, while the thread of its web server
keeps the process alive: a client that is gone, in a process that runs. So here:

- every request passes `Steady`, which turns such errors into one that Flower retries (TLS still checks the server's
  certificate each time: nothing is sent to a server that cannot prove itself), and notes when the server answered;
- the process ends when Flower's main function returns or any of its threads dies, whatever else still runs in it, and
  the supervisor (`client.join`) starts it again.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import httpx
from flwr.proto.fleet_pb2 import ActivateNodeResponse
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode import fleet_http_connection
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsim.deploy.admission import plain
from fedsim.deploy.contact import Contact, contact_file, write_contact
from fedsim.deploy.processes import log_to_screen
from fedsim.errors import DeployError

ENDED = 75
"""Exit code where Flower has stopped its work without ending the process (EX_TEMPFAIL: try again)."""
BROKEN = 120.0
"""Seconds for which one kind of request is retried that the server fails at; then Flower gives it up, as it would."""
SECOND = 1.0  # between two notes of the same
log = logging.getLogger("fedsim")


class Note:
    """The contact file of this process, which several threads write to."""

    def __init__(self, file: Path) -> None:
        self.file, self.contact, self._lock, self._written = file, Contact(time.monotonic()), threading.Lock(), 0.0

    def answered(self, node: int | None = None) -> None:
        """The server has answered."""
        now = time.monotonic()
        with self._lock:
            before, last = self.contact.trouble, self.contact.answered
            changed = bool(before) or last is None or node is not None
            self._put(Contact(now, now, node if node is not None else self.contact.node), changed)
        if before:
            log.info("the server answers again%s", f", after {now - last:.0f} s" if last is not None else "")

    def failed(self, reason: str) -> None:
        """The server has not answered, or refused."""
        with self._lock:
            new = reason != self.contact.trouble
            self._put(replace(self.contact, tried=time.monotonic(), trouble=reason), new)
        if new:
            log.warning("no answer from the server: %s; trying again", reason)

    def _put(self, contact: Contact, at_once: bool) -> None:
        self.contact = contact
        if at_once or contact.tried - self._written > SECOND:
            write_contact(self.file, contact)
            self._written = contact.tried


class Steady(NodeAuthHttpInterceptor):
    """Signs each request, as Flower's own does, and lets Flower retry what passes."""

    note: Note

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._broken: dict[str, float] = {}

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """The answer; a ConnectError, which Flower retries, for a fault that may pass."""
        try:
            answer = super().intercept(context, call_next)
        except httpx.TransportError as error:
            self.note.failed(plain(error))
            # Flower reads the text: what it would give up is the cause, and not in the text.
            raise httpx.ConnectError("no connection to the server") from error
        if answer.status_code >= 500:
            self.note.failed(f"its status is {answer.status_code}")
            now = time.monotonic()
            if now - self._broken.setdefault(context.rpc_method, now) < BROKEN:
                raise httpx.ConnectError(f"the server fails, status {answer.status_code}")
        self._broken.pop(context.rpc_method, None)
        if answer.is_success or answer.status_code == httpx.codes.FORBIDDEN:  # 403: the run has ended meanwhile
            self.note.answered(_node(context, answer))
        elif answer.status_code < 500:
            self.note.failed(f"it refuses, with status {answer.status_code}")
        return answer


def _node(context: ProtobufRequestContext, answer: httpx.Response) -> int | None:
    """Flower's number of this client, where the answer gives it."""
    if not (answer.is_success and context.rpc_method.endswith("/ActivateNode")):
        return None
    return int(ActivateNodeResponse.FromString(answer.content).node_id)


def keep_steady(note: Note) -> None:
    """Put `Steady` in the place of Flower's own; DeployError where this Flower has no such place."""
    if not hasattr(fleet_http_connection, "NodeAuthHttpInterceptor"):
        raise DeployError("this version of Flower signs its requests elsewhere; install the version of constraints.txt")
    Steady.note = note
    fleet_http_connection.NodeAuthHttpInterceptor = Steady


def end(code: int, reason: str) -> NoReturn:
    """End this process at once: a thread of Flower's web server would keep it alive."""
    log.warning("the SuperNode ends: %s", reason)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_thread(died: threading.ExceptHookArgs) -> None:
    traceback.print_exception(died.exc_type, died.exc_value, died.exc_traceback)
    end(ENDED, f"its thread {died.thread.name if died.thread else '?'} has died")


def main() -> None:
    """Run Flower's SuperNode with the arguments of this process; its working directory is the client's folder."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    log_to_screen()
    keep_steady(Note(contact_file(Path.cwd())))
    threading.excepthook = _end_with_thread
    code, reason = ENDED, "Flower has stopped its work"
    try:
        flower_supernode()
    except SystemExit as stopped:
        code, reason = stopped.code if isinstance(stopped.code, int) else 1, f"Flower exits with {stopped.code}"
    except BaseException:
        traceback.print_exc()
    end(code, reason)


if __name__ == "__main__":
    main()
