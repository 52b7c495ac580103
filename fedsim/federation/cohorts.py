# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a round: a function of the seed and the round, never of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedsim.errors import ScenarioError
from fedsim.randomness import stream
from fedsim.scenario import CohortSection

Cohort = NDArray[np.int64]


def expected_size(section: CohortSection, population: int) -> float:
    """The (expected) number of clients in a round."""
    if section.size is not None and section.size > population:
        raise ScenarioError(
            f"cohort.size {section.size} is larger than the population of {population} clients; "
            f"choose a size of at most {population}"
        )
    if section.rate is not None:
        size = section.rate * population
        return size if section.sampling == "poisson" else max(1, round(size))
    return population if section.size is None else section.size


def sample_cohort(section: CohortSection, population: int, seed: int, round_: int) -> Cohort:
    """The clients of a round, in increasing order: `size` without replacement, or each with probability q = size/N."""
    rng = stream(seed, "cohort", round_)
    size = expected_size(section, population)
    # Poisson: a binomial size, then a uniform set of that size: the law of N coins, at the cost of the cohort only.
    count = int(rng.binomial(population, size / population)) if section.sampling == "poisson" else int(size)
    return np.sort(rng.choice(population, count, replace=False, shuffle=False)).astype(np.int64)


def participations(cohorts: Sequence[Cohort]) -> Counter[int]:
    """In how many rounds each client takes part."""
    return Counter(int(client) for cohort in cohorts for client in cohort)
