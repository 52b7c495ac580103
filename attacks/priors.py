# SPDX-License-Identifier: Apache-2.0
"""What inputs look like before anything was observed: the regularisers R(x) of gradient matching.

Inputs are (R, n, *shape): R restarts of n items. Every prior is a mean, so that its weight does not depend on the size
of the input, and returns (R,): one number for each restart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.attacks.observation import Observation

_SMOOTH = 1e-6  # |t| is sqrt(t² + ε) - sqrt(ε): L-BFGS needs a derivative at 0
NATURAL_STEP = 0.05
"""The mean difference between neighbouring pixels of a photograph, as a share of the range of values."""


def total_variation(inputs: Tensor) -> Tensor:
    """Mean |difference| of vertical neighbours + that of horizontal ones (Rudin, Osher, Fatemi 1992, anisotropic).

    Inputs that are no images have no neighbours, and no variation.
    """
    if inputs.dim() < 5 or min(inputs.shape[-2:]) < 2:
        return inputs.new_zeros(len(inputs))
    down, right = inputs.diff(dim=-2), inputs.diff(dim=-1)
    return _absolute(down).flatten(1).mean(1) + _absolute(right).flatten(1).mean(1)


def _absolute(values: Tensor) -> Tensor:
    return (values.square() + _SMOOTH).sqrt() - math.sqrt(_SMOOTH)


def l2(inputs: Tensor) -> Tensor:
    """Mean square: small values are more likely."""
    return inputs.square().flatten(1).mean(1)


def patch(inputs: Tensor, size: int = 4) -> Tensor:
    """Mean squared jump across the borders of size x size patches (GradViT, Hatamizadeh et al. 2022).

    A network that cuts an image into patches says little about what joins them.
    """
    if inputs.dim() < 5:
        return inputs.new_zeros(len(inputs))
    total = inputs.new_zeros(len(inputs))
    for dim in (-2, -1):
        jumps = inputs.diff(dim=dim)
        borders = torch.arange(size - 1, jumps.shape[dim], size)
        if len(borders):
            total = total + jumps.index_select(dim, borders).square().flatten(1).mean(1)
    return total


def outside_range(inputs: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Mean squared distance from the known range of values."""
    return ((low - inputs).relu() + (inputs - high).relu()).square().flatten(1).mean(1)


def group_consistency(inputs: Tensor) -> Tensor:
    """Mean squared distance from the mean of all restarts (GradInversion, Yin et al. 2021, equation 11).

    Items of equal place are compared: with labels fixed in one order, a place is a class in every restart.
    """
    return (inputs - inputs.detach().mean(0, keepdim=True)).square().flatten(1).mean(1)


# --- BatchNorm ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BatchStatistics:
    """Mean and unbiased variance of each channel of what went into one BatchNorm layer, over the client's batch."""

    mean: Tensor
    variance: Tensor


def batch_statistics(observation: Observation) -> dict[str, BatchStatistics]:
    """The exact statistics of the batch, by layer, from the change of the running ones: old + difference / momentum.

    A layer in training mode computes new = (1 - m) · old + m · batch. After several local steps the batches are mixed:
    then there is no statement about one of them, and nothing is returned. Layers that do not train say nothing.
    """
    found: dict[str, BatchStatistics] = {}
    several = observation.kind == "update" and (
        observation.examples is None or observation.work.local_steps(observation.examples) != 1
    )
    for name, module in observation.model.named_modules():
        if several or not isinstance(module, nn.modules.batchnorm._BatchNorm) or not module.training:
            continue
        mean, variance = (_batch_value(module, observation.update, name, kind) for kind in ("mean", "var"))
        if mean is not None and variance is not None:
            found[name] = BatchStatistics(mean, variance)
    return found


def _batch_value(
    module: nn.modules.batchnorm._BatchNorm, update: Mapping[str, Tensor], name: str, kind: str
) -> Tensor | None:
    key = f"{name}.running_{kind}" if name else f"running_{kind}"
    old = module.running_mean if kind == "mean" else module.running_var
    if old is None or key not in update or not update[key].any():
        return None
    count = module.num_batches_tracked
    momentum = module.momentum if module.momentum is not None else 1 / (1 + float(count if count is not None else 0))
    return old.detach() + update[key] / momentum


def statistics_apart(values: Tensor, known: BatchStatistics) -> Tensor:
    """||mean - known mean||² + ||variance - known variance||² over the channels of (n, C, ...), relative to the known.

    DeepInversion (Yin et al. 2020, equation 4), with the statistics of this very batch in place of the running ones.
    """
    others = [dim for dim in range(values.dim()) if dim != 1]
    mean, variance = values.mean(others), values.var(others, correction=1)
    apart = (mean - known.mean).square().sum() / known.mean.square().sum().clamp_min(1e-12)
    return apart + (variance - known.variance).square().sum() / known.variance.square().sum().clamp_min(1e-12)
