# SPDX-License-Identifier: Apache-2.0
"""Units in which every input has a range, or a spread, of about 1, so that steps and weights mean the same for all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.attacks.observation import Knowledge


@dataclass(frozen=True, eq=False)
class Units:
    """input = offset + scale · unit."""

    offset: Tensor
    scale: Tensor
    bounded: bool
    """Units lie in [0, 1]; else they are around 0."""
    middle: Tensor
    """The best guess of an input without any evidence, in units."""
    deviation: Tensor
    """Its standard deviation."""

    def decode(self, units: Tensor) -> Tensor:
        """From units to inputs."""
        return self.offset + self.scale * units

    def spread(self, noise: Tensor) -> Tensor:
        """Random inputs, in units, from standard normal numbers."""
        values = self.middle + self.deviation * noise
        return values.clamp(0.01, 0.99) if self.bounded else values

    def to(self, dtype: torch.dtype) -> Units:
        """The same in another precision."""
        parts = (self.offset, self.scale, self.middle, self.deviation)
        offset, scale, middle, deviation = (part.to(dtype) for part in parts)
        return Units(offset, scale, self.bounded, middle, deviation)


def units_of(knowledge: Knowledge, use_range: bool = True) -> Units:
    """[0, 1] where the range of values is known, else standard deviations, else the inputs themselves."""
    shape = knowledge.input_shape
    zeros, ones = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    mean = zeros if knowledge.mean is None else knowledge.mean.double().expand(shape)
    spread = ones if knowledge.std is None else knowledge.std.double().expand(shape).clamp_min(1e-6)
    if knowledge.bounds is None or not use_range:
        return Units(mean, spread, False, zeros, ones)
    low, high = knowledge.bounds
    scale = (high - low).clamp_min(1e-12)
    middle = 0.5 * ones if knowledge.mean is None else (mean - low) / scale
    deviation = 0.25 * ones if knowledge.std is None else spread / scale
    return Units(low, scale, True, middle, deviation)
