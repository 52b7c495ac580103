# SPDX-License-Identifier: Apache-2.0
"""Reconstruction from FedAvg updates, whatever the order of the client's batches was.

Dimitrov, Balunović, Konstantinov, Vechev, "Data Leakage in Federated Averaging" (TMLR 2022): simulate the client's
local work on guessed inputs, which are free in every epoch, differentiate through it, and tie the epochs together by a
prior that does not see the order. What is exact comes first: a dense first layer gives the inputs, a later one the
features that entered it, and neither depends on the order. The settings contain the baselines of the paper: no prior,
one set of inputs for all epochs, one step for an epoch, one gradient for everything.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.attacks.epochs import pool_epochs
from fedsim.attacks.fedavg_problem import Problem, Target, reconstruct, unexplained
from fedsim.attacks.guess import first_guess
from fedsim.attacks.labels import count_labels
from fedsim.attacks.matching import target_of
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction, check_observation
from fedsim.attacks.relaxation import Relaxation, relaxed_images, relaxed_rows, relaxed_windows
from fedsim.attacks.simulation import Simulator
from fedsim.attacks.surrogate import surrogate_guess
from fedsim.attacks.units import units_of
from fedsim.errors import AttackError
from fedsim.randomness import stream
from fedsim.scenario import ExactAttack, FedAvgAttack, GradientMatchingAttack
from fedsim.training import LocalWork
from fedsim.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Case:
    """One client (or one sum of clients): its rounds, and where the search for its examples begins."""

    rounds: Sequence[Observation]
    knowledge: Knowledge
    labels: Tensor
    """(n,), in an arbitrary order."""
    near: Tensor | None = None
    """(n, *input_shape): inputs from features that determine them."""
    notes: tuple[str, ...] = ()

    @property
    def group(self) -> tuple[object, ...]:
        """Cases of one group are replicas of one computation."""
        first = self.rounds[0]
        sent = tuple(_fingerprint(each) for each in self.rounds)
        return (*sent, first.clients > 1 and id(self), len(self.labels), first.work, first.kind, self.near is None)


def _fingerprint(observation: Observation) -> bytes:
    """The same for clients that were sent the same weights."""
    found = hashlib.sha256()
    for weight in observation.weights.values():
        found.update(weight.contiguous().numpy().tobytes())
    return found.digest()


def fedavg(observation: Observation, knowledge: Knowledge, settings: FedAvgAttack, *, seed: int = 0) -> Reconstruction:
    """The client's examples: exactly where the first layer allows it, else by simulating the local work."""
    return fedavg_rounds([observation], knowledge, settings, seed=seed)


def fedavg_rounds(
    observations: Sequence[Observation], knowledge: Knowledge, settings: FedAvgAttack, *, seed: int = 0
) -> Reconstruction:
    """The same from several rounds of one client: its examples are the same, so a round is only more epochs."""
    return fedavg_clients([(observations, knowledge)], settings, seed=seed)[0]


def fedavg_clients(
    clients: Sequence[tuple[Sequence[Observation], Knowledge]], settings: FedAvgAttack, *, seed: int = 0
) -> list[Reconstruction]:
    """Many clients at once: those that hold equally many examples are replicas of one computation."""
    found: dict[int, Reconstruction] = {}
    cases: dict[int, Case] = {}
    for number, (rounds, knowledge) in enumerate(clients):
        for observation in rounds:
            check_observation(observation, knowledge)
        exactly = _exactly(rounds[0], knowledge, seed) if settings.exact_first else None
        if exactly is not None:
            found[number] = exactly
        else:
            cases[number] = _case(rounds, knowledge, settings, seed)
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


def _case(rounds: Sequence[Observation], knowledge: Knowledge, settings: FedAvgAttack, seed: int) -> Case:
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
    variants = [w for w in weights for _ in range(settings.restarts)] if summed == 1 else list(weights[:1]) * summed
    targets = [
        _target([case.rounds[number] for case in cases], cases, settings, len(variants))
        for number in range(len(cases[0].rounds))
    ]
    relaxation = _relaxation(cases, settings)
    problem = Problem(targets, relaxation, settings, torch.tensor(variants * len(cases)))
    near = torch.stack([case.near for case in cases if case.near is not None]) if cases[0].near is not None else None
    start = _first_guess(problem, near, seed)
    rate = settings.learning_rate * (0.1 if near is not None else 1.0)
    inputs, losses = reconstruct(problem, start, rate=rate)
    pooled = [pool_epochs(each.flatten(2), labels) for each, labels in zip(inputs, targets[0].labels, strict=True)]
    examples = torch.stack([items for items, _ in pooled]).view(len(inputs), -1, *inputs.shape[3:])
    left = losses if targets[0].summed else unexplained(problem, examples, seed=seed)
    spread = torch.stack([apart for _, apart in pooled])
    answers = []
    for number, case in enumerate(cases):
        rows = torch.arange(number * len(variants), (number + 1) * len(variants))
        chosen = rows if targets[0].summed else rows[left[rows].argmin()][None]
        answers.append(_answer(problem, case, examples[chosen].flatten(0, 1), spread[chosen].flatten(), chosen, left))
    return answers


def _target(observations: Sequence[Observation], cases: Sequence[Case], settings: FedAvgAttack, copies: int) -> Target:
    """The updates of one round with the local work that is simulated, which the baselines take for less than it was."""
    first = observations[0]
    work, clients = first.work, first.clients
    n = len(cases[0].labels) // clients
    labels = torch.cat([case.labels[: n * clients].view(clients, n) for case in cases])
    batch = work.batch(n)
    in_epoch = math.ceil(n / batch)
    epochs = work.epochs if work.steps is None else math.ceil(work.steps / in_epoch)
    rate = work.learning_rate
    if first.kind == "gradient":
        work, epochs, batch, rate = LocalWork(kind="fedavg"), 1, n, 1.0
    elif settings.simulation == "epochs":
        batch, rate = n, rate * in_epoch
    elif settings.simulation == "gradient":
        batch, rate, epochs = n, rate * in_epoch * epochs, 1
    simulated = replace(work, kind="fedavg", learning_rate=rate, epochs=epochs, steps=None, batch_size=batch)
    sign = -1.0 if first.kind == "gradient" else 1.0
    updates = torch.stack(
        [torch.cat([sign * each.update[name].flatten() for name in each.weights]) for each in observations]
    )
    if clients == 1:
        updates, labels = updates.repeat_interleave(copies, dim=0), labels.repeat_interleave(copies, dim=0)
    text = cases[0].knowledge.kind == "text"
    return Target(Simulator(first.model, simulated, text=text), updates, labels, epochs, batch)


def _relaxation(cases: Sequence[Case], settings: FedAvgAttack) -> Relaxation:
    """The space in which the examples of these clients are looked for."""
    first, knowledge = cases[0].rounds[0], cases[0].knowledge
    if knowledge.kind == "image":
        return relaxed_images(knowledge, settings.start_spread)
    entries = [each.update[name] for case in cases for each in case.rounds for name in list(each.weights)[:1]]
    if knowledge.kind == "table":
        whole = entries[0].dim() == 2 and entries[0].shape[1] == math.prod(knowledge.input_shape)
        present = torch.stack(entries).ne(0).any(0).any(0) if whole else torch.ones(knowledge.input_shape).bool()
        return relaxed_rows(knowledge, present)
    if not isinstance(first.model, Transformer):
        raise AttackError(f"attack fedavg reads text through the model transformer, not {type(first.model).__name__}")
    rows = torch.stack([case.rounds[0].update["tokens.weight"] for case in cases]).ne(0).any(2).any(0)
    return relaxed_windows(knowledge.input_shape[0], knowledge.classes, rows.nonzero().squeeze(1))


def _first_guess(problem: Problem, near: Tensor | None, seed: int) -> Tensor:
    """(R, n, *shape): from features; else noise around the middle, drawn nearer by the surrogate model if asked for."""
    first, relaxation, settings = problem.targets[0], problem.relaxation, problem.settings
    replicas = len(first.labels)
    if near is not None:
        return relaxation.feasible(near).repeat_interleave(replicas // len(near), dim=0)
    generator = torch.Generator().manual_seed(int(stream(seed, "attack-start").integers(2**63)))
    # Every client and every weight of the prior has the same starts; the clients of a sum must not begin alike.
    starts = replicas if first.summed else settings.restarts
    noise = torch.randn(starts, first.examples, *relaxation.middle.shape, generator=generator)
    noise = noise.repeat(replicas // starts, *(1 for _ in noise.shape[1:]))
    guess = relaxation.feasible(relaxation.middle + relaxation.spread * noise)
    if settings.surrogate and not first.summed:
        return surrogate_guess(
            first.simulator, first.updates, first.labels, guess, relaxation, settings.surrogate, settings.learning_rate
        )
    return guess


def _answer(
    problem: Problem, case: Case, examples: Tensor, spread: Tensor, chosen: Tensor, left: Tensor
) -> Reconstruction:
    """The pooled examples; the confidence is how well the epochs agree, and how much of the update they explain."""
    target, settings, knowledge = problem.targets[0], problem.settings, case.knowledge
    settled = problem.relaxation.settle(examples)
    labels = target.labels[chosen].flatten()
    if knowledge.kind == "text":
        settled, labels = settled[:, :-1], settled[:, 1:]
    scale = float((problem.relaxation.spread / settings.start_spread).mean()) if knowledge.kind == "image" else 1.0
    loss = float(left[chosen].mean())
    weight = float(problem.prior_weights[chosen[0]])
    note = (
        f"simulated {target.epochs} epochs in batches of {target.batch} ({settings.simulation}, inputs"
        f" {settings.inputs}, prior weight {weight:g}), from {len(case.rounds)} rounds; the confidence is how well the"
        " epochs agree, not a probability"
    )
    return Reconstruction(
        attack="fedavg",
        inputs=settled if knowledge.kind == "text" else settled.view(-1, *knowledge.input_shape),
        labels=labels,
        loss=loss,
        confidence=torch.exp(-((10 * spread / scale) ** 2)) * math.exp(-min(10 * loss, 50.0)),
        label_counts=torch.bincount(labels.flatten(), minlength=knowledge.classes),
        notes=(*case.notes, note),
    )
