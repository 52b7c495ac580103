# SPDX-License-Identifier: Apache-2.0
"""The verdict's three words mean what the table says, and the exact test behind them is exact."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.stats import binom

from fedsim.audit.blackbox.distinguishing import epsilon_distinguishing, gaussian_mu, p_value, power
from fedsim.audit.estimate import Estimate
from fedsim.audit.verdict import Claim, Gap, Verdict, decide
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
    hit = math.exp(2) / (1 + math.exp(2))
    heads = rng.binomial(100, 0.5, 2000)
    right, wrong = rng.binomial(heads, hit), rng.binomial(100 - heads, 1 - hit)
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
