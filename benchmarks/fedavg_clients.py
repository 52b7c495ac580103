# SPDX-License-Identifier: Apache-2.0
"""Clients whose FedAvg updates the benchmarks attack, in plain PyTorch, and how near a reconstruction comes to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedsim.attacks.observation import Knowledge, Observation
from fedsim.data import load_dataset
from fedsim.models import build_model
from fedsim.scenario import CnnModel, EmbeddedData
from fedsim.training import LocalWork

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@dataclass(frozen=True, eq=False)
class Client:
    """A client's images, in pixels, and what the server knows of them."""

    images: Tensor
    labels: Tensor
    observation: Observation
    knowledge: Knowledge
    scale: Callable[[Tensor], Tensor]
    """To pixels in [0, 1]; affine."""

    @property
    def inputs(self) -> Tensor:
        """The images in the model's units."""
        zero, one = self.scale(torch.zeros(())), self.scale(torch.ones(()))
        return (self.images - zero) / (one - zero)


def local_training(
    model: nn.Module, x: Tensor, y: Tensor, work: LocalWork, seed: int, *, shuffles: bool = True
) -> Observation:
    """A client in plain PyTorch that shuffles in every epoch, or never."""
    trained, order = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD(trained.parameters(), lr=work.learning_rate)
    for _ in range(work.epochs):
        places = torch.randperm(len(x), generator=order) if shuffles else torch.arange(len(x))
        for batch in places.split(work.batch(len(x))):
            optimiser.zero_grad()
            F.cross_entropy(trained(x[batch]), y[batch]).backward()
            optimiser.step()
    after, before = dict(trained.named_parameters()), dict(model.named_parameters())
    return Observation(model, {n: (after[n] - before[n]).detach() for n in before}, "update", work, examples=len(x))


def clients_of(data: str, count: int, work: LocalWork, images: int = 50) -> list[Client]:
    """Clients of 50 images: drawers of Omniglot, or random images of CIFAR-100; the networks of the paper.

    A drawer has 47 images at most, those that the file keeps for tests among them; what does not fill a batch is left
    out, as in the paper.
    """
    file = np.load(SHARED / {"omniglot": "omniglot_by_drawer.npz", "cifar100": "cifar100.npz"}[data])
    parts = ("train", "test") if data == "omniglot" else ("train",)
    x, y = (np.concatenate([file[f"{name}_{part}"] for part in parts]) for name in ("x", "y"))
    x, y = torch.from_numpy(x).float() / 255, torch.from_numpy(y).long()
    x = x.permute(0, 3, 1, 2) if x.dim() == 4 else x[:, None]
    order = np.random.default_rng(0)
    if data == "omniglot":
        drawer = np.concatenate([file[f"client_{part}"] for part in parts])
        groups = [np.flatnonzero(drawer == each)[:images] for each in np.unique(drawer)]
        groups = sorted(groups, key=len, reverse=True)[:count]
        size = min(len(group) for group in groups)
        size -= size % work.batch(size)
        groups = [group[:size] for group in groups]
    else:
        groups = [order.choice(len(x), images, replace=False) for _ in range(count)]
    classes, width = int(y.max()) + 1, 32 if data == "omniglot" else 64
    shape = tuple(x.shape[1:])
    model = build_model(CnnModel(name="cnn", variant="averaging", width=width), shape, classes, 0, kind="image")
    mean, std = (x.mean(), x.std())
    known = Knowledge("image", shape, classes, ((0 - mean) / std, (1 - mean) / std))
    clients = []
    for number, group in enumerate(groups):
        rows = torch.from_numpy(group)
        observation = local_training(model, (x[rows] - mean) / std, y[rows], work, number)
        clients.append(Client(x[rows], y[rows], observation, known, lambda z: z * std + mean))
    return clients


def digits_clients(count: int, work: LocalWork, images: int, *, shuffles: bool = True) -> list[Client]:
    """Clients with images of the embedded digits each, whose labels the server knows; LeNet."""
    data = load_dataset(EmbeddedData(source="digits"), 0)
    model = build_model(CnnModel(name="cnn", variant="lenet"), data.input_shape, data.classes, 0, kind="image")
    clients = []
    for number in range(count):
        x, y = (part[number * images : (number + 1) * images] for part in (data.x_train, data.y_train))
        known = Knowledge("image", data.input_shape, data.classes, (torch.zeros(()), torch.ones(())), labels=y)
        observation = local_training(model, x, y, work, number, shuffles=shuffles)
        clients.append(Client(x, y, observation, known, lambda z: z))
    return clients


def decibels(found: Tensor, truth: Tensor) -> Tensor:
    """(n,): the PSNR of each original under the best assignment."""
    errors = torch.cdist(found.flatten(1).double(), truth.flatten(1).double()).square() / truth[0].numel()
    rows, columns = linear_sum_assignment(errors.numpy())
    return -10 * errors[rows, columns].clamp_min(1e-12).log10()
