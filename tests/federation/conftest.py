# SPDX-License-Identifier: Apache-2.0
"""A run by the real protocol of secure aggregation, on nodes that are in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.federation import run as running
from fedsim.federation.bundle import public_scenario
from fedsim.federation.folder import create_folder
from fedsim.federation.run import Run
from fedsim.federation.server import serve
from fedsim.scenario import Scenario
from fedsim.scenario_file import dump_scenario


@pytest.fixture
def deployed(world: Any) -> Callable[[Scenario, Path], Run]:
    """Runs a scenario in a folder as a SuperLink would, on the nodes of the world."""

    def run(settings: Scenario, folder: Path) -> Run:
        settings = settings.model_copy(update={"engine": settings.engine.model_copy(update={"kind": "deploy"})})
        create_folder(folder, {"scenario.yaml": dump_scenario(settings)})
        grid = running.InlineGrid(
            settings.cohort.population or 0, lambda *_: [], {"scenario": public_scenario(settings), "deployed": True}
        )
        serve(grid, fedsim.plan(settings), folder)
        return Run(folder)

    return run
