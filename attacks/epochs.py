# SPDX-License-Identifier: Apache-2.0
"""What ties the epochs of a client together: each shows the same examples, in an order that nobody knows."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

Statistic = Literal["mean", "max", "sorted", "moments"]
Distance = Literal["l2", "l1", "cosine"]


def order_free(inputs: Tensor, statistic: Statistic) -> Tensor:
    """The statistic g of a set of inputs (..., n, d), which does not depend on their order; (..., m, d).

    mean and max over the set (Dimitrov et al. 2022, section 4.3); sorted: the n values of each coordinate in order,
    that is its whole distribution; moments: mean, and mean of squares.
    """
    match statistic:
        case "mean":
            return inputs.mean(dim=-2, keepdim=True)
        case "max":
            return inputs.amax(dim=-2, keepdim=True)
        case "sorted":
            return inputs.sort(dim=-2).values
        case "moments":
            return torch.stack([inputs.mean(dim=-2), inputs.square().mean(dim=-2)], dim=-2)


def epoch_prior(inputs: Tensor, statistic: Statistic, distance: Distance) -> Tensor:
    """1/E² Σ_{e1,e2} R(g(x_e1), g(x_e2)) for inputs (K, E, n, d), by replica (Dimitrov et al. 2022, eq. 6)."""
    g = order_free(inputs, statistic).flatten(2)
    if distance == "l2":  # the mean over all pairs of squares is twice the variance: no pair has to be formed
        return 2 * g.var(dim=1, correction=0).mean(dim=-1)
    if distance == "l1":
        return (g[:, :, None] - g[:, None]).abs().mean(dim=(1, 2, 3))
    direction = torch.nn.functional.normalize(g, dim=-1)
    return 1 - direction.mean(dim=1).square().sum(dim=-1)


def pool_epochs(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """One set of n examples from the E reconstructions (E, n, d) of it, and how far apart they were, (n,).

    Every epoch is assigned to the present consensus by least squares, examples of one label to each other, and the
    consensus is the median over the epochs: twice around, beginning with the first epoch. The median leaves out an
    epoch in which an example was not found.
    """
    consensus = inputs[0]
    for _ in range(2):
        aligned = torch.stack([epoch[_assign(consensus, epoch, labels)] for epoch in inputs])
        consensus = aligned.median(dim=0).values if len(inputs) > 2 else aligned.mean(dim=0)
    spread = (aligned - consensus).square().mean(dim=(0, 2)).sqrt()
    return consensus, spread


def _assign(reference: Tensor, candidates: Tensor, labels: Tensor) -> Tensor:
    """For each example of the reference, the candidate that it is: an optimal assignment within each label."""
    chosen = np.arange(len(reference))
    cost = torch.cdist(reference.double(), candidates.double()).square().numpy()
    for label in labels.unique():
        places = torch.nonzero(labels == label).flatten().numpy()
        rows, columns = linear_sum_assignment(cost[np.ix_(places, places)])
        chosen[places[rows]] = places[columns]
    return torch.from_numpy(chosen)
