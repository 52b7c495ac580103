# SPDX-License-Identifier: Apache-2.0
"""A client's half of secure aggregation, message by message; what it must remember is in the state of its node.

Each wave is answered once, in order, and with secrets that are fresh in every attempt of a round; after the last one
they are gone. Flower pushes a reply before the state that belongs to it: a client that is killed in between comes back
with the state of the wave before, and would use its masks, or open shares, a second time. So that a wave is answered is
written to the client's ledger first, and is on the disk before anything leaves.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedsim.errors import PolicyError
from fedsim.federation.masking import FRACTION, to_words
from fedsim.federation.safeguards import Safeguards, number
from fedsim.federation.secure_aggregation import Dealt, Keys, Secrets, masked, sealed_shares, threshold_of, unmasking
from fedsim.scenario import Scenario
from fedsim.training import Layout

STATE = "secure-aggregation"
TAIL = ("weight", "num-examples", "train-loss", "clip-bit")
"""What is summed beside the update; a number that a client does not tell counts as zero. The loss is weighted."""


def give_keys(message: Message, context: Context) -> Message:
    """Wave 1: fresh public keys."""
    own = Secrets.new(_client(context))
    sealing, masking = own.keys
    context.state[STATE] = ConfigRecord(
        {"round": _round(message), "wave": 1, "sealing": own.sealing, "masking": own.masking, "seed": own.seed}
    )
    answer = ConfigRecord({"sealing": sealing, "masking": masking, "commitment": own.commitment})
    return Message(RecordDict({"keys": answer}), reply_to=message)


def give_shares(message: Message, context: Context, scenario: Scenario) -> Message:
    """Wave 2: a sealed share of each secret for every client."""
    state, config = _state(message, context, wave=1), message.content.config_records["config"]
    _check_holders(context, config["clients"], "have shares dealt to")
    clients, keys = _keys(config)
    threshold = int(number(config, "threshold"))
    least = threshold_of(len(clients), all_needed=scenario.defence.client_dp is not None)
    if threshold < least:
        raise PolicyError(f"the server would unmask with {threshold} of {len(clients)} clients, {least} are needed")
    _once(state, context, "shares")
    shares = sealed_shares(_own(state, context), keys, threshold, _label(message, context))
    state["wave"], state["threshold"] = 2, threshold
    for name in ("clients", "sealing-keys", "masking-keys"):
        state[name] = config[name]
    answer = ConfigRecord(
        {"shares": [shares[c].sealed for c in clients], "prints": [shares[c].prints for c in clients]}
    )
    return Message(RecordDict({"shares": answer}), reply_to=message)


def check_ready(message: Message, context: Context) -> None:
    """Before anything is trained or charged: is this the third wave of a round that this client has shares in?"""
    state = _state(message, context, wave=2)
    sent = message.content.config_records.get("secure")
    present: Any = sent["clients"] if sent is not None else []
    known: Any = state["clients"]
    threshold = int(number(state, "threshold"))
    _check_holders(context, list(present), "sum over")
    if not set(present) <= set(known) or len(set(present)) < threshold:
        raise PolicyError(f"the server would sum over {len(present)} clients, {threshold} of the round are needed")
    sharing = message.content.config_records["config"].get("cohort-size", 0)
    if not isinstance(sharing, int) or len(set(present)) < sharing:
        raise PolicyError(f"the noise is shared by {sharing!r} clients, but {len(set(present))} of them are in the sum")
    _check_resolution(message.content.config_records["config"], max(1, sharing))
    _once(state, context, "vector")


def _check_resolution(config: ConfigRecord, sharing: int) -> None:
    """PolicyError where a client's share of the noise would be lost as numbers are rounded to fixed point."""
    if "client-noise-multiplier" not in config:
        return
    share = number(config, "client-noise-multiplier") * number(config, "clipping-norm") / math.sqrt(sharing)
    if 0 < share < 16 * 2.0**-FRACTION:
        raise PolicyError(
            f"each client's share of the noise is {share:.2g}, and secure aggregation rounds to {2.0**-FRACTION:.1g}:"
            " too little of it would be left; the server must use a larger clipping norm"
        )


def mask_reply(message: Message, context: Context, reply: Message, layout: Layout) -> Message:
    """Wave 3: the update, its weight and what is told beside it, masked; in place of the plain reply."""
    state, sent = _state(message, context, wave=2), message.content.config_records["secure"]
    present: Any = sent["clients"]
    _, keys = _keys(state)
    vector = _vector(reply, layout)
    words = masked(_own(state, context), {c: keys[c] for c in present}, to_words(vector, len(keys)))
    state["wave"], state["clients-present"] = 3, present
    state["shares"], state["prints"] = sent["shares"], sent["prints"]
    return Message(RecordDict({"arrays": ArrayRecord({"masked": Array(words)})}), reply_to=message)


def give_unmasking(message: Message, context: Context) -> Message:
    """Wave 4: the shares that unmask the sum, once; then the secrets are forgotten."""
    state, config = _state(message, context, wave=3), message.content.config_records["config"]
    present: Any = state["clients-present"]
    shares, prints = _bytes(state["shares"]), _bytes(state["prints"])
    arrived: Any = config["arrived"]
    _check_holders(context, arrived, "unmask the sum of")
    _once(state, context, "unmasking")
    revealed = unmasking(
        _own(state, context),
        _keys(state)[1],
        dict(zip(present, map(Dealt, shares, prints), strict=True)),
        set(arrived),
        int(number(state, "threshold")),
        _label(message, context),
    )
    del context.state[STATE]
    return Message(RecordDict({"shares": ConfigRecord({"shares": [revealed[c] for c in present]})}), reply_to=message)


def _vector(reply: Message, layout: Layout) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The update, already multiplied by its weight, and the numbers of TAIL."""
    from fedsim.federation.arrays import to_flat

    metrics = reply.content.metric_records["metrics"]
    tail = {key: float(metrics.get(key, 0.0)) for key in TAIL}  # type: ignore[arg-type]
    tail["train-loss"] *= tail["weight"]
    flat = to_flat(reply.content.array_records["arrays"], layout).numpy().astype(np.float64)
    return np.concatenate([flat, np.array([tail[key] for key in TAIL])])


def _client(context: Context) -> int:
    return int(context.node_config["partition-id"])


def _round(message: Message) -> int:
    return int(number(message.content.config_records["config"], "server-round"))


def _label(message: Message, context: Context) -> str:
    return f"{context.run_id}|{_round(message)}"


def _state(message: Message, context: Context, wave: int) -> ConfigRecord:
    state = context.state.config_records.get(STATE)
    if state is None or state["round"] != _round(message) or state["wave"] != wave:
        raise PolicyError(
            f"the server asks for wave {wave + 1} of secure aggregation in round {_round(message)}, out of order: every"
            " wave is answered once, and without them an update of this scenario never leaves the client"
        )
    return state


def _check_holders(context: Context, holders: object, what: str) -> None:
    own = Safeguards.of(context)
    if own is not None:
        own.check_holders(holders, what)


def _once(state: ConfigRecord, context: Context, wave: str) -> None:
    """PolicyError for a wave that was answered with these secrets before, whatever the state says."""
    own = Safeguards.of(context)
    if own is not None:
        own.answer_once(f"{wave} {_own(state, context).commitment.hex()}")


def _bytes(value: Any) -> list[bytes]:
    return list(value)


def _own(state: ConfigRecord, context: Context) -> Secrets:
    sealing, masking, seed = (state[name] for name in ("sealing", "masking", "seed"))
    assert isinstance(sealing, bytes)
    assert isinstance(masking, bytes)
    assert isinstance(seed, bytes)
    return Secrets(_client(context), sealing, masking, seed)


def _keys(config: ConfigRecord) -> tuple[list[int], dict[int, Keys]]:
    clients: Any = config["clients"]
    sealing: Any = config["sealing-keys"]
    masking: Any = config["masking-keys"]
    return list(clients), {c: (s, m) for c, s, m in zip(clients, sealing, masking, strict=True)}
