# SPDX-License-Identifier: Apache-2.0
"""The ClientApp: what a client does with the model that the server sends.

`answer` does it for a whole cohort at once in the replica kernel; the ClientApp's own train function is a cohort of
one, so that a simulated client and a deployed one run the same code.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedsim.data import Dataset, Partition, load_dataset, make_partition
from fedsim.errors import FedsimError
from fedsim.federation.arrays import to_flat, to_record
from fedsim.federation.inline import error_reply
from fedsim.federation.inspection import inspect_model
from fedsim.models import build_model
from fedsim.privacy import add_gaussian, add_laplace, clip, noise_share, prune, quantise, sign, within_norm
from fedsim.randomness import ClientRandomness
from fedsim.scenario import Compression, Prune, Quantise, Scenario
from fedsim.training import CohortResult, ExampleClipping, Layout, LocalWork, layout_of, train_cohort

INSPECTED = 64  # examples that a client tries a model on before it trains with it


@dataclass(frozen=True)
class Workplace:
    """What the clients of a simulation have at hand: the data, its partition, and the model's architecture."""

    scenario: Scenario
    dataset: Dataset
    partition: Partition
    model: nn.Module
    layout: Layout


@lru_cache(maxsize=4)
def workplace(scenario_json: str) -> Workplace:
    """The workplace of a scenario, built once in a process."""
    scenario = Scenario.model_validate_json(scenario_json)
    dataset = load_dataset(scenario.data, scenario.seed)
    partition = make_partition(scenario.partition, dataset, scenario.cohort.population, scenario.seed)
    shape = tuple(dataset.x_train.shape[1:])
    model = build_model(scenario.model, shape, dataset.classes, scenario.seed, kind=dataset.kind)
    return Workplace(scenario, dataset, partition, model, layout_of(model))


def is_private(scenario: Scenario) -> bool:
    """Whether the clients' defence makes a privacy claim."""
    return scenario.defence.example_dp is not None or scenario.defence.client_dp is not None


def local_work(scenario: Scenario, example_noise: float) -> LocalWork:
    """The local work that a scenario asks of a client."""
    client, example_dp = scenario.client, scenario.defence.example_dp
    clipping = None
    if example_dp is not None:
        clipping = ExampleClipping(example_dp.clipping_norm, example_noise, example_dp.batches)
    return LocalWork(
        kind=scenario.strategy.name,
        optimizer=client.optimizer,
        learning_rate=client.learning_rate,
        momentum=client.momentum,
        weight_decay=client.weight_decay,
        epochs=client.epochs,
        steps=client.steps,
        batch_size=client.batch_size,
        shuffle=client.shuffle,
        example_dp=clipping,
    )


def answer(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Message]:
    """The replies of a cohort, in the order of the messages. A client that fails does not disturb the others."""
    place = workplace(str(contexts[0].run_config["scenario"]))
    replies: list[Message | None] = [None] * len(messages)
    # A malicious server may send every client something else: those that got the same are trained together.
    same: dict[tuple[int, int], list[int]] = {}
    for position, message in enumerate(messages):
        same.setdefault((id(message.content["arrays"]), id(message.content["config"])), []).append(position)
    for positions in same.values():
        group = [messages[i] for i in positions]
        clients = [int(contexts[i].node_config["partition-id"]) for i in positions]
        for i, reply in zip(positions, _answer_group(place, group, clients), strict=True):
            replies[i] = reply
    return [reply for reply in replies if reply is not None]


def _answer_group(place: Workplace, messages: Sequence[Message], clients: Sequence[int]) -> list[Message]:
    try:
        return _train(place, messages, clients)
    except (FedsimError, ValueError, RuntimeError) as error:
        if len(messages) == 1:
            # Why a client fails may be a fact about its data: under a claim the server is not told.
            logging.getLogger("fedsim").warning("client %d could not train: %s", clients[0], error)
            reason = "the client could not train; its own log says why" if is_private(place.scenario) else str(error)
            return [error_reply(messages[0], reason)]
        pairs = zip(messages, clients, strict=True)
        return [reply for message, client in pairs for reply in _answer_group(place, [message], [client])]


def _train(place: Workplace, messages: Sequence[Message], clients: Sequence[int]) -> list[Message]:
    scenario, config = place.scenario, messages[0].content.config_records["config"]
    randomness = [ClientRandomness(scenario.seed, int(_number(config, "server-round")), client) for client in clients]
    start = to_flat(messages[0].content.array_records["arrays"], place.layout)
    if scenario.defence.inspect_model != "off":
        for client in clients:
            _inspect(place, start, client)
    work = local_work(scenario, _number(config, "example-noise-multiplier"))
    result = _local_results(place, clients, start, work, randomness)
    weights = result.examples.float() if config["weighting"] == "examples" else torch.ones(len(clients))
    updates, bits = protect(result.updates, scenario, config, randomness)
    if scenario.defence.secure_aggregation:
        updates = updates * weights[:, None]
    replies = []
    for k, message in enumerate(messages):
        metrics = MetricRecord({"weight": float(weights[k]), **_extras(scenario, result, bits, k)})
        content = RecordDict({"arrays": to_record(updates[k], place.layout), "metrics": metrics})
        replies.append(Message(content, reply_to=message))
    return replies


def _inspect(place: Workplace, start: Tensor, client: int) -> None:
    """Warn of a model that looks as if it were made to leak, or refuse it.

    Under a privacy claim only the weights are looked at: what depends on the client's data must not show in a refusal.
    """
    rows = place.partition.members(client)[:INSPECTED]
    private = is_private(place.scenario) or not len(rows)
    examples = None if private else (place.dataset.x_train[rows], place.dataset.y_train[rows])
    suspicions = inspect_model(place.model, place.layout.unflatten(start), examples)
    if not suspicions:
        return
    reasons = "; ".join(map(str, suspicions))
    if place.scenario.defence.inspect_model == "refuse":
        raise FedsimError(f"the model looks as if it were made to leak: {reasons}")
    logging.getLogger("fedsim").warning("client %d was sent a model that looks made to leak: %s", client, reasons)


def _local_results(
    place: Workplace, clients: Sequence[int], start: Tensor, work: LocalWork, randomness: Sequence[ClientRandomness]
) -> CohortResult:
    """Train the clients. One without examples fails; but under a claim for clients it sends zero, and its noise.

    That it has nothing is a fact about its data, which a refusal would tell.
    """
    members = [place.partition.members(client) for client in clients]
    for client, rows in zip(clients, members, strict=True):
        if len(rows) == 0 and place.scenario.defence.client_dp is None:
            raise FedsimError(f"client {client} holds no examples; choose a partition that gives it some")
    x, y = place.dataset.x_train, place.dataset.y_train
    return train_cohort(place.model, start, x, y, members, work, randomness, chunk=place.scenario.engine.chunk)


def _extras(scenario: Scenario, result: CohortResult, bits: Tensor | None, k: int) -> dict[str, float | int]:
    """What client k tells beside its update: under a claim nothing that is not noised, or public in that claim.

    How many examples a client has is public under a claim for examples, and not under one for clients. A training loss
    is never noised, so it leaves only where nothing is claimed.
    """
    extras: dict[str, float | int] = {}
    if scenario.defence.client_dp is None:
        extras |= {"num-examples": int(result.examples[k]), "steps": int(result.steps[k])}
        if scenario.defence.example_dp is None:
            extras["train-loss"] = float(result.loss[k])
    if bits is not None:
        extras["clip-bit"] = float(bits[k])
    return extras


def protect(
    updates: Tensor, scenario: Scenario, config: ConfigRecord, randomness: Sequence[ClientRandomness]
) -> tuple[Tensor, Tensor | None]:
    """The client-level defence of a cohort's updates (K, P): clip, noise, compress; and the noisy bits b_k + N(0, s^2).

    Under secure aggregation n clients share the noise: each adds 1/sqrt(n) of its standard deviation, so that the sum
    has all of it. The bit of adaptive clipping says whether the norm was within the clipping norm (Andrew et al. 2021).
    """
    defence, bits = scenario.defence, None
    if defence.client_dp is not None:
        sharing = int(_number(config, "cohort-size")) if defence.secure_aggregation else 1
        norm = _number(config, "clipping-norm")
        generators = [each.client_noise() for each in randomness]
        if defence.client_dp.adaptive is not None:
            noise = torch.tensor([generator.standard_normal() for generator in generators], dtype=torch.float64)
            bits = within_norm(updates, norm) + noise_share(defence.client_dp.adaptive.bit_noise, sharing) * noise
        gaussian = defence.client_dp.noise == "gaussian"
        add_noise = add_gaussian if gaussian else add_laplace
        clipped = clip(updates, norm, 2 if gaussian else 1)
        updates = add_noise(clipped, noise_share(_number(config, "client-noise-multiplier"), sharing), generators)
    return compress(updates, defence.compression), bits


def compress(updates: Tensor, compression: Compression | None) -> Tensor:
    """The updates (K, P) as they are sent."""
    if compression is None:
        return updates
    if isinstance(compression, Prune):
        return prune(updates, compression.keep)
    return quantise(updates, compression.bits) if isinstance(compression, Quantise) else sign(updates)


def _number(config: ConfigRecord, key: str) -> float:
    value = config[key]
    if not isinstance(value, int | float):
        raise FedsimError(f"the server sent {key} {value!r}, which is not a number")
    return float(value)


app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer one message: a client is a cohort of one."""
    return answer([message], [context])[0]
