# SPDX-License-Identifier: Apache-2.0
"""The server's half of secure aggregation, wave by wave; see `secure_aggregation` for the protocol.

Who fails in a wave drops out of the round. The result is one reply with the sum, as the simulated access model
(`replies.secure_sum`) gives it, and the error replies: nothing of a single client is ever written down.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedsim.errors import RunError
from fedsim.federation.arrays import to_record
from fedsim.federation.inline import client_of, error_reply
from fedsim.federation.masking import Words, from_words
from fedsim.federation.secure_aggregation import Keys, threshold_of, unmasked_sum
from fedsim.federation.secure_client import TAIL
from fedsim.scenario import Scenario
from fedsim.training import Layout

Collect = Callable[[Sequence[Message]], list[Message]]
KEYS, SHARES, UNMASK = "train.keys", "train.shares", "train.unmask"


def secure_collect(
    grid: Grid, messages: Sequence[Message], scenario: Scenario, layout: Layout, collect: Collect
) -> list[Message]:
    """The sum of the clients' weighted updates as one reply, and an error reply from each client that dropped out.

    `collect` gives one reply to each message, and may try again: nothing is released by the first wave. The others are
    asked once.
    """
    if len(messages) < 2:
        raise RunError("secure aggregation of fewer than 2 clients would show an update; use a larger cohort")
    round_ = int(messages[0].content.config_records["config"]["server-round"])  # type: ignore[arg-type]
    waves = _Waves(grid, {client_of(m.metadata.dst_node_id): m for m in messages}, scenario.cohort.deadline)
    threshold = threshold_of(len(messages), all_needed=scenario.defence.client_dp is not None)
    asking = {client: waves.message(client, KEYS, {"server-round": round_}) for client in waves.originals}
    found = waves.sort(collect(list(asking.values())), "keys")
    keys: dict[int, Keys] = {c: (_bytes(r["sealing"]), _bytes(r["masking"])) for c, r in found.items()}
    commitments = {c: _bytes(r["commitment"]) for c, r in found.items()}
    if len(keys) < threshold:
        return waves.errors(threshold, len(keys))
    shares = _shares(waves, round_, keys, threshold)
    if len(shares) < threshold:
        return waves.errors(threshold, len(shares))
    keys = {client: keys[client] for client in shares}
    vectors = _vectors(waves, shares, layout.size + len(TAIL))
    if len(vectors) < threshold:
        return waves.errors(threshold, len(vectors))
    revealed = _revealed(waves, round_, list(keys), sorted(vectors))
    if len(revealed) < threshold:
        return waves.errors(threshold, len(revealed))
    by_client = {client: {holder: given[client] for holder, given in revealed.items()} for client in keys}
    try:
        total = from_words(unmasked_sum(vectors, keys, commitments, by_client, threshold))
    except ValueError as error:
        raise RunError(f"round {round_}: the sum cannot be unmasked, {error}; go on with --resume") from error
    answered = waves.answers[min(vectors)]
    return [Message(_sum(total, len(vectors), scenario, layout), reply_to=answered), *waves.failed.values()]


class _Waves:
    """Sends a wave to clients, and keeps who dropped out and why."""

    def __init__(self, grid: Grid, originals: Mapping[int, Message], deadline: float) -> None:
        self.grid, self.originals, self.deadline = grid, originals, deadline
        self.failed: dict[int, Message] = {}
        self.answers: dict[int, Message] = {}

    def message(self, client: int, kind: str, config: Mapping[str, Any]) -> Message:
        node = self.originals[client].metadata.dst_node_id
        return Message(RecordDict({"config": ConfigRecord(dict(config))}), node, kind)

    def send(self, messages: Sequence[Message]) -> list[Message]:
        return list(self.grid.send_and_receive(messages, timeout=self.deadline))

    def sort(self, replies: Sequence[Message], record: str) -> dict[int, ConfigRecord]:
        """The record of each reply that has it; who has none has dropped out."""
        found = {}
        for reply in replies:
            client = client_of(reply.metadata.src_node_id)
            content = None if reply.has_error() else reply.content.config_records.get(record)
            if content is None:
                self.drop(client, str(reply.error.reason) if reply.has_error() else f"its {record!r} is missing")
            else:
                found[client] = content
        return dict(sorted(found.items()))

    def drop(self, client: int, reason: str) -> None:
        self.failed[client] = error_reply(self.originals[client], reason)

    def errors(self, threshold: int, left: int) -> list[Message]:
        """Everybody's error reply, for a round that cannot be unmasked."""
        logging.getLogger("fedsim").warning("secure aggregation: %d of %d needed clients are left", left, threshold)
        reason = f"the round was given up: {left} clients were left, secure aggregation needs {threshold}"
        for client in self.originals:
            if client not in self.failed:
                self.drop(client, reason)
        return [self.failed[client] for client in sorted(self.failed)]


def _shares(waves: _Waves, round_: int, keys: Mapping[int, Keys], threshold: int) -> dict[int, dict[int, bytes]]:
    """shares[u][v]: what client u has sealed for v."""
    clients = sorted(keys)
    config = {
        "server-round": round_,
        "threshold": threshold,
        "clients": clients,
        "sealing-keys": [keys[client][0] for client in clients],
        "masking-keys": [keys[client][1] for client in clients],
    }
    found = waves.sort(waves.send([waves.message(client, SHARES, config) for client in clients]), "shares")
    shares = {}
    for client, record in found.items():
        given = _byte_list(record.get("shares"), len(clients))
        if given is None:
            waves.drop(client, "its shares are not one for each client")
        else:
            shares[client] = dict(zip(clients, given, strict=True))
    return shares


def _vectors(waves: _Waves, shares: Mapping[int, Mapping[int, bytes]], length: int) -> dict[int, Words]:
    """The masked vectors of those who sent one."""
    present, messages = sorted(shares), []
    for client in present:
        original = waves.originals[client]
        secure = ConfigRecord({"clients": present, "shares": [shares[other][client] for other in present]})
        content = RecordDict({**original.content, "secure": secure})
        messages.append(Message(content, original.metadata.dst_node_id, original.metadata.message_type))
    vectors = {}
    for reply in waves.send(messages):
        client = client_of(reply.metadata.src_node_id)
        try:
            if reply.has_error():
                raise ValueError(str(reply.error.reason))
            (array,) = reply.content.array_records["arrays"].values()
            if array.stype != "numpy.ndarray" or len(array.data) > 8 * length + 1024:
                raise ValueError("its masked vector has another length")
            vector = array.numpy()
            if vector.shape != (length,) or vector.dtype != np.uint64:
                raise ValueError(f"its masked vector is {vector.dtype}{list(vector.shape)}, expected uint64[{length}]")
            vectors[client], waves.answers[client] = vector, reply
        except Exception as error:  # whatever somebody's bytes can cause
            waves.drop(client, str(error))
    return vectors


def _revealed(waves: _Waves, round_: int, present: list[int], arrived: list[int]) -> dict[int, dict[int, bytes]]:
    """revealed[v][u]: the share of client u that v gives. Who fails here is in the sum all the same."""
    before = dict(waves.failed)
    config = {"server-round": round_, "arrived": arrived}
    found = waves.sort(waves.send([waves.message(client, UNMASK, config) for client in arrived]), "shares")
    waves.failed = before
    given = {holder: _byte_list(record.get("shares"), len(present)) for holder, record in found.items()}
    return {holder: dict(zip(present, s, strict=True)) for holder, s in given.items() if s is not None}


def _sum(total: np.ndarray[Any, np.dtype[np.float64]], clients: int, scenario: Scenario, layout: Layout) -> RecordDict:
    """The reply of `replies.secure_sum`, from the sum of the vectors."""
    tail = dict(zip(TAIL, total[layout.size :].tolist(), strict=True))
    metrics = MetricRecord({"weight": tail["weight"], "clients": clients})
    defence = scenario.defence
    if defence.client_dp is None:
        metrics["num-examples"] = round(tail["num-examples"])
        if defence.example_dp is None:
            metrics["train-loss"] = tail["train-loss"] / tail["weight"]
    elif defence.client_dp.adaptive is not None:
        metrics["clip-bit"] = tail["clip-bit"]
    row = torch.from_numpy(total[: layout.size]).float()
    return RecordDict({"arrays": to_record(row, layout), "metrics": metrics})


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else b""


def _byte_list(value: object, length: int) -> list[bytes] | None:
    fits = isinstance(value, list) and len(value) == length and all(isinstance(each, bytes) for each in value)
    return value if fits else None  # type: ignore[return-value]
