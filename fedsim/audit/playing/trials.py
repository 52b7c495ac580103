# SPDX-License-Identifier: Apache-2.0
"""Games are played: trials (truth, score) of an adversary, and what they say about the claim.

A trial has a coin (`truth`) and a number (`score`) that is large where the adversary believes in heads. Where something
is to be guessed (an attribute, a row), the score is 1 if the guess is right: so the advantage is how much more often it
is right than in a world in which the row took no part, which no prior can fake.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.audit.blackbox.distinguishing import epsilon_distinguishing, p_value, power
from fedsim.audit.estimation.rates import tally, trade_off
from fedsim.audit.games import Game, bounded_by, game_named, is_bounded_by_dp
from fedsim.audit.limits.claims import for_adjacency
from fedsim.audit.limits.membership import membership_advantage, tpr_at_fpr
from fedsim.audit.playing.arena import Arena, Numbers
from fedsim.audit.verdict import Claim, Verdict, decide
from fedsim.errors import AuditError
from fedsim.privacy.claim import Adjacency
from fedsim.scenario import LANGUAGE_GAMES, Scenario

Bits = NDArray[np.bool_]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Trials:
    """What came of playing a game."""

    game: Game
    truth: Bits
    score: Numbers
    adjacency: Adjacency
    """How the two worlds of a trial differ: in a row that is there or silent, or in one row or another."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class GameFinding:
    """How well the adversary did, what the claim allows, and whether the two agree."""

    verdict: Verdict | None
    sentence: str
    numbers: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        verdict = None if self.verdict is None else self.verdict.to_dict()
        return {"verdict": verdict, "sentence": self.sentence, "numbers": self.numbers}


def play(game: Game | str, scenario: Scenario | Arena, trials: int = 400, seed: int = 0) -> Trials:
    """Play a game so many times: all trials, and the shadow models of the adversary, are trained at once."""
    from fedsim.audit.playing.players import PLAYERS

    chosen = game if isinstance(game, Game) else game_named(game)
    if trials < 20:
        raise AuditError(f"trials is {trials}; a game is played at least 20 times")
    arena = scenario if isinstance(scenario, Arena) else Arena.of(scenario, seed)
    if arena.text != (chosen.name in LANGUAGE_GAMES):
        mine, other = ("text", "MI") if chosen.name in LANGUAGE_GAMES else ("images and tables", "RC-Targ")
        raise AuditError(f"game {chosen.name} is played with {mine}, which this data is not; play {other}")
    truth, score, adjacency, notes = PLAYERS[chosen.name](arena, trials)
    return Trials(chosen, truth, score, adjacency, notes)


def play_and_judge(
    name: str, scenario: Scenario, trials: int, seed: int, confidence: float = 0.95, progress: Progress | None = None
) -> GameFinding:
    """Play a game on a scenario, and hold what came of it against the claim."""
    if progress is not None:
        progress(0, trials)
    arena = Arena.of(scenario, seed)
    finding = judge_trials(play(name, arena, trials, seed), arena.claim, confidence)
    if progress is not None:
        progress(trials, trials)
    return finding


def judge_trials(trials: Trials, claim: Claim | Any | None, confidence: float = 0.95) -> GameFinding:
    """The threshold is chosen on one half of the trials, and the advantage and the bound are taken on the other.

    The claim is converted to the adjacency of the two worlds: (ε, δ) under add/remove is (2ε, (1 + e^ε)δ) under
    replace.
    """
    half = len(trials.truth) // 2
    threshold = _best_threshold(trials.score[:half], trials.truth[:half])
    truth, said = trials.truth[half:], trials.score[half:] >= threshold
    hits, alarms = int((said & truth).sum()), int((said & ~truth).sum())
    ins, outs = int(truth.sum()), int((~truth).sum())
    advantage = hits / max(ins, 1) - alarms / max(outs, 1)
    numbers: dict[str, Any] = {
        "game": dataclasses.asdict(trials.game),
        "trials": len(trials.truth),
        "threshold": float(threshold) if math.isfinite(threshold) else None,
        "true_positive_rate": hits / max(ins, 1),
        "false_positive_rate": alarms / max(outs, 1),
        "advantage": advantage,
        "auc": _auc(trials.score, trials.truth),
        "trade_off": trade_off(trials.score, trials.truth),
        "ins": int(trials.truth.sum()),
        "counts": tally(said, truth, "A threshold was chosen on one half of the trials and tried on the other"),
        "notes": list(trials.notes),
    }
    told = f"{trials.game.asks} Advantage {advantage:.3f} (hits {hits} of {ins}, false alarms {alarms} of {outs})"
    if claim is None or not is_bounded_by_dp(trials.game.name):
        why = "nothing is claimed for examples" if claim is None else "no claim for examples bounds this risk"
        return GameFinding(None, f"{told}; {why}.", numbers)
    # whoever tells one row from another tells one of the two from none: at most twice the advantage
    times = 1.0 if trials.adjacency == claim.adjacency or claim.adjacency == "replace" else 2.0
    times *= bounded_by(trials.game.name, "DPD") or 1.0
    allowed = min(1.0, times * membership_advantage(claim.epsilon, claim.delta))
    numbers["allowed_advantage"] = allowed
    told = f"{told}, where {Claim.of(claim)} allows {allowed:.3f}."
    tested = _converted(claim, trials.adjacency)
    if tested is None:
        return GameFinding(None, f"{told} The claim is too weak to say more about replacing a row.", numbers)
    verdict = _verdict(tested, hits, hits + alarms, len(truth), confidence)
    numbers["allowed_tpr"] = tpr_at_fpr(tested.epsilon, tested.delta, alarms / max(outs, 1))
    if tested.adjacency != claim.adjacency:
        told += " The game replaces an example, so that the claim is converted to that, which weakens it."
    return GameFinding(verdict, f"{told} {verdict.sentence()}", numbers)


def _converted(claim: Any, adjacency: Adjacency) -> Claim | None:
    """The claim under another adjacency; None if nothing is left of it.

    A silent row in place of another is a replacement too, so that a claim for replacing covers both.
    """
    if claim.adjacency in (adjacency, "replace"):
        return Claim.of(claim)
    epsilon, delta = for_adjacency(claim.epsilon, claim.delta, claim.adjacency, adjacency)
    return Claim(epsilon, delta, claim.unit, adjacency) if delta < 1 else None


def _verdict(claim: Claim, correct: int, guesses: int, trials: int, confidence: float) -> Verdict:
    """The exact test on the half that the threshold was not chosen on; coins were fair, so that "in" is a guess."""
    method, error = "game, held-out threshold", 1 - confidence
    return decide(
        claim,
        [epsilon_distinguishing(correct, guesses, trials, claim.delta, confidence, method=method)],
        p_value(correct, guesses, trials, claim.epsilon, claim.delta, error),
        confidence=confidence,
        power=power(2 * claim.epsilon, claim.epsilon, claim.delta, trials, error),
        trials=trials,
        settle="More trials, or canaries (example-canaries), would settle it.",
        evidence=f"{correct} of {guesses} guesses right",
    )


def _best_threshold(score: Numbers, truth: Bits) -> float:
    """Where saying "in" above it proves most, counted with one error more than there was."""
    order = np.argsort(-score, kind="stable")
    hits, alarms = np.cumsum(truth[order]), np.cumsum(~truth[order])
    last = np.append(np.diff(score[order]) != 0, True)  # of equal scores only the last can be a threshold
    said = hits + alarms
    lower = (hits + 0.5) / (said + 1) - 1.0 / np.sqrt(said + 1.0)
    return float(score[order][np.argmax(np.where(last, lower, -np.inf))])


def _auc(score: Numbers, truth: Bits) -> float:
    """P[score of a true trial > of a false one], ties counted half."""
    from scipy.stats import rankdata

    ranks, ins = rankdata(score), int(truth.sum())
    outs = len(truth) - ins
    if not ins or not outs:
        return 0.5
    return float((ranks[truth].sum() - ins * (ins + 1) / 2) / (ins * outs))
