# SPDX-License-Identifier: Apache-2.0
"""`consistent` states a power; what it is stated for is really caught that often, also with the fewest runs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from scipy.stats import binom

from fedsim.audit.blackbox.distinguishing import gaussian_mu
from fedsim.audit.blackbox.events import choose
from fedsim.audit.blackbox.outputs import read
from fedsim.audit.blackbox.reach import caught
from fedsim.audit.blackbox.running import Mechanism, Vectorised
from fedsim.audit.mechanism import audit_mechanism
from fedsim.audit.planner import fewest
from fedsim.audit.verdict import POWER, Claim

GIVEN = [(np.ones(1), np.zeros(1))]


def laplace(epsilon: float) -> Mechanism:
    return Vectorised(lambda x, rng, n: np.clip(x, 0, 1).sum() + rng.laplace(0, 1 / epsilon, n))


def gaussian(epsilon: float, delta: float) -> Mechanism:
    mu = gaussian_mu(epsilon, delta)
    return Vectorised(lambda x, rng, n: mu * np.clip(x, 0, 1).sum() + rng.normal(size=n))


def missed(claim: Claim, made: bool, audits: int, first: int) -> tuple[int, int]:
    """With the fewest runs that may be called consistent: twins of twice ε that were, and all audits."""
    power_of = partial(caught, claim, 2.0, 0.05, made)
    trials = fewest(lambda budget: power_of(budget) >= POWER, start=200)
    assert trials is not None
    twice = gaussian(2 * claim.epsilon, claim.delta) if claim.delta else laplace(2 * claim.epsilon)
    pairs = None if made else GIVEN
    verdicts = [audit_mechanism(twice, claim, pairs, trials=trials, seed=seed) for seed in range(first, first + audits)]
    return sum(verdict.status == "consistent" for verdict in verdicts), audits


@pytest.mark.parametrize(("claim", "made"), [(Claim(1.0), False), (Claim(1.0), True), (Claim(3.0), False)])
def test_twice_the_epsilon_is_seldom_called_consistent(claim: Claim, made: bool) -> None:
    few, audits = missed(claim, made, 25, 100)
    assert binom.sf(few - 1, audits, 1 - POWER) > 1e-3, few


@pytest.mark.slow
@pytest.mark.parametrize("claim", [Claim(0.3), Claim(1.0), Claim(3.0), Claim(1.0, 1e-2)])
@pytest.mark.parametrize("made", [False, True])
def test_the_power_is_what_is_measured(claim: Claim, made: bool) -> None:
    few, audits = missed(claim, made, 80, 900)
    assert binom.sf(few - 1, audits, 1 - POWER) > 1e-3, few


def test_runs_of_one_data_set_only_have_no_event() -> None:
    """A fair coin may give a pair twenty runs of one side: there is nothing to compare, and no error either."""
    some, nobody = read(np.arange(20.0)), read([])
    assert choose(some, nobody, 0.0, 100) is None
    assert choose(nobody, some, 0.0, 100, rare=True) is None
