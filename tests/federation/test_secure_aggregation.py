# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation: the sum is right whoever drops out, and what the server sees of a client tells nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_scenario import SMALL, scenario

import fedsim
from fedsim.errors import RunError
from fedsim.federation.inline import error_reply
from fedsim.federation.masking import combine, from_words, mask, new_key, public_key, seal, split, to_words, unseal
from fedsim.federation.run import Run
from fedsim.federation.secure_aggregation import (
    Dealt,
    Secrets,
    UnmaskingError,
    is_given,
    masked,
    sealed_shares,
    threshold_of,
    unmasked_sum,
    unmasking,
    unusable_keys,
)

# --- the parts ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.data())
@settings(max_examples=40, deadline=None)
def test_a_secret_needs_the_threshold_of_its_shares(holders: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, holders))
    numbers = data.draw(st.lists(st.integers(0, 10**6 - 1), min_size=holders, max_size=holders, unique=True))
    secret = data.draw(st.binary(min_size=32, max_size=32))
    shares = split(secret, numbers, threshold)
    some = data.draw(st.permutations(numbers))
    assert combine({holder: shares[holder] for holder in some[:threshold]}) == secret
    if threshold > 1:
        with suppress(ValueError):
            assert combine({holder: shares[holder] for holder in some[: threshold - 1]}) != secret


def test_fewer_shares_fit_every_secret() -> None:
    """With one share too few, every secret is as good an explanation: here two of them, by a share that is made up."""
    shares = split(b"\1" * 32, [0, 1], 2)
    other = split(b"\2" * 32, [0, 1], 2)
    assert shares[0] != other[0]
    assert len({split(b"\1" * 32, [0, 1], 2)[0] for _ in range(20)}) == 20


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_numbers_survive_to_the_last_of_their_bits(values: list[float]) -> None:
    array = np.array(values)
    assert np.abs(from_words(to_words(array, 3)) - array).max() <= 2.0**-25


def test_numbers_that_would_overflow_are_refused() -> None:
    for value in (np.inf, np.nan, 2.0**38):
        with pytest.raises(ValueError, match="range of secure aggregation"):
            to_words(np.array([value]), 2)


def test_what_was_sealed_for_another_or_changed_is_not_opened() -> None:
    key = b"k" * 32
    sealed = seal(key, b"content", "run|1|0|2")
    assert unseal(key, sealed, "run|1|0|2") == b"content"
    for wrong in (sealed[:-1] + bytes([sealed[-1] ^ 1]), sealed[:20]):
        with pytest.raises(ValueError, match="changed"):
            unseal(key, wrong, "run|1|0|2")
    with pytest.raises(ValueError, match="changed"):
        unseal(key, sealed, "run|2|0|2")


def test_masks_are_uniform_and_differ() -> None:
    words = mask(b"a" * 32, 100_000)
    assert abs(np.mean(words >> np.uint64(63)) - 0.5) < 0.01
    assert abs(np.corrcoef(words.astype(float), mask(b"b" * 32, 100_000).astype(float))[0, 1]) < 0.02
    assert public_key(new_key()) != public_key(new_key())


# --- the protocol ---------------------------------------------------------------------------------------------------


@given(st.integers(2, 7), st.data())
@settings(max_examples=30, deadline=None)
def test_the_sum_is_that_of_the_vectors_that_arrived(clients: int, data: st.DataObject) -> None:
    """Any set may drop out after any wave, as long as enough are left."""
    threshold = threshold_of(clients, all_needed=False)
    numbers = sorted(data.draw(st.lists(st.integers(0, 99), min_size=clients, max_size=clients, unique=True)))

    def survivors(those: list[int]) -> list[int]:
        return sorted(data.draw(st.permutations(those))[: data.draw(st.integers(threshold, len(those)))])

    own = {number: Secrets.new(number) for number in numbers}
    first = survivors(numbers)
    keys = {number: own[number].keys for number in first}
    second = survivors(first)
    sealed = {number: sealed_shares(own[number], keys, threshold, "x") for number in second}
    third = survivors(second)
    rng = np.random.default_rng(0)
    values = {number: rng.normal(size=5) for number in third}
    present = {number: keys[number] for number in second}
    vectors = {number: masked(own[number], present, to_words(values[number], clients)) for number in third}
    fourth = survivors(third)
    told = {
        holder: unmasking(
            own[holder], keys, {other: sealed[other][holder] for other in second}, set(third), threshold, "x"
        )
        for holder in fourth
    }
    revealed = {other: {holder: told[holder][other] for holder in fourth} for other in second}
    commitments = {number: own[number].commitment for number in numbers}
    total = from_words(unmasked_sum(vectors, present, commitments, revealed, threshold))
    np.testing.assert_allclose(total, sum(values.values()), atol=clients * 2.0**-25, rtol=0)


def three() -> tuple[dict[int, Secrets], dict[int, Any], dict[int, dict[int, Dealt]]]:
    own = {number: Secrets.new(number) for number in range(3)}
    keys = {number: own[number].keys for number in own}
    return own, keys, {number: sealed_shares(own[number], keys, 2, "x") for number in own}


def test_a_client_gives_one_share_of_each_other_and_only_for_enough_of_them() -> None:
    own, keys, sealed = three()
    mine = {other: sealed[other][0] for other in sealed}
    for arrived in ({0}, {1, 2}, {0, 1, 7}, set()):
        with pytest.raises(ValueError, match="unmask"):
            unmasking(own[0], keys, mine, arrived, 2, "x")
    with_two = unmasking(own[0], keys, mine, {0, 1}, 2, "x")
    with_all = unmasking(own[0], keys, mine, {0, 1, 2}, 2, "x")
    assert with_two[1] == with_all[1]
    assert with_two[2] != with_all[2]
    assert all(len(share) == 66 for share in with_all.values())


def test_keys_of_the_server_in_place_of_the_clients_own_are_noticed() -> None:
    own, keys, _ = three()
    with pytest.raises(ValueError, match="own keys"):
        sealed_shares(own[0], {**keys, 0: Secrets.new(0).keys}, 2, "x")
    with pytest.raises(ValueError, match="different ones"):
        sealed_shares(own[0], {**keys, 2: keys[1]}, 2, "x")
    with pytest.raises(ValueError, match="1 clients"):
        sealed_shares(own[0], {0: keys[0]}, 1, "x")


def test_wrong_shares_are_noticed() -> None:
    own, keys, sealed = three()
    words = {number: masked(own[number], keys, to_words(np.ones(2), 3)) for number in own}
    told = {h: unmasking(own[h], keys, {o: sealed[o][h] for o in own}, {0, 1, 2}, 2, "x") for h in own}
    revealed = {other: {holder: told[holder][other] for holder in own} for other in own}
    commitments = {number: own[number].commitment for number in own}
    changed = (int.from_bytes(revealed[1][0], "big") + 1).to_bytes(66, "big")
    assert is_given(revealed[1][0], sealed[1][0], "x", 1, 0, seed=True)
    assert is_given(b"", sealed[1][0], "x", 1, 0, seed=True)
    for share, dealer, seed in ((changed, 1, True), (revealed[1][0], 2, True), (revealed[1][0], 1, False)):
        assert not is_given(share, sealed[dealer][0], "x", dealer, 0, seed=seed)
    with pytest.raises(UnmaskingError, match=r"seed that it has committed to|do not fit together") as error:
        unmasked_sum(words, keys, commitments, {**revealed, 1: {**revealed[1], 0: changed}}, 2)
    assert set(error.value.culprits) == {1}
    with pytest.raises(UnmaskingError, match="1 of 3 clients hold good shares") as error:
        unmasked_sum(words, keys, commitments, {**revealed, 2: {**revealed[2], 0: b"", 1: b""}}, 2)
    assert set(error.value.culprits) == {2}


def test_nobody_is_blamed_where_more_must_be_at_fault_than_may_be() -> None:
    """Client 2 is silent, and 1 says that it has no share of 0: with one of three at fault at most, who is it?"""
    own, keys, sealed = three()
    words = {number: masked(own[number], keys, to_words(np.ones(2), 3)) for number in own}
    told = {h: unmasking(own[h], keys, {o: sealed[o][h] for o in own}, {0, 1, 2}, 2, "x") for h in (0, 1)}
    revealed = {other: {holder: told[holder][other] for holder in (0, 1)} for other in own}
    commitments = {number: own[number].commitment for number in own}
    assert from_words(unmasked_sum(words, keys, commitments, revealed, 2)).tolist() == [3.0, 3.0]
    with pytest.raises(UnmaskingError, match="client 0 are lost, 1 of 2") as error:
        unmasked_sum(words, keys, commitments, {**revealed, 0: {**revealed[0], 1: b""}}, 2)
    assert error.value.culprits == {}
    with pytest.raises(UnmaskingError) as error:  # of the silent one somebody has no share: that is one at fault
        unmasked_sum(words, keys, commitments, {**revealed, 2: {**revealed[2], 1: b""}}, 2)
    assert set(error.value.culprits) == {2}


def test_a_share_that_cannot_be_opened_is_given_as_none_and_the_others_all_the_same() -> None:
    own, keys, sealed = three()
    good = {other: sealed[other][0] for other in sealed}
    honest = unmasking(own[0], keys, good, {0, 1, 2}, 2, "x")
    swapped = Dealt(good[1].sealed, good[2].prints)
    for bad in (Dealt(bytes(160), good[1].prints), Dealt(b"", b""), swapped, good[2], sealed[1][2]):
        assert unmasking(own[0], keys, {**good, 1: bad}, {0, 1, 2}, 2, "x") == {**honest, 1: b""}


def test_keys_that_nobody_can_use_are_named() -> None:
    own = {number: Secrets.new(number) for number in range(4)}
    good = {number: (own[number].keys, own[number].commitment) for number in own}
    assert unusable_keys(good) == {}
    point = bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800")  # of order 8
    for bad in (b"", b"k" * 31, bytes(32), b"\1" + bytes(31), point):
        for keys in ((bad, own[1].keys[1]), (own[1].keys[0], bad)):
            assert set(unusable_keys({**good, 1: (keys, own[1].commitment)})) == {1}
    assert set(unusable_keys({**good, 1: (own[1].keys, b"")})) == {1}
    assert set(unusable_keys({**good, 1: ((own[1].keys[0],) * 2, own[1].commitment)})) == {1}
    assert set(unusable_keys({**good, 1: good[2]})) == {1, 2}


# --- in a federation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "defence", [{}, {"example_dp": {"noise_multiplier": 1.0}}, {"client_dp": {"noise_multiplier": 0.3, "adaptive": {}}}]
)
def test_it_is_the_simulated_sum_up_to_the_rounding(
    defence: dict[str, Any], tmp_path: Path, world: Any, deployed: Any
) -> None:
    settings = scenario(defence={**defence, "secure_aggregation": True})
    simulated = fedsim.run(settings, out=tmp_path / "simulated")
    real = deployed(settings, tmp_path / "real")
    for name, tensor in simulated.model().items():
        torch.testing.assert_close(real.model()[name], tensor, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(real.transcript.messages(), simulated.transcript.messages(), strict=True):
        assert (mine.kind, mine.client, mine.clients, mine.examples) == (
            theirs.kind, theirs.client, theirs.clients, theirs.examples
        )  # fmt: skip
    assert {line.kind for line in real.transcript.messages() if line.direction == "received"} == {"sum"}


@pytest.mark.parametrize("wave", ["train.keys", "train.shares", "train", "train.unmask"])
def test_a_client_may_drop_out_in_any_wave(wave: str, tmp_path: Path, world: Any, deployed: Any) -> None:
    def behaviour(message: Message, context: Context, honest: Any) -> list[Message] | None:
        lost = context.node_config["partition-id"] == 1 and message.metadata.message_type == wave
        return None if lost else [honest(message, context)]

    world.behaviour = behaviour
    settings = scenario(cohort={**SMALL["cohort"], "population": 4, "size": 4})
    run = deployed(settings, tmp_path / "run")
    received = [line for line in run.transcript.messages() if line.direction == "received"]
    lost = wave != "train.unmask"  # its vector had arrived by then
    assert [line.clients for line in received if line.kind == "sum"] == [4 - lost] * 2
    assert [line.client for line in received if line.kind == "error"] == [1] * 2 * lost


def test_without_enough_clients_nothing_is_unmasked(tmp_path: Path, world: Any, deployed: Any) -> None:
    def behaviour(message: Message, context: Context, honest: Any) -> list[Message]:
        lost = int(context.node_config["partition-id"]) < 2 and message.metadata.message_type == "train"
        return [error_reply(message, "no power") if lost else honest(message, context)]

    world.behaviour = behaviour
    with pytest.raises(RunError, match=r"all 3 clients failed.*no power"):
        deployed(scenario(cohort={**SMALL["cohort"], "population": 3, "size": 3}), tmp_path / "run")
    assert not [line for line in Run(tmp_path / "run").transcript.messages() if line.kind == "sum"]


def test_a_share_of_the_noise_that_is_missing_leaves_the_sum_masked(tmp_path: Path, world: Any, deployed: Any) -> None:
    def behaviour(message: Message, context: Context, honest: Any) -> list[Message]:
        lost = context.node_config["partition-id"] == 0 and message.metadata.message_type == "train"
        return [error_reply(message, "no power") if lost else honest(message, context)]

    world.behaviour = behaviour
    settings = scenario(
        defence={"client_dp": {"noise_multiplier": 1.0}, "secure_aggregation": True},
        cohort={**SMALL["cohort"], "population": 4, "size": 4},
    )
    with pytest.raises(RunError, match="all 4 clients failed"):
        deployed(settings, tmp_path / "run")


def test_noise_that_would_be_rounded_away_is_refused(tmp_path: Path, world: Any, deployed: Any) -> None:
    small = {"noise_multiplier": 1.0, "clipping_norm": 1e-7}
    cohort = {**SMALL["cohort"], "population": 4, "size": 4}
    settings = scenario(defence={"client_dp": small, "secure_aggregation": True}, cohort=cohort)
    with pytest.raises(RunError, match=r"share of the noise is 5e-08, and secure aggregation rounds to 6e-08"):
        deployed(settings, tmp_path / "run")


def test_a_server_that_asks_for_the_plain_update_gets_none(tmp_path: Path, world: Any) -> None:
    """The access model of a simulation, with clients that know that they are real."""
    for client in range(5):
        world.node_config[client] = {"ledger": str(tmp_path / f"ledger-{client}")}
    with pytest.raises(RunError, match="never leaves the client"):
        fedsim.run(scenario(), out=tmp_path / "run")
    assert not list(tmp_path.glob("ledger-*"))
