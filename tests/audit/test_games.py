# SPDX-License-Identifier: Apache-2.0
"""The games of Salem et al. 2023: as data, as relations, and played."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedsim.audit.games import GAMES, bounded_by, game_named, is_bounded_by_dp, relations
from fedsim.audit.playing.arena import Arena
from fedsim.audit.playing.language import write_on
from fedsim.audit.playing.players import LOOKS_AT, PLAYERS
from fedsim.audit.playing.trials import Trials, judge_trials, play, play_and_judge
from fedsim.audit.verdict import Claim
from fedsim.errors import AuditError
from fedsim.scenario import GameName, Scenario

BASE: dict[str, Any] = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [32]},
    "partition": {"kind": "iid", "examples_per_client": 40},
    "client": {"batch_size": 20, "learning_rate": 0.3, "epochs": 6},
    "cohort": {"population": 3},
    "rounds": 5,
    "seed": 1,
}


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena.of(Scenario.model_validate(BASE), 0)


@pytest.fixture(scope="module")
def private_arena() -> Arena:
    defence = {"example_dp": {"noise_multiplier": 4.0}}
    return Arena.of(Scenario.model_validate({**BASE, "rounds": 2, "defence": defence}), 0)


# --- as data --------------------------------------------------------------------------------------------------------


def test_all_eighteen_are_there_and_playable() -> None:
    names = set(get_args(GameName))
    assert len(names) == 18
    assert set(GAMES) == names
    assert set(PLAYERS) == names
    with pytest.raises(AuditError, match="chess"):
        game_named("chess")


def test_the_parts_are_those_of_the_table() -> None:
    assert GAMES["MI"].sees == "white box"
    assert GAMES["MI-BB"].sees == "black box"
    assert GAMES["MI-Adv"].challenge == "adversary"
    assert GAMES["MI-Pois"].data == ("random", "adversary")
    assert GAMES["RC"].data == ("parameter",)
    assert GAMES["PI"].stakes == ("distribution",)
    assert GAMES["DPD"].data == ("adversary",)
    assert "Game 5" in GAMES["AI"].source
    assert GAMES["AI"].about.startswith("AI: ")


def test_differential_privacy_bounds_what_it_bounds() -> None:
    for name in ("MI", "MI-BB", "MI-Adv", "MI-Diff", "MI-Pois", "MI-SQ", "AI", "Inv", "RC", "RC-Targ", "SMI", "DPD"):
        assert is_bounded_by_dp(name), name  # type: ignore[arg-type]
    for name in ("PI", "MI-Subj", "MI-User", "MM", "RC-Untarg"):
        assert not is_bounded_by_dp(name), name  # type: ignore[arg-type]
    assert bounded_by("AI", "MI") == 1.0
    assert bounded_by("MI", "AI") is None
    separated = {(r.of, r.by) for r in relations() if not r.holds}
    assert ("PI", "DPD") in separated
    assert not separated & {(r.of, r.by) for r in relations() if r.holds}


# --- judged ---------------------------------------------------------------------------------------------------------


def _trials(truth: np.ndarray, score: np.ndarray) -> Trials:
    return Trials(GAMES["DPD"], truth, score, "add/remove")


def test_a_gaussian_channel_is_judged_as_what_it_is() -> None:
    rng = np.random.default_rng(0)
    truth = rng.random(4000) < 0.5
    finding = judge_trials(_trials(truth, truth + rng.standard_normal(4000)), Claim(4.377, 1e-5))
    assert finding.verdict is not None
    assert finding.verdict.status != "violated"
    assert finding.numbers["advantage"] < finding.numbers["allowed_advantage"]
    broken = judge_trials(_trials(truth, truth + rng.standard_normal(4000)), Claim(0.2, 1e-5))
    assert broken.verdict is not None
    assert broken.verdict.status == "violated"
    assert "δ = 1e-05" in broken.sentence


def test_noise_is_a_violation_as_seldom_as_promised() -> None:
    rng = np.random.default_rng(1)
    for scores in (lambda: rng.standard_normal(300), lambda: np.zeros(300)):
        made = [judge_trials(_trials(rng.random(300) < 0.5, scores()), Claim(0.0, 1e-9)).verdict for _ in range(100)]
        assert sum(verdict is not None and verdict.status == "violated" for verdict in made) <= 10


def test_a_claim_is_converted_to_the_two_worlds_of_the_game() -> None:
    rng = np.random.default_rng(2)
    truth = rng.random(400) < 0.5
    trials = Trials(GAMES["MI"], truth, rng.standard_normal(400), "replace")
    finding = judge_trials(trials, Claim(1.0, 1e-6))
    assert finding.verdict is not None
    assert finding.verdict.claim == Claim(2.0, 1e-6 * (1 + np.e), adjacency="replace")
    assert judge_trials(trials, Claim(30.0, 1e-5)).verdict is None
    same = judge_trials(_trials(truth, truth * 1.0), Claim(1.0, 1e-6, adjacency="replace"))
    assert same.verdict is not None
    assert same.verdict.claim.adjacency == "replace"


# --- played ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "least"),
    [("MI", 0.65), ("MI-Diff", 0.6), ("MI-Pois", 0.6), ("MI-SQ", 0.9), ("MI-Adv", 0.95), ("SMI", 0.95), ("AI", 0.53),
     ("Inv", 0.55), ("RC", 0.55), ("PI", 0.6), ("MI-User", 0.8), ("MI-Subj", 0.75), ("MM", 0.8)],
)  # fmt: skip
def test_without_a_defence_the_adversary_wins(arena: Arena, name: str, least: float) -> None:
    trials = play(name, arena, 120)
    finding = judge_trials(trials, arena.claim)
    assert len(trials.truth) == len(trials.score) == 120
    assert finding.numbers["auc"] > least
    assert finding.verdict is None


@pytest.fixture(scope="module")
def text_arena() -> Arena:
    settings = {
        "data": {"source": "descriptions", "tokens": "words", "length": 12},
        "model": {"name": "transformer", "dim": 16},
        "partition": {"kind": "iid", "examples_per_client": 6},
        "client": {"batch_size": 6, "optimizer": "adam", "learning_rate": 0.02, "epochs": 20},
        "cohort": {"population": 3},
        "rounds": 2,
    }
    return Arena.of(Scenario.model_validate(settings), 0)


@pytest.mark.parametrize(("name", "least"), [("RC-Targ", 0.7), ("RC-Untarg", 0.2)])
def test_a_language_model_that_knows_its_rows_tells_them(text_arena: Arena, name: str, least: float) -> None:
    trials = play(name, text_arena, 20)
    assert trials.score[trials.truth].mean() > least
    assert trials.score[~trials.truth].mean() < 0.1  # nobody guesses a row that was not trained on
    with pytest.raises(AuditError, match="played with images and tables"):
        play("MI", text_arena)


def test_a_game_that_does_not_fit_the_data_is_refused_before_anything_runs() -> None:
    for data, game in (("digits", "RC-Targ"), ("descriptions", "MI")):
        audit = [{"kind": "game", "game": game}]
        with pytest.raises(ValidationError, match=f"{game} does not fit data {data}"):
            Scenario.model_validate({"data": data, "model": "transformer", "audit": audit})


def test_what_is_not_written_yet_cannot_be_seen(text_arena: Arena) -> None:
    row = text_arena.x[:1]
    told = write_on(text_arena, text_arena.start, row[:, :6], 9)
    other = torch.cat([row[:, :6], (row[:, 6:] + 1) % text_arena.classes], 1)
    assert torch.equal(told, write_on(text_arena, text_arena.start, other[:, :6], 9))
    assert torch.equal(told[:, :6], row[:, :6])


def test_subjects_are_those_that_the_data_names(arena: Arena) -> None:
    """Each class as one person: who has a class of its own is told by other rows of it."""
    named = replace(arena, groups=arena.y[:1500].numpy())
    assert judge_trials(play("MI-Subj", named, 80), None).numbers["auc"] > 0.6
    assert "natural clients" in play("MM", named, 20).notes[-1]
    alone = replace(arena, groups=np.arange(1500))
    with pytest.raises(AuditError, match="a subject with 8 rows, and the largest has 1"):
        play("MI-Subj", alone, 20)


def test_worst_case_data_shows_more_than_random_data_and_both_stay_within_the_claim(private_arena: Arena) -> None:
    random, worst = play("MI", private_arena, 200), play("DPD", private_arena, 200)
    claim = private_arena.claim
    assert claim is not None
    judged = judge_trials(random, claim), judge_trials(worst, claim)
    assert judged[0].numbers["auc"] < judged[1].numbers["auc"]
    assert all(one.verdict is None or one.verdict.status != "violated" for one in judged)
    # every step is seen: the scores have the law of the log-likelihood ratio, so that E[e^L | out] = 1
    assert np.exp(worst.score[~worst.truth]).mean() == pytest.approx(1.0, abs=0.5)


def test_a_white_box_is_not_the_black_box_and_sees_more(arena: Arena) -> None:
    """Where no noise hides a row's gradient in the weights; under the old code both games had the same scores."""
    gained, areas = [], []
    for seed in (11, 12, 13):
        for model in ("logistic", {"name": "mlp", "hidden": [24]}):
            scenario = Scenario.model_validate({**BASE, "model": model, "rounds": 2})
            held_out = Arena.of(scenario, seed)
            white, black = (judge_trials(play(name, held_out, 300, seed), None).numbers for name in ("MI", "MI-BB"))
            gained.append(white["auc"] - black["auc"])
            areas.append(white["auc"])
            assert white["looks_at"] != black["looks_at"]
    assert min(areas) > 0.6
    assert np.mean(gained) > 0.01
    assert min(gained) > -0.05


@given(st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=8, deadline=None)
def test_the_adversary_that_sees_all_has_the_claimed_sampling_rate(rows: int, batch: int) -> None:
    """It was rounded down to one over a whole number, which made the stronger adversary weaker than the claim."""
    defence = {"example_dp": {"noise_multiplier": 1.0}}
    client = {"batch_size": batch, "steps": 3}
    changes = {"partition": {"kind": "iid", "examples_per_client": rows}, "client": client, "rounds": 1}
    held_out = Arena.of(Scenario.model_validate({**BASE, **changes, "defence": defence}), 3)
    assert held_out.claim is not None
    trials = play("DPD", held_out, 400, 3)
    rate = held_out.claim.sample_rate
    assert f"sampling rate {Fraction(rate).limit_denominator(1000)}" in trials.notes[0]
    total = trials.weaker["MI-Adv"] / held_out.work.rate(0)
    gap = total[trials.truth].mean() - total[~trials.truth].mean()
    assert gap == pytest.approx(3 * rate, abs=5 * math.sqrt(3 * (1 + rate) * 4 / 400))
    assert np.exp(trials.score[~trials.truth]).mean() == pytest.approx(1.0, abs=1.5)


@pytest.mark.parametrize("seed", range(4))
def test_on_the_same_trials_who_sees_more_tells_more(private_arena: Arena, seed: int) -> None:
    """DPD sees every step, MI-Adv their sum; what 400 trials prove about ε still varies by ±0.4 from draw to draw."""
    trials = play("DPD", replace(private_arena, seed=100 + seed), 1500)
    numbers = judge_trials(trials, private_arena.claim).numbers
    assert numbers["auc"] > numbers["weaker"]["MI-Adv"]["value"] - 0.01


def test_the_stronger_adversary_may_use_the_weaker_ones_score() -> None:
    """Where the log-likelihood ratio is useless, because the mechanism is not the claimed one, the sum still proves."""
    rng = np.random.default_rng(4)
    truth = rng.random(2000) < 0.5
    useless, sharp = rng.standard_normal(2000), truth + 0.1 * rng.standard_normal(2000)
    alone = judge_trials(Trials(GAMES["DPD"], truth, useless, "add/remove"), Claim(1.0, 1e-5)).verdict
    both = Trials(GAMES["DPD"], truth, useless, "add/remove", weaker={"MI-Adv": sharp})
    verdict = judge_trials(both, Claim(1.0, 1e-5)).verdict
    assert alone is not None
    assert alone.status != "violated"
    assert verdict is not None
    assert verdict.status == "violated"


def test_a_game_says_what_it_plays_and_what_its_adversary_looks_at(arena: Arena) -> None:
    finding = judge_trials(play("PI", arena, 20), arena.claim)
    assert "the training of one client by itself (40 rows, 60 steps), not the federation" in finding.sentence
    assert finding.numbers["scope"] in finding.sentence
    assert "outputs only, though the game shows the weights" in finding.numbers["looks_at"]
    assert set(LOOKS_AT) == set(PLAYERS)


def test_the_same_seed_plays_the_same_game(private_arena: Arena) -> None:
    first, second = play("MI-Adv", private_arena, 20), play("MI-Adv", private_arena, 20)
    assert (first.score == second.score).all()


def test_what_cannot_be_played_says_what_to_do(arena: Arena) -> None:
    with pytest.raises(AuditError, match="played with text, which this data is not"):
        play("RC-Targ", arena)
    with pytest.raises(AuditError, match=r"set defence\.example_dp"):
        play("DPD", arena, 20)
    with pytest.raises(AuditError, match="at least 20 times"):
        play("MI", arena, 3)
    everything = Scenario.model_validate({**BASE, "partition": "iid", "cohort": {"population": 1}, "data": {
        "source": "digits", "test_fraction": 0.005}})  # fmt: skip
    with pytest.raises(AuditError, match="examples_per_client to fewer"):
        play_and_judge("MI", everything, 20, 0)


def test_a_game_is_as_long_as_the_claim_covers() -> None:
    """A client of ten takes part in some of the rounds, and its examples are claimed to be safe in those only."""
    scenario = Scenario.model_validate(
        {
            "data": "digits",
            "model": "logistic",
            "strategy": "fedsgd",
            "client": {"batch_size": 20},
            "cohort": {"population": 10, "size": 1},
            "rounds": 30,
            "defence": {"example_dp": {"clipping_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}},
        }
    )
    found = Arena.of(scenario, 0)
    assert found.claim is not None
    assert found.work.steps == found.claim.compositions < 30
