# SPDX-License-Identifier: Apache-2.0
"""How long the attacks of a scenario may take: a range, from a step that is timed on this machine and their settings.

An attack that optimises stops early where it can, so that its planned steps are the most that it takes. One that solves
equations takes what they take: 0.1 to 0.6 seconds for an update of the scenarios that come with fedsim.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.federation.plan import Plan
from fedsim.scenario import AttackSection, AutomaticAttack, FedAvgAttack, GradientMatchingAttack, TabularAttack

Range = tuple[float, float]
_EQUATIONS = (0.05, 2.0)
"""Seconds for an update by linear algebra and searches."""
_WALK = 3e-5
"""Seconds for a sweep of one walker of the attack on tables."""
_AUTOMATIC_STEPS = 600
_EARLY, _LATE = 0.1, 4.0
"""How much of its planned steps an attack takes at least, and how much longer a step may take than the one timed."""


def attack_seconds(plan: Plan, attacks: Sequence[AttackSection]) -> Range:
    """The least and the most that these attacks may take, all together."""
    step = _step_seconds(plan) if attacks else 0.0
    ranges = [_of_all_updates(plan, settings, step) for settings in attacks]
    return sum(low for low, _ in ranges), sum(high for _, high in ranges)


def _of_all_updates(plan: Plan, settings: AttackSection, step: float) -> Range:
    low, high = _of_one_update(plan, settings, step)
    if settings.seconds is not None:
        low, high = min(low, settings.seconds), min(high, settings.seconds + step)
    updates = min(settings.observations, plan.kept_updates)
    return low * updates, high * updates


def _of_one_update(plan: Plan, settings: AttackSection, step: float) -> Range:
    least, most = _EQUATIONS
    if isinstance(settings, GradientMatchingAttack):
        steps = settings.iterations * settings.restarts
        return least + _EARLY * steps * step, most + _LATE * steps * step
    if isinstance(settings, FedAvgAttack):
        steps = settings.iterations * settings.restarts * _simulated_steps(plan, settings)
        return _EARLY * steps * step, most + _LATE * steps * step
    if isinstance(settings, TabularAttack):
        search = settings.walkers * settings.sweeps * _WALK
        return least, most + _LATE * (search + settings.starts * settings.iterations * step)
    if isinstance(settings, AutomaticAttack):
        return least, most + _LATE * _AUTOMATIC_STEPS * step * max(1, plan.steps_per_round)
    return _EQUATIONS


def _simulated_steps(plan: Plan, settings: FedAvgAttack) -> int:
    """Local steps that a simulation of the client takes, for all weights of the prior that are tried."""
    weights = settings.prior_weight
    tried = len(weights) if isinstance(weights, tuple) else 1
    if settings.simulation == "gradient":
        return tried
    return tried * (plan.scenario.client.epochs if settings.simulation == "epochs" else plan.steps_per_round)


def _step_seconds(plan: Plan, times: int = 3) -> float:
    """The gradient of a batch, and the derivative of its square by the inputs: a step of gradient matching."""
    client = int(next(cohort for cohort in plan.cohorts if len(cohort))[0])
    rows = plan.partition.members(client)[: plan.scenario.client.batch_size]
    x, y = plan.dataset.x_train[rows], plan.dataset.y_train[rows]
    parameters = [parameter for parameter in plan.model.parameters() if parameter.requires_grad]
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        _match(plan, parameters, x, y)
        found.append(time.perf_counter() - begun)
    return min(found)


def _match(plan: Plan, parameters: Sequence[Tensor], x: Tensor, y: Tensor) -> None:
    inputs = x.clone().requires_grad_(x.is_floating_point())
    outputs = plan.model(inputs)
    loss = F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), y.flatten())
    gradients = torch.autograd.grad(loss, parameters, create_graph=inputs.requires_grad)
    if inputs.requires_grad:
        torch.autograd.grad(torch.stack([gradient.square().sum() for gradient in gradients]).sum(), inputs)
