# SPDX-License-Identifier: Apache-2.0
"""Clients one at a time, for a model that the replica kernel cannot express: ordinary autograd, or Opacus for DP-SGD.

The batches, the noise and the arithmetic are those of the kernel, so that the numbers are the same to rounding.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.errors import ModelError
from fedsim.training.batches import ExampleClipping, LocalWork
from fedsim.training.client import Client, CohortResult
from fedsim.training.layout import Layout
from fedsim.training.noise import add_noise


def train_one(
    model: nn.Module, layout: Layout, start: Tensor, x: Tensor, y: Tensor, client: Client, work: LocalWork, into: CohortResult
) -> None:
    """Do the local work of one client, and write the result."""
    own = copy.deepcopy(model).train()
    own.load_state_dict(layout.unflatten(start), strict=False)
    parameters = [parameter for parameter in own.parameters() if parameter.requires_grad]
    optimiser = _optimiser(parameters, work)
    forward = own if work.example_dp is None else _per_example(own)
    noise = client.randomness.noise()
    total = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(client.batches.integers(2**63)))  # for dropout and its like
        for positions in client.schedule:
            rows = torch.from_numpy(client.rows[positions])
            optimiser.zero_grad()
            if len(rows):
                losses = _losses(forward, x[rows], y[rows])
                total += float(losses.detach().sum())
                (losses.mean() if work.example_dp is None else losses.sum()).backward()
            if work.example_dp is not None:
                _privatise(parameters, len(rows), client.batch, work.example_dp, noise)
            if work.kind == "fedavg":
                optimiser.step()
    gradient = None
    if work.kind == "fedsgd":
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        gradient = torch.cat([each.reshape(-1) for each in gradients])
    into.write(client, layout, start, layout.flatten(own.state_dict()), gradient, total)


def _losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """(B,): the cross-entropy of each example; of a sequence, the mean over its tokens."""
    try:
        outputs = model(x)
    except ValueError as error:  # BatchNorm: "Expected more than 1 value per channel when training"
        raise ModelError(f"the model cannot be trained on a batch of {len(x)} examples: {error}") from error
    losses = F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none")
    return losses.view(len(x), -1).mean(1)


def _per_example(model: nn.Module) -> nn.Module:
    """The model wrapped by Opacus: after backward, every parameter has the gradients of each example."""
    from opacus.grad_sample import GradSampleModule  # takes seconds to import

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped: nn.Module = GradSampleModule(model, loss_reduction="sum")
    except (NotImplementedError, ValueError) as error:
        raise ModelError(f"the gradients of single examples of this model cannot be computed: {error}") from error
    return wrapped


def _privatise(parameters: list[nn.Parameter], count: int, batch: int, dp: ExampleClipping, noise: Any) -> None:
    """Set every parameter's gradient to (Σ_i min(1, C/|g_i|) g_i + σC·N(0, I))/B."""
    flat = torch.zeros(1, sum(parameter.numel() for parameter in parameters))
    if count:
        examples = torch.cat([_grad_sample(parameter, count) for parameter in parameters], dim=1)
        factors = (dp.clipping_norm / examples.norm(dim=1).clamp_min(1e-30)).clamp_max(1)
        flat += factors @ examples / batch
    if dp.noise_multiplier:
        add_noise(flat, [noise], torch.tensor([dp.noise_multiplier * dp.clipping_norm / batch]))
    for parameter, gradient in zip(parameters, flat[0].split([p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter).clone()
        parameter.grad_sample = None  # type: ignore[attr-defined]


def _grad_sample(parameter: nn.Parameter, count: int) -> Tensor:
    """(B, n): the gradients of one parameter; where it is used several times, Opacus gives one tensor for each use."""
    sample = getattr(parameter, "grad_sample", None)
    if sample is None:
        return torch.zeros(count, parameter.numel())
    total: Tensor = sum(sample) if isinstance(sample, list) else sample
    return total.detach().reshape(count, -1)


def _optimiser(parameters: list[nn.Parameter], work: LocalWork) -> torch.optim.Optimizer:
    if work.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=work.learning_rate, weight_decay=work.weight_decay)
    return torch.optim.SGD(
        parameters, lr=work.learning_rate, momentum=work.momentum, weight_decay=work.weight_decay
    )
