# SPDX-License-Identifier: Apache-2.0
"""The messages of a round to many clients, and their replies.

Flower's constructor checks all its arguments and asks for the time; a thousand clients need that once. Beyond the first
message only what differs is set.
"""

from __future__ import annotations

from collections.abc import Sequence

from flwr.app import Message, RecordDict
from flwr.app.metadata import Metadata


def to_each(nodes: Sequence[int], content: RecordDict, kind: str) -> list[Message]:
    """A message with the same content to every node."""
    messages = [Message(content, node, kind) for node in nodes[:1]]
    return messages + [_like(messages[0], content, {"_dst_node_id": node}) for node in nodes[1:]]


def replies_to(messages: Sequence[Message], contents: Sequence[RecordDict]) -> list[Message]:
    """The replies to messages of one round, which differ in nothing but their clients."""
    replies = [Message(contents[0], reply_to=messages[0])]
    for message, content in zip(messages[1:], contents[1:], strict=True):
        asked = vars(message.metadata)
        fields = {"_src_node_id": asked["_dst_node_id"], "_reply_to_message_id": asked["_message_id"]}
        replies.append(_like(replies[0], content, fields))
    return replies


def _like(other: Message, content: RecordDict, fields: dict[str, object]) -> Message:
    """A message like another, but for its content and some fields of its metadata."""
    message, metadata = Message.__new__(Message), Metadata.__new__(Metadata)
    vars(metadata).update(vars(other.metadata) | fields)
    vars(message).update(_metadata=metadata, _content=content, _error=None)
    return message
