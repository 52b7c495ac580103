# SPDX-License-Identifier: Apache-2.0
"""Every case by hand: which mechanism, how often, against whom."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.errors import PrivacyError
from fedsim.privacy import (
    OUTSIDER,
    SERVER,
    Exposure,
    Mechanism,
    Noise,
    PrivacyClaim,
    Setting,
    account,
    claims,
    epsilon,
    gaussian_epsilon,
    privacy_curve,
    resolve_noise,
    settings_by_round,
)
from fedsim.scenario import Scenario

DELTA = 1e-5


def scenario(defence: dict[str, Any], **sections: Any) -> Scenario:
    return Scenario.model_validate({"defence": defence, **sections})


def setting(*exposures: tuple[int, int], rounds: int = 10, rate: float = 0.2) -> Setting:
    return Setting(rounds, rate, tuple(Exposure(*exposure) for exposure in exposures))


def example_dp(**fields: Any) -> dict[str, Any]:
    return {"example_dp": {"noise_multiplier": 1.1, **fields}}


def client_dp(**fields: Any) -> dict[str, Any]:
    return {"client_dp": {"noise_multiplier": 4.0, **fields}}


def facts(claim: PrivacyClaim) -> tuple[Any, ...]:
    return claim.unit, claim.adjacency, claim.sampling, claim.noise_multiplier, claim.sample_rate, claim.compositions


def recomputed(claim: PrivacyClaim, kind: Any = "gaussian", accountant: Any = "pld") -> float:
    mechanism = Mechanism(kind, claim.noise_multiplier, claim.adjacency, claim.sampling, claim.sample_rate)
    return account([(mechanism, claim.compositions)], claim.delta, accountant).epsilon


# --- a. examples, Poisson batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "strategy", "rate", "compositions"),
    [
        ({"batch_size": 20, "epochs": 2}, "fedavg", 20 / 95, 3 * 2 * 5),
        ({"batch_size": 20, "steps": 7}, "fedavg", 20 / 95, 3 * 7),
        ({"batch_size": None, "epochs": 2}, "fedavg", 1.0, 3 * 2),
        ({"batch_size": 200, "epochs": 2}, "fedavg", 1.0, 3 * 2),
        ({"batch_size": 20}, "fedsgd", 20 / 95, 3),
    ],
)
def test_examples_in_poisson_batches(client: Any, strategy: str, rate: float, compositions: int) -> None:
    (claim,) = claims(scenario(example_dp(), client=client, strategy=strategy), setting((3, 95)), Noise(1.1))
    assert facts(claim) == ("example", "add/remove", "poisson", 1.1, rate, compositions)
    assert claim.epsilon == epsilon(Mechanism("gaussian", 1.1, "add/remove", "poisson", rate), compositions, DELTA)
    assert claim.observer == SERVER
    assert any("public" in assumption for assumption in claim.assumptions)
    assert any("training loss" in assumption for assumption in claim.assumptions)


def test_cohort_sampling_never_helps_an_example_against_the_server() -> None:
    made = scenario(example_dp(), cohort={"population": 100, "size": 1, "sampling": "fixed"})
    rare, always = (claims(made, setting((3, 95), rate=rate), Noise(1.1)) for rate in (0.01, 1.0))
    assert rare == always


def test_secure_aggregation_does_not_change_the_claim_of_an_example() -> None:
    alone = claims(scenario(example_dp()), setting((3, 95)), Noise(1.1))[0]
    summed = claims(scenario(example_dp() | {"secure_aggregation": True}), setting((3, 95)), Noise(1.1))[0]
    assert summed.epsilon == alone.epsilon
    assert "sum" in summed.released


def test_rows_that_clients_share_are_said_to_be_shared() -> None:
    made = scenario(example_dp(), partition={"kind": "iid", "examples_per_client": 50})
    assert "same rows" in claims(made, setting((1, 50)), Noise(1.1))[0].assumptions[0]


# --- b. examples, shuffled batches ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "strategy", "epochs"),
    [
        ({"batch_size": 20, "epochs": 2}, "fedavg", 2),
        ({"batch_size": 20, "steps": 5}, "fedavg", 1),  # 95 examples are 5 batches
        ({"batch_size": 20, "steps": 6}, "fedavg", 2),
        ({"batch_size": None, "steps": 6}, "fedavg", 6),
        ({"batch_size": 20}, "fedsgd", 1),
    ],
)
def test_examples_in_shuffled_batches_get_no_amplification(client: Any, strategy: str, epochs: int) -> None:
    made = scenario(example_dp(batches="shuffle"), client=client, strategy=strategy)
    (claim,) = claims(made, setting((3, 95)), Noise(3.0))
    assert facts(claim) == ("example", "replace", "none", 1.5, 1.0, 3 * epochs)
    assert claim.epsilon == pytest.approx(gaussian_epsilon(1.5 / math.sqrt(3 * epochs), DELTA), rel=1e-12)


# --- c. clients, noised one by one ----------------------------------------------------------------------------------


def test_clients_without_secure_aggregation() -> None:
    (claim,) = claims(scenario(client_dp()), setting((3, 95), (7, 10)), Noise(client=4.0))
    assert facts(claim) == ("client", "replace", "none", 2.0, 1.0, 7)
    assert claim.epsilon == pytest.approx(gaussian_epsilon(2.0 / math.sqrt(7), DELTA), rel=1e-12)
    assert claim.observer == SERVER


def test_clients_with_laplace_noise() -> None:
    (claim,) = claims(scenario(client_dp(noise="laplace")), setting((1, 95)), Noise(client=4.0))
    assert facts(claim) == ("client", "replace", "none", 2.0, 1.0, 1)
    assert claim.epsilon == pytest.approx(1 / 2.0 + 2 * math.log1p(-DELTA), abs=1e-6)
    assert "Laplace" in claim.mechanism


# --- d. clients, secure aggregation ---------------------------------------------------------------------------------


def test_clients_in_a_sum_with_a_poisson_cohort() -> None:
    made = scenario(client_dp() | {"secure_aggregation": True}, cohort={"rate": 0.2, "sampling": "poisson"})
    server, outsider = claims(made, setting((3, 95), rounds=10), Noise(client=4.0))
    assert facts(server) == ("client", "add/remove", "none", 4.0, 1.0, 3)
    assert server.epsilon == pytest.approx(gaussian_epsilon(4.0 / math.sqrt(3), DELTA), rel=1e-12)
    assert server.observer == SERVER
    assert facts(outsider) == ("client", "add/remove", "poisson", 4.0, 0.2, 10)
    assert outsider.epsilon == epsilon(Mechanism("gaussian", 4.0, "add/remove", "poisson", 0.2), 10, DELTA)
    assert outsider.observer == OUTSIDER
    assert any("share of the noise" in assumption for assumption in server.assumptions)
    assert any("nobody comes" in assumption for assumption in outsider.assumptions)


def test_clients_in_a_sum_with_a_cohort_of_fixed_size() -> None:
    made = scenario(client_dp() | {"secure_aggregation": True})
    _, outsider = claims(made, setting((3, 95), rounds=10, rate=0.05), Noise(client=4.0))
    assert facts(outsider) == ("client", "replace", "fixed size", 2.0, 0.05, 10)
    fixed = Mechanism("gaussian", 2.0, "replace", "fixed size", 0.05)
    assert outsider.epsilon == epsilon(fixed, 10, DELTA) < epsilon(Mechanism("gaussian", 2.0, "replace"), 10, DELTA)
    assert "without replacement" in outsider.accountant


def test_nothing_is_amplified_when_everybody_takes_part() -> None:
    made = scenario(client_dp() | {"secure_aggregation": True})
    assert [c.observer for c in claims(made, setting((10, 95), rate=1.0), Noise(client=4.0))] == [SERVER]


@pytest.mark.parametrize(
    ("defence", "remedy"),
    [
        (client_dp(noise="laplace") | {"secure_aggregation": True}, "gaussian"),
        (client_dp() | {"secure_aggregation": True, "compression": "sign"}, "leave one"),
    ],
)
def test_combinations_that_support_no_claim_are_refused(defence: Any, remedy: str) -> None:
    with pytest.raises(PrivacyError, match=remedy):
        claims(scenario(defence), setting((1, 10)), Noise(client=4.0))


# --- e. adaptive clipping -------------------------------------------------------------------------------------------


def test_the_bit_of_adaptive_clipping_is_paid_for() -> None:
    adaptive = client_dp(adaptive={"bit_noise": 5.0})
    (local,) = claims(scenario(adaptive), setting((2, 95)), Noise(client=4.0))
    assert local.noise_multiplier == pytest.approx(1 / math.sqrt((2 / 4.0) ** 2 + (1 / 5.0) ** 2))
    assert local.epsilon > claims(scenario(client_dp()), setting((2, 95)), Noise(client=4.0))[0].epsilon
    summed, rare = scenario(adaptive | {"secure_aggregation": True}), setting((2, 95), rate=0.01)
    server, outsider = claims(summed, rare, Noise(client=4.0))
    assert server.noise_multiplier == pytest.approx(1 / math.sqrt((1 / 4.0) ** 2 + (1 / 5.0) ** 2))
    assert outsider.noise_multiplier == local.noise_multiplier
    assert "bit" in server.mechanism


def test_a_claim_against_an_outsider_is_made_only_where_it_says_more() -> None:
    summed = scenario(client_dp() | {"secure_aggregation": True})
    often, noise = setting((2, 95), rate=0.9), Noise(client=4.0)
    assert [claim.observer for claim in claims(summed, often, noise)] == [SERVER]
    assert [claim.observer for claim in claims(summed, setting((2, 95), rate=0.01), noise)] == [SERVER, OUTSIDER]


# --- f. no claim, both claims ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("defence", [{}, {"compression": "sign"}, {"secure_aggregation": True}])
def test_no_noise_no_claim(defence: dict[str, Any]) -> None:
    assert claims(scenario(defence), setting((3, 95)), Noise()) == ()
    assert privacy_curve(scenario(defence), Noise(), [[0], [1]], lambda _: 5, 0.5) == [(), ()]
    assert resolve_noise(scenario(defence), setting((3, 95))) == Noise()


@pytest.mark.parametrize("defence", [example_dp(noise_multiplier=0), client_dp(noise_multiplier=0)])
def test_zero_noise_is_an_infinite_epsilon(defence: dict[str, Any]) -> None:
    (claim,) = claims(scenario(defence), setting((3, 95)), Noise(0.0, 0.0))
    assert claim.epsilon == math.inf
    assert claim.sentence().startswith("No privacy claim")
    assert PrivacyClaim.from_dict(json.loads(json.dumps(claim.to_dict()))) == claim


def test_both_defences_make_both_claims_and_compression_costs_nothing() -> None:
    both = example_dp() | client_dp(delta=1e-6)
    made = claims(scenario(both | {"compression": "sign"}), setting((3, 95)), Noise(1.1, 4.0))
    assert [claim.unit for claim in made] == ["client", "example"]
    assert [claim.delta for claim in made] == [1e-6, 1e-5]
    assert made == claims(scenario(both), setting((3, 95)), Noise(1.1, 4.0))


def test_nobody_took_part() -> None:
    (claim,) = claims(scenario(example_dp()), setting(), Noise(1.1))
    assert (claim.epsilon, claim.compositions) == (0.0, 0)
    (claim,) = claims(scenario(example_dp()), setting((3, 0)), Noise(1.1))
    assert claim.epsilon == 0.0


def test_noise_that_is_not_resolved_is_an_error() -> None:
    with pytest.raises(PrivacyError, match="resolve_noise"):
        claims(scenario(example_dp()), setting((3, 95)), Noise(client=1.0))


# --- the worst client -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_worst_client_decides(accountant: str) -> None:
    made = scenario(example_dp() | {"accountant": accountant}, client={"batch_size": 10})
    exposures = [(2, 30), (2, 31), (5, 400), (9, 45), (9, 44), (1, 3)]
    alone = [claims(made, setting(exposure), Noise(1.1))[0] for exposure in exposures]
    (together,) = claims(made, setting(*exposures), Noise(1.1))
    assert together == max(alone, key=lambda claim: claim.epsilon)
    assert together.epsilon == recomputed(together, accountant=accountant)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 60)), min_size=1, max_size=4),
    st.tuples(st.integers(1, 5), st.integers(1, 60)),
    st.sampled_from(["poisson", "shuffle"]),
)
def test_more_exposure_never_costs_less(exposures: Any, another: tuple[int, int], batches: str) -> None:
    made = scenario(example_dp(batches=batches) | client_dp(), client={"batch_size": 8})
    noise = Noise(2.0, 4.0)
    before = claims(made, setting(*exposures), noise)
    wider = claims(made, setting(*exposures, another), noise)
    longer = claims(made, setting(*((p + 1, n) for p, n in exposures)), noise)
    for less, more in [*zip(before, wider, strict=True), *zip(before, longer, strict=True)]:
        assert more.epsilon >= less.epsilon - 1e-5


# --- by round -------------------------------------------------------------------------------------------------------

COHORTS = [[0, 1], [], [1, 2], [1], [3], [0, 3], [2, 1]]
SIZES = {0: 40, 1: 95, 2: 40, 3: 17}


def test_participation_is_counted() -> None:
    by_round = settings_by_round(COHORTS, SIZES.__getitem__, 0.5)
    assert [s.rounds for s in by_round] == [1, 2, 3, 4, 5, 6, 7]
    assert by_round[1].exposures == (Exposure(1, 40), Exposure(1, 95))
    assert by_round[-1].exposures == (Exposure(2, 17), Exposure(2, 40), Exposure(4, 95))


@pytest.mark.parametrize(
    "defence",
    [
        example_dp(),
        example_dp(batches="shuffle") | {"accountant": "rdp"},
        client_dp() | {"secure_aggregation": True},
        client_dp(noise="laplace"),
        example_dp() | client_dp(adaptive={"bit_noise": 3.0}),
        example_dp(noise_multiplier=0),
    ],
)
def test_the_curve_is_the_claims_after_every_round(defence: dict[str, Any]) -> None:
    made = scenario(defence)
    noise = Noise(*((defence.get(part) or {}).get("noise_multiplier") for part in ("example_dp", "client_dp")))
    curve = privacy_curve(made, noise, COHORTS, SIZES.__getitem__, 0.5)
    by_round = settings_by_round(COHORTS, SIZES.__getitem__, 0.5)
    assert len(curve) == len(COHORTS)
    assert curve[-1] == claims(made, by_round[-1], noise)
    for now, then in zip(curve, by_round, strict=True):
        for shown, exact in zip(now, claims(made, then, noise), strict=True):
            assert shown.epsilon == pytest.approx(exact.epsilon, rel=1e-4)
            assert shown.epsilon >= exact.epsilon * (1 - 1e-9)
            assert dataclasses.replace(shown, epsilon=0.0) == dataclasses.replace(exact, epsilon=0.0)
    for earlier, later in pairwise(curve):
        assert all(a.epsilon <= b.epsilon for a, b in zip(earlier, later, strict=True))


def test_a_curve_that_begins_with_an_empty_cohort() -> None:
    first, second = privacy_curve(scenario(client_dp()), Noise(client=4.0), [[], [5]], lambda _: 9, 0.1)
    assert (first[0].epsilon, first[0].compositions) == (0.0, 0)
    assert second[0].epsilon > 0
    assert privacy_curve(scenario(client_dp()), Noise(client=4.0), [], lambda _: 9, 0.1) == []


# --- targets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defence", "target"),
    [
        ({"example_dp": {"target_epsilon": 3.0}}, 3.0),
        ({"example_dp": {"target_epsilon": 3.0, "batches": "shuffle"}}, 3.0),
        ({"client_dp": {"target_epsilon": 8.0}}, 8.0),
        ({"client_dp": {"target_epsilon": 8.0, "noise": "laplace"}}, 8.0),
        ({"client_dp": {"target_epsilon": 2.0}, "secure_aggregation": True}, 2.0),
        ({"client_dp": {"target_epsilon": 8.0, "adaptive": {"bit_noise": 4.0}}, "accountant": "rdp"}, 8.0),
    ],
)
def test_a_target_is_kept_by_the_worst_client_and_nearly_reached(defence: Any, target: float) -> None:
    made = scenario(defence)
    exposures = setting((4, 95), (6, 300), (2, 24), (3, 7))
    noise = resolve_noise(made, exposures)
    primary = claims(made, exposures, noise)[0]
    assert 0.98 * target < primary.epsilon <= target


def test_a_given_multiplier_is_left_alone_and_both_targets_are_found() -> None:
    both = {"example_dp": {"noise_multiplier": 1.25}, "client_dp": {"target_epsilon": 5.0}}
    noise = resolve_noise(scenario(both), setting((4, 95)))
    assert noise.example == 1.25
    assert noise.client is not None
    assert claims(scenario(both), setting((4, 95)), noise)[0].epsilon == pytest.approx(5.0, rel=1e-3)


def test_targets_that_cannot_be_kept() -> None:
    adaptive = scenario({"client_dp": {"target_epsilon": 0.5, "adaptive": {"bit_noise": 1.0}}})
    with pytest.raises(PrivacyError, match="larger bit_noise"):
        resolve_noise(adaptive, setting((4, 95)))
    with pytest.raises(PrivacyError, match="nobody"):
        resolve_noise(scenario({"example_dp": {"target_epsilon": 0.5}}), setting())
