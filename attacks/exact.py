# SPDX-License-Identifier: Apache-2.0
"""Exact inversion of a batch: images or rows that went through a first linear layer and a ReLU, with a certificate.

The mathematics is in `exact_layer` (one layer) and `sparse_directions` (the search). Clipping scales the gradient and
changes nothing; noise is estimated from the spectrum; the sum of local SGD steps (FedAvg) has the same form, with the
same inputs, in whatever order and how often they were used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsim.attacks.exact_certificate import in_words, radius
from fedsim.attacks.exact_layer import LayerBatch, invert_layer
from fedsim.attacks.matching import matching_loss
from fedsim.attacks.network import Layer, dense_front, head, layer_after, layer_inputs, leaf_layers
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction, check_observation
from fedsim.errors import AttackError
from fedsim.scenario.attack import ExactAttack

__all__ = ["LayerBatch", "exact", "invert_layer"]


def exact(observation: Observation, knowledge: Knowledge, settings: ExactAttack, *, seed: int = 0) -> Reconstruction:
    """The batch from the gradient of the first layer; labels from that of the last, given the inputs."""
    check_observation(observation, knowledge)
    layers = _layers(observation, knowledge)
    front = _front(observation, layers)
    gradient, weights = observation.gradient, observation.weights
    bias = front.bias
    batch = invert_layer(
        weights[front.weight],
        None if bias is None else weights[bias],
        gradient[front.weight],
        None if bias is None else gradient[bias],
        seed=seed,
        seconds=settings.seconds,
        drift=observation.work.learning_rate if observation.kind == "update" else 0.0,
    )
    inputs, scaled = _in_range(batch.inputs, knowledge) if bias is None else (batch.inputs, False)
    inputs = inputs.float().reshape(-1, *knowledge.input_shape)
    labels = _labels(observation, head(layers), inputs)
    loss = float("nan") if labels is None else matching_loss(observation, inputs, labels)
    reach = radius(observation, knowledge, front, batch, labels)
    certified = torch.isfinite(reach)
    return Reconstruction(
        attack="exact",
        inputs=inputs,
        labels=labels,
        loss=loss,
        score=_score(batch, certified),
        certified=certified,
        radius=reach,
        notes=(*batch.notes, *_remarks(observation, batch, scaled), *_stated(knowledge, batch, reach)),
    )


def _layers(observation: Observation, knowledge: Knowledge) -> tuple[Layer, ...]:
    if knowledge.kind == "text":
        raise AttackError("attack exact reads images and tables, but the data is text; use the attack text")
    return leaf_layers(observation.model, knowledge.input_shape)


def _front(observation: Observation, layers: tuple[Layer, ...]) -> Layer:
    """The linear layer that sees the raw input and is followed by a ReLU."""
    front = dense_front(layers)
    if front is None:
        raise AttackError(
            f"attack exact needs a linear layer on the raw input, but the model begins with"
            f" {type(layers[0].module).__name__}; use gradient-matching"
        )
    after = layer_after(layers, front)
    if after is None or not isinstance(after.module, nn.ReLU):
        name = "nothing" if after is None else type(after.module).__name__
        raise AttackError(
            f"attack exact needs a ReLU after the first linear layer, but {name} follows it; use gradient-matching"
        )
    if observation.kind == "update" and observation.work.optimizer != "sgd":
        raise AttackError(
            f"attack exact needs a sum of gradients, but the clients' optimizer is {observation.work.optimizer}, whose"
            " update is none; use gradient-matching"
        )
    return front


def _labels(observation: Observation, last: Layer | None, inputs: Tensor) -> Tensor | None:
    """The class of each input, given all of them, from the gradient of the last layer.

    dL/dW = sum_i c_i (p_i - e_yi) h_i^T with known features h_i: least squares for the rows c_i (p_i - e_yi), of which
    only the entry of the label is negative.
    """
    if last is None or len(inputs) == 0:
        return None
    features = layer_inputs(observation.model, last.module, inputs).double()
    target = observation.gradient[last.weight].double()
    if last.bias is not None:
        features = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], 1)
        target = torch.cat([target, observation.gradient[last.bias].double()[:, None]], 1)
    solution: Tensor = torch.linalg.pinv(features.T) @ target.T
    return solution.argmin(1)


def _in_range(inputs: Tensor, knowledge: Knowledge) -> tuple[Tensor, bool]:
    """Inputs of unknown scale, enlarged until they touch the highest or lowest value that is possible."""
    if knowledge.bounds is None or len(inputs) == 0:
        return inputs, False
    low, high = (bound.flatten() for bound in knowledge.bounds)
    used = torch.maximum(
        (inputs / high.clamp_min(1e-12)).amax(1), (inputs / low.clamp_max(-1e-12)).where(low < 0, 0.0).amax(1)
    )
    return inputs / used.clamp_min(1e-12)[:, None], True


def _score(batch: LayerBatch, certified: Tensor) -> Tensor:
    """Certified items first; the others by how well they agree with their neurons."""
    whole = len(batch.inputs) == batch.rank
    doubtful = max(0.0, 2 * batch.consistency - 1) * (0.9 if whole else 0.1)
    return torch.where(certified, 1 - 1e-6, doubtful).float()


def _remarks(observation: Observation, batch: LayerBatch, scaled: bool) -> list[str]:
    remarks = []
    size = observation.batch_size
    if size is not None and 0 < batch.rank < size:
        remarks.append(
            f"the batch has {size} examples, but its gradient has rank {batch.rank}: examples that are equal are found"
            " once, those without gradient not at all"
        )
    if scaled:
        remarks.append("the scale of each input was chosen so that it touches the value range")
    return remarks


def _stated(knowledge: Knowledge, batch: LayerBatch, reach: Tensor) -> list[str]:
    """What the certificates certify, and how many inputs that satisfy the layer's equations have none."""
    certified = torch.isfinite(reach)
    stated = []
    if certified.any():
        largest = in_words(float(reach[certified].max()), knowledge)
        stated.append(f"certified: the client holds an example within {largest} of it, in every value")
    withheld = int((batch.certified & ~certified).sum())
    if withheld:
        stated.append(
            f"{withheld} of {len(reach)} inputs satisfy the first layer's equations and are not certified: each may be"
            " the mean of several similar or equal examples, or rounding leaves too much room"
        )
    return stated
