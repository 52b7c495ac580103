# SPDX-License-Identifier: Apache-2.0
"""The adversaries of the games, each a function (arena, trials) -> (truth, score, adjacency, notes).

Membership and all that reduces to it is told from the loss: how much more confident a model is of the true label than
shadow models that were trained without the row, in their standard deviations (offline LiRA, Carlini et al. 2022). The
adversary who may pick the challenge picks a canary, and looks at its own coordinates of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.audit.evidence.canaries import MarkedData
from fedsim.audit.evidence.federated import log_likelihood_ratio
from fedsim.audit.playing.arena import Arena, Numbers, Rows
from fedsim.errors import AuditError
from fedsim.privacy.claim import Adjacency
from fedsim.randomness import ClientRandomness, stream
from fedsim.scenario import GameName
from fedsim.training import train_cohort

Bits = NDArray[np.bool_]
Played = tuple[Bits, Numbers, Adjacency, tuple[str, ...]]
Player = Callable[[Arena, int], Played]
CANDIDATES = 8
_SHADOWS = 64
_SKEW = 0.1
_COPIES = 4


def _coins(arena: Arena, trials: int, share: float = 0.5) -> Bits:
    return stream(arena.seed, "game coins").random(trials) < share


def _draw(arena: Arena, count: int, purpose: str, among: Rows | None = None) -> list[Rows]:
    """For each of `count` trials a random order of the pool's rows: the first are taken, the last stay out."""
    pool = np.arange(len(arena.x)) if among is None else among
    return [stream(arena.seed, purpose, trial).permutation(pool) for trial in range(count)]


class _Shadows:
    """Models that the adversary trains on rows of its own: how confident they are of a row that they never saw."""

    def __init__(self, arena: Arena) -> None:
        self._arena, pool = arena, np.arange(len(arena.x))
        members = [order[: arena.rows] for order in _draw(arena, _SHADOWS, "game shadows")]
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


def _membership(arena: Arena, trials: int, *, share: float = 0.5, difference: bool = False) -> Played:
    """S and two rows are drawn; the first is trained on if the coin says so, else the second; was it the first?"""
    coins, orders = _coins(arena, trials, share), _draw(arena, trials, "game rows")
    targets = np.array([order[-1] for order in orders])
    weights = _train_with(arena, orders, coins)
    shadows = _Shadows(arena)
    if difference:
        labels = arena.y[targets].numpy()
        own = arena.losses(weights, targets).numpy()[np.arange(trials), np.arange(trials), labels]
        return coins, shadows.label_losses(targets)[np.arange(trials), labels] - own, "replace", _notes(arena)
    return coins, np.diagonal(shadows.score(weights, targets)).copy(), "replace", _notes(arena)


def _train_with(arena: Arena, orders: list[Rows], coins: Bits) -> Tensor:
    """The last row of each order in place of another where the coin says so."""
    members = [np.append(order[: arena.rows - 1], order[-1] if coin else order[-2])
               for order, coin in zip(orders, coins, strict=True)]  # fmt: skip
    return arena.train(members)


def _notes(arena: Arena) -> tuple[str, ...]:
    return (f"{arena.work.steps} steps on {arena.rows} rows a trial; scores against {_SHADOWS} shadow models",)


def _attribute(arena: Arena, trials: int) -> Played:
    """The label is the unknown attribute: the one whose loss fell most, compared with shadow models."""
    coins, orders = _coins(arena, trials), _draw(arena, trials, "game rows")
    targets = np.array([order[-1] for order in orders])
    own = arena.losses(_train_with(arena, orders, coins), targets).numpy()[np.arange(trials), np.arange(trials)]
    guesses = (own - _Shadows(arena).label_losses(targets)).argmin(1)
    right = guesses == arena.y[targets].numpy()
    return coins, right.astype(np.float64), "replace", (*_notes(arena), "the attribute is the label")


def _candidates(arena: Arena, trials: int, *, same_label: bool, fixed: bool) -> Played:
    """Which of eight rows is it? The one of which the model is surest, compared with shadow models."""
    coins, orders = _coins(arena, trials), _draw(arena, trials, "game rows")
    if fixed:  # all trials share the other rows, which the adversary knows
        rest = orders[0][: arena.rows - 1]
        left = np.setdiff1d(np.arange(len(arena.x)), rest)
        orders = [np.concatenate([rest, order]) for order in _draw(arena, trials, "game challenge", left)]
    weights, shadows = _train_with(arena, orders, coins), _Shadows(arena)
    right = np.zeros(trials)
    for k, order in enumerate(orders):
        others = order[arena.rows - 1 : -2]
        if same_label:
            others = others[arena.y[others].numpy() == int(arena.y[order[-1]])]
        names = np.append(others[: CANDIDATES - 1], order[-1])
        right[k] = shadows.score(weights[k : k + 1], names)[0].argmax() == len(names) - 1
    return coins, right, "replace", (*_notes(arena), f"{CANDIDATES} candidates; by guessing 1 in {CANDIDATES} is right")


def _poisoned(arena: Arena, trials: int) -> Played:
    """Some rows are copies of the target with a wrong label, so that it stands out (Tramèr et al. 2022)."""
    coins, orders = _coins(arena, trials), _draw(arena, trials, "game rows")
    targets = np.array([order[-1] for order in orders])
    wrong = (arena.y[targets] + 1) % arena.classes
    poisoned = replace(arena, x=torch.cat([arena.x, arena.x[targets]]), y=torch.cat([arena.y, wrong]))
    members = []
    for k, (order, coin) in enumerate(zip(orders, coins, strict=True)):
        poison = np.full(_COPIES, len(arena.x) + k)
        members.append(np.concatenate([order[: arena.rows - 1 - _COPIES], poison, [order[-1] if coin else order[-2]]]))
    own = arena.confidence(poisoned.train(members), targets)
    return coins, np.diagonal(own).copy(), "replace", (f"{_COPIES} poisoned copies of each target",)


def _adversarial_data(arena: Arena, trials: int) -> Played:
    """The adversary picked the other rows: none has the label of the target, which nothing else then explains."""
    coins, labels = _coins(arena, trials), arena.y.numpy()
    target_label = np.bincount(labels).argmin()
    others, own = np.flatnonzero(labels != target_label), np.flatnonzero(labels == target_label)
    if len(others) <= arena.rows:
        raise AuditError(
            f"game MI-SQ needs more than {arena.rows} rows of other labels than the target's; set"
            " partition.examples_per_client to fewer"
        )
    targets = np.array([order[0] for order in _draw(arena, trials, "game challenge", own)])
    drawn = _draw(arena, trials, "game rows", others)
    orders = [np.append(order, target) for order, target in zip(drawn, targets, strict=True)]
    weights = _train_with(arena, orders, coins)
    return coins, np.diagonal(arena.confidence(weights, targets)).copy(), "replace", ()


def _property(arena: Arena, trials: int) -> Played:
    """Heads: the first class is twice as frequent as usual. Told by how readily the model says that class."""
    coins, labels = _coins(arena, trials), arena.y.numpy()
    first = np.flatnonzero(labels == 0)
    members = []
    for k, order in enumerate(_draw(arena, trials, "game rows")):
        drawn = order[: arena.rows]
        if coins[k]:
            rng = stream(arena.seed, "game property", k)
            extra = int((labels[drawn] == 0).sum())
            kept = drawn[rng.permutation(np.flatnonzero(labels[drawn] != 0))][: arena.rows - 2 * extra]
            drawn = np.concatenate([drawn[labels[drawn] == 0], rng.choice(first, extra), kept])
        members.append(drawn)
    shown = stream(arena.seed, "game shown").permutation(len(arena.x))[:200]
    readiness = arena.losses(arena.train(members), shown)[:, :, 0].neg().exp().mean(1).numpy()
    return coins, readiness, "replace", ("twice the share of the first class, or the usual one",)


def _subject(arena: Arena, trials: int) -> Played:
    """Heads: a tenth of the rows are those of one client, else they are anybody's. Told by the mean over its rows."""
    coins, orders, each = _coins(arena, trials), _draw(arena, trials, "game rows"), max(2, arena.rows // 10)
    members = [np.concatenate([order[: arena.rows - each], order[-each:] if coin else order[-2 * each : -each]])
               for order, coin in zip(orders, coins, strict=True)]  # fmt: skip
    if arena.rows + each > len(arena.x):
        raise AuditError("game MI-User needs rows of other clients; set partition.examples_per_client to fewer")
    weights, shadows = arena.train(members), _Shadows(arena)
    scores = [shadows.score(weights[k : k + 1], order[-each:]).mean() for k, order in enumerate(orders)]
    return coins, np.array(scores), "replace", (*_notes(arena), f"a client of {each} rows")


def _marked(arena: Arena) -> MarkedData:
    return MarkedData.of(arena.model, arena.x, arena.y, canaries=1)


def _canary(arena: Arena, trials: int, *, fixed: bool) -> Played:
    """The challenge is a canary, among random rows or always the same ones: how far did its own weights move?"""
    coins, orders, marked = _coins(arena, trials), _draw(arena, trials, "game rows"), _marked(arena)
    members = [
        marked.members((orders[0] if fixed else order)[: arena.rows], np.array([0]), coins[k : k + 1])
        for k, order in enumerate(orders)
    ]
    randomness = [ClientRandomness(arena.seed, 0, k) for k in range(trials)]
    start = marked.start(arena.start)
    result = train_cohort(marked.model, start, marked.x, marked.y, members, arena.work, randomness)
    return coins, -marked.seen(result.updates)[:, 0], "add/remove", ("the challenge is a canary",)


def _distinguish(arena: Arena, trials: int) -> Played:
    """The adversary picks everything: a canary among silent rows, or silence; and sees every step.

    Silent rows leave no trace, so that as few are taken as give the sampling rate, rounded down: B of n' rows.
    """
    work, claim = arena.work, arena.claim
    if work.example_dp is None or work.example_dp.batches != "poisson" or claim is None:
        raise AuditError("game DPD sees every step of DP-SGD with Poisson batches; set defence.example_dp, or play MI")
    rate = work.batch(arena.rows) / arena.rows
    rows = next(n for n in range(1, 10**6) if n * rate >= 1)
    step = replace(work, kind="fedsgd", batch_size=1, steps=None)
    coins, marked = _coins(arena, trials), _marked(arena)
    silent = np.full(rows, marked.people + 1)
    members = [marked.members(silent, np.array([0]), coins[k : k + 1]) for k in range(trials)]
    start, scores = marked.start(arena.start), np.zeros(trials)
    for number in range(int(work.steps or 1)):
        randomness = [ClientRandomness(arena.seed, number, k) for k in range(trials)]
        seen = train_cohort(marked.model, start, marked.x, marked.y, members, step, randomness).updates
        lengths = marked.seen(seen)[:, 0] / work.example_dp.clipping_norm
        scores += log_likelihood_ratio(lengths, work.example_dp.noise_multiplier, 1 / rows)
    return coins, scores, "add/remove", (f"sampling rate 1/{rows}, {work.steps} steps, all seen",)


PLAYERS: dict[GameName, Player] = {
    "MI": _membership,
    "MI-BB": _membership,
    "MI-skew": lambda arena, trials: _membership(arena, trials, share=_SKEW),
    "MI-Diff": lambda arena, trials: _membership(arena, trials, difference=True),
    "MI-Pois": _poisoned,
    "MI-SQ": _adversarial_data,
    "MI-Adv": lambda arena, trials: _canary(arena, trials, fixed=False),
    "SMI": lambda arena, trials: _canary(arena, trials, fixed=True),
    "DPD": _distinguish,
    "AI": _attribute,
    "Inv": lambda arena, trials: _candidates(arena, trials, same_label=True, fixed=False),
    "RC": lambda arena, trials: _candidates(arena, trials, same_label=False, fixed=True),
    "PI": _property,
    "MI-User": _subject,
}
UNPLAYABLE: dict[GameName, str] = {
    "MM": "it needs members and others of two distributions, which a scenario does not name; play MI or PI",
    "MI-Subj": "it needs more rows of a subject than are trained on, which the data does not name; play MI-User",
    "RC-Untarg": "it rebuilds text from a language model; run `fedsim attack RUN --attack text`",
    "RC-Targ": "it completes text by a language model; run `fedsim attack RUN --attack text`",
}
