# SPDX-License-Identifier: Apache-2.0
"""The ray engine: Flower's simulation runtime, which spreads the clients over cores, or over the machines of a cluster.

The same ServerApp and ClientApp as everywhere. Flower's public `run_simulation` passes no run configuration on, so the
function behind it is called, as Flower's own simulation process does.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.telemetry import EventType

from fedsim.errors import RunError, ScenarioError
from fedsim.federation.bundle import write_bundle
from fedsim.federation.client import app as client_app
from fedsim.federation.inline import SERVER_NODE
from fedsim.federation.plan import Plan, scenario_json
from fedsim.federation.safeguards import SIMULATED
from fedsim.federation.server import Progress, server_app
from fedsim.scenario import EngineSection

_RUN = 1


def check_ray(engine: EngineSection) -> None:
    """ScenarioError where Ray is not installed, or where no cluster answers at engine.address.

    Ray itself would try for many minutes.
    """
    if importlib.util.find_spec("ray") is None:
        raise ScenarioError(
            "engine.kind ray needs Ray, which is not installed; install it with `pip install 'fedsim[ray]'`, or use"
            " engine inline"
        )
    place = re.fullmatch(r"(?:ray://)?(.+):(\d+)", engine.address or "")
    if place is None:  # Ray has names of its own: auto, local
        return
    try:
        socket.create_connection((place[1].strip("[]"), int(place[2])), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ScenarioError(
            f"engine.address is {engine.address!r}, where no Ray cluster answers ({error}); start one there with"
            " `ray start --head`, or leave engine.address out to use the cores of this machine"
        ) from error


def run_on_ray(plan: Plan, folder: Path, progress: Progress | None = None) -> None:
    """Run the rounds that are left with the clients on Ray."""
    check_ray(plan.scenario.engine)
    from flwr.simulation.run_simulation import _run_simulation

    configuration: dict[str, str | int | float | bool] = {"scenario": scenario_json(plan.scenario)}
    run = FlowerRun.create_empty(run_id=_RUN)
    run.primary_task_id, run.federation_id, run.override_config = 1, NOOP_FEDERATION_ID, configuration
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = _RUN, SERVER_NODE, 1
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    stop = threading.Event()
    flower = logging.getLogger("flwr")
    before = flower.level
    with tempfile.TemporaryDirectory() as bundle:
        flower.setLevel(logging.ERROR)
        try:
            start_ray(plan.scenario.engine)
            _run_simulation(
                num_supernodes=plan.population,
                exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
                client_app=client_app,
                server_app=server_app(progress, stop),
                backend_config=backend(plan.scenario.engine),
                server_app_context=Context(
                    _RUN, SERVER_NODE, {}, RecordDict(), {**configuration, "folder": str(folder.absolute())}
                ),
                app_dir=str(write_bundle(Path(bundle))),
                run=run,
                is_app=True,
            )
        except (RuntimeError, ConnectionError) as error:
            raise RunError(f"Ray could not run the federation: {error}; see its log, or use engine inline") from error
        finally:
            stop.set()
            flower.setLevel(before)


def backend(engine: EngineSection) -> dict[str, Any]:
    """Flower's configuration of Ray."""
    return {"client_resources": {"num_cpus": engine.client_cpus, "num_gpus": 0.0}}


def start_ray(engine: EngineSection) -> None:
    """Start Ray, or connect to the cluster of engine.address, before Flower does it.

    Its workers must know that their clients are simulated, on whatever machine they are, and Flower leaves no room for
    an environment beside its own (PYTHONPATH, as here).
    """
    import ray

    path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
    ray.init(
        address=engine.address,
        runtime_env={"env_vars": {SIMULATED: "1", "PYTHONPATH": path}},
        include_dashboard=None if engine.address else False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        ignore_reinit_error=True,
    )
