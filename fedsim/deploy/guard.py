# SPDX-License-Identifier: Apache-2.0
"""What the SuperLink refuses of its fleet before a body is read: in memory, a body costs several times its size.

A client signs the time of each request, in its headers. So who is asking can be known before the body is read; Flower
1.41 reads it first, whoever sends it. And it takes as many bodies at once as there are connections.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedsim.deploy.admission import ASKS

FLEET = "/v1/fleet/"
NOT_REGISTERED = "activate-node"
"""A key that is not registered may ask this: Flower refuses it, with a code that tells it why."""
ACCEPTED, UNKNOWN = 2003, 2004
"""Flower's codes for an activation with an interval that is not allowed, and for one by a key that it does not know."""
FROM_ONE, FROM_ALL = 32 * 2**20, 256 * 2**20
"""Bytes of bodies that are read at once, of one key and of all."""
Signer = Callable[[Mapping[str, str]], bytes]
"""The public key that has signed a request with these headers; a ValueError where none has."""
Registered = Callable[[bytes], bool]


class RefusedError(Exception):
    """A request that is answered with a status, without reading its body."""

    def __init__(self, status: int, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.content = status, {"detail": reason, **({} if code is None else {"code": code})}


class Budget:
    """The bytes of bodies that are being read, for each key."""

    def __init__(self, from_one: int = FROM_ONE, from_all: int = FROM_ALL) -> None:
        self.from_one, self.from_all = from_one, from_all
        self._reading: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def reading(self, key: bytes, size: int) -> Iterator[None]:
        """Count a body while it is read and answered; RefusedError (503: try again) where that is too much at once."""
        with self._lock:
            if self._reading[key] + size > self.from_one or self._reading.total() + size > self.from_all:
                raise RefusedError(503, "too much is being sent at once; try again")
            self._reading[key] += size
        try:
            yield
        finally:
            with self._lock:
                self._reading[key] -= size
                if not self._reading[key]:
                    del self._reading[key]


class Guard:
    """An ASGI application in front of Flower's, for the paths of the fleet."""

    def __init__(self, app: ASGIApp, signer: Signer, registered: Registered, budget: Budget) -> None:
        self.app, self.signer, self.registered, self.budget = app, signer, registered, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http" or not scope["path"].startswith(FLEET):
            await self.app(scope, receive, send)
            return
        try:
            key, size = await run_in_threadpool(self._admit, scope)
            with self.budget.reading(key, size):
                await self.app(scope, receive, send)
        except RefusedError as refusal:
            answer = JSONResponse(refusal.content, refusal.status, headers={"Connection": "close"})
            await answer(scope, receive, send)

    def _admit(self, scope: Scope) -> tuple[bytes, int]:
        """Who has signed a request, and the size of its body."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        length = headers.get("content-length", "")
        if "transfer-encoding" in headers or not (length.isascii() and length.isdigit()):
            raise RefusedError(411, "the length of a request must be known")
        try:
            key = self.signer(headers)
        except ValueError as error:
            raise RefusedError(401, f"Invalid SuperNode authentication: {error}") from None
        registered = self.registered(key)
        if ASKS in headers:
            raise RefusedError(400, "only asking", ACCEPTED if registered else UNKNOWN)
        if scope["path"] != FLEET + NOT_REGISTERED and not registered:
            raise RefusedError(401, "Invalid SuperNode authentication: this key is not registered")
        return key, int(length)
