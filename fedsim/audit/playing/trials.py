# SPDX-License-Identifier: Apache-2.0
"""Games are played: trials (truth, score) of an adversary, and what they say about the claim.

A trial has a coin (`truth`) and a number (`score`) that is large where the adversary believes in heads. Where something
is to be guessed (an attribute, a row), the score is 1 if the guess is right: so the advantage is how much more often it
is right than in a world in which the row took no part, which no prior can fake.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.audit.blackbox.distinguishing import epsilon_distinguishing, p_value, power
from fedsim.audit.estimation.rates import tally, trade_off
from fedsim.audit.games import Game, bounded_by, game_named, is_bounded_by_dp
from fedsim.audit.limits.claims import for_adjacency
from fedsim.audit.limits.membership import membership_advantage, tpr_at_fpr
from fedsim.audit.planner import trials_to_catch
from fedsim.audit.playing.arena import Arena, Numbers
from fedsim.audit.playing.measures import advantage, auc, rates_at, widest_threshold
from fedsim.audit.verdict import Claim, Verdict, decide
from fedsim.errors import AuditError
from fedsim.privacy.claim import Adjacency
from fedsim.privacy.rounding import rounded_up
from fedsim.scenario import GameName, Scenario

Bits = NDArray[np.bool_]
Progress = Callable[[int, int], None]
TRIALS = 500
"""How often a game is played by default: enough to resolve a false positive rate of 1%."""


@dataclass(frozen=True, eq=False)
class Trials:
    """What came of playing a game."""

    game: Game
    truth: Bits
    score: Numbers
    adjacency: Adjacency
    """How the two worlds of a trial differ: in a row that is there or silent, or in one row or another."""
    notes: tuple[str, ...] = ()
    weaker: Mapping[GameName, Numbers] = dataclasses.field(default_factory=dict)
    """On the same trials, the scores of adversaries of other games, who see a part of what this one sees."""
    looks_at: str = ""
    """What the adversary made its score of."""
    scope: str = ""
    """What was played, and what of a federation was not."""


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


def play(game: Game | str, scenario: Scenario | Arena, trials: int = TRIALS, seed: int = 0) -> Trials:
    """Play a game so many times: all trials, and the shadow models of the adversary, are trained at once."""
    from fedsim.audit.playing.players import LOOKS_AT, PLAYERS

    chosen = game if isinstance(game, Game) else game_named(game)
    if trials < 20:
        raise AuditError(f"trials is {trials}; a game is played at least 20 times")
    arena = scenario if isinstance(scenario, Arena) else Arena.of(scenario, seed)
    arena.check(chosen.name)
    played = PLAYERS[chosen.name](arena, trials)
    return Trials(chosen, **played._asdict(), looks_at=LOOKS_AT[chosen.name], scope=arena.scope)


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
    """How well the adversary did, by `measures`; and what that proves about the claim, if it bounds this risk.

    What is proved rests on another threshold than the advantage: the one that proves most on the first half of the
    trials, counted on the other. The claim is converted to the adjacency of the two worlds: (ε, δ) under add/remove is
    (2ε, (1 + e^ε)δ) under replace.
    """
    numbers, told = _measured(trials, confidence)
    about = f"{trials.game.asks} {told}"
    if claim is None or not is_bounded_by_dp(trials.game.name):
        why = "nothing is claimed for examples" if claim is None else "no claim for examples bounds this risk"
        return GameFinding(None, f"{about}. {why[0].upper()}{why[1:]}. {trials.scope}".strip(), numbers)
    # whoever tells one row from another tells one of the two from none: at most twice the advantage
    times = 1.0 if trials.adjacency == claim.adjacency or claim.adjacency == "replace" else 2.0
    times *= bounded_by(trials.game.name, "DPD") or 1.0
    allowed = min(1.0, times * membership_advantage(claim.epsilon, claim.delta))
    numbers["allowed_advantage"] = allowed
    about = f"{about}; {Claim.of(claim)} allows an advantage of {rounded_up(allowed)}. {trials.scope}".strip()
    tested = _converted(claim, trials.adjacency)
    if tested is None:
        return GameFinding(None, f"{about} The claim is too weak to say more about replacing a row.", numbers)
    if tested.adjacency != claim.adjacency:
        about += " The game replaces an example, so that the claim is converted to that, which weakens it."
    truth, said = _sure(trials)
    hits, alarms = int((said & truth).sum()), int((said & ~truth).sum())
    numbers["counts_guessed"] = tally(said, truth, "The threshold that proved most on one half of the trials, tried on"
                                      " the other")  # fmt: skip
    outs = int((~truth).sum())
    numbers["allowed_tpr"] = tpr_at_fpr(tested.epsilon, tested.delta, alarms / max(outs, 1))
    fair = min(len(truth), 2 * min(int(truth.sum()), outs))
    verdict = _verdict(tested, hits, hits + alarms, len(truth), fair, confidence)
    return GameFinding(verdict, f"{about} {verdict.sentence()}", numbers)


def _measured(trials: Trials, confidence: float) -> tuple[dict[str, Any], str]:
    """The numbers of `measures`, and the first of them for people."""
    score, all_truth, coin = trials.score, trials.truth, trials.game.coin
    half = len(all_truth) // 2
    threshold = widest_threshold(score[:half], all_truth[:half])
    truth, said = all_truth[half:], score[half:] >= threshold
    whole, gained = auc(score, all_truth, confidence), advantage(said, truth, confidence, coin)
    guesses_only = len(np.unique(score)) <= 2
    counts = tally(said, truth, "The threshold of the largest advantage on one half of the trials, tried on the other")
    numbers: dict[str, Any] = {
        "game": dataclasses.asdict(trials.game),
        "looks_at": trials.looks_at,
        "scope": trials.scope,
        "trials": len(all_truth),
        "ins": int(all_truth.sum()),
        "confidence": confidence,
        "threshold": float(threshold) if math.isfinite(threshold) else None,
        "true_positive_rate": counts["tp"] / max(1, counts["tp"] + counts["fn"]),
        "false_positive_rate": counts["fp"] / max(1, counts["fp"] + counts["tn"]),
        "advantage": gained.value,
        "advantage_interval": [gained.low, gained.high],
        "auc": whole.value,
        "auc_interval": [whole.low, whole.high],
        "rates": [] if guesses_only else [one.to_dict() for one in rates_at(score, all_truth, confidence, coin)],
        "weaker": {name: auc(other, all_truth, confidence).to_dict() for name, other in trials.weaker.items()},
        "trade_off": trade_off(score, all_truth),
        "counts": counts,
        "notes": list(trials.notes),
    }
    sure = f"{100 * confidence:g}% intervals; {len(all_truth):,} trials"
    return numbers, f"AUC {whole}, advantage {gained} at a threshold chosen on other trials ({sure})"


def _sure(trials: Trials) -> tuple[Bits, Bits]:
    """(truth, said) of the second half, by the score and threshold that prove most on the first.

    A weaker adversary's score may be the one: whoever sees more may use it too.
    """
    half = len(trials.truth) // 2
    first, scores = trials.truth[:half], [trials.score, *trials.weaker.values()]
    proved = [_best_threshold(score[:half], first) for score in scores]
    best = max(range(len(scores)), key=lambda k: proved[k][1])
    return trials.truth[half:], scores[best][half:] >= proved[best][0]


def _converted(claim: Any, adjacency: Adjacency) -> Claim | None:
    """The claim under another adjacency; None if nothing is left of it.

    A silent row in place of another is a replacement too, so that a claim for replacing covers both.
    """
    if claim.adjacency in (adjacency, "replace"):
        return Claim.of(claim)
    epsilon, delta = for_adjacency(claim.epsilon, claim.delta, claim.adjacency, adjacency)
    return Claim(epsilon, delta, claim.unit, adjacency) if delta < 1 else None


def _verdict(claim: Claim, correct: int, guesses: int, trials: int, fair: int, confidence: float) -> Verdict:
    """The exact test on the half that the threshold was not chosen on; only "in" is guessed.

    The coins were fair, or fell on "in" more seldom, which makes right guesses rarer than the test allows for. The
    power is that of `fair` trials: as many of either world.
    """
    method, error = "game, held-out threshold", 1 - confidence
    return decide(
        claim,
        [epsilon_distinguishing(correct, guesses, trials, claim.delta, confidence, method=method)],
        p_value(correct, guesses, trials, claim.epsilon, claim.delta, error),
        confidence=confidence,
        power=power(2 * claim.epsilon, claim.epsilon, claim.delta, fair, error),
        trials=trials,
        settle=_settle(claim, confidence),
        evidence=f"{correct} of {guesses} guesses right",
    )


def trials_to_settle(claim: Claim, confidence: float) -> int | None:
    """Trials of a game half of which would catch twice the claimed ε; None: not with 10^9 of them."""
    needed = trials_to_catch(claim.epsilon, claim.delta, confidence=confidence)
    return None if needed is None else 1000 * math.ceil(2 * needed / 1000)


def _settle(claim: Claim, confidence: float) -> str:
    needed = trials_to_settle(claim, confidence)
    if needed is None:
        return "No number of trials up to a thousand million would settle it."
    return f"About {needed:,} trials of a game as strong as the claim allows would settle it."


def _best_threshold(score: Numbers, truth: Bits) -> tuple[float, float]:
    """Where saying "in" from it on proves most, counted with one error more than there was; and how much that is."""
    order = np.argsort(-score, kind="stable")
    hits, alarms = np.cumsum(truth[order]), np.cumsum(~truth[order])
    last = np.append(np.diff(score[order]) != 0, True)  # of equal scores only the last can be a threshold
    said = hits + alarms
    lower = np.where(last, (hits + 0.5) / (said + 1) - 1.0 / np.sqrt(said + 1.0), -np.inf)
    return float(score[order][np.argmax(lower)]), float(lower.max())
