# SPDX-License-Identifier: Apache-2.0
"""A client that sends another one a message as if it were the server, by its own valid key. Run in a test's namespace.

Flower's push-messages checks the node that calls, and not whom the message is from or for; without `reply_to` it is an
instruction. The SuperLink of fedsim refuses it (`deploy/replies.py`), and if it did not, the client would know by the
signature that it is not the server's. Prints what the SuperLink made of it, in its own name and in the server's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import push_objects
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsim.federation.arrays import to_record
from fedsim.federation.plan import plan
from fedsim.scenario_file import load_scenario


def main(address: str, authority: str, key: str, own: int, victim: int, run: int, folder: str) -> None:
    private = load_ssh_private_key(Path(key).read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    interceptors = [NodeAuthHttpInterceptor(private, private.public_key())]
    client = FleetHttpClient.from_server_address(address, False, authority, interceptors)
    planned = plan(load_scenario(Path(folder) / "scenario.yaml"))
    config = ConfigRecord({"server-round": 1, "weighting": "examples", "example-noise-multiplier": 2.0})
    for source in (own, 1):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, source, 1
        content = RecordDict({"arrays": to_record(planned.start, planned.layout), "config": config})
        message = Message(content, victim, "train")
        try:
            push(client, Node(node_id=own), run, message)
            print("TAKEN")
        except httpx.HTTPStatusError as error:
            print(f"refused: {error.response.status_code} {error.response.text}")


def push(client: FleetHttpClient, node: Node, run: int, message: Message) -> None:
    """As a SuperNode pushes a reply."""
    with no_object_id_recompute():
        message.metadata.__dict__["_message_id"] = message.object_id
        answer = client.PushMessages(
            PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(message))],
                message_object_trees=[get_object_tree(message)],
                clientapp_runtime_list=[0.0],
            )
        )
        each = make_push_object_fn_protobuf(client.PushObject, node, run, answer.session_id)
        push_objects(get_all_nested_objects(message), each, object_ids_to_push=set(answer.objects_to_push))


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:7]), sys.argv[7])  # type: ignore[arg-type]
