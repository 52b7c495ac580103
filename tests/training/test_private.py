# SPDX-License-Identifier: Apache-2.0
"""Per-example clipping and noise, against Opacus and against the definition."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedsim.errors import ModelError
from fedsim.randomness import ClientRandomness
from fedsim.training import ExampleClipping, LocalWork, batch_schedule, ghost, layout_of, train_cohort

PRIVATE = ("logistic", "mlp", "wide", "cnn", "conv1d", "layernorm", "groupnorm", "residual", "transformer")


def private(kind="fedavg", norm=0.5, noise=0.0, batches="shuffle", **options) -> LocalWork:
    return LocalWork(kind, example_dp=ExampleClipping(norm, noise, batches), **options)


def example_gradients(cohort, rows) -> torch.Tensor:
    """(n, P): one backward pass for each example."""
    gradients = []
    for row in rows:
        model = copy.deepcopy(cohort.model)
        F.cross_entropy(model(cohort.x[row : row + 1]).flatten(0, -2), cohort.y[row : row + 1].flatten()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(gradients)


def opacus_gradients(cohort, rows) -> torch.Tensor:
    """(n, P): the per-example gradients of Opacus."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.grad_sample import GradSampleModule

        model = GradSampleModule(copy.deepcopy(cohort.model), loss_reduction="sum")
        some = torch.as_tensor(rows)
        losses = F.cross_entropy(model(cohort.x[some]).flatten(0, -2), cohort.y[some].flatten(), reduction="none")
        losses.view(len(some), -1).mean(1).sum().backward()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.grad_sample[:, module.padding_idx] = 0  # PyTorch gives padding no gradient, Opacus does
    return torch.cat([p.grad_sample.detach().flatten(1) for p in model.parameters()], dim=1)


@pytest.mark.parametrize("norm", [1e-3, 0.4, 1e6])
@pytest.mark.parametrize("name", PRIVATE)
def test_clipped_sum_equals_opacus(federation, name, norm):
    """All examples clipped, some, none."""
    cohort = federation(name, sizes=(9, 5, 12))
    result = train_cohort(*cohort.arguments(private("fedsgd", norm=norm, batch_size=None)))
    for k, rows in enumerate(cohort.members):
        gradients = opacus_gradients(cohort, rows)
        torch.testing.assert_close(gradients, example_gradients(cohort, rows), rtol=1e-3, atol=1e-6)
        clipped = gradients * (norm / gradients.norm(dim=1, keepdim=True)).clamp_max(1)
        expected = clipped.sum(0) / len(rows)
        scale = float(expected.abs().max())
        torch.testing.assert_close(result.updates[k, : len(expected)], expected, rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.parametrize("name", PRIVATE)
def test_norm_of_each_example(federation, name):
    """With a tiny C every example's clipped gradient has norm C: a client of one example shows it."""
    cohort = federation(name, sizes=(1,) * 6)
    parameters = layout_of(cohort.model).parameters
    tiny = train_cohort(*cohort.arguments(private("fedsgd", norm=1e-3)))
    torch.testing.assert_close(tiny.updates[:, :parameters].norm(dim=1), torch.full((6,), 1e-3), rtol=1e-4, atol=0)
    free = train_cohort(*cohort.arguments(private("fedsgd", norm=1e6)))
    expected = torch.cat([example_gradients(cohort, rows) for rows in cohort.members])
    torch.testing.assert_close(free.updates[:, :parameters], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("batches", ["shuffle", "poisson"])
def test_private_training_equals_the_definition(federation, optimizer, batches):
    """Several steps without noise: (Σ clip(g_i))/B with the expected B, then torch.optim."""
    cohort = federation("layernorm", sizes=(13, 20, 3))
    work = private(batches=batches, batch_size=8, optimizer=optimizer, learning_rate=0.01, weight_decay=0.1, epochs=2)
    result = train_cohort(*cohort.arguments(work))
    for k, rows in enumerate(cohort.members):
        model = copy.deepcopy(cohort.model)
        kind = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
        optimiser = kind(model.parameters(), lr=0.01, weight_decay=0.1)
        clone = copy.copy(cohort)
        object.__setattr__(clone, "model", model)
        for batch in batch_schedule(len(rows), work, cohort.randomness[k].batches()):
            total = torch.zeros(layout_of(model).parameters)
            if len(batch):
                gradients = example_gradients(clone, rows[batch])
                total = (gradients * (0.5 / gradients.norm(dim=1, keepdim=True)).clamp_max(1)).sum(0)
            for p, g in zip(model.parameters(), total.split([p.numel() for p in model.parameters()]), strict=True):
                p.grad = g.view_as(p) / min(8, len(rows))
            optimiser.step()
        update = layout_of(model).flatten(model.state_dict()) - cohort.start
        torch.testing.assert_close(result.updates[k], update, rtol=1e-3, atol=2e-5)


def test_noise_has_the_stated_deviation_and_is_gaussian(federation):
    """σC/B in every coordinate, independent between clients, steps and coordinates."""
    cohort = federation("wide", sizes=(10, 40, 40))
    clean = train_cohort(*cohort.arguments(private("fedsgd", batch_size=20)))
    noisy = train_cohort(*cohort.arguments(private("fedsgd", noise=2.0, batch_size=20)))
    noise = (noisy.updates - clean.updates).double()
    assert noise.shape[1] > 17_000
    for k, batch in enumerate((10, 20, 20)):
        deviation = 2.0 * 0.5 / batch
        count = noise.shape[1]
        assert noise[k].std().item() == pytest.approx(deviation, rel=4 / np.sqrt(2 * count))
        assert abs(noise[k].mean().item()) < 4 * deviation / np.sqrt(count)
        kurtosis = ((noise[k] / deviation) ** 4).mean().item()
        assert kurtosis == pytest.approx(3, abs=4 * np.sqrt(96 / count))
    correlation = torch.corrcoef(noise)
    assert (correlation - torch.eye(3)).abs().max() < 4 / np.sqrt(noise.shape[1])


def test_an_empty_batch_still_gets_noise(federation):
    cohort = federation("mlp", sizes=(40,))
    work = private(noise=1.0, batches="poisson", batch_size=1, steps=6, learning_rate=1.0)
    schedule = batch_schedule(40, work, cohort.randomness[0].batches())
    assert any(len(batch) == 0 for batch in schedule)
    silent = ExampleClipping(1e-12, 1e12 * 0.5, "poisson")  # gradients vanish, the noise stays σC = 0.5
    result = train_cohort(
        *cohort.arguments(LocalWork("fedavg", batch_size=1, steps=6, learning_rate=1.0, example_dp=silent))
    )
    assert result.updates.std().item() == pytest.approx(0.5 * np.sqrt(6), rel=0.1)


def test_batchnorm_is_refused(federation):
    cohort = federation("batchnorm")
    with pytest.raises(ModelError, match=r"norms\.0.*GroupNorm"):
        train_cohort(*cohort.arguments(private()))


def test_a_forward_pass_that_mixes_examples_is_refused(federation):
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(128, 4)

        def forward(self, x):
            return self.linear(x.flatten(1) - x.flatten(1).mean(0))

    cohort = federation("mlp")
    model = Centred()
    start = layout_of(model).flatten(model.state_dict())
    with pytest.raises(ModelError, match="forward pass"):
        train_cohort(model, start, *cohort.arguments(private())[2:])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), norm=st.floats(1e-3, 10), scale=st.floats(1e-3, 1e3), rows=st.integers(1, 9))
def test_no_example_counts_for_more_than_the_clipping_norm(seed, norm, scale, rows):
    """The sum of n clipped gradients is at most n·C long, whatever the data: a client of one row: at most C."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))
    start = torch.randn(layout_of(model).size, generator=generator) * scale
    x = torch.randn(rows, 1, 5, 5, generator=generator) * scale
    y = torch.randint(0, 3, (rows,), generator=generator)
    members = [np.array([k]) for k in range(rows)] + [np.arange(rows)]
    randomness = [ClientRandomness(seed, 0, k) for k in range(rows + 1)]
    result = train_cohort(model, start, x, y, members, private("fedsgd", norm=norm, batch_size=None), randomness)
    assert result.updates.isfinite().all()
    assert (result.updates.norm(dim=1) <= norm * (1 + 1e-4)).all()


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(2, 3), st.integers(1, 4), st.integers(1, 7), st.integers(1, 6), st.integers(1, 6)),
    seed=st.integers(0, 2**32 - 1),
    transposed=st.booleans(),
    bias=st.booleans(),
)
def test_ghost_norms_equal_the_norms_of_the_gradients(shape, seed, transposed, bias):
    k, b, length, inputs, outputs = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(k, b, length, inputs, generator=generator)
    d = torch.randn(k, b, length, outputs, generator=generator)
    factors = torch.rand(k, b, generator=generator)
    gradients = torch.einsum("kblo,kbli->kboi", d, x)
    squares = gradients.square().sum((2, 3)) + bias * d.sum(2).square().sum(2)
    if transposed:
        x = x.transpose(2, 3).contiguous().transpose(2, 3)
    flat_x, flat_d = x.flatten(0, 1), d.flatten(0, 1)
    found = ghost.squared_norms(flat_x, flat_d)
    if bias:
        found += ghost.squared_lengths(ghost.sum_of_positions(flat_d))
    torch.testing.assert_close(found.view(k, b), squares, rtol=1e-4, atol=1e-4)
    summed = ghost.weighted_sum(gradients.flatten(2), factors)
    torch.testing.assert_close(summed, torch.einsum("kb,kboi->koi", factors, gradients).flatten(1))
