# SPDX-License-Identifier: Apache-2.0
"""Client canaries: clients that send the largest update that clipping allows, and what the server sees of them.

The updates of all clients of a round, canaries or not, go through the client's own defence (`protect`). Where each
client adds its own noise the server sees every canary alone; where the noise is shared it sees the sum of all, from
which the clipped updates of the others are subtracted, which the adversary of differential privacy knows. Canaries have
coordinates of their own, so that they do not hide each other.
"""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import ConfigRecord
from torch import Tensor

from fedsim.audit.evidence.canaries import MARKS, update_canaries
from fedsim.audit.evidence.federated import (
    Echo,
    Evidence,
    Progress,
    audit_seed,
    audited_claim,
    log_likelihood_ratio,
    watched,
)
from fedsim.errors import AuditError, counted
from fedsim.federation.client import local_work, protect
from fedsim.federation.cohorts import participations
from fedsim.federation.evaluation import evaluate
from fedsim.federation.plan import Plan, plan
from fedsim.privacy import PrivacyClaim, clip
from fedsim.randomness import ClientRandomness, stream
from fedsim.scenario import Scenario
from fedsim.training import train_cohort


def client_evidence(
    scenario: Scenario, *, canaries: int | None = None, seed: int | None = None, progress: Progress | None = None
) -> Evidence:
    """Let some clients send canaries in place of updates, and run.

    By default they are a quarter of the population, or as many as there is room for.
    Where each client adds its own noise the claim is about replacing what a client holds, so an absent canary sends
    the opposite vector; where the noise is shared and the server sees the sum, it sends zero. The canaries are the
    clients that take part most often, whose number of rounds is that of the claim.
    """
    planned, seed = plan(scenario), audit_seed(scenario) if seed is None else seed
    claim, chosen = client_canaries(planned, canaries)
    return watched(planned, _ClientWatch(planned, claim, chosen, seed), progress)


def client_canaries(planned: Plan, canaries: int | None) -> tuple[PrivacyClaim, list[int]]:
    """What client canaries audit, and which clients they are; an AuditError where there can be none."""
    claim, section = audited_claim(planned, "client"), planned.scenario.defence.client_dp
    if section is None or section.noise != "gaussian" or section.adaptive is not None:
        raise AuditError(
            "client canaries are for Gaussian noise and a fixed clipping norm; use noise: gaussian without adaptive, or"
            " audit the mechanism itself with `fedsim audit module:function`"
        )
    takes_part = participations(planned.cohorts)
    most = min(len(takes_part), planned.layout.size // MARKS)
    count = min(most, max(1, planned.population // 4)) if canaries is None else canaries
    if not 0 < count <= most:
        raise AuditError(
            f"canaries is {count}, but {counted(len(takes_part), 'client')} take part and the model's"
            f" {counted(planned.layout.size, 'parameter')} have room for {planned.layout.size // MARKS} canaries;"
            f" {_remedy(most)}"
        )
    chosen = [client for client, _ in takes_part.most_common(count)]
    return claim, chosen


def _remedy(most: int) -> str:
    return f"choose a number between 1 and {most}" if most else f"choose a model of at least {MARKS} parameters"


class _ClientWatch:
    """Plays rounds with client canaries, and notes what the server sees of them."""

    def __init__(self, planned: Plan, claim: PrivacyClaim, chosen: list[int], seed: int) -> None:
        section = planned.scenario.defence.client_dp
        assert section is not None
        self._planned, self._claim, self._seed, self._norm = planned, claim, seed, section.clipping_norm
        self._place = {client: j for j, client in enumerate(chosen)}
        self._coins = stream(seed, "canary coins").random(len(chosen)) < 0.5
        rng = stream(seed, "canary directions")
        self._directions = update_canaries(planned.layout.size, len(chosen), 1.0, rng)
        self._strength = 1e3 * self._norm
        self._totals, self._rounds = np.zeros(len(chosen)), np.zeros(len(chosen), dtype=np.int64)
        self._in: list[float] = []
        self._out: list[float] = []
        self._echo = Echo()

    def play(self, round_: int, cohort: list[int], weights: Tensor) -> Tensor:
        """One round; the weights after it."""
        planned, scenario = self._planned, self._planned.scenario
        if not cohort:
            return weights
        randomness = [ClientRandomness(self._seed, round_, client) for client in cohort]
        updates, clean = self._updates(cohort, randomness, weights)
        noise = planned.noise.client or 0.0
        config = {"cohort-size": len(cohort), "clipping-norm": self._norm, "client-noise-multiplier": noise}
        sent, _ = protect(updates, scenario, ConfigRecord({**config}), randomness)
        for k, client in enumerate(cohort):
            if client in self._place:
                row = sent.double().sum(0) - clean if scenario.defence.secure_aggregation else sent[k].double()
                self._note(self._place[client], row)
        step = sent.mean(0)
        sign = -1.0 if scenario.strategy.name == "fedsgd" else 1.0
        return weights + sign * scenario.strategy.server_learning_rate * step

    def _updates(self, cohort: list[int], randomness: list[ClientRandomness], weights: Tensor) -> tuple[Tensor, Tensor]:
        """(K, P) what each client would send without a defence; and the clipped sum of those that are no canaries."""
        planned = self._planned
        updates = torch.zeros(len(cohort), planned.layout.size)
        others = [k for k, client in enumerate(cohort) if client not in self._place]
        if others:
            x, y = planned.dataset.x_train, planned.dataset.y_train
            members = [planned.partition.members(cohort[k]) for k in others]
            work = local_work(planned.scenario, planned.noise.example or 0.0)
            random = [randomness[k] for k in others]
            updates[others] = train_cohort(planned.model, weights, x, y, members, work, random).updates
        clean = clip(updates, self._norm).values.double().sum(0)
        for k, client in enumerate(cohort):
            if (j := self._place.get(client)) is not None:
                absent = -1.0 if self._claim.adjacency == "replace" else 0.0
                updates[k] = self._directions[j] * self._strength * (1.0 if self._coins[j] else absent)
        return updates, clean

    def _note(self, j: int, row: Tensor) -> None:
        """The length of what was seen along canary j, in units of the sensitivity: about 1 if present, 0 if absent."""
        length = float(row @ self._directions[j].double()) / self._norm
        seen = length if self._claim.adjacency == "add/remove" else (length + 1) / 2
        (self._in if self._coins[j] else self._out).append(seen)
        self._totals[j] += float(log_likelihood_ratio(np.array(seen), self._claim.noise_multiplier, 1.0))
        self._echo.hear(j, np.array([seen - self._coins[j]]))
        self._rounds[j] += 1

    def evidence(self, weights: Tensor) -> Evidence:
        """Everything that was noted."""
        planned, data = self._planned, self._planned.dataset
        whole = self._rounds == self._claim.compositions
        accuracy = evaluate(planned.model, planned.layout, weights, data.x_test, data.y_test).accuracy
        scores = np.array(self._in), np.array(self._out)
        rounds = int(self._rounds.sum())
        echo = self._echo.correlation()
        coins = self._coins
        return Evidence(self._claim, *scores, coins, self._totals, whole, rounds, rounds, echo, accuracy)
