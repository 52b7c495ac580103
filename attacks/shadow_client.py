# SPDX-License-Identifier: Apache-2.0
"""A client that the server makes up: what it would have sent with these examples.

The server knows the model, the local work and the defence that it asked for, so that it can send itself an update whose
examples it knows. Attacked in the same way, such a shadow shows how often this attack is right on this network.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsim.attacks.observation import Knowledge, Observation
from fedsim.federation.client import compress
from fedsim.privacy.mechanisms import add_gaussian, add_laplace, clip
from fedsim.randomness import ClientRandomness
from fedsim.training import Layout, layout_of, train_cohort


def shadow_client(
    observation: Observation, knowledge: Knowledge, inputs: Tensor, labels: Tensor, seed: int
) -> Observation:
    """The update of a client that holds these examples (n, ...), under the same instructions and the known defence."""
    layout = layout_of(observation.model)
    sent = _defended(observation, knowledge, _local_work(observation, layout, inputs, labels, seed), seed)
    return replace(observation, update=layout.unflatten(sent[0]), examples=len(inputs))


def unexplained(observation: Observation, inputs: Tensor, labels: Tensor, seed: int = 0) -> float:
    """1 - cos² of the observed update and that of these examples: the share that they leave, at any positive scale.

    An update in the opposite direction, such as that of the wrong labels, leaves everything. Of several local steps the
    order of the batches is one of many, so that even the true examples leave something.
    """
    layout = layout_of(observation.model)
    mine = _local_work(observation, layout, inputs, labels, seed)[0, : layout.parameters].double()
    names = layout.names[: len(list(observation.model.parameters()))]
    seen = torch.cat([observation.update[name].double().flatten() for name in names])
    energy = mine.square().sum() * seen.square().sum()
    return 1.0 if not energy else float(1 - (mine @ seen).clamp_min(0).square() / energy)


def _local_work(observation: Observation, layout: Layout, inputs: Tensor, labels: Tensor, seed: int) -> Tensor:
    """(1, P) what the local work makes of the examples, before any defence of the whole update."""
    start = layout.flatten(observation.model.state_dict())
    member, random = [np.arange(len(inputs))], [ClientRandomness(seed, observation.round, 0)]
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    return train_cohort(observation.model, start, inputs, labels, member, observation.work, random).updates


def _defended(observation: Observation, knowledge: Knowledge, updates: Tensor, seed: int) -> Tensor:
    dp = knowledge.defence.client_dp
    if dp is not None:
        norm = float(observation.config.get("clipping-norm", dp.clipping_norm))
        noise, order = (add_gaussian, 2) if dp.noise == "gaussian" else (add_laplace, 1)
        generator = ClientRandomness(seed, observation.round, 0).client_noise()
        updates = noise(clip(updates, norm, 2 if order == 2 else 1), knowledge.client_noise, [generator])
    return compress(updates, knowledge.defence.compression)
