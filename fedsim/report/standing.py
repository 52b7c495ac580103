# SPDX-License-Identifier: Apache-2.0
"""What a claim, an audit or an attack on the page may look like: one function from typed facts to a colour.

| colour | when                                                                                              |
|--------|---------------------------------------------------------------------------------------------------|
| red    | an audit found the claim violated, or an attack or a game shows what was to be hidden              |
| green  | the claim allows little, an audit with power found it consistent, and no attack or game leaked     |
| grey   | nobody tested it                                                                                  |
| amber  | everything else: inconclusive, no claim, a claim that allows much, a small leak                    |

A claim allows little if an optimal attacker, who sees all that the claim covers, guesses at most three times of four
whether somebody took part (membership advantage at most 1/2: ε at most about 1.1), and recognises at most one in a
hundred participants where it accuses one in a thousand others. The latter bounds δ, which the former hardly notices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from fedsim.audit.limits.membership import membership_advantage, tpr_at_fpr
from fedsim.audit.verdict import POWER, Status
from fedsim.privacy.rounding import rounded_up
from fedsim.report.audit_files import Audit
from fedsim.report.blocks import Tone

MOST_ADVANTAGE = 0.5
"""Membership advantage, TPR − FPR, that still counts as little."""
LOW_FPR, MOST_TPR = 0.001, 0.01
MOST_FACTOR = 2.0
"""An audit has power if it would have caught a mechanism of this times the claimed ε."""

MUCH_AUC = 0.6
"""From here on a game that beats a coin beyond doubt counts as a leak of much."""

Allows = Literal["little", "much", "anything"]
Tested = Literal["untested", "inconclusive", "consistent", "violated"]
Leak = Literal["unknown", "nothing", "little", "much"]
LEAKS: tuple[Leak, ...] = get_args(Leak)


class Spent(Protocol):
    """What is needed of a claim, or of what was spent of it so far."""

    @property
    def epsilon(self) -> float:
        """ε."""

    @property
    def delta(self) -> float:
        """δ."""

    @property
    def unit(self) -> str:
        """Who is protected."""


@dataclass(frozen=True)
class Standing:
    """What is known of something on the page. `allows` None: it is about no claim."""

    allows: Allows | None = None
    tested: Tested = "untested"
    leak: Leak = "unknown"


def tone(standing: Standing) -> Tone:
    """The colour; the only place that decides it."""
    if standing.tested == "violated" or standing.leak == "much":
        return "red"
    if standing.allows in ("much", "anything") or standing.tested == "inconclusive" or standing.leak == "little":
        return "amber"
    return "green" if standing.allows == "little" and standing.tested == "consistent" else "grey"


def allowed_by(claim: Spent) -> Allows:
    """How much a claim lets an optimal attacker achieve, by the limits above."""
    if math.isinf(claim.epsilon):
        return "anything"
    advantage = membership_advantage(claim.epsilon, claim.delta)
    recognised = tpr_at_fpr(claim.epsilon, claim.delta, LOW_FPR)
    return "little" if advantage <= MOST_ADVANTAGE and recognised <= MOST_TPR else "much"


def allowance(claim: Spent) -> str:
    """The same in a sentence, for people, rounded up."""
    right = (1 + membership_advantage(claim.epsilon, claim.delta)) / 2
    recognised = tpr_at_fpr(claim.epsilon, claim.delta, 0.01)
    much = "little" if allowed_by(claim) == "little" else "much"
    return (
        f"This allows {much}: the best possible attacker may be right about whether {an(claim.unit)} took part in up to"
        f" {rounded_up(min(100.0, 100 * right), 1)}% of fair guesses (50% is a coin), and may recognise up to"
        f" {rounded_up(min(100.0, 100 * recognised), 1)}% at 1% false alarms"
    )


def tested_in_words(standing: Standing) -> str:
    """Why a claim has its colour, so that nothing rests on colour alone."""
    tested = {
        "untested": "No audit has tested it.",
        "inconclusive": "What audits there are of it cannot tell whether it holds.",
        "consistent": "An audit with power found it consistent.",
        "violated": "An audit found it violated.",
    }[standing.tested]
    return tested + (" An attack or a game on this run shows what it is to hide." if standing.leak == "much" else "")


def an(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[:1] in 'aeiou' else 'a'} {noun}"


def tested_by(audits: Iterable[Audit], claim: Spent) -> Tested:
    """What audits found of this very claim. One of the same unit that is violated speaks against every such claim.

    A game or an audit of a transcript that finds nothing has no power: its adversary is an ordinary one.
    """
    verdicts = [(audit, audit.verdict) for audit in audits if audit.verdict is not None]
    of_unit = [(audit, verdict) for audit, verdict in verdicts if verdict.claim.unit == claim.unit]
    if any(verdict.status == "violated" for _, verdict in of_unit):
        return "violated"
    mine = {outcome(audit) for audit, verdict in of_unit if _same(verdict.claim, claim)}
    return "consistent" if "consistent" in mine else "inconclusive" if mine else "untested"


def outcome(audit: Audit) -> Status:
    """The verdict of an audit, where `consistent` is kept for one that had power against the worst case."""
    verdict = audit.verdict
    if verdict is None:
        return "inconclusive"
    powerful = verdict.power >= POWER and verdict.factor <= MOST_FACTOR and worst_case(audit)
    return "inconclusive" if verdict.status == "consistent" and not powerful else verdict.status


def worst_case(audit: Audit) -> bool:
    """Whether the auditor picked the data and the challenge, as the adversary of differential privacy may."""
    if audit.numbers.game is not None:
        return audit.numbers.game.name == "DPD"
    return audit.kind in ("example-canaries", "client-canaries", "mechanism")


def leak_of_game(audit: Audit) -> Leak:
    """What a game shows, whatever was claimed: how far its AUC is from that of a coin.

    Without an interval of its own it has that of any distribution of scores: Var(AUC) ≤ AUC (1 − AUC) / min(worlds).
    """
    low, _ = auc_interval(audit)
    auc = audit.numbers.auc
    if auc is None:
        return "unknown"
    if low <= 0.5:
        return "nothing"
    return "much" if auc >= MUCH_AUC else "little"


def leak_of_games(audits: Iterable[Audit]) -> Leak:
    """The most that games show which a claim speaks about; other games leak what no claim here hides."""
    played = (leak_of_game(audit) for audit in audits if audit.numbers.game is not None and audit.verdict is not None)
    return max(played, key=LEAKS.index, default="unknown")


def auc_interval(audit: Audit) -> tuple[float, float]:
    """The interval of a game's AUC: its own, else (of an earlier version's file) a wide one; (0, 1) without trials."""
    numbers = audit.numbers
    if numbers.auc is not None and numbers.auc_interval is not None:
        return numbers.auc_interval
    outs = numbers.trials - numbers.ins
    if numbers.auc is None or min(numbers.ins, outs) < 1:
        return 0.0, 1.0
    # At an AUC of 0 or 1 the variance would be 0: as if one trial more had gone the other way.
    fewest = min(numbers.ins, outs)
    auc = min(max(numbers.auc, 0.5 / fewest), 1 - 0.5 / fewest)
    half = 1.96 * math.sqrt(auc * (1 - auc) / fewest)
    return max(0.0, auc - half), min(1.0, auc + half)


def _same(audited: Spent, claim: Spent) -> bool:
    return math.isclose(audited.epsilon, claim.epsilon, rel_tol=1e-6) and math.isclose(audited.delta, claim.delta)
