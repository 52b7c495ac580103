# SPDX-License-Identifier: Apache-2.0
"""The verdict on a federation, from what its server saw of canaries in one run.

Four tests of the claim share the error probability equally, so that a true claim is called violated with probability of
at most 1 − confidence:

| test            | tier | refutes                                                                              |
|-----------------|------|--------------------------------------------------------------------------------------|
| one run         | A    | the curve of the claimed releases, from guesses of who was in (Mahloujifar et al.)   |
| per step        | B    | the claimed noise, from the distance of the scores by their spread; or the rate      |
| per step, count | B    | the claimed noise, from errors at the middle; also where the scores are not Gaussian |
| echo            | B    | that every release has fresh noise                                                   |

A claim of this project names its releases (noise, sampling rate, number), so that their curve is what is claimed, and
to refute it needs no model: tier A. The number of guesses is fixed before the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from fedsim.audit.estimation.rates import tally, trade_off
from fedsim.audit.estimators import (
    Estimate,
    epsilon_one_run,
    epsilon_one_run_fdp,
    epsilon_per_step,
    one_shot_federated,
)
from fedsim.audit.evidence.claim_tests import GUESSES, family_of, guess, p_values
from fedsim.audit.evidence.federated import Evidence
from fedsim.audit.verdict import POWER, Claim, DecidingTest, Gap, Verdict, decide, nothing_proved
from fedsim.privacy import Mechanism, PrivacyClaim, smallest_noise
from fedsim.privacy.accounting import account
from fedsim.privacy.loss import FINE, ROUGH, Grid
from fedsim.privacy.rounding import rounded_down

FACTOR = 2.0
"""What must be caught: a mechanism that spends so many times what it claims."""
_TESTS = 4


@dataclass(frozen=True)
class Finding:
    """A verdict, and the numbers behind it."""

    verdict: Verdict
    numbers: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"verdict": self.verdict.to_dict(), "sentence": self.sentence(), "numbers": self.numbers}

    def sentence(self) -> str:
        """For people: both tiers, never merged, and never epsilon without delta, unit and adjacency."""
        verdict, sure = self.verdict, f"{100 * self.verdict.confidence:g}% confidence"
        model = next(estimate for estimate in verdict.estimates if estimate.tier == "B")  # fixed: not the best of all
        gaussian = f"ε ≥ {rounded_down(model.lower)} if the noise is Gaussian (tier B)"
        if self.numbers["canaries"]:
            free = f"ε ≥ {rounded_down(verdict.lower)} on curves of the claimed kind, without a model (tier A)"
            proved = f"one run with {verdict.trials:,} canaries proves {free} and {gaussian}"
            proved += f", at the same δ, each with {sure}"
        else:
            proved = f"{verdict.trials:,} updates of its transcript prove {gaussian}, at the same δ, with {sure}"
        rest = f"{verdict.reason}{' ' if verdict.settle else ''}{verdict.settle}"
        return f"{verdict.status.capitalize()}: claimed is {verdict.claim}; {proved}. {rest}"


def judge(evidence: Evidence, confidence: float = 0.95, guess_share: float = GUESSES) -> Finding:
    """What the evidence proves about epsilon, and whether the claim survives it."""
    claim, stated = evidence.claim, Claim.of(evidence.claim)
    correct, guesses = guess(evidence, guess_share)
    estimates = _estimates(evidence, correct, guesses, confidence)
    tests = p_values(evidence, guess_share)
    name, smallest = min(tests.items(), key=lambda item: item[1])
    further, error = _further(claim), (1 - confidence) / _TESTS
    power = _power(evidence, error, further)
    needed = _needed(evidence, error, further) if power < POWER else None
    verdict = decide(
        stated,
        estimates,
        min(1.0, _TESTS * smallest),
        confidence=confidence,
        power=power,
        factor=FACTOR,
        trials=_looked_at(evidence),
        gap=_gap(evidence, estimates),
        settle=_settle(evidence, needed) if needed is not None else "",
        evidence=f"{correct} of {guesses} guesses about {len(evidence.included)} canaries right" if guesses else "",
        test=DecidingTest(name, "A" if name == "one run" else "B", of="releases"),
        refuted_by=_seen(name, evidence),
    )
    return Finding(verdict, {**_numbers(evidence, tests, correct, guesses), "needed": needed})


def _one_run(correct: int, guesses: int, canaries: int, claim: PrivacyClaim, confidence: float) -> Estimate:
    """Tier A: the strongest curve of the claimed kind that is refuted, and its ε on a fine grid.

    The ε of a rough grid is too large, so that the noise it belongs to is found again, from above.
    """
    found = epsilon_one_run_fdp(correct, guesses, canaries, claim.delta, confidence, family=family_of(claim))
    if claim.sample_rate == 1 or found.lower <= 0:
        return found
    noise = smallest_noise(lambda sigma: _composed(claim, sigma), found.lower, 1e-5)
    return replace(found, lower=min(found.lower, _composed(claim, noise, FINE)))


def _estimates(evidence: Evidence, correct: int, guesses: int, confidence: float) -> list[Estimate]:
    claim, count = evidence.claim, len(evidence.included)
    rate, steps, delta = claim.sample_rate, claim.compositions, claim.delta
    seen = evidence.scores_in, evidence.scores_out
    chances = (evidence.joined, evidence.chances) if rate < 1 else None
    found = [
        epsilon_per_step(*seen, rate, steps, delta, confidence, participations=chances),
        epsilon_per_step(*seen, rate, steps, delta, confidence, participations=chances, method="clopper-pearson"),
    ]
    if not count:
        return [nothing_proved(Claim.of(claim), confidence), *found]
    free = epsilon_one_run(correct, guesses, count, delta, confidence)
    found = [_one_run(correct, guesses, count, claim, confidence), free, *found]
    coins = (evidence.included & evidence.whole, ~evidence.included & evidence.whole)
    if claim.unit == "client" and min(coins[0].sum(), coins[1].sum()) > 2:
        found.append(one_shot_federated(evidence.totals[coins[0]], evidence.totals[coins[1]], delta, confidence))
    return found


# --- what it means --------------------------------------------------------------------------------------------------


def _composed(claim: PrivacyClaim, noise: float, grid: Grid = ROUGH) -> float:
    """ε at δ of the claimed releases with another noise; on a rough grid a little too much."""
    sampling = "poisson" if claim.sample_rate < 1 else "none"
    adjacency = claim.adjacency if claim.sample_rate == 1 else "add/remove"
    mechanism = Mechanism("gaussian", noise, adjacency, sampling, claim.sample_rate)  # type: ignore[arg-type]
    return account([(mechanism, claim.compositions)], claim.delta, "pld", grid).epsilon


def _unit(evidence: Evidence) -> float:
    return math.sqrt(1 / max(1, len(evidence.scores_in)) + 1 / max(1, len(evidence.scores_out)))


def _further(claim: PrivacyClaim) -> float:
    """How much further apart the two worlds are in a step, in units of σ = 1, if `FACTOR` times ε is spent."""
    worse = smallest_noise(lambda noise: _composed(claim, noise), FACTOR * claim.epsilon, 1e-2)
    return 1 / worse - 1 / claim.noise_multiplier


def _power(evidence: Evidence, error: float, further: float) -> float:
    """With which probability the per-step test finds a noise that spends `FACTOR` times what is claimed."""
    return float(ndtr(further / _unit(evidence) + ndtri(error / 2)))


def _needed(evidence: Evidence, error: float, further: float) -> int:
    """Canaries (of a transcript: updates) with which the per-step test finds `FACTOR` times the claim."""
    times = float((ndtri(POWER) - ndtri(error / 2)) / further * _unit(evidence)) ** 2
    return math.ceil(times * _looked_at(evidence))


def _looked_at(evidence: Evidence) -> int:
    """The number of canaries, or of updates of a transcript."""
    return len(evidence.included) or len(evidence.scores_in) + len(evidence.scores_out)


def _settle(evidence: Evidence, needed: int) -> str:
    what = "canaries" if len(evidence.included) else "kept updates"
    return f"About {needed:,} {what} in place of {_looked_at(evidence):,} would settle it."


def _gap(evidence: Evidence, estimates: list[Estimate]) -> Gap:
    """Claim − tier A bound: what the canaries did not show, what tier A leaves unused, what more of them would gain."""
    x, y, claim = evidence.scores_in, evidence.scores_out, evidence.claim
    distance = float(x.mean() - y.mean()) / math.sqrt((x.var() + y.var()) / 2) if min(len(x), len(y)) > 2 else 0.0
    best = next(estimate for estimate in estimates if estimate.tier == "B").lower
    if not 1e-3 < distance < 1e3:
        return Gap(threat_model=claim.epsilon - best, score=best - estimates[0].lower)
    point = _composed(claim, 1 / distance)
    return Gap(threat_model=claim.epsilon - point, score=best - estimates[0].lower, statistics=point - best)


def _seen(test: str, evidence: Evidence) -> str:
    """What a test has seen, if it rejects."""
    return {
        "one run": "so many right guesses about who was in are refuted without a model of the scores (tier A)",
        "per step": "the canaries stand out of the noise further, or join more often, than claimed (tier B)",
        "per step, count": "the canaries are mistaken for noise more seldom than claimed (tier B)",
        "echo": f"noise follows from that of the round before (correlation {evidence.echo[0]:.3f}, tier B)",
    }[test]


def _numbers(evidence: Evidence, tests: dict[str, float], correct: int, guesses: int) -> dict[str, Any]:
    """Everything that a figure or a table needs."""
    claim = evidence.claim
    return {
        "claim": claim.to_dict(),
        "canaries": len(evidence.included),
        "included": int(evidence.included.sum()),
        "guesses": guesses,
        "correct": correct,
        "scores_in": len(evidence.scores_in),
        "scores_out": len(evidence.scores_out),
        "joined": evidence.joined,
        "chances": evidence.chances,
        "echo": evidence.echo[0],
        "accuracy": evidence.accuracy,
        "p_values": tests,
        "trade_off": trade_off(evidence.totals, evidence.included),
        "trade_off_step": trade_off(
            np.concatenate([evidence.scores_in, evidence.scores_out]),
            np.repeat([True, False], [len(evidence.scores_in), len(evidence.scores_out)]),
        ),
        **(_counts(evidence, guesses) if guesses else {}),
    }


def _counts(evidence: Evidence, guesses: int) -> dict[str, Any]:
    """Of two tests by rank, fixed before the run: one that says "in" of half of the canaries, and one of few."""
    rank = np.argsort(np.argsort(-evidence.totals, kind="stable"))
    half = "The half of the canaries with the largest scores is said to be in"
    sure = "The canaries that the auditor guesses to be in are said to be in, and all others to be out"
    return {
        "counts": tally(rank < len(rank) // 2, evidence.included, half),
        "counts_guessed": tally(rank < guesses // 2, evidence.included, sure),
    }
