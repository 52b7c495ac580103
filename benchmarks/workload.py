# SPDX-License-Identifier: Apache-2.0
"""The work that every contestant does: 100 clients, 50 a round, 60 examples of 28x28, batch 20, one epoch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

CLIENTS, COHORT, EXAMPLES, BATCH, CLASSES, LEARNING_RATE = 100, 50, 60, 20, 10, 0.05
CLIPPING_NORM, NOISE_MULTIPLIER = 1.0, 1.0


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    features = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(512, 10))


def tiny() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


MODELS = {"mlp": mlp, "cnn": cnn, "tiny": tiny}
# What fedsim calls them in a scenario.
SCENARIO_MODELS = {"mlp": {"name": "mlp", "hidden": [128]}, "cnn": "cnn", "tiny": {"name": "mlp", "hidden": [32]}}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def make_data(side: int = 28, clients: int = CLIENTS, examples: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    """Random pixels (clients, examples, 1, side, side) in [0, 1] and labels (clients, examples): speed is blind."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients, examples, 1, side, side), dtype=np.uint8)
    y = rng.integers(0, CLASSES, (clients, examples))
    return torch.from_numpy(x.astype(np.float32) / 255), torch.from_numpy(y)


def write_npz(path: Path, x: Tensor, y: Tensor) -> None:
    """The same data as a file for fedsim; `client_train` says whose each row is."""
    clients, examples = y.shape
    pixels = (x * 255).round().numpy().astype(np.uint8).reshape(clients * examples, *x.shape[-2:])
    owner = np.repeat(np.arange(clients), examples)
    labels = y.numpy().reshape(-1)
    np.savez(path, x_train=pixels, y_train=labels, client_train=owner, x_test=pixels[:100], y_test=labels[:100])
