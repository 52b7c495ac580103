# SPDX-License-Identifier: Apache-2.0
"""What Flower is given to run: a bundle with a pyproject.toml and no code.

Its components point into the fedsim that is installed on each machine, so nothing that comes over the network is ever
executed. The scenario travels as one string of the run's configuration, without what a client need not, or must not,
know: where the operator's data lies, what the server keeps and attacks, and where it runs.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from pathlib import Path

from fedsim.federation.workplace import PRIVATE_PATH
from fedsim.scenario import Scenario

SERVERS_OWN = {"adversary", "attacks", "audit", "engine", "question", "evaluate_every"}
PYPROJECT = f"""\
[project]
name = "fedsim-app"
version = "{version("fedsim")}"
description = "Runs the fedsim that is installed: see its documentation."
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedsim"

[tool.flwr.app.components]
serverapp = "fedsim.federation.server:app"
clientapp = "fedsim.federation.client:app"

[tool.flwr.app.config]
scenario = ""
folder = ""
deployed = false
largest-reply = 0
"""


def write_bundle(folder: Path) -> Path:
    """Write the bundle to a folder, which is made; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    return folder


def build_bundle(pyproject: str = PYPROJECT) -> bytes:
    """The bundle as Flower's archive."""
    from flwr.cli.build import build_fab_from_files  # a command's code: only who submits needs it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of pathspec, by the way Flower uses it
        return build_fab_from_files({"pyproject.toml": pyproject.encode()})[0]


def public_scenario(scenario: Scenario) -> str:
    """The scenario as deployed clients get it, one string that validates again."""
    if hasattr(scenario.data, "path"):
        scenario = scenario.model_copy(update={"data": scenario.data.model_copy(update={"path": PRIVATE_PATH})})
    return scenario.model_dump_json(exclude_unset=True, exclude=SERVERS_OWN)
