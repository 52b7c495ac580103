# SPDX-License-Identifier: Apache-2.0
"""Audit anything: honest mechanisms are left alone, broken ones are found, odd outputs are read."""

from __future__ import annotations

import dataclasses
import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

import fedsim.audit
from fedsim.audit.blackbox.distinguishing import power
from fedsim.audit.blackbox.outputs import Raised, read
from fedsim.audit.blackbox.pairs import Domain, worst_pairs
from fedsim.audit.blackbox.running import Vectorised
from fedsim.audit.blackbox.tier_b import numbers_of
from fedsim.audit.mechanism import Subject, audit_mechanism, audit_target, examine
from fedsim.audit.mechanisms import included, ridge_bounds, ridge_solution
from fedsim.audit.opacus_mechanisms import OpacusSetting
from fedsim.audit.verdict import Claim, Verdict
from fedsim.errors import AuditError

ON, OFF = np.ones(1), np.zeros(1)
PAIR = [(ON, OFF)]
E1 = float(1 / (1 + np.exp(-1)))
Rng = np.random.Generator


def response(truth: float) -> Vectorised:
    """Randomised response: its ε is ln(truth / (1 − truth)), and nothing is given away."""
    return Vectorised(lambda x, rng, n: (rng.random(n) < (truth if x[0] else 1 - truth)).astype(int))


def noisy_sum(x: Any, rng: Rng) -> float:
    return float(np.clip(x, 0, 1).sum() + rng.laplace(scale=2.0))


def subject() -> Subject:
    """For audit_target: a function without arguments that makes one."""
    return Subject(response(0.9), Claim(1.0), PAIR, trials=2000)


# --- honest and broken ----------------------------------------------------------------------------------------------


def test_ten_lines_are_enough() -> None:
    verdict = fedsim.audit.audit_mechanism(noisy_sum, fedsim.audit.Claim(epsilon=0.5), trials=20_000)
    assert verdict.status == "consistent"
    assert 0 < verdict.lower <= 0.5
    assert "at δ = 0" in verdict.sentence()


def test_half_the_noise_is_found_without_being_told_where() -> None:
    verdict = audit_mechanism(noisy_sum, Claim(0.2), trials=20_000)
    assert "give domain=(low, high) if records cannot be so" in verdict.evidence
    assert verdict.status == "violated"
    assert 0.2 < verdict.lower <= 0.5
    assert verdict.p_value <= 0.05


def test_a_tight_claim_is_not_refuted_and_its_bound_holds() -> None:
    verdicts = [audit_mechanism(response(E1), Claim(1.0), PAIR, trials=1000, seed=seed) for seed in range(12)]
    assert not [verdict for verdict in verdicts if verdict.status == "violated"]
    assert sum(verdict.lower > 1 for verdict in verdicts) <= 2  # 0.6 expected at most; more than 2: p < 0.02
    assert np.mean([verdict.lower for verdict in verdicts]) > 0.5


def test_a_claim_just_above_the_truth_is_refuted_with_enough_runs() -> None:
    verdict = audit_mechanism(response(E1), Claim(0.8), PAIR, trials=40_000)
    assert verdict.status == "violated"
    assert 0.8 < verdict.lower < 1.0


def test_what_leaks_with_a_hundred_deltas_is_found() -> None:
    def leaky(x: Any, rng: Rng, n: int) -> Any:
        return np.where(rng.random(n) < 1e-2, 77.0 * x[0], rng.normal(size=n))

    assert audit_mechanism(Vectorised(leaky), Claim(1.0, 1e-4), PAIR, trials=30_000).status == "violated"
    assert audit_mechanism(Vectorised(leaky), Claim(1.0, 2e-2), PAIR, trials=30_000).status != "violated"


def test_too_few_runs_are_inconclusive_and_it_says_how_many_are_needed() -> None:
    gaussian = Vectorised(lambda x, rng, n: x[0] + rng.normal(0, 4, n))
    verdict = audit_mechanism(gaussian, Claim(1.0, 1e-5), PAIR, trials=2000)
    assert verdict.status == "inconclusive"
    assert "runs would settle it" in verdict.settle
    assert verdict.power < 0.9


def test_the_same_seed_gives_the_same_verdict_and_the_global_generators_are_left_alone() -> None:
    def global_noise(x: Any, rng: Rng) -> float:
        return float(x.sum() + np.random.laplace() + torch.randn(()))  # noqa: NPY002

    before = np.random.get_state()[1].copy(), torch.get_rng_state().clone()  # noqa: NPY002
    verdicts = [audit_mechanism(global_noise, Claim(1.0), PAIR, trials=600, seed=3) for _ in range(2)]
    assert verdicts[0].to_dict() == verdicts[1].to_dict()
    assert (np.random.get_state()[1] == before[0]).all()  # noqa: NPY002
    assert (torch.get_rng_state() == before[1]).all()


def test_a_mechanism_that_works_in_place_does_not_spoil_the_data() -> None:
    def in_place(x: Any, rng: Rng) -> float:
        x *= 0
        return float(rng.normal())

    first = np.ones(3)
    audit_mechanism(in_place, Claim(1.0), [(first, np.zeros(3))], trials=300)
    assert (first == 1).all()


# --- whatever comes back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "leak",
    [
        lambda x, rng: "yes" if x[0] else "no",
        lambda x, rng: float("nan") if x[0] else 1.0,
        lambda x, rng: float("inf") if x[0] else float("-inf"),
        lambda x, rng: [0.0] * (3 if x[0] else 2),
        lambda x, rng: (rng.normal(), {"count": int(x[0])}, None),
        lambda x, rng: {"w": torch.full((2, 2), float(x[0])), "b": torch.randn(3)},
        lambda x, rng: rng.normal(0, 1 + 9 * x[0], 5),
        lambda x, rng: bool(x[0]),
        lambda x, rng: 1 / (1 - x[0]) if x[0] < 1 else [].pop(),
        lambda x, rng: [rng.normal() if False else 3.0] * 2 + [x[0] * 1e-9],
        lambda x, rng: {1, 2} if x[0] else {1},
        lambda x, rng: rng.integers(10**6) * 2 + int(x[0]),
        lambda x, rng: np.repeat(rng.normal(), 2) + np.array([x[0], -x[0]]),
    ],
    ids=["words", "NaN", "infinity", "length", "tuple", "state dict", "spread", "bool", "raises", "tiny", "set",
         "parity", "one noise for two numbers"],
)  # fmt: skip
def test_leaks_of_every_kind_of_output_are_found(leak: Any) -> None:
    assert audit_mechanism(leak, Claim(1.0, 1e-5), PAIR, trials=4000).status == "violated"


def test_constant_outputs_prove_nothing() -> None:
    verdict = audit_mechanism(lambda x, rng: "done", Claim(1.0), PAIR, trials=2000)
    assert verdict.status == "consistent"
    assert verdict.lower == 0


def test_outputs_are_read_as_rows_and_fingerprints() -> None:
    outputs = read([(1, [2.0, np.nan]), (1, [2.0]), Raised("ValueError")])
    assert outputs.values.tolist() == [[1, 2, 0], [1, 2, 0], [0, 0, 0]]
    assert outputs.summary[:, 0].tolist() == [3, 2, 0]
    assert len(set(outputs.fingerprints.tolist())) == 3


def test_single_bits_are_looked_at_on_request_only() -> None:
    gaussian = Vectorised(lambda x, rng, n: x[0] + rng.normal(0, 4, n))
    claim = Claim(1.0, 1e-2)
    assert audit_mechanism(gaussian, claim, PAIR, trials=12_000).status == "consistent"
    assert audit_mechanism(gaussian, claim, PAIR, trials=12_000, exact_floats=True).status == "violated"


def test_very_many_numbers_are_reduced_to_those_that_matter() -> None:
    def wide(x: Any, rng: Rng) -> Any:
        output = rng.normal(size=2000)
        output[1234] += 30 * x[0]
        return output

    assert audit_mechanism(wide, Claim(1.0, 1e-5), PAIR, trials=2500).status == "violated"


# --- pairs, targets, mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add/remove", "replace"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_made_pairs_are_neighbours_inside_the_domain(adjacency: Any, shape: tuple[int, ...]) -> None:
    pairs = worst_pairs(adjacency, shape, Domain(0, 1), size=5)
    assert len(pairs) >= 4
    for pair in pairs:
        assert pair.first.min(initial=0) >= 0
        assert pair.first.max(initial=0) <= 1
        if adjacency == "add/remove":
            assert len(pair.first) == len(pair.second) + 1
            assert (pair.first[:-1] == pair.second).all()
        else:
            assert (pair.first != pair.second).reshape(len(pair.first), -1).any(1).sum() == 1


def test_a_domain_makes_an_unclipped_sum_legal() -> None:
    def unclipped(x: Any, rng: Rng) -> float:
        return float(x.sum() + rng.laplace())

    assert audit_mechanism(unclipped, Claim(1.0), trials=4000).status == "violated"
    assert audit_mechanism(unclipped, Claim(1.0), trials=10_000, domain=(0, 1)).status == "consistent"


def test_targets_are_subjects_functions_and_makers() -> None:
    import sys

    sys.modules["audited_module"] = sys.modules[__name__]
    assert audit_target("audited_module:subject").status == "violated"
    assert audit_target("audited_module:subject", epsilon=3.0).status == "consistent"
    assert audit_target("audited_module:noisy_sum", epsilon=0.5, trials=15_000).status == "consistent"
    assert audit_target("fedsim.audit.mechanisms:laplace", trials=4000).claim.epsilon == 1
    for target, words in (("nonsense", "module:function"), ("audited_module:nothing", "nothing"), ("no.such:x", "no")):
        with pytest.raises(AuditError, match=words):
            audit_target(target, epsilon=1.0)
    with pytest.raises(AuditError, match="epsilon is missing"):
        audit_target("audited_module:noisy_sum")


def test_mistakes_are_named() -> None:
    for wrong, words in (
        ({"trials": 10}, "trials is 10"),
        ({"confidence": 95}, "confidence is 95"),
        ({"factor": 1.0}, "factor is 1"),
        ({"pairs": []}, "pairs is empty"),
        ({"pairs": [1]}, "pairs\\[0\\]"),
    ):
        with pytest.raises(AuditError, match=words):
            audit_mechanism(noisy_sum, Claim(1.0), **wrong)
    with pytest.raises(AuditError, match="claim is missing"):
        audit_mechanism(noisy_sum)
    with pytest.raises(AuditError, match="answered on none of the arrays of numbers that were tried"):
        audit_mechanism(lambda x, rng: x["age"], Claim(1.0))
    with pytest.raises(AuditError, match="answers on none"):
        audit_mechanism(lambda x, rng: 1 / 0, Claim(1.0), PAIR)


# --- mechanisms by name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "trials"),
    [
        ("laplace", "consistent", 20_000),
        ("ridge-unbounded", "violated", None),
        ("fedsim-clients", "consistent", None),
        ("opacus", "violated", 8_000),
    ],
)
def test_included_mechanisms(name: str, status: str, trials: int | None) -> None:
    verdict = audit_mechanism(included()[name](), trials=trials)
    assert verdict.status == status
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("gaussian", "consistent"),
        ("homework-sum", "consistent"),
        ("homework-sum-16", "inconclusive"),
        ("ridge", "consistent"),
        ("flower-local-dp", "violated"),
        ("flower-local-dp-doubled", "consistent"),
        ("flower-central-dp", "consistent"),
        ("flower-central-dp-weighted", "violated"),
        ("flower-central-dp-fewer", "violated"),
        ("flower-central-dp-accounted", "consistent"),
        ("flower-central-dp-accounted-fewer", "violated"),
        ("opacus-993-rows", "violated"),
        ("opacus-101-rows", "consistent"),
        ("opacus-given-rate", "consistent"),
        ("opacus-same-size", "consistent"),
        ("fedsim-examples-fewer", "violated"),
        ("fedsim-examples", "consistent"),
    ],
)
def test_included_mechanisms_that_take_longer(name: str, status: str) -> None:
    assert audit_mechanism(included()[name]()).status == status


EXPECTED_NOISE = {
    "flower-local-dp": 1.0358,
    "flower-central-dp": 0.1,
    "flower-central-dp-accounted": 0.1,
    "opacus": 0.16,
    "opacus-given-rate": 0.16,
    "fedsim-examples": 0.16,
}


@pytest.mark.parametrize("name", EXPECTED_NOISE)
def test_real_code_runs_and_its_noise_has_the_expected_size(name: str) -> None:
    one = included()[name]()
    assert one.pairs is not None
    rng = np.random.default_rng(0)
    second = one.pairs[0][1]
    many = getattr(one.mechanism, "batch", None)
    outputs = many(second, rng, 60) if many else np.stack([one.mechanism(second, rng) for _ in range(60)])
    expected = EXPECTED_NOISE[name]
    assert outputs[:, 1:].std() == pytest.approx(expected, rel=0.25)


def test_opacus_divides_by_a_number_that_depends_on_the_rows() -> None:
    """Why its verdict under add/remove depends on the sizes: from the rows it computes the rate and the divisor."""
    for rows, batch_size, rate, divisor in (
        (11, 5, 1 / 3, 3),
        (10, 5, 1 / 2, 5),
        (993, 32, 1 / 32, 31),
        (992, 32, 1 / 31, 32),
    ):
        _, optimizer, loader, _ = OpacusSetting(0.8, batch_size).made(np.zeros((rows, 4)))
        assert loader.sample_rate == pytest.approx(rate)
        assert optimizer.expected_batch_size == divisor
    for rows in (101, 100):
        _, optimizer, loader, _ = OpacusSetting(0.8, 51).made(np.zeros((rows, 4)))
        assert (loader.sample_rate, optimizer.expected_batch_size) == (0.5, 50)


@pytest.mark.parametrize("name", ["opacus", "opacus-993-rows", "opacus-101-rows", "flower-central-dp-fewer"])
def test_a_removed_record_is_gone_where_the_row_says_so(name: str) -> None:
    one = included()[name]()
    assert one.pairs is not None
    first, second = one.pairs[0][:2]
    assert len(first) == len(second) + 1
    assert np.array_equal(first[1:], second)
    assert one.claim.adjacency == "add/remove"


def test_flower_with_its_accountant_refuses_unequal_weights_and_claims_more_than_one_gaussian() -> None:
    with pytest.raises(AuditError, match="requires equal client weights"):
        audit_mechanism(included()["flower-central-dp-accounted-weighted"]())
    accounted, plain = included()["flower-central-dp-accounted"](), included()["flower-central-dp"]()
    assert plain.claim.epsilon < accounted.claim.epsilon < 1.5 * plain.claim.epsilon


def test_ridge_moves_as_sherman_and_morrison_say() -> None:
    rng = np.random.default_rng(1)
    records, record = rng.normal(size=(8, 4)), rng.normal(size=4)
    bounds = ridge_bounds(records, record, lam=0.5, bound_x=10.0, bound_residual=10.0)
    moved = ridge_solution(np.concatenate([records, record[None]]), 0.5) - ridge_solution(records, 0.5)
    assert bounds.shift == pytest.approx(np.linalg.norm(moved))
    assert bounds.holds
    assert bounds.shift <= bounds.norm * bounds.residual / 0.5
    assert not ridge_bounds(records, record, lam=0.5, bound_x=10.0, bound_residual=1e-3).holds


EVEN = {
    "the largest magnitude, no noise": lambda x, rng: float(np.minimum(np.abs(x), 5).max()),
    "squares": lambda x, rng: np.minimum(x * x, 1).sum() + rng.laplace(scale=0.1),
}


@pytest.mark.parametrize("name", EVEN)
def test_an_even_function_is_seen_under_replace(name: str) -> None:
    """A record and its negative are the same to it: other pairs are needed."""
    assert audit_mechanism(EVEN[name], Claim(1.0, adjacency="replace"), trials=20_000).status == "violated"


@dataclasses.dataclass
class Noisy:
    value: float


FORMS = {
    "json": lambda value: json.dumps({"sum": value}),
    "dataclass": Noisy,
    "decimal": Decimal,
    "object array": lambda value: np.array([value], dtype=object),
}


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_read_in_whatever_they_are_wrapped(form: str) -> None:
    found = audit_mechanism(
        lambda x, rng: FORMS[form](float(np.clip(x, 0, 1).sum() + rng.laplace(scale=0.1))), Claim(1.0), trials=20_000
    )
    assert found.status == "violated"


def test_a_mechanism_that_stops_answering_is_not_called_consistent() -> None:
    calls = iter(range(300))

    def guarded(x: np.ndarray, rng: np.random.Generator) -> float:
        if next(calls, None) is None:
            raise RuntimeError("budget exhausted")
        return float(np.clip(x, -1, 1).sum())

    assert audit_mechanism(guarded, Claim(1.0), trials=20_000).status == "inconclusive"


def test_the_power_does_not_depend_on_an_odd_number_of_runs() -> None:
    assert power(2.0, 1.0, 0.0, 1001) == pytest.approx(power(2.0, 1.0, 0.0, 1000), abs=0.02)


def test_every_public_name_is_where_the_package_says() -> None:
    assert all(getattr(fedsim.audit, name).__name__ == name for name in fedsim.audit.__all__)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_curve_of_an_audit_goes_through_what_was_counted(sign: int) -> None:
    """Whichever of the two data sets the event speaks for: more is said "in" with the record than without."""
    subject = Subject(lambda x, rng: sign * 2.0 * len(x) + rng.normal(), Claim(1.0, 1e-5))
    _, count = examine(subject, trials=4000)
    assert count is not None
    numbers = numbers_of(count)
    counts, curve = numbers["counts"], numbers["trade_off"]
    assert counts["tp"] + counts["fn"] == numbers["ins"]
    assert counts["tp"] + counts["fp"] == count.guesses
    fpr, fnr = counts["fp"] / (counts["fp"] + counts["tn"]), counts["fn"] / numbers["ins"]
    # Where few were counted the curve has steep parts, so that the point is compared with points, not with heights.
    away = np.maximum(np.abs(np.asarray(curve["fpr"]) - fpr), np.abs(np.asarray(curve["fnr"]) - fnr))
    assert away.min() < 0.02
    assert np.mean(curve["fnr"]) < np.mean(1 - np.array(curve["fpr"]))
