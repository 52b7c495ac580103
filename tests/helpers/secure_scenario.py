# SPDX-License-Identifier: Apache-2.0
"""A small federation with secure aggregation, whose rounds soon give up waiting."""

from __future__ import annotations

from typing import Any

from fedsim.scenario import Scenario

SMALL: dict[str, Any] = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [8]},
    "cohort": {"population": 5, "size": 4, "deadline": 0.3, "retries": 0},
    "partition": {"kind": "dirichlet", "alpha": 0.5},
    "defence": {"secure_aggregation": True},
    "rounds": 2,
}


def scenario(**changes: Any) -> Scenario:
    return Scenario.model_validate({**SMALL, **changes})
