# SPDX-License-Identifier: Apache-2.0
"""What the players of all games share: coins, rows that are drawn, and shadow models to compare with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsim.audit.playing.arena import Arena, Numbers, Rows
from fedsim.privacy.claim import Adjacency
from fedsim.randomness import stream

Bits = NDArray[np.bool_]
Played = tuple[Bits, Numbers, Adjacency, tuple[str, ...]]
"""(truth, score, adjacency, notes) of some trials."""
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
        self._weights = arena.train(members, first=1 << 20)
        self._without = np.stack([~np.isin(pool, rows) for rows in members])
        self._without[:2] |= self._without.sum(0) < 2  # a row that nearly all were trained on
        theirs, count = arena.confidence(self._weights, pool), self._without.sum(0)
        self._mean = (theirs * self._without).sum(0) / count
        spread = np.sqrt((((theirs - self._mean) ** 2) * self._without).sum(0) / count)
        self._spread = np.maximum(spread, spread.mean() / 10 + 1e-9)

    def score(self, weights: Tensor, rows: Rows) -> Numbers:
        """(K, M): by how many standard deviations these models are surer of rows than shadows without them are."""
        scores: Numbers = (self._arena.confidence(weights, rows) - self._mean[rows]) / self._spread[rows]
        return scores

    def label_losses(self, rows: Rows) -> Numbers:
        """(M, classes): the mean loss of each label that a row could have, by shadows without the row."""
        losses, without = self._arena.losses(self._weights, rows).numpy(), self._without[:, rows, None]
        means: Numbers = (losses * without).sum(0) / without.sum(0)
        return means


def train_with(arena: Arena, orders: list[Rows], flips: Bits) -> Tensor:
    """The last row of each order in place of another where the coin says so."""
    members = [np.append(order[: arena.rows - 1], order[-1] if coin else order[-2])
               for order, coin in zip(orders, flips, strict=True)]  # fmt: skip
    return arena.train(members)


def notes(arena: Arena) -> tuple[str, ...]:
    """What was trained in a trial."""
    return (f"{arena.work.steps} steps on {arena.rows} rows a trial; scores against {SHADOWS} shadow models",)
