# SPDX-License-Identifier: Apache-2.0
"""A measured reconstruction beside what a privacy claim allows: "at most X by the claim, measured Y [low, high]"."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedsim.audit.bounds import Kappa, amplified, rero_claim, urero_claim
from fedsim.audit.scores.shares import Share
from fedsim.privacy.claim import PrivacyClaim
from fedsim.privacy.promises import OUTSIDER
from fedsim.privacy.rounding import p_value_text, rounded_up


@dataclass(frozen=True)
class Comparison:
    """One claim, one notion of success.

    Guarantees: if the claim holds, and the examples are drawn like the public rows, each trial succeeds with at most
    the probability `allowed`, whatever the attack. The attack answers with a list, and success means that the list
    holds a right answer, so that blind guessing is granted a list of the same length (κ times its length, at most 1).
    """

    claim: str
    success: str
    kappa: float
    """What blind guessing with as many guesses achieves at most."""
    allowed: float
    rests_on: str
    """The claim's (ε, δ), or the whole privacy profile of its mechanism."""
    measured: Share
    advantage_allowed: float
    """U-ReRo: by how much the success may exceed that of the same answers on independent examples."""
    chance: float
    """The latter, measured on the public rows."""
    updates: int = 1
    """How many updates the trials come from. Examples of one update succeed and fail together."""
    trials: tuple[tuple[int, int, int], ...] = ()
    """(client, right, of) of each update whose client is known; that of a sum of many is not."""
    looks: int = 1
    """How many comparisons are made together, among which the 5% of false alarms are divided (Bonferroni)."""

    @property
    def advantage(self) -> float:
        """What the update contributed: the measured success, less that of the same answers by chance."""
        return self.measured.share - self.chance

    @property
    def by_client(self) -> tuple[Share, ...]:
        """What was achieved against each client, over all its updates; empty where a client is not known."""
        shares: dict[int, Share] = {}
        for client, right, of in self.trials:
            shares[client] = shares.get(client, Share(0, 0)) + Share(right, of)
        return tuple(shares.values()) if len(self.trials) == self.updates else ()

    @property
    def independent(self) -> bool:
        """Whether every trial is the update of another client."""
        return len(self.by_client) == self.measured.of

    @property
    def p_value(self) -> float:
        """At most this is the probability of so much success, if the claim holds.

        Where every trial is the update of another client, by the binomial law. Examples of one update, and updates of
        one client, are no independent trials: there by Markov's inequality, P[share ≥ s] ≤ allowed / s, which needs no
        independence at all. Of several clients each is also one trial by itself, P[share ≥ ½] ≤ 2 allowed, and these
        trials follow the binomial law; the smaller of the two p-values counts double.
        """
        from scipy.stats import binom  # takes half a second to import

        if not self.measured.right:
            return 1.0
        if self.independent:
            return float(binom.sf(self.measured.right - 1, self.measured.of, self.allowed))
        markov, each = min(1.0, self.allowed / self.measured.share), self.by_client
        if len(each) < 2:
            return markov
        halves = sum(2 * share.right >= share.of for share in each)
        return min(1.0, 2 * min(markov, float(binom.sf(halves - 1, len(each), min(1.0, 2 * self.allowed)))))

    @property
    def verdict(self) -> Literal["consistent", "inconclusive", "violated"]:
        """Violated: the whole interval lies above what is allowed, and the p-value is below 5% / `looks`."""
        if self.measured.interval[0] <= self.allowed:
            return "consistent"
        return "violated" if self.p_value < 0.05 / self.looks else "inconclusive"

    def sentence(self) -> str:
        """For people."""
        together = "" if self.independent else ", because examples of one client succeed and fail together"
        looks = "" if self.looks == 1 else f", below 5% / {self.looks} for {self.looks} comparisons"
        ends = {
            "consistent": "which agrees with the claim",
            "inconclusive": f"which is more than the claim allows, but may be luck{together}: attack more updates of"
            " other clients",
            "violated": f"which is more than the claim allows (p ≤ {p_value_text(self.p_value)}{looks})",
        }
        return (
            f"{self.claim}: {self.success} may happen with probability {rounded_up(100 * self.allowed, 1)}% at most"
            f" (from {self.rests_on}; blind guessing {rounded_up(100 * self.kappa, 1)}%; if the examples are"
            f" drawn like the public rows), measured {self.measured},"
            f" {ends[self.verdict]}. Beyond what the same answers reach by chance (U-ReRo), {100 * self.advantage:.0f}%"
            f" were measured, at most {rounded_up(100 * self.advantage_allowed, 1)}% are allowed."
        )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; with the verdict, for whoever reads the file."""
        return dataclasses.asdict(self) | {"measured": self.measured.to_dict(), "verdict": self.verdict}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Comparison:
        """What `to_dict` wrote."""
        own = {key: value for key, value in fields.items() if key != "verdict"}
        trials = tuple((int(client), int(right), int(of)) for client, right, of in own.get("trials", ()))
        return cls(**{**own, "measured": Share.from_dict(own["measured"]), "trials": trials})


@dataclass(frozen=True)
class Outcome:
    """What an attack on one update achieved: which of the originals it got, with how many guesses."""

    what: str
    """What success is, for people: "an exact copy"."""
    right: tuple[bool, ...]
    guesses: int
    blind: Kappa
    chance: float
    """Share of independent rows that some guess is right for."""
    clients: int
    """How many clients' examples the originals are."""
    client: int | None = None
    """Whose update it is, if it is one client's and known."""


def compare(claims: Iterable[PrivacyClaim], outcome: Outcome) -> tuple[Comparison, ...]:
    """What each claim against the server allows, and what happened.

    Unit example: every example is a trial. Unit client: the client's data as a whole is protected, every update is one
    trial, and success is that any, or that all, of the client's examples are right. "Any" by blind guessing has at most
    the probability of one, times their number; in the sum of several clients it is any of any client's.
    """
    # What an outsider sees is less than what is attacked here, so that its claim says nothing about it.
    bearing = [claim for claim in claims if claim.finite and claim.observer != OUTSIDER]
    return tuple(found for claim in bearing for found in _against(claim, outcome)) if outcome.right else ()


def _against(claim: PrivacyClaim, outcome: Outcome) -> list[Comparison]:
    one, examples = outcome.blind.of_list(outcome.guesses), len(outcome.right)
    if claim.unit == "example":
        hits = Share(sum(outcome.right), examples)
        return [_comparison(claim, f"{outcome.what} of an example", one, hits, outcome.chance, outcome.client)]
    several = min(1.0, -(-examples // outcome.clients) * one)
    luck = 1 - (1 - outcome.chance) ** examples
    some, every = Share(int(any(outcome.right)), 1), Share(int(all(outcome.right)), 1)
    words = f"{outcome.what} of any example of a client"
    return [
        _comparison(claim, words, several, some, luck, outcome.client, times=outcome.clients),
        _comparison(claim, f"{outcome.what} of every example of a client", one, every, 0.0, outcome.client),
    ]


def _comparison(
    claim: PrivacyClaim,
    success: str,
    kappa: float,
    measured: Share,
    chance: float,
    client: int | None,
    *,
    times: int = 1,
) -> Comparison:
    # An update holds nothing of whoever was not drawn for it: every trial is a unit that was.
    allowed, bound = rero_claim(claim, kappa, drawn=True)
    rests_on = f"the {bound}" if bound == "privacy profile" else bound
    if amplified(claim):
        rests_on += f" without amplification: the scored {claim.unit}s were drawn"
    return Comparison(
        claim=f"ε ≤ {rounded_up(claim.epsilon)} at δ = {claim.delta:g} per {claim.unit} ({claim.adjacency})",
        success=success,
        kappa=kappa,
        allowed=min(1.0, times * allowed),
        rests_on=rests_on,
        measured=measured,
        advantage_allowed=min(1.0, times * urero_claim(claim, kappa, drawn=True)),
        chance=chance,
        trials=() if client is None else ((client, measured.right, measured.of),),
    )


def pooled(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Several updates together: for each claim and notion of success the sum of the trials, and the weakest bound."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.claim, comparison.success), []).append(comparison)
    return together([_pool(group) for group in groups.values()])


def together(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Comparisons that are read side by side, each of which knows of how many it is one."""
    return tuple(dataclasses.replace(one, looks=len(comparisons)) for one in comparisons)


def _pool(group: list[Comparison]) -> Comparison:
    measured = sum((c.measured for c in group[1:]), group[0].measured)
    weakest = max(group, key=lambda c: c.allowed)
    chance = sum(c.chance * c.measured.of for c in group) / max(measured.of, 1)
    return dataclasses.replace(
        weakest,
        kappa=max(c.kappa for c in group),
        measured=measured,
        advantage_allowed=max(c.advantage_allowed for c in group),
        chance=chance,
        updates=sum(c.updates for c in group),
        trials=tuple(trial for c in group for trial in c.trials),
    )
