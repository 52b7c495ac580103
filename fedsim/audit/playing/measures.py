# SPDX-License-Identifier: Apache-2.0
"""How well an adversary tells two worlds apart, each number with an interval that holds for any number of trials.

| measure       | from which trials                                         | interval                             |
|---------------|-----------------------------------------------------------|--------------------------------------|
| AUC           | all: no threshold is chosen                               | Chernoff's bound for U-statistics    |
| TPR at an FPR | threshold: a quantile of one half; rates: the other half  | Clopper-Pearson                      |
| TPR − FPR     | threshold: the best on one half; rates: the other half    | Clopper-Pearson of the right guesses |

The trials must be independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.audit.planner import fewest
from fedsim.audit.scores.shares import clopper_pearson

Numbers = NDArray[np.float64]
Bits = NDArray[np.bool_]
ALARM_RATES = (0.001, 0.01, 0.1)
"""The false positive rates at which true positives are counted."""
_SURE = 0.95
"""With this probability so many trials as are advised resolve a false positive rate."""


@dataclass(frozen=True)
class Interval:
    """A number that was measured, and the ends between which the truth lies with the confidence of the audit."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """Ready for JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}

    @classmethod
    def from_dict(cls, fields: Mapping[str, float]) -> Interval:
        """What `to_dict` wrote."""
        return cls(fields["value"], fields["low"], fields["high"])

    def __str__(self) -> str:
        return f"{self.value:.3f} ({_down(self.low)} to {_up(self.high)})"


@dataclass(frozen=True)
class RateAt:
    """The TPR where at most a share `at` of the trials without the record is called "in"; None: cannot be resolved."""

    at: float
    hits: Interval | None
    alarms: Interval | None
    """What the FPR came to on the trials that were counted."""
    needed: int
    """Trials of the game that resolve it."""

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        ends = {name: found and found.to_dict() for name, found in (("hits", self.hits), ("alarms", self.alarms))}
        return {"at": self.at, **ends, "needed": self.needed}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RateAt:
        """What `to_dict` wrote."""
        hits, alarms = (fields[name] and Interval.from_dict(fields[name]) for name in ("hits", "alarms"))
        return cls(fields["at"], hits, alarms, fields["needed"])

    def sentence(self) -> str:
        """For people."""
        if self.hits is None or self.alarms is None:
            return f"cannot be resolved with so few trials; about {self.needed:,} can"
        return f"{self.hits}, where the FPR came to {self.alarms}"


def auc(score: Numbers, truth: Bits, confidence: float) -> Interval:
    """P[score of a true trial > of a false one], ties counted half.

    The statistic is the mean, over all ways to pair m = min(#true, #false) trials of either kind, of averages of m
    independent values in [0, 1]. So Chernoff's bound holds for it as for a binomial share of m (Hoeffding 1963, section
    5a): P[U ≥ u] ≤ exp(−m KL(u ‖ AUC)). It needs no normal approximation, and is wider than DeLong's.
    """
    from scipy.stats import rankdata

    ranks, ins = rankdata(score), int(truth.sum())
    outs = len(truth) - ins
    if not ins or not outs:
        return Interval(0.5, 0.0, 1.0)
    value = float((ranks[truth].sum() - ins * (ins + 1) / 2) / (ins * outs))
    most = math.log(2 / (1 - confidence)) / min(ins, outs)
    low = _edge(lambda share: _divergence(value, share) <= most, value, 0.0)
    return Interval(value, low, _edge(lambda share: _divergence(value, share) <= most, value, 1.0))


def rates_at(score: Numbers, truth: Bits, confidence: float, coin: float = 0.5) -> list[RateAt]:
    """The TPR at each of `ALARM_RATES`, at the threshold that keeps the FPR on average at most there.

    With n false trials in the first half, a new one exceeds the k-th largest of their scores with probability at most
    k/(n + 1), so that k = ⌊at (n + 1)⌋; where k is 0 no threshold is known to keep the rate.
    """
    half = len(truth) // 2
    alarms = np.sort(score[:half][~truth[:half]])[::-1]
    found = []
    for at in ALARM_RATES:
        k, needed = math.floor(at * (len(alarms) + 1) + 1e-9), trials_to_resolve(at, coin)
        if not k:
            found.append(RateAt(at, None, None, needed))
            continue
        said, is_in = score[half:] > alarms[k - 1], truth[half:]
        hits, wrong = said[is_in], said[~is_in]
        found.append(RateAt(at, _share(hits, confidence), _share(wrong, confidence), needed))
    return found


@lru_cache(maxsize=64)
def trials_to_resolve(at: float, coin: float = 0.5) -> int:
    """Trials of a game whose first half probably has the 1/at − 1 false trials that resolve a false positive rate."""
    from scipy.stats import binom

    least = math.ceil(1 / at - 1e-9) - 1
    found = fewest(lambda n: bool(binom.sf(least - 1, n // 2, 1 - coin) >= _SURE), start=16)
    assert found is not None  # a rate of at least 0.001 needs some thousands
    return 100 * math.ceil(found / 100)


def advantage(said: Bits, truth: Bits, confidence: float, coin: float = 0.5) -> Interval:
    """TPR − FPR of a guess that was fixed on other trials.

    With a fair coin the first m trials of either kind are counted, m as many as there are of both: then TPR − FPR is
    twice the share of right guesses, less one, which Clopper-Pearson bounds. (That the two kinds are guessed right with
    different probabilities only makes tails thinner: Hoeffding 1956.) Else each rate is given half of the error.
    """
    hits, alarms = said[truth], said[~truth]
    if coin == 0.5:
        m = min(len(hits), len(alarms))
        right = int(hits[:m].sum() + m - alarms[:m].sum())
        low, high = clopper_pearson(right, 2 * m, confidence) if m else (0.0, 1.0)
        return Interval(right / m - 1 if m else 0.0, 2 * low - 1, 2 * high - 1)
    each = (1 + confidence) / 2
    first, second = _share(hits, each), _share(alarms, each)
    return Interval(first.value - second.value, first.low - second.high, first.high - second.low)


def widest_threshold(score: Numbers, truth: Bits) -> float:
    """Where "in" from it on has the largest TPR − FPR."""
    ins, outs = max(1, int(truth.sum())), max(1, int((~truth).sum()))
    order = np.argsort(-score, kind="stable")
    gained = np.cumsum(truth[order]) / ins - np.cumsum(~truth[order]) / outs
    last = np.append(np.diff(score[order]) != 0, True)  # of equal scores only the last can be a threshold
    return float(score[order][np.argmax(np.where(last, gained, -np.inf))])


def _share(cases: Bits, confidence: float) -> Interval:
    right, of = int(cases.sum()), len(cases)
    return Interval(right / max(of, 1), *clopper_pearson(right, of, confidence)) if of else Interval(0.0, 0.0, 1.0)


def _divergence(p: float, q: float) -> float:
    """KL(p ‖ q) of two coins."""
    parts = ((p, q), (1 - p, 1 - q))
    return sum(a * math.log(a / b) if b else math.inf for a, b in parts if a)


def _edge(holds: Callable[[float], bool], inside: float, end: float) -> float:
    """Between `inside`, where it holds, and `end`: the place from which on it does not, on the side towards `end`."""
    if holds(end):
        return end
    for _ in range(60):
        middle = (inside + end) / 2
        inside, end = (middle, end) if holds(middle) else (inside, middle)
    return end


def _down(end: float) -> str:
    return f"{math.floor(1000 * end + 1e-9) / 1000:.3f}"


def _up(end: float) -> str:
    return f"{math.ceil(1000 * end - 1e-9) / 1000:.3f}"
