# SPDX-License-Identifier: Apache-2.0
"""Somebody without a key who wants to stop a federation, from one address. Run inside a test's namespace.

Holds a bounded number of connections for a bounded time, or as many of them as it is let: in each it begins something
that it does not finish, and one that is closed it opens again a second later. Prints JSON: how often it connected, and
the most connections that it held at once, of those that were open for three seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import sys

HEAD = "POST /v1/fleet/push-object HTTP/1.1\r\nHost: server\r\nContent-Type: application/protobuf\r\n"


class Flood:
    """What is begun, and how it went."""

    def __init__(self, host: str, kind: str) -> None:
        self.host, self.kind = host, kind
        self.connected = self.held = self.most = 0
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.options = {} if kind == "silent" else {"ssl": context, "ssl_handshake_timeout": 60.0}

    async def keep(self) -> None:
        """One connection, again and again."""
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                await self._one()
            await asyncio.sleep(1.0)

    async def _one(self) -> None:
        reader, writer = await asyncio.open_connection(self.host, 8443, **self.options)  # type: ignore[arg-type]
        self.connected += 1
        waiting = asyncio.create_task(self._hold())
        try:
            if self.kind == "half a header":
                writer.write(HEAD.encode())
            elif self.kind == "a body":
                size = 7_900_000
                writer.write(f"{HEAD}Content-Length: {size}\r\n\r\n".encode())
                for _ in range(size // 65536):  # all but its end
                    writer.write(bytes(65536))
                    await writer.drain()
            while await reader.read(65536):
                pass
        finally:
            if waiting.done():
                self.held -= 1
            waiting.cancel()
            writer.close()

    async def _hold(self) -> None:
        await asyncio.sleep(3.0)
        self.held += 1
        self.most = max(self.most, self.held)

    async def run(self, count: int, seconds: float) -> None:
        """All of them, for a time."""
        tasks = []
        for number in range(count):
            tasks.append(asyncio.create_task(self.keep()))
            if number % 50 == 49:
                await asyncio.sleep(0.05)
        await asyncio.wait(tasks, timeout=seconds)
        print(json.dumps({"connected": self.connected, "held": self.most}), flush=True)
        os._exit(0)


if __name__ == "__main__":
    host, kind, count, seconds = sys.argv[1:5]
    asyncio.run(Flood(host, kind).run(int(count), float(seconds)))
