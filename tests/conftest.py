# SPDX-License-Identifier: Apache-2.0
"""A Flower grid as it is outside a simulation, in the process: random node ids, and nodes that misbehave as told."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity

from fedsim.federation import run as running
from fedsim.federation.client import app
from fedsim.federation.inline import CohortHandler

Config = dict[str, str | int | float | bool]
Behaviour = Callable[[Message, Context, Callable[[Message, Context], Message]], list[Message] | None]


@dataclass
class World:
    """What the nodes do: `behaviour` gets a train message, the node's context and the honest ClientApp."""

    behaviour: Behaviour = lambda message, context, honest: [honest(message, context)]
    node_config: dict[int, Config] = field(default_factory=dict)
    offline: set[int] = field(default_factory=set)
    trained: list[tuple[int, int]] = field(default_factory=list)
    """(round, client) of every train message."""
    extra: list[Config] = field(default_factory=list)
    """Configurations of nodes beyond those of the population."""
    grids: list[ScatteredGrid] = field(default_factory=list)


class ScatteredGrid(Grid):
    """Nodes with random ids, which answer by the real ClientApp, or as the world's behaviour wants it."""

    def __init__(self, world: World, population: int, run_config: Config) -> None:
        self.world, self.population, self.run_config = world, population, run_config
        rng = random.Random(7)
        self.configs: dict[int, Config] = {}
        for client in rng.sample(range(population), population):
            config = world.node_config.get(client, {"simulated": True})
            own: Config = {"partition-id": client, "num-partitions": population, **config}
            self.configs[rng.getrandbits(63)] = own
        for extra in world.extra:
            self.configs[rng.getrandbits(63)] = extra
        self.states: dict[int, RecordDict] = {}
        self.replies: dict[str, list[Message]] = {}
        self.late: dict[str, list[Message]] = {}
        self._run = FlowerRun.create_empty(run_id=1)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        world.grids.append(self)

    def set_run(self, run: FlowerRun) -> None:
        self._run = run

    @property
    def run(self) -> FlowerRun:
        return self._run

    def create_message(self, *arguments: object, **named: object) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node for node, config in self.configs.items() if config["partition-id"] not in self.world.offline]

    def reconnect(self, client: int) -> None:
        """Without keys a node that is started again has another id."""
        (old,) = [node for node, config in self.configs.items() if config["partition-id"] == client]
        self.configs[old + 1] = self.configs.pop(old)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identifiers = []
        for message in messages:
            identifier = str(uuid.uuid4())
            message.metadata.__dict__["_message_id"] = identifier
            self.replies[identifier] = self._answer(message)
            identifiers.append(identifier)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for identifier in list(message_ids) for reply in self.replies.pop(identifier, [])]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def _answer(self, message: Message) -> list[Message]:
        node = message.metadata.dst_node_id
        context = Context(1, node, self.configs[node], self.states.get(node, RecordDict()), self.run_config)
        if message.metadata.message_type == "query":
            return [app(message, context)]
        round_ = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
        if message.metadata.message_type == "train":
            self.world.trained.append((round_, int(self.configs[node]["partition-id"])))
        replies = self.world.behaviour(message, context, app)
        self.states[node] = context.state
        return replies or []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", action="store_true", help="print what was expected of each fault, and what happened")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Runs of this test are on a ScatteredGrid."""
    made = World()

    def grid(population: int, handler: CohortHandler, run_config: Config) -> ScatteredGrid:
        return ScatteredGrid(made, population, run_config)

    monkeypatch.setattr(running, "InlineGrid", grid)
    return made
