# SPDX-License-Identifier: Apache-2.0
"""The verdict's three words mean what the table says, and the exact test behind them is exact."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from fedsim.audit.blackbox.distinguishing import epsilon_distinguishing, gaussian_mu, p_value, power
from fedsim.audit.estimate import Estimate
from fedsim.audit.verdict import Claim, DecidingTest, Gap, Verdict, decide
from fedsim.errors import AuditError
from fedsim.privacy.gaussian import gaussian_epsilon


def bound(lower: float) -> Estimate:
    return Estimate(lower, None, 0.95, "exact test", "A", 1e-5)


def verdict(lower: float, p: float, caught: float = 0.95) -> Verdict:
    return decide(
        Claim(1.0, 1e-5), [bound(lower)], p, confidence=0.95, power=caught, trials=100, settle="More.", gap=Gap(0.1)
    )


def test_the_three_words() -> None:
    assert verdict(1.5, 1e-6).status == "violated"
    assert verdict(0.5, 0.7).status == "consistent"
    assert verdict(0.5, 0.7, caught=0.5).status == "inconclusive"
    assert verdict(0.5, 0.7, caught=0.5).settle == "More."
    assert verdict(1.5, 1e-6, caught=0.5).status == "violated"  # what is refuted needs no power


def test_only_tier_a_refutes() -> None:
    with pytest.raises(AuditError, match="tier A"):
        decide(Claim(1.0), [], 0.0, confidence=0.95, power=1.0, trials=1)


def test_it_survives_json_and_says_delta_unit_and_confidence() -> None:
    one = verdict(1.5, 1e-6)
    assert Verdict.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    for words in ("δ = 1e-05", "one example", "95% confidence", "1e-06"):
        assert words in one.sentence()
    with pytest.raises(AuditError, match="missing"):
        Verdict.from_dict({"status": "violated"})


@pytest.mark.parametrize("wrong", [{"epsilon": math.inf}, {"epsilon": -1}, {"epsilon": 1, "delta": 1.0},
                                   {"epsilon": 1, "adjacency": "swap"}, {"epsilon": 1, "unit": "row"}])  # fmt: skip
def test_a_claim_that_cannot_be_tested_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(AuditError):
        Claim(**wrong)  # type: ignore[arg-type]


# --- the exact test -------------------------------------------------------------------------------------------------


def test_without_delta_it_is_the_binomial_test() -> None:
    assert p_value(90, 100, 1000, 1.0, 0.0) == pytest.approx(binom.sf(89, 100, math.e / (1 + math.e)))
    # Steinke et al. 2023 with r = 100, v = 90 and δ = 0: 1.6308 (../shared/reference/audit.json, section c)
    assert epsilon_distinguishing(90, 100, 1000, 0.0).lower == pytest.approx(1.6308, abs=1e-4)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
def test_bound_and_p_value_say_the_same(delta: float) -> None:
    lower = epsilon_distinguishing(300, 350, 5000, delta).lower
    assert p_value(300, 350, 5000, lower * 0.999, delta) < 0.05
    assert p_value(300, 350, 5000, lower * 1.001, delta) > 0.05


def test_delta_takes_away_what_it_excuses() -> None:
    assert epsilon_distinguishing(5, 5, 1000, 0.0).lower > 0
    assert epsilon_distinguishing(5, 5, 1000, 0.02).lower == 0
    assert p_value(5, 5, 1000, 1.0, 0.02) == 1


def test_coverage_with_a_delta_that_is_used_up() -> None:
    """P = min(1, e^ε P' + δ) on S, the worst that (ε, δ)-DP allows: refuted in at most 5% of the audits."""
    rng = np.random.default_rng(5)
    eps, delta, other, n = 1.0, 0.01, 0.05, 2000
    hit = math.e * other + delta
    heads = rng.binomial(n, 0.5, 2000)
    right, wrong = rng.binomial(heads, hit), rng.binomial(n - heads, other)
    refuted = [p_value(int(a), int(a + b), n, eps, delta) <= 0.05 for a, b in zip(right, wrong, strict=True)]
    assert np.mean(refuted) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_power_grows_with_runs_and_is_what_simulation_gives() -> None:
    rng = np.random.default_rng(6)
    assert power(2.0, 1.0, 0.0, 50) < power(2.0, 1.0, 0.0, 500)
    heads = rng.binomial(100, 0.5, 2000)  # of Laplace noise: above 1 half of the time, or e^-ε as often
    right, wrong = rng.binomial(heads, 0.5), rng.binomial(100 - heads, math.exp(-2) / 2)
    seen = np.mean([p_value(int(a), int(a + b), 100, 1.0, 0.0) <= 0.05 for a, b in zip(right, wrong, strict=True)])
    assert power(2.0, 1.0, 0.0, 100) == pytest.approx(seen, abs=0.06)


def test_mu_is_that_of_the_gaussian_mechanism() -> None:
    assert gaussian_mu(4.3772, 1e-5) == pytest.approx(1.0, abs=1e-4)
    assert gaussian_epsilon(1 / gaussian_mu(2.0, 1e-3), 1e-3) == pytest.approx(2.0)


def test_impossible_counts_are_refused() -> None:
    for counts in ((5, 4, 10), (1, 20, 10), (-1, 2, 3)):
        with pytest.raises(AuditError, match="at most the next"):
            p_value(*counts, 1.0, 0.0)
    with pytest.raises(AuditError, match="delta"):
        p_value(1, 2, 3, 1.0, 1.0)


def test_a_model_that_contradicts_the_claim_is_never_passed_over() -> None:
    """Tier B cannot refute, but what it says above the claim must not read `consistent`."""
    exact = Estimate(0.5, None, 0.95, "exact", "A", 1e-5)
    model = Estimate(2.0, None, 0.95, "Gaussian fit", "B", 1e-5)
    common = {"confidence": 0.95, "power": 0.99, "trials": 1000}
    assert decide(Claim(1.0, 1e-5), [exact], 1.0, **common).status == "consistent"
    found = decide(Claim(1.0, 1e-5), [exact, model], 1.0, **common)
    assert found.status == "inconclusive"
    assert "tier B (Gaussian fit) proves ε ≥ 2.000 at δ = 1e-05" in found.sentence()


# --- one judge ------------------------------------------------------------------------------------------------------

TIERS = st.sampled_from(["A", "B"])
BOUNDS = st.lists(st.tuples(st.floats(0, 8), TIERS), max_size=4)


@given(
    st.floats(0, 1), st.floats(0, 1), st.floats(0, 8), BOUNDS, st.sampled_from(["epsilon", "releases"]), st.booleans()
)
def test_every_verdict_keeps_its_table(
    p: float, caught: float, lower: float, others: list[tuple[float, Any]], of: Any, asked: bool
) -> None:
    estimates = [bound(lower), *(Estimate(one, None, 0.95, "other", tier, 1e-5) for one, tier in others)]
    made = decide(
        Claim(1.0, 1e-5), estimates, p, confidence=0.95, power=caught, trials=9, settle="More.",
        test=DecidingTest("a test", "B", of), open_question="What is the domain?" if asked else "",
    )  # fmt: skip
    assert made.estimates[0].tier == "A"
    assert (made.status == "violated") == (p <= 1 - 0.95 and (of == "releases" or lower > 1))
    above = any(tier == "B" and one > 1 for one, tier in others)
    if made.status == "consistent":
        assert caught >= 0.9
        assert not above
        assert not asked
    elif made.status == "inconclusive":
        assert caught < 0.9 or above or asked
        assert ("More." in made.settle) == (caught < 0.9)
        assert ("What is the domain?" in made.settle) == asked
    if made.status == "violated" and lower <= 1:
        assert "ε itself is not" in made.reason
    assert Verdict.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    for status in {"violated", "consistent", "inconclusive"} - {made.status}:
        if status == "inconclusive" and made.status == "consistent":
            continue  # never wrong to be careful
        if status == "consistent" and asked and caught >= 0.9 and not above:
            continue  # what is not known is not in the numbers
        with pytest.raises(AuditError, match="verdict is"):
            dataclasses.replace(made, status=status)


def test_a_verdict_begins_with_tier_a_at_the_delta_of_its_claim() -> None:
    good = verdict(0.5, 0.7)
    model = Estimate(0.2, None, 0.95, "Gaussian fit", "B", 1e-5)
    with pytest.raises(AuditError, match="must begin with one of tier A"):
        dataclasses.replace(good, estimates=(model, *good.estimates))
    with pytest.raises(AuditError, match="must begin with one of tier A"):
        dataclasses.replace(good, estimates=())
    with pytest.raises(AuditError, match="an estimate is at δ"):
        dataclasses.replace(good, estimates=(*good.estimates, dataclasses.replace(model, delta=0.1)))


def test_only_decide_makes_verdicts() -> None:
    """So that mechanisms, games, federations and transcripts are judged by one table."""
    import fedsim

    for path in Path(fedsim.__file__).parent.rglob("*.py"):
        made = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Verdict"
        ]
        assert len(made) == (1 if path.name == "verdict.py" else 0), path


def test_a_verdict_of_before_is_still_read() -> None:
    """A federation's: refuted by a test of its noise, with a bound below the claim, or with no bound of tier A."""
    old = verdict(0.5, 0.7).to_dict()
    for name in ("check", "test"):
        del old[name]
    assert Verdict.from_dict(old).test.of == "epsilon"
    refuted = {**old, "status": "violated", "p_value": 1e-9}
    assert Verdict.from_dict(refuted).test.of == "releases"
    transcript = {**refuted, "estimates": [{**old["estimates"][0], "tier": "B"}]}
    read = Verdict.from_dict(transcript)
    assert [estimate.tier for estimate in read.estimates] == ["A", "B"]
    assert read.lower == 0
