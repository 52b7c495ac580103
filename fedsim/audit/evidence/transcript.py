# SPDX-License-Identifier: Apache-2.0
"""What the transcript of a run itself shows of its examples: an audit without canaries, and without training anew.

An auditor who knows the data and the batches subtracts from every update what all other examples put into it: the
clipped sum of the batch. What is left is the noise and, by a fair coin, one example of the batch (or none, and then it
is looked for one that was not in it). Its length along that example's own clipped gradient, in clipping norms, is the
score of the step; for an example whose gradient is clipped it has the law of a canary's. One score an update, because
examples are not orthogonal. What is audited is what was sent in that run, and not what would be sent in another.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsim.attacks.evidence import observations
from fedsim.attacks.observation import Observation
from fedsim.audit.evidence.federated import Echo, Evidence, Numbers, Progress, audited_claim, audited_clients
from fedsim.errors import AuditError
from fedsim.federation.client import local_work
from fedsim.federation.evaluation import evaluate
from fedsim.federation.plan import Plan, plan
from fedsim.federation.run import Run
from fedsim.federation.truth import batches
from fedsim.randomness import ClientRandomness, stream
from fedsim.training import LocalWork, train_cohort

CANDIDATES = 8
"""Examples of which the one with the longest clipped gradient is looked at."""
_HEARD = 2000  # coordinates of the noise that are compared with those of the round before


def transcript_evidence(run: Run, *, seed: int = 0, progress: Progress | None = None) -> Evidence:
    """What the kept updates of a run show of single examples.

    Needs example_dp with Poisson batches and one local step in a round; an active server's weights are as good as
    others.
    """
    planned = plan(run.scenario)
    claim, work = audited_claim(planned, "example"), local_work(run.scenario, planned.noise.example or 0.0)
    clients = set(audited_clients(planned, claim, work))
    if run.scenario.defence.secure_aggregation or not (run.path / "truth").is_dir():
        raise AuditError(
            f"{run.path}: the transcript is audited where single updates and the truth about them are kept; audit the"
            " scenario by example-canaries"
        )
    seen: dict[bool, list[float]] = {True: [], False: []}
    echo, joined, chances = Echo(), 0, 0
    for number, observation in enumerate(observations(run.transcript, run.scenario, planned.model), start=1):
        if observation.client not in clients:
            continue
        present, score, noise, size = _look(planned, work, observation, seed)
        seen[present].append(score)
        echo.hear(observation.client, noise)
        joined, chances = joined + size, chances + planned.partition.size(observation.client)
        if progress is not None:
            progress(number, number)
    if min(len(seen[True]), len(seen[False])) < 3:
        raise AuditError(
            f"{run.path} keeps {len(seen[True]) + len(seen[False])} updates, too few to compare; raise"
            " adversary.keep_rounds and keep_clients and run again"
        )
    weights = planned.layout.flatten(run.model())
    accuracy = evaluate(planned.model, planned.layout, weights, planned.dataset.x_test, planned.dataset.y_test).accuracy
    nobody = np.zeros(0, dtype=bool)
    scores = np.array(seen[True]), np.array(seen[False])
    return Evidence(claim, *scores, nobody, np.zeros(0), nobody, joined, chances, echo.correlation(), accuracy)


def _look(planned: Plan, work: LocalWork, observation: Observation, seed: int) -> tuple[bool, float, Numbers, int]:
    """Whether an example was left in the update, its score, some of the noise, and the size of the batch."""
    client, round_ = int(observation.client or 0), observation.round
    batch = batches(planned, round_, client)[0]
    rng = stream(seed, "transcript audit", round_, client)
    others = np.setdiff1d(planned.partition.members(client), batch)
    present = bool(rng.random() < 0.5 and len(batch)) or not len(others)
    chosen = rng.permutation(batch if present else others)[:CANDIDATES]
    weights = planned.layout.flatten(observation.model.state_dict())
    total, examples = _clipped(planned, work, weights, batch, chosen)
    example = examples[int(examples.norm(dim=1).argmax())]
    update = planned.layout.flatten(observation.update).double()
    gradient = update if work.kind == "fedsgd" else update / -work.learning_rate
    assert work.example_dp is not None
    norm = work.example_dp.clipping_norm
    noise = (gradient * work.batch(planned.partition.size(client)) - total) / norm
    left = noise + example / norm if present else noise
    score = float(left @ example / example.norm().clamp_min(1e-12))
    return present, score, noise[:_HEARD].numpy(), len(batch)


def _clipped(
    planned: Plan, work: LocalWork, weights: Tensor, batch: np.ndarray, chosen: np.ndarray
) -> tuple[Tensor, Tensor]:
    """The sum of the clipped gradients of a batch, and those of some examples by themselves: (P,), (k, P)."""
    assert work.example_dp is not None
    silent = replace(work, kind="fedsgd", batch_size=None, example_dp=replace(work.example_dp, noise_multiplier=0.0))
    members = [batch, *(np.array([row]) for row in chosen)]
    random = [ClientRandomness(0, 0, k) for k in range(len(members))]
    data = planned.dataset
    sums = train_cohort(planned.model, weights, data.x_train, data.y_train, members, silent, random).updates.double()
    return sums[0] * len(batch), torch.as_tensor(sums[1:])
