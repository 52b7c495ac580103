# SPDX-License-Identifier: Apache-2.0
"""The ground truth: what the server could not see, kept apart from the transcript, for scoring only.

It exists in simulation only. `truth/round-00001.safetensors` holds, for each client whose update the transcript keeps,
`client-7/rows` (the rows of the training data in the order of their use) and `client-7/lengths` (how many are in each
local step).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from fedsim.federation.client import local_work
from fedsim.federation.plan import Plan
from fedsim.federation.transcript import keeps_client, keeps_round
from fedsim.randomness import ClientRandomness
from fedsim.training import batch_schedule


def batches(plan: Plan, round_: int, client: int) -> list[np.ndarray]:
    """The rows of the training data that a client used in a round, one array a local step."""
    members = plan.partition.members(client)
    rng = ClientRandomness(plan.scenario.seed, round_, client).batches()
    return [members[positions] for positions in batch_schedule(len(members), local_work(plan.scenario, 0.0), rng)]


def write_truth(plan: Plan, folder: Path) -> None:
    """Write the ground truth of everything that the transcript of a finished run keeps."""
    folder.mkdir(exist_ok=True)
    adversary = plan.scenario.adversary
    for round_, cohort in enumerate(plan.cohorts, 1):
        if not keeps_round(adversary, round_):
            continue
        tensors = {}
        for position, client in enumerate(cohort.tolist()):
            if keeps_client(adversary, client, position) and plan.partition.size(client):
                steps = batches(plan, round_, client)
                tensors[f"client-{client}/rows"] = np.concatenate(steps).astype(np.int64)
                tensors[f"client-{client}/lengths"] = np.array([len(step) for step in steps], dtype=np.int64)
        if tensors:
            temporary = folder / f"round-{round_:05d}.tmp"
            save_file(tensors, temporary)
            temporary.replace(temporary.with_suffix(".safetensors"))
