# SPDX-License-Identifier: Apache-2.0
"""Telling systemd that a service is ready and alive; without systemd nothing is sent."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(*lines: str) -> None:
    """Send state lines to the service manager (see sd_notify), if it has said where."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto("\n".join(lines).encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def alive() -> None:
    """Reset systemd's watchdog, which restarts a service that does not do this for WatchdogSec."""
    notify("WATCHDOG=1")
