# SPDX-License-Identifier: Apache-2.0
"""Residual networks for small images: He et al. 2016, "Deep Residual Learning", section 4.2, with a 3x3 stem."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn


def norm_layer(norm: Literal["group", "batch"], channels: int) -> nn.Module:
    """BatchNorm, or GroupNorm with up to 8 groups."""
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(math.gcd(8, channels), channels)


class Block(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))); a 1x1 convolution carries x where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Literal["group", "batch"]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm_layer(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(shortcut, norm_layer(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, H/stride, W/stride)."""
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(self.shortcut(x) + inner)


class ResNet(nn.Module):
    """Stages of blocks, each but the first halving the image and doubling the channels; a mean and a linear head."""

    def __init__(
        self,
        name: str,
        inputs: int,
        classes: int,
        blocks: tuple[int, ...],
        width: int,
        norm: Literal["group", "batch"],
    ) -> None:
        super().__init__()
        self.title = f"{name} of width {width}, {norm} norm"
        self.stem = nn.Sequential(
            nn.Conv2d(inputs, width, 3, padding=1, bias=False), norm_layer(norm, width), nn.ReLU()
        )
        layers: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                outputs = width * 2**stage
                layers.append(Block(channels, outputs, 2 if stage and not block else 1, norm))
                channels = outputs
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to logits (N, classes)."""
        logits: Tensor = self.head(self.blocks(self.stem(x)))
        return logits
