# SPDX-License-Identifier: Apache-2.0
"""What a server can infer from its transcript. Attacks read observations, never the simulator.

Begin with `observation` (what an attack is given, and gives back) and `evidence` (how a transcript becomes that). Each
attack is the function of `ATTACKS`, in the module of its name; what else is here belongs to one of them:

    labels              last_layer, softmax_batch
    closed_form         lone_rows, layerwise
    exact               exact_layer, exact_factors, exact_search, sparse_directions
    gradient_matching   matching, matching_problem, priors, guess, feature_inversion, replica_gradients
    tabular             row_search, row_spans, row_proof, dense_stack; ensemble, cell_confidence, shadow_rows
    text                text_search
    imprint             cells, fished; what the server sends: crafting, fishing
    fedavg              fedavg_case, fedavg_problem, simulation, surrogate, epochs, short_batches, order_search
    ladder              the attack `auto`: which of the others, and in which order
    several             network (the layers of a model), descent, relaxation, units
"""

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
