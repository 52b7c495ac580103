# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.errors import ScenarioError
from fedsim.federation.cohorts import expected_size, participations, sample_cohort
from fedsim.scenario import CohortSection


@given(population=st.integers(1, 500), data=st.data(), seed=st.integers(0, 9), round_=st.integers(1, 50))
def test_a_fixed_cohort_has_its_size_and_no_one_twice(
    population: int, data: st.DataObject, seed: int, round_: int
) -> None:
    size = data.draw(st.integers(1, population))
    cohort = sample_cohort(CohortSection(population=population, size=size), population, seed, round_)
    assert len(cohort) == len(set(cohort.tolist())) == size
    assert list(cohort) == sorted(cohort)
    assert cohort[0] >= 0
    assert cohort[-1] < population
    again = sample_cohort(CohortSection(population=population, size=size), population, seed, round_)
    assert np.array_equal(cohort, again)


def test_everybody_comes_with_the_same_frequency() -> None:
    section = CohortSection(population=10, size=3)
    seen = participations([sample_cohort(section, 10, 0, round_) for round_ in range(2000)])
    assert all(abs(seen[client] - 600) < 5 * np.sqrt(2000 * 0.3 * 0.7) for client in range(10))


def test_a_poisson_cohort_is_binomial_in_size() -> None:
    section = CohortSection(population=50, rate=0.2, sampling="poisson")
    sizes = np.array([len(sample_cohort(section, 50, 1, round_)) for round_ in range(3000)])
    assert abs(sizes.mean() - 10) < 5 * np.sqrt(50 * 0.2 * 0.8 / 3000)
    assert abs(sizes.var() - 8) < 1.2


def test_a_million_clients_cost_nothing() -> None:
    cohort = sample_cohort(CohortSection(population=10**6, size=50), 10**6, 0, 1)
    assert len(set(cohort.tolist())) == 50


def test_rate_and_size_say_the_same() -> None:
    assert expected_size(CohortSection(rate=0.25), 40) == 10
    assert expected_size(CohortSection(rate=0.001), 40) == 1
    assert expected_size(CohortSection(rate=0.01, sampling="poisson"), 40) == pytest.approx(0.4)
    assert expected_size(CohortSection(), 40) == 40
    with pytest.raises(ScenarioError, match="larger than the population of 40"):
        expected_size(CohortSection(size=41), 40)
