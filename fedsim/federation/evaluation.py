# SPDX-License-Identifier: Apache-2.0
"""How good a model is on held-out data."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.training import Layout


class Score(NamedTuple):
    """Mean cross-entropy, and the share of labels (for text: of next tokens) that are predicted right."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(model: nn.Module, layout: Layout, weights: Tensor, x: Tensor, y: Tensor, batch: int = 1000) -> Score:
    """The score of the weights (P,) on the examples (N, ...) with labels (N,), or (N, T) for text."""
    model.load_state_dict(layout.unflatten(weights), strict=False)
    model.eval()
    loss, right = 0.0, 0
    for part, labels in zip(x.split(batch), y.split(batch), strict=True):
        logits = model(part).reshape(labels.numel(), -1)
        loss += float(F.cross_entropy(logits, labels.flatten(), reduction="sum"))
        right += int((logits.argmax(1) == labels.flatten()).sum())
    return Score(loss / y.numel(), right / y.numel())
