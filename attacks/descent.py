# SPDX-License-Identifier: Apache-2.0
"""Descent of many independent problems at once: every row of a (R, D) tensor is a problem of its own.

One call of the objective evaluates all rows that are still moving, so that restarts cost one batch and not R runs. A
row never sees another one: it takes the same steps as if it were alone, to the rounding of the batched evaluation.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Value(NamedTuple):
    """The objective at k rows."""

    score: Tensor
    """(k,) what is to be small in the end: it chooses the best point of a row."""
    slope: Tensor
    """(k, D) the gradient of what is minimised now, which may weigh priors more than the score does."""


Objective = Callable[[Tensor, Tensor, float], Value]
"""(points (k, D), the numbers of their rows (k,), progress in [0, 1]) -> Value."""


@dataclass(frozen=True)
class Budget:
    """When a row stops."""

    iterations: int
    """Evaluations of the objective."""
    patience: int
    """Stop a row whose best score has not fallen by 1% in so many iterations."""
    floor: float = 0.0
    """Stop a row whose score is at most this: below lies noise."""
    deadline: float = math.inf
    """Stop everything at this time of time.monotonic()."""

    def over(self) -> bool:
        """Whether the wall-clock budget is spent."""
        return self.deadline < math.inf and time.monotonic() > self.deadline


@dataclass(frozen=True, eq=False)
class Descent:
    """Where R rows ended."""

    points: Tensor
    """(R, D) the point of lowest score of each row."""
    scores: Tensor
    """(R,)"""
    first: Tensor
    """(R,) the scores of the start."""
    iterations: int
    """Evaluations of the row that moved longest."""


class _Best:
    """The best point of each row, and which rows still make progress."""

    def __init__(self, start: Tensor, budget: Budget) -> None:
        self.points = start.clone()
        self.scores = torch.full((len(start),), math.inf, dtype=start.dtype)
        self.first = self.scores.clone()
        self._mark = self.scores.clone()  # the score at the last progress worth the name
        self._since = torch.zeros(len(start), dtype=torch.int64)
        self._budget = budget

    def update(self, rows: Tensor, points: Tensor, scores: Tensor) -> Tensor:
        """Note an evaluation; returns (k,) whether each row should go on."""
        self.first[rows] = torch.where(self.first[rows].isinf(), scores, self.first[rows])
        better = scores < self.scores[rows]
        self.points[rows[better]] = points[better]
        self.scores[rows[better]] = scores[better]
        progress = self.scores[rows] < 0.99 * self._mark[rows]
        self._mark[rows[progress]] = self.scores[rows[progress]]
        self._since[rows] = torch.where(progress, 0, self._since[rows] + 1)
        return (self._since[rows] < self._budget.patience) & (self.scores[rows] > self._budget.floor)

    def result(self, iterations: int) -> Descent:
        return Descent(self.points, self.scores, self.first, iterations)


def step_size(rate: float, decay: Literal["cosine", "steps", "none"], progress: float) -> float:
    """cosine: rate · (1 + cos πp)/2; steps: a tenth at 3/8, 5/8 and 7/8 of the run (Geiping et al. 2020)."""
    if decay == "cosine":
        return rate * max(0.5 * (1 + math.cos(math.pi * progress)), 1e-3)
    if decay == "steps":
        return float(rate * 0.1 ** sum(progress >= place for place in (3 / 8, 5 / 8, 7 / 8)))
    return rate


def adam(
    objective: Objective,
    start: Tensor,
    budget: Budget,
    *,
    rate: float,
    signed: bool,
    decay: Literal["cosine", "steps", "none"] = "cosine",
    project: Callable[[Tensor], Tensor] = lambda points: points,
) -> Descent:
    """Adam (Kingma, Ba 2015, Algorithm 1); `signed`: on the signs of the gradient (Geiping et al. 2020, section 4).

    `project` brings points back into the feasible set after each step.
    """
    points, best = start.clone(), _Best(start, budget)
    mean, square = torch.zeros_like(start), torch.zeros_like(start)
    rows, done = torch.arange(len(start)), 0
    while done < budget.iterations and len(rows) and not budget.over():
        progress = done / budget.iterations
        here = points[rows]
        value = objective(here, rows, progress)
        done += 1
        moving = best.update(rows, here, value.score) & value.slope.isfinite().all(1)
        slope = value.slope.sign() if signed else value.slope
        mean[rows] = mean[rows].lerp(slope, 0.1)
        square[rows] = square[rows].lerp(slope.square(), 0.001)
        size = step_size(rate, decay, progress) / (1 - 0.9**done)
        step = size * mean[rows] / (square[rows] / (1 - 0.999**done)).sqrt().add_(1e-8)
        points[rows] = project(here - step)
        rows = rows[moving]
    return best.result(done)


@dataclass
class _Track:
    """One row of L-BFGS: its point, its memory of steps, and the step that it tries."""

    point: Tensor
    score: float
    slope: Tensor
    memory: deque[tuple[Tensor, Tensor, float]]
    direction: Tensor = field(init=False)
    length: float = field(init=False)
    descent: float = field(init=False)

    def __post_init__(self) -> None:
        self.aim()

    def aim(self) -> None:
        """The direction -H g by the two-loop recursion (Nocedal, Wright 2006, Algorithm 7.4)."""
        wanted, weights = self.slope.clone(), []
        for step, change, rho in reversed(self.memory):
            weight = rho * float(step @ wanted)
            wanted.sub_(change, alpha=weight)
            weights.append(weight)
        if self.memory:
            _, change, rho = self.memory[-1]
            wanted.div_(rho * float(change @ change))
        for (step, change, rho), weight in zip(self.memory, reversed(weights), strict=True):
            wanted.add_(step, alpha=weight - rho * float(change @ wanted))
        self.direction = wanted.neg_()
        self.descent = float(self.direction @ self.slope)
        self.length = 1.0 if self.memory else min(1.0, 1.0 / max(float(self.slope.abs().sum()), 1e-30))
        if self.descent >= 0 and self.memory:  # the memory no longer fits the place
            self.memory.clear()
            self.aim()

    def advance(self, score: float, slope: Tensor) -> bool:
        """Take the trial step if it descends enough (Armijo), else try a shorter one; False: no way down is left."""
        promised = self.length * self.descent
        if not (score <= self.score + 1e-4 * promised and bool(slope.isfinite().all())):
            bend = 2 * (score - self.score - promised)
            ideal = -promised / bend if math.isfinite(score) and bend > 0 else 0.1
            self.length *= min(max(ideal, 0.1), 0.5)
            if self.length < 1e-8:
                if not self.memory:
                    return False
                self.memory.clear()
                self.aim()
            return True
        step, change = self.length * self.direction, slope - self.slope
        curvature = float(step @ change)
        if curvature > 1e-10 * float(step.norm() * change.norm()):
            self.memory.append((step, change, 1 / curvature))
        self.point, self.score, self.slope = self.point + step, score, slope
        self.aim()
        return self.descent < 0


def lbfgs(objective: Objective, start: Tensor, budget: Budget, *, memory: int = 50) -> Descent:
    """L-BFGS with backtracking by quadratic interpolation; every row has its own memory and step length.

    Each round evaluates one trial step of every row, and so a row that backtracks does not hold up the others. The
    score must be the function whose slope is given (priors of constant weight).
    """
    best = _Best(start, budget)
    rows = torch.arange(len(start))
    value = objective(start, rows, 1.0)
    moving = best.update(rows, start, value.score) & value.slope.isfinite().all(1)
    tracks = {
        row: _Track(start[row], float(value.score[row]), value.slope[row], deque(maxlen=memory))
        for row in rows[moving].tolist()
    }
    done = 1
    while done < budget.iterations and tracks and not budget.over():
        rows = torch.tensor(list(tracks))
        trial = torch.stack([track.point + track.length * track.direction for track in tracks.values()])
        value = objective(trial, rows, 1.0)
        done += 1
        moving = best.update(rows, trial, value.score)
        for place, row in enumerate(rows.tolist()):
            if not tracks[row].advance(float(value.score[place]), value.slope[place]) or not moving[place]:
                del tracks[row]
    return best.result(done)
