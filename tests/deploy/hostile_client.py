# SPDX-License-Identifier: Apache-2.0
"""A client with a valid key that wants to fill the server, and to order other clients about. Run inside its namespace.

It answers the first message with a reply that no model needs, and pushes a message of its own to another client. Prints
JSON: what came of each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import httpx
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Array, ArrayRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supernode.fleet_http_connection import http_request_response


def outcome(attempt: Callable[[], object]) -> str:
    try:
        return f"OPEN: {attempt()!r}"
    except httpx.HTTPStatusError as error:
        return f"{error.response.status_code} {error.response.text[:120]}"
    except BaseException as error:  # Flower's own for a run that has ended is no Exception
        return f"{type(error).__name__}: {error}"[:200]


def main(address: str, authority: str, key_file: str, megabytes: int, other: int) -> None:
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 256, 2**20, np.uint8) for _ in range(megabytes)]  # no two objects are equal
    arrays = ArrayRecord({str(i): Array(row) for i, row in enumerate(rows)})
    key = load_ssh_private_key(Path(key_file).read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    with http_request_response(address, False, authority, (key, key.public_key())) as connection:
        node, receive, send, *_, push_object, confirm = connection
        print("connected", flush=True)
        while (received := receive()) is None:
            time.sleep(1)
        asked = received[0]
        confirm(asked.metadata.run_id, asked.metadata.message_id)
        told = {}

        def flood() -> str:
            reply = Message(RecordDict({"arrays": arrays}), reply_to=asked)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects = get_all_nested_objects(reply)
            wanted, session = send(reply, get_object_tree(reply), 1.0)
            pushed = 0
            for name in wanted:
                push_object(asked.metadata.run_id, session, name, objects[name].deflate())
                pushed += 1
                print(f"pushed {pushed}", flush=True)
            return f"{pushed} objects"

        def order() -> str:
            numbers = {"run_id": asked.metadata.run_id, "src_node_id": node, "dst_node_id": other}
            told = {"message_id": "", "reply_to_message_id": "", "group_id": "", "message_type": "train"}
            now = datetime.now(UTC).timestamp()
            own = make_message(Metadata(**numbers, **told, created_at=now, ttl=600.0), content=RecordDict())
            own.metadata.__dict__["_message_id"] = own.object_id
            return str(send(own, get_object_tree(own), 1.0))

        told["order another client"] = outcome(order)
        told["a huge reply"] = outcome(flood)
        print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]))  # type: ignore[misc]
