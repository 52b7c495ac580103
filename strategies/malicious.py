# SPDX-License-Identifier: Apache-2.0
"""The active server: an honest strategy that in some rounds sends weights which are made to leak.

It differs from the honest strategy only in the messages that it configures, so it runs wherever that runs. The honest
model waits: a crafted model's update is read and not trained with, so that the next rounds go on as if nothing had
happened. Crafted weights are a function of the honest model, the round and the seed; a resumed run sends the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedsim.attacks import crafting
from fedsim.attacks.fishing import craft_fishing
from fedsim.data import Dataset, Partition
from fedsim.errors import AttackError, ScenarioError, counted
from fedsim.federation.arrays import to_flat, to_record
from fedsim.randomness import stream
from fedsim.scenario import FishingServer, ImprintServer, PerClientServer, Scenario, TrapServer
from fedsim.strategies.fedavg import FedAvg
from fedsim.strategies.replies import Arrival, sum_of
from fedsim.training import Layout, LocalWork, batch_schedule

Crafted = tuple[Tensor, dict[int, Tensor]]
PUBLIC_ROWS = 2000  # more sharpen the quantiles no further


@dataclass(frozen=True, eq=False)
class Forge:
    """What the server crafts with: the architecture, its held-out rows as public data, and what clients will do."""

    scenario: Scenario
    model: nn.Module
    layout: Layout
    dataset: Dataset
    work: LocalWork
    typical_examples: int
    """How many examples a client holds, about."""

    def craft(self, honest: Tensor, round_: int, clients: Sequence[int]) -> Crafted:
        """The crafted model (P,), and that of each client (P,), which may be the same object."""
        section = self.scenario.adversary.active
        weights = {name: tensor.clone() for name, tensor in self.layout.unflatten(honest).items()}
        every = max(1, len(self.dataset.x_test) // PUBLIC_ROWS)  # rows may be sorted by class
        public, labels = self.dataset.x_test[::every], self.dataset.y_test[::every]
        seed = int(stream(self.scenario.seed, "craft", round_).integers(2**62))
        batch = min(self.work.batch_size or self.typical_examples, self.typical_examples)
        if isinstance(section, FishingServer):
            flat = self.layout.flatten(craft_fishing(self.model, weights, public, labels, section, batch_size=batch))
            return flat, dict.fromkeys(clients, flat)
        front = crafting.find_front(self.model, self.dataset.input_shape)
        if isinstance(section, PerClientServer):
            everybody, models = crafting.craft_per_client(
                weights, front, public, section, clients, seed=seed, steps=self._steps()
            )
            return self.layout.flatten(everybody), {who: self.layout.flatten(each) for who, each in models.items()}
        if isinstance(section, TrapServer):
            crafted = crafting.craft_trap(weights, front, public, section, batch_size=batch, seed=seed)
        else:
            assert isinstance(section, ImprintServer)
            crafted = crafting.craft_imprint(weights, front, public, section, seed=seed, steps=self._steps())
        flat = self.layout.flatten(crafted)
        return flat, dict.fromkeys(clients, flat)

    def _steps(self) -> int:
        return len(batch_schedule(self.typical_examples, self.work, stream(0, "craft-steps")))


def forge_of(
    scenario: Scenario, model: nn.Module, layout: Layout, dataset: Dataset, partition: Partition, work: LocalWork
) -> Forge:
    """What an active server crafts with; how many examples a client holds it knows on average only."""
    return Forge(scenario, model, layout, dataset, work, max(1, len(dataset.x_train) // partition.population))


def check_active(forge: Forge, start: Tensor, cohort: Sequence[int]) -> None:
    """ScenarioError, before anything is written, for an active server that this model or this data does not allow."""
    if forge.dataset.kind == "text":
        raise ScenarioError(
            "adversary.active: crafted weights read images and tables, and the data is text; leave it out"
        )
    public = forge.dataset.x_test
    if bool((public == public[0]).all()):
        raise ScenarioError(
            f"adversary.active: crafted weights are fitted to the held-out rows, and {counted(len(public), 'row')} that"
            " do not differ have no spread; raise data.test_fraction"
        )
    try:
        crafted, models = forge.craft(start, 1, cohort)
    except AttackError as error:
        raise ScenarioError(f"adversary.active: {error}") from error
    if not all(bool(weights.isfinite().all()) for weights in (crafted, *models.values())):
        raise ScenarioError(
            f"adversary.active: the weights crafted from {counted(len(public), 'held-out row')} are not finite; raise"
            " data.test_fraction, or lower adversary.active.gain"
        )


def malicious(strategy: type[FedAvg], forge: Forge) -> type[FedAvg]:
    """The strategy, with the messages and the aggregation of an active server."""

    class Malicious(strategy):  # type: ignore[misc, valid-type]
        """Sends crafted weights in the rounds and to the clients that the scenario names."""

        template: Tensor | None = None
        """What the models of this round were made from, where they differ from client to client."""

        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            messages = list(super().configure_train(server_round, arrays, config, grid))
            targets = self.targets(server_round, [self.rules.client_of(m.metadata.dst_node_id) for m in messages])
            self.template = None
            if not targets:
                return messages
            self.template, models = forge.craft(self.model, server_round, targets)
            records = {id(model): to_record(model, self.layout) for model in models.values()}
            for position, message in enumerate(messages):
                client = self.rules.client_of(message.metadata.dst_node_id)
                if client in models:
                    content = {**message.content, "arrays": records[id(models[client])]}
                    node, kind = message.metadata.dst_node_id, message.metadata.message_type
                    messages[position] = Message(RecordDict(content), node, kind)
            return messages

        def targets(self, server_round: int, cohort: Sequence[int]) -> list[int]:
            """Who gets a crafted model in a round."""
            active = forge.scenario.adversary.active
            if active is None or server_round not in active.rounds:
                return []
            return [client for client in cohort if active.clients == "all" or client in active.clients]

        def _average(self, server_round: int, arrivals: Sequence[Arrival], total: Tensor | None) -> Tensor:
            """The average over those who got the honest model; nothing, where nobody did or where sums hide who did."""
            targets = set(self.targets(server_round, self.rules.cohort(server_round)))
            if not targets:
                return super()._average(server_round, arrivals, total)  # type: ignore[no-any-return]
            honest = [a for a in arrivals if a.client is not None and a.client not in targets]
            if not honest:
                return torch.zeros(self.layout.size)
            return super()._average(server_round, honest, sum_of(honest))  # type: ignore[no-any-return]

    return Malicious


def sent_models(messages: Sequence[Message], layout: Layout) -> dict[int, Tensor]:
    """The model (P,) that went to each node; the same object for those that got the same."""
    contents = {id(message.content): message.content for message in messages}
    records = {key: content.array_records["arrays"] for key, content in contents.items()}
    models = {id(record): to_flat(record, layout) for record in records.values()}
    return {message.metadata.dst_node_id: models[id(records[id(message.content)])] for message in messages}
