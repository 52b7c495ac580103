# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: everything that is decided before the first round, and everything that can be wrong with it.

Who takes part in which round is a function of the seed, so the privacy that a run will have spent is known exactly
before it begins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedsim.data import Dataset, Partition, label_counts
from fedsim.errors import ModelError, ScenarioError, counted
from fedsim.federation.asked import Asked, Rows
from fedsim.federation.client import local_work, workplace
from fedsim.federation.cohorts import Cohort, expected_size, sample_cohort
from fedsim.federation.evaluation import evaluate
from fedsim.federation.notes import notes
from fedsim.models import describe
from fedsim.privacy import Noise, PrivacyClaim, privacy_curve, resolve_noise, rows_needed, settings_by_round
from fedsim.randomness import ClientRandomness
from fedsim.scenario import Scenario
from fedsim.strategies.malicious import check_active, forge_of
from fedsim.training import Layout, batch_schedule, check_private_training, train_cohort

PICTURED_CLIENTS = 40
TIMED_BYTES = 1 << 26
"""Of a larger model not even a step is taken to foresee the time of a run: that takes many copies of it."""
_RATE, _BANDWIDTH = 2e10, 4e9
"""Operations, and bytes of weights that are read or written, in a second of an ordinary processor."""


@dataclass(frozen=True, repr=False)
class Plan:
    """A scenario with its data, its model, its cohorts and its privacy claims."""

    scenario: Scenario
    dataset: Dataset
    partition: Partition
    model: nn.Module
    layout: Layout
    start: Tensor
    population: int
    cohort_size: float
    cohorts: tuple[Cohort, ...]
    noise: Noise
    curve: tuple[tuple[PrivacyClaim, ...], ...]
    memory: int = 0
    """About how many bytes the run needs, beside its data."""

    def __repr__(self) -> str:
        scenario = self.scenario
        return (
            f"Plan({scenario.name!r}: {scenario.strategy.name}, {counted(scenario.rounds, 'round')},"
            f" {counted(self.population, 'client')}, {scenario.model.name} with"
            f" {counted(self.parameters, 'parameter')}, {counted(len(self.claims), 'privacy claim')})"
        )

    @property
    def parameters(self) -> int:
        """Trainable parameters of the model."""
        return self.layout.parameters

    @property
    def claims(self) -> tuple[PrivacyClaim, ...]:
        """What the whole run will have spent; the first claim is the one against the server."""
        return self.curve[-1]

    def claims_after(self, round_: int) -> tuple[PrivacyClaim, ...]:
        """What the first rounds will have spent; nothing is claimed before the first."""
        return self.curve[round_ - 1] if round_ else ()

    @property
    def steps_per_round(self) -> int:
        """The most local steps that a client does in a round."""
        sizes = {self.partition.size(int(client)) for cohort in self.cohorts for client in cohort}
        work = local_work(self.scenario, 0.0)
        rng = np.random.default_rng(0)
        return max((len(batch_schedule(size, work, rng)) for size in sizes if size), default=0)

    @property
    def messages(self) -> int:
        """What passes the server: the model of each round, and an answer of each client, or one sum."""
        sums = self.scenario.defence.secure_aggregation
        return sum(1 + (1 if sums else len(cohort)) for cohort in self.cohorts)

    @property
    def notes(self) -> list[str]:
        """What the user should know of this scenario."""
        return notes(self)

    @property
    def transcript_bytes(self) -> int:
        """About how much the transcript will hold."""
        adversary, updates = self.scenario.adversary, self._updates_of_a_round
        rounds = _kept(adversary.keep_rounds, self.scenario.rounds)
        models = 1 + (updates if getattr(adversary.active, "kind", "") == "per-client" else 0)
        return 4 * self.layout.size * rounds * (models + updates)

    @property
    def kept_updates(self) -> int:
        """About how many updates the transcript will hold."""
        return _kept(self.scenario.adversary.keep_rounds, self.scenario.rounds) * self._updates_of_a_round

    @property
    def _updates_of_a_round(self) -> int:
        sums = self.scenario.defence.secure_aggregation
        return 1 if sums else _kept(self.scenario.adversary.keep_clients, round(self.cohort_size))


def scenario_json(scenario: Scenario) -> str:
    """The scenario as one string: what was set, so that it validates again to the same."""
    return scenario.model_dump_json(exclude_unset=True)


@lru_cache(maxsize=4)
def plan(scenario: Scenario) -> Plan:
    """Prepare a run without writing anything; raises a FedsimError for whatever is impossible."""
    place = workplace(scenario_json(scenario))
    population = place.partition.population
    size = expected_size(scenario.cohort, population)
    cohorts = tuple(
        sample_cohort(scenario.cohort, population, scenario.seed, round_) for round_ in range(1, scenario.rounds + 1)
    )
    if scenario.defence.example_dp is not None and place.layout.size > place.layout.parameters:
        raise ModelError(
            f"model {scenario.model.name!r} has buffers that change with the data and that DP-SGD does not noise;"
            " use a model without running statistics (norm: group), or defence.client_dp"
        )
    if not any(len(cohort) for cohort in cohorts):
        raise ScenarioError(f"cohort: nobody is drawn in {scenario.rounds} rounds; raise cohort.rate or rounds")
    if scenario.defence.secure_aggregation:
        _check_sums(scenario, cohorts)
    _check_attacks(scenario, place.dataset.kind)
    _check_kept_clients(scenario, population)
    rate = min(1.0, size / population)
    noise = resolve_noise(scenario, settings_by_round(cohorts, place.partition.size, rate)[-1])
    curve = privacy_curve(scenario, noise, cohorts, place.partition.size, rate)
    start = place.layout.flatten(place.model.state_dict())
    if scenario.defence.example_dp is not None:
        x, y = place.dataset.x_train, place.dataset.y_train
        try:
            check_private_training(place.model, start, x, y, local_work(scenario, noise.example or 0.0))
        except ModelError as error:
            raise ModelError(f"model.name {scenario.model.name}: {error}, or defence.client_dp") from error
    if scenario.adversary.active is not None:
        work = local_work(scenario, 0.0)
        forge = forge_of(scenario, place.model, place.layout, place.dataset, place.partition, work)
        check_active(forge, start, next(cohort for cohort in cohorts if len(cohort)).tolist())
    return Plan(
        scenario,
        place.dataset,
        place.partition,
        place.model,
        place.layout,
        start,
        population,
        size,
        cohorts,
        noise,
        tuple(curve),
        place.memory,
    )


Told = dict[int, set[int]]
"""How many examples each client has said that it holds: one number, unless its data has changed."""


def as_told(plan: Plan, told: Told) -> Plan:
    """The plan with the claims that follow from what simulated clients say that they hold.

    One that brings a file of its own may hold other data than the scenario's copy, and its sampling rate, hence what an
    example spends, depends on how many there are. Of a client that has said several numbers the worst of each counts
    (`Exposure`). The noise stays as it was planned.
    """
    same = all({plan.partition.size(client)} == sizes for client, sizes in told.items())
    if same or plan.scenario.defence.example_dp is None:
        return plan

    def sizes(client: int) -> set[int]:
        return told.get(client) or {plan.partition.size(client)}

    rate = min(1.0, plan.cohort_size / plan.population)
    curve = privacy_curve(
        plan.scenario, plan.noise, plan.cohorts, lambda c: min(sizes(c)), rate, most=lambda c: max(sizes(c))
    )
    return replace(plan, curve=tuple(curve))


def as_asked(plan: Plan, asked: Sequence[Asked], rounds: int) -> Plan:
    """The plan with the claims on what a deployment has spent in its first rounds, in place of what was planned.

    What the server's own file holds does not count. Each request counts, answered or not, with the rows that its client
    has said or vouches for; of several the worst of each (`Exposure`). Where what an example spends depends on a number
    that nobody vouches for, there is no claim for it.
    """
    least_counts, most_counts = rows_needed(plan.scenario)
    begun = max([1, rounds, *(request.round for request in asked)])  # of an interrupted attempt, one more
    cohorts: list[list[int]] = [[] for _ in range(begun)]
    held: dict[int, list[Rows]] = {}
    unknown: list[Asked] = []
    for request in asked:
        cohorts[request.round - 1].append(request.client)
        held.setdefault(request.client, []).append(request.rows or Rows(1))
        if (least_counts and request.rows is None) or (most_counts and (request.rows or Rows(1)).most is None):
            unknown.append(request)
    curve = privacy_curve(
        plan.scenario,
        plan.noise,
        cohorts,
        lambda client: min(rows.least for rows in held[client]),
        min(1.0, plan.cohort_size / plan.population),
        most=lambda client: max(rows.most or rows.least for rows in held[client]),
    )
    if unknown:
        curve = [tuple(_without_rows(claim, unknown[0], most=most_counts) for claim in claims) for claims in curve]
    return replace(plan, curve=tuple(curve))


def _without_rows(claim: PrivacyClaim, request: Asked, *, most: bool) -> PrivacyClaim:
    """No claim for one example, and the reason; a claim for clients stands."""
    if claim.unit != "example":
        return claim
    fields = "smallest_examples and largest_examples" if most else "smallest_examples"
    reason = (
        f"client {request.client} may have answered round {request.round}, and it vouches for no number of rows, on"
        f" which the sampling rate depends; set {fields} in its policy.yaml, and run the scenario again"
    )
    return replace(claim, epsilon=math.inf, mechanism=reason)


def summary(plan: Plan) -> dict[str, Any]:
    """What a report tells about the run, beside its metrics and claims."""
    dataset = plan.dataset
    pictured = _pictured(plan.cohorts)
    counts = label_counts(plan.partition, dataset.y_train, pictured, dataset.classes)
    return {
        "name": plan.scenario.name,
        "question": plan.scenario.question,
        "rounds": plan.scenario.rounds,
        "parameters": plan.parameters,
        "model_text": describe(plan.model),
        "data": dataset.name,
        "kind": dataset.kind,
        "classes": dataset.classes,
        "class_names": list(dataset.class_names),
        "train_rows": len(dataset.x_train),
        "test_rows": len(dataset.x_test),
        "input_shape": list(dataset.x_train.shape[1:]),
        "population": plan.population,
        "cohort_size": plan.cohort_size,
        "noise": vars(plan.noise),
        "partition": {
            "clients": pictured,
            "counts": counts.tolist(),
            "sizes": [plan.partition.size(c) for c in pictured],
        },
        "cohorts": [cohort.tolist() for cohort in plan.cohorts],
        "notes": notes(plan),
    }


def estimate_seconds(plan: Plan) -> float:
    """About how long the run may take: a few real local steps and one evaluation, extrapolated, and compiling."""
    if 4 * plan.layout.size > TIMED_BYTES:
        return _reckoned_seconds(plan)
    clients = next(cohort for cohort in plan.cohorts if len(cohort))[:8].tolist()
    members = [plan.partition.members(client) for client in clients]
    randomness = [ClientRandomness(plan.scenario.seed, 0, client) for client in clients]
    work = local_work(plan.scenario, plan.noise.example or 0.0)
    if work.kind == "fedavg":
        work = replace(work, steps=2)
    arguments = (plan.model, plan.start, plan.dataset.x_train, plan.dataset.y_train, members, work, randomness)
    started = time.perf_counter()
    train_cohort(*arguments)
    begun = time.perf_counter()
    steps = int(train_cohort(*arguments).steps.sum())
    trained = time.perf_counter()
    evaluate(plan.model, plan.layout, plan.start, plan.dataset.x_test, plan.dataset.y_test)
    evaluated = time.perf_counter()
    client_rounds = sum(len(cohort) for cohort in plan.cohorts)
    evaluations = 1 + plan.scenario.rounds // plan.scenario.evaluate_every
    training = (trained - begun) / max(steps, 1) * client_rounds * plan.steps_per_round
    compiling = max(0.0, (begun - started) - (trained - begun))
    return compiling + training + (evaluated - trained) * evaluations


def _reckoned_seconds(plan: Plan) -> float:
    """The same for a model that is too large to be tried: by its operations, and the weights that each step moves."""
    sizes = [plan.partition.size(int(client)) for cohort in plan.cohorts for client in cohort]
    work = local_work(plan.scenario, 0.0)
    steps = sum(work.local_steps(rows) for rows in sizes)
    examples = sum(work.local_steps(rows) * work.batch(rows) for rows in sizes if rows)
    evaluations = 1 + plan.scenario.rounds // plan.scenario.evaluate_every
    operations = plan.parameters * (6.0 * examples + 2.0 * evaluations * len(plan.dataset.x_test))
    return operations / _RATE + 12.0 * plan.layout.size * steps / _BANDWIDTH


def _check_sums(scenario: Scenario, cohorts: Sequence[Cohort]) -> None:
    """A sum over one client is its update. Under a claim for clients a drawn cohort may be of one: it is noised."""
    if scenario.defence.client_dp is not None and scenario.cohort.sampling == "poisson":
        return
    alone = next((round_ for round_, cohort in enumerate(cohorts, 1) if len(cohort) == 1), None)
    if alone is not None:
        raise ScenarioError(
            f"defence.secure_aggregation: in round {alone} there is one client, whose update would be the sum; use a"
            " larger cohort"
        )


def _check_attacks(scenario: Scenario, kind: str) -> None:
    """What an attack needs and this scenario does not have."""
    needs = {"tabular": "table", "text": "text"}
    for number, attack in enumerate(scenario.attacks):
        if needs.get(attack.name, kind) != kind:
            raise ScenarioError(
                f"attacks.{number}: {attack.name} reads {needs[attack.name]} data, but {scenario.data.source} holds"
                f" {kind} data; use auto"
            )
        if attack.name == "imprint" and scenario.adversary.active is None:
            raise ScenarioError(
                f"attacks.{number}: imprint reads what weights made to leak collect, but the server sends honest ones;"
                " set adversary.active, or use auto"
            )
    if kind == "text" and scenario.adversary.knows.labels == "known":
        raise ScenarioError(
            "adversary.knows.labels known: the labels of a text are its next tokens, that is the text; use inferred"
        )
    if scenario.attacks and 0 in (scenario.adversary.keep_rounds, scenario.adversary.keep_clients):
        raise ScenarioError(
            "attacks: the server keeps no update to attack; raise adversary.keep_rounds or keep_clients"
        )


def _check_kept_clients(scenario: Scenario, population: int) -> None:
    """Who is to be kept exists; how many do is only known with the data at hand."""
    keep = scenario.adversary.keep_clients
    if isinstance(keep, tuple) and (strange := [client for client in keep if not 0 <= client < population]):
        there = "is client 0 only" if population == 1 else f"are clients 0 to {population - 1:,}"
        raise ScenarioError(f"adversary.keep_clients names client {strange[0]}, but there {there}; name those only")


def _kept(keep: Any, total: int) -> int:
    if keep == "all":
        return total
    return min(total, keep if isinstance(keep, int) else len(keep))


def _pictured(cohorts: Sequence[Cohort]) -> list[int]:
    """The first few clients that take part, in increasing order."""
    seen = dict.fromkeys(int(client) for cohort in cohorts for client in cohort)
    return sorted(list(seen)[:PICTURED_CLIENTS])
