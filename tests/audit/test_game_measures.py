# SPDX-License-Identifier: Apache-2.0
"""What games print: AUC, TPR at an FPR and advantage have intervals that hold, and no number flatters the defence."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

from fedsim.audit.games import GAMES
from fedsim.audit.playing.measures import ALARM_RATES, advantage, auc, rates_at, trials_to_resolve, widest_threshold
from fedsim.audit.playing.trials import Trials, judge_trials
from fedsim.audit.verdict import Claim

Draw = Callable[[np.random.Generator, np.ndarray], np.ndarray]
MISSED = 24  # of 240 at 95%: more has probability 0.001 if the intervals just hold


def gaussian(shift: float) -> Draw:
    return lambda rng, truth: rng.standard_normal(len(truth)) + shift * truth


def coarse(shift: float) -> Draw:
    """Scores with many ties."""
    return lambda rng, truth: np.round(gaussian(shift)(rng, truth))


def rare(rng: np.random.Generator, truth: np.ndarray) -> np.ndarray:
    """A tenth of the records is recognised for sure, the others not at all: a step, the worst case for an AUC."""
    return np.where(truth & (rng.random(len(truth)) < 0.1), 1.0, 0.0) + 1e-9 * rng.random(len(truth))


def law(draw: Draw, count: int = 200_000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(99)
    return draw(rng, np.ones(count, bool)), draw(rng, np.zeros(count, bool))


def true_auc(ins: np.ndarray, outs: np.ndarray) -> float:
    outs = np.sort(outs)
    below, up_to = np.searchsorted(outs, ins, "left"), np.searchsorted(outs, ins, "right")
    return float((below + up_to).mean() / (2 * len(outs)))


LAWS = [gaussian(0.0), gaussian(0.41), gaussian(3.0), coarse(1.0), rare]


@pytest.mark.parametrize("draw", LAWS)
@pytest.mark.parametrize(("trials", "coin"), [(40, 0.5), (300, 0.1)])
def test_intervals_hold(draw: Draw, trials: int, coin: float) -> None:
    ins, outs = law(draw)
    area, rng = true_auc(ins, outs), np.random.default_rng(7)
    missed = {"auc": 0, "advantage": 0, "hits": 0, "alarms": 0}
    for _ in range(240):
        truth = rng.random(trials) < coin
        score = draw(rng, truth)
        found, half = auc(score, truth, 0.95), trials // 2
        missed["auc"] += not found.low <= area <= found.high
        threshold = widest_threshold(score[:half], truth[:half])
        gained = advantage(score[half:] >= threshold, truth[half:], 0.95, coin)
        real = (ins >= threshold).mean() - (outs >= threshold).mean()
        missed["advantage"] += not gained.low - 3e-3 <= real <= gained.high + 3e-3
        alarms = np.sort(score[:half][~truth[:half]])[::-1]
        for one in rates_at(score, truth, 0.95, coin)[-1:]:
            if one.hits is not None and one.alarms is not None:
                least = alarms[math.floor(one.at * (len(alarms) + 1) + 1e-9) - 1]
                missed["hits"] += not one.hits.low - 3e-3 <= (ins > least).mean() <= one.hits.high + 3e-3
                missed["alarms"] += not one.alarms.low - 3e-3 <= (outs > least).mean() <= one.alarms.high + 3e-3
    assert max(missed.values()) <= MISSED, missed


@pytest.mark.parametrize("draw", LAWS)
def test_a_false_positive_rate_is_kept_on_average(draw: Draw) -> None:
    outs, rng = law(draw)[1], np.random.default_rng(8)
    for at, trials in ((0.1, 60), (0.01, 500)):
        kept = []
        for _ in range(200):
            truth = rng.random(trials) < 0.5
            half = trials // 2
            alarms = np.sort(draw(rng, truth)[:half][~truth[:half]])[::-1]
            k = math.floor(at * (len(alarms) + 1) + 1e-9)
            kept.append((outs > alarms[k - 1]).mean() if k else 0.0)
        assert np.mean(kept) <= at * 1.25


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 60), st.floats(0.05, 0.95), st.integers(1, 5))
def test_every_interval_holds_its_number(seed: int, trials: int, coin: float, values: int) -> None:
    rng = np.random.default_rng(seed)
    truth, score = rng.random(trials) < coin, rng.integers(0, values, trials).astype(float)
    found = [auc(score, truth, 0.95), advantage(score > 1, truth, 0.95), advantage(score > 1, truth, 0.95, coin)]
    for one in rates_at(score, truth, 0.95):
        found += [end for end in (one.hits, one.alarms) if end is not None]
    for one in found:
        assert one.low <= one.value <= one.high
        assert one.low >= -1
        assert one.high <= 1


def test_the_auc_is_that_of_all_pairs() -> None:
    rng = np.random.default_rng(3)
    truth, score = rng.random(60) < 0.4, rng.integers(0, 6, 60).astype(float)
    pairs = score[truth][:, None] - score[~truth][None]
    assert auc(score, truth, 0.95).value == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    perfect = auc(truth.astype(float), truth, 0.95)
    least = min(truth.sum(), (~truth).sum())
    assert (perfect.value, perfect.high) == (1.0, 1.0)
    assert perfect.low == pytest.approx(0.025 ** (1 / least))  # nothing wrong in so many pairs: Chernoff's is exact


def test_the_advantage_is_that_of_the_best_threshold_and_not_of_the_one_that_proves_most() -> None:
    """An AUC of 0.614 goes with an advantage of 0.16; at the threshold that proves most it was printed as 0.009."""
    shift = math.sqrt(2) * float(ndtri(0.614))
    best = 2 * float(ndtr(shift / 2)) - 1
    rng, printed = np.random.default_rng(4), []
    for _ in range(60):
        truth = rng.random(500) < 0.5
        played = Trials(GAMES["MI"], truth, gaussian(shift)(rng, truth), "replace")
        numbers = judge_trials(played, Claim(8.0, 1e-5)).numbers
        printed.append(numbers["advantage"])
        low, high = numbers["advantage_interval"]
        assert low <= numbers["advantage"] <= high
    assert best - 0.05 < np.mean(printed) < best + 0.02


def test_a_rate_that_so_few_trials_cannot_resolve_is_said_to_be_so() -> None:
    rng = np.random.default_rng(5)
    truth = rng.random(500) < 0.5
    finest, middle, coarsest = rates_at(gaussian(1.0)(rng, truth), truth, 0.95)
    assert (finest.at, middle.at, coarsest.at) == ALARM_RATES
    assert finest.hits is None
    assert f"about {trials_to_resolve(0.001):,} can" in finest.sentence()
    assert middle.hits is not None
    assert "where the FPR came to" in coarsest.sentence()
    for at, coin in ((0.001, 0.5), (0.01, 0.5), (0.01, 0.1)):
        resolved, needed = 0, trials_to_resolve(at, coin)
        for _ in range(40):
            truth = rng.random(needed) < coin
            score = rng.standard_normal(needed)
            resolved += next(one for one in rates_at(score, truth, 0.95, coin) if one.at == at).hits is not None
        assert resolved >= 34


def test_a_guess_that_is_right_or_wrong_has_one_threshold_only() -> None:
    truth = np.arange(100) % 2 == 0
    numbers = judge_trials(
        Trials(GAMES["AI"], truth, (truth & (np.arange(100) % 3 == 0)) * 1.0, "replace"), None
    ).numbers
    assert numbers["rates"] == []
    assert numbers["advantage"] > 0.2


def test_the_skewed_game_is_bounded_and_its_rates_do_not_depend_on_the_coin() -> None:
    rng, found = np.random.default_rng(6), []
    for name, coin in (("MI", 0.5), ("MI-skew", GAMES["MI-skew"].coin)):
        truth = rng.random(20_000) < coin
        numbers = judge_trials(Trials(GAMES[name], truth, gaussian(1.0)(rng, truth), "replace"), Claim(1.0)).numbers  # type: ignore[index]
        found.append(numbers["advantage"])
        assert numbers["allowed_advantage"] < 1
    assert found[0] == pytest.approx(found[1], abs=0.05)
