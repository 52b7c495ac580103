# SPDX-License-Identifier: Apache-2.0
"""Epsilon of a whole training from canaries in every round: one step is measured, all steps are composed (tier B)."""

from __future__ import annotations

from typing import Literal

from scipy.special import betaincinv
from scipy.stats import binomtest

from fedsim.audit.estimate import Estimate, Fixed, Selection
from fedsim.audit.estimation.arguments import Scores, checked_delta, count, error_of, scores
from fedsim.audit.estimation.counts import threshold_note, upper_rates
from fedsim.audit.estimation.gaussian import gaussian_fit, mu_of_rates
from fedsim.audit.limits.ranges import within
from fedsim.errors import AuditError
from fedsim.privacy.accounting import Mechanism, account
from fedsim.privacy.loss import FINE, Grid

_FOR_RATE = 0.1  # of the error probability: the rate is known far better than the noise


def epsilon_per_step(
    scores_in: Scores,
    scores_out: Scores,
    sample_rate: float,
    steps: int,
    delta: float,
    confidence: float = 0.95,
    *,
    participations: tuple[int, int] | None = None,
    method: Literal["gaussian", "clopper-pearson"] = "gaussian",
    threshold: float = 0.5,
    selection: Selection = Fixed(),  # noqa: B008 - frozen
    grid: Grid = FINE,
) -> Estimate:
    """ε at δ (add/remove) of `steps` Poisson-sampled Gaussian releases at the largest noise that the scores allow.

    A score is ⟨canary, released sum⟩ / ‖canary‖² in one step, with the canary in the sum and without: N(1, σ²) against
    N(0, σ²), so that one step is 1/σ-GDP (Nasr et al. 2023). `gaussian` bounds 1/σ by the t-statistic of all scores;
    `clopper-pearson` by the errors at `threshold`, half-way between 0 and 1 unless another was chosen as `selection`
    says. The composition is that of the accountant, PLD.

    The scores say nothing about the sampling. Without `participations` the rate is taken to be `sample_rate`; with
    (how often a unit joined, out of how many chances) it is tested apart: a tenth of the error probability buys a lower
    Clopper-Pearson end of the rate, which is composed instead. A rate above the one that was claimed shows up as a
    larger ε, and a smaller rate cannot lead to a false claim.

    P[lower ≤ ε] ≥ confidence if every step is such a release with the same σ.
    """
    delta, steps = checked_delta(delta, positive=True), count("steps", steps, least=1)
    if not within(sample_rate, 0, 1) or sample_rate == 0:
        raise AuditError(f"sample_rate is {sample_rate!r}; it must be above 0 and at most 1")
    error = error_of(confidence, selection if method == "clopper-pearson" else Fixed())
    rate, for_scores, rate_note = sample_rate, error, f"the sampling rate is {sample_rate:g}, as claimed (not tested)"
    if participations is not None:
        rate, rate_note = _tested_rate(participations, sample_rate, _FOR_RATE * (1 - confidence))
        for_scores = (1 - _FOR_RATE) * error
    if method == "gaussian":
        fit = gaussian_fit(scores_in, scores_out, for_scores)
        mu, notes = fit.mu_lower, fit.notes
    else:
        mu = _counted_mu(scores_in, scores_out, threshold, for_scores)
        notes = ("each step is Gaussian noise", threshold_note(selection))
    lower = _composed(mu, rate, steps, delta, grid)
    notes = (*notes, f"{steps} steps of the same noise, Poisson sampled and composed by PLD", rate_note)
    return Estimate(lower, None, confidence, f"per step ({method}), composed", "B", delta, notes)


def participation_p_value(joined: int, chances: int, sample_rate: float) -> float:
    """The two-sided exact binomial test of the rate with which a unit joined."""
    chances = count("chances", chances, least=1)
    joined = count("participations", joined, chances, of="the number of chances")
    return float(binomtest(joined, chances, sample_rate).pvalue)


def _tested_rate(participations: tuple[int, int], claimed: float, error: float) -> tuple[float, str]:
    joined, chances = participations
    p_value = participation_p_value(joined, chances, claimed)
    lowest = float(betaincinv(joined, chances - joined + 1, error)) if joined else 0.0
    seen = f"a unit joined {joined} times of {chances} (claimed rate {claimed:g}: p = {p_value:.3g})"
    return lowest, f"{seen}, hence a rate of at least {lowest:.4g}"


def _counted_mu(scores_in: Scores, scores_out: Scores, threshold: float, error: float) -> float:
    x, y = scores("scores_in", scores_in), scores("scores_out", scores_out)
    return mu_of_rates(*upper_rates(int((y >= threshold).sum()), int((x < threshold).sum()), len(y), len(x), error))


def _composed(mu: float, rate: float, steps: int, delta: float, grid: Grid) -> float:
    if mu < 1e-4 or rate < 1e-9:
        return 0.0
    sampling: Literal["none", "poisson"] = "none" if rate == 1 else "poisson"
    return account([(Mechanism("gaussian", 1 / mu, "add/remove", sampling, rate), steps)], delta, "pld", grid).epsilon
