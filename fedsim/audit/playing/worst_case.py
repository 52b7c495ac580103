# SPDX-License-Identifier: Apache-2.0
"""Games of an adversary who picks the challenge: a canary, whose own coordinates of the weights are looked at."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np

from fedsim.audit.evidence.canaries import MarkedData
from fedsim.audit.evidence.federated import log_likelihood_ratio
from fedsim.audit.playing.arena import Arena
from fedsim.audit.playing.shadows import Played, coins, draw
from fedsim.randomness import ClientRandomness
from fedsim.training import train_cohort


def _marked(arena: Arena) -> MarkedData:
    return MarkedData.of(arena.model, arena.x, arena.y, canaries=1)


def canary(arena: Arena, trials: int, *, fixed: bool) -> Played:
    """The challenge is a canary, among random rows or always the same ones: how far did its own weights move?"""
    flips, orders, marked = coins(arena, trials), draw(arena, trials, "game rows"), _marked(arena)
    members = [
        marked.members((orders[0] if fixed else order)[: arena.rows], np.array([0]), flips[k : k + 1])
        for k, order in enumerate(orders)
    ]
    randomness = [ClientRandomness(arena.seed, 0, k) for k in range(trials)]
    start = marked.start(arena.start)
    result = train_cohort(marked.model, start, marked.x, marked.y, members, arena.work, randomness)
    return Played(flips, -marked.seen(result.updates)[:, 0], "add/remove", ("the challenge is a canary",))


def distinguish(arena: Arena, trials: int) -> Played:
    """The adversary picks everything: a canary among silent rows, or silence; and sees every step.

    Silent rows leave no trace, so that as few are taken as give the sampling rate: B of n with B/n in lowest terms. The
    score is the log-likelihood ratio of all steps, which no other score of the claimed releases outdoes. What their sum
    shows, which is what the final weights have, is scored beside it: the adversary of MI-Adv, on the same trials.
    """
    work = arena.work
    assert work.example_dp is not None  # see Arena.check
    rate = Fraction(work.batch(arena.rows), arena.rows)
    batch, rows = rate.numerator, rate.denominator
    step = replace(work, kind="fedsgd", batch_size=batch, steps=None)
    flips, marked = coins(arena, trials), _marked(arena)
    silent = np.full(rows, marked.people + 1)
    members = [marked.members(silent, np.array([0]), flips[k : k + 1]) for k in range(trials)]
    start, scores, total = marked.start(arena.start), np.zeros(trials), np.zeros(trials)
    for number in range(int(work.steps or 1)):
        randomness = [ClientRandomness(arena.seed, number, k) for k in range(trials)]
        seen = train_cohort(marked.model, start, marked.x, marked.y, members, step, randomness).updates
        lengths = marked.seen(seen)[:, 0] * batch / work.example_dp.clipping_norm
        scores += log_likelihood_ratio(lengths, work.example_dp.noise_multiplier, float(rate))
        total += lengths * work.rate(number)
    return Played(
        flips, scores, "add/remove", (f"sampling rate {rate}, {work.steps} steps, all seen",), {"MI-Adv": total}
    )
