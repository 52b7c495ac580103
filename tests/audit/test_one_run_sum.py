# SPDX-License-Identifier: Apache-2.0
"""The homework: a noisy sum is audited in one run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedsim.audit.one_run_sum import (
    QUESTIONS,
    Setting,
    bartlett_factor,
    bound,
    classic_sigma,
    correct_guesses,
    play,
    play_questions,
    signal_and_noise,
    summarise,
)
from fedsim.errors import AuditError

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference" / "audit.json"


def test_the_bound_is_the_homeworks_equation() -> None:
    right = np.array([2, 3, 6, 8])
    for found, v, r in zip(bound(right, 0.05), right, (2, 4, 6, 8), strict=True):
        chance = 1 / (1 + np.exp(-found))
        assert found == 0 or stats.binom.sf(v - 1, r, chance) == pytest.approx(0.05)
    assert bound(np.array([0, 1]), 0.05).tolist() == [0, 0]
    # 100 of 100 right: 0.05^(1/100) (audit.json, section c: 3.493)
    assert bound(np.array([100]), 0.05, np.array([100]))[0] == pytest.approx(3.493, abs=1e-3)


def test_guesses_are_the_extremes_of_the_scores() -> None:
    scores = np.array([0.1, 5.0, -3.0, 2.0, -1.0, 0.0])
    included = np.array([True, True, False, False, True, False])
    assert correct_guesses(scores, included).tolist() == [2, 2, 4]


def test_the_bartlett_factor_has_the_inner_products_of_points_on_a_sphere() -> None:
    rng = np.random.default_rng(0)
    factor = bartlett_factor(50, 60, rng)
    assert np.linalg.norm(factor, axis=1) == pytest.approx(np.ones(50), abs=1e-5)
    found = np.concatenate([_products(bartlett_factor(40, 60, rng)) for _ in range(20)])
    plain = [rng.standard_normal((40, 60)) for _ in range(20)]
    drawn = np.concatenate([_products(x / np.linalg.norm(x, axis=1, keepdims=True)) for x in plain])
    assert stats.ks_2samp(found, drawn).pvalue > 1e-3


def _products(rows: np.ndarray) -> np.ndarray:
    return (rows @ rows.T)[np.triu_indices(len(rows), 1)]


def test_blocks_and_factors_give_scores_of_the_same_law(monkeypatch: pytest.MonkeyPatch) -> None:
    included = np.arange(300) % 2 == 0
    whole = [signal_and_noise(included, 200, seed) for seed in range(6)]
    monkeypatch.setattr("fedsim.audit.one_run_sum._KEPT", 0)
    monkeypatch.setattr("fedsim.audit.one_run_sum._BLOCK", 64)
    blocks = [signal_and_noise(included, 200, seed) for seed in range(6)]
    for part in (0, 1):
        first = np.concatenate([scores[part] for scores in whole])
        second = np.concatenate([scores[part] for scores in blocks])
        assert stats.ks_2samp(first, second).pvalue > 1e-3
    present = np.concatenate([signal[included] for signal, _ in blocks])
    assert present.mean() == pytest.approx(1.0, abs=0.1)


@pytest.mark.skipif(not REFERENCE.is_file(), reason="the reference values are not here")
def test_all_answers_agree_with_the_reference() -> None:
    settings = [s for q in QUESTIONS for s in QUESTIONS[q] if s.canaries <= 1024]
    rows = summarise([outcome for s in settings for seed in range(6) for outcome in play(s, seed=seed)])
    reference = json.loads(REFERENCE.read_text())["g_homework_q2"]
    assert len(rows) == 13
    for row in rows:
        expected = reference[row["question"]]["results"][str(int(row["value"]))]
        for ours, theirs in (("asked", "hw"), ("corrected", "bonf"), ("registered", "fixed_k=m/10")):
            spread = max(expected[theirs]["sd"], 0.05)
            assert abs(row[ours] - expected[theirs]["mean"]) < 1.5 * spread, (row, ours)
        sigma = reference["sigmas"][str(int(row["epsilon"]))]
        assert classic_sigma(row["epsilon"], 1e-6) == pytest.approx(sigma["classic_sigma"])
        assert row["true_epsilon"] == pytest.approx(sigma["true_eps_at_delta"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not REFERENCE.is_file(), reason="the reference values are not here")
def test_many_canaries_agree_with_the_reference() -> None:
    rows = summarise(play_questions(["Q2.2"]))
    reference = json.loads(REFERENCE.read_text())["g_homework_q2"]["Q2.2"]["results"]
    for row in rows:
        expected = reference[str(row["value"])]
        assert abs(row["asked"] - expected["hw"]["mean"]) < 1.5 * expected["hw"]["sd"]
        assert abs(row["registered"] - expected["fixed_k=m/10"]["mean"]) < 2.5 * expected["fixed_k=m/10"]["sd"]


def test_the_number_that_is_valid_is_below_the_truth_where_the_asked_one_is_not() -> None:
    outcomes = [play(Setting("Q2.1", (1.0,), 400, 400), seed=seed)[0] for seed in range(40)]
    assert sum(outcome.valid > outcome.true_epsilon for outcome in outcomes) <= 4
    assert all(outcome.valid <= outcome.registered + 1e-9 for outcome in outcomes)
    assert all(outcome.corrected <= outcome.asked for outcome in outcomes)


def test_the_order_of_work_changes_nothing() -> None:
    first = play_questions(["Q2.3"], repeats=1, seed=3)
    assert [o.to_dict() for o in first] == [o.to_dict() for s in QUESTIONS["Q2.3"] for o in play(s, seed=3)]
    with pytest.raises(AuditError, match="repeats is 0"):
        play_questions(["Q2.1"], repeats=0)
