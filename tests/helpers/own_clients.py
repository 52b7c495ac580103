# SPDX-License-Identifier: Apache-2.0
"""Clients that have what a deployed one has: data, policy and ledger of their own, and the key of their server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fedsim
from fedsim.deploy.certificates import make_authority, make_signer
from fedsim.federation import run as running
from fedsim.federation.bundle import public_scenario
from fedsim.federation.folder import create_folder
from fedsim.federation.link import SERVER_KEY, SIGNING_KEY
from fedsim.federation.run import Run
from fedsim.federation.server import serve
from fedsim.privacy.ledger import Ledger
from fedsim.scenario import Scenario
from fedsim.scenario_file import dump_scenario

VOUCHED = "smallest_examples: {0}\nlargest_examples: {0}\nlargest_epsilon: 1.0e+9\nlargest_epsilon_a_run: null\n"
VOUCHED += "largest_epsilon_a_day: null\ncount_noise_of_others: true\n"
"""A policy that vouches for one number of rows."""
NAMES = np.array(["red", "green", "blue"])


def npz(path: Path, rows: int, seed: int = 0) -> Path:
    """Rows of five numbers in three classes."""
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % 3
    np.savez(path, x_train=rng.normal(size=(rows, 5)) + y[:, None], y_train=y, class_names=NAMES)
    return path


@dataclass
class OwnClients:
    """The folder of a server and of its clients, whose nodes are in this process."""

    folder: Path

    def __post_init__(self) -> None:
        pair = make_signer()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "ca.crt").write_bytes(make_authority().public)
        (self.folder / SIGNING_KEY).write_bytes(pair.private)
        (self.folder / SERVER_KEY).write_bytes(pair.public)

    def add(self, client: int, rows: int, policy: str) -> dict[str, str | int | float | bool]:
        """Make a client, or give it another file or policy; the configuration of its node."""
        place = self.folder / f"client-{client}"
        place.mkdir(exist_ok=True)
        (place / "policy.yaml").write_text(policy)
        npz(place / "own.npz", rows, client)
        if not (place / "ledger.sqlite").exists():
            Ledger(place / "ledger.sqlite")
        return {
            "policy": str(place / "policy.yaml"),
            "ledger": str(place / "ledger.sqlite"),
            "data-path": str(place / "own.npz"),
            "server-key": str(self.folder / SERVER_KEY),
        }

    def ledger(self, client: int) -> Ledger:
        """The ledger of a client."""
        return Ledger(self.folder / f"client-{client}" / "ledger.sqlite", create=False)

    def scenario(self, population: int, server_rows: int = 60, **changes: Any) -> Scenario:
        """A quick scenario on this server, whose own file has so many rows."""
        data = npz(self.folder / "server.npz", server_rows, 9)
        settings: dict[str, Any] = {
            "data": {"source": "npz", "path": str(data)},
            "model": "logistic",
            "client": {"batch_size": 10},
            "cohort": {"population": population, "deadline": 0.4, "retries": 0},
            "defence": {"example_dp": {"noise_multiplier": 1.0}},
            "engine": {"kind": "deploy", "root_certificates": str(self.folder / "ca.crt")},
            "rounds": 2,
        }
        return Scenario.model_validate({**settings, **changes})


def play(scenario: Scenario, folder: Path) -> Run:
    """Run a scenario as a SuperLink would, from its start or from where it stopped."""
    if not folder.exists():
        create_folder(folder, {"scenario.yaml": dump_scenario(scenario)})
    population = scenario.cohort.population or 0
    grid = running.InlineGrid(population, lambda *_: [], {"scenario": public_scenario(scenario), "deployed": True})
    serve(grid, fedsim.plan(scenario), folder)
    return Run(folder)
