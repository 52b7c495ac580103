# SPDX-License-Identifier: Apache-2.0
"""A batch that the attacker makes himself, to see how far the agreement of his ensemble can be trusted here.

How often agreement is right depends on the network, the table and the size of the batch. All three are at hand: the
rows of one member of the ensemble are a batch of this table as the attacker sees it. Its gradient through the same
model is attacked in the same way, and this time the truth is known (a parametric bootstrap, Efron and Tibshirani 1993,
section 6.5). The truth of the batch under attack is never used.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.attacks.cell_confidence import evidence, log_odds, mode_shift
from fedsim.attacks.ensemble import Pooled, Problem, attack_rows, gradients, right_cells
from fedsim.attacks.matching import Target
from fedsim.randomness import stream


def shadow_cells(
    problem: Problem, pooled: Pooled, iterations: int, seed: int, deadline: float | None = None
) -> tuple[Tensor, Tensor]:
    """What speaks for each cell of a shadow batch, and (cells,) whether it is right."""
    rng = stream(seed, "attack", 8)
    truth = pooled.members[int(rng.integers(len(pooled.members)))]
    sent = [each[0].detach() for each in gradients(problem.model, truth[None], problem.labels)]
    noise = [torch.from_numpy(rng.standard_normal(each.shape)).float() for each in sent]
    target = replace(problem.target, gradient=as_observed(sent, noise, problem.target))
    present = problem.present
    if not present.all():
        present = sent[0].ne(0).any(0)
    mine = replace(problem, target=target, present=present)
    found = attack_rows(mine, len(pooled.members), iterations, seed + 1, deadline)
    right = right_cells(found.inputs, truth, problem.labels, problem.encoding)
    return evidence(found, mine), right.flatten().double()


def shadow_shift(problem: Problem, pooled: Pooled, iterations: int, seed: int, deadline: float | None = None) -> float:
    """By how much the curve's log-odds would have to be higher to be right on a shadow batch."""
    cells, right = shadow_cells(problem, pooled, iterations, seed, deadline)
    return mode_shift(log_odds(cells), right)


def as_observed(gradient: list[Tensor], noise: list[Tensor], target: Target) -> list[Tensor]:
    """A gradient after what the defence is known to have done to the observed one, with noise of standard normals."""
    sent = [each + target.deviation * one for each, one in zip(gradient, noise, strict=True)]
    if target.threshold is not None:
        sent = [F.hardshrink(each, target.threshold) for each in sent]
    if target.half_step:
        sent = [(each / (2 * target.half_step)).round() * (2 * target.half_step) for each in sent]
    if target.magnitude is not None:
        sent = [target.magnitude * each.sign() for each in sent]
    return sent
