# SPDX-License-Identifier: Apache-2.0
"""What a client may push to the SuperLink: one reply to a message, as its sender, of a size that the run can need.

Flower 1.41 checks by whom a request is signed, and not whose message is in it; a message that replies to nothing it
stores as an instruction to another client; and it bounds neither the size nor the number of a message's objects.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from fastapi import HTTPException
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse

from fedsim.errors import DeployError

if TYPE_CHECKING:
    from flwr.server.superlink.linkstate import LinkState

LARGEST_REPLY = "largest-reply"
"""In the configuration of a run: the bytes of a reply's objects."""
DEFAULT = 256 * 2**20
FORGET = 3600.0
"""Seconds after which an upload that has stopped is no longer counted; Flower forgets it after 180."""
log = logging.getLogger("fedsim")


@dataclass
class Upload:
    """The objects of one reply."""

    node: int
    message: str
    most: int
    since: float
    size: int = 0


class Replies:
    """Flower's two handlers of what clients push, and what has been pushed so far."""

    def __init__(self, handlers: ModuleType, name_of: Callable[[LinkState, int], str]) -> None:
        for name in ("push_messages", "push_object"):
            if not hasattr(handlers, name):
                raise DeployError(f"this version of Flower has no {name}; install the version of constraints.txt")
        self._messages, self._object = handlers.push_messages, handlers.push_object
        self._name_of = name_of
        self._uploads: dict[str, Upload] = {}
        self._lock = threading.Lock()

    def push_messages(self, request: PushMessagesRequest, state: LinkState) -> PushMessagesResponse:
        """Take the reply that a client announces."""
        node = request.node.node_id
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise HTTPException(400, "push one message at a time")
        metadata = request.messages_list[0].metadata
        if metadata.src_node_id != node:
            log.warning("%s pushed a message in the name of another: refused", self._name_of(state, node))
            raise HTTPException(400, "a message must be its sender's own")
        if not metadata.reply_to_message_id:
            log.warning("%s pushed a message that replies to nothing: refused", self._name_of(state, node))
            raise HTTPException(400, "a client replies, and sends nothing else")
        answer: PushMessagesResponse = self._messages(request=request, state=state)
        upload = Upload(node, metadata.message_id, _most(state, metadata.run_id), time.monotonic())
        with self._lock:
            self._uploads = {k: each for k, each in self._uploads.items() if upload.since - each.since < FORGET}
            self._uploads[answer.session_id] = upload
        return answer

    def push_object(self, request: PushObjectRequest, state: LinkState) -> PushObjectResponse:
        """Take an object of a reply; one that makes the reply too large ends it."""
        node, most = request.node.node_id, _most(state, request.run_id)
        with self._lock:  # one that was announced before the SuperLink was restarted is counted from here
            upload = self._uploads.setdefault(request.session_id, Upload(node, "", most, time.monotonic()))
            upload.size += len(request.object_content)
        if upload.node != node:
            raise HTTPException(400, "this is a part of another's reply")
        if upload.size > upload.most:
            log.warning("%s pushed a reply of more than %d bytes: refused", self._name_of(state, node), upload.most)
            if upload.message:  # so that the run need not wait until Flower forgets it
                state.object_store.delete(upload.message)
            raise HTTPException(413, f"a reply of this run has at most {upload.most} bytes")
        answer: PushObjectResponse = self._object(request=request, state=state)
        return answer


def _most(state: LinkState, run: int) -> int:
    """The bytes that a reply of a run may have."""
    runs = state.get_run_info(run_ids=[run])
    return int(runs[0].override_config.get(LARGEST_REPLY, DEFAULT)) if runs else DEFAULT
