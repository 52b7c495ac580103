# SPDX-License-Identifier: Apache-2.0
"""Clients one at a time, for a model that the replica kernel cannot express: ordinary autograd, or Opacus for DP-SGD.

The batches, the noise and the arithmetic are those of the kernel, so that the numbers are the same to rounding.
"""

from __future__ import annotations

import copy
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.errors import ModelError
from fedsim.training.batches import ExampleClipping, LocalWork
from fedsim.training.client import Client, CohortResult, Task
from fedsim.training.noise import NoiseStreams


def train_one(task: Task, client: Client, into: CohortResult) -> None:
    """Do the local work of one client, and write the result."""
    layout, work = task.layout, task.work
    model = copy.deepcopy(task.model).train()
    model.load_state_dict(layout.unflatten(task.start), strict=False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = _optimiser(parameters, work)
    forward = model if work.example_dp is None else _per_example(model)
    seeded = work.example_dp is not None and client.randomness.add_noise is None
    noise = NoiseStreams([client.randomness.noise_key()], layout.parameters) if seeded else None
    total = 0.0
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook")  # Opacus's hook on the first layer
        torch.manual_seed(int(client.batches.integers(2**63)))  # for dropout and its like
        for step, positions in enumerate(client.schedule):
            rows = torch.from_numpy(client.rows[positions])
            optimiser.zero_grad()
            if len(rows):
                losses = _losses(forward, task.x[rows], task.y[rows])
                total += float(losses.detach().sum())
                _backward(losses.mean() if work.example_dp is None else losses.sum())
                _clear_padding(model)
            if work.example_dp is not None:
                _privatise(parameters, len(rows), client, work.example_dp, noise)
            if work.kind == "fedavg":
                optimiser.param_groups[0]["lr"] = work.rate(step)
                optimiser.step()

    def write_updates(_: slice, updates: Tensor) -> None:
        torch.sub(layout.flatten(model.state_dict()), task.start, out=updates[0])
        if work.kind == "fedsgd":
            each = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            torch.cat([gradient.reshape(-1) for gradient in each], out=updates[0, : layout.parameters])

    into.write(task, [client], write_updates, [total])


def check_one(task: Task) -> None:
    """ModelError for a model whose gradients of single examples Opacus cannot compute, tried on two of them."""
    model = copy.deepcopy(task.model).train()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = _losses(_per_example(model), task.x[:2], task.y[:2])
        _backward(losses.sum())
    _clear_padding(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            _grad_sample(parameter, len(losses), checked=True)


def _backward(loss: Tensor) -> None:
    try:
        loss.backward()
    except Exception as error:  # a layer that Opacus cannot do, such as an LSTM: its hooks raise whatever comes
        raise ModelError(f"the gradients of this model cannot be computed: {error}; use other layers") from error


def _losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """(B,): the cross-entropy of each example; of a sequence, the mean over its tokens."""
    try:
        outputs = model(x)
    except ValueError as error:  # BatchNorm: "Expected more than 1 value per channel when training"
        raise ModelError(
            f"the model cannot be trained on a batch of {len(x)} examples: {error}; use other layers"
        ) from error
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
        raise ModelError(
            f"the gradients of single examples of this model cannot be computed: {error}; use other layers"
        ) from error
    return wrapped


def _privatise(
    parameters: list[nn.Parameter], count: int, client: Client, dp: ExampleClipping, noise: NoiseStreams | None
) -> None:
    """Set every parameter's gradient to (Σ_i min(1, C/|g_i|) g_i + σC·N(0, I))/B.

    A client with noise of its own (`randomness.add_noise`) sums in double precision, where rounding moves the sum by
    less than 2⁻⁵⁰ of the clipping norm for any batch that fits the memory, and adds that noise to the sum.
    """
    batch, add_noise = client.batch, client.randomness.add_noise
    flat = torch.zeros(1, sum(p.numel() for p in parameters), dtype=torch.float64 if add_noise else torch.float32)
    if count:
        # A failure could tell of the rows, and privacy does not rest on it: whatever is added up was clipped.
        checked = add_noise is None
        examples = torch.cat([_grad_sample(parameter, count, checked) for parameter in parameters], dim=1)
        examples = examples.to(flat.dtype)
        examples[~examples.norm(dim=1).isfinite()] = 0  # no direction to scale down: it counts as zero
        factors = (dp.clipping_norm / examples.norm(dim=1).clamp_min(1e-30)).clamp_max(1)
        flat += factors @ examples / (1 if add_noise else batch)
    if add_noise:
        flat = (add_noise(flat, dp.noise_multiplier, dp.clipping_norm) / batch).float()
    elif dp.noise_multiplier:
        assert noise is not None
        drawn = torch.empty_like(flat)
        noise.write(drawn, torch.tensor([dp.noise_multiplier * dp.clipping_norm / batch]))
        flat += drawn
    for parameter, gradient in zip(parameters, flat[0].split([p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter).clone()
        parameter.grad_sample = None  # type: ignore[attr-defined]


def _grad_sample(parameter: nn.Parameter, count: int, checked: bool) -> Tensor:
    """(B, n): the gradients of one parameter; if they are checked, they must add up to the gradient of the whole batch.

    Where a parameter is used in a way that Opacus does not know, its gradients would be missing or incomplete.
    """
    if parameter.grad is None:  # not used at all
        return torch.zeros(count, parameter.numel())
    total = parameter.grad.reshape(-1)
    found: Tensor | None = getattr(parameter, "grad_sample", None)
    examples = torch.zeros(count, parameter.numel()) if found is None else found.detach().reshape(count, -1)
    if checked and (examples.sum(0) - total).norm() > 1e-3 * (examples.norm(dim=1).sum() + total.norm()):
        raise ModelError(
            f"Opacus cannot compute the gradients of single examples of a parameter of shape {tuple(parameter.shape)}: "
            "use layers that it knows (Linear, Conv, Embedding, GroupNorm, LayerNorm) with example-level privacy"
        )
    return examples


def _clear_padding(model: nn.Module) -> None:
    """The padding token of an embedding has no gradient in PyTorch; in Opacus it has one."""
    for module in model.modules():
        sample = getattr(module.weight, "grad_sample", None) if isinstance(module, nn.Embedding) else None
        if sample is not None and module.padding_idx is not None:
            sample[:, module.padding_idx] = 0


def _optimiser(parameters: list[nn.Parameter], work: LocalWork) -> torch.optim.Optimizer:
    if work.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=work.learning_rate, weight_decay=work.weight_decay)
    return torch.optim.SGD(parameters, lr=work.learning_rate, momentum=work.momentum, weight_decay=work.weight_decay)
