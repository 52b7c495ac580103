# SPDX-License-Identifier: Apache-2.0
"""A client always answers.

A Flower SuperNode whose ClientApp gives no reply waits for it for ever, and takes no other message until it is started
again. And after an exception Flower's engines differ: deployed, what the client had written to its state stays; on Ray
it is lost. So nothing is raised here: whatever happens, the reply is a Message, and after a failure the state is what
it was before, on every engine. Only a process that dies at once (os._exit, the kernel's memory killer) cannot answer;
Flower notices that itself after about a minute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy

from flwr.app import Context, Message

from fedsim.errors import FedsimError, PolicyError
from fedsim.federation.inline import error_reply

Handler = Callable[[Message, Context], Message]


def always_answering(handler: Handler, *, secretive: Callable[[Context], bool] = lambda context: False) -> Handler:
    """The handler, with an error reply in place of whatever it raises, or returns that is no reply.

    `secretive` says whether the reason stays in the client's own log, because it may be a fact about its data; what the
    client's policy refuses is no such fact, and is always told. An interrupt from the keyboard is not an answer.
    """

    def handle(message: Message, context: Context) -> Message:
        before = deepcopy(context.state)
        try:
            reply: object = handler(message, context)
            if not isinstance(reply, Message):
                raise TypeError(f"the client's code returned {type(reply).__name__} in place of a reply")
            if reply.has_error():
                context.state = before
            return reply
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            context.state = before
            try:
                hidden = secretive(context)
            except Exception:  # without a scenario that can be read nothing is known about what may be told
                hidden = True
            own = context.node_config  # on a machine of its own a client has a policy
            who = "this client" if "policy" in own else f"client {own.get('partition-id', '?')}"
            return error_reply(message, reason_of(error, who, hidden=hidden))

    return handle


def reason_of(error: BaseException, who: str, *, hidden: bool) -> str:
    """What the server is told of a failure; the client's own log has all of it."""
    log = logging.getLogger("fedsim")
    if isinstance(error, FedsimError):
        log.warning("%s could not train: %s", who, error)
    else:
        log.warning("%s failed: %s: %s", who, type(error).__name__, error, exc_info=error)
    if isinstance(error, PolicyError):
        return str(error)
    if hidden:
        return "the client could not train; its own log says why"
    return str(error) if isinstance(error, FedsimError | ValueError) else f"{type(error).__name__}: {error}"
