# SPDX-License-Identifier: Apache-2.0
"""The replica kernel: K independent models trained at once, each with its own data, batches, noise and length.

`train_cohort` does the local work of all clients of a round, with and without example-level differential privacy.
`layout_of` says where each tensor of a model lies in the flat vectors that go in and come out.
"""

from fedsim.training.batches import ExampleClipping, LocalWork, batch_schedule
from fedsim.training.client import CohortResult
from fedsim.training.layout import Layout, layout_of
from fedsim.training.local import check_private_training, train_cohort
from fedsim.training.memory import keep_freed_memory
from fedsim.training.replicas import expressible

__all__ = [
    "CohortResult",
    "ExampleClipping",
    "Layout",
    "LocalWork",
    "batch_schedule",
    "check_private_training",
    "expressible",
    "layout_of",
    "train_cohort",
]

keep_freed_memory()
