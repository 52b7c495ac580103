# SPDX-License-Identifier: Apache-2.0
"""Privacy loss distributions (PLD): the numerical composition of mechanisms that are not plain Gaussian.

The distribution of one release comes from dp-accounting (connect-the-dots, pessimistic: what it says is never below the
truth, Doroshenko et al. 2022). It is composed here by one FFT power, as dp-accounting does, with three differences. A
curve over a hundred rounds is cheap: transforms are kept and reused, and the Chernoff bound that decides how much of
the line is needed uses orders over many scales, so that less of it is. Rounding errors of the transform are bounded and
counted as infinite loss. Losses beyond 745, where e^-loss is no number, are exact. Tests hold one against the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, rfft

from fedsim.errors import PrivacyError

Floats = NDArray[np.float64]

INTERVAL = 1e-4
"""Grid of the privacy loss; the error in epsilon is about (number of compositions) x INTERVAL^2, and never negative."""
FEWEST = 1000
"""Points of the line of one release at the least."""
TAIL = 1e-15
"""Mass outside the window of a composition: it is counted as infinite loss."""
SMALLEST_DELTA = 1e-10
"""Below this, the rounding errors of the Fourier transform would show."""
_KEPT = 2**17  # a transform with more points than this is not kept
_ORDERS = np.concatenate([sign * np.geomspace(1e-3, 1e5, 24) for sign in (-1, 1)])


@dataclass(frozen=True)
class Grid:
    """The most points of the line of one release, and of all together; INTERVAL is doubled until they fit."""

    one: int
    all: int


FINE, COARSE, ROUGH = Grid(250_000, 2**22), Grid(32_000, 2**16), Grid(8_000, 2**13)
"""All give upper bounds. Fine: for what is claimed. Coarse: about 1e-5 above, for curves. Rough: 1e-3, to compare."""


@dataclass(frozen=True)
class Release:
    """One release of Gaussian or Laplace noise at sensitivity 1, Poisson sampled with a rate, under add/remove."""

    kind: Literal["gaussian", "laplace"]
    noise_multiplier: float
    sample_rate: float = 1.0

    def interval(self, points: int) -> float:
        """INTERVAL, doubled until the line of one release fits: small noise has losses of hundreds.

        Or halved, until the line has FEWEST points: a unit that is rarely sampled has losses of a millionth.
        """
        noise = self.noise_multiplier
        span = 0.5 / noise**2 + 10 / noise if self.kind == "gaussian" else 2 / noise
        sampled = math.log1p(self.sample_rate * math.expm1(span)) if span < 700 else span
        doublings = math.ceil(math.log2(span / (points * INTERVAL)))
        halvings = min(20, math.ceil(math.log2(FEWEST * INTERVAL / sampled)))  # 1e-10: dp-accounting has digits left
        return INTERVAL * 2.0 ** (doublings if doublings > 0 else -max(0, halvings))


@dataclass(frozen=True, eq=False)
class _Pmf:
    """Probabilities of the losses (lowest + i) x interval, i = 0, 1, ..., and of an infinite loss."""

    interval: float
    lowest: int
    probabilities: Floats
    infinite: float
    log_moments: Floats
    """ln E[exp(order x (loss - lowest loss))] for each of _ORDERS, over the finite losses."""
    _transforms: dict[int, NDArray[np.complex128]]

    def transform(self, size: int) -> NDArray[np.complex128]:
        """The Fourier transform on `size` points; longer lines wrap around, as a transform's do."""
        if size in self._transforms:
            return self._transforms[size]
        line = self.probabilities
        if len(line) > size:
            line = np.pad(line, (0, -len(line) % size)).reshape(-1, size).sum(axis=0)
        transform: NDArray[np.complex128] = rfft(line, size)
        if size <= _KEPT:
            self._transforms[size] = transform
        return transform


@lru_cache(maxsize=64)
def _directions(release: Release, interval: float) -> tuple[_Pmf, ...]:
    """The loss distributions of removing and of adding a unit (one, where they are equal)."""
    from dp_accounting.pld import privacy_loss_distribution as pld  # here, because it takes a second to import

    if release.kind == "gaussian":
        both = pld.from_gaussian_mechanism(
            release.noise_multiplier, sampling_prob=release.sample_rate, value_discretization_interval=interval
        )
    else:
        both = pld.from_laplace_mechanism(
            release.noise_multiplier, sampling_prob=release.sample_rate, value_discretization_interval=interval
        )
    # dp-accounting shows the distributions themselves only by private names; `test_loss.py` guards them.
    pmfs = [both._pmf_remove] if both._symmetric else [both._pmf_remove, both._pmf_add]
    return tuple(_pmf(pmf.to_dense_pmf(), interval) for pmf in pmfs)


def _pmf(dense: Any, interval: float) -> _Pmf:
    probabilities = np.maximum(np.asarray(dense._probs, dtype=np.float64), 0.0)
    losses = interval * np.arange(len(probabilities))
    with np.errstate(divide="ignore"):
        logs = np.log(probabilities)
    log_moments = np.array([_log_sum_exp(order * losses + logs) for order in _ORDERS])
    return _Pmf(interval, int(dense._lower_loss), probabilities, float(dense._infinity_mass), log_moments, {})


def _log_sum_exp(values: Floats) -> float:
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).sum()))


def composed_epsilon(releases: Mapping[Release, int], delta: float, grid: Grid = FINE) -> float:
    """The smallest ε at which everything together is (ε, δ)-DP, by the pessimistic PLD."""
    if delta < SMALLEST_DELTA:
        raise PrivacyError(f"delta is {delta:g}, below what PLD can resolve ({SMALLEST_DELTA:g}); use accountant rdp")
    spent = max(_epsilon(*line, delta) for line in _compose(releases, grid))
    if math.isinf(spent):
        raise PrivacyError(f"delta is {delta:g}, below what PLD can resolve for so many releases; use accountant rdp")
    return spent


def composed_delta(releases: Mapping[Release, int], epsilon: float, grid: Grid = FINE) -> float:
    """The smallest δ at which everything together is (ε, δ)-DP, by the pessimistic PLD."""
    return max(_delta(*line, epsilon) for line in _compose(releases, grid))


_Line = tuple[float, int, Floats, float]  # interval, lowest, probabilities, infinite


def _compose(releases: Mapping[Release, int], grid: Grid) -> list[_Line]:
    """The loss distributions, one for each direction, of all releases one after the other."""
    interval = max(release.interval(grid.one) for release in releases)
    while True:
        parts = [(_directions(release, interval), count) for release, count in releases.items()]
        # a symmetric release serves both directions
        directions = [
            [(pmfs[min(side, len(pmfs) - 1)], count) for pmfs, count in parts]
            for side in range(max(len(pmfs) for pmfs, _ in parts))
        ]
        windows = [_window(direction, interval) for direction in directions]
        if max(high - low for low, high in windows) < grid.all:
            return [_convolve(d, w, interval) for d, w in zip(directions, windows, strict=True)]
        interval *= 2


def _window(parts: list[tuple[_Pmf, int]], interval: float) -> tuple[int, int]:
    """Grid points that hold all but TAIL of the composed mass, above the sum of the lowest (Chernoff bound)."""
    log_moments = sum((count * pmf.log_moments for pmf, count in parts), np.zeros(len(_ORDERS)))
    bounds = (log_moments + math.log(2 / TAIL)) / (_ORDERS * interval)
    longest = sum(count * (len(pmf.probabilities) - 1) for pmf, count in parts)
    low = max(0, math.floor(bounds[_ORDERS < 0].max()))
    high = min(longest, math.ceil(bounds[_ORDERS > 0].min()))
    return low, max(low, high)


def _convolve(parts: list[tuple[_Pmf, int]], window: tuple[int, int], interval: float) -> _Line:
    low, high = window
    size = 1 << max(10, (high - low).bit_length())
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    for pmf, count in parts:
        spectrum *= _power(pmf.transform(size), count)
    line = np.roll(irfft(spectrum, size), -(low % size))[: high - low + 1]
    lowest = low + sum(count * pmf.lowest for pmf, count in parts)
    finite = sum(count * math.log1p(-pmf.infinite) for pmf, count in parts)
    # Each factor of the spectrum has a relative error of a few ulp, so by Parseval the line has (count x that) in L2,
    # and √size times more in L1, which is how far δ can be off. Negative entries are errors; 0 only adds mass.
    ulps = 4 * (sum(count for _, count in parts) + math.log2(size))
    error = ulps * float(np.finfo(np.float64).eps) * math.sqrt(size) * float(np.linalg.norm(line))
    return interval, lowest, np.maximum(line, 0.0), TAIL + error - math.expm1(finite)


def _power(base: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """Entry-wise integer power by squaring: faster, and with less error, than a complex logarithm."""
    result = np.ones_like(base)
    while exponent:
        if exponent & 1:
            result = result * base
        exponent >>= 1
        base = base * base if exponent else base
    return result


def _tails(interval: float, probabilities: Floats, infinite: float) -> tuple[Floats, Floats]:
    """At each loss l: P[loss ≥ l], and e^l times the mass that the other federation gives to those outcomes.

    Their difference is δ(l) = E[(1 − e^(l − loss))₊] at the grid points.
    """
    from scipy.signal import lfilter  # takes half a second to import, and most runs claim nothing

    reverse = probabilities[::-1]
    upper = infinite + np.cumsum(reverse)[::-1]
    lower = lfilter([1.0], [1.0, -math.exp(-interval)], reverse)[::-1]
    return upper, lower


def _epsilon(interval: float, lowest: int, probabilities: Floats, infinite: float, delta: float) -> float:
    if infinite > delta:
        return math.inf
    upper, lower = _tails(interval, probabilities, infinite)
    enough = np.flatnonzero(upper - lower <= delta)
    # beyond the last grid point δ is the infinite mass, so that the last point can stand in
    first = int(enough[0]) if len(enough) else len(probabilities) - 1
    if upper[first] <= delta:
        return max(0.0, interval * (lowest + first))
    return max(0.0, interval * (lowest + first) + math.log((upper[first] - delta) / lower[first]))


def _delta(interval: float, lowest: int, probabilities: Floats, infinite: float, epsilon: float) -> float:
    losses = interval * (lowest + np.arange(len(probabilities)))
    above = losses > epsilon
    return min(1.0, infinite - float(np.dot(probabilities[above], np.expm1(epsilon - losses[above]))))
