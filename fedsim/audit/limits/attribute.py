# SPDX-License-Identifier: Apache-2.0
"""What differential privacy allows somebody who infers an attribute, for any prior: exactly, by linear programming.

The mechanism and the inference together are a channel from the value z to an answer, P_z(o), and it is (ε, δ)-DP if the
mechanism is; every such channel is also a mechanism. So the best that any adversary can do to any mechanism is

    maximise Σ_z π_z P_z(z)                       (success)
          or Σ_z π_z P_z(z) − Σ_o π_o Σ_z π_z P_z(o)   (advantage over the same answers on an independent person)

over all channels. Values of the same probability can be swapped, so that only one of each kind is a variable: a prior
of a million values, of which two stand out, has a program of eight variables.

Under `replace`, all P_z are close to each other; under `add/remove`, to the run without the person, Q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from fedsim.audit.limits.ranges import checked, checked_prior
from fedsim.errors import PrivacyError
from fedsim.privacy.claim import Adjacency
from fedsim.privacy.loss import Floats

_CERTAIN = 30.0  # e^-30 is less than the program resolves: such an ε protects nothing
_MOST_VARIABLES = 70_000  # half a minute
_Row = dict[int, float]


def attribute_advantage(
    epsilon: float, delta: float, prior: Sequence[float], *, adjacency: Adjacency = "replace"
) -> float:
    """The most by which guesses about a person can be right more often than the same guesses about another person.

    Exact for any prior (a reconstruction advantage, RAD, at η = 0; Guerra-Balboa et al., arXiv 2603.12142). For two
    values it is 2 π₁ π₂ (e^ε − 1 + 2δ)/(e^ε + 1).
    """
    groups = _groups(epsilon, delta, prior)
    most = 1 - float(sum(n * p * p for p, n in groups))
    tv = min(1.0, math.tanh(epsilon / 2) + 2 * delta / (math.exp(min(epsilon, 700.0)) + 1))
    if adjacency == "replace" and (len(prior) == 2 or tv == 0):
        return tv * most
    return min(most, _optimum(epsilon, delta, groups, "advantage", adjacency))


def attribute_success(
    epsilon: float, delta: float, prior: Sequence[float], *, adjacency: Adjacency = "replace"
) -> float:
    """The most that any guess about a person's attribute can be right; exact for any prior, at least its largest."""
    groups = _groups(epsilon, delta, prior)
    return min(1.0, max(max(p for p, _ in groups), _optimum(epsilon, delta, groups, "success", adjacency)))


def _groups(epsilon: float, delta: float, prior: Sequence[float]) -> tuple[tuple[float, int], ...]:
    """Each probability that occurs, and how often; rounded to 15 digits, so that thirds are equal."""
    checked(epsilon, 0.0, delta)
    weights = checked_prior(prior)
    values, counts = np.unique(np.round(weights / weights.sum(), 15), return_counts=True)
    return tuple((float(p), int(n)) for p, n in zip(values, counts, strict=True))


@lru_cache(maxsize=1024)
def _optimum(
    epsilon: float, delta: float, groups: tuple[tuple[float, int], ...], aim: str, adjacency: Adjacency
) -> float:
    if epsilon >= _CERTAIN or delta == 1:
        return 1.0
    program = _Program(groups)
    if delta == 0:
        program.ratios(epsilon, adjacency)
    else:
        program.slacks(epsilon, delta, adjacency)
    return program.solve(program.success() if aim == "success" else program.advantage())


class _Program:
    """Variables, for kinds g, h of values: P_z(z), P_z(o) for another o of z's kind, P_z(o) for o of kind h, Q(o)."""

    def __init__(self, groups: tuple[tuple[float, int], ...]) -> None:
        self.p, self.n = [p for p, _ in groups], [n for _, n in groups]
        self.kinds = range(len(groups))
        self.size = 0
        self.own = [self._new() for _ in self.kinds]
        self.same = [self._new() for _ in self.kinds]
        self.other = [[-1 if g == h else self._new() for h in self.kinds] for g in self.kinds]
        self.base = [self._new() for _ in self.kinds]
        self.rows: list[_Row] = []
        self.limits: list[float] = []
        self.sums = [
            {self.own[g]: 1.0, self.same[g]: self.n[g] - 1.0}
            | {self.other[g][h]: float(self.n[h]) for h in self.kinds if h != g}
            for g in self.kinds
        ]

    def _new(self) -> int:
        self.size += 1
        return self.size - 1

    def _column(self, h: int) -> list[int]:
        """All variables that are the probability of an answer of kind h."""
        same = [self.same[h]] if self.n[h] > 1 else []
        return [self.own[h], *same, *(self.other[g][h] for g in self.kinds if g != h)]

    def ratios(self, epsilon: float, adjacency: Adjacency) -> None:
        """δ = 0: an answer has nearly the same probability for all values: between t and e^ε t, or e^∓ε Q."""
        self._affordable(0)
        decay = math.exp(-epsilon)
        for h in self.kinds:
            for v in self._column(h):
                self._at_most({v: decay, self.base[h]: -1.0})
                self._at_most({self.base[h]: 1.0 if adjacency == "replace" else decay, v: -1.0})
        if adjacency == "add/remove":
            self.sums.append({self.base[h]: float(self.n[h]) for h in self.kinds})

    def slacks(self, epsilon: float, delta: float, adjacency: Adjacency) -> None:
        """δ > 0: Σ_o (P(o) − e^ε P'(o))₊ ≤ δ for all neighbours P and P', in both directions."""
        if adjacency == "add/remove":
            self.sums.append({self.base[h]: float(self.n[h]) for h in self.kinds})
            pairs = [self._against_base(g) for g in self.kinds]
        else:
            pairs = [self._against_own_kind(g) for g in self.kinds if self.n[g] > 1]
            pairs += [self._against_kind(g, k) for g in self.kinds for k in self.kinds if g < k]
        self._affordable(2 * sum(map(len, pairs)))
        for pair in pairs:
            for turned in (pair, [(b, a, times) for a, b, times in pair]):
                self._hockey_stick(turned, epsilon, delta)

    def _affordable(self, more: int) -> None:
        if self.size + more > _MOST_VARIABLES:
            raise PrivacyError(
                f"prior has {len(self.n)} different probabilities, which are too many for an exact answer;"
                " round them so that fewer differ, or use urero_prior, which is a bound"
            )

    def _hockey_stick(self, pair: list[tuple[int, int, float]], epsilon: float, delta: float) -> None:
        total: _Row = {}
        for a, b, times in pair:
            slack = self._new()
            self._at_most({a: math.exp(-epsilon), b: -1.0, slack: -math.exp(-epsilon)})
            total[slack] = times
        self.rows.append(total)
        self.limits.append(delta)

    def _against_base(self, g: int) -> list[tuple[int, int, float]]:
        cells = [(self.own[g], self.base[g], 1.0), (self.same[g], self.base[g], self.n[g] - 1.0)]
        cells += [(self.other[g][h], self.base[h], float(self.n[h])) for h in self.kinds if h != g]
        return [cell for cell in cells if cell[2] > 0]

    def _against_own_kind(self, g: int) -> list[tuple[int, int, float]]:
        return [(self.own[g], self.same[g], 1.0), (self.same[g], self.own[g], 1.0)]

    def _against_kind(self, g: int, k: int) -> list[tuple[int, int, float]]:
        """Two values of kinds g and k: their own answers, those of their kinds, and all others."""
        cells = [
            (self.own[g], self.other[k][g], 1.0),
            (self.same[g], self.other[k][g], self.n[g] - 1.0),
            (self.other[g][k], self.own[k], 1.0),
            (self.other[g][k], self.same[k], self.n[k] - 1.0),
        ]
        cells += [(self.other[g][h], self.other[k][h], float(self.n[h])) for h in self.kinds if h not in (g, k)]
        return [cell for cell in cells if cell[2] > 0]

    def _at_most(self, row: _Row) -> None:
        self.rows.append(row)
        self.limits.append(0.0)

    def success(self) -> _Row:
        """Σ_z π_z P_z(z)."""
        return {self.own[g]: self.n[g] * self.p[g] for g in self.kinds}

    def advantage(self) -> _Row:
        """The success, less Σ_o π_o Σ_z π_z P_z(o)."""
        gain = self.success()
        for h in self.kinds:
            weight = self.n[h] * self.p[h]
            gain[self.own[h]] -= weight * self.p[h]
            gain[self.same[h]] = -weight * (self.n[h] - 1) * self.p[h]
            for g in self.kinds:
                if g != h:
                    gain[self.other[g][h]] = -weight * self.n[g] * self.p[g]
        return gain

    def solve(self, gain: _Row) -> float:
        """The largest gain."""
        costs: Floats = np.zeros(self.size)
        for place, value in gain.items():
            costs[place] = -value
        found = linprog(
            costs,
            _matrix(self.rows, self.size),
            np.array(self.limits),
            _matrix(self.sums, self.size),
            np.ones(len(self.sums)),
            bounds=(0, 1),
            method="highs",
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        )
        if found.fun is None:
            raise PrivacyError(f"prior cannot be solved for ({found.message}); use urero_prior, which is a bound")
        return float(-found.fun)


def _matrix(rows: list[_Row], columns: int) -> Any:  # the stubs of linprog know no sparse matrices
    lengths = np.cumsum([0, *map(len, rows)])
    places = [place for row in rows for place in row]
    values = [value for row in rows for value in row.values()]
    return csr_array((values, places, lengths), shape=(len(rows), columns))
