# SPDX-License-Identifier: Apache-2.0
"""Which item is which original, and the scores of the pairs."""

from __future__ import annotations

import math

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedsim.attacks.observation import Reconstruction
from fedsim.audit.scores.yardsticks import WORST, Yardstick


def assign(stick: Yardstick, found: Tensor, truth: Tensor, mismatch: Tensor, eta: float) -> list[tuple[int, int]]:
    """(item, original) pairs: as many right as possible, then as many exact, then the closest.

    Items that hold anything but finite numbers are paired with nothing.
    """
    rows = torch.isfinite(found.flatten(1)).all(1).nonzero().flatten() if len(found) else torch.zeros(0).long()
    if not len(rows) or not len(truth):
        return []
    usable = found[rows]
    distance = stick.distance(usable, truth)
    # In decibels, so that a near-perfect pair is not broken for two that are a little less bad.
    closeness = -20 * (distance + 1e-10).log10() if stick.cells is None else -distance
    if stick.cells is not None:  # equally many cells wrong: the less wrong ones
        closeness -= 1e-6 * torch.cdist(usable, truth, p=1).clamp(max=1e3)
    gain = 1e6 * (distance <= eta) + 1e3 * stick.exact(usable, truth) + closeness
    items, originals = linear_sum_assignment((gain - 1e-3 * mismatch[rows]).numpy(), maximize=True)
    return [(int(rows[item]), int(original)) for item, original in zip(items, originals, strict=True)]


def label_mismatch(reconstruction: Reconstruction, labels: Tensor) -> Tensor:
    """(n, b): share of the labels that differ; what is equally near is paired by its label."""
    n = len(reconstruction.inputs)
    if reconstruction.labels is None or len(reconstruction.labels) != n:
        return torch.zeros(n, len(labels), dtype=torch.float64)
    mine, theirs = reconstruction.labels.reshape(n, -1), labels.reshape(len(labels), -1)
    if mine.shape[1] != theirs.shape[1]:
        return torch.zeros(n, len(labels), dtype=torch.float64)
    return (mine[:, None] != theirs[None]).double().mean(-1)


def near_and_exact(
    stick: Yardstick, found: Tensor, truth: Tensor, pairs: list[tuple[int, int]], eta: float
) -> tuple[set[int], set[int]]:
    """The items that are right, and that are exact."""
    near, same = set(), set()
    for item, original in pairs:
        a, b = found[item : item + 1], truth[original : original + 1]
        if bool(stick.distance(a, b) <= eta):
            near.add(item)
        if bool(stick.exact(a, b)):
            same.add(item)
    return near, near & same


def certain_pairs(
    stick: Yardstick, found: Tensor, truth: Tensor, pairs: list[tuple[int, int]], apart: Tensor, radius: Tensor | None
) -> set[int]:
    """The items that are what a certificate must mean.

    `apart` (n, N) is the largest difference in any value, in units of the data; an attack that states a `radius` (n,)
    is held to it.
    """
    if radius is None:
        return {i for i, o in pairs if bool(stick.certain(found[i : i + 1], truth[o : o + 1]))}
    return {i for i, o in pairs if bool(apart[i, o] <= radius[i])}


def pair_metrics(
    stick: Yardstick, found: Tensor, truth: Tensor, pairs: list[tuple[int, int]]
) -> dict[int, dict[str, float]]:
    """The scores of each paired item, by name."""
    if not pairs:
        return {}
    items, originals = (list(side) for side in zip(*pairs, strict=True))
    columns = stick.metrics(found[items], truth[originals])
    return {
        item: {name: float(column[place]) for name, column in columns.items() if math.isfinite(column[place])}
        for place, item in enumerate(items)
    }


def metric_names(stick: Yardstick, truth: Tensor) -> list[str]:
    """The scores that exist for inputs of this shape."""
    return [name for name, column in stick.metrics(truth[:1], truth[:1]).items() if torch.isfinite(column).all()]


def mean_metrics(metrics: list[dict[str, float]], originals: int, names: list[str]) -> dict[str, float]:
    """Means over the originals; one that was not found counts as WORST."""
    if not originals:
        return {}
    missing = originals - len(metrics)
    return {
        name: (sum(one.get(name, WORST.get(name, 0.0)) for one in metrics) + missing * WORST.get(name, 0.0)) / originals
        for name in names
    }
