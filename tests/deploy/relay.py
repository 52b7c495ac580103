# SPDX-License-Identifier: Apache-2.0
"""A load balancer that breaks on command, in one process. Run inside a test's namespace.

Passes TCP on to the server, as long as the file of the mode holds `pass`. Every other mode is a fault, and a change of
mode ends all connections: refuse (nobody listens), reset, close (accepted and closed), slow (no handshake), garbage (no
TLS), expired (a certificate that has), or a number (an answer of that status). Each answer that reaches a client is
noted with its time, by the client's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import sys
import time
from pathlib import Path

PORT = 8443


class Relay:
    """One listener, and the connections of the present mode."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder, self.host = folder, host
        self.mode = "refuse"
        self.server: asyncio.Server | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.seen: dict[str, float] = {}

    async def follow(self) -> None:
        """Do what the file says."""
        while True:
            wanted = (self.folder / "mode").read_text().strip()
            if wanted and wanted != self.mode:
                await self._change(wanted)
            (self.folder / ".seen").write_text(json.dumps({"mode": self.mode, "seen": self.seen}))
            (self.folder / ".seen").replace(self.folder / "seen.json")
            await asyncio.sleep(0.1)

    async def _change(self, mode: str) -> None:
        if self.server is not None:
            self.server.close()
        for task in list(self.tasks):
            task.cancel()
        self.mode = mode
        if mode != "refuse":
            encrypted = self._context() if mode in ("500", "502", "expired") else None
            self.server = await asyncio.start_server(self._accept, "0.0.0.0", PORT, ssl=encrypted, reuse_address=True)

    def _context(self) -> ssl.SSLContext:
        name = "expired" if self.mode == "expired" else "server"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        return context

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self.tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif self.mode == "slow":
            await asyncio.sleep(3600)
        elif self.mode == "garbage":
            writer.write(b"220 another service\r\n")
        elif self.mode.isdigit():
            await reader.read(65536)
            writer.write(f"HTTP/1.1 {self.mode} Broken\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbad\n".encode())
            await writer.drain()
        elif self.mode == "pass":
            back, there = await asyncio.open_connection(self.host, PORT)
            try:
                await asyncio.gather(self._copy(reader, there, ""), self._copy(back, writer, _address(writer)))
            finally:
                there.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: str) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
            if client and len(data) > 100 and data[0] == 23:  # application data of TLS
                self.seen[client] = time.monotonic()
        writer.close()


def _address(writer: asyncio.StreamWriter) -> str:
    return str(writer.get_extra_info("peername")[0])


if __name__ == "__main__":
    asyncio.run(Relay(Path(sys.argv[1]), sys.argv[2]).follow())
