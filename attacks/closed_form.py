# SPDX-License-Identifier: Apache-2.0
"""Inputs from a gradient by division and linear algebra.

For a linear layer z = W x + b with dL/dz_i = d_i of example i, dL/dW = sum_i d_i x_i' and dL/db = sum_i d_i. Where one
example alone is responsible for a row, dL/dW_r / dL/db_r is that example, whatever the loss, the learning rate, the
number of local steps or the factor of a clipping (Phong et al. 2018, section 3). What is tried, in this order:

- one example: every row at once, by least squares;
- one example before convolutions: layer by layer from the end (`layerwise.py`);
- a batch of fewer examples than classes of multinomial logistic regression (`softmax_batch.py`);
- a batch of linear regression, or of any model of one output: only the weighted mean of its inputs (`_weighted_mean`);
- a batch before a ReLU: rows whose quotients agree (`lone_rows.py`).

Certified is one example whose rows all agree and whose own gradient, up to a factor, is the observed one; a whole batch
whose own gradient is the observed one; and an example that at least three rows agree on where a mixture could not
(`_certain`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedsim.attacks.labels import count_labels
from fedsim.attacks.last_layer import last_layer, noise_deviation, step_gradient, step_weights
from fedsim.attacks.layerwise import invert_layers, refine
from fedsim.attacks.lone_rows import LoneExample, SlopesOf, lone_examples
from fedsim.attacks.matching import client_gradient, loss_gradient, matching_loss, private_copy
from fedsim.attacks.network import Layer, dense_front, head, layer_after, leaf_layers
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction, check_observation
from fedsim.attacks.softmax_batch import label_hypotheses, solve_softmax_batch
from fedsim.errors import AttackError
from fedsim.scenario.attack import ClosedFormAttack

_MATCHES = 1e-8  # matching loss below which a reconstruction explains a float32 gradient
_MATCHES_ROUNDED = 1e-4  # the same, at most, for one that the model is so certain of that little but rounding is left
_ONE = 1e-3  # by how much the weight of an example may differ from 1 / size, relatively
_HYPOTHESES = 40  # sets of labels that are tried for a batch


@dataclass(frozen=True, eq=False)
class _Found:
    """Flat inputs (n, d) float64 with what is believed of them."""

    inputs: Tensor
    labels: Tensor | None
    score: Tensor
    certified: Tensor
    notes: tuple[str, ...] = ()


def closed_form(
    observation: Observation, knowledge: Knowledge, settings: ClosedFormAttack, *, seed: int = 0
) -> Reconstruction:
    """The examples that can be computed from the gradient without a search, with a score."""
    check_observation(observation, knowledge)
    if knowledge.kind == "text":
        raise AttackError("closed-form computes numbers, and tokens are none; use the attack text")
    if observation.kind == "update" and observation.work.optimizer == "adam":
        raise AttackError(
            "closed-form divides gradients, which an update of client.optimizer adam has rescaled entry by entry;"
            " attack a client with optimizer sgd"
        )
    layers = leaf_layers(observation.model, knowledge.input_shape)
    front = dense_front(layers)
    if front is None:
        found = _layer_by_layer(observation, knowledge, layers)
    elif _used(observation) == 1:
        found = _one_example(observation, knowledge, front)
    elif front is head(layers):
        found = _logistic(observation, knowledge, front, seed)
    else:
        found = _rows(observation, knowledge, layers, front)
    return _reconstruction(observation, knowledge, found)


def _reconstruction(observation: Observation, knowledge: Knowledge, found: _Found) -> Reconstruction:
    inputs = found.inputs.reshape(-1, *knowledge.input_shape).float()
    size = _used(observation)
    whole = found.labels is not None and len(inputs) == size
    loss = _loss(observation, inputs, found.labels) if whole and found.labels is not None else math.nan
    return Reconstruction(
        attack="closed-form",
        inputs=inputs,
        labels=found.labels,
        loss=loss,
        score=found.score.float(),
        certified=found.certified,
        notes=found.notes,
    )


def _loss(observation: Observation, inputs: Tensor, labels: Tensor) -> float:
    """The matching loss, after a gradient that is shorter than that of the reconstruction is taken to be clipped."""
    observed = client_gradient(observation)
    if observed is None:
        return math.nan
    mine = loss_gradient(private_copy(observation.model, torch.float64), inputs.double(), labels)
    pairs = list(zip(mine, observed.values(), strict=True))
    dots = sum(float((own * seen.double()).sum()) for own, seen in pairs)
    lengths = sum(float(own.square().sum()) for own, _ in pairs)
    return matching_loss(_scaled(observation, dots / max(lengths, 1e-300)), inputs, labels)


def _used(observation: Observation) -> int | None:
    """How many examples the update was computed from; None where that is not known."""
    size, work = observation.batch_size, observation.work
    if size is None or observation.kind == "gradient":
        return size
    return min(size, work.local_steps(size) * work.batch(size))


def _gradients(observation: Observation, layer: Layer) -> tuple[Tensor, Tensor | None]:
    bias = step_gradient(observation, layer.bias) if layer.bias is not None else None
    return step_gradient(observation, layer.weight), bias


# --- one example ------------------------------------------------------------------------------------------------------


def _one_example(observation: Observation, knowledge: Knowledge, front: Layer) -> _Found:
    """dL/dW = d x', dL/db = d, so x = dL/dW' d / |d|^2: the mean of all rows' quotients, weighted by d_r^2."""
    weight, bias = _gradients(observation, front)
    noise = noise_deviation(observation, knowledge) / float(step_weights(observation).sum())
    if bias is None:
        return _without_bias(observation, knowledge, weight)
    if not bias.any():
        raise AttackError(
            f"the gradient of {front.bias} is zero, so no row can be divided by it; attack another update"
        )
    flat = bias @ weight / bias.square().sum()
    left = float((weight - torch.outer(bias, flat)).norm() / weight.norm().clamp_min(1e-300))
    relative = noise / float(bias.norm())
    score = 1.0 if noise == 0 and left < 1e-3 else math.exp(-relative)
    labels = _label_of_one(observation, knowledge, flat)
    sure = noise == 0 and left < 1e-4
    if noise == 0 and labels is not None and client_gradient(observation) is not None:
        # A defence that nobody told of can leave rank one, but not this example's own gradient.
        loss, rounding = _unlike(observation, flat.reshape(1, *knowledge.input_shape), labels)
        matches = loss < max(_MATCHES, min(rounding, _MATCHES_ROUNDED))
        sure = sure and matches
        belief = 1.0 if matches else max(_belief(loss), 0.5 if loss < rounding else 0.0)
        score = min(score, belief)
    return _Found(flat[None], labels, torch.tensor([score]), torch.tensor([sure]), (f"rank-one residual {left:.1g}",))


def _unlike(observation: Observation, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """The least over s > 0 of |s·g(x, y) - g_obs|² / |g_obs|², and what float32 makes of it for the right example.

    A client's softmax is rounded to 2^-23, which is much of dL/dz = p - e_y where the model is nearly certain of y.
    """
    observed = client_gradient(observation)
    assert observed is not None
    model = private_copy(observation.model, torch.float64)
    own = torch.cat([each.flatten() for each in loss_gradient(model, inputs.double(), labels)])
    seen = torch.cat([each.double().flatten() for each in observed.values()])
    factor = (own @ seen).clamp_min(0) / own.square().sum().clamp_min(1e-300)
    with torch.no_grad():
        slopes = model(inputs.double()).softmax(-1)[0]
    slopes[labels] -= 1
    rounding = float((2.0**-22 / slopes.norm().clamp_min(1e-300)).square())
    loss = float((factor * own - seen).square().sum() / seen.square().sum().clamp_min(1e-300))
    return loss, rounding


def _without_bias(observation: Observation, knowledge: Knowledge, weight: Tensor) -> _Found:
    """Without a bias dL/dW = d x' gives x up to a factor: the largest that the value range allows.

    Among signs and labels the one whose own gradient is nearest to the observed one is taken.
    """
    direction = torch.linalg.svd(weight, full_matrices=False).Vh[0]
    low, high = _bounds(knowledge, len(direction))
    candidates = []
    for sign in (1.0, -1.0):
        steps = torch.where(direction * sign > 0, high, low) / (direction * sign)
        factor = steps[direction.abs() > 1e-9 * direction.abs().max()].min().clamp_min(0)
        candidates.append(sign * factor * direction)
    shaped = [(flat, _label_of_one(observation, knowledge, flat)) for flat in candidates if flat.any()]
    if not shaped:
        raise AttackError("the layer has no bias and the value range holds only one sign; grant no value_range")
    flat, labels = min(shaped, key=lambda pair: _one_loss(observation, knowledge, *pair))
    note = "the layer has no bias: the input is found up to a factor, and scaled to fill the value range"
    return _Found(flat[None], labels, torch.tensor([0.5]), torch.tensor([False]), (note,))


def _bounds(knowledge: Knowledge, size: int) -> tuple[Tensor, Tensor]:
    if knowledge.bounds is None:
        one = torch.ones(size, dtype=torch.float64)
        return -one, one
    low, high = knowledge.bounds
    return low.flatten(), high.flatten()


def _one_loss(observation: Observation, knowledge: Knowledge, flat: Tensor, labels: Tensor | None) -> float:
    if labels is None:
        return math.inf
    loss = matching_loss(observation, flat.reshape(1, *knowledge.input_shape), labels)
    return math.inf if math.isnan(loss) else loss


def _label_of_one(observation: Observation, knowledge: Knowledge, flat: Tensor) -> Tensor | None:
    """The label of one example: where the last layer's bias gradient, else the whole gradient, says so."""
    last = head(leaf_layers(observation.model, knowledge.input_shape))
    if last is not None and last.bias is not None:
        return step_gradient(observation, last.bias).argmin()[None]
    if client_gradient(observation) is None:
        return None
    losses = [_one_loss(observation, knowledge, flat, torch.tensor([label])) for label in range(knowledge.classes)]
    return torch.tensor([min(range(knowledge.classes), key=losses.__getitem__)])


def _layer_by_layer(observation: Observation, knowledge: Knowledge, layers: tuple[Layer, ...]) -> _Found:
    """One example before convolutions, from the end to the beginning."""
    if _used(observation) != 1 or client_gradient(observation) is None:
        raise AttackError(
            f"this model begins with {type(layers[0].module).__name__}, through which closed-form goes, if at all, for"
            " the gradient of one example only; use gradient-matching"
        )
    observation = unclipped(observation, last_layer(observation, knowledge))
    flat = invert_layers(observation, knowledge, layers)
    labels = _label_of_one(observation, knowledge, flat)
    assert labels is not None  # the last layer has a bias
    flat = refine(observation, flat, labels, knowledge.input_shape)
    loss = matching_loss(observation, flat.reshape(1, *knowledge.input_shape), labels)
    sure = loss < _MATCHES
    return _Found(flat[None], labels, torch.tensor([_belief(loss)]), torch.tensor([sure]), ("layer by layer",))


def unclipped(observation: Observation, last: Layer) -> Observation:
    """The gradient of one example before it was clipped: the last layer's is c (p - e_y), with p = softmax(W h + b).

    h is exact whatever c is, so c is too.
    """
    weight, bias = _gradients(observation, last)
    if bias is None or not bias.any():
        return observation
    inner = observation.weights[last.weight].double() @ (bias @ weight / bias.square().sum())
    slopes = (inner + observation.weights[last.bias or ""].double()).softmax(-1)
    slopes[bias.argmin()] -= 1
    return _scaled(observation, float(slopes @ bias / slopes.square().sum()))


def _scaled(observation: Observation, factor: float) -> Observation:
    if not 0 < factor < 0.999:
        return observation
    update = {name: entry / factor for name, entry in observation.update.items()}
    return replace(observation, update=update)


def _belief(loss: float) -> float:
    """A score (no probability) from a matching loss: 1 where it explains the gradient to float32, 1/2 at 1%."""
    return 1.0 if loss < _MATCHES else 0.01 / (0.01 + loss)


# --- batches ----------------------------------------------------------------------------------------------------------


def _logistic(observation: Observation, knowledge: Knowledge, front: Layer, seed: int) -> _Found:
    """Multinomial logistic regression: the batch itself while it has fewer examples than there are classes."""
    size = _used(observation)
    weight, bias = _gradients(observation, front)
    if len(weight) == 1:
        return _weighted_mean(weight, bias)
    if size is None or bias is None or client_gradient(observation) is None or size >= knowledge.classes:
        note = (
            f"the gradient of {knowledge.classes} classes has rank {knowledge.classes - 1}: a batch of that many"
            " examples or more, several local steps or a missing bias leave infinitely many explanations"
        )
        return _nothing(weight.shape[1], note)
    counted = count_labels(observation, knowledge, size)
    others = label_hypotheses(counted.estimate, counted.error + 1e-3, size, _HYPOTHESES)
    layer = observation.weights[front.weight].double(), observation.weights[front.bias or ""].double()
    solved = solve_softmax_batch(layer, (weight, bias), [counted.labels, *others], seed=seed)
    if solved is None:
        return _nothing(weight.shape[1], "no batch that explains the gradient was found")
    inputs, labels = solved.inputs, solved.labels
    loss = _loss(observation, inputs.reshape(-1, *knowledge.input_shape), labels)
    sure = torch.full((size,), loss < _MATCHES)
    return _Found(inputs, labels, torch.full((size,), _belief(loss)), sure, ("softmax equations",))


def _weighted_mean(weight: Tensor, bias: Tensor | None) -> _Found:
    """A batch before one output: dL/dW = sum_i r_i x_i' and dL/db = sum_i r_i with the residuals r_i.

    Their quotient is the mean of the inputs, weighted by their residuals. Nothing more can be had: any batch with the
    same two sums has the same gradient, d + 1 numbers in all, so that no example of two or more is determined.
    """
    why = "one output: a batch leaves d + 1 numbers, the sum of its inputs weighted by their residuals, and no example"
    if bias is None or not bias.any():
        return _nothing(weight.shape[1], f"{why}; without the sum of the residuals not even their mean")
    note = f"{why}; what is shown is the weighted mean, which lies outside the range if residuals differ in sign"
    return _Found(weight / bias[:, None], None, torch.zeros(1), torch.zeros(1, dtype=torch.bool), (note,))


def _nothing(width: int, note: str) -> _Found:
    inputs = torch.empty(0, width, dtype=torch.float64)
    return _Found(inputs, None, torch.empty(0), torch.empty(0, dtype=torch.bool), (note,))


def _rows(observation: Observation, knowledge: Knowledge, layers: tuple[Layer, ...], front: Layer) -> _Found:
    """Examples that are alone in rows of the first layer, before a ReLU."""
    weight, bias = _gradients(observation, front)
    after = layer_after(layers, front)
    if bias is None or after is None or not isinstance(after.module, nn.ReLU):
        raise AttackError(
            f"the first layer {front.name!r} is not linear with a bias and a ReLU after it, so no example of a batch is"
            " alone in a row; use gradient-matching"
        )
    size, single = _used(observation), client_gradient(observation) is not None
    found = lone_examples(weight, bias, _slopes_of(observation, knowledge, front) if single else None, most=size)
    inputs = torch.stack([each.flat for each in found]) if found else weight[:0]
    labels = torch.tensor([-1 if each.label is None else each.label for each in found])
    known = labels if len(found) and bool((labels >= 0).all()) else None
    if known is not None and len(found) == size:
        loss = _loss(observation, inputs.reshape(-1, *knowledge.input_shape), known)
        if loss < _MATCHES:
            return _Found(inputs, known, torch.ones(size), torch.ones(size, dtype=torch.bool), ("the whole batch",))
    sure = torch.tensor([_certain(each, found, layers, front, size, single=single) for each in found], dtype=torch.bool)
    score = torch.where(sure, 1.0, 0.5)
    note = f"{len(found)} examples alone in rows of {front.name}, confirmed by at least three rows each"
    return _Found(inputs, known, score, sure, (note,))


def _certain(
    one: LoneExample,
    found: list[LoneExample],
    layers: tuple[Layer, ...],
    front: Layer,
    size: int | None,
    *,
    single: bool,
) -> bool:
    """Whether the agreement of rows excludes a mixture of examples.

    Rows mix in different proportions only if dL/dz has at least two directions behind the layer: with two classes, or
    behind a layer of width one, all mixtures agree. So do those of similar examples, whose mean is found once, with the
    weight of all of them. In one step a label must be confirmed, with the weight 1 / size of one example. Clipping may
    have made it smaller: then it must be that of more than half of the batch, too many for each to be two. In several
    steps the weights differ, so nothing is excluded.
    """
    names = [each.name for each in layers]
    later = [each.module for each in layers[names.index(front.name) + 1 :]]
    widths = [module.out_features for module in later if isinstance(module, nn.Linear)]
    if min([*widths[:-1], widths[-1] - 1]) < 2:
        return False
    if not single or size is None or one.label is None or one.share * size > 1 + _ONE:
        return False
    alike = sum(abs(each.share - one.share) < _ONE * one.share for each in found if each.label is not None)
    return one.share * size > 1 - _ONE or 2 * alike > size


def _slopes_of(observation: Observation, knowledge: Knowledge, front: Layer) -> SlopesOf:
    """dL/dz of the first layer, for an input and each label: the gradient of its bias from one example alone."""
    model = private_copy(observation.model, torch.float64)
    place = [name for name, _ in model.named_parameters()].index(front.bias or "")

    def slopes_of(flat: Tensor) -> Tensor:
        inputs = flat.reshape(1, *knowledge.input_shape)
        each = [loss_gradient(model, inputs, torch.tensor([label]))[place] for label in range(knowledge.classes)]
        return torch.stack(each)

    return slopes_of
