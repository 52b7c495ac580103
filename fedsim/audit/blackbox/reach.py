# SPDX-License-Identifier: Apache-2.0
"""How likely an audit of so many runs catches a mechanism that is worse than its claim, and how many it needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fedsim.audit.blackbox.distinguishing import power
from fedsim.audit.blackbox.search import CONFIRM, FEWEST, STAGES
from fedsim.audit.planner import fewest
from fedsim.audit.verdict import LEAST, POWER, Claim

_LEAST_RUNS = 100_000
_SEARCHED_WELL = 40_000
"""Runs with which the search among made pairs finds an event about as good as the best (`tests`: measured)."""


def caught(claim: Claim, factor: float, error: float, made: bool, budget: int) -> float:
    """The power of the last stage alone, and of seeing it again.

    On made pairs the event must be found first, which takes runs: with few of them only a part of the runs is reckoned
    with, or the figure would be that of an adversary who knows what to look for.
    """
    part, _, share = STAGES[-1]
    runs = budget * min(1.0, budget / _SEARCHED_WELL) if made else budget
    worse = max(factor * claim.epsilon, claim.epsilon + LEAST)
    alternative = partial(power, worse, claim.epsilon, claim.delta)
    return alternative(int(runs * part), error * share) * alternative(int(runs * CONFIRM), error)


def enough(claim: Claim, factor: float, error: float, made: bool) -> int:
    """As many runs as settle it, within reason."""
    needed = fewest(lambda budget: caught(claim, factor, error, made, budget) >= POWER, start=_LEAST_RUNS, most=10**6)
    return max(_LEAST_RUNS, min(needed or 10**6, 10**6))


def settling(power_of: Callable[[int], float]) -> str:
    """What would give the power that is missing."""
    needed = fewest(lambda budget: power_of(budget) >= POWER, start=FEWEST)
    if needed is None:
        return "No number of runs up to 10^9 settles it without a model; use canaries in every round, and tier B."
    return f"About {needed:,} runs would settle it."
