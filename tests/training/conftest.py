# SPDX-License-Identifier: Apache-2.0
"""Small data, models of every kind of layer, and a plain PyTorch loop to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.randomness import ClientRandomness
from fedsim.training import LocalWork, batch_schedule, layout_of


class Attention(nn.Module):
    """A block of a causal transformer, with its arithmetic written out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.after(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 12, dim: int = 8, length: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim, padding_idx=0)
        self.register_buffer("positions", torch.linspace(-1, 1, length * dim).view(length, dim))
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1))
        self.blocks = nn.ModuleList([Attention(dim, 2), Attention(dim, 2)])
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Residual(nn.Module):
    """A residual network with either kind of normalisation."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([norm(6), norm(8), norm(8)])
        self.first = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.short = nn.Conv2d(6, 8, 1, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.norms[0](self.stem(x)))
        inner = F.silu(self.norms[1](self.first(h)))
        h = torch.sigmoid(self.norms[2](self.second(inner)) + self.short(h))
        return self.head(h.mean((2, 3)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "logistic": lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 4)),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 10), nn.Sigmoid(), nn.Linear(10, 4, bias=False)),
    "wide": lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 130), nn.Tanh(), nn.Linear(130, 4)),
    "positions": lambda: nn.Sequential(
        nn.Flatten(2), nn.Linear(64, 7), nn.Tanh(), nn.Flatten(), nn.Linear(14, 4)
    ),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(4, 5, 2), nn.ELU(), nn.Flatten(), nn.Linear(20, 4)
    ),
    "conv1d": lambda: nn.Sequential(
        nn.Flatten(2), nn.Conv1d(2, 5, 4, stride=3, padding=2), nn.GELU(), nn.Conv1d(5, 3, 1), nn.Flatten(),
        nn.Linear(66, 4)
    ),
    "layernorm": lambda: nn.Sequential(
        nn.LayerNorm((8, 8)), nn.Flatten(), nn.Linear(128, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 4)
    ),
    "groupnorm": lambda: nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6), nn.Sigmoid(), nn.Conv2d(6, 4, 3),
        nn.InstanceNorm2d(4, affine=True), nn.Softplus(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4)
    ),
    "residual": lambda: Residual(lambda channels: nn.GroupNorm(2, channels)),
    "batchnorm": lambda: Residual(nn.BatchNorm2d),
    "batchnorm1d": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(128, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.BatchNorm1d(9, affine=False), nn.Linear(9, 4)
    ),
    "transformer": Transformer,
}  # fmt: skip
PRIVATE = [name for name in MODELS if not name.startswith("batchnorm")]


@dataclass(frozen=True)
class Federation:
    """A model, its weights, data, and clients of uneven sizes."""

    model: nn.Module
    start: Tensor
    x: Tensor
    y: Tensor
    members: list[np.ndarray]
    randomness: list[ClientRandomness]

    def arguments(self, work: LocalWork, clients: list[int] | None = None) -> tuple[object, ...]:
        """The arguments of train_cohort for some of the clients."""
        some = range(len(self.members)) if clients is None else clients
        members, randomness = [self.members[k] for k in some], [self.randomness[k] for k in some]
        return self.model, self.start, self.x, self.y, members, work, randomness

    def plain(self, client: int, work: LocalWork) -> tuple[Tensor, float]:
        """The update and mean loss of one client, by torch.optim and autograd."""
        layout = layout_of(self.model)
        model = copy.deepcopy(self.model).train()
        model.load_state_dict(layout.unflatten(self.start), strict=False)
        kind = torch.optim.Adam if work.optimizer == "adam" else torch.optim.SGD
        options = {} if work.optimizer == "adam" else {"momentum": work.momentum}
        optimiser = kind(model.parameters(), lr=work.learning_rate, weight_decay=work.weight_decay, **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, work.learning_rate_decay)
        rows, total, count = self.members[client], 0.0, 0
        for batch in batch_schedule(len(rows), work, self.randomness[client].batches()):
            some = torch.from_numpy(rows[batch])
            optimiser.zero_grad()
            loss = F.cross_entropy(model(self.x[some]).flatten(0, -2), self.y[some].flatten())
            loss.backward()
            optimiser.step()
            schedule.step()
            total, count = total + loss.item() * len(batch), count + len(batch)
        end = layout.flatten(model.state_dict())
        constant = end == self.start  # a mask of -inf would be nan
        return torch.where(constant, torch.zeros(()), end - self.start), total / count


@pytest.fixture
def federation() -> Callable[..., Federation]:
    def make(name: str, sizes: tuple[int, ...] = (13, 20, 3, 20, 7, 1, 16), seed: int = 0) -> Federation:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = MODELS[name]()
        generator = torch.Generator().manual_seed(seed)
        if name == "transformer":
            x = torch.randint(0, 12, (90, 6), generator=generator)
            y = torch.randint(0, 12, (90, 6), generator=generator)
        else:
            x = torch.randn(90, 2, 8, 8, generator=generator)
            y = torch.randint(0, 4, (90,), generator=generator)
        rng = np.random.default_rng(seed)
        members = [np.sort(rng.choice(90, size, replace=False)) for size in sizes]
        start = layout_of(model).flatten(model.state_dict())
        return Federation(model, start, x, y, members, [ClientRandomness(seed, 1, k) for k in range(len(sizes))])

    return make
