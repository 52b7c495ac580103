# SPDX-License-Identifier: Apache-2.0
"""Mechanisms that can be audited by name: textbook ones, ridge regression, our own defences, Flower's and Opacus's.

`included()` maps names to functions that return a `Subject`; `fedsim.audit.mechanisms:laplace` is such a target, too.
Those of other packages are in `foreign_mechanisms`, and call the real code. Where runs are slow, the claim is made at
δ = 10⁻²: the same noise has an ε at every δ, and that one needs the fewest runs (`planner`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.audit.blackbox.running import Vectorised
from fedsim.audit.mechanism import Subject
from fedsim.audit.verdict import Claim
from fedsim.errors import AuditError
from fedsim.privacy.accounting import Mechanism, epsilon
from fedsim.privacy.gaussian import gaussian_epsilon, gaussian_sigma

Floats = NDArray[np.float64]
Rng = np.random.Generator


def included() -> dict[str, Callable[[], Subject]]:
    """All of them, by name; each is made when it is asked for."""
    from fedsim.audit import foreign_mechanisms as foreign

    return {
        "gaussian": gaussian,
        "laplace": laplace,
        "homework-sum": homework_sum,
        "homework-sum-16": lambda: homework_sum(16.0),
        "ridge": ridge,
        "ridge-unbounded": lambda: ridge(residual=6.0),
        "flower-local-dp": foreign.flower_local_dp,
        "flower-local-dp-doubled": lambda: foreign.flower_local_dp(doubled=True),
        "flower-central-dp": foreign.flower_central_dp,
        "flower-central-dp-weighted": lambda: foreign.flower_central_dp(weighted=True),
        "flower-central-dp-fewer": lambda: foreign.flower_central_dp(fewer=True),
        "flower-central-dp-accounted": lambda: foreign.flower_central_dp(accounted=True),
        "flower-central-dp-accounted-weighted": lambda: foreign.flower_central_dp(accounted=True, weighted=True),
        "flower-central-dp-accounted-fewer": lambda: foreign.flower_central_dp(accounted=True, fewer=True),
        "opacus": foreign.opacus_dp_sgd,
        "opacus-993-rows": lambda: foreign.opacus_dp_sgd(993, 32, width=10_000, delta=1e-5, trials=2000),
        "opacus-101-rows": lambda: foreign.opacus_dp_sgd(101, 51),
        "opacus-given-rate": lambda: foreign.opacus_dp_sgd(rate=0.5),
        "opacus-same-size": lambda: foreign.opacus_dp_sgd(10, zeroed=True),
        "fedsim-examples": our_examples,
        "fedsim-examples-fewer": our_examples_fewer,
        "fedsim-clients": our_clients,
    }


def gaussian(eps: float = 1.0, delta: float = 1e-5) -> Subject:
    """A clipped sum with the analytic Gaussian noise (Balle & Wang 2018): nothing is given away."""
    sigma = gaussian_sigma(eps, delta)

    def many(records: Floats, rng: Rng, n: int) -> Any:
        return np.clip(records, -1, 1).sum() + rng.normal(0, sigma, n)

    return Subject(Vectorised(many), Claim(eps, delta), exact_epsilon=eps)


def laplace(eps: float = 1.0) -> Subject:
    """A clipped sum with Laplace noise."""

    def many(records: Floats, rng: Rng, n: int) -> Any:
        return np.clip(records, -1, 1).sum() + rng.laplace(0, 1 / eps, n)

    return Subject(Vectorised(many), Claim(eps), exact_epsilon=eps)


def homework_sum(eps: float = 1.0, delta: float = 1e-6, width: int = 10) -> Subject:
    """The sum of vectors of norm 1 in R^d with the classic σ = √(2 ln(1.25/δ)) / ε, as the homework asks.

    The formula is proved for ε ≤ 1 and wrong above 8.78 (δ = 10⁻⁶): at ε = 16 the exact ε is 18.31. The score is that
    of the homework: the output along the canary, the only coordinate that matters, so that it is returned first.
    """
    sigma = math.sqrt(2 * math.log(1.25 / delta)) / eps
    canary = np.zeros((1, width))
    canary[0, 0] = 1.0

    def many(records: Floats, rng: Rng, n: int) -> Any:
        return records.sum(0) + rng.normal(0, sigma, (n, width))

    pair = (canary, np.zeros((1, width)), "a canary on the unit sphere, or the zero vector")
    return Subject(
        Vectorised(many), Claim(eps, delta), [pair], exact_epsilon=gaussian_epsilon(sigma, delta), trials=500_000
    )


# --- ridge regression -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RidgeBounds:
    """What one more record (x̃, ỹ) really does to θ* = (XᵀX + λI)⁻¹Xᵀy, beside what is assumed of it."""

    norm: float
    """‖x̃‖, assumed to be at most R."""
    residual: float
    """|x̃ᵀθ* − ỹ| on the data without it, assumed to be at most M."""
    shift: float
    """‖θ̃* − θ*‖ = ‖H⁻¹x̃‖ |x̃ᵀθ* − ỹ| / (1 + x̃ᵀH⁻¹x̃), by Sherman and Morrison."""
    sensitivity: float
    """MR/λ, which is at least `shift` if both assumptions hold."""
    holds: bool


def ridge_solution(records: Floats, lam: float) -> Floats:
    """θ* = (XᵀX + λI)⁻¹Xᵀy of records (x, y)."""
    x, y = records[:, :-1], records[:, -1]
    return np.asarray(np.linalg.solve(x.T @ x + lam * np.eye(x.shape[1]), x.T @ y), dtype=np.float64)


def ridge_bounds(records: Floats, record: Floats, *, lam: float, bound_x: float, bound_residual: float) -> RidgeBounds:
    """The data-dependent check that R and M really bound: M speaks of θ*, that is of all other records."""
    if not lam > 0:
        raise AuditError(f"lam is {lam!r}; it must be above 0: the weight of ‖θ‖²")
    theta, x = ridge_solution(records, lam), record[:-1]
    inverse = np.linalg.inv(records[:, :-1].T @ records[:, :-1] + lam * np.eye(len(x)))
    residual = float(abs(x @ theta - record[-1]))
    norm = float(np.linalg.norm(x))
    shift = float(np.linalg.norm(inverse @ x)) * residual / (1 + float(x @ inverse @ x))
    holds = norm <= bound_x * (1 + 1e-12) and residual <= bound_residual * (1 + 1e-12)
    return RidgeBounds(norm, residual, shift, bound_x * bound_residual / lam, holds)


def ridge(residual: float = 1.0, rho: float = 0.05, delta: float = 1e-5) -> Subject:
    """θ* + N(0, σ²I) with σ² = M²R²/(2λ²ρ): ρ-zCDP, if ‖x‖ ≤ R = 1 and |xᵀθ* − y| ≤ M = 1 (λ = 1).

    Gaussian noise of σ for a sensitivity of MR/λ is exactly (ε, δ)-DP for the ε of σλ/(MR) = 1/√(2ρ). With
    `residual` above M the assumption is broken by a record whose y nobody has clipped, and the claim with it.
    """
    lam, bound_x, bound_residual = 1.0, 1.0, 1.0
    sigma = bound_residual * bound_x / (lam * math.sqrt(2 * rho))
    rest = np.zeros((5, 3))  # no information: the worst rest, as H is smallest
    record = np.array([bound_x, 0.0, residual])

    def many(records: Floats, rng: Rng, n: int) -> Any:
        return ridge_solution(records, lam) + rng.normal(0, sigma, (n, records.shape[1] - 1))

    check = ridge_bounds(rest, record, lam=lam, bound_x=bound_x, bound_residual=bound_residual)
    name = (
        f"‖x‖ = {check.norm:.3g}, residual {check.residual:.3g} (M = {bound_residual:g}), θ* moves by"
        f" {check.shift:.3g} of {check.sensitivity:.3g} allowed"
    )
    claim = Claim(gaussian_epsilon(1 / math.sqrt(2 * rho), delta), delta)
    exact = gaussian_epsilon(sigma / check.shift, delta)
    return Subject(Vectorised(many), claim, [(np.concatenate([rest, record[None]]), rest, name)], exact_epsilon=exact)


# --- our own --------------------------------------------------------------------------------------------------------


def our_examples(noise_multiplier: float = 0.8, delta: float = 1e-2) -> Subject:
    """Our example-level DP-SGD: one step of `train_cohort` with Poisson batches, every trial a replica.

    A record is (x, label). To remove one is to make its x zero, whose gradient is zero: our claims say that the number
    of rows is public.
    """
    first = np.zeros((10, 4))
    first[0] = (100.0, 0.0, 0.0, 1.0)
    release = Mechanism("gaussian", noise_multiplier, "add/remove", "poisson", 0.5)
    claim = Claim(epsilon(release, 1, delta), delta)
    pair = (first, np.zeros((10, 4)), "an example with a gradient far beyond the clipping norm, or none")
    return Subject(_our_step(5, noise_multiplier), claim, [pair], exact_epsilon=claim.epsilon, trials=20_000)


def our_examples_fewer(noise_multiplier: float = 0.8, delta: float = 1e-2) -> Subject:
    """The same on three rows or two with batches of two: what our claims do not promise, because they fix the number.

    The sampling rate is 2/3 or 1, so that the row that comes also changes how often the others join. Claimed is the
    larger ε of the two.
    """
    first = np.array([[100.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 1.0], [100.0, 0.0, 0.0, 1.0]])
    release = Mechanism("gaussian", noise_multiplier, "add/remove")
    claim = Claim(epsilon(release, 1, delta), delta)
    pair = (first, first[1:], "an example against the others', or nothing: 3 rows or 2, batch size 2")
    return Subject(_our_step(2, noise_multiplier), claim, [pair], trials=80_000)


def _our_step(batch_size: int, noise_multiplier: float) -> Vectorised:
    from fedsim.randomness import ClientRandomness
    from fedsim.training.batches import ExampleClipping, LocalWork
    from fedsim.training.local import train_cohort

    model = torch.nn.Linear(3, 2, bias=False)
    work = LocalWork("fedsgd", batch_size=batch_size, example_dp=ExampleClipping(1.0, noise_multiplier, "poisson"))

    def many(records: Floats, rng: Rng, n: int) -> Any:
        x, y = torch.tensor(records[:, :-1], dtype=torch.float32), torch.tensor(records[:, -1]).long()
        seed = int(rng.integers(2**62))
        rows = np.arange(len(records))
        randomness = [ClientRandomness(seed, 1, trial) for trial in range(n)]
        done = train_cohort(model, torch.zeros(6), x, y, [rows] * n, work, randomness)
        return done.updates.double().numpy()

    return Vectorised(many)


def our_clients(noise_multiplier: float = 2.0, delta: float = 1e-2) -> Subject:
    """Our client-level defence: the update is clipped, and the client adds the noise before it leaves.

    One update is all that the server sees of the client, which may be replaced by any other: the sensitivity is 2C.
    """
    from fedsim.privacy.mechanisms import add_gaussian, clip

    def many(update: Floats, rng: Rng, n: int) -> Any:
        clipped = clip(torch.tensor(update, dtype=torch.float32).expand(n, -1).contiguous(), 1.0)
        generators = [np.random.default_rng(seed) for seed in rng.integers(2**63, size=n)]
        return add_gaussian(clipped, noise_multiplier, generators).double().numpy()

    there, opposite = np.array([[50.0, 0.0, 0.0, 0.0]]), np.array([[-50.0, 0.0, 0.0, 0.0]])
    release = Mechanism("gaussian", noise_multiplier / 2, "replace")
    claim = Claim(epsilon(release, 1, delta), delta, unit="client", adjacency="replace")
    pair = (there, opposite, "an update far beyond the clipping norm, or its negative")
    return Subject(Vectorised(many), claim, [pair], exact_epsilon=claim.epsilon, trials=20_000)
