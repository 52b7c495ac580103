# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation with a client that sends garbage, or that is killed between two waves: the others do not fail."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from secure_scenario import SMALL, scenario

from fedsim.errors import RunError
from fedsim.federation.inline import error_reply
from fedsim.federation.masking import split
from fedsim.federation.secure_rounds import shut_out_before
from fedsim.privacy.ledger import Ledger

# --- clients that send garbage --------------------------------------------------------------------------------------

BAD, VICTIM = 1, 2
Change = Callable[[ConfigRecord], dict[str, Any]]


def garbage(wave: str, record: str, change: Change) -> Any:
    """Client BAD changes a record of its answer to a wave."""

    def behaviour(message: Message, context: Context, honest: Any) -> list[Message]:
        reply = honest(message, context)
        if context.node_config["partition-id"] != BAD or message.metadata.message_type != wave:
            return [reply]
        changed = ConfigRecord(change(reply.content.config_records[record]))
        return [Message(RecordDict({record: changed}), reply_to=message)]

    return behaviour


def every(name: str, value: bytes) -> Change:
    return lambda record: {**record, name: [value] * len(record[name])}  # type: ignore[arg-type]


def without(name: str) -> Change:
    return lambda record: {key: value for key, value in record.items() if key != name}


EARLY: dict[str, tuple[str, str, Change, str]] = {
    "a key of another length": ("train.keys", "keys", lambda r: {**r, "sealing": b"short"}, "cannot be used"),
    "a point of small order": ("train.keys", "keys", lambda r: {**r, "masking": bytes(32)}, "cannot be used"),
    "no key": ("train.keys", "keys", without("masking"), "cannot be used"),
    "numbers for keys": ("train.keys", "keys", lambda r: {**r, "sealing": [1, 2]}, "cannot be used"),
    "no commitment": ("train.keys", "keys", without("commitment"), "cannot be used"),
    "twice the same key": ("train.keys", "keys", lambda r: {**r, "sealing": r["masking"]}, "another has the same"),
    "too few shares": ("train.shares", "shares", lambda r: {**r, "shares": r["shares"][1:]}, "one for each"),  # type: ignore[index]
    "short shares": ("train.shares", "shares", every("shares", b"x"), "one for each"),
    "no fingerprints": ("train.shares", "shares", without("prints"), "one for each"),
}


@pytest.mark.parametrize("name", EARLY)
def test_garbage_that_shows_costs_nobody_anything(name: str, tmp_path: Path, world: Any, deployed: Any) -> None:
    wave, record, change, reason = EARLY[name]
    world.behaviour = garbage(wave, record, change)
    run = deployed(scenario(cohort={**SMALL["cohort"], "population": 4}), tmp_path / "run")
    received = [line for line in run.transcript.messages() if line.direction == "received"]
    assert [line.clients for line in received if line.kind == "sum"] == [3, 3]
    assert [line.client for line in received if line.kind == "error"] == [BAD, BAD]
    assert all(reason in str(line.reason) for line in received if line.kind == "error")
    assert sorted(world.trained) == [(round_, client) for round_ in (1, 2) for client in (0, 2, 3)]


def some(name: str, values: dict[int, bytes]) -> Change:
    return lambda record: {**record, name: [values.get(n, old) for n, old in enumerate(record[name])]}  # type: ignore[arg-type]


def test_garbage_for_one_client_keeps_neither_of_the_two_out(tmp_path: Path, world: Any, deployed: Any) -> None:
    """The one cannot open its share, and needs it as little as anybody: the others have enough of them."""
    world.behaviour = garbage("train.shares", "shares", some("shares", {VICTIM: bytes(160)}))
    run = deployed(scenario(cohort={**SMALL["cohort"], "population": 4}), tmp_path / "run")
    received = [line for line in run.transcript.messages() if line.direction == "received"]
    assert [(line.kind, line.clients) for line in received] == [("sum", 4), ("sum", 4)]


def test_wrong_shares_of_others_are_left_aside(tmp_path: Path, world: Any, deployed: Any) -> None:
    world.behaviour = garbage("train.unmask", "shares", every("shares", b"s" * 66))
    run = deployed(scenario(cohort={**SMALL["cohort"], "population": 4}), tmp_path / "run")
    received = [line for line in run.transcript.messages() if line.direction == "received"]
    assert [line.clients for line in received if line.kind == "sum"] == [4, 4]
    assert [line.client for line in received if line.kind == "error"] == [BAD, BAD]


def wrongly_dealt(message: Message, context: Context, honest: Any) -> Message:
    """Shares that open, fit their fingerprints, and give nothing: those of two polynomials."""
    from fedsim.federation import secure_aggregation as protocol

    def other(secret: bytes, holders: Any, threshold: int) -> dict[int, bytes]:
        one, two = split(secret, holders, threshold), split(bytes(32), holders, threshold)
        return {holder: (one if holder % 2 else two)[holder] for holder in holders}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "split", other)
        answer: Message = honest(message, context)
        return answer


@pytest.mark.parametrize("lost", [False, True], ids=["and sends a vector", "and sends none"])
@pytest.mark.parametrize("how", ["garbage for all", "inconsistent"])
def test_who_deals_wrongly_is_shut_out_and_the_round_goes_on(
    how: str, lost: bool, tmp_path: Path, world: Any, deployed: Any
) -> None:
    dealt = garbage("train.shares", "shares", every("shares", bytes(160)))

    def behaviour(message: Message, context: Context, honest: Any) -> list[Message]:
        if context.node_config["partition-id"] == BAD:
            if message.metadata.message_type == "train" and lost:
                return [error_reply(message, "no power")]
            if message.metadata.message_type == "train.shares" and how == "inconsistent":
                return [wrongly_dealt(message, context, honest)]
        replies: list[Message] = (
            dealt(message, context, honest) if how != "inconsistent" else [honest(message, context)]
        )
        return replies

    world.behaviour = behaviour
    settings = scenario(cohort={**SMALL["cohort"], "population": 3, "size": 3, "retries": 1})
    run = deployed(settings, tmp_path / "run")
    received = [line for line in run.transcript.messages() if line.direction == "received"]
    assert [line.clients for line in received if line.kind == "sum"] == [2, 2]
    errors = [line for line in received if line.kind == "error"]
    assert [line.client for line in errors] == [BAD, BAD]
    assert all(str(line.reason).startswith("shut out of secure aggregation, ") for line in errors)
    asked = [client for round_, client in world.trained if round_ == 2]
    assert sorted(asked) == [0, 2]  # it is not asked again, and costs the others one attempt in the whole run
    assert sorted(client for round_, client in world.trained if round_ == 1) == [0, 0, 1, 2, 2]
    assert shut_out_before(tmp_path / "run").keys() == {BAD}


def test_the_sum_without_the_culprit_is_that_of_the_others(tmp_path: Path, world: Any, deployed: Any) -> None:
    """Bit by bit what comes out where that client only says that it cannot."""
    settings = scenario(cohort={**SMALL["cohort"], "population": 4, "size": 4, "retries": 1})

    def absent(message: Message, context: Context, honest: Any) -> list[Message]:
        fails = context.node_config["partition-id"] == BAD
        return [error_reply(message, "no power") if fails else honest(message, context)]

    world.behaviour = absent
    expected = deployed(settings, tmp_path / "absent").model()
    world.behaviour = garbage("train.shares", "shares", every("shares", bytes(160)))
    found = deployed(settings, tmp_path / "garbage").model()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


# --- masks are used once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wave", ["train.shares", "train", "train.unmask"])
def test_a_wave_is_not_answered_twice_even_if_the_state_is_lost(
    wave: str, tmp_path: Path, world: Any, deployed: Any
) -> None:
    """Flower pushes the reply, and then the state: a client that is killed in between has the state of before."""
    for client in range(3):
        Ledger(tmp_path / f"ledger-{client}")
        world.node_config[client] = {"ledger": str(tmp_path / f"ledger-{client}")}
    again: list[Message] = []

    def behaviour(message: Message, context: Context, honest: Any) -> list[Message]:
        if context.node_config["partition-id"] == BAD and message.metadata.message_type == wave:
            before = deepcopy(context.state)
            reply = honest(message, context)
            restarted = Context(context.run_id, context.node_id, context.node_config, before, context.run_config)
            again.append(honest(message, restarted))
            return [reply]
        return [honest(message, context)]

    world.behaviour = behaviour
    settings = scenario(
        defence={"example_dp": {"noise_multiplier": 1.0}, "secure_aggregation": True},
        cohort={**SMALL["cohort"], "population": 3, "size": 3},
        partition="iid",
    )
    run = deployed(settings, tmp_path / "run")
    assert [line.clients for line in run.transcript.messages() if line.kind == "sum"] == [3, 3]
    assert len(again) == 2
    assert all(reply.has_error() and "masks are used once" in reply.error.reason for reply in again)
    assert len(Ledger(tmp_path / f"ledger-{BAD}").charges()) == 2  # what was refused is not charged


def test_noise_is_not_shared_with_clients_that_are_not_in_the_sum(tmp_path: Path, world: Any, deployed: Any) -> None:
    """A server that says that ten share the noise gets a third of it from each of three."""

    def behaviour(message: Message, context: Context, honest: Any) -> list[Message]:
        if message.metadata.message_type == "train":
            message.content.config_records["config"]["cohort-size"] = 10
        return [honest(message, context)]

    world.behaviour = behaviour
    settings = scenario(
        defence={"client_dp": {"noise_multiplier": 1.0}, "secure_aggregation": True},
        cohort={**SMALL["cohort"], "population": 3, "size": 3},
    )
    with pytest.raises(RunError, match="the noise is shared by 10 clients, but 3 of them are in the sum"):
        deployed(settings, tmp_path / "run")


def test_a_real_client_without_a_ledger_masks_nothing(tmp_path: Path, world: Any, deployed: Any) -> None:
    world.node_config = {client: {} for client in range(3)}
    settings = scenario(
        defence={"example_dp": {"noise_multiplier": 1.0}, "secure_aggregation": True},
        cohort={**SMALL["cohort"], "population": 3, "size": 3},
    )
    with pytest.raises(RunError, match="needs a ledger"):
        deployed(settings, tmp_path / "run")


# --- a server that names holders who are none -----------------------------------------------------------------------


def naming(wave: str, change: Callable[[list[int]], list[int]]) -> Any:
    """The server passes on other numbers of clients than there are, with a key for each."""

    def behaviour(message: Message, context: Context, honest: Any) -> list[Message]:
        if message.metadata.message_type == wave:
            record = message.content.config_records["secure" if wave == "train" else "config"]
            name = "arrived" if wave == "train.unmask" else "clients"
            old: Any = record[name]
            record[name] = change(list(old))
            for key in {"sealing-keys", "masking-keys", "shares", "prints"} & record.keys():
                values: Any = record[key]
                record[key] = [*values, *values][: len(record[name])]  # type: ignore[arg-type]
        return [honest(message, context)]

    return behaviour


HOLDERS: dict[str, tuple[Callable[[list[int]], list[int]], str]] = {
    "number -1, whose share is the secret itself": (lambda who: [*who[:-1], -1], "holders that are no clients"),
    "a number that no client has": (lambda who: [*who[:-1], 10**6], "holders that are no clients"),
    "a number twice": (lambda who: [*who, who[0]], "a client twice"),
    "two clients only": (lambda who: who[:2], "smallest_cohort is 3"),
}


@pytest.mark.parametrize("wave", ["train.shares", "train", "train.unmask"])
@pytest.mark.parametrize("name", HOLDERS)
def test_holders_who_are_no_clients_are_refused_before_anything_is_charged(
    name: str, wave: str, tmp_path: Path, world: Any, deployed: Any
) -> None:
    change, reason = HOLDERS[name]
    for client in range(3):
        Ledger(tmp_path / f"ledger-{client}")
        world.node_config[client] = {"ledger": str(tmp_path / f"ledger-{client}")}
    world.behaviour = naming(wave, change)
    settings = scenario(
        defence={"example_dp": {"noise_multiplier": 1.0}, "secure_aggregation": True},
        cohort={**SMALL["cohort"], "population": 3, "size": 3},
        partition="iid",
    )
    told: list[str] = []
    honest = world.behaviour

    def listening(message: Message, context: Context, app: Any) -> list[Message]:
        replies: list[Message] = honest(message, context, app)
        told.extend(reply.error.reason for reply in replies if reply.has_error())
        return replies

    world.behaviour = listening
    with pytest.raises(RunError):
        deployed(settings, tmp_path / "run")
    assert any(reason in each for each in told), told
    charged = [len(Ledger(tmp_path / f"ledger-{client}").charges()) for client in range(3)]
    assert charged == [int(wave == "train.unmask")] * 3


def test_a_share_is_dealt_to_no_number_that_gives_the_secret() -> None:
    for holders in ([0, 1, -1], [0, 1, 2**521 - 2], [0, 0, 0]):
        with pytest.raises(ValueError, match=r"number|threshold"):
            split(bytes(32), holders, 2)
