# SPDX-License-Identifier: Apache-2.0
"""Messages a second and start-up time of the three engines, with nothing to compute: what carrying a message costs.

Every engine runs in a process of its own. Start-up is from the start of that process (which for `deploy` starts the
SuperLink and the SuperNodes) to the first wave of replies. Inline and Ray have 10 nodes, the deployed federation has 3
SuperNodes on this machine. Inline, arrays are handed over and not serialised: that is the point of it.

    python benchmarks/engines.py [--only inline ray deploy] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
GOAL = 20  # inline by Ray
NODES = {"inline": 10, "ray": 10, "deploy": 3}
WAVES = {"inline": 200, "ray": 20, "deploy": 2}


def inline(file: Path) -> None:
    import engine_apps

    from fedsim.federation.inline import InlineGrid, one_by_one

    grid = InlineGrid(NODES["inline"], one_by_one(engine_apps.client), {})
    file.write_text(json.dumps(engine_apps.measure(grid, NODES["inline"], WAVES["inline"])))


def ray(file: Path) -> None:
    import engine_apps
    from flwr.app import Context, RecordDict
    from flwr.simulation.run_simulation import _run_simulation
    from flwr.supercore.telemetry import EventType

    settings: dict[str, str | int | float | bool] = {"nodes": NODES["ray"], "waves": WAVES["ray"], "file": str(file)}
    _run_simulation(
        num_supernodes=NODES["ray"],
        exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
        client_app=engine_apps.client,
        server_app=engine_apps.server,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        server_app_context=Context(1, 1, {}, RecordDict(), settings),
    )


def deploy(file: Path) -> None:
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    from fedsim.federation.bundle import PYPROJECT, build_bundle
    from fedsim.federation.deployed import Link, control, state
    from fedsim.federation.loopback import Loopback

    text = PYPROJECT.replace("fedsim.federation.server:app", "engine_apps:server")
    text = text.replace("fedsim.federation.client:app", "engine_apps:client")
    text = text[: text.index("[tool.flwr.app.config]")] + '[tool.flwr.app.config]\nnodes = 0\nwaves = 0\nfile = ""\n'
    settings: dict[str, str | int | float | bool] = {
        "nodes": NODES["deploy"], "waves": WAVES["deploy"], "file": str(file)
    }  # fmt: skip
    with Loopback(file.parent / "cluster", NODES["deploy"]) as cluster:
        link = Link(cluster.address)
        with control(link) as client:
            fab = fab_to_proto(Fab("", build_bundle(text), {}))
            answer = client.StartRun(StartRunRequest(fab=fab, override_config=user_config_to_proto(settings)))
        until = time.monotonic() + 400
        while time.monotonic() < until and not (now := state(link, answer.run_id)).finished:
            time.sleep(1)
        if not file.is_file():
            raise RuntimeError(f"{now}: {cluster.log('link')[-2000:]}")


def measured(name: str) -> dict[str, float]:
    """What an engine does in a process of its own; `start-up` in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        file, begun = Path(folder) / "measured.json", time.time()
        command = [sys.executable, __file__, "--inside", name, "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not file.is_file():
            raise RuntimeError(f"{name}: {done.stderr[-3000:]}")
        found: dict[str, float] = json.loads(file.read_text())
        found["start-up"] = found.pop("first") - begun
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(NODES), default=list(NODES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", choices=list(NODES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        {"inline": inline, "ray": ray, "deploy": deploy}[arguments.inside](arguments.json)
        return
    results = {}
    print(f"{'engine':8} {'start-up s':>10} {'no-op msg/s':>12} {'100k parameters msg/s':>22}")
    for name in arguments.only:
        results[name] = found = measured(name)
        print(f"{name:8} {found['start-up']:10.1f} {found['no-op']:12.2f} {found['100k parameters']:22.2f}", flush=True)
    if {"inline", "ray"} <= results.keys():
        for kind in ("no-op", "100k parameters"):
            ratio = results["inline"][kind] / results["ray"][kind]
            verdict = "reached" if ratio >= GOAL else "NOT reached"
            print(f"inline by ray, {kind}: {ratio:.0f}x (goal {GOAL}x: {verdict})")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
