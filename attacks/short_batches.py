# SPDX-License-Identifier: Apache-2.0
"""Which examples were in the last, incomplete batch of an epoch: each counts for more there than in a full one.

An example counts for 1/B in a full batch of B and for 1/s in a short one of s = n mod B. Unlike the order of full
batches, which enters an update in the second order of the learning rate, this enters in the first: a simulation that
always shows the same example alone cannot explain the update. But the last layer's bias says how much each class
counted for over all epochs (`labels.count_labels`), and so how often its examples were in a short batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedsim.attacks.labels import count_labels, nearest_counts
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.errors import AttackError


def epoch_orders(observation: Observation, knowledge: Knowledge, labels: Tensor, *, epochs: int, batch: int) -> Tensor:
    """(E, n): an order of the examples in each epoch, in which the short batch, the last, has whom it most likely had.

    Which epoch it was and the order of the full batches do not matter to first order, and stay arbitrary.
    """
    n, rest = len(labels), len(labels) % batch
    orders = torch.arange(n).repeat(epochs, 1)
    if rest == 0:
        return orders
    turns = _turns(observation, knowledge, labels, epochs, batch)
    for epoch in range(epochs):
        ordered = turns.argsort(stable=True)
        turns[ordered[-rest:]] -= 1
        orders[epoch] = torch.cat([ordered[:-rest].sort().values, ordered[-rest:]])
    return orders


def _turns(observation: Observation, knowledge: Knowledge, labels: Tensor, epochs: int, batch: int) -> Tensor:
    """(n,): how often each example was in a short batch; equally often where nothing tells."""
    n, rest = len(labels), len(labels) % batch
    total = epochs * rest
    if knowledge.kind == "text" or observation.clients > 1:
        return _spread(torch.zeros(n, dtype=torch.int64), torch.tensor([total]))
    try:
        estimate = count_labels(observation, knowledge).estimate
    except AttackError:
        return _spread(torch.zeros(n, dtype=torch.int64), torch.tensor([total]))
    classes, members, counts = labels.unique(return_inverse=True, return_counts=True)
    weights = estimate[classes] / n * epochs * math.ceil(n / batch)
    turns = (weights - counts * epochs / batch) / (1 / rest - 1 / batch)
    turns = torch.minimum(turns.clamp_min(0), counts.double() * epochs)
    return _spread(members, nearest_counts(turns, total).long())


def _spread(members: Tensor, turns: Tensor) -> Tensor:
    """The turns of each group, dealt out among its members (n,) as evenly as they go."""
    dealt = torch.zeros(len(members), dtype=torch.int64)
    for group, count in enumerate(turns.tolist()):
        places = torch.nonzero(members == group).flatten()
        dealt[places] = count // len(places) + (torch.arange(len(places)) < count % len(places)).long()
    return dealt
