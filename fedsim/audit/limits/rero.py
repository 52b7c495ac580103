# SPDX-License-Identifier: Apache-2.0
"""ReRo and U-ReRo: what differential privacy allows a reconstruction to achieve, as functions of a claim's numbers.

ReRo (Balle, Cherubin & Hayes 2022): a record Z is drawn from a prior π, the mechanism runs on the data with Z in it,
the adversary knows all other records and answers A(θ). (η, γ)-ReRo says P[ℓ(Z, A(θ)) ≤ η] ≤ γ. Blind guessing succeeds
with κ = sup_z P[ℓ(Z, z) ≤ η], so that only what exceeds κ comes from the mechanism. U-ReRo (Guerra-Balboa, Sauer &
Strufe, WPES 2024) subtracts what the same answers achieve on an independent record, and bounds the advantage.

Which two federations does a bound compare? Adjacency is typed, because an ε means something else under each:

| adjacency  | compares the run with Z to          | ReRo                                | U-ReRo                     |
|------------|-------------------------------------|-------------------------------------|----------------------------|
| add/remove | the run without any record there    | 1 − f(κ): Hayes 2023, Kaissis 2023  | by conversion to replace   |
| replace    | the run with another record there   | (e^ε κ + δ) / (1 − κ + e^ε κ)       | max over p ≤ κ, see below  |

An add/remove (ε, δ) is at least a replace (2ε, (1 + e^ε) δ): `as_replace`. Balle's κ e^ε holds under both.

Why the replace column holds for any prior and any η (for uniform priors and η = 0 it is known, and attained by
randomised response): let S be the set of records that the answer is right for, π(S) ≤ κ. For z in S and z' outside, DP
says P_z ≤ e^ε P_z' + δ on the outcomes that give S; summed over all pairs with weights π_z π_z', this reads
(1 − κ) s ≤ e^ε κ (1 − s) + δ for the success probability s. With p = π(S) for each outcome by itself, the advantage is
at most max over p ≤ κ of p (1 − p) (e^ε − 1) / (1 + p (e^ε − 1)), plus δ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from fedsim.audit.limits.ranges import checked, checked_prior, checked_share, checked_whole, growth, within
from fedsim.errors import PrivacyError
from fedsim.privacy.accounting import Mechanism
from fedsim.privacy.claim import Adjacency
from fedsim.privacy.loss import FINE, Floats, Grid, Release, _compose, _tails

_LARGEST = 700.0  # e^700 is still a number


# --- success: ReRo --------------------------------------------------------------------------------------------------


def rero_balle(epsilon: float, kappa: float) -> float:
    """min(1, κ e^ε), for pure ε-DP under either adjacency (Balle et al. 2022, Theorem 2)."""
    checked(epsilon, kappa)
    return min(1.0, kappa * growth(epsilon))


def rero_tight(epsilon: float, m: float) -> float:
    """e^ε / (e^ε + m − 1): the best guess of one of m equally likely records, replace-one ε-DP; attained.

    For any other prior and any η it is a bound with m = 1/κ (which need not be a whole number).
    """
    if not within(m, 1, math.inf):
        raise PrivacyError(f"m is {m!r}, it must be at least 1: the number of equally likely records")
    checked(epsilon, 1 / m)
    return 1 / (1 + (m - 1) * math.exp(-epsilon))


def rero(epsilon: float, kappa: float, *, delta: float = 0.0, adjacency: Adjacency) -> float:
    """The smallest success that (ε, δ)-DP is known to guarantee, with ε as it is under `adjacency`.

    replace: (e^ε κ + δ) / (1 − κ + e^ε κ). add/remove: 1 − f(κ) = min(e^ε κ + δ, 1 − e^−ε (1 − δ − κ)).
    """
    checked(epsilon, kappa, delta)
    if adjacency == "replace":
        decay = math.exp(-epsilon)
        return min(1.0, (kappa + delta * decay) / (kappa + (1 - kappa) * decay)) if kappa else delta
    return max(kappa, min(1.0, kappa * growth(epsilon) + delta, 1 - math.exp(-epsilon) * (1 - delta - kappa)))


def rero_wpes(epsilon: float, m: int) -> float:
    """As printed by Guerra-Balboa et al. (WPES 2024) for m equally likely records, replace-one: true, not tight."""
    m = checked_whole("m", m, 1)
    checked(epsilon)
    return min(rero_balle(epsilon, 1 / m), (1 + (m - 1) * math.tanh(epsilon / 2)) / m)


def rero_dpsgd(noise_multiplier: float, sample_rate: float, steps: int, kappa: float, *, grid: Grid = FINE) -> float:
    """The least over ε of e^ε κ + δ(ε) = 1 − f(κ), for `steps` Poisson-sampled Gaussian releases, add/remove.

    δ(ε) is that of the run with the record against the run without it (Hayes, Mahloujifar & Balle 2023, Theorem 2;
    Kaissis et al. 2023), over all real ε, from the composed, pessimistic PLD. It knows the whole privacy profile, so it
    is never above `rero` of any one (ε, δ) of it. Without sampling it is Φ(Φ⁻¹(κ) + √steps / σ).
    """
    checked(0.0, kappa)
    steps = checked_whole("steps", steps, 0)
    Mechanism("gaussian", noise_multiplier, "add/remove", "poisson", sample_rate)  # refuses what makes no sense
    if steps == 0 or kappa in (0.0, 1.0):
        return kappa
    if noise_multiplier == 0:
        return 1.0
    if sample_rate == 1:
        return rero_gaussian(math.sqrt(steps) / noise_multiplier, kappa)
    losses, deltas = _profile(Release("gaussian", noise_multiplier, sample_rate), steps, grid)
    with np.errstate(over="ignore"):
        return float(min(1.0, max(kappa, (np.exp(losses) * kappa + deltas).min())))


def _profile(release: Release, steps: int, grid: Grid) -> tuple[Floats, Floats]:
    """ε on a grid and δ(ε) at each, of the run with the record against the run without (dp-accounting's "remove")."""
    interval, lowest, probabilities, infinite = _compose({release: steps}, grid)[0]
    upper, lower = _tails(interval, probabilities, infinite)
    losses: Floats = interval * (lowest + np.arange(len(probabilities), dtype=np.float64))
    return losses, upper - lower


def rero_gaussian(mu: float, kappa: float) -> float:
    """Φ(Φ⁻¹(κ) + μ), for μ-GDP, which the Gaussian mechanism is under either adjacency (μ = sensitivity / σ)."""
    if not within(mu, 0, math.inf):
        raise PrivacyError(f"mu is {mu!r}, it must be at least 0")
    return float(ndtr(ndtri(checked_share("kappa", kappa)) + mu))


# --- advantage: U-ReRo ----------------------------------------------------------------------------------------------


def urero(epsilon: float, kappa: float) -> float:
    """min(κ (e^ε − 1), (e^ε − 1)/(e^ε + 1)): row "DRA Informed" of WPES 2024, replace-one ε-DP, any prior and η."""
    checked(epsilon, kappa)
    return min(kappa * math.expm1(min(epsilon, _LARGEST)), math.tanh(epsilon / 2))


def urero_tight(epsilon: float, kappa: float, *, delta: float = 0.0) -> float:
    """The most over p ≤ κ of p (1 − p) (e^ε − 1) / (1 + p (e^ε − 1)), plus δ; replace-one, any prior and η.

    The maximum lies at p = 1 / (1 + e^(ε/2)) and is (e^(ε/2) − 1)/(e^(ε/2) + 1); where κ is less, it lies at κ.
    """
    checked(epsilon, kappa, delta)
    p = min(kappa, 1 / (1 + math.exp(epsilon / 2)) if epsilon < _LARGEST else 0.0)
    if p < kappa:
        return min(1.0, math.tanh(epsilon / 4) + delta)
    gain = math.expm1(min(epsilon, _LARGEST))
    return min(1.0, p * (1 - p) * gain / (1 + p * gain) + delta)


def urero_prior(epsilon: float, prior: Sequence[float], *, delta: float = 0.0) -> float:
    """TV (1 − Σ π²), TV = (e^ε − 1 + 2δ)/(e^ε + 1): replace-one, η = 0 (Guerra-Balboa et al., arXiv 2603.12142).

    For equally likely records the tight p (1 − p) (e^ε − 1) / (1 + p (e^ε − 1)) + δ at p = 1/m, where that is less.
    """
    weights = checked_prior(prior)
    checked(epsilon, float(weights.max()), delta)
    tv = math.tanh(epsilon / 2) + 2 * delta / (growth(epsilon) + 1)
    bound = tv * float(1 - weights @ weights)
    if np.allclose(weights, weights[0], rtol=1e-9):
        m, decay = len(weights), math.exp(-epsilon)
        bound = min(bound, (m - 1) / m * (1 - decay) / (1 + (m - 1) * decay) + delta)
    return min(1.0, bound)


def urero_wpes(epsilon: float, prior: Sequence[float]) -> float:
    """min{κ (e^ε − 1), κ (m − 1) t + κ − κ⁻}: row "DRA Informed, η = 0" as printed by WPES 2024, for any prior.

    κ⁻ is the least probability of the prior. It can exceed 1, and then says nothing: `attribute_advantage` is exact.
    """
    weights = checked_prior(prior)
    most, least = float(weights.max()), float(weights.min())
    checked(epsilon, most)
    general = most * (len(weights) - 1) * math.tanh(epsilon / 2) + most - least
    return min(most * math.expm1(min(epsilon, _LARGEST)), general)


@dataclass(frozen=True)
class UreroRow:
    """A row of the table of WPES 2024 for m equally likely records (or κ), as printed, and whether it may be used."""

    attack: str
    printed: str
    value: Callable[[float, int], float]
    valid: bool
    remark: str = ""


def _wpes_uniform(epsilon: float, m: int) -> float:
    return min(math.expm1(min(epsilon, _LARGEST)) / m, (m - 1) / m * math.tanh(epsilon / 2))


URERO_NOTE = "uniform prior over m records, replace-one ε-DP, t = (e^ε − 1)/(e^ε + 1)"
URERO_ROWS = (
    UreroRow(
        "MIA Strongest",
        "γ/2 ≤ t",
        lambda epsilon, m: math.tanh(epsilon / 2) / 2,
        True,
        "read as: advantage of strong membership inference at most t, hence U-ReRo at most t/2; literally it is 4 times"
        " that",
    ),
    UreroRow("MIA Informed", "min{(e^ε − 1)/m, (m − 1)/m t}", _wpes_uniform, True),
    UreroRow(
        "AIA Informed",
        "min{e^ε/m, (m − 1)/m (t + 1)}",
        lambda epsilon, m: min(growth(epsilon) / m, (m - 1) / m * (math.tanh(epsilon / 2) + 1)),
        False,
        "wrong: the exact optimum for non-uniform priors exceeds it (m = 20, two of 0.45, ε = 1: 0.208 > 0.136);"
        " use urero_prior",
    ),
    UreroRow("AIA Inf. Uniform", "min{(e^ε − 1)/m, (m − 1)/m t}", _wpes_uniform, True),
    UreroRow("DRA Informed", "min{κ (e^ε − 1), t}", lambda epsilon, m: urero(epsilon, 1 / m), True, "any prior and η"),
    UreroRow(
        "DRA Informed, η = 0",
        "min{κ (e^ε − 1), κ (m − 1) t + κ − κ⁻}",
        _wpes_uniform,
        True,
        "with κ⁻ the least likely record's probability; it can exceed 1 for peaked priors and then says nothing",
    ),
)
"""The seed's table in its order. The wrong row is here to be shown, never to be used."""
