# SPDX-License-Identifier: Apache-2.0
"""Whom the server of a deployment has asked to train, and with how many rows: what its privacy claim is computed from.

Every request may have been answered, whether or not its answer came: a client charges its ledger when it is asked. So
each request is written down, durably, before it is sent, with the numbers of rows that the client vouches for. An
update that comes with its number of examples makes that number exact. What the server's own file holds has no part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsim.errors import RunError

ASKED = "asked.jsonl"


@dataclass(frozen=True)
class Rows:
    """Between which numbers of rows a client trains; it refuses to with any other."""

    least: int
    most: int | None = None
    """None: it promises no largest number."""

    def within(self, other: Rows) -> bool:
        """Whether every number of rows that this allows, the other does, too."""
        return self.least >= other.least and (other.most is None or (self.most is not None and self.most <= other.most))

    @classmethod
    def read(cls, least: object, most: object) -> Rows | None:
        """What a client says that it vouches for; None for what makes no sense."""
        if not isinstance(least, int) or isinstance(least, bool) or least < 1:
            return None
        return cls(least, most if isinstance(most, int) and not isinstance(most, bool) and most >= least else None)


@dataclass(frozen=True)
class Asked:
    """One request to train, and what is known of the rows it may have been answered with; None: nothing."""

    round: int
    client: int
    rows: Rows | None


class Journal:
    """The requests of a run, in a file of its folder that survives whatever ends the server."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / ASKED
        self.asked: list[Asked] = []
        lines = self.file.read_text().splitlines(keepends=True) if self.file.is_file() else []
        try:
            for line in lines:
                if line.endswith("\n"):  # the last may have been cut off, and then nothing was sent
                    self._read(json.loads(line))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise RunError(
                f"{self.file} is damaged ({error}), so nobody knows what was spent; restore it, or run the scenario"
                " again"
            ) from error

    def ask(self, round_: int, clients: Mapping[int, Rows | None]) -> None:
        """Write down that these clients are asked to train in a round; it is on the disk when this returns."""
        rows = {client: (each.least, each.most) if each else None for client, each in clients.items()}
        self._append([{"round": round_, "client": client, "rows": pair} for client, pair in rows.items()])

    def told(self, round_: int, examples: Mapping[int, int]) -> None:
        """Write down how many examples each client's update of a round was computed from."""
        self._append([{"round": round_, "client": client, "told": count} for client, count in examples.items()])

    def _append(self, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        with self.file.open("ab") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
        for line in lines:
            self._read(line)

    def _read(self, line: Mapping[str, Any]) -> None:
        round_, client = int(line["round"]), int(line["client"])
        if "told" not in line:
            pair = line["rows"]
            self.asked.append(Asked(round_, client, Rows.read(*pair) if pair is not None else None))
            return
        count = int(line["told"])
        # An answer is to the last request: with a new one, an earlier one is no longer waited for.
        for place in reversed(range(len(self.asked))):
            request = self.asked[place]
            if (request.round, request.client) == (round_, client):
                self.asked[place] = replace(request, rows=Rows(count, count))
                return
