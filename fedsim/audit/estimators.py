# SPDX-License-Identifier: Apache-2.0
"""From counts or scores to an epsilon: pure functions, each of which names its assumption and its error probability.

| estimator                 | needs                            | tier | assumes                                      |
|---------------------------|----------------------------------|------|----------------------------------------------|
| `epsilon_point`           | errors of a test                 | –    | proves nothing                               |
| `epsilon_clopper_pearson` | errors of a test                 | A    | independent trials                           |
| `epsilon_bayesian`        | confusion matrix                 | B    | independent trials, Jeffreys priors          |
| `epsilon_one_run`         | right guesses of one run         | A    | canaries in by independent coins             |
| `epsilon_one_run_fdp`     | right guesses of one run         | A/B  | the same; B: the curve is of the family      |
| `epsilon_gdp`             | errors of a test                 | B    | a Gaussian channel                           |
| `epsilon_gaussian`        | scores                           | B    | a Gaussian channel, checked on the scores    |
| `epsilon_per_step`        | scores of every step             | B    | Gaussian steps of one noise, Poisson sampling|
| `one_shot_federated`      | scores of canary clients         | B    | a Gaussian channel, checked on the scores    |

A threshold, or a number of guesses, that was chosen after the scores were seen voids a confidence, so that `selection`
says by its type how it was chosen: `Fixed()` beforehand, `HeldOut()` on other trials, `Corrected(choices)` as the best
of so many, each of which is given its part of the error probability.
"""

from fedsim.audit.estimate import Corrected, Estimate, Fixed, HeldOut, Selection
from fedsim.audit.estimation.bayesian import epsilon_bayesian, posterior_cdf
from fedsim.audit.estimation.counts import epsilon_clopper_pearson, epsilon_gdp, epsilon_point
from fedsim.audit.estimation.gaussian import epsilon_gaussian
from fedsim.audit.estimation.one_run import (
    GDP,
    ApproximateDP,
    Family,
    SampledGaussian,
    epsilon_one_run,
    epsilon_one_run_fdp,
    one_run_p_value,
)
from fedsim.audit.estimation.one_shot import one_shot_federated
from fedsim.audit.estimation.per_step import epsilon_per_step, participation_p_value

__all__ = [
    "GDP",
    "ApproximateDP",
    "Corrected",
    "Estimate",
    "Family",
    "Fixed",
    "HeldOut",
    "SampledGaussian",
    "Selection",
    "epsilon_bayesian",
    "epsilon_clopper_pearson",
    "epsilon_gaussian",
    "epsilon_gdp",
    "epsilon_one_run",
    "epsilon_one_run_fdp",
    "epsilon_per_step",
    "epsilon_point",
    "one_run_p_value",
    "one_shot_federated",
    "participation_p_value",
    "posterior_cdf",
]
