# SPDX-License-Identifier: Apache-2.0
"""What a certificate of `exact` certifies: the client holds an example within `radius` of this one.

The equations of the first layer (`exact_layer`) determine its inputs up to one thing: examples of one activation
pattern and with proportional gradients d_i = a_i g (sum a_i = 1) are one direction, and what comes back is their mean
sum a_i x_i. Nothing in the layer excludes it: two images that differ in a pixel have that in common. Two things do.

**The rank.** A gradient of rank n needs n examples. If the client used no more than n, each of them is a direction of
its own, and no direction is a mean. It holds for any loss, clipping, and for sums of local steps.

**The count.** One gradient of a batch of B holds each example with the weight 1/B. Let p be an input that was found, g
its gradient, y its label, and q = 1 - softmax_y(f(p)). The network's own gradient at p is d(p, y)/B; the observed one
is g = k d(p, y)/B, so that k is measured. Were g the sum of examples of one label in a region in which f is affine,
then (softmax(f_i) - e_y) = a_i k (softmax(f(p)) - e_y) for each, and f(p) = sum a_i f_i. Both together give

    H(a) = log k + log(1 - q) - sum a_i log(1 - a_i k q) <= logit(k q) - logit(q),         H(a) = -sum a_i log a_i.

So an excess of log-odds of zero, where k = 1, means one example; an excess of h bounds the entropy of the weights, so
that all but a share b of the weight, b log(1/b) + (1 - b) log(1/(1 - b)) = h, is that of one example, and p is within
b times the range of the values of it. Two equal weights have h = log 2. What float32 makes of h is added: a client's
softmax is rounded to 2^-24, which is much of a small q: where a network is certain of its example, h is uncertain by
2^-22 / q. A sum of examples of different labels, or of different regions, has the gradient of its mean by chance only:
for that h must be known to _CHANCE.

Repeated rows have k = 2, and are not certified: x + e and x - e, if e changes no logit, have the gradient of x twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.attacks.cells import Backward
from fedsim.attacks.exact_layer import LayerBatch
from fedsim.attacks.matching import client_gradient, private_copy
from fedsim.attacks.network import Layer
from fedsim.attacks.observation import Knowledge, Observation

LIMIT = 0.01
"""The largest radius of a certificate, as a share of the range of the values."""
_ALIKE = 1e-2
"""How far the shape of an observed gradient may be from that of the example's own."""
_CHANCE = 1e-3
"""The largest uncertainty of h, unless all examples of the batch are accounted for: then _ALIKE."""


@dataclass(frozen=True, eq=False)
class Counted:
    """How much of each direction the own gradient of its input explains."""

    copies: Tensor
    """(n,) k: the observed gradient in units of the own one of an example of the batch; NaN: not comparable."""
    unlike: Tensor
    """(n,) what of the observed gradient is not a multiple of the own one, relative."""
    residual: Tensor
    """(n,) q = 1 - probability of the label."""
    rounding: Tensor
    """(n,) relative error of q in the client's float32."""


def count(
    observation: Observation, knowledge: Knowledge, front: Layer, batch: LayerBatch, labels: Tensor | None
) -> Counted | None:
    """Compare each direction with the gradient that its input has by itself; None where there is no such thing."""
    size = observation.batch_size
    if client_gradient(observation) is None or labels is None or not len(batch.inputs):
        return None
    model = private_copy(observation.model, torch.float64)
    backward = Backward(model, front.weight, knowledge.input_shape)
    own = backward.at_rows(batch.inputs, labels)
    with torch.no_grad():
        logits = model(batch.inputs.view(-1, *knowledge.input_shape))
    gradients = batch.output_gradients
    share = (own * gradients).sum(1) / own.square().sum(1).clamp_min(1e-300)
    unlike = (gradients - share[:, None] * own).norm(dim=1) / gradients.norm(dim=1).clamp_min(1e-300)
    log_odds = _log_odds(logits, labels)
    rounding = 2.0**-22 * (1 + log_odds.exp()) + 2.0**-20 * (1 + logits.abs().amax(1))
    return Counted(share * (size or math.nan), unlike, torch.sigmoid(-log_odds), rounding)


def _log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """(n,) log p_y / (1 - p_y), also where p_y is nearly 1."""
    right = logits.gather(1, labels[:, None])[:, 0]
    return right - logits.scatter(1, labels[:, None], -math.inf).logsumexp(1)


def radius(
    observation: Observation, knowledge: Knowledge, front: Layer, batch: LayerBatch, labels: Tensor | None
) -> Tensor:
    """(n,) how far the nearest example of the client may be, in every value; infinite where nothing is proved."""
    if not len(batch.inputs):
        return batch.radius
    spread = _spread(knowledge, batch)
    local = torch.where(batch.certified & (batch.radius <= LIMIT * spread), batch.radius, math.inf)
    every_one = _every_one(observation, batch) and bool(local.isfinite().all())
    counted = count(observation, knowledge, front, batch, labels)
    if client_gradient(observation) is None:
        mixed = torch.full_like(local, 0.0 if every_one else math.inf)
    elif counted is not None and (every_one or observation.clients == 1) and bool(_explained(batch, counted).all()):
        mixed = _mixed(counted, observation.batch_size, any_scale=every_one) * spread
    else:
        mixed = torch.full_like(local, math.inf)
    whole = local + mixed
    return torch.where(whole <= LIMIT * spread, whole, math.inf)


def _explained(batch: LayerBatch, counted: Counted) -> Tensor:
    """(n,) bool: directions that are no mistake, since a wrong one shifts the inputs of all others.

    The signs of its input say so, or its gradient is that of its input, several times (which makes it a mean).
    """
    several = (counted.copies > 0.5) & ((counted.copies - counted.copies.round()).abs() < 0.1)
    return batch.certified | (several & (counted.unlike < _ALIKE))


def _every_one(observation: Observation, batch: LayerBatch) -> bool:
    """Whether there are as many directions as examples were used at most."""
    size, work = observation.batch_size, observation.work
    if size is not None and observation.kind == "update":
        size = min(size, work.local_steps(size) * work.batch(size))
    return size is not None and batch.rank == size


def _spread(knowledge: Knowledge, batch: LayerBatch) -> float:
    """The range of the values; twice that of what was found, where it is not known."""
    if knowledge.bounds is None:
        return 2 * float(batch.inputs.max() - batch.inputs.min())
    return _range(knowledge)


def _range(knowledge: Knowledge) -> float:
    assert knowledge.bounds is not None
    low, high = knowledge.bounds
    return float((high - low).max())


def _mixed(counted: Counted, size: int | None, *, any_scale: bool) -> Tensor:
    """(n,) the largest share of other examples in each direction; infinite where the count is not one.

    `any_scale`: the gradient may have been multiplied by anything, for all examples alike.
    """
    copies = counted.copies / (counted.copies.median() if any_scale else 1.0)
    observed = copies * counted.residual
    valid = (observed > 0) & (observed < 1)
    excess = torch.logit(observed.where(valid, 0.5)) - torch.logit(counted.residual)
    excess = excess.where(valid, math.inf)
    doubt = counted.rounding + 4 * counted.unlike / (1 - counted.residual).clamp_min(1e-12)
    whole = (copies - copies.round()).abs() < 0.1
    complete = bool(whole.all()) and int(copies.round().sum()) == size
    allowed = _ALIKE if complete else _CHANCE
    known = (excess.abs() <= doubt) & (doubt <= allowed)
    return torch.where(known, _minority(excess.abs() + doubt), math.inf)


def _minority(entropy: Tensor) -> Tensor:
    """The smaller share b of two with this entropy, of at most log 2: by bisection."""
    low, high = torch.zeros_like(entropy), torch.full_like(entropy, 0.5)
    for _ in range(60):
        middle = (low + high) / 2
        small = torch.special.entr(middle) + torch.special.entr(1 - middle) < entropy
        low, high = torch.where(small, middle, low), torch.where(small, high, middle)
    return high


def in_words(radius: float, knowledge: Knowledge) -> str:
    """A radius for people, rounded up: grey levels of images, else the unit of the values."""
    image = knowledge.kind == "image" and knowledge.bounds is not None
    scale = 255 / _range(knowledge) if image else 1.0
    step = 10.0 ** (math.floor(math.log10(max(radius * scale, 1e-9))) - 1)
    return f"{math.ceil(radius * scale / step) * step:.2g}" + (" grey levels of 256" if image else "")
