# SPDX-License-Identifier: Apache-2.0
"""When a client last had an answer from its server: written by the SuperNode, read by supervisor, doctor and health
check.

Times are of the monotonic clock, which all processes of a machine share and which no change of the date moves. They do
not survive a restart of the machine, so the supervisor removes the file before it starts anything.

`python -m fedsim.deploy.contact FOLDER` is the health check of a container: exit code 0 where the server answers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FRESH = 75.0
"""Seconds: a SuperNode asks every 3, or sends a heartbeat every 25 while its ClientApp works; one may be lost."""
STALLED = 180.0
"""Seconds without even an attempt, after which a SuperNode is taken to be stuck."""


@dataclass(frozen=True)
class Contact:
    """What the present SuperNode knows of its server."""

    tried: float
    """When it last asked something."""
    answered: float | None = None
    """When it last had an answer that was no refusal."""
    node: int | None = None
    """Flower's number of this client, once it was let in."""
    trouble: str = ""
    """Why the last attempt was in vain; empty if it was not."""

    def healthy(self, now: float) -> bool:
        """Whether the server has answered lately."""
        return self.answered is not None and 0 <= now - self.answered <= FRESH

    def said(self, now: float) -> str:
        """The same in words."""
        trouble = f" ({self.trouble})" if self.trouble else ""
        if self.answered is None:
            return f"the server has not let this client in yet{trouble}"
        if now < self.answered:
            return "what was noted is from before this machine started"
        return f"the server last answered {now - self.answered:.0f} s ago{trouble}"


def contact_file(folder: Path) -> Path:
    """Where a client's contact is noted."""
    return folder / "flower" / "contact.json"


def write_contact(file: Path, contact: Contact) -> None:
    """Note a contact; who reads it never sees half of it."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps(asdict(contact)))
    partial.replace(file)


def read_contact(file: Path) -> Contact | None:
    """The contact that was noted last; None where no SuperNode has noted one."""
    try:
        return Contact(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def main(folder: str) -> int:
    """The health check: 0 if the server has answered lately, else 1 and why not."""
    contact, now = read_contact(contact_file(Path(folder))), time.monotonic()
    print("no SuperNode runs here" if contact is None else contact.said(now))
    return 0 if contact is not None and contact.healthy(now) else 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:2]))
