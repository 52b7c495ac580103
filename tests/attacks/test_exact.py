# SPDX-License-Identifier: Apache-2.0
"""Exact inversion against originals: precision, certificates that are never wrong, and honest failure."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedsim.attacks.exact import LayerBatch, exact, invert_layer
from fedsim.attacks.exact_factors import Factors, factorise
from fedsim.attacks.exact_search import _completed, _merged
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.attacks.sparse_directions import Span, span
from fedsim.errors import AttackError
from fedsim.scenario.attack import ExactAttack
from fedsim.training import LocalWork

PIXELS, CLASSES = load_digits(return_X_y=True)
X = torch.tensor(PIXELS / 16, dtype=torch.float32)
Y = torch.tensor(CLASSES)
SETTINGS = ExactAttack(name="exact")
KNOWLEDGE = Knowledge("image", (1, 8, 8), 10, value_range=(torch.zeros(()), torch.ones(())))


def network(width: int = 200, *, bias: bool = True, activation: type[nn.Module] = nn.ReLU, steps: int = 0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, width, bias=bias), activation(), nn.Linear(width, 50), nn.ReLU(), nn.Linear(50, 10)
    )
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.arange(steps * 20).reshape(-1, 20):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(X[rows % 1500]), Y[rows % 1500]).backward()
        optimiser.step()
    return model


def gradient(model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
    loss = nn.functional.cross_entropy(model(X[rows]), Y[rows])
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def rows_of(seed: int, count: int = 8) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).permutation(len(X))[:count])


def observed(model: nn.Module, rows: Tensor) -> Observation:
    work = LocalWork(kind="fedsgd", batch_size=len(rows))
    return Observation(model, gradient(model, rows), "gradient", work, examples=len(rows))


def invert(model: nn.Module, found: dict[str, Tensor], drift: float = 0.0) -> LayerBatch:
    layer = model[1]  # type: ignore[index]
    bias = None if layer.bias is None else layer.bias.detach()
    return invert_layer(layer.weight.detach(), bias, found["1.weight"], found.get("1.bias"), drift=drift)


def decibels(items: Tensor, rows: Tensor) -> Tensor:
    """PSNR of the best match of each item in the batch."""
    apart = (items.flatten(1).double()[:, None] - X[rows].double()[None]).pow(2).mean(2)
    return -10 * torch.log10(apart.min(1).values.clamp_min(1e-30))


@pytest.mark.parametrize("steps", [0, 60])
@pytest.mark.parametrize("size", [8, 12])
def test_a_batch_comes_back_to_machine_precision_with_its_labels(size: int, steps: int) -> None:
    model = network(steps=steps)
    for seed in range(2):
        rows = rows_of(seed, size)
        result = exact(observed(model, rows), KNOWLEDGE, SETTINGS)
        assert result.inputs.shape == (size, 1, 8, 8)
        assert result.certified is not None
        assert result.certified.all()
        assert decibels(result.inputs, rows).min() > 100
        assert result.loss < 1e-8
        assert result.labels is not None
        match = (result.inputs.flatten(1)[:, None] - X[rows][None]).pow(2).sum(2).argmin(1)
        assert sorted(match.tolist()) == list(range(size))
        assert torch.equal(result.labels, Y[rows][match])


def columns(model: nn.Module, rows: Tensor) -> tuple[Span, Factors, Tensor]:
    """The span of a batch's gradient, and its true columns, of length 1."""
    layer, found = model[1], gradient(model, rows)  # type: ignore[index]
    (factors, *_) = factorise(layer.weight.detach(), layer.bias.detach(), found["1.weight"], found["1.bias"])
    space = span(factors.left, factors.noise, factors.spread)
    assert space is not None
    inputs = torch.cat([X[rows], torch.ones(len(rows), 1)], 1).double() @ factors.basis
    true = torch.linalg.solve(space.whiten, torch.linalg.inv(inputs))
    return space, factors, true / true.norm(dim=0)


def test_columns_that_are_missing_are_found_with_their_inputs() -> None:
    space, factors, true = columns(network(steps=60), rows_of(7, 20))
    found = _completed(space, factors, true[:, :12], np.random.default_rng(0), 128)
    near = (true[:, 12:].T @ (found / found.norm(dim=0))).abs()
    assert int((near.amax(1) > 0.99999).sum()) >= 6


def test_of_one_direction_twice_the_sharper_one_stays() -> None:
    space, _, true = columns(network(), rows_of(8))
    blurred = true[:, :1] + 1e-3 * true[:, 1:2]
    pool = _merged(space, blurred / blurred.norm(), true[:, :1])
    torch.testing.assert_close(pool, true[:, :1])


def test_it_is_deterministic_and_leaves_the_model_alone() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    once, again = (exact(observed(model, rows_of(0)), KNOWLEDGE, SETTINGS, seed=3) for _ in range(2))
    assert torch.equal(once.inputs, again.inputs)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_noise_lowers_the_precision_and_not_the_honesty() -> None:
    model, rows = network(), rows_of(1)
    found = gradient(model, rows)
    torch.manual_seed(1)
    for level, least in ((1e-3, 50.0), (1e-1, -math.inf)):
        noisy = {name: g + torch.randn_like(g) * level * g.norm() / math.sqrt(g.numel()) for name, g in found.items()}
        batch = invert(model, noisy)
        if least > 0:
            assert decibels(batch.inputs, rows).median() > least
        assert (decibels(batch.inputs, rows)[batch.certified] > 30).all()


def test_the_sum_of_reshuffled_local_steps_has_the_same_inputs() -> None:
    model, rows = network(), rows_of(2)
    local = copy.deepcopy(model)
    for epoch in range(5):
        order = rows[torch.from_numpy(np.random.default_rng(epoch).permutation(8))]
        for part in order.split(4):
            step = gradient(local, part)
            with torch.no_grad():
                for name, parameter in local.named_parameters():
                    parameter.sub_(0.01 * step[name])
    update = {name: value - model.state_dict()[name] for name, value in local.state_dict().items()}
    work = LocalWork(kind="fedavg", learning_rate=0.01, epochs=5, batch_size=4)
    result = exact(Observation(model, update, "update", work, examples=8), KNOWLEDGE, SETTINGS)
    assert len(result.inputs) == 8
    assert decibels(result.inputs, rows).min() > 60
    assert result.certified is not None
    assert result.certified.sum() >= 6


def test_equal_examples_are_found_once_and_the_notes_say_so() -> None:
    rows = rows_of(3)
    rows[-2:] = rows[:2]
    result = exact(observed(network(), rows), KNOWLEDGE, SETTINGS)
    assert len(result.inputs) == 6
    assert decibels(result.inputs, rows).min() > 100
    assert any("rank 6" in note for note in result.notes)


def test_dead_neurons_do_not_matter() -> None:
    model, rows = network(), rows_of(4)
    with torch.no_grad():
        model[1].bias[:70] = -100  # type: ignore[index]
    batch = invert(model, gradient(model, rows))
    assert batch.complete
    assert decibels(batch.inputs, rows).min() > 100


def test_without_a_bias_the_scale_is_unknown_and_nothing_is_certified() -> None:
    model, rows = network(bias=False), rows_of(5)
    result = exact(observed(model, rows), KNOWLEDGE, SETTINGS)
    assert len(result.inputs) == 8
    assert result.certified is not None
    assert not result.certified.any()
    assert any("scale" in note for note in result.notes)
    similar = nn.functional.cosine_similarity(result.inputs.flatten(1)[:, None], X[rows][None], dim=2)
    assert similar.max(1).values.min() > 1 - 1e-6


def test_a_batch_that_is_too_large_is_not_claimed() -> None:
    for size, width in ((40, 60), (200, 60)):
        rows = rows_of(6, size)
        model = network(width)
        batch = invert(model, gradient(model, rows))
        assert not batch.complete
        assert (decibels(batch.inputs, rows)[batch.certified] > 30).all()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_certificate_is_never_wrong() -> None:
    """200 random batches: sizes, widths, training, noise and duplicates at random."""
    certified = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        model = network(int(rng.choice([40, 100, 200])), steps=int(rng.choice([0, 60])))
        rows = rows_of(seed, int(rng.integers(1, 16)))
        if rng.random() < 0.2:
            rows[-1] = rows[0]
        level = float(rng.choice([0, 0, 1e-4, 1e-3, 1e-2, 1e-1]))
        torch.manual_seed(seed)
        found = gradient(model, rows)
        noisy = {name: g + torch.randn_like(g) * level * g.norm() / math.sqrt(g.numel()) for name, g in found.items()}
        batch = invert(model, noisy)
        assert (decibels(batch.inputs, rows)[batch.certified] > 30).all(), seed
        certified += int(batch.certified.sum())
    assert certified > 400


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (network(activation=nn.Sigmoid), "needs a ReLU"),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10)), "begins with Conv2d"),
    ],
)
def test_other_networks_are_refused_in_one_sentence(model: nn.Module, words: str) -> None:
    images = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    work = LocalWork(kind="fedsgd")
    with pytest.raises(AttackError, match=words):
        exact(Observation(model, images, "gradient", work, examples=8), KNOWLEDGE, SETTINGS)
    if words == "needs a ReLU":
        adam = LocalWork(kind="fedavg", optimizer="adam")
        with pytest.raises(AttackError, match="adam"):
            exact(Observation(network(), gradient(network(), rows_of(0)), "update", adam), KNOWLEDGE, SETTINGS)
