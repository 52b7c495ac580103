# SPDX-License-Identifier: Apache-2.0
"""Where games are played: the training of a scenario, repeated for all trials at once in the replica kernel.

One replica is the training of one client for all its rounds: the steps, the batches, the clipping and the noise of the
scenario, on as many rows as a client holds. Its final weights are what a white box shows. Rows come from all data that
there is, training and test, so that there are rows that were not used.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedsim.errors import AuditError, counted
from fedsim.federation.client import local_work
from fedsim.federation.plan import Plan, plan
from fedsim.privacy import SERVER, PrivacyClaim
from fedsim.randomness import ClientRandomness
from fedsim.scenario import LANGUAGE_GAMES, GameName, Scenario
from fedsim.training import Layout, LocalWork, train_cohort

Numbers = NDArray[np.float64]
Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Arena:
    """A model, a pool of rows, and how a replica is trained on some of them."""

    model: nn.Module
    layout: Layout
    start: Tensor
    x: Tensor
    y: Tensor
    classes: int
    rows: int
    """How many rows a replica is trained on."""
    work: LocalWork
    claim: PrivacyClaim | None
    """What is claimed for one of these rows against the server."""
    groups: Rows | None
    """The natural client of each of the first rows, where the data names one."""
    text: bool
    seed: int

    @classmethod
    def of(cls, scenario: Scenario, seed: int) -> Arena:
        """The arena of a scenario."""
        planned = plan(scenario)
        data = planned.dataset
        found = [claim for claim in planned.claims if claim.unit == "example" and claim.observer == SERVER]
        x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
        rows = _rows_of_a_client(planned)
        if len(x) - rows < 16:
            raise AuditError(
                f"a client holds {rows} of all {len(x)} rows, so that there are no others to compare with; set"
                " partition.examples_per_client to fewer"
            )
        work = _whole_work(planned, rows)
        return cls(
            planned.model, planned.layout, planned.start, x, y, data.classes, rows, work,
            found[0] if found else None, data.groups, data.kind == "text", seed,
        )  # fmt: skip

    def check(self, game: GameName) -> None:
        """An AuditError for a game that cannot be played here."""
        if self.text != (game in LANGUAGE_GAMES):
            mine, other = ("text", "MI") if game in LANGUAGE_GAMES else ("images and tables", "RC-Targ")
            raise AuditError(f"game {game} is played with {mine}, which this data is not; play {other}")
        dp = self.work.example_dp
        private = dp is not None and dp.batches == "poisson" and self.claim is not None and self.claim.finite
        if game == "DPD" and not private:
            raise AuditError(
                "game DPD sees every step of DP-SGD with Poisson batches; set defence.example_dp, or play MI"
            )

    @property
    def scope(self) -> str:
        """What a game in this arena leaves out of a federation."""
        return (
            f"This game plays the training of one client by itself ({counted(self.rows, 'row')},"
            f" {counted(int(self.work.steps or 1), 'step')}), not the federation: other clients, averaging, secure"
            " aggregation and noise for whole clients are left out."
        )

    def train(self, members: list[Rows], first: int = 0) -> Tensor:
        """(K, P): the final weights of replicas that are trained on these rows, the k-th with randomness first + k."""
        randomness = [ClientRandomness(self.seed, 0, first + k) for k in range(len(members))]
        return self.start + train_cohort(self.model, self.start, self.x, self.y, members, self.work, randomness).updates

    @torch.no_grad()
    def outputs(self, weights: Tensor, x: Tensor) -> Tensor:
        """(K, M, ..., classes): the outputs of K models for the same inputs."""
        self.model.eval()
        each = [functional_call(self.model, self.layout.unflatten(row), (x,), strict=False) for row in weights]
        return torch.stack(each)

    def losses(self, weights: Tensor, rows: Rows) -> Tensor:
        """(K, M, classes): the cross-entropy of M rows under K models, for each label that they could have."""
        return -F.log_softmax(self.outputs(weights, self.x[rows]).double(), -1)

    def confidence(self, weights: Tensor, rows: Rows) -> Numbers:
        """(K, M): ln p/(1 − p) of the true label, which is nearly Gaussian (Carlini et al. 2022, section VI)."""
        losses = self.losses(weights, rows).gather(-1, self.y[rows].view(1, -1, 1).expand(len(weights), -1, 1))
        return (-losses - torch.log(-torch.expm1(-losses.clamp_min(1e-12)))).squeeze(-1).numpy()


def _rows_of_a_client(planned: Plan) -> int:
    """Of the client that spent most: the claim is about its examples."""
    sizes = {planned.partition.size(int(client)) for cohort in planned.cohorts for client in cohort}
    return min(size for size in sizes if size)


def _participations(planned: Plan, rows: int) -> int:
    """The rounds of the client of so many rows that is drawn most often: the claim covers no more than them."""
    drawn = Counter(int(client) for cohort in planned.cohorts for client in cohort)
    return max(times for client, times in drawn.items() if planned.partition.size(client) == rows)


def _whole_work(planned: Plan, rows: int) -> LocalWork:
    """All steps of the rounds that a client takes part in, one after the other; FedSGD's step is the server's."""
    scenario = planned.scenario
    work = local_work(scenario, planned.noise.example or 0.0)
    steps = _participations(planned, rows) * work.local_steps(rows)
    if work.kind == "fedavg":
        return replace(work, epochs=1, steps=steps)
    rate = scenario.strategy.server_learning_rate
    return replace(
        work, kind="fedavg", optimizer="sgd", learning_rate=rate, momentum=0.0, weight_decay=0.0, steps=steps
    )
