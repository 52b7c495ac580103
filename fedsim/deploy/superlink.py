# SPDX-License-Identifier: Apache-2.0
"""The SuperLink's process: Flower's own, with a guard before it, bounded replies, and a database that shrinks again."""

from __future__ import annotations

import datetime
import importlib
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.deploy.guard import Budget, Guard
from fedsim.deploy.nodes import public_key
from fedsim.deploy.processes import log_to_screen
from fedsim.deploy.replies import Replies
from fedsim.errors import DeployError

if TYPE_CHECKING:
    from flwr.server.superlink.linkstate import LinkState
    from starlette.types import ASGIApp, Receive, Scope, Send

TIDY = (("auto_vacuum", "FULL"), ("secure_delete", "ON"), ("journal_size_limit", str(64 * 2**20)))
"""Of SQLite: a file that gives back what is deleted from it, and keeps no copy of it; a log of bounded size."""


def signer_of(headers: Mapping[str, str]) -> bytes:
    """The public key that has signed the time of a request with these headers, by the rules of Flower's own check."""
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    try:
        key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.lower()], validate=True)
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.lower()], validate=True)
        timestamp = headers[TIMESTAMP_HEADER.lower()]
        age = (now() - datetime.datetime.fromisoformat(timestamp)).total_seconds()
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            raise ValueError("its time is too far from this clock's")
        if not verify_signature(bytes_to_public_key(key), timestamp.encode("ascii"), signature):
            raise ValueError("its signature is wrong")
    except KeyError as error:
        raise ValueError(f"it has no {error.args[0]}") from None
    except TypeError as error:
        raise ValueError(str(error)) from None
    return key


class FlowerGuard:
    """`Guard` as a middleware of Flower's application, which knows the keys."""

    def __init__(self, app: ASGIApp, budget: Budget) -> None:
        self.app, self.budget = app, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Guard a request."""

        def registered(key: bytes) -> bool:
            return scope["app"].state.linkstate_factory.state().get_node_id_by_public_key(key) is not None

        await Guard(self.app, signer_of, registered, self.budget)(scope, receive, send)


def name_of(state: LinkState, node: int) -> str:
    """The name of a client, for the log: it says whom to revoke. The working directory is the server's folder."""
    keys = {info.public_key for info in state.get_node_info(node_ids=[node])}
    return next((path.stem for path in Path("clients").glob("*.pub") if public_key(path) in keys), "somebody")


def prepare_flower() -> None:
    """Put guard, bounds and settings in their places; DeployError where this Flower does not have them."""
    from starlette.middleware import Middleware

    main: Any = importlib.import_module("flwr.superlink.main")
    sql: Any = importlib.import_module("flwr.supercore.sql_mixin")
    handlers = importlib.import_module("flwr.superlink.servicer.fleet.fleet_handlers")
    if not hasattr(main, "_get_middleware") or not hasattr(sql, "SQLITE_PRAGMAS"):
        raise DeployError("this version of Flower cannot be guarded; install the version of constraints.txt")
    inner, budget, replies = main._get_middleware, Budget(), Replies(handlers, name_of)
    main._get_middleware = lambda: [Middleware(FlowerGuard, budget=budget), *inner()]
    sql.SQLITE_PRAGMAS = (*TIDY[:1], *sql.SQLITE_PRAGMAS, *TIDY[1:])  # the first before any table is made
    vars(handlers).update(push_messages=replies.push_messages, push_object=replies.push_object)


def main() -> None:
    """Run Flower's SuperLink with the arguments of this process."""
    from flwr.superlink.cli.flower_superlink import flower_superlink

    log_to_screen()
    prepare_flower()
    flower_superlink()


if __name__ == "__main__":
    main()
