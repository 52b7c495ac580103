# SPDX-License-Identifier: Apache-2.0
"""What `fedsim deploy submit` adds to a scenario: the deployed engine, its address, and how many clients there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedsim.deploy.layout import Server
from fedsim.deploy.nodes import clients_of, registered
from fedsim.federation.link import FLEET, read_fleet
from fedsim.scenario import Scenario
from fedsim.scenario_file import load_scenario


def deployed_overrides(server: Server, loaded: Scenario) -> list[str]:
    """The overrides that make a scenario one of a deployment: its engine, and how many clients there are."""
    population = [f"cohort.population={len(clients_of(server))}"] if loaded.cohort.population is None else []
    return ["engine.kind=deploy", *population]


def prepared(server: Server, scenario: str, overrides: Sequence[str]) -> tuple[list[str], Path]:
    """The overrides with which the scenario runs on this server, and the next free folder for its run.

    A scenario that does not say how many clients there are has those of the deployment.
    """
    loaded = load_scenario(scenario, overrides)
    registered(server)  # DeployError with a remedy, before anything else is done
    read_fleet(server.path / FLEET)
    added = deployed_overrides(server, loaded)
    added += [f"engine.address={server.superlink}", f"engine.root_certificates={server.path / 'ca.crt'}"]
    from fedsim.federation.folder import next_free_folder  # after what is quick to find wrong: it imports torch

    return [*overrides, *added], next_free_folder(server.path / "runs", loaded.name)
