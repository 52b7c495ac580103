# SPDX-License-Identifier: Apache-2.0
"""What a server can infer from its transcript. Attacks read observations, never the simulator."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from fedsim.attacks.observation import Knowledge, Observation, Reconstruction

__all__ = ["ATTACKS", "Knowledge", "Observation", "Reconstruction", "attack_named"]

ATTACKS = {
    "auto": "ladder:automatic",
    "labels": "labels:labels",
    "closed-form": "closed_form:closed_form",
    "exact": "exact:exact",
    "gradient-matching": "gradient_matching:gradient_matching",
    "tabular": "tabular:tabular",
    "text": "text:text",
    "imprint": "imprint:imprint",
    "fedavg": "fedavg:fedavg",
}


def attack_named(name: str) -> Callable[..., Reconstruction]:
    """The function `attack(observation, knowledge, settings, *, seed)` of an attack, by the name of its settings."""
    module, function = ATTACKS[name].split(":")
    attack: Callable[..., Reconstruction] = getattr(import_module(f"fedsim.attacks.{module}"), function)
    return attack
