# SPDX-License-Identifier: Apache-2.0
"""What a sequence of noisy releases spends, and how much noise a budget needs.

A `Mechanism` says what happens in one release; `account` composes any number of them:

| mechanism                      | pld                                | rdp (dp-accounting)         | prv (Opacus)    |
|--------------------------------|------------------------------------|-----------------------------|-----------------|
| Gaussian, no sampling          | exact closed form (Balle & Wang)   | α/2σ²                       | yes             |
| Gaussian, Poisson, add/remove  | PLD, pessimistic                   | Mironov et al. 2019         | yes             |
| Gaussian, fixed size, replace  | smaller of RDP and exact unsampled | smaller of the two RDPs     | refused         |
| Laplace, no sampling           | PLD, pessimistic                   | Mironov 2017                | refused         |
| Laplace, Poisson, add/remove   | PLD, pessimistic                   | refused                     | refused         |

Whatever is not in the table raises `PrivacyError`; nothing is ever replaced by a number for something else.

The noise multiplier is always noise scale / sensitivity *under the mechanism's own adjacency*. (Under REPLACE_ONE,
dp-accounting's PLD takes the norm of one unit and its RDP the sensitivity; neither convention leaks out of here.)
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedsim.errors import PrivacyError
from fedsim.privacy.claim import Adjacency, Sampling
from fedsim.privacy.gaussian import check_delta, gaussian_delta, gaussian_epsilon
from fedsim.privacy.loss import COARSE, FINE, ROUGH, SMALLEST_DELTA, Grid, Release, composed_delta, composed_epsilon
from fedsim.privacy.renyi import quietly, rdp_delta, rdp_epsilon

Accountant = Literal["pld", "rdp", "prv"]


@dataclass(frozen=True)
class Mechanism:
    """One noisy release of a clipped quantity."""

    kind: Literal["gaussian", "laplace"]
    noise_multiplier: float
    """Standard deviation (Gaussian) or scale b (Laplace) of the noise, divided by the sensitivity under `adjacency`."""
    adjacency: Adjacency
    sampling: Sampling = "none"
    """poisson: each unit joins with probability `sample_rate`, independently; fixed size: a uniform subset."""
    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        """Only combinations for which a theorem is implemented."""
        if not 0 <= self.noise_multiplier < math.inf:
            raise PrivacyError(f"noise_multiplier is {self.noise_multiplier!r}, it must be finite and at least 0")
        if not 0 < self.sample_rate <= 1:
            raise PrivacyError(f"sample_rate is {self.sample_rate!r}, it must be above 0 and at most 1")
        needed = {"none": None, "poisson": "add/remove", "fixed size": "replace"}[self.sampling]
        if needed and self.adjacency != needed:
            raise PrivacyError(f"sampling {self.sampling} is accounted for {needed} only, not for {self.adjacency}")
        if self.sampling == "none" and self.sample_rate != 1:
            raise PrivacyError(f"sample_rate is {self.sample_rate:g} without sampling; name poisson or fixed size")
        if self.sampling == "fixed size" and self.kind != "gaussian":
            raise PrivacyError("sampling fixed size is accounted for gaussian noise only; use poisson sampling")

    @property
    def sampled(self) -> bool:
        """Whether a unit may be left out."""
        return self.sample_rate < 1


@dataclass(frozen=True)
class Account:
    """An epsilon and the name of the theorem or program that it comes from."""

    epsilon: float
    method: str


Steps = Sequence[tuple[Mechanism, int]]


def account(steps: Steps, delta: float, accountant: Accountant = "pld", grid: Grid = FINE) -> Account:
    """The ε at δ of all mechanisms, each released so many times, adaptively and in any order.

    `grid` is the resolution of PLD: a coarse one is faster and says a little more, never less than is true.
    """
    check_delta(delta)
    steps = _nonempty(steps)
    if not steps:
        return Account(0.0, "nothing released")
    if any(mechanism.noise_multiplier == 0 for mechanism, _ in steps):
        return Account(math.inf, "no noise")
    try:
        if any(mechanism.sampling == "fixed size" and mechanism.sampled for mechanism, _ in steps):
            return _account_fixed_size(steps, delta, accountant)
        if accountant == "pld":
            return _account_pld(steps, delta, grid)
        return {"rdp": _account_rdp, "prv": _account_prv}[accountant](steps, delta)
    except ArithmeticError:  # e^loss, or 1/σ², is no number
        return Account(math.inf, f"{accountant}: so little noise that losses are beyond floating-point numbers")


def epsilon(mechanism: Mechanism, compositions: int, delta: float, accountant: Accountant = "pld") -> float:
    """The ε at δ of `compositions` releases of one mechanism."""
    return account([(mechanism, compositions)], delta, accountant).epsilon


def epsilon_curve(
    mechanism: Mechanism, counts: Sequence[int], delta: float, accountant: Accountant = "pld"
) -> list[float]:
    """ε after each number of releases: fine at the largest, coarse (about 1e-5 above) on the way, and never falling."""
    highest, spent = 0.0, {}
    for count in sorted(set(counts)):
        grid = FINE if count == max(counts) else COARSE
        # An upper bound has numerical slack (PRV 0.01), by which that of fewer releases may exceed that of more.
        highest = max(highest, account([(mechanism, count)], delta, accountant, grid).epsilon)
        spent[count] = highest
    return [spent[count] for count in counts]


def delta(mechanism: Mechanism, compositions: int, epsilon: float, accountant: Accountant = "pld") -> float:
    """The δ at ε ≥ 0 of `compositions` releases of one mechanism (PLD, exact Gaussian, or RDP)."""
    if not 0 <= epsilon < math.inf:
        raise PrivacyError(f"epsilon is {epsilon!r}, it must be finite and at least 0")
    steps = _nonempty([(mechanism, compositions)])
    if not steps:
        return 0.0
    if mechanism.noise_multiplier == 0:
        return 1.0
    if accountant == "prv" or (mechanism.sampling == "fixed size" and mechanism.sampled):
        raise PrivacyError("delta at an epsilon is computed by pld or rdp, without fixed-size sampling")
    if accountant == "rdp":
        return rdp_delta(steps, epsilon)
    if _is_plain_gaussian(mechanism):
        return gaussian_delta(_merged_sigma(steps), epsilon)
    return composed_delta(_releases(steps), epsilon)


def noise_multiplier_for(
    target_epsilon: float, mechanism: Mechanism, compositions: int, delta: float, accountant: Accountant = "pld"
) -> float:
    """The smallest noise multiplier that spends at most the target; that of `mechanism` itself is not looked at."""
    return smallest_noise(
        lambda noise: epsilon(dataclasses.replace(mechanism, noise_multiplier=noise), compositions, delta, accountant),
        target_epsilon,
    )


def compositions_for(target_epsilon: float, mechanism: Mechanism, delta: float, accountant: Accountant = "pld") -> int:
    """The largest number of releases that spends at most the target (0, if one is too many already)."""
    few, many = 0, 1
    while epsilon(mechanism, many, delta, accountant) <= target_epsilon:
        few, many = many, 2 * many
        if many > 2**40:
            raise PrivacyError(f"target_epsilon {target_epsilon:g} is not reached in 10^12 releases; use less noise")
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if epsilon(mechanism, middle, delta, accountant) <= target_epsilon else (few, middle)
    return few


def smallest_noise(spends: Callable[[float], float], target_epsilon: float, tolerance: float = 1e-4) -> float:
    """The smallest σ with spends(σ) ≤ target, within a relative tolerance, always on the side that keeps the budget.

    `spends` must not increase in σ. ε is nearly a power of σ, so the search interpolates in logarithms and bisects
    where that does not help.
    """
    if not 0 < target_epsilon < math.inf:
        raise PrivacyError(f"target_epsilon is {target_epsilon!r}, it must be positive and finite")
    low, high = (1e-2, math.inf), (1e6, 0.0)  # (σ, ε): low spends too much, high does not
    sigma = 1.0
    for _ in range(100):
        spent = spends(sigma)
        low, high = (low, (sigma, spent)) if spent <= target_epsilon else ((sigma, spent), high)
        if high[0] <= low[0] * (1 + tolerance):
            break
        sigma = _next_sigma(low, high, target_epsilon, tolerance)
    if high[1] == 0.0 and spends(high[0]) > target_epsilon:
        raise PrivacyError(
            f"target_epsilon {target_epsilon:g} is not reached with any noise up to a multiplier of 1e6; raise it"
        )
    if low[1] == math.inf and low[0] == 1e-2:
        raise PrivacyError(f"target_epsilon {target_epsilon:g} needs no noise to speak of; name a noise_multiplier")
    return high[0]


def _next_sigma(low: tuple[float, float], high: tuple[float, float], target: float, tolerance: float) -> float:
    """A point between, where the line through both (or of slope −1 through one) in logarithms meets the target."""
    if math.isfinite(low[1]) and high[1] > 0:
        slope = math.log(high[1] / low[1]) / math.log(high[0] / low[0])
        anchor = high
    else:
        slope, anchor = -1.0, low if math.isfinite(low[1]) else high
    guess = math.sqrt(low[0] * high[0])
    if anchor[1] > 0 and slope < 0:
        step = math.log(target / anchor[1]) / slope
        # a nudge to the far side of the guess, so that the next interval is short at both ends
        step += math.copysign(0.4 * tolerance, step) if step else 0.0
        along = anchor[0] * math.exp(min(max(step, -2.0), 2.0))
        guess = along if low[0] < along < high[0] else guess  # where ε falls to 0, no line leads there
    inside = (low[0] * (1 + 0.3 * tolerance), high[0] * (1 - 0.3 * tolerance))
    return min(max(guess, inside[0]), inside[1])


# --- the accountants ------------------------------------------------------------------------------------------------


def _nonempty(steps: Steps) -> list[tuple[Mechanism, int]]:
    """The steps that happen at least once, equal mechanisms together, all of one adjacency.

    Noise beyond 1e9, and rates below 1e-100, whose squares are no numbers, are taken for these: that is never less.
    """
    counts: dict[Mechanism, int] = {}
    for mechanism, count in steps:
        if count < 0 or count != int(count):
            raise PrivacyError(f"compositions is {count!r}, it must be a whole number, at least 0")
        mechanism = dataclasses.replace(
            mechanism,
            noise_multiplier=min(mechanism.noise_multiplier, 1e9),
            sample_rate=max(mechanism.sample_rate, 1e-100),
        )
        if count:
            counts[mechanism] = counts.get(mechanism, 0) + int(count)
    if len({mechanism.adjacency for mechanism in counts}) > 1:
        raise PrivacyError("mechanisms under add/remove and under replace cannot be composed into one epsilon")
    return list(counts.items())


def _is_plain_gaussian(mechanism: Mechanism) -> bool:
    return mechanism.kind == "gaussian" and not mechanism.sampled


def _merged_sigma(steps: Steps) -> float:
    """Gaussian releases compose exactly: 1/σ² = Σ count/σᵢ² (Dong, Roth & Su 2022, Corollary 3.3)."""
    return 1 / math.sqrt(math.fsum(count / mechanism.noise_multiplier**2 for mechanism, count in steps))


def _releases(steps: Steps) -> dict[Release, int]:
    plain = [step for step in steps if _is_plain_gaussian(step[0])]
    rest = [step for step in steps if not _is_plain_gaussian(step[0])]
    others: Counter[Release] = Counter()
    for mechanism, count in rest:  # of a rate of 1, sampled or not are the same release
        others[Release(mechanism.kind, mechanism.noise_multiplier, mechanism.sample_rate)] += count
    return others | ({Release("gaussian", _merged_sigma(plain)): 1} if plain else {})


def _account_pld(steps: Steps, delta: float, grid: Grid) -> Account:
    if all(_is_plain_gaussian(mechanism) for mechanism, _ in steps):
        return Account(gaussian_epsilon(_merged_sigma(steps), delta), "exact Gaussian (Balle & Wang 2018)")
    return Account(
        composed_epsilon(_releases(steps), delta, grid),
        "PLD (losses by dp-accounting, composed pessimistically by fedsim)",
    )


def _account_rdp(steps: Steps, delta: float) -> Account:
    return Account(rdp_epsilon(steps, delta), "RDP (dp-accounting)")


def _account_fixed_size(steps: Steps, delta: float, accountant: Accountant) -> Account:
    """Sampling without replacement has an RDP bound only (Wang, Balle & Kasiviswanathan 2019, Theorem 27).

    It can be worse than no amplification at all, so the bound that ignores the sampling stands beside it: both hold,
    hence the smaller does.
    """
    if accountant == "prv":
        raise PrivacyError("accountant prv does not know fixed-size sampling; use pld or rdp")
    sampled = _account_rdp(steps, delta)
    whole = _nonempty([(dataclasses.replace(m, sampling="none", sample_rate=1.0), count) for m, count in steps])
    unsampled = _account_pld(whole, delta, FINE) if accountant == "pld" else _account_rdp(whole, delta)
    if unsampled.epsilon <= sampled.epsilon:
        return Account(unsampled.epsilon, f"{unsampled.method}, sampling ignored")
    return Account(sampled.epsilon, "RDP of sampling without replacement (Wang et al. 2019, dp-accounting)")


def _account_prv(steps: Steps, delta: float) -> Account:
    if any(mechanism.kind != "gaussian" for mechanism, _ in steps):
        raise PrivacyError("accountant prv knows gaussian noise only; use pld for laplace")
    least = max(SMALLEST_DELTA, 2e-14 * sum(count for _, count in steps))
    if delta < least:  # the rounding errors of Opacus' Fourier transform grow with the releases, and it does not tell
        raise PrivacyError(f"delta is {delta:g}, and accountant prv holds from {least:.2g} on here; use pld")
    if composed_epsilon(_releases(steps), delta, ROUGH) > 500:  # e^ε is no number soon: it would find that in minutes
        raise PrivacyError("accountant prv computes no ε beyond 500; use pld")
    from opacus.accountants import PRVAccountant  # here, because it takes seconds to import

    opacus = PRVAccountant()
    opacus.history = [(mechanism.noise_multiplier, mechanism.sample_rate, count) for mechanism, count in steps]
    try:
        spent = quietly(opacus.get_epsilon, delta)
    except (RuntimeError, ValueError, MemoryError) as error:
        raise PrivacyError(f"accountant prv cannot compute this ({error}); use pld") from error
    if not math.isfinite(spent):
        raise PrivacyError("accountant prv finds no finite number here; use pld")
    if all(_is_plain_gaussian(mechanism) for mechanism, _ in steps):  # an upper bound is not below what is exact
        spent = max(spent, gaussian_epsilon(_merged_sigma(steps), delta))
    return Account(max(0.0, float(spent)), "PRV (Opacus, upper bound)")
