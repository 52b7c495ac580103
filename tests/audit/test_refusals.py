# SPDX-License-Identifier: Apache-2.0
"""A mechanism that refuses what its author says cannot occur keeps its claim; one whose refusals leak does not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.audit.blackbox.making import answered
from fedsim.audit.blackbox.outputs import Raised, is_refusal
from fedsim.audit.blackbox.pairs import Domain, Pair, like_pairs, varied_pairs, worst_pairs
from fedsim.audit.blackbox.running import Vectorised
from fedsim.audit.mechanism import audit_mechanism
from fedsim.audit.verdict import Claim
from fedsim.errors import AuditError

Rng = np.random.Generator
TRIALS = 20_000
LIKE = np.random.default_rng(0).random(32)
EIGHTH = float(np.log1p(8 / 32 * (np.e - 1)))
"""ε = 1 amplified by eight of 32 rows."""


def noisy_sum(records: Any, rng: Rng, scale: float = 1.0) -> float:
    return float(np.clip(records, 0, 1).sum() + rng.laplace(scale=scale))


def refuse(how: str) -> Any:
    if how == "exception":
        raise ValueError("records must lie in [0, 1]")
    if how == "exit":
        raise SystemExit(2)
    return {"None": None, "NaN": float("nan"), "NaNs": [float("nan")] * 3}[how]


def strict(how: str, low: float = 0.0, high: float = 1.0, scale: float = 1.0) -> Callable[[Any, Rng], Any]:
    """A noisy sum that refuses records outside of its domain."""

    def mechanism(records: Any, rng: Rng) -> Any:
        if np.any(np.asarray(records) < low) or np.any(np.asarray(records) > high):
            return refuse(how)
        return noisy_sum(records, rng, scale)

    return mechanism


def categories(records: Any, rng: Rng) -> Any:
    if not np.isin(records, (0, 1, 2, 3)).all():
        raise KeyError("unknown category")
    return np.bincount(np.asarray(records).astype(int), minlength=4) + rng.laplace(size=4)


def unit_ball(records: Any, rng: Rng) -> Any:
    if (np.linalg.norm(records, axis=1) > 1 + 1e-9).any():
        raise ValueError("norm above 1")
    return records.sum(0) + rng.laplace(scale=2.0, size=records.shape[1])


def eight(records: Any, rng: Rng) -> float:
    """The claim is amplified by 8/32: its author has 32 rows."""
    return noisy_sum(records[rng.choice(len(records), 8, replace=False)], rng)


def strict_eight(records: Any, rng: Rng) -> Any:
    return strict("exception")(records[rng.choice(len(records), 8, replace=False)], rng)


def exactly_32(records: Any, rng: Rng) -> float:
    if len(records) != 32:
        raise ValueError("give 32 rows")
    return noisy_sum(records, rng)


def at_least(least: int) -> Callable[[Any, Rng], float]:
    def mechanism(records: Any, rng: Rng) -> float:
        if len(records) < least:
            raise ValueError("too few to train on")
        return noisy_sum(records, rng)

    return mechanism


HOW = ("exception", "exit", "None", "NaN", "NaNs")
REPLACE = "replace"


@pytest.mark.parametrize("how", HOW)
def test_a_refusal_of_an_invented_record_is_not_held_against_the_claim(how: str) -> None:
    verdict = audit_mechanism(strict(how), Claim(1.0), trials=TRIALS)
    assert verdict.status == "inconclusive", verdict.sentence()
    assert "invented records, such as -1" in verdict.settle
    assert "give domain" in verdict.settle
    assert verdict.lower <= 1


@pytest.mark.parametrize("how", HOW)
def test_with_the_domain_it_is_consistent_and_a_refusal_within_it_is_a_leak(how: str) -> None:
    assert audit_mechanism(strict(how), Claim(1.0), trials=TRIALS, domain=(0, 1)).status == "consistent"
    verdict = audit_mechanism(strict(how), Claim(1.0), trials=TRIALS, domain=(-5, 5))
    assert verdict.status == "violated"
    assert "refused (an exception, None or NaN)" in verdict.evidence


@settings(max_examples=6, deadline=None)
@given(st.floats(-20, 0.0), st.floats(1.0, 500.0), st.sampled_from(HOW), st.integers(0, 99))
def test_no_strict_domain_is_called_violated(low: float, high: float, how: str, seed: int) -> None:
    verdict = audit_mechanism(strict(how, low, high), Claim(1.0), trials=4000, seed=seed)
    assert verdict.status == "inconclusive"
    assert "give domain" in verdict.settle


@pytest.mark.parametrize("how", HOW)
def test_too_little_noise_is_found_though_records_are_refused(how: str) -> None:
    assert audit_mechanism(strict(how, scale=0.3), Claim(1.0), trials=TRIALS).status == "violated"


@pytest.mark.parametrize(
    ("mechanism", "claim", "options"),
    [
        (categories, Claim(1.0), {}),
        (categories, Claim(2.0, adjacency="replace"), {}),
        (unit_ball, Claim(1.0), {"like": np.zeros((0, 4))}),
        (eight, Claim(EIGHTH), {"like": LIKE}),
        (eight, Claim(EIGHTH, adjacency="replace"), {"like": LIKE}),
        (strict_eight, Claim(EIGHTH, adjacency="replace"), {"like": LIKE}),
        (strict_eight, Claim(EIGHTH), {"like": LIKE}),
        (exactly_32, Claim(1.0, adjacency="replace"), {"like": LIKE}),
        (at_least(3), Claim(1.0), {}),
        (at_least(11), Claim(1.0), {}),
        (at_least(40), Claim(1.0), {}),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_claims_are_kept_as_their_authors_read_them(
    mechanism: Any, claim: Claim, options: dict[str, Any], seed: int
) -> None:
    verdict = audit_mechanism(mechanism, claim, trials=8000, seed=seed, **options)
    assert verdict.status != "violated", verdict.sentence()
    assert verdict.lower <= claim.epsilon


@pytest.mark.parametrize(
    ("mechanism", "claim", "domain", "like"),
    [
        (categories, Claim(1.0), {0, 1, 2, 3}, None),
        (categories, Claim(2.0, adjacency="replace"), Domain(values=(0, 1, 2, 3)), None),
        (unit_ball, Claim(1.0), Domain(-1, 1, norm=1.0), np.zeros((0, 4))),
        (strict_eight, Claim(EIGHTH, adjacency="replace"), (0, 1), LIKE),
    ],
)
def test_with_a_domain_they_are_consistent(
    mechanism: Any, claim: Claim, domain: Domain | Collection[float], like: Any
) -> None:
    verdict = audit_mechanism(mechanism, claim, trials=TRIALS, domain=domain, like=like)
    assert verdict.status == "consistent", verdict.sentence()


def test_fewer_rows_than_the_author_has_break_the_amplification_and_the_verdict_names_them() -> None:
    verdict = audit_mechanism(eight, Claim(EIGHTH), trials=60_000)
    assert verdict.status == "violated"
    assert (
        "give domain=(low, high) if records cannot be so and like if the number of records is fixed" in verdict.reason
    )


def test_where_the_number_of_records_is_fixed_nothing_can_be_added() -> None:
    with pytest.raises(AuditError, match="claim adjacency replace"):
        audit_mechanism(exactly_32, Claim(1.0), like=LIKE)


# --- refusals that leak ---------------------------------------------------------------------------------------------


def unless_all_agree(records: Any, rng: Rng) -> Any:
    """Each record occurs in data sets that are answered, so that none of them is at fault."""
    return noisy_sum(records, rng) if len(np.unique(records)) < 2 else None


def unless_many_are_large(records: Any, rng: Rng) -> Any:
    if (np.asarray(records) > 0.9).sum() > 1:
        raise ValueError("too many large records")
    return noisy_sum(records, rng)


def constant_is_refused(records: Any, rng: Rng) -> Any:
    return float("nan") if np.ptp(records) == 0 else noisy_sum(records, rng)


@pytest.mark.parametrize("mechanism", [unless_all_agree, constant_is_refused])
def test_a_refusal_that_depends_on_several_records_is_a_leak_without_any_domain(mechanism: Any) -> None:
    verdict = audit_mechanism(mechanism, Claim(1.0), trials=TRIALS)
    assert verdict.status == "violated"
    assert "here a refusal counts as an output" in verdict.evidence


def test_one_that_looks_like_a_domain_is_never_called_consistent() -> None:
    assert audit_mechanism(unless_many_are_large, Claim(1.0), trials=TRIALS).status != "consistent"
    assert audit_mechanism(unless_many_are_large, Claim(1.0), trials=TRIALS, domain=(0, 1)).status == "violated"


def test_a_refusal_on_a_given_pair_is_an_output() -> None:
    pair = [(np.array([0.5, 7.0]), np.array([0.5]))]
    verdict = audit_mechanism(strict("exception"), Claim(1.0), pair, trials=2000)
    assert verdict.status == "violated"
    assert "The mechanism refused" in verdict.reason


def test_a_batch_that_raises_is_an_output_of_its_runs() -> None:
    def many(records: Any, rng: Rng, n: int) -> Any:
        if np.any(records > 1):
            raise ValueError("too large")
        return records.sum() + rng.laplace(size=n)

    pair = [(np.array([0.5, 7.0]), np.array([0.5]))]
    assert audit_mechanism(Vectorised(many), Claim(1.0), pair, trials=2000).status == "violated"


# --- the rules ------------------------------------------------------------------------------------------------------


def test_what_a_refusal_is() -> None:
    nan = float("nan")
    for output in (Raised("ValueError"), None, nan, [nan, nan], np.full((2, 2), nan), {"w": nan}):
        assert is_refusal(output)
    for output in (0.0, [], [nan, 1.0], "", "refused", np.zeros(0), [None, 1]):
        assert not is_refusal(output)


def test_the_number_of_records_and_the_records_themselves() -> None:
    def needs_three(records: Any, rng: Rng) -> int:
        if len(records) < 3 or np.any(records > 5):
            raise ValueError("cannot train on that")
        return 0

    few = Pair(np.zeros(3), np.zeros(2))
    large = Pair(np.array([0.0, 0.0, 0.0, 9.0]), np.zeros(3))
    other = Pair(np.zeros(4), np.zeros(3))
    invented = answered(needs_three, [few, large, other], invented=True)
    assert list(invented.pairs) == [other]
    assert invented.note.startswith("All data sets of 2 records were refused")
    assert (
        "refused 1 of 2 invented records, such as 9 (it raised ValueError: cannot train on that)" in invented.question
    )
    given_domain = answered(needs_three, [few, large, other], invented=False)
    assert list(given_domain.pairs) == [large, other]
    assert given_domain.question == ""
    known = answered(needs_three, [few, large, other], invented=True, known=np.array([0.0, 9.0]))
    assert list(known.pairs) == [large, other]


@pytest.mark.parametrize("adjacency", ["add/remove", "replace"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_pairs_of_a_fixed_number_of_categories(adjacency: Any, shape: tuple[int, ...]) -> None:
    domain, rng = Domain(values=(2.0, 5.0, 11.0)), np.random.default_rng(0)
    pairs = [*worst_pairs(adjacency, shape, domain, 7), *varied_pairs(adjacency, shape, domain, rng, 60, 7)]
    assert len(pairs) > 60
    for pair in pairs:
        assert (len(pair.first), len(pair.second)) == (8, 7 if adjacency == "add/remove" else 8)
        assert np.isin(np.concatenate([pair.first, pair.second]), domain.values).all()
    with pytest.raises(AuditError, match="at least two finite numbers"):
        Domain(values=(1.0,))


@pytest.mark.parametrize("adjacency", ["add/remove", "replace"])
def test_pairs_of_an_example_data_set_hold_its_records_only(adjacency: Any) -> None:
    like = np.arange(12.0).reshape(6, 2)
    for pair in like_pairs(adjacency, like, Domain(), np.random.default_rng(0), 4):
        assert np.array_equal(pair.first, like)
        assert {tuple(record) for record in pair.second} <= {tuple(record) for record in like}
        assert len(pair.second) == (5 if adjacency == "add/remove" else 6)


def exactly(count: int, scale: float) -> Callable[[Any, Rng], float]:
    """A noisy sum of so many records in [-1, 1]: replacing one moves it by 2."""

    def mechanism(records: Any, rng: Rng) -> float:
        if len(records) != count:
            raise ValueError(f"{count} records are needed")
        return float(np.clip(records, -1, 1).sum() + rng.laplace(scale=scale))

    return mechanism


@pytest.mark.parametrize("seed", [0, 5])
def test_a_mechanism_of_one_size_is_not_called_consistent_after_a_look_at_few_pairs(seed: int) -> None:
    """Of 250 pairs two have 50 records, and they were the wrong ones: ε = 10 was called consistent with ε ≤ 1."""
    claim = Claim(epsilon=1.0, adjacency="replace")
    unaware = audit_mechanism(exactly(50, 0.2), claim, seed=seed)
    assert unaware.status != "consistent"
    assert unaware.status == "violated" or "give like" in unaware.settle
    rows = np.random.default_rng(seed).uniform(-1, 1, 50)
    assert audit_mechanism(exactly(50, 0.2), claim, like=rows, trials=TRIALS, seed=seed).status == "violated"
