# SPDX-License-Identifier: Apache-2.0
"""The ClientApp: what a client does with the model that the server sends.

`answer` does it for a whole cohort at once in the replica kernel; the ClientApp's own train function is a cohort of
one, so that a simulated client and a deployed one run the same code. A deployed client has a policy, a ledger, data
and randomness of its own (`safeguards`): they are asked before anything is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.federation.arrays import Promised, Row, record_of, to_flat, to_records
from fedsim.federation.guard import Handler, always_answering, reason_of
from fedsim.federation.inline import error_reply
from fedsim.federation.inspection import inspect_model
from fedsim.federation.messages import replies_to
from fedsim.federation.safeguards import Safeguards, SystemRandomness
from fedsim.federation.safeguards import number as _number
from fedsim.federation.secure_client import check_ready, give_keys, give_shares, give_unmasking, mask_reply
from fedsim.federation.workplace import Workplace, is_private, local_work, workplace
from fedsim.privacy import add_gaussian, add_laplace, clip, noise_share, prune, quantise, sign, within_norm
from fedsim.privacy.secure_noise import add_secure_laplace
from fedsim.randomness import ClientRandomness
from fedsim.scenario import Compression, Prune, Quantise, Scenario
from fedsim.training import CohortResult, LocalWork, train_cohort

INSPECTED = 64  # examples that a client tries a model on before it trains with it


__all__ = ["Workplace", "answer", "app", "compress", "is_private", "local_work", "protect", "workplace"]


def answer(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Message]:
    """The replies of a cohort, in the order of the messages. A client that fails does not disturb the others."""
    own = Safeguards.of(contexts[0])  # a deployed client is alone in its process
    place = _place(contexts[0])
    replies: list[Message | None] = [None] * len(messages)
    # A malicious server may send every client something else: those that got the same are trained together.
    same: dict[tuple[int, ...], list[int]] = {}
    contents = {id(message.content): message.content for message in messages}
    keys = {key: (id(content["arrays"]), id(content["config"])) for key, content in contents.items()}
    for position, message in enumerate(messages):
        same.setdefault(keys[id(message.content)], []).append(position)
    for positions in same.values():
        group = [messages[i] for i in positions]
        clients = [int(contexts[i].node_config["partition-id"]) for i in positions]
        for i, reply in zip(positions, _answer_group(place, group, clients, own), strict=True):
            replies[i] = reply
    return [reply for reply in replies if reply is not None]


def _place(context: Context) -> Workplace:
    own, asked = Safeguards.of(context), str(context.run_config["scenario"])
    if own is None:
        return workplace(asked)
    own.admit(Scenario.model_validate_json(asked))
    return workplace(asked, own.data_path, own.clients, own.largest_model())


def _answer_group(
    place: Workplace, messages: Sequence[Message], clients: Sequence[int], own: Safeguards | None
) -> list[Message]:
    try:
        return _train(place, messages, clients, own)
    except Exception as error:
        if len(messages) == 1:
            # Why a client fails may be a fact about its data: under a claim the server is not told.
            hidden = own is not None or is_private(place.scenario)
            who = f"client {clients[0]}" if own is None else "this client"
            return [error_reply(messages[0], reason_of(error, who, hidden=hidden))]
        pairs = zip(messages, clients, strict=True)
        return [reply for message, client in pairs for reply in _answer_group(place, [message], [client], own)]


def _train(
    place: Workplace, messages: Sequence[Message], clients: Sequence[int], own: Safeguards | None
) -> list[Message]:
    scenario, config = place.scenario, messages[0].content.config_records["config"]
    round_ = int(_number(config, "server-round"))
    start = to_flat(messages[0].content.array_records["arrays"], place.layout)
    if own is not None:
        own.check(scenario, messages[0].content, start, place.partition.size(clients[0]))
    inspection = scenario.defence.inspect_model if own is None else own.inspection()
    if inspection != "off":
        for client in clients:
            _inspect(place, start, client, refuse=inspection == "refuse")
    if own is not None:
        own.charge(scenario, config, start, place.partition.size(clients[0]))
    source = ClientRandomness if own is None else SystemRandomness
    randomness = [source(scenario.seed, round_, client) for client in clients]
    work = local_work(scenario, _number(config, "example-noise-multiplier"))
    result = _local_results(place, clients, start, work, randomness)
    # By whatever the server asks for: a weight tells how many examples there are, which a claim for clients keeps.
    by_examples = config["weighting"] == "examples" and scenario.defence.client_dp is None
    weights = result.examples.float() if by_examples else torch.ones(len(clients))
    rows, bits = _sent(result, weights, scenario, config, randomness)
    told = {"weight": weights.tolist(), **_extras(scenario, result, bits)}
    metrics = [
        record_of(MetricRecord, dict(zip(told, numbers, strict=True))) for numbers in zip(*told.values(), strict=True)
    ]
    pairs = zip(to_records(rows, place.layout), metrics, strict=True)
    return replies_to(messages, [record_of(RecordDict, {"arrays": a, "metrics": m}) for a, m in pairs])


def _inspect(place: Workplace, start: Tensor, client: int, *, refuse: bool) -> None:
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
    if refuse:
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


def _extras(scenario: Scenario, result: CohortResult, bits: Tensor | None) -> dict[str, list[Any]]:
    """What each client tells beside its update: under a claim nothing that is not noised, or public in that claim.

    How many examples a client has is public under a claim for examples, and not under one for clients. A training loss
    is never noised, so it leaves only where nothing is claimed.
    """
    extras: dict[str, Tensor] = {}
    if scenario.defence.client_dp is None:
        extras |= {"num-examples": result.examples, "steps": result.steps}
        if scenario.defence.example_dp is None:
            extras["train-loss"] = result.loss
    if bits is not None:
        extras["clip-bit"] = bits
    return {name: numbers.tolist() for name, numbers in extras.items()}


def _sent(
    result: CohortResult,
    weights: Tensor,
    scenario: Scenario,
    config: ConfigRecord,
    randomness: Sequence[ClientRandomness],
) -> tuple[Sequence[Row], Tensor | None]:
    """What leaves the clients, and their noisy bits: what the defence makes of their updates.

    Without one, the updates themselves, which nobody computes before they are read.
    """
    defence = scenario.defence
    if defence.client_dp is None and defence.compression is None and not defence.secure_aggregation:
        return [Promised(result, place) for place in range(len(weights))], None
    updates, bits = protect(result.updates, scenario, config, randomness)
    return (updates * weights[:, None] if defence.secure_aggregation else updates).unbind(), bits


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
        own_noise = randomness[0].add_noise
        if defence.client_dp.adaptive is not None and own_noise is not None:
            share = noise_share(defence.client_dp.adaptive.bit_noise, sharing)
            bits = own_noise(within_norm(updates, norm).double(), share, 1.0)
        elif defence.client_dp.adaptive is not None:
            noise = torch.tensor([generator.standard_normal() for generator in generators], dtype=torch.float64)
            bits = within_norm(updates, norm) + noise_share(defence.client_dp.adaptive.bit_noise, sharing) * noise
        gaussian = defence.client_dp.noise == "gaussian"
        add_noise = add_gaussian if gaussian else add_laplace
        clipped = clip(updates, norm, 2 if gaussian else 1)
        multiplier = noise_share(_number(config, "client-noise-multiplier"), sharing)
        if own_noise is None:
            updates = add_noise(clipped, multiplier, generators)
        else:
            add_own = own_noise if gaussian else add_secure_laplace
            updates = torch.stack([add_own(row, multiplier, norm) for row in clipped.values])
    return compress(updates, defence.compression), bits


def compress(updates: Tensor, compression: Compression | None) -> Tensor:
    """The updates (K, P) as they are sent."""
    if compression is None:
        return updates
    if isinstance(compression, Prune):
        return prune(updates, compression.keep)
    return quantise(updates, compression.bits) if isinstance(compression, Quantise) else sign(updates)


app = ClientApp()


def _answering(handler: Handler, *, secretive: Callable[[Context], bool] = lambda context: False) -> Handler:
    """A handler that always answers, and does nothing for anybody but the client's own server."""

    def believing(message: Message, context: Context) -> Message:
        own = Safeguards.of(context)
        if own is not None:
            own.believe(message, context)
        return handler(message, context)

    return always_answering(believing, secretive=secretive)


def _claims_privacy(context: Context) -> bool:
    """Whether a reason of failure stays on this machine: under a claim, and always where the data is a real owner's."""
    return Safeguards.of(context) is not None or is_private(
        Scenario.model_validate_json(str(context.run_config["scenario"]))
    )


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer one message: a client is a cohort of one."""
    return _answering(_train_alone, secretive=_claims_privacy)(message, context)


def _train_alone(message: Message, context: Context) -> Message:
    scenario = Scenario.model_validate_json(str(context.run_config["scenario"]))
    # A simulated client trusts its engine to add up; from a real one an update that must be summed leaves masked only.
    masks = scenario.defence.secure_aggregation and (
        bool(context.run_config.get("deployed")) or Safeguards.of(context) is not None
    )
    if masks:
        check_ready(message, context)
    reply = answer([message], [context])[0]
    return mask_reply(message, context, reply, _place(context).layout) if masks and not reply.has_error() else reply


@app.train("keys")
def keys(message: Message, context: Context) -> Message:
    """First wave of secure aggregation."""
    return _answering(give_keys, secretive=_claims_privacy)(message, context)


@app.train("shares")
def shares(message: Message, context: Context) -> Message:
    """Second wave of secure aggregation."""

    def give(message: Message, context: Context) -> Message:
        scenario = Scenario.model_validate_json(str(context.run_config["scenario"]))
        return give_shares(message, context, scenario)

    return _answering(give, secretive=_claims_privacy)(message, context)


@app.train("unmask")
def unmask(message: Message, context: Context) -> Message:
    """Last wave of secure aggregation."""
    return _answering(give_unmasking, secretive=_claims_privacy)(message, context)


@app.query()
def who(message: Message, context: Context) -> Message:
    """Say which client this is: Flower's node ids are random, and the server samples clients by their number."""
    return _answering(_who)(message, context)


def _who(message: Message, context: Context) -> Message:
    number = {key: int(context.node_config[key]) for key in ("partition-id", "num-partitions")}
    own = Safeguards.of(context)
    rows = own.vouched() if own is not None else None
    if rows is not None:
        number |= {"least-rows": rows.least, "most-rows": rows.most or 0}
    return Message(RecordDict({"client": ConfigRecord(dict(number))}), reply_to=message)
