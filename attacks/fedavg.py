# SPDX-License-Identifier: Apache-2.0
"""Reconstruction from FedAvg updates, whatever the order of the client's batches was.

Dimitrov, Balunović, Konstantinov, Vechev, "Data Leakage in Federated Averaging" (TMLR 2022): simulate the client's
local work on guessed inputs, which are free in every epoch, differentiate through it, and tie the epochs together by a
prior that does not see the order. What is exact comes first: a dense first layer gives the inputs, a later one the
features that entered it, and neither depends on the order. The settings contain the baselines of the paper: no prior,
one set of inputs for all epochs, one step for an epoch, one gradient for everything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsim.attacks.epochs import pool_epochs
from fedsim.attacks.fedavg_case import Case, round_target, search_space, starting_points
from fedsim.attacks.fedavg_problem import Problem, reconstruct, unexplained
from fedsim.attacks.guess import first_guess
from fedsim.attacks.labels import count_labels
from fedsim.attacks.matching import target_of
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction, check_observation
from fedsim.attacks.order_search import with_orders
from fedsim.attacks.units import units_of
from fedsim.errors import AttackError
from fedsim.randomness import stream
from fedsim.scenario import ExactAttack, FedAvgAttack, GradientMatchingAttack
from fedsim.training import LocalWork


def fedavg(observation: Observation, knowledge: Knowledge, settings: FedAvgAttack, *, seed: int = 0) -> Reconstruction:
    """The client's examples: exactly where the first layer allows it, else by simulating the local work."""
    return fedavg_rounds([observation], knowledge, settings, seed=seed)


def fedavg_rounds(
    observations: Sequence[Observation], knowledge: Knowledge, settings: FedAvgAttack, *, seed: int = 0
) -> Reconstruction:
    """The same from several rounds of one client: its examples are the same, so a round is only more epochs."""
    return fedavg_clients([(observations, knowledge)], settings, seed=seed)[0]


def fedavg_clients(
    clients: Sequence[tuple[Sequence[Observation], Knowledge]],
    settings: FedAvgAttack,
    *,
    seed: int = 0,
    near: Sequence[Tensor] | None = None,
) -> list[Reconstruction]:
    """Many clients at once: those that hold equally many examples are replicas of one computation.

    `near` are images (n, *input_shape) of each client to begin with, in the order of the labels that are known of it,
    or (E, n, *input_shape) where every epoch begins with others.
    """
    found: dict[int, Reconstruction] = {}
    cases: dict[int, Case] = {}
    for number, (rounds, knowledge) in enumerate(clients):
        for observation in rounds:
            check_observation(observation, knowledge)
        exactly = _exactly(rounds[0], knowledge, seed) if settings.exact_first else None
        if exactly is not None:
            found[number] = exactly
        else:
            cases[number] = _case(rounds, knowledge, settings, seed, None if near is None else near[number])
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, case in cases.items():
        groups.setdefault(case.group, []).append(number)
    for numbers in groups.values():
        together = [cases[number] for number in numbers]
        found.update(zip(numbers, _simulate(together, settings, seed), strict=True))
    return [found[number] for number in range(len(clients))]


def _exactly(observation: Observation, knowledge: Knowledge, seed: int) -> Reconstruction | None:
    """Exact inversion, which the order of the batches does not concern; None where it is impossible or incomplete."""
    from fedsim.attacks.exact import exact

    try:
        found = exact(observation, knowledge, ExactAttack(name="exact"), seed=seed)
    except AttackError:
        return None
    certified = found.certified is not None and len(found.inputs) > 0 and bool(found.certified.all())
    return found if certified and len(found.inputs) == observation.examples else None


# --- what is known before the search --------------------------------------------------------------------------------


def _case(
    rounds: Sequence[Observation], knowledge: Knowledge, settings: FedAvgAttack, seed: int, near: Tensor | None
) -> Case:
    """The local work, found by trial where it is not known; the labels; and features where a layer gives them."""
    works = _possible_works(rounds[0], settings)
    notes: tuple[str, ...] = ()
    if len(works) > 1:
        tried = {
            work: _misfit([replace(each, work=work) for each in rounds], knowledge, settings, seed) for work in works
        }
        works = [min(tried, key=tried.__getitem__)]
        each = ", ".join(f"{w.epochs} of {w.batch_size or 'all'}: {loss:.2g}" for w, loss in tried.items())
        notes = (f"epochs and batch size by what a brief search leaves unexplained: {each}",)
    rounds = [replace(each, work=works[0]) for each in rounds]
    labels = _labels(rounds[0], knowledge)
    if near is not None:
        return Case(rounds, knowledge, labels, near, notes)
    case = Case(rounds, knowledge, labels[_label_order(len(labels), seed)], notes=notes)
    return _with_features(case, seed) if settings.features else case


def _possible_works(observation: Observation, settings: FedAvgAttack) -> list[LocalWork]:
    """What the client may have done: what it was asked to do, or what is to be searched."""
    work = observation.work
    epochs = settings.epochs or (work.epochs,)
    sizes = settings.batch_sizes or (work.batch_size,)
    return [replace(work, epochs=e, batch_size=b) for e, b in itertools.product(epochs, sizes)]


def _misfit(rounds: Sequence[Observation], knowledge: Knowledge, settings: FedAvgAttack, seed: int) -> float:
    """What a brief search with one set of inputs leaves of the update, if the client had worked like this."""
    brief = settings.model_copy(
        update={"iterations": max(1, settings.iterations // 4), "inputs": "shared", "distance": "whole", "restarts": 1}
    )
    labels = _labels(rounds[0], knowledge)
    return _simulate([Case(rounds, knowledge, labels)], brief, seed)[0].loss


def _labels(observation: Observation, knowledge: Knowledge) -> Tensor:
    if knowledge.kind == "text":
        if observation.examples is None:
            raise AttackError(f"client {observation.client} does not say how many texts it has; use attack text")
        return torch.zeros(observation.examples, dtype=torch.int64)
    if knowledge.labels is not None:
        return knowledge.labels
    return count_labels(observation, knowledge).labels


def _label_order(count: int, seed: int) -> Tensor:
    return torch.from_numpy(stream(seed, "attack-label-order").permutation(count))


def _with_features(case: Case, seed: int) -> Case:
    """Images from what entered the first linear layer, if its update can be taken apart into examples."""
    first, knowledge = case.rounds[0], case.knowledge
    several = first.clients > 1 or (first.kind == "update" and first.work.optimizer != "sgd")
    if knowledge.kind != "image" or several:
        return case
    granted = replace(knowledge, labels=case.labels)
    matching = GradientMatchingAttack(name="gradient-matching")
    units = units_of(knowledge)
    try:
        guess = first_guess(
            first, granted, matching, target_of(first, knowledge, first.gradient), units, seed=seed, deadline=math.inf
        )
    except AttackError:
        return case
    if not guess.near or guess.labels is None:
        return case
    return replace(
        case, labels=guess.labels, near=units.decode(guess.inputs).float(), notes=(*case.notes, *guess.notes)
    )


# --- the search -----------------------------------------------------------------------------------------------------


def _simulate(cases: Sequence[Case], settings: FedAvgAttack, seed: int) -> list[Reconstruction]:
    """Simulate the local work of clients of one group, and answer for each with what explains its update best."""
    weights = settings.prior_weight if isinstance(settings.prior_weight, tuple) else (settings.prior_weight,)
    summed = cases[0].rounds[0].clients
    searched = settings.order_turns > 0 and summed == 1 and cases[0].knowledge.kind == "image"
    if searched:
        settings = settings.model_copy(update={"inputs": "shared"})
    if settings.order_turns:
        told = f"in {settings.order_turns} turns" if searched else "not, as it is for images of single clients only"
        cases = [replace(case, notes=(*case.notes, f"the order of the batches was searched {told}")) for case in cases]
    variants = [w for w in weights for _ in range(settings.restarts)] if summed == 1 else list(weights[:1]) * summed
    targets = [
        round_target([case.rounds[number] for case in cases], cases, settings, len(variants))
        for number in range(len(cases[0].rounds))
    ]
    relaxation = search_space(cases, settings)
    problem = Problem(targets, relaxation, settings, torch.tensor(variants * len(cases)), len(variants))
    near = torch.stack([case.near for case in cases if case.near is not None]) if cases[0].near is not None else None
    start = starting_points(problem, near, seed)
    # A step that finds its way from noise would lose what a first guess already has.
    rate = settings.learning_rate * (0.1 if near is not None else 0.3 if settings.surrogate else 1.0)
    if searched:
        examples, left = with_orders(problem, start, turns=settings.order_turns, rate=rate, seed=seed)
        spread = torch.zeros(examples.shape[:2])
    else:
        examples, spread, left = _without_orders(problem, start, rate=rate, seed=seed)
    answers = []
    for number, case in enumerate(cases):
        rows = torch.arange(number * len(variants), (number + 1) * len(variants))
        chosen = rows if targets[0].summed else rows[left[rows].argmin()][None]
        answers.append(_answer(problem, case, examples[chosen].flatten(0, 1), spread[chosen].flatten(), chosen, left))
    return answers


def _without_orders(problem: Problem, start: Tensor, *, rate: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Examples (R, n, ...) pooled over the epochs, how far these are apart (R, n), what is left unexplained (R,)."""
    target = problem.targets[0]
    inputs, losses = reconstruct(problem, start, rate=rate)
    pooled = [pool_epochs(each.flatten(2), labels) for each, labels in zip(inputs, target.labels, strict=True)]
    examples = torch.stack([items for items, _ in pooled]).view(len(inputs), -1, *inputs.shape[3:])
    left = losses if target.summed else unexplained(problem, examples, seed=seed)
    return examples, torch.stack([apart for _, apart in pooled]), left


def _answer(
    problem: Problem, case: Case, examples: Tensor, spread: Tensor, chosen: Tensor, left: Tensor
) -> Reconstruction:
    """The pooled examples, scored by how well the epochs agree, and how much of the update they explain."""
    target, settings, knowledge = problem.targets[0], problem.settings, case.knowledge
    settled = problem.relaxation.settle(examples)
    labels = target.labels[chosen].flatten()
    if knowledge.kind == "text":
        settled, labels = settled[:, :-1], settled[:, 1:]
    scale = float((problem.relaxation.spread / settings.start_spread).mean()) if knowledge.kind == "image" else 1.0
    loss = float(left[chosen].mean())
    weight = float(problem.prior_weights[chosen[0]])
    rounds = "one round" if len(case.rounds) == 1 else f"{len(case.rounds)} rounds"
    note = (
        f"simulated {target.epochs} epochs in batches of {target.batch} ({settings.simulation}, inputs"
        f" {settings.inputs}, prior weight {weight:g}), from {rounds}"
    )
    return Reconstruction(
        attack="fedavg",
        inputs=settled if knowledge.kind == "text" else settled.view(-1, *knowledge.input_shape),
        labels=labels,
        loss=loss,
        score=torch.exp(-((10 * spread / scale) ** 2)) * math.exp(-min(10 * loss, 50.0)),
        label_counts=torch.bincount(labels.flatten(), minlength=knowledge.classes),
        notes=(*case.notes, note),
    )
