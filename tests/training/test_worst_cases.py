# SPDX-License-Identifier: Apache-2.0
"""How the promise of DP-SGD can fail although every ordinary test passes: found by review, kept from returning."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.errors import ModelError, PrivacyError
from fedsim.randomness import ClientRandomness
from fedsim.training import CohortResult, ExampleClipping, LocalWork, expressible, layout_of, train_cohort

WORK = LocalWork("fedsgd", batch_size=None, example_dp=ExampleClipping(1.0, 0.0, "shuffle"))


def run(model: nn.Module, x: Tensor, y: Tensor, work: LocalWork, clients: int = 1, seed: int = 0) -> CohortResult:
    layout = layout_of(model)
    members = np.array_split(np.arange(len(x)), clients)
    randomness = [ClientRandomness(seed, 1, k) for k in range(clients)]
    return train_cohort(model, layout.flatten(model.state_dict()), x, y, members, work, randomness)


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Σ_i clip(g_i): FedSGD without noise, times the batch size."""
    return run(model, x, y, WORK).updates[0] * len(x)


def test_noise_is_not_rounded_away_by_large_weights() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    nn.init.constant_(model[1].weight, 1.5)
    nn.init.constant_(model[1].bias, 0.05)
    x, y = torch.rand(100, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(100, dtype=torch.int64)
    noise = ExampleClipping(1.0, 1.0, "shuffle")
    work = LocalWork("fedavg", learning_rate=1e-6, batch_size=None, example_dp=noise)
    ends = {run(model, x, y, work, seed=seed).updates.numpy().tobytes() for seed in range(40)}
    gradients = [run(model, x, y, replace(work, kind="fedsgd"), seed=seed).updates for seed in range(40)]
    # The weights can move in steps of 1.2e-7 only, but where they move depends on the noisy gradient as a whole.
    assert len(ends) > 5
    assert len({g.numpy().tobytes() for g in gradients}) == 40


@pytest.mark.parametrize("size", [1e19, 1e22, 3e38])
@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Flatten(), nn.Linear(16, 3)],
        lambda: [nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)],
        lambda: [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)],
        lambda: [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)],
    ],
    ids=["logistic", "mlp", "convolution", "norm"],
)
def test_an_enormous_example_moves_the_sum_by_at_most_the_clipping_norm(size: float, layers) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = nn.Sequential(*layers())
    x, y = torch.rand(6, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    others = clipped_sum(model, x[1:], y[1:])
    x[0] = size * torch.randn(1, 4, 4).sign()
    for label in range(3):  # for one of them the prediction is right, and its gradient 0 times infinity
        y[0] = label
        whole = clipped_sum(model, x, y)
        assert torch.isfinite(whole).all()
        assert float((whole.double() - others.double()).norm()) <= 1.0 + 1e-4


class OverSequence(nn.Module):
    """A linear layer at every position of a sequence, then the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(200, 200), nn.Linear(200, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).mean(1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gap", [51.0, 52.2, 60.0, 80.0])
def test_a_square_that_is_lost_in_single_precision_hides_no_norm(gap: float, bias: bool) -> None:
    """An activation of 1e19 times a gradient of 1e-23: the square of the latter is 0, and the product is not."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8, bias=bias), nn.ReLU(), nn.Linear(8, 3, bias=bias))
    large = 1.7e19
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model[1].weight[0, 0], model[3].weight[0, 0] = large, gap / large
    clipping = ExampleClipping(1e-6, 0.0, "poisson")
    work = LocalWork("fedsgd", batch_size=None, example_dp=clipping)
    update = run(model, torch.ones(1, 4), torch.zeros(1, dtype=torch.int64), work).updates[0]
    assert update.double().norm() <= 1e-6 * (1 + 1e-6)


@pytest.mark.parametrize("scale", [1.0, 100.0, 1000.0, 1e5])
def test_norms_do_not_cancel(scale: float) -> None:
    """Positions whose gradients nearly cancel: the norm must not be found to be smaller than it is."""
    torch.manual_seed(0)
    model = OverSequence()
    with torch.no_grad():
        model.head.weight.mul_(scale)
    x = torch.randn(1, 8, 200) * scale
    x[0, 1::2] = -x[0, ::2] * (1 + 1e-6)
    for label in range(3):
        total = clipped_sum(model, x, torch.tensor([label]))
        assert float(total.double().norm()) <= 1.0 + 1e-3


def test_repeated_tokens_do_not_cancel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3, 8), nn.Flatten(), nn.Linear(64 * 8, 3))
    with torch.no_grad():
        model[2].weight.mul_(1e7)
        weight = model[2].weight.view(3, 64, 8)
        weight[:, 1::2] = -weight[:, ::2] * (1 + 1e-6)
    total = clipped_sum(model, torch.zeros(1, 64, dtype=torch.int64), torch.tensor([1]))
    assert float(total.double().norm()) <= 1.0 + 1e-3


class SequenceFirst(nn.Module):
    """Flattens (T, B) and not (B, T): every row that a replica's layer sees belongs to another example."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps, rows, features = x.shape[1], x.shape[0], x.shape[2]
        inner = self.inner(x.transpose(0, 1).reshape(steps * rows, features))
        return self.head(inner.reshape(steps, rows, 5).mean(0))


def test_clients_are_not_mixed_by_a_model_that_puts_the_sequence_first() -> None:
    torch.manual_seed(0)
    model, x, y = SequenceFirst(), torch.randn(12, 4, 5), torch.arange(12) % 3
    work = LocalWork("fedavg", batch_size=2)
    before = run(model, x, y, work, clients=3).updates
    x[0] += 1
    after = run(model, x, y, work, clients=3).updates
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])


class Mixing(nn.Module):
    """Subtracts the mean of the batch, behind a head that starts at zero, or in training only."""

    def __init__(self, training_only: bool) -> None:
        super().__init__()
        self.training_only, self.inner, self.head = training_only, nn.Linear(5, 5), nn.Linear(5, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        return self.head(inner - inner.mean(0) if self.training or not self.training_only else inner)


@pytest.mark.parametrize("training_only", [False, True])
@pytest.mark.parametrize("equal_rows", [False, True])
def test_a_model_that_mixes_examples_is_refused_under_a_claim(training_only: bool, equal_rows: bool) -> None:
    model = Mixing(training_only)
    x = torch.ones(12, 5) if equal_rows else torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    assert expressible(model) is None
    with pytest.raises(ModelError, match="influence each other"):
        run(model, x, torch.arange(12) % 3, WORK)


def test_weights_of_a_server_cannot_make_a_refusal_tell_of_a_row() -> None:
    """Large weights that cancel: whether rounding in a batch shows depends on the sign of a number of a row.

    The weights are made so that those which a trial perturbs by its known numbers are these.
    """
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    layout, rng = layout_of(model), torch.Generator().manual_seed(3)
    first, last = 1e-4 * torch.randn(64, 20, generator=rng), torch.randn(2, 64, generator=rng)
    first[:, 5], last = 256.0, 256 * (last - last.mean(1, keepdim=True)) / last.abs().max()
    wanted, noise = {"0.weight": first, "2.weight": last}, torch.Generator().manual_seed(1)
    start = {}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        drawn, target = torch.randn(shape, generator=noise), wanted.get(name, torch.zeros(shape))
        start[name] = target
        for _ in range(100):
            start[name] = target - (0.3 * start[name].square().mean().sqrt() + 0.02) * drawn
    x, y = torch.randn(60, 20, generator=rng), torch.arange(60) % 2
    x[:, 5] = -3
    for row in (-3.0, 3.0):
        x[0, 5] = row
        randomness = [ClientRandomness(0, 1, 0)]
        train_cohort(copy.deepcopy(model), layout.flatten(start), x, y, [np.arange(60)], WORK, randomness)


@pytest.mark.parametrize("kind", ["fedsgd", "fedavg"])
def test_noise_that_single_precision_would_lose_is_refused(kind) -> None:  # type: ignore[no-untyped-def]
    """The square of a deviation below 3e-23 is 0, and so was the noise, while the clipped gradients were all there."""
    model, x, y = nn.Linear(4, 2), torch.randn(8, 4), torch.arange(8) % 2
    start = layout_of(model).flatten(model.state_dict())

    def update(norm: float, noise: float) -> Tensor:
        work = LocalWork(kind, batch_size=4, example_dp=ExampleClipping(norm, noise, "poisson"))
        return train_cohort(model, start, x, y, [np.arange(8)], work, [ClientRandomness(0, 1, 0)]).updates[0]

    with pytest.raises(PrivacyError, match="clipping_norm 1e-22"):
        update(1e-22, 1.0)
    if kind == "fedsgd":
        tiny = (update(1e-12, 1.0) - update(1e-12, 0.0)) * 1e12
        assert torch.allclose(tiny, update(1.0, 1.0) - update(1.0, 0.0), rtol=1e-3, atol=1e-5)
