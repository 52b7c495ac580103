# SPDX-License-Identifier: Apache-2.0
"""A first guess without simulation: the update as one gradient at a point between the first and the last weights.

Zhu, Yao, Hoang, Doan, "Surrogate Model Extension" (ICML 2023), equation 5: the sum of a client's gradients points, to
first order, along the gradient of all its data at some ŵ = (1 - a) w_0 + a w_T. The inputs and a are found together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedsim.attacks.priors import total_variation
from fedsim.attacks.relaxation import Relaxation
from fedsim.attacks.simulation import Simulator, Step


def surrogate_guess(
    simulator: Simulator,
    updates: Tensor,
    labels: Tensor,
    start: Tensor,
    relaxation: Relaxation,
    iterations: int,
    learning_rate: float,
    smoothness: float = 0.0,
) -> Tensor:
    """Points z (K, n, *shape) whose gradient at the surrogate weights points against the updates (K, P).

    `smoothness` is the weight of the total variation of images, as in the simulation that follows.
    """
    guess = start.clone().requires_grad_()
    between = torch.full((len(updates), 1), 0.5, requires_grad=True)
    optimiser = torch.optim.Adam([{"params": [guess], "lr": learning_rate}, {"params": [between], "lr": 0.01}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, iterations)
    shares = torch.full(labels.shape, 1 / labels.shape[1])
    for _ in range(iterations):
        weights = simulator.start + between * updates
        gradient = simulator.gradients(weights, Step(relaxation.decode(guess), labels, shares))
        loss = (1 + cosine_similarity(gradient, updates, dim=1)).sum() + smoothness * total_variation(guess).sum()
        guess.grad, between.grad = torch.autograd.grad(loss, (guess, between))
        guess.grad.sign_()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            guess.copy_(relaxation.feasible(guess))
            between.clamp_(0, 1)
    return guess.detach()
