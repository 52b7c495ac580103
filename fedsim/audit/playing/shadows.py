# SPDX-License-Identifier: Apache-2.0
"""What the players of all games share: coins, rows that are drawn, and shadow models to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsim.audit.playing.arena import Arena, Numbers, Rows
from fedsim.privacy.claim import Adjacency
from fedsim.randomness import stream
from fedsim.scenario import GameName

Bits = NDArray[np.bool_]


class Played(NamedTuple):
    """Some trials: the coins, and what the adversary made of them."""

    truth: Bits
    score: Numbers
    adjacency: Adjacency
    notes: tuple[str, ...] = ()
    weaker: Mapping[GameName, Numbers] = {}
    """On the same trials, the scores of adversaries of other games, who see a part of what this one sees."""


Player = Callable[[Arena, int], Played]
SHADOWS = 64


def coins(arena: Arena, trials: int, share: float = 0.5) -> Bits:
    """The coin of each trial: heads with probability `share`."""
    return stream(arena.seed, "game coins").random(trials) < share


def draw(arena: Arena, count: int, purpose: str, among: Rows | None = None) -> list[Rows]:
    """For each of `count` trials a random order of the pool's rows: the first are taken, the last stay out."""
    pool = np.arange(len(arena.x)) if among is None else among
    return [stream(arena.seed, purpose, trial).permutation(pool) for trial in range(count)]


class Shadows:
    """Models that the adversary trains on rows of its own: how confident they are of a row that they never saw."""

    def __init__(self, arena: Arena) -> None:
        self._arena, pool = arena, np.arange(len(arena.x))
        members = [order[: arena.rows] for order in draw(arena, SHADOWS, "game shadows")]
        self.weights = arena.train(members, first=1 << 20)
        self.without = np.stack([~np.isin(pool, rows) for rows in members])
        self.without[:2] |= self.without.sum(0) < 2  # a row that nearly all were trained on
        theirs, count = arena.confidence(self.weights, pool), self.without.sum(0)
        self._mean = (theirs * self.without).sum(0) / count
        spread = np.sqrt((((theirs - self._mean) ** 2) * self.without).sum(0) / count)
        self._spread = np.maximum(spread, spread.mean() / 10 + 1e-9)

    def score(self, weights: Tensor, rows: Rows) -> Numbers:
        """(K, M): by how many standard deviations these models are surer of rows than shadows without them are."""
        scores: Numbers = (self._arena.confidence(weights, rows) - self._mean[rows]) / self._spread[rows]
        return scores

    def own(self, weights: Tensor, rows: Rows) -> Numbers:
        """(K,): the score of row k in model k."""
        return each_own(self.score, weights, rows)

    def label_losses(self, rows: Rows) -> Numbers:
        """(M, classes): the mean loss of each label that a row could have, by shadows without the row."""
        losses, without = self._arena.losses(self.weights, rows).numpy(), self.without[:, rows, None]
        means: Numbers = (losses * without).sum(0) / without.sum(0)
        return means


def each_own(score: Callable[[Tensor, Rows], Numbers], weights: Tensor, rows: Rows) -> Numbers:
    """(K,): of a score (K, M) of models and rows only that of row k in model k."""
    return np.array([score(weights[k : k + 1], rows[k : k + 1])[0, 0] for k in range(len(rows))])


def train_with(arena: Arena, orders: list[Rows], flips: Bits) -> Tensor:
    """The last row of each order in place of another where the coin says so."""
    members = [np.append(order[: arena.rows - 1], order[-1] if coin else order[-2])
               for order, coin in zip(orders, flips, strict=True)]  # fmt: skip
    return arena.train(members)


def notes(arena: Arena) -> tuple[str, ...]:
    """What was trained in a trial."""
    return (f"{arena.work.steps} steps on {arena.rows} rows a trial; scores against {SHADOWS} shadow models",)
