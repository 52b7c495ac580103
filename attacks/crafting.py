# SPDX-License-Identifier: Apache-2.0
"""Weights that are made to leak: what an active server sends in place of the model.

Each function takes the honest weights by name and returns crafted ones; nothing but public rows (data that the server
has of its own) and a seed goes in, so that a round can be crafted again to the last bit. How the update is read is
`fedsim.attacks.imprint`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.attacks.network import dense_front, layer_after, leaf_layers
from fedsim.errors import AttackError
from fedsim.randomness import stream
from fedsim.scenario import ImprintServer, PerClientServer, TrapServer

Weights = dict[str, Tensor]
_NORMAL = torch.distributions.Normal(0.0, 1.0)
_DEAD = 1e3  # a dead row's bias, in units of the largest answer that a public row gives


@dataclass(frozen=True)
class Front:
    """The dense first layer (m units, d inputs), its activation, and the dense layer that reads it."""

    weight: str
    bias: str
    next_weight: str
    activation: Literal["relu", "hardtanh"]


def find_front(model: nn.Module, input_shape: tuple[int, ...]) -> Front:
    """The front of a network, or an AttackError that says why its inputs cannot be read off."""
    layers = leaf_layers(model, input_shape)
    front = dense_front(layers)
    if front is None:
        raise AttackError("the first layer is not dense, so no bins or traps fit into it; use model: imprint or mlp")
    after = layer_after(layers, front)
    following = layer_after(layers, after) if after is not None else None
    kind = _activation(after.module) if after is not None else None
    if kind is None or following is None or not isinstance(following.module, nn.Linear):
        raise AttackError("the first layer is not followed by ReLU or Hardtanh(0, 1) and a dense layer; use model: mlp")
    if front.bias is None:
        raise AttackError("the first layer has no bias, by whose gradient an input is divided; use a layer with bias")
    return Front(front.weight, front.bias, following.weight, kind)


def _activation(module: nn.Module) -> Literal["relu", "hardtanh"] | None:
    if isinstance(module, nn.ReLU):
        return "relu"
    unit = isinstance(module, nn.Hardtanh) and (module.min_val, module.max_val) == (0, 1)
    return "hardtanh" if unit else None


# --- bins: Robbing the Fed, LOKI -----------------------------------------------------------------------------------


def craft_imprint(
    weights: Mapping[str, Tensor], front: Front, public: Tensor, section: ImprintServer, *, seed: int, steps: int = 1
) -> Weights:
    """Bins in the first layer (Fowl et al. 2022, section 3): w_i = q, b_i = -c_i with c_i the quantiles of <q, x>.

    The bins are shared among `section.queries` questions q. Unused rows are dead. `steps` is the number of local steps
    between which the bins must stay where they are.
    """
    rows = weights[front.weight].shape[0]
    used = min(section.bins or rows, rows)
    if used < 2 * section.queries:
        raise AttackError(f"{used} rows are too few for {section.queries} queries of 2 bins; use a wider first layer")
    crafted = {name: tensor.clone() for name, tensor in weights.items()}
    _place_bins(crafted, front, public, section, range(used), seed, steps)
    _kill(crafted, front, public, range(used, rows))
    return crafted


def craft_per_client(
    weights: Mapping[str, Tensor],
    front: Front,
    public: Tensor,
    section: PerClientServer,
    clients: Sequence[int],
    *,
    seed: int,
    steps: int = 1,
) -> tuple[Weights, dict[int, Weights]]:
    """A block of bins for each client; the model with all blocks, and each client's, in which the others are dead.

    The gradient of a dead row is exactly zero, so that in the sum of all clients each block is one client's (LOKI, Zhao
    et al. 2024, does it with the kernels of a convolution in front of the block).
    """
    rows = weights[front.weight].shape[0]
    size = rows // max(len(clients), 1)
    if size < 2 * section.queries:
        raise AttackError(
            f"the first layer's {rows} rows give each of {len(clients)} clients {size}, too few for {section.queries}"
            " queries of 2 bins; use a wider layer or a smaller cohort"
        )
    everybody = {name: tensor.clone() for name, tensor in weights.items()}
    blocks = {client: range(k * size, (k + 1) * size) for k, client in enumerate(clients)}
    for client, block in blocks.items():
        _place_bins(everybody, front, public, section, block, seed + 7919 * (client + 1), steps)
    _kill(everybody, front, public, range(len(clients) * size, rows))
    models = {}
    for client, block in blocks.items():
        models[client] = {name: tensor.clone() for name, tensor in everybody.items()}
        _kill(models[client], front, public, [row for row in range(rows) if row not in block])
    return everybody, models


def _place_bins(
    crafted: Weights,
    front: Front,
    public: Tensor,
    section: ImprintServer | PerClientServer,
    rows: range,
    seed: int,
    steps: int,
) -> None:
    """Write the bins of every query into a range of rows, and make the next layer read them as the reader needs.

    Cumulative bins (ReLU) are read as differences, so the rows of a query must have the same gradient with respect to
    their output: the next layer's columns are all v. Its size against that of the rows is a choice. With one step the
    rows are small and v is large, so that the bins are most of the gradient's norm and noise hurts least; with several
    steps they are equal, since what a step does to small rows or to small columns shows in the next. Hardtanh's bins
    are read one by one; there the signs of v alternate, so that the many saturated rows cancel.
    """
    flat = public.flatten(1).double()
    total, outputs = len(rows), crafted[front.next_weight].shape[0]
    starts = [rows.start + total * q // section.queries for q in range(section.queries + 1)]
    for number, (start, stop) in enumerate(pairwise(starts)):
        rng = stream(seed, "craft-query", number)
        query = _query(section.query, flat, number, rng.standard_normal(flat.shape[1]))
        answers = flat @ query
        query, answers = query / answers.std(), answers / answers.std()
        edges = ladder(answers, stop - start, gaussian=section.statistics == "gaussian")
        column = torch.from_numpy(rng.standard_normal(outputs))
        if front.activation == "relu":
            slope = torch.full((stop - start,), 1.0 / total if steps == 1 else total**-0.5, dtype=torch.float64)
            signs = torch.full_like(slope, 1.0 if steps == 1 else total**-0.5)
        else:
            slope = 1.0 / torch.diff(edges)
            signs = 1.0 - 2.0 * (torch.arange(stop - start) % 2)
        crafted[front.weight][start:stop] = (slope[:, None] * query).float()
        crafted[front.bias][start:stop] = (-slope * edges[:-1]).float()
        crafted[front.next_weight][:, start:stop] = (column[:, None] * signs).float()


def ladder(answers: Tensor, bins: int, *, gaussian: bool = False) -> Tensor:
    """The edges (bins + 1,) between bins that an answer falls into with equal probability; the outer ones are far out.

    The distribution is that of the public answers, each widened by a kernel (Silverman 1986, half its width, since the
    answers need not be one hill); or the normal one of their mean and standard deviation.
    """
    mean, std = answers.mean(), answers.std()
    width = 0.45 * std * len(answers) ** -0.2
    centres, width = (mean[None], std) if gaussian else (answers, width)
    grid = torch.linspace(float(mean - 8 * std), float(mean + 8 * std), 8001, dtype=torch.float64)
    below = torch.cat([_NORMAL.cdf((part[:, None] - centres) / width).mean(dim=1) for part in grid.split(500)])
    wanted = torch.arange(1, bins, dtype=torch.float64) / bins
    right = torch.searchsorted(below, wanted).clamp(1, len(grid) - 1)
    share = (wanted - below[right - 1]) / (below[right] - below[right - 1]).clamp_min(1e-300)
    inner = grid[right - 1] + share * (grid[right] - grid[right - 1])
    return torch.cat([grid[:1], inner, grid[-1:]])


def _query(kind: str, public: Tensor, number: int, normal: NDArray[np.float64]) -> Tensor:
    """The weights (d,) of a question: normal ones, a cosine wave of a frequency of its own, or the average.

    Normal ones are made orthogonal to the mean of the public rows: answers around zero are rounded least.
    """
    size = public.shape[1]
    if kind == "average":
        return torch.full((size,), 1.0 / size, dtype=torch.float64)
    if kind == "cosine":
        return torch.cos(math.pi * (torch.arange(size, dtype=torch.float64) + 0.5) * (32 + number) / size)
    weights, mean = torch.from_numpy(normal), public.mean(dim=0)
    return weights - (weights @ mean) / (mean @ mean).clamp_min(1e-12) * mean


def _kill(crafted: Weights, front: Front, public: Tensor, rows: Sequence[int]) -> None:
    """Biases so low that no input activates these rows."""
    chosen = torch.tensor(list(rows), dtype=torch.int64)
    if len(chosen):
        answers = public.flatten(1).float() @ crafted[front.weight][chosen].T
        crafted[front.bias][chosen] = -_DEAD * (answers.abs().amax(dim=0) + 1e-3)


# --- trap weights ---------------------------------------------------------------------------------------------------


def craft_trap(
    weights: Mapping[str, Tensor], front: Front, public: Tensor, section: TrapServer, *, batch_size: int, seed: int
) -> Weights:
    """Rows that few examples activate (Boenisch et al. 2023, section 5.2).

    A random half of a row is -|n|, the other s|n|. An input x >= 0 activates it if N(x) < s P(x), for the sums N and P
    over the halves; s is the quantile of N/P that a share `rate` of the public rows lies below, where the paper tries
    values of s. Inputs with negative values, for which halves mean nothing, are trapped by the bias in place of s.
    """
    rate = section.rate or 1.0 / max(batch_size, 2)
    crafted = {name: tensor.clone() for name, tensor in weights.items()}
    rows, inputs = crafted[front.weight].shape
    rng = stream(seed, "craft-trap")
    sizes = torch.from_numpy(rng.standard_normal((rows, inputs))).abs()
    negative = torch.from_numpy(rng.random((rows, inputs))).argsort(dim=1) < inputs // 2
    flat = public.flatten(1).double()
    below, above = flat @ (sizes * negative).T, flat @ (sizes * ~negative).T
    if float(flat.min()) >= 0:
        scale = _quantile(below / above.clamp_min(1e-9), rate, section)
        matrix, bias = torch.where(negative, -sizes, scale[:, None] * sizes), torch.zeros(rows, dtype=torch.float64)
    else:
        matrix, bias = torch.where(negative, -sizes, sizes), _quantile(below - above, rate, section)
    spread = matrix.norm(dim=1) / math.sqrt(inputs)
    crafted[front.weight].copy_(matrix / spread[:, None] / math.sqrt(inputs))
    crafted[front.bias].copy_(bias / spread / math.sqrt(inputs))
    return crafted


def _quantile(values: Tensor, rate: float, section: TrapServer) -> Tensor:
    """The `rate` quantile of each column, of the rows or of a normal distribution with their mean and spread."""
    low: Tensor = torch.quantile(values, rate, dim=0)
    if section.statistics == "gaussian":
        low = values.mean(dim=0) + values.std(dim=0) * _NORMAL.icdf(torch.tensor(rate, dtype=torch.float64))
    return low
