# SPDX-License-Identifier: Apache-2.0
"""A federation with canaries in it, and what the server sees of them: everything that an audit of one run needs.

The federation is that of the scenario: its data, clients, cohorts, batches, clipping and noise, by the same code
(`train_cohort` for examples; `protect` for clients, in `federated_clients`). Some rows, or some clients, give way to
canaries, each of which is present by a fair coin. The claim allows this: it holds for any data. What the server sees of
a canary in a round, in units of the sensitivity, is

    o = p + σ·N(0, 1),    p = 1 if the canary was there and joined the batch, else 0,

if the implementation is right, and something else if it is not. Two audits are made of it:
- per step (Nasr et al. 2023): o with p = 1 against o with p = 0, over all rounds; composed to the whole run;
- one run (Steinke et al. 2023): Σ_t ln(1 − q + q·exp((o_t − 1/2)/σ²)) against the coin: the log-likelihood ratio of
  everything that the server saw of a canary, which no other score outdoes.

Whatever else is in an update does not touch the canaries' coordinates or, for clients, is known to the adversary of
differential privacy and subtracted. The server's optimiser is post-processing, and is plain SGD here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.audit.evidence.canaries import Bits, MarkedData, random_places
from fedsim.errors import AuditError
from fedsim.federation.client import local_work
from fedsim.federation.cohorts import participations
from fedsim.federation.evaluation import evaluate
from fedsim.federation.plan import Plan, plan
from fedsim.privacy import SERVER, PrivacyClaim, Unit
from fedsim.randomness import ClientRandomness, stream
from fedsim.scenario import Scenario
from fedsim.training import LocalWork, batch_schedule, train_cohort

Numbers = NDArray[np.float64]
Progress = Callable[[int, int], None]
"""Called with the rounds that are done, and with how many there are."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the server saw of the canaries of one run."""

    claim: PrivacyClaim
    scores_in: Numbers
    """What it saw in a round of each canary that was there and joined, in units of the sensitivity."""
    scores_out: Numbers
    """The same of canaries that were not there, or did not join."""
    included: Bits
    """(m,) the coins of the canaries."""
    totals: Numbers
    """(m,) their log-likelihood ratios over the whole run."""
    whole: Bits
    """(m,) which of them took part as often as the claim says; the others leave less."""
    joined: int
    """How often a present canary joined a batch, of `chances`."""
    chances: int
    echo: tuple[float, int]
    """The correlation of what is left of each canary (o − p) with the same one round later, and of how many pairs."""
    accuracy: float
    """Of the model that was trained with the canaries, on held-out data."""


def example_evidence(
    scenario: Scenario, *, canaries: int | None = None, seed: int | None = None, progress: Progress | None = None
) -> Evidence:
    """Put example canaries into the clients that the claim is about, half of their rows by default, and run.

    Needs example_dp with Poisson batches and one local step in a round, because the server sees rounds.
    """
    planned, seed = plan(scenario), audit_seed(scenario) if seed is None else seed
    claim, work, clients, count = example_canaries(planned, canaries)
    marked = MarkedData.of(planned.model, planned.dataset.x_train, planned.dataset.y_train, count)
    return watched(planned, _ExampleWatch(planned, claim, work, marked, clients, seed), progress)


class Watch(Protocol):
    """Plays the rounds of a federation that has canaries in it, and notes what its server sees."""

    def play(self, round_: int, cohort: list[int], weights: Tensor) -> Tensor:
        """The weights after a round."""
        ...

    def evidence(self, weights: Tensor) -> Evidence:
        """What was seen, at the end."""
        ...


def watched(planned: Plan, watch: Watch, progress: Progress | None) -> Evidence:
    """The evidence of all rounds."""
    weights = planned.start
    for round_, cohort in enumerate(planned.cohorts, start=1):
        weights = watch.play(round_, cohort.tolist(), weights)
        if progress is not None:
            progress(round_, len(planned.cohorts))
    return watch.evidence(weights)


def example_canaries(planned: Plan, canaries: int | None) -> tuple[PrivacyClaim, LocalWork, list[int], int]:
    """What example canaries audit, in which clients, how many in each; an AuditError where there can be none."""
    claim, work = audited_claim(planned, "example"), local_work(planned.scenario, planned.noise.example or 0.0)
    clients = audited_clients(planned, claim, work)
    smallest = min(planned.partition.size(client) for client in clients)
    count = max(1, smallest // 2) if canaries is None else canaries
    if not 0 < count <= smallest:
        raise AuditError(
            f"canaries is {count}, but a client of this scenario holds {smallest} examples, some of which give way to"
            " them; choose a number between 1 and that, or give clients more (partition.examples_per_client)"
        )
    return claim, work, clients, count


def audit_seed(scenario: Scenario) -> int:
    """A seed for the runs of audits, which follows from the scenario's and is another one.

    Noise that protected a run must not be drawn again for other data: who sees both could subtract it.
    """
    return int(stream(scenario.seed, "audit").integers(2**62))


def audited_claim(planned: Plan, unit: Unit) -> PrivacyClaim:
    """The claim against the server for a unit, if it can be audited."""
    scenario = planned.scenario
    found = [claim for claim in planned.claims if claim.unit == unit and claim.observer == SERVER]
    if not found:
        raise AuditError(
            f"the scenario claims nothing for {unit}s; set defence.{unit}_dp, or use another kind of audit"
        )
    if not found[0].finite:
        raise AuditError(f"the claim for {unit}s has no noise and an infinite epsilon; there is nothing to refute")
    if scenario.defence.compression is not None or (unit == "example" and scenario.defence.client_dp is not None):
        raise AuditError(
            f"what comes after the noise for {unit}s (defence.client_dp, defence.compression) hides what is audited;"
            " audit the scenario without it: the claim is the same"
        )
    return found[0]


def audited_clients(planned: Plan, claim: PrivacyClaim, work: LocalWork) -> list[int]:
    """The clients that spent what is claimed; under secure aggregation one of them."""
    scenario = planned.scenario
    if planned.dataset.kind == "text":
        raise AuditError("example canaries are rows of images or tables, and this data is text; audit its client_dp")
    if claim.sampling != "poisson":
        raise AuditError(
            "defence.example_dp.batches shuffle is accounted without the sampling that it has, so that no audit of one"
            " step says anything about it; use batches: poisson"
        )
    plain = scenario.client.optimizer == "sgd" and not scenario.client.momentum and not scenario.client.weight_decay
    takes_part = participations(planned.cohorts)
    size = planned.partition.size
    spent_most = [
        client
        for client, count in sorted(takes_part.items())
        if size(client)
        and count * work.local_steps(size(client)) == claim.compositions
        and abs(work.batch(size(client)) / size(client) - claim.sample_rate) < 1e-12
    ]
    if any(work.local_steps(size(client)) != 1 for client in spent_most) or not (plain or work.kind == "fedsgd"):
        raise AuditError(
            "a client takes several local steps in a round, or not by plain SGD, so that the server does not see single"
            " steps; use strategy fedsgd, or client.steps 1"
        )
    return spent_most[:1] if scenario.defence.secure_aggregation else spent_most


class _ExampleWatch:
    """Plays rounds with example canaries, and notes what the server sees of them."""

    def __init__(
        self, planned: Plan, claim: PrivacyClaim, work: LocalWork, marked: MarkedData, clients: list[int], seed: int
    ) -> None:
        self._planned, self._claim, self._work, self._marked, self._seed = planned, claim, work, marked, seed
        count, size = marked.canaries, planned.partition.size
        self._coins = {client: stream(seed, "canary coins", client).random(count) < 0.5 for client in clients}
        self._places = {c: random_places(size(c), count, stream(seed, "canary places", c)) for c in clients}
        self._totals = {client: np.zeros(count) for client in clients}
        self._in: list[Numbers] = []
        self._out: list[Numbers] = []
        self._joined = self._chances = 0
        self._echo = Echo()

    def play(self, round_: int, cohort: list[int], weights: Tensor) -> Tensor:
        """One round; the weights of the user's own model after it."""
        marked, scenario = self._marked, self._planned.scenario
        if not cohort:
            return weights
        randomness = [ClientRandomness(self._seed, round_, client) for client in cohort]
        members = [self._members(client) for client in cohort]
        start = marked.start(weights)
        result = train_cohort(marked.model, start, marked.x, marked.y, members, self._work, randomness)
        gradients = result.updates if self._work.kind == "fedsgd" else result.updates / -self._work.learning_rate
        for k, client in enumerate(cohort):
            if client in self._coins:
                row = gradients.sum(0) if scenario.defence.secure_aggregation else gradients[k]
                self._note(client, randomness[k], row)
        shares = result.examples.float() if scenario.strategy.weighting != "uniform" else torch.ones(len(cohort))
        step = (shares / shares.sum()) @ torch.stack([marked.inner(update) for update in result.updates])
        sign = -1.0 if self._work.kind == "fedsgd" else 1.0
        return weights + sign * scenario.strategy.server_learning_rate * step

    def _members(self, client: int) -> NDArray[np.int64]:
        rows = self._planned.partition.members(client)
        if client not in self._coins:
            return rows
        return self._marked.members(rows, self._places[client], self._coins[client])

    def _note(self, client: int, randomness: ClientRandomness, gradient: Tensor) -> None:
        """Compare what was seen with what was there; the batch is known to the auditor, not to the adversary."""
        example_dp = self._work.example_dp
        assert example_dp is not None
        rows = self._planned.partition.size(client)
        in_batch = np.zeros(rows, dtype=bool)
        in_batch[batch_schedule(rows, self._work, randomness.batches())[0]] = True
        coins, chosen = self._coins[client], in_batch[self._places[client]]
        scale = self._work.batch(rows) / example_dp.clipping_norm
        seen = self._marked.seen(gradient.unsqueeze(0))[0] * scale
        self._in.append(seen[coins & chosen])
        self._out.append(seen[~(coins & chosen)])
        self._totals[client] += log_likelihood_ratio(seen, self._claim.noise_multiplier, self._claim.sample_rate)
        self._echo.hear(client, seen - (coins & chosen))
        self._joined += int((coins & chosen).sum())
        self._chances += int(coins.sum())

    def evidence(self, weights: Tensor) -> Evidence:
        """Everything that was noted."""
        planned = self._planned
        data = planned.dataset
        return Evidence(
            self._claim,
            np.concatenate(self._in),
            np.concatenate(self._out),
            np.concatenate([self._coins[client] for client in self._coins]),
            np.concatenate([self._totals[client] for client in self._coins]),
            np.ones(len(self._coins) * self._marked.canaries, dtype=bool),
            self._joined,
            self._chances,
            self._echo.correlation(),
            evaluate(planned.model, planned.layout, weights, data.x_test, data.y_test).accuracy,
        )


class Echo:
    """Compares what is left of canaries with what was left one round before: fresh noise has no echo."""

    def __init__(self) -> None:
        self._before: dict[int, Numbers] = {}
        self._sums = np.zeros(3)
        self._pairs = 0

    def hear(self, who: int, left: Numbers) -> None:
        """Note what is left of somebody's canaries in a round."""
        before = self._before.get(who)
        if before is not None:
            self._sums += [float(before @ left), float(before @ before), float(left @ left)]
            self._pairs += len(left)
        self._before[who] = left

    def correlation(self) -> tuple[float, int]:
        """The correlation about zero, and the number of pairs that it is taken over."""
        product, first, second = self._sums
        return (float(product / np.sqrt(first * second)) if first and second else 0.0), self._pairs


def log_likelihood_ratio(seen: Numbers, noise_multiplier: float, sample_rate: float) -> Numbers:
    """The logarithm of (1 − q)·N(o; 0, σ²) + q·N(o; 1, σ²) over N(o; 0, σ²): ln(1 − q + q·exp((o − 1/2)/σ²))."""
    exponent = (seen - 0.5) / noise_multiplier**2
    if sample_rate == 1:
        return exponent
    ratio: Numbers = np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + exponent)
    return ratio
