# SPDX-License-Identifier: Apache-2.0
"""Somebody without a key who wants to stop a federation, from one address. Run inside a test's namespace.

Opens connections, a bounded number for a bounded time, and keeps as many as it is let: in each it begins something that
it does not finish. Prints JSON: how many it opened, and how many the server had closed by the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys

HEAD = "POST /v1/fleet/push-object HTTP/1.1\r\nHost: server\r\nContent-Type: application/protobuf\r\n"


class Flood:
    """What is begun, and how it went."""

    def __init__(self, host: str, kind: str, seconds: float) -> None:
        self.host, self.kind, self.seconds = host, kind, seconds
        self.opened = self.closed = 0
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.context = None if kind == "silent" else context

    async def one(self) -> None:
        """One connection, to the end of the time."""
        try:
            reader, writer = await asyncio.open_connection(self.host, 8443, ssl=self.context, ssl_handshake_timeout=60)
        except (OSError, TimeoutError):
            self.closed += 1
            return
        self.opened += 1
        with contextlib.suppress(OSError):
            if self.kind == "half a header":
                writer.write(HEAD.encode())
            elif self.kind == "a body":
                size = 7_900_000
                writer.write(f"{HEAD}Content-Length: {size}\r\n\r\n".encode())
                for _ in range(size // 65536):  # all but its end
                    writer.write(bytes(65536))
                    await writer.drain()
            with contextlib.suppress(OSError):
                while await reader.read(65536):
                    pass
        self.closed += 1
        writer.close()

    async def run(self, count: int) -> None:
        """All of them at once."""
        tasks = []
        for number in range(count):
            tasks.append(asyncio.create_task(self.one()))
            if number % 50 == 49:
                await asyncio.sleep(0.05)
        await asyncio.wait(tasks, timeout=self.seconds)
        print(json.dumps({"opened": self.opened, "closed": self.closed}))


if __name__ == "__main__":
    host, kind, count, seconds = sys.argv[1:5]
    asyncio.run(asyncio.wait_for(Flood(host, kind, float(seconds)).run(int(count)), float(seconds) + 30))
