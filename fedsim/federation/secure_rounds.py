# SPDX-License-Identifier: Apache-2.0
"""The server's half of secure aggregation, wave by wave; see `secure_aggregation` for the protocol.

Who fails in a wave, or sends what cannot be used, drops out of the round, and the transcript says why. The result is
one reply with the sum, as the simulated access model (`replies.secure_sum`) gives it, and the error replies: nothing of
a single client is ever written down.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedsim.errors import RunError
from fedsim.federation.arrays import to_record
from fedsim.federation.inline import client_of, error_reply
from fedsim.federation.masking import Words, from_words
from fedsim.federation.secure_aggregation import (
    Dealt,
    Keys,
    UnmaskingError,
    is_dealt,
    is_given,
    threshold_of,
    unmasked_sum,
    unusable_keys,
)
from fedsim.federation.secure_client import TAIL
from fedsim.federation.transcript import Transcript
from fedsim.scenario import Scenario
from fedsim.training import Layout

Collect = Callable[[Sequence[Message]], list[Message]]
KEYS, SHARES, UNMASK = "train.keys", "train.shares", "train.unmask"


SHUT_OUT = "shut out of secure aggregation, "


def secure_collect(
    grid: Grid,
    messages: Sequence[Message],
    scenario: Scenario,
    layout: Layout,
    collect: Collect,
    shut_out: dict[int, str],
) -> list[Message]:
    """The sum of the clients' weighted updates as one reply, and an error reply from each client that dropped out.

    `collect` gives one reply to each message, and may try again: nothing is released by the first wave. The others are
    asked once. `shut_out` holds the clients that have dealt wrongly, and is added to: where that leaves a sum masked,
    the round is tried again without them, cohort.retries times at most.
    """
    if len(messages) < 2:
        raise RunError("secure aggregation of fewer than 2 clients would show an update; use a larger cohort")
    originals = {client_of(message.metadata.dst_node_id): message for message in messages}
    threshold = threshold_of(len(messages), all_needed=scenario.defence.client_dp is not None)
    for attempts_left in reversed(range(1 + scenario.cohort.retries)):
        waves = _Waves(grid, originals, scenario.cohort.deadline, threshold, shut_out)
        try:
            vectors, words = _attempt(waves, collect, layout.size + len(TAIL))
        except UnmaskingError as error:
            shut_out.update(error.culprits)
            if error.culprits and attempts_left:
                logging.getLogger("fedsim").warning("secure aggregation begins again, %s", error)
                continue
            return waves.errors(str(error))
        reply = Message(_sum(from_words(words), len(vectors), scenario, layout), reply_to=waves.answers[min(vectors)])
        return [reply, *waves.failed.values()]
    raise AssertionError("there is at least one attempt")


def shut_out_before(folder: Path) -> dict[int, str]:
    """The clients that a run which is resumed has shut out."""
    if not (folder / "transcript").is_dir():
        return {}
    errors = [line for line in Transcript(folder / "transcript").messages() if line.kind == "error"]
    return {
        line.client: line.reason.removeprefix(SHUT_OUT)
        for line in errors
        if line.client is not None and line.reason is not None and line.reason.startswith(SHUT_OUT)
    }


def _attempt(waves: _Waves, collect: Collect, length: int) -> tuple[dict[int, Words], Words]:
    """The vectors that arrived and their unmasked sum, by the four waves; UnmaskingError where that cannot be."""
    waves.check(len(waves.asked))
    keys, commitments = _keys(waves, collect)
    waves.check(len(keys))
    shares = _shares(waves, keys)
    waves.check(len(shares))
    vectors = _vectors(waves, shares, length)
    waves.check(len(vectors))
    revealed = _revealed(waves, shares, set(vectors))
    waves.check(len(revealed))
    by_client = {client: {holder: given[client] for holder, given in revealed.items()} for client in shares}
    keys = {client: keys[client] for client in shares}
    return vectors, unmasked_sum(vectors, keys, commitments, by_client, waves.threshold)


class _Waves:
    """Sends a wave to clients, and keeps who dropped out and why."""

    def __init__(
        self,
        grid: Grid,
        originals: Mapping[int, Message],
        deadline: float,
        threshold: int,
        shut_out: Mapping[int, str],
    ) -> None:
        self.grid, self.originals, self.deadline, self.threshold = grid, originals, deadline, threshold
        config = next(iter(originals.values())).content.config_records["config"]
        self.round = int(config["server-round"])  # type: ignore[arg-type]
        self.asked = [client for client in originals if client not in shut_out]
        self.shut_out = shut_out
        self.failed: dict[int, Message] = {}
        self.answers: dict[int, Message] = {}
        for client in originals.keys() & shut_out.keys():
            self.drop(client, f"{SHUT_OUT}{shut_out[client]}")

    def check(self, left: int) -> None:
        """UnmaskingError, if too few are left."""
        if left < self.threshold:
            raise UnmaskingError(f"{left} clients were left, secure aggregation needs {self.threshold}")

    def message(self, client: int, kind: str, config: Mapping[str, Any]) -> Message:
        node = self.originals[client].metadata.dst_node_id
        content = ConfigRecord({"server-round": self.round, **config})
        return Message(RecordDict({"config": content}), node, kind)

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

    def errors(self, reason: str) -> list[Message]:
        """Everybody's error reply, for a round that cannot be unmasked."""
        logging.getLogger("fedsim").warning("secure aggregation: %s", reason)
        for client in self.originals:
            if client in self.shut_out:
                self.drop(client, f"{SHUT_OUT}{self.shut_out[client]}")
            elif client not in self.failed:
                self.drop(client, f"the round was given up: {reason}")
        return [self.failed[client] for client in sorted(self.failed)]


def _keys(waves: _Waves, collect: Collect) -> tuple[dict[int, Keys], dict[int, bytes]]:
    """The public keys and the commitment of each client that sent some that everybody can use."""
    found = waves.sort(collect([waves.message(client, KEYS, {}) for client in waves.asked]), "keys")
    published = {
        client: ((_bytes(r.get("sealing")), _bytes(r.get("masking"))), _bytes(r.get("commitment")))
        for client, r in found.items()
    }
    for client, reason in unusable_keys(published).items():
        waves.drop(client, reason)
        del published[client]
    return {c: keys for c, (keys, _) in published.items()}, {c: commitment for c, (_, commitment) in published.items()}


def _shares(waves: _Waves, keys: Mapping[int, Keys]) -> dict[int, dict[int, Dealt]]:
    """shares[u][v]: what client u has dealt to v."""
    clients = sorted(keys)
    config = {
        "threshold": waves.threshold,
        "clients": clients,
        "sealing-keys": [keys[client][0] for client in clients],
        "masking-keys": [keys[client][1] for client in clients],
    }
    found = waves.sort(waves.send([waves.message(client, SHARES, config) for client in clients]), "shares")
    shares = {}
    for client, record in found.items():
        sealed, prints = (_byte_list(record.get(name), len(clients)) for name in ("shares", "prints"))
        dealt = list(map(Dealt, sealed or [], prints or []))
        if len(dealt) != len(clients) or not all(map(is_dealt, dealt)):
            waves.drop(client, "its shares are not one for each client")
        else:
            shares[client] = dict(zip(clients, dealt, strict=True))
    return shares


def _vectors(waves: _Waves, shares: Mapping[int, Mapping[int, Dealt]], length: int) -> dict[int, Words]:
    """The masked vectors of those who sent one."""
    present, messages = sorted(shares), []
    for client in present:
        original = waves.originals[client]
        dealt = [shares[other][client] for other in present]
        secure = ConfigRecord(
            {"clients": present, "shares": [d.sealed for d in dealt], "prints": [d.prints for d in dealt]}
        )
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


def _revealed(
    waves: _Waves, shares: Mapping[int, Mapping[int, Dealt]], arrived: set[int]
) -> dict[int, dict[int, bytes]]:
    """revealed[v][u]: the share of client u that v gives. Who fails here is in the sum all the same."""
    present, before = sorted(shares), dict(waves.failed)
    asking = [waves.message(client, UNMASK, {"arrived": sorted(arrived)}) for client in sorted(arrived)]
    found = waves.sort(waves.send(asking), "shares")
    waves.failed = before
    label, revealed = f"{waves.grid.run.run_id}|{waves.round}", {}
    for holder, record in found.items():
        given = dict(zip(present, _byte_list(record.get("shares"), len(present)) or [], strict=False))
        if len(given) == len(present) and all(
            is_given(share, shares[u][holder], label, u, holder, seed=u in arrived) for u, share in given.items()
        ):
            revealed[holder] = given
        else:
            waves.drop(holder, "its update is in the sum, but the shares that it gave are not those that it was dealt")
    return revealed


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
