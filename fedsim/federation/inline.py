# SPDX-License-Identifier: Apache-2.0
"""The inline engine: a Flower Grid whose clients live in this process, and which hands them a whole cohort at once.

It subclasses Flower's public `Grid`, so any ServerApp and any ClientApp run on it. A `CohortHandler` answers many
messages together; an ordinary ClientApp is answered message by message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity

CohortHandler = Callable[[Sequence[Message], Sequence[Context]], list[Message]]
SERVER_NODE = 1
FIRST_NODE = 2
LONGEST_REASON = 1000
"""Characters of a reason of failure that are kept."""


def node_of(client: int) -> int:
    """The Flower node id of a simulated client; client_of is its inverse."""
    return client + FIRST_NODE


def client_of(node: int) -> int:
    """The client of a Flower node id."""
    return node - FIRST_NODE


def called(client: int, *, deployed: bool) -> str:
    """What people call a client: its number, or in a deployment the name of its folder, which is numbered from 1."""
    return f"client-{client + 1}" if deployed else f"client {client}"


class InlineGrid(Grid):
    """Carries messages by calling the clients' code. A population of any size costs nothing until it is addressed."""

    def __init__(
        self, population: int, handler: CohortHandler, run_config: dict[str, str | int | float | bool]
    ) -> None:
        self.population, self.handler, self.run_config = population, handler, run_config
        self.states: dict[int, RecordDict] = {}
        self.replies: dict[str, Message] = {}
        self._run = FlowerRun.create_empty(run_id=1)
        self._sent = 0
        # Flower's Message constructor asks the process for its identity, which a SuperLink would have given it.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SERVER_NODE, 1

    def set_run(self, run: FlowerRun) -> None:
        """Set the Flower run."""
        self._run = run

    @property
    def run(self) -> FlowerRun:
        """The Flower run."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes of all clients."""
        return range(FIRST_NODE, FIRST_NODE + self.population)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver the messages; the clients answer at once."""
        batch = list(messages)
        identifiers = [str(self._sent + place) for place in range(1, len(batch) + 1)]
        self._sent += len(batch)
        for message, identifier in zip(batch, identifiers, strict=True):
            message.metadata.__dict__["_message_id"] = identifier
        self.replies.update(zip(identifiers, self._answer(batch), strict=True))
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to the messages with these ids."""
        return [self.replies.pop(message_id) for message_id in message_ids if message_id in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Deliver the messages and collect the replies; nobody is ever late here."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, messages: Sequence[Message]) -> list[Message]:
        if not messages:
            return []
        contexts = [self._context(message.metadata.dst_node_id) for message in messages]
        replies = self.handler(messages, contexts)
        for reply, context in zip(replies, contexts, strict=True):
            # As on Flower's other runtimes a client that failed keeps the state that it had before.
            if not reply.has_error() and context.state:
                self.states[context.node_id] = context.state
        return replies

    def _context(self, node: int) -> Context:
        node_config: dict[str, str | int | float | bool] = {
            "partition-id": client_of(node),
            "num-partitions": self.population,
            "simulated": True,
        }
        state = self.states[node].copy() if node in self.states else RecordDict()
        return Context(1, node, node_config, state, self.run_config)


def one_by_one(app: ClientApp) -> CohortHandler:
    """Answer each message with an ordinary ClientApp; an exception becomes an error reply, as in a deployment."""

    def handle(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Message]:
        return [answer(message, context) for message, context in zip(messages, contexts, strict=True)]

    def answer(message: Message, context: Context) -> Message:
        try:
            return app(message, context)
        except Exception as error:
            return error_reply(message, f"{type(error).__name__}: {error}")

    return handle


def error_reply(message: Message, reason: str, code: int = ErrorCode.CLIENT_APP_RAISED_EXCEPTION) -> Message:
    """The reply of a client that could not do what it was asked."""
    return Message(Error(code=code, reason=told(reason)), reply_to=message)


def told(reason: str) -> str:
    """A reason as it may be shown and kept: it may be anybody's, of any length, and hold codes for a terminal."""
    line = " ".join(reason[: 2 * LONGEST_REASON].split())
    plain = "".join(letter if letter.isprintable() else "?" for letter in line)
    return plain if len(plain) <= LONGEST_REASON else f"{plain[:LONGEST_REASON]}..."
