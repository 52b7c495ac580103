# SPDX-License-Identifier: Apache-2.0
"""Mechanisms whose epsilon is known, to hold the estimators against: what a tester of testers needs.

A mechanism is told which canaries are in, (runs, canaries), and answers one score for each. The truth is ε at δ and,
beside it, the least μ for which the mechanism keeps the curve of μ-GDP: what the estimators of that model speak about.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from fedsim.audit.estimation.arguments import Floats
from fedsim.audit.estimation.counts import gdp_epsilon
from fedsim.audit.limits.tradeoff import Curve, approximate_dp, sampled_gaussian
from fedsim.privacy.accounting import Mechanism, epsilon
from fedsim.privacy.gaussian import gaussian_delta

Inside = NDArray[np.bool_]


@dataclass(frozen=True)
class Known:
    """A mechanism, its truth, and a threshold for its scores that was fixed before any was seen."""

    name: str
    draw: Callable[[np.random.Generator, Inside], Floats]
    epsilon: Callable[[float], float]
    """δ -> ε"""
    mu: float
    """The least μ for which it is μ-GDP."""
    threshold: float
    independent: bool = True
    """Whether the canaries of a run say nothing about each other."""

    def epsilon_gdp(self, delta: float) -> float:
        """ε at δ of its least GDP curve: never less than its own."""
        return gdp_epsilon(self.mu, delta)


def gaussian(mu: float, threshold: float = 1.5) -> Known:
    """N(μ, 1) against N(0, 1)."""

    def draw(rng: np.random.Generator, inside: Inside) -> Floats:
        return rng.standard_normal(inside.shape) + mu * inside

    return Known(f"Gaussian, μ = {mu:g}", draw, lambda delta: gdp_epsilon(mu, delta), mu, threshold)


def laplace(pure: float) -> Known:
    """Laplace noise of scale 1/ε₀ on a count: ε(δ) = ε₀ + 2 ln(1 − δ)."""

    def draw(rng: np.random.Generator, inside: Inside) -> Floats:
        return rng.laplace(0, 1 / pure, inside.shape) + inside

    def curve(x: float) -> float:
        least = math.exp(-pure) / 2
        return 1 - x / (2 * least) if x < least else least / (2 * x) if x <= 0.5 else math.exp(-pure) * (1 - x)

    return Known(f"Laplace, ε = {pure:g}", draw, lambda delta: pure + 2 * math.log1p(-delta), least_mu(curve), 1.0)


def randomised_response(pure: float) -> Known:
    """The truth with probability e^ε₀/(1 + e^ε₀), else its opposite: ε(δ) = ln(e^ε₀ − δ (1 + e^ε₀))."""
    truthful = 1 / (1 + math.exp(-pure))

    def draw(rng: np.random.Generator, inside: Inside) -> Floats:
        return (inside ^ (rng.random(inside.shape) > truthful)).astype(np.float64)

    def at(delta: float) -> float:
        return math.log(max(1.0, math.exp(pure) - delta * (1 + math.exp(pure))))

    return Known(f"randomised response, ε = {pure:g}", draw, at, least_mu(approximate_dp(pure, 0.0)), 0.5)


def subsampled_gaussian(sigma: float, rate: float) -> Known:
    """N(1, σ²) with probability `rate`, else (and without the canary) N(0, σ²); one release, add/remove."""

    def draw(rng: np.random.Generator, inside: Inside) -> Floats:
        return rng.normal(0, sigma, inside.shape) + (inside & (rng.random(inside.shape) < rate))

    mechanism = Mechanism("gaussian", sigma, "add/remove", "poisson", rate)
    mu = least_mu(sampled_gaussian(sigma, rate, 1))
    name = f"subsampled Gaussian, σ = {sigma:g}, q = {rate:g}"
    return Known(name, draw, lambda delta: epsilon(mechanism, 1, delta), mu, 2 * sigma)


def correlated(everything: float, mu: float = 1.0) -> Known:
    """With probability p all memberships are revealed by randomised response of accuracy a, else none of them.

    a is the largest with p (a − e^ε (1 − a))₊ ≤ δ_μ-GDP(ε) for all ε, so that each canary for itself is protected by
    μ-GDP (`shared/design/audit.md`, T1): 30% false claims where canaries are taken to be independent.
    """
    p = everything
    grid = np.linspace(0.0, 30.0, 3001)
    allowed = np.array([gaussian_delta(1 / mu, float(x)) for x in grid])
    accuracy = float(((allowed / p + np.exp(grid)) / (1 + np.exp(grid))).min())

    def draw(rng: np.random.Generator, inside: Inside) -> Floats:
        told = (inside ^ (rng.random(inside.shape) > accuracy)).astype(np.float64)
        revealed = rng.random((len(inside), 1)) < p
        # whoever learns nothing guesses by coins
        return np.where(revealed, told, rng.random(inside.shape))

    def at(delta: float) -> float:
        return math.log(max(1.0, (accuracy - delta / p) / (1 - accuracy)))

    return Known(f"correlated, p = {p:g}", draw, at, mu, 0.5, independent=False)


def least_mu(curve: Curve) -> float:
    """The least μ with f ≥ G_μ: the supremum of Φ⁻¹(1 − x) − Φ⁻¹(f(x)), on a fine grid of x."""
    x = np.concatenate([np.geomspace(1e-12, 0.01, 2000), np.linspace(0.01, 0.99, 4001)])
    return float(np.max(-ndtri(x) - ndtri([curve(float(v)) for v in x])))


KNOWN = (gaussian(1.0), laplace(1.0), randomised_response(1.0), subsampled_gaussian(1.0, 0.3))
"""The four of `make calibrate`, each of about the ε for which audits are made."""
