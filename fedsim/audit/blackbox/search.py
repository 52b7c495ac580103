# SPDX-License-Identifier: Apache-2.0
"""The search for an event that refutes a claim: a few runs of every pair, more of the promising, fresh ones to count.

Whatever was learned, was learned on other runs than those that are counted, and what was counted is learned from next.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fedsim.audit.blackbox.distinguishing import epsilon_distinguishing, p_value
from fedsim.audit.blackbox.events import Event, choose
from fedsim.audit.blackbox.outputs import Outputs, joined
from fedsim.audit.blackbox.pairs import Pair
from fedsim.audit.blackbox.running import Lens, Mechanism, run
from fedsim.audit.estimate import Estimate
from fedsim.audit.verdict import Claim

_SEARCH = 0.2  # of all runs
_ROUNDS = (64, 24, 8)  # pairs that are left after each round of the search
_PARTS = (0.05, 0.2, 0.75)  # of the runs of a pair, as long as nothing is clear
_MANY = 400  # runs of a pair that are worth to be made in parts
STAGES = ((0.1, 3, 0.25), (0.15, 2, 0.25), (0.3, 1, 0.5))
"""Of all runs; how many pairs; of the error probability."""
CONFIRM = 0.25
"""Of all runs, at most, to see a refutation a second time."""
FEWEST = 200
_CLEAR = 0.5  # above the claim, in ε: what promises so much needs few runs only
_SIZES = (0.03, 0.1, 0.3)  # of the runs of a stage, for what is clear


@dataclass(eq=False)
class Candidate:
    """A pair, all its runs so far, and the event that they promise most of."""

    pair: Pair
    first: Outputs | None = None
    second: Outputs | None = None
    lens: Lens | None = None
    event: Event | None = None
    rare: Event | None = None
    """What was seen on one side only, perhaps by chance."""

    def learn(self, first: Outputs, second: Outputs) -> None:
        """Add runs that have been looked at."""
        self.first = joined([self.first, first]) if self.first is not None else first
        self.second = joined([self.second, second]) if self.second is not None else second

    @property
    def promise(self) -> float:
        """The lower bound that its event may give."""
        return self.event.promise if self.event else -math.inf

    @property
    def hope(self) -> float:
        """The same of its rare event, with less care."""
        return self.rare.promise if self.rare else -math.inf


@dataclass(frozen=True, eq=False)
class Count:
    """One event, counted on fresh runs, with the part of the error probability that it was given."""

    pair: Pair
    event: Event
    correct: int
    guesses: int
    first: Outputs
    second: Outputs
    share: float
    again: Count | None = None
    """The same event once more on other runs, which a refutation needs."""

    @property
    def trials(self) -> int:
        """Runs of both data sets."""
        return len(self.first) + len(self.second)


@dataclass(eq=False)
class Audit:
    """A mechanism, what it claims, and what has been counted so far."""

    mechanism: Mechanism
    claim: Claim
    error: float
    rng: np.random.Generator
    exact: bool
    used: int = 0
    counts: list[Count] = field(default_factory=list)

    def more(self, candidate: Candidate, trials: int) -> tuple[Outputs, Outputs]:
        """Fresh runs of a pair."""
        self.used += trials
        return run(self.mechanism, candidate.pair, trials, self.rng, candidate.lens)

    def look(self, candidate: Candidate, upcoming: int, *, thorough: bool) -> None:
        """Choose the event anew, for so many runs to come."""
        if candidate.first is not None and candidate.second is not None:
            seen = candidate.first, candidate.second, self.claim.delta, upcoming
            candidate.event = choose(*seen, thorough=thorough, exact=self.exact)
            candidate.rare = choose(*seen, rare=True)

    def p_value(self, count: Count) -> float:
        """Of what one count says against the claim, corrected for all others; the larger one if it was made twice."""
        error = self.error * count.share
        once = p_value(count.correct, count.guesses, count.trials, self.claim.epsilon, self.claim.delta, error=error)
        corrected = min(1.0, once / count.share)
        return corrected if count.again is None else max(corrected, self.p_value(count.again))

    def best(self) -> tuple[Count, Estimate]:
        """The largest lower bound; all of them hold at once with the audit's confidence."""
        bounds = [(count, self.bound(count)) for count in self.counts]
        return max(bounds, key=lambda found: found[1].lower)

    def bound(self, count: Count) -> Estimate:
        """Its lower bound at its own error, to be read at the audit's confidence."""
        own = 1 - self.error * count.share
        made = epsilon_distinguishing(
            count.correct, count.guesses, count.trials, self.claim.delta, own, method="exact test on fresh runs"
        )
        if count.again is not None:  # both hold, so the smaller does, and a claim is not refuted by luck
            made = min(made, self.bound(count.again), key=lambda bound: bound.lower)
        return dataclasses.replace(made, confidence=1 - self.error)

    def count(self, candidate: Candidate, trials: int, share: float, event: Event | None = None) -> Count | None:
        """An event (by default the candidate's) on fresh runs, from which the candidate then learns."""
        first, second = self.more(candidate, trials)
        event, made = event or candidate.event, None
        if event is not None:
            happened = event.happened(first), event.happened(second)
            right = int(happened[0 if event.first else 1].sum())
            guesses = int(happened[0].sum() + happened[1].sum())
            made = Count(candidate.pair, event, right, guesses, first, second, share)
        candidate.learn(first, second)
        return made


def search(audit: Audit, pairs: Sequence[Pair], budget: int) -> list[Candidate]:
    """A few runs of every pair, more of the better ones: each round has the same number of runs, for fewer pairs."""
    candidates = [Candidate(pair) for pair in pairs]
    rounds = [most for most in _ROUNDS if 2 * most <= len(candidates)]
    trials = int(budget * _SEARCH) // (len(rounds) + 1)
    for most in (*rounds, 0):
        for candidate in candidates:
            _look_longer(audit, candidate, max(20, trials // len(candidates)), budget // 5)
        candidates = _better(candidates, most or _ROUNDS[-1])
        if candidates[0].promise > audit.claim.epsilon + _CLEAR:
            break
    return candidates[: _ROUNDS[-1]]


def _better(candidates: list[Candidate], most: int) -> list[Candidate]:
    """Half of them for their promise, best first; the others for their hope, if they have any."""
    ranked = sorted(candidates, key=lambda candidate: -candidate.promise)
    others = sorted(ranked[most // 2 :], key=lambda candidate: -candidate.hope)
    return ranked[: most // 2] + others[: most - most // 2]


def _look_longer(audit: Audit, candidate: Candidate, trials: int, upcoming: int) -> None:
    """More runs of a pair, fewer where few suffice."""
    for part in _PARTS if trials >= _MANY else (1.0,):
        first, second = audit.more(candidate, int(part * trials))
        if candidate.first is None and (lens := Lens.for_outputs(first, second)):
            candidate.lens, first, second = lens, lens.apply(first), lens.apply(second)
        candidate.learn(first, second)
        audit.look(candidate, upcoming, thorough=False)
        if candidate.promise > audit.claim.epsilon + _CLEAR:
            break


def count_in_stages(audit: Audit, candidates: list[Candidate], budget: int) -> None:
    """Stage by stage, until the claim is refuted, and refuted again, or the runs are spent."""
    for part, most, share in STAGES:
        chosen = _for_stage(candidates, most)
        for candidate, event in chosen:
            upcoming = max(2, int(budget * part) // len(chosen))
            trials = _enough(audit, candidate, upcoming, most == 1) if event is None else upcoming
            count = audit.count(candidate, trials, share / len(chosen), event)
            if count is None:
                continue
            if audit.p_value(count) <= audit.error:
                fresh = min(2 * trials, int(budget * CONFIRM))
                count = dataclasses.replace(count, again=audit.count(candidate, fresh, 1.0, count.event))
            audit.counts.append(count)
            if audit.p_value(count) <= audit.error:
                return
        for candidate, _ in chosen:
            audit.look(candidate, budget, thorough=False)


def _for_stage(candidates: list[Candidate], most: int) -> list[tuple[Candidate, Event | None]]:
    """The most promising pairs; where there is room, and something to hope for, the last place is a rare event's."""
    promising = sorted(candidates, key=lambda candidate: -candidate.promise)[:most]
    chosen: list[tuple[Candidate, Event | None]] = [(candidate, None) for candidate in promising]
    hopeful = max(candidates, key=lambda candidate: candidate.hope)
    if most > 1 and hopeful.rare is not None and hopeful.hope > hopeful.promise:
        chosen[most - 1 :] = [(hopeful, hopeful.rare)]
    return chosen


def _enough(audit: Audit, candidate: Candidate, most: int, last: bool) -> int:
    """How many runs to count on, as far as earlier ones tell; the event is chosen for so many. The last time: all."""
    audit.look(candidate, most, thorough=False)
    for size in () if last else _SIZES:
        trials = int(most * size)
        if candidate.event and candidate.event.forecast(trials) > audit.claim.epsilon + _CLEAR:
            return trials
    audit.look(candidate, most, thorough=True)
    return most
