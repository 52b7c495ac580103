# SPDX-License-Identifier: Apache-2.0
"""Games about one random row: was it there, which attribute has it, which one is it?

From a model's outputs, membership is read off the loss: how much more confident the model is of the true label than
shadow models that were trained without the row, in their standard deviations (offline LiRA, Carlini et al. 2022). Where
the game shows the weights, the gradient of the row is looked for in them too (`white_box`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedsim.audit.playing.arena import Arena
from fedsim.audit.playing.shadows import Played, Shadows, coins, draw, each_own, notes, train_with
from fedsim.audit.playing.white_box import WhiteBox
from fedsim.errors import AuditError

CANDIDATES = 8
_COPIES = 4


def membership(arena: Arena, trials: int, *, weights: bool, coin: float = 0.5) -> Played:
    """S and two rows are drawn; the first is trained on if the coin says so, else the second; was it the first?

    `weights`: the adversary sees the weights, and not the outputs only.
    """
    flips, orders = coins(arena, trials, coin), draw(arena, trials, "game rows")
    targets = np.array([order[-1] for order in orders])
    models = train_with(arena, orders, flips)
    adversary = WhiteBox(arena) if weights else Shadows(arena)
    return Played(flips, adversary.own(models, targets), "replace", notes(arena))


def difference(arena: Arena, trials: int) -> Played:
    """The same, told by how much smaller the loss of the row is than the mean of shadow models without it."""
    flips, orders = coins(arena, trials), draw(arena, trials, "game rows")
    targets = np.array([order[-1] for order in orders])
    models, labels = train_with(arena, orders, flips), arena.y[targets].numpy()
    own = arena.losses(models, targets).numpy()[np.arange(trials), np.arange(trials), labels]
    expected = Shadows(arena).label_losses(targets)[np.arange(trials), labels]
    return Played(flips, expected - own, "replace", notes(arena))


def attribute(arena: Arena, trials: int) -> Played:
    """The label is the unknown attribute: the one whose loss fell most, compared with shadow models."""
    flips, orders = coins(arena, trials), draw(arena, trials, "game rows")
    targets = np.array([order[-1] for order in orders])
    own = arena.losses(train_with(arena, orders, flips), targets).numpy()[np.arange(trials), np.arange(trials)]
    guesses = (own - Shadows(arena).label_losses(targets)).argmin(1)
    right = guesses == arena.y[targets].numpy()
    return Played(flips, right.astype(np.float64), "replace", (*notes(arena), "the attribute is the label"))


def candidates(arena: Arena, trials: int, *, same_label: bool, fixed: bool) -> Played:
    """Which of eight rows is it? The one that most speaks for, compared with shadow models."""
    flips, orders = coins(arena, trials), draw(arena, trials, "game rows")
    if fixed:  # all trials share the other rows, which the adversary knows
        rest = orders[0][: arena.rows - 1]
        left = np.setdiff1d(np.arange(len(arena.x)), rest)
        orders = [np.concatenate([rest, order]) for order in draw(arena, trials, "game challenge", left)]
    weights, adversary = train_with(arena, orders, flips), WhiteBox(arena)
    right = np.zeros(trials)
    for k, order in enumerate(orders):
        others = order[arena.rows - 1 : -2]
        if same_label:
            others = others[arena.y[others].numpy() == int(arena.y[order[-1]])]
        names = np.append(others[: CANDIDATES - 1], order[-1])
        right[k] = adversary.score(weights[k : k + 1], names)[0].argmax() == len(names) - 1
    return Played(
        flips, right, "replace", (*notes(arena), f"{CANDIDATES} candidates; by guessing 1 in {CANDIDATES} is right")
    )


def poisoned(arena: Arena, trials: int) -> Played:
    """Some rows are copies of the target with a wrong label, so that it stands out (Tramèr et al. 2022)."""
    flips, orders = coins(arena, trials), draw(arena, trials, "game rows")
    targets = np.array([order[-1] for order in orders])
    wrong = (arena.y[targets] + 1) % arena.classes
    poisoned = replace(arena, x=torch.cat([arena.x, arena.x[targets]]), y=torch.cat([arena.y, wrong]))
    members = []
    for k, (order, coin) in enumerate(zip(orders, flips, strict=True)):
        poison = np.full(_COPIES, len(arena.x) + k)
        members.append(np.concatenate([order[: arena.rows - 1 - _COPIES], poison, [order[-1] if coin else order[-2]]]))
    own = each_own(arena.confidence, poisoned.train(members), targets)
    return Played(flips, own, "replace", (f"{_COPIES} poisoned copies of each target",))


def adversarial_data(arena: Arena, trials: int) -> Played:
    """The adversary picked the other rows: none has the label of the target, which nothing else then explains."""
    flips, labels = coins(arena, trials), arena.y.numpy()
    target_label = np.bincount(labels).argmin()
    others, own = np.flatnonzero(labels != target_label), np.flatnonzero(labels == target_label)
    if len(others) <= arena.rows:
        raise AuditError(
            f"game MI-SQ needs more than {arena.rows} rows of other labels than the target's; set"
            " partition.examples_per_client to fewer"
        )
    targets = np.array([order[0] for order in draw(arena, trials, "game challenge", own)])
    drawn = draw(arena, trials, "game rows", others)
    orders = [np.append(order, target) for order, target in zip(drawn, targets, strict=True)]
    weights = train_with(arena, orders, flips)
    return Played(flips, each_own(arena.confidence, weights, targets), "replace", ())
