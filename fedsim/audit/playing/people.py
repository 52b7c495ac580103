# SPDX-License-Identifier: Apache-2.0
"""Games about more than a row: a client, a subject, or the distribution that the data comes from.

No claim for examples bounds them: what holds of many rows together is not hidden by hiding one of them.
"""

from __future__ import annotations

import numpy as np
import torch

from fedsim.audit.playing.arena import Arena, Rows
from fedsim.audit.playing.shadows import Played, Shadows, coins, draw, notes
from fedsim.audit.playing.white_box import WhiteBox
from fedsim.errors import AuditError
from fedsim.randomness import stream


def property_of_data(arena: Arena, trials: int) -> Played:
    """Heads: the first class is twice as frequent as usual. Told by how readily the model says that class."""
    flips, labels = coins(arena, trials), arena.y.numpy()
    first = np.flatnonzero(labels == 0)
    members = []
    for k, order in enumerate(draw(arena, trials, "game rows")):
        drawn = order[: arena.rows]
        if flips[k]:
            rng = stream(arena.seed, "game property", k)
            extra = int((labels[drawn] == 0).sum())
            kept = drawn[rng.permutation(np.flatnonzero(labels[drawn] != 0))][: arena.rows - 2 * extra]
            drawn = np.concatenate([drawn[labels[drawn] == 0], rng.choice(first, extra), kept])
        members.append(drawn)
    shown = stream(arena.seed, "game shown").permutation(len(arena.x))[:200]
    readiness = arena.losses(arena.train(members), shown)[:, :, 0].neg().exp().mean(1).numpy()
    return Played(flips, readiness, "replace", ("twice the share of the first class, or the usual one",))


def user(arena: Arena, trials: int) -> Played:
    """Heads: a tenth of the rows are those of one client, else they are anybody's. Told by the mean over its rows."""
    flips, orders, each = coins(arena, trials), draw(arena, trials, "game rows"), max(2, arena.rows // 10)
    members = [np.concatenate([order[: arena.rows - each], order[-each:] if coin else order[-2 * each : -each]])
               for order, coin in zip(orders, flips, strict=True)]  # fmt: skip
    if arena.rows + each > len(arena.x):
        raise AuditError("game MI-User needs rows of other clients; set partition.examples_per_client to fewer")
    weights, shadows = arena.train(members), Shadows(arena)
    scores = [shadows.score(weights[k : k + 1], order[-each:]).mean() for k, order in enumerate(orders)]
    return Played(flips, np.array(scores), "replace", (*notes(arena), f"a client of {each} rows"))


def subject(arena: Arena, trials: int) -> Played:
    """Heads: a tenth of the rows are a subject's. Told from other rows of the subject, which were not trained on.

    (Suri et al. 2022.) A subject is a natural client where the data names them; else a row and those nearest to it.
    """
    flips, each = coins(arena, trials), max(2, arena.rows // 10)
    pool = np.arange(len(arena.x) if arena.groups is None else len(arena.groups))
    subjects = _subjects(arena, trials, 2 * each)
    if len(pool) < arena.rows + max(map(len, subjects)):
        raise AuditError("game MI-Subj needs rows of other subjects; set partition.examples_per_client to fewer")
    members, shown = [], []
    for k, own in enumerate(subjects):
        rng = stream(arena.seed, "game rows", k)
        rest, mixed = rng.permutation(np.setdiff1d(pool, own)), rng.permutation(own)
        members.append(np.append(rest[: arena.rows - each], mixed[:each] if flips[k] else rest[-each:]))
        shown.append(mixed[each : 2 * each])
    weights, shadows = arena.train(members), Shadows(arena)
    scores = [shadows.score(weights[k : k + 1], rows).mean() for k, rows in enumerate(shown)]
    what = "natural clients" if arena.groups is not None else "rows with those nearest to them"
    said = f"subjects are {what}; {each} rows trained on, as many others shown"
    return Played(flips, np.array(scores), "replace", (*notes(arena), said))


def _subjects(arena: Arena, trials: int, least: int) -> list[Rows]:
    """For each trial the rows of a subject, at least so many."""
    rng = stream(arena.seed, "game subjects")
    if arena.groups is None:
        flat = arena.x.flatten(1).double()
        centres = torch.from_numpy(rng.integers(0, len(flat), trials))
        nearest = torch.cdist(flat[centres], flat).topk(least, largest=False).indices
        return list(nearest.numpy())
    names, sizes = np.unique(arena.groups, return_counts=True)
    if sizes.max() < least:
        raise AuditError(
            f"game MI-Subj needs a subject with {least} rows, and the largest has {sizes.max()}; set"
            " partition.examples_per_client to fewer"
        )
    return [np.flatnonzero(arena.groups == name) for name in rng.choice(names[sizes >= least], trials)]


def mismatch(arena: Arena, trials: int) -> Played:
    """Members are rows of one part of the data, others of another part: how well the model fits tells the part.

    (Humphries et al. 2023.) The parts are halves of the natural clients where the data names them; else the rows on
    the two sides of the median along the direction in which they differ most.
    """
    flips, (inside, outside) = coins(arena, trials), _two_parts(arena)
    if len(inside) <= arena.rows:
        raise AuditError(
            f"game MM needs more than {arena.rows} rows in either half of the data, and one has {len(inside)}; set"
            " partition.examples_per_client to fewer"
        )
    members = [order[: arena.rows] for order in draw(arena, trials, "game rows", inside)]
    others = stream(arena.seed, "game challenge").choice(outside, trials)
    targets = np.where(flips, [rows[-1] for rows in members], others)
    scores = WhiteBox(arena).own(arena.train(members), targets)
    parts = "natural clients" if arena.groups is not None else "rows along the direction in which they differ most"
    return Played(flips, scores, "replace", (*notes(arena), f"members and others are of two halves: {parts}"))


def _two_parts(arena: Arena) -> tuple[Rows, Rows]:
    if arena.groups is not None:
        names = stream(arena.seed, "game halves").permutation(np.unique(arena.groups))
        left = np.isin(arena.groups, names[: len(names) // 2])
    else:
        flat = arena.x.flatten(1).double()
        widest = torch.linalg.eigh(torch.cov(flat.t()))[1][:, -1]
        left = (flat @ widest < (flat @ widest).median()).numpy()
    return np.flatnonzero(left), np.flatnonzero(~left)
