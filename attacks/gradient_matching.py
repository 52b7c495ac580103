# SPDX-License-Identifier: Apache-2.0
"""Reconstruction by optimisation: argmin over x of d(gradient of the loss at (x, y), observed) + sum of α_r R_r(x).

Zhu et al. 2019 (squared distance, L-BFGS), Geiping et al. 2020 (cosine, Adam on signs, total variation), Yin et al.
2021 (BatchNorm, group consistency), with three differences. Where the first linear layer reveals its inputs, these are
inverted first (`feature_inversion`). The weight of the total variation falls to what the noise justifies (maximum a
posteriori), and so nobody has to choose it. Everything is chosen by the distance to the observed gradient.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.attacks.descent import Budget, Descent, adam, lbfgs
from fedsim.attacks.guess import Guess, first_guess
from fedsim.attacks.matching import Target, client_gradient, distance_left, matching_loss, target_of
from fedsim.attacks.matching_problem import Problem, problem_of
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction, check_observation
from fedsim.attacks.units import Units, units_of
from fedsim.errors import AttackError
from fedsim.randomness import stream
from fedsim.scenario.attack import GradientMatchingAttack

EXPLAINED = 1e-2
"""A squared distance, beyond the noise, at which inputs that features determine are not matched further: to invert the
features longer (`iterations`) brings them nearer at a tenth of the cost."""
_ROUNDING = 1e-12  # what float32 leaves of a squared distance
_SMALL = 3e-4  # a squared distance at which the score is half of its largest


def gradient_matching(
    observation: Observation, knowledge: Knowledge, settings: GradientMatchingAttack, *, seed: int = 0
) -> Reconstruction:
    """The inputs whose gradient is nearest to the observed one.

    `score` is high where the distance is small and restarts agree. That is no probability, because several batches may
    explain one gradient (`shadow_images` gives one). Labels are those granted, else counted (`labels`), else found
    together with the inputs.

    Raises:
        AttackError: for text (no derivative by tokens), for updates of several local steps, and where nobody can know
            how many examples there were.
    """
    check_observation(observation, knowledge)
    deadline = math.inf if settings.seconds is None else time.monotonic() + settings.seconds
    gradient = client_gradient(observation)
    if knowledge.kind == "text":
        raise AttackError("gradient-matching cannot be differentiated by tokens: use the attack named text")
    if gradient is None:
        raise AttackError(
            f"the update of client {observation.client} in round {observation.round} comes from several local steps,"
            " and is not one gradient: use an attack for FedAvg, or let strategy.name be fedsgd"
        )
    target, units = target_of(observation, knowledge, gradient), units_of(knowledge, settings.value_range != "off")
    guess = first_guess(observation, knowledge, settings, target, units, seed=seed, deadline=deadline)
    found = _ready(observation, target, units, guess)
    if found is None:
        found = _match(observation, knowledge, settings, target, units, guess, seed, deadline)
    left = distance_left(observation.model, target, found.inputs, found.labels)
    return Reconstruction(
        attack="gradient-matching",
        inputs=found.inputs,
        labels=found.labels,
        loss=matching_loss(observation, found.inputs, found.labels),
        score=found.agreement * _score(left, target.noise_share),
        notes=(*guess.notes, found.route, *found.remarks, *_defence_notes(target)),
    )


@dataclass(frozen=True, eq=False)
class _Found:
    """A result, before it is judged."""

    inputs: Tensor
    labels: Tensor
    agreement: Tensor
    """(n,) between restarts, in [0, 1]."""
    route: str
    remarks: tuple[str, ...] = ()


def _ready(observation: Observation, target: Target, units: Units, guess: Guess) -> _Found | None:
    """The first guess, if the features determine it and its gradient is the observed one, to the noise."""
    if guess.labels is None or not guess.near:
        return None
    inputs = units.decode(guess.inputs).float()
    if distance_left(observation.model, target, inputs, guess.labels) > EXPLAINED + 1.02 * target.noise_share:
        return None
    return _Found(inputs, guess.labels, torch.ones(len(inputs)), "they explain the gradient")


def _score(distance: float, noise_share: float) -> float:
    """(1 - share of noise) / (1 + distance beyond the noise / 3e-4): it orders results of one network."""
    return (1 - noise_share) / (1 + max(distance - noise_share, 0.0) / _SMALL)


def _agreement(units: Tensor, scores: Tensor) -> Tensor:
    """(n,): how far the second best restart (R, n, *shape) confirms the best one, if it fits comparably well.

    1 for a mean squared difference up to 0.01 of the range (20 dB), then 0.01 / difference.
    """
    order = scores.argsort()
    best = units[order[0]]
    if len(order) == 1 or float(scores[order[1]]) > 4 * float(scores[order[0]]) + 1e-6:
        return torch.ones(len(best))
    apart = (best - units[order[1]]).square().flatten(1).mean(1)
    return (0.01 / apart.clamp_min(0.01)).float()


def _remarks(units: Tensor, scores: Tensor) -> tuple[str, ...]:
    """How far the two best restarts (R, n, *shape) agree: evidence, and no proof."""
    if len(scores) == 1:
        return ()
    first, second = scores.argsort()[:2].tolist()
    same = (units[first] - units[second]).square().flatten(1).mean(1) <= 0.01
    fit = f"with distances of {float(scores[first]):.1e} and {float(scores[second]):.1e}"
    return (f"the two best starts, {fit}, agree within 20 dB in {int(same.sum())} of {len(same)} items",)


def _defence_notes(target: Target) -> list[str]:
    notes = []
    if target.scaled:
        notes.append("the gradient may have been clipped: its length was not used")
    if target.noise_share:
        notes.append(f"noise makes {100 * target.noise_share:.0f}% of the observed energy")
    if target.threshold is not None:
        notes.append(f"pruned entries were only required to be below {target.threshold:.1e}")
    if target.half_step:
        notes.append(f"entries were matched to within half a quantisation step, {target.half_step:.1e}")
    if target.magnitude is not None:
        notes.append("only the signs were matched")
    return notes


def _match(
    observation: Observation,
    knowledge: Knowledge,
    settings: GradientMatchingAttack,
    target: Target,
    units: Units,
    guess: Guess,
    seed: int,
    deadline: float,
) -> _Found:
    """The best restart."""
    problem = problem_of(observation, settings, target, units, guess)
    starts = _starts(problem, guess, knowledge, seed)
    found = _descend(problem, starts, deadline)
    points = problem.inputs(found.points)
    points = points.clamp(0, 1) if units.bounded else points
    best = int(found.scores.argmin())
    labels = problem.labels(found.points[best : best + 1])[0]
    hard = labels.argmax(-1) if labels.is_floating_point() else labels
    chosen = problem.settings
    route = f"{chosen.optimizer} on the {chosen.distance} distance: {found.iterations} iterations, {len(starts)} starts"
    inputs = units.decode(points[best].double()).float()
    return _Found(inputs, hard, _agreement(points, found.scores), route, _remarks(points, found.scores))


def _starts(problem: Problem, guess: Guess, knowledge: Knowledge, seed: int) -> Tensor:
    """(R, D): the first guess, then random ones around the middle."""
    dtype = problem.target.gradient[0].dtype
    rng = stream(seed, "attack-gradient-matching")
    starts = []
    for number in range(problem.settings.restarts):
        noise = torch.from_numpy(rng.standard_normal((1, problem.items, *problem.shape))).to(dtype)
        inputs = guess.inputs.to(dtype).unsqueeze(0) if number == 0 else problem.units.spread(noise)
        logits = torch.zeros(1, problem.items, 0 if problem.known_labels is not None else knowledge.classes)
        if number and logits.numel():
            logits = torch.from_numpy(rng.standard_normal(tuple(logits.shape)))
        starts.append(problem.points(inputs, logits.to(dtype)))
    return torch.cat(starts)


def _descend(problem: Problem, starts: Tensor, deadline: float) -> Descent:
    """Run the optimiser from all starts at once."""
    settings = problem.settings
    scale = {"squared": 1.0, "cosine": 0.5}.get(settings.distance, 0.0)
    floor = scale * max(problem.target.noise_share, _ROUNDING)
    budget = Budget(settings.iterations, settings.patience, floor, deadline)
    if settings.optimizer == "lbfgs":
        found = lbfgs(problem.value, starts, budget)
    else:
        found = adam(
            problem.value,
            starts,
            budget,
            rate=settings.learning_rate,
            signed=settings.optimizer == "signed-adam",
            decay=settings.decay,
            project=problem.project,
        )
    return found
