# SPDX-License-Identifier: Apache-2.0
"""The clients of a Flower runtime, addressed by their number: what makes a result the same on every engine.

Flower gives nodes random ids and says nothing of who they are, so each node is asked once for the partition of its own
configuration. From then on a client has the address that it has on the inline engine, whatever its node: the server's
loop and its strategies never see a Flower id, and replies are sorted by client.

Every message gets exactly one reply here. Who is not there, does not answer in time, answers for somebody else or
answers twice is an error reply with the reason, so that a round always ends.

Where nodes are known by their keys (a deployment by `fedsim deploy`), a node is believed only that it is the client
whose key it has: who claims another's number is refused, and the transcript says so. There every message is signed, and
every request to train is written down before it is sent (`asked`). Node ids are in no log and in no transcript: with
one of them, another client could address a message to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run as FlowerRun

from fedsim.errors import RunError
from fedsim.federation.asked import Journal, Rows
from fedsim.federation.inline import called, client_of, error_reply, node_of, told
from fedsim.federation.signature import Signer
from fedsim.scenario import CohortSection

POLL_SECONDS = (0.02, 1.0)
"""The first pause between two questions for replies, and the longest; each is 1.5 times the one before."""
ASK_SECONDS = 20.0
"""How long a round waits for a node that has just come to say which client it is; if it takes longer, the next does."""
JOIN_SECONDS = 60.0
"""How long the first message waits for clients that no node has answered for yet, if the deadline allows it."""
Owners = Callable[[], Mapping[int, int]]
"""Gives the client that each registered node is, by its key."""


class FleetGrid(Grid):
    """Carries messages to clients over another grid, which knows nodes only."""

    def __init__(
        self,
        grid: Grid,
        population: int,
        stop: threading.Event | None = None,
        owners: Owners | None = None,
        signer: Signer | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.grid, self.population, self.stop, self.owners = grid, population, stop, owners
        self.signer, self.journal = signer, journal
        self.vouched: dict[int, Rows] = {}
        """Between which numbers of rows a client trains; each request repeats it, and a client checks that it holds."""
        self.nodes: dict[int, int] = {}
        """The node of each client that has been found."""
        self.refused: list[tuple[int | None, str]] = []
        """Clients whose nodes have claimed a number that is not theirs, and what they claimed; None: nobody's node."""
        self._claims: dict[int, int | None] = {}
        """Which client each node that has answered says that it is; None: none of this federation."""
        self._asked: dict[str, int] = {}
        """The nodes that have not said yet which client they are, by the message that asks."""
        self._silent: set[int] = set()
        """Nodes that did not answer the last message."""
        self._waiting: dict[int, tuple[Message, str, int]] = {}
        self._joined = False

    def set_run(self, run: FlowerRun) -> None:
        """Set the Flower run."""
        self.grid.set_run(run)

    @property
    def run(self) -> FlowerRun:
        """The Flower run."""
        return self.grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message to a client."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """The addresses of all clients, found or not."""
        return map(node_of, range(self.population))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Not here: a reply must be held against its message."""
        raise NotImplementedError("use send_and_receive")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Not here: a reply must be held against its message."""
        raise NotImplementedError("use send_and_receive")

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """One reply to each message, in their order; a message that is still unanswered is waited for, not sent again.

        `timeout` is in seconds. Without one, nobody is waited for longer than JOIN_SECONDS to appear, and the others
        for as long as they take.
        """
        asked = list(messages)
        deadline = time.monotonic() + timeout if timeout is not None else None
        fresh = [message for message in asked if id(message) not in self._waiting]
        self._find([client_of(message.metadata.dst_node_id) for message in fresh], timeout)
        self._write_down(fresh)
        early = {id(message): reply for message in fresh if (reply := self._send(message)) is not None}
        arrived = self._collect([self._waiting[id(m)][1] for m in asked if id(m) not in early], deadline)
        replies = []
        for message in asked:
            if (reply := early.get(id(message))) is None:
                reply = self._one_reply(message, arrived.get(self._waiting[id(message)][1], []), timeout)
            replies.append(reply)
        return replies

    def forget(self) -> None:
        """Wait no longer for what was not answered in time; whatever still comes is left alone."""
        self._waiting.clear()
        if self.signer is not None:
            self.signer.forget()

    def _write_down(self, messages: Sequence[Message]) -> None:
        """Every request to train that is about to be sent, durably."""
        if self.journal is None:
            return
        rounds: dict[int, dict[int, Rows | None]] = {}
        for message in messages:
            client = client_of(message.metadata.dst_node_id)
            if message.metadata.message_type == MessageType.TRAIN and client in self.nodes:
                round_ = message.content.config_records["config"]["server-round"]
                rounds.setdefault(int(round_), {})[client] = self.vouched.get(client)  # type: ignore[arg-type]
        for round_, clients in rounds.items():
            self.journal.ask(round_, clients)

    def _outgoing(self, content: RecordDict, node: int, kind: str, client: int | None, ttl: float | None) -> Message:
        """A message to a node, signed where the clients know the server's key."""
        if self.signer is not None:
            content = self.signer.signed(content, node, kind, self.vouched.get(client) if client is not None else None)
        return Message(content, node, kind, ttl=ttl)

    def _send(self, message: Message) -> Message | None:
        """Send a message to its client's node; the reply, if that is not possible."""
        client = client_of(message.metadata.dst_node_id)
        node = self.nodes.get(client)
        if node is None:
            return error_reply(message, "no node has answered for this client", ErrorCode.NODE_UNAVAILABLE)
        outgoing = self._outgoing(message.content, node, message.metadata.message_type, client, message.metadata.ttl)
        (sent,) = list(self.grid.push_messages([outgoing])) or [""]
        if not sent:
            return error_reply(message, "its node takes no messages", ErrorCode.NODE_UNAVAILABLE)
        self._waiting[id(message)] = (message, sent, node)
        return None

    def _collect(self, identifiers: Sequence[str], deadline: float | None) -> dict[str, list[Message]]:
        """The replies to each of these messages, as far as they have come by the deadline."""
        arrived: dict[str, list[Message]] = {}
        missing, (pause, longest) = set(identifiers), POLL_SECONDS
        while missing:
            if self.stop is not None and self.stop.is_set():
                raise RunError("the run was stopped; go on with --resume")
            for reply in self.grid.pull_messages(missing):
                arrived.setdefault(reply.metadata.reply_to_message_id, []).append(reply)
            missing -= arrived.keys()
            if not missing or (deadline is not None and time.monotonic() >= deadline):
                break
            time.sleep(pause if deadline is None else max(0.0, min(pause, deadline - time.monotonic())))
            pause = min(1.5 * pause, longest)
        return arrived

    def _one_reply(self, message: Message, replies: Sequence[Message], timeout: float | None) -> Message:
        if not replies:
            self._silent.add(self._waiting[id(message)][2])
            return error_reply(message, f"no reply within {timeout or 0:g} s", ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
        expected = self._waiting.pop(id(message))[2]
        self._silent.discard(expected)
        if len(replies) > 1:
            return error_reply(message, f"it replied {len(replies)} times to one message")
        (reply,) = replies
        if reply.has_error():  # Flower reports a dead node from its own address, not from the node's
            if reply.error.code == ErrorCode.NODE_UNAVAILABLE:
                self._silent.add(expected)
            return error_reply(message, str(reply.error.reason), reply.error.code)
        if reply.metadata.src_node_id != expected:
            return error_reply(message, "the reply came from another node than that of the client")
        return Message(reply.content, reply_to=message)

    # --- who is who -------------------------------------------------------------------------------------------------

    def _find(self, clients: Sequence[int], timeout: float | None) -> None:
        """Find the nodes of these clients: those that are connected, and the first time those that come soon."""
        patience = min(JOIN_SECONDS, JOIN_SECONDS if timeout is None else timeout) if not self._joined else 0.0
        self._joined, until = True, time.monotonic() + patience
        while True:
            online = set(self.grid.get_node_ids())
            self.nodes = {client: node for client, node in self.nodes.items() if node in online}
            # Who has said something wrong, and is started again, is asked again.
            self._claims = {node: said for node, said in self._claims.items() if said is not None or node in online}
            self._ask_who(sorted(online - self._claims.keys()), max(patience, ASK_SECONDS))
            self._choose(online)
            if all(client in self.nodes for client in clients) or time.monotonic() >= until:
                return
            time.sleep(POLL_SECONDS[1])

    def _choose(self, online: set[int]) -> None:
        """One node for each client: the first that says it is the client, or the last, if the one before fell silent.

        A node that is started again without a key has another id, and Flower lists the dead one for a minute.
        """
        for node, client in self._claims.items():
            if client is not None and node in online and self.nodes.get(client, node) in {node, *self._silent}:
                self.nodes[client] = node

    def wait_for_all(self) -> None:
        """Let the next message wait for clients that are not connected, as the first one does."""
        self._joined = False

    def _ask_who(self, nodes: Sequence[int], patience: float) -> None:
        """Ask nodes for the number of their client, and remember those that have one of this federation."""
        fresh = [node for node in nodes if node not in self._asked.values()]
        for node in fresh:
            question = self._outgoing(RecordDict(), node, MessageType.QUERY, None, None)
            (identifier,) = list(self.grid.push_messages([question])) or [""]
            if identifier:
                self._asked[identifier] = node
        until = time.monotonic() + (patience if fresh else 0.0)
        for identifier, replies in self._collect(list(self._asked), until).items():
            self._introduce(self._asked.pop(identifier), replies[0])

    def _introduce(self, node: int, reply: Message) -> None:
        log = logging.getLogger("fedsim")
        if reply.has_error():
            log.warning("a node does not say which client it is: %s", told(str(reply.error.reason)))
            return
        answer = reply.content.config_records.get("client")
        client, population = (answer.get("partition-id"), answer.get("num-partitions")) if answer else (None, None)
        # Where keys say who is who, clients that joined before others did know of fewer.
        agreed = population == self.population or self.owners is not None
        if isinstance(client, int) and agreed and 0 <= client < self.population:
            if not self._is_its_own(node, client):
                self._claims[node] = None
                return
            self._claims[node] = client
            self._believe_rows(client, answer)
            if client in self.nodes:
                log.warning("another node says that it is %s, too", self._called(client))
            return
        self._claims[node] = None
        log.warning(
            "a node says that it is client %s of %s, but the scenario has %d clients, numbered from 0; start it"
            " with another partition-id and num-partitions", told(str(client)), told(str(population)), self.population
        )  # fmt: skip

    def _believe_rows(self, client: int, answer: ConfigRecord | None) -> None:
        """The rows that a client vouches for, where the requests repeat them so that it can refuse what it does not."""
        rows = Rows.read(answer.get("least-rows"), answer.get("most-rows")) if answer else None
        if rows is not None and self.signer is not None:
            self.vouched[client] = rows

    def _is_its_own(self, node: int, client: int) -> bool:
        """Whether a node's key is that of the client that it says it is; if not, it is written down."""
        if self.owners is None:
            return True
        own = self.owners().get(node)
        if own != client:
            key = "no client of this federation" if own is None else self._called(own)
            reason = f"a node says that it is {self._called(client)}, but its key is that of {key}; it is not asked"
            self.refused.append((own, reason))
            logging.getLogger("fedsim").warning("%s", reason)
        return own == client

    def _called(self, client: int) -> str:
        return called(client, deployed=self.owners is not None)


def collect(grid: Grid, messages: Sequence[Message], cohort: CohortSection) -> list[Message]:
    """One reply to each message. With too few that are no errors, those that are get another chance, so many times.

    Who failed is asked again, as it has released nothing; who is late is waited for, so that it releases only once.
    """
    replies = list(grid.send_and_receive(messages, timeout=cohort.deadline))
    for _ in range(cohort.retries):
        failed = [position for position, reply in enumerate(replies) if reply.has_error()]
        if len(messages) - len(failed) >= min(cohort.least_replies, len(messages)):
            break
        if isinstance(grid, FleetGrid):
            grid.wait_for_all()
        again = grid.send_and_receive([messages[position] for position in failed], timeout=cohort.deadline)
        for position, reply in zip(failed, again, strict=True):
            replies[position] = reply
    if isinstance(grid, FleetGrid):
        grid.forget()
    return replies
