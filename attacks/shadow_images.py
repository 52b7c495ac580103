# SPDX-License-Identifier: Apache-2.0
"""How probable it is that a reconstructed image is right, from batches of public images that are attacked likewise.

A tiny matching loss does not prove an image: several batches may explain a gradient. Whether they do depends on the
network, the size of the batch and the attack, all of which the server has. So it draws shadow batches of public images
with the labels that it believes in, computes what a client would have sent (`shadow_client`), attacks that in the same
way, and counts the images that are right. Shadow batches that were explained better than the real one say nothing about
it and are not counted. The confidence is Clopper and Pearson's lower bound of the share of right images, where a batch,
whose images are right and wrong together, counts as one trial. Without shadow batches there is no confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import beta
from torch import Tensor

from fedsim.attacks.observation import Knowledge, Observation, Reconstruction
from fedsim.attacks.shadow_client import shadow_client
from fedsim.errors import AttackError, counted
from fedsim.randomness import stream

NEAR = 0.1
"""Root mean square error of a right image, as a share of the range of values: 20 dB."""
EVENT = "this image is within 20 dB of an image of the client's (root mean square error at most 0.1 of the value range)"
_ERROR = 0.05  # how often the lower bound may be too high
_ALIKE = 10.0  # matching losses within this factor are not told apart: runs of one attack scatter by as much

Attack = Callable[..., Reconstruction]


@dataclass(frozen=True)
class Shadow:
    """How an attack fared on one batch that the server made itself."""

    loss: float
    """What it left unexplained."""
    share: float
    """Of the images that it offered, those that are right."""


def judged(
    attack: Attack,
    result: Reconstruction,
    observation: Observation,
    knowledge: Knowledge,
    settings: Any,
    *,
    shadows: int,
    seed: int = 0,
) -> Reconstruction:
    """The reconstruction with a confidence from so many shadow batches, or with a note that it has none, and why.

    What is not an image, and images that are all certified, are left as they are.
    """
    proved = result.certified is not None and bool(result.certified.all())
    if knowledge.kind != "image" or not len(result.inputs) or proved:
        return result
    reason = _impossible(result, observation, knowledge, shadows)
    if reason is not None:
        return _without(result, reason)
    played = [_played(attack, result, observation, knowledge, settings, seed + 1 + number) for number in range(shadows)]
    counts = comparable(result.loss, played)
    if not counts:
        return _without(result, f"each of {shadows} shadow batches was explained far better than this one")
    rate = lower_rate([shadow.share for shadow in counts])
    note = (
        f"calibrated on {len(counts)} of {counted(shadows, 'shadow')}, batches of public images attacked likewise"
        f" (those explained no better than this one): {100 * _mean(counts):.0f}% of their images are right"
    )
    confidence = torch.full((len(result.inputs),), rate)
    return replace(result, confidence=confidence, event=EVENT, notes=(*result.notes, note))


def comparable(loss: float, shadows: Sequence[Shadow]) -> list[Shadow]:
    """The shadow batches that were explained no better than the real one: better ones are easier."""
    return [shadow for shadow in shadows if shadow.loss * _ALIKE >= loss]


def lower_rate(shares: Sequence[float], error: float = _ERROR) -> float:
    """The one-sided lower bound of the mean of shares in [0, 1], each of which counts as one trial.

    Clopper and Pearson's for the whole part of their sum: shares vary less than coins of the same mean.
    """
    hits = math.floor(sum(shares) + 1e-9)
    return float(beta.ppf(error, hits, len(shares) - hits + 1)) if hits else 0.0


def right_images(found: Tensor, truth: Tensor, knowledge: Knowledge) -> Tensor:
    """(n,) bool: which images found are within NEAR of the original that they are paired with, as many as possible."""
    low, high = knowledge.value_range or (torch.cat([found, truth]).min(), torch.cat([found, truth]).max())
    scale = (high - low).double().clamp_min(1e-12)
    apart = torch.cdist((found.double() / scale).flatten(1), (truth.double() / scale).flatten(1))
    near = apart / math.sqrt(math.prod(truth.shape[1:])) <= NEAR
    items, originals = linear_sum_assignment((near * 1e6 - apart).nan_to_num(-1e9).numpy(), maximize=True)
    right = torch.zeros(len(found), dtype=torch.bool)
    right[items] = near[items, originals]
    return right


def _impossible(result: Reconstruction, observation: Observation, knowledge: Knowledge, shadows: int) -> str | None:
    if not shadows:
        return "shadows is 0"
    if knowledge.public is None:
        return "the server has no public images (adversary.knows.public_rows is false)"
    if observation.clients > 1:
        return "the update is a sum over several clients"
    return "it has no matching loss to compare" if math.isnan(result.loss) else None


def _without(result: Reconstruction, reason: str) -> Reconstruction:
    loss = "" if math.isnan(result.loss) else f"; the evidence is a matching loss of {result.loss:.1e}"
    note = f"no probability that an image is right: not calibrated, because {reason}{loss}"
    return replace(result, confidence=None, event="", notes=(*result.notes, note))


def _mean(shadows: Sequence[Shadow]) -> float:
    return sum(shadow.share for shadow in shadows) / len(shadows)


def _played(
    attack: Attack, result: Reconstruction, observation: Observation, knowledge: Knowledge, settings: Any, seed: int
) -> Shadow:
    """One shadow batch; where the attack fails, nothing of it is right, however badly it is explained."""
    inputs, labels = _public_batch(result, observation, knowledge, seed)
    granted = knowledge if knowledge.labels is None else replace(knowledge, labels=labels.sort().values)
    sent = shadow_client(observation, granted, inputs, labels, seed)
    try:
        found = attack(sent, granted, settings, seed=seed)
    except AttackError:
        return Shadow(math.inf, 0.0)
    if not len(found.inputs) or math.isnan(found.loss):
        return Shadow(math.inf, 0.0)
    return Shadow(found.loss, float(right_images(found.inputs, inputs, knowledge).double().mean()))


def _public_batch(
    result: Reconstruction, observation: Observation, knowledge: Knowledge, seed: int
) -> tuple[Tensor, Tensor]:
    """Public images with the labels that were found, each taken once; of a class that has no more of them, any."""
    assert knowledge.public is not None
    inputs, classes = knowledge.public
    size = observation.batch_size or len(result.inputs)
    size = min(size, len(inputs))
    wanted = [] if result.labels is None else result.labels.tolist()[:size]
    free = torch.from_numpy(stream(seed, "attack-shadow").permutation(len(inputs))).tolist()
    rows = []
    for label in [*wanted, *[None] * (size - len(wanted))]:
        place = next((i for i, row in enumerate(free) if label is None or int(classes[row]) == label), 0)
        rows.append(free.pop(place))
    return inputs[rows], classes[rows]
