# SPDX-License-Identifier: Apache-2.0
"""Rows of a table from one gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.attacks.cell_confidence import reliability
from fedsim.attacks.dense_stack import dense_stack
from fedsim.attacks.ensemble import wrong_cells
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction
from fedsim.attacks.row_search import find_rows
from fedsim.attacks.tabular import tabular
from fedsim.data import Dataset, load_dataset
from fedsim.data.table import NumericColumn, TableEncoding, from_frame
from fedsim.errors import AttackError
from fedsim.models import build_model
from fedsim.scenario import CsvData, DefenceSection, EmbeddedData, MlpModel, TabularAttack
from fedsim.scenario.defence import ClientDp
from fedsim.training import LocalWork

ADULT = Path(__file__).parents[2].parent / "shared" / "data" / "adult.csv.gz"
QUICK = TabularAttack(name="tabular", starts=6, iterations=40)


@lru_cache
def numbers() -> Dataset:
    return load_dataset(EmbeddedData(source="breast_cancer"), 0)


@lru_cache
def mixed() -> Dataset:
    """Breast cancer with six columns binned into 3 to 8 categories, and four left as numbers."""
    data = load_breast_cancer(as_frame=True)
    frame = data.data.iloc[:, :10].copy()
    for index, name in enumerate(frame.columns[:6]):
        bins = 3 + index
        frame[name] = pd.qcut(frame[name], bins, labels=[f"bin {i}" for i in range(bins)]).astype(str)
    frame["diagnosis"] = data.target_names[data.target]
    return from_frame("mixed", frame, "diagnosis", EmbeddedData(source="breast_cancer"), 0)


def network(data: Dataset, hidden: tuple[int, ...] = (60, 60), seed: int = 0, activation: str = "relu") -> nn.Module:
    spec = MlpModel(name="mlp", hidden=hidden, activation=activation)
    return build_model(spec, tuple(data.x_train.shape[1:]), data.classes, seed)


def rows_of(data: Dataset, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rows = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed))[:size]
    return data.x_train[rows], data.y_train[rows]


def observed(model: nn.Module, x: Tensor, y: Tensor, scale: float = 1.0) -> Observation:
    found = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    update = {name: scale * each for (name, _), each in zip(model.named_parameters(), found, strict=True)}
    work = LocalWork(kind="fedsgd", batch_size=len(x))
    return Observation(model=model, update=update, kind="gradient", work=work, examples=len(x))


def knowledge(data: Dataset, defence: DefenceSection | None = None) -> Knowledge:
    return Knowledge(
        "table",
        tuple(data.x_train.shape[1:]),
        data.classes,
        value_range=(data.x_train.amin(0), data.x_train.amax(0)),
        encoding=data.encoding,
        defence=defence or DefenceSection(),
    )


def right_cells(result: Reconstruction, x: Tensor, data: Dataset) -> tuple[Tensor, Tensor]:
    assert isinstance(data.encoding, TableEncoding)
    wrong = wrong_cells(result.inputs[:, None], x[None], data.encoding)
    rows, order = linear_sum_assignment(wrong.double().sum(2).numpy())
    return ~wrong[rows, order], torch.from_numpy(order)


@pytest.mark.parametrize("size", [1, 8, 30])
def test_every_row_is_found_and_proved(size: int) -> None:
    data = mixed()
    x, y = rows_of(data, size)
    result = tabular(observed(network(data), x, y), knowledge(data), TabularAttack(name="tabular"))
    right, order = right_cells(result, x, data)
    assert len(result.inputs) == size
    assert right.all()
    assert torch.equal(result.labels, y[order])
    assert result.certified.all()
    assert result.loss < 1e-9
    assert result.cells.shape == (size, len(data.encoding.columns))
    assert (result.cells >= 0.99).all()
    assert result.confidence is None  # of a row: cells of a row are not independent
    assert torch.equal(result.label_counts, torch.bincount(y, minlength=2))


def test_the_mean_of_two_similar_rows_is_not_certified() -> None:
    """Rows 0 and 1, and 2 and 3, differ in one number by 0.2: their mean satisfies every equation, with weight two."""
    data = mixed()
    columns = zip(data.encoding.columns, data.encoding.slices().values(), strict=True)  # type: ignore[union-attr]
    numeric = [where.start for column, where in columns if isinstance(column, NumericColumn)]
    certified = 0
    for seed in range(3):
        x, y = (each.clone() for each in rows_of(data, 8, seed))
        for twin in (1, 3):
            x[twin], y[twin] = x[twin - 1], y[twin - 1]
            x[twin, numeric[(seed + twin - 1) % len(numeric)]] += 0.2
        result = tabular(observed(network(data), x, y), knowledge(data), QUICK)
        near = (result.inputs[:, None] - x[None]).abs().amax(2).amin(1) < 0.05
        assert not (result.certified & ~near).any()
        certified += int(result.certified.sum())
    assert certified >= 9


def test_numbers_alone_are_found() -> None:
    data = numbers()
    x, y = rows_of(data, 12)
    result = tabular(observed(network(data, (100, 100)), x, y), knowledge(data), TabularAttack(name="tabular"))
    assert right_cells(result, x, data)[0].all()
    assert result.certified.all()


def test_a_smooth_network_is_no_protection() -> None:
    data = mixed()
    x, y = rows_of(data, 12)
    model = network(data, activation="tanh")
    result = tabular(observed(model, x, y), knowledge(data), TabularAttack(name="tabular"))
    assert right_cells(result, x, data)[0].all()


def test_a_clipped_gradient_is_read_at_its_own_scale() -> None:
    data = mixed()
    x, y = rows_of(data, 16)
    defence = DefenceSection(client_dp=ClientDp(clipping_norm=0.01, noise_multiplier=0.0))
    result = tabular(
        observed(network(data), x, y, scale=0.037), knowledge(data, defence), TabularAttack(name="tabular")
    )
    assert right_cells(result, x, data)[0].all()
    assert result.loss < 1e-6


def test_a_row_that_occurs_twice_is_counted_twice() -> None:
    data = mixed()
    x, y = rows_of(data, 10)
    x, y = torch.cat([x, x[:1]]), torch.cat([y, y[:1]])
    result = tabular(observed(network(data), x, y), knowledge(data), TabularAttack(name="tabular"))
    assert len(result.inputs) == 11
    assert right_cells(result, x, data)[0].all()


def test_several_local_steps() -> None:
    data = mixed()
    x, y = rows_of(data, 12)
    model, local = network(data), network(data)
    optimiser = torch.optim.SGD(local.parameters(), lr=0.01)
    for rows in (*torch.arange(12).split(4), *torch.arange(12).flip(0).split(4)):
        optimiser.zero_grad()
        cross_entropy(local(x[rows]), y[rows]).backward()
        optimiser.step()
    pairs = zip(local.named_parameters(), model.parameters(), strict=True)
    update = {name: (new - old).detach() for (name, new), old in pairs}
    work = LocalWork(kind="fedavg", batch_size=4, epochs=2, learning_rate=0.01)
    seen = Observation(model=model, update=update, kind="update", work=work, examples=12)
    result = tabular(seen, knowledge(data), QUICK)
    assert right_cells(result, x, data)[0].double().mean() > 0.9


def test_noise_proves_nothing_false() -> None:
    data = mixed()
    for seed, relative in enumerate((1e-5, 1e-2)):
        x, y = rows_of(data, 12, seed)
        seen = observed(network(data, seed=seed), x, y)
        generator = torch.Generator().manual_seed(seed)
        noisy = {
            name: each + relative * each.norm() * torch.randn(each.shape, generator=generator) / each.numel() ** 0.5
            for name, each in seen.update.items()
        }
        seen = Observation(model=seen.model, update=noisy, kind="gradient", work=seen.work, examples=12)
        result = tabular(seen, knowledge(data), TabularAttack(name="tabular", starts=2, iterations=5, calibrate=False))
        right = right_cells(result, x, data)[0].all(1)
        assert not (result.certified & ~right).any()


def test_the_ensemble_takes_over_in_a_narrow_network() -> None:
    data = mixed()
    x, y = rows_of(data, 16)
    seen = observed(network(data, (10, 10)), x, y)
    first, second = (tabular(seen, knowledge(data), QUICK, seed=3) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.cells, second.cells)
    assert len(first.inputs) == 16
    for column, where in zip(data.encoding.columns, data.encoding.slices().values(), strict=True):
        if not isinstance(column, NumericColumn):
            assert torch.equal(first.inputs[:, where].sum(1), torch.ones(16))
            assert ((first.inputs[:, where] == 0) | (first.inputs[:, where] == 1)).all()
    assert not (first.certified & ~right_cells(first, x, data)[0].all(1)).any()
    assert int(first.certified.sum()) < 8
    assert ((first.cells >= 0) & (first.cells <= 1)).all()
    assert float(first.cells.mean()) < 0.95


def test_the_ensemble_beats_a_guess() -> None:
    data = mixed()
    x, y = rows_of(data, 4)
    settings = TabularAttack(name="tabular", sweeps=0, starts=8, iterations=250, calibrate=False)
    model = network(data, (40, 40), activation="sigmoid")
    result = tabular(observed(model, x, y), knowledge(data), settings)
    middle = data.x_train.mean(0)
    blind = Reconstruction("guess", middle.expand(4, -1), None, np.nan, torch.zeros(4))
    assert right_cells(result, x, data)[0].double().mean() > right_cells(blind, x, data)[0].double().mean() + 0.2


def test_what_is_left_of_the_gradient_is_that_of_the_other_rows() -> None:
    data = mixed()
    x, y = rows_of(data, 8)
    model = network(data)
    stack = dense_stack(model, tuple(x.shape[1:]))
    found = find_rows(stack, stack.joined(observed(model, x, y).update), data.encoding, count=8)
    assert int(found.rows.copies.sum()) == 8
    assert max(float(each.abs().max()) for each in found.rest) < 1e-6


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_the_gradient_in_closed_form_is_that_of_autograd(activation: str) -> None:
    data = mixed()
    x, y = rows_of(data, 5)
    model = network(data, (7, 6), activation=activation)
    stack = dense_stack(model, tuple(x.shape[1:]))
    mine = stack.split(stack.gradient(x.double(), y, torch.full((5,), 0.2, dtype=torch.float64)))
    for name, each in observed(model, x, y).update.items():
        torch.testing.assert_close(mine[name], each, rtol=1e-4, atol=1e-6)


def test_a_network_that_does_more_than_its_layers_is_no_stack() -> None:
    class Skip(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x[:, :2]

    assert dense_stack(Skip(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (4,)) is None
    assert dense_stack(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (4,)) is not None


def test_the_reliability_curve() -> None:
    said = torch.tensor([0.55, 0.55, 0.97, 0.97, 0.97, 0.97])
    curve = reliability(said, torch.tensor([1, 0, 1, 1, 1, 0]), (0.5, 0.95))
    assert [(round(each.said, 3), each.right, each.cells) for each in curve] == [(0.55, 0.5, 2), (0.97, 0.75, 4)]
    assert all(each.low < each.right < each.high for each in curve)


def noisy(seen: Observation, relative: float, seed: int) -> Observation:
    """With noise of this share of the gradient's length, of which the attacker is not told."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.cat([each.flatten() for each in seen.update.values()]).square().mean().sqrt()
    update = {
        name: each + relative * length * torch.randn(each.shape, generator=generator)
        for name, each in seen.update.items()
    }
    return replace(seen, update=update)


def test_cells_said_to_be_sure_are_right() -> None:
    """Whole route where it is hard: narrow networks, noise. 12 batches; the curve was fitted on other batches."""
    data = mixed()
    said, right = [], []
    for seed in range(12):
        x, y = rows_of(data, 14 + seed, 100 + seed)
        seen = noisy(observed(network(data, (30, 30), seed), x, y), (0.0, 1e-4, 1e-3)[seed % 3], seed)
        settings = TabularAttack(name="tabular", walkers=64, sweeps=32, starts=6, iterations=30)
        result = tabular(seen, knowledge(data), settings, seed=seed)
        said.append(result.cells.flatten())
        right.append(right_cells(result, x, data)[0].flatten())
    sure = torch.cat(said) >= 0.95
    assert int(sure.sum()) > 300
    assert float(torch.cat(right)[sure].double().mean()) > 0.95
    assert float(torch.cat(right)[~sure].double().mean()) < 0.9


def test_an_ensemble_is_not_surer_than_it_may_be() -> None:
    data = mixed()
    said, right = [], []
    for seed in range(8):
        x, y = rows_of(data, 1 + seed, 200 + seed)
        settings = TabularAttack(name="tabular", sweeps=0, starts=10, iterations=60)
        result = tabular(observed(network(data, (40, 40), seed), x, y), knowledge(data), settings, seed=seed)
        said.append(result.cells[~result.certified].flatten())
        right.append(right_cells(result, x, data)[0][~result.certified].flatten())
    assert float(torch.cat(said).mean()) < float(torch.cat(right).double().mean()) + 0.05
    assert float(torch.cat(said).max()) < 0.98


def test_few_rows_that_do_not_explain_what_is_left() -> None:
    """Rows found are subtracted; noise is what is left of a batch whose size is stated too high."""
    data = mixed()
    x, y = rows_of(data, 11)
    seen = noisy(observed(network(data), x, y), 1e-5, 0)
    update = {name: each * 11 / 12 for name, each in seen.update.items()}
    seen = replace(seen, update=update, work=LocalWork(kind="fedsgd", batch_size=12), examples=12)
    result = tabular(seen, knowledge(data), QUICK)
    assert int(result.certified.sum()) == 11
    assert float(result.cells[~result.certified].max()) <= 0.5


def test_only_tables() -> None:
    data = mixed()
    x, y = rows_of(data, 2)
    image = Knowledge("image", tuple(x.shape[1:]), 2)
    with pytest.raises(AttackError, match="attack tabular reads tables"):
        tabular(observed(network(data), x, y), image, QUICK)


@pytest.mark.skipif(not ADULT.is_file(), reason=f"{ADULT} is not there")
def test_adult_batch_64() -> None:
    data = load_dataset(CsvData(source="csv", path=str(ADULT), target="income", drop=("split",)), 0)
    x, y = rows_of(data, 64)
    result = tabular(observed(network(data, (100, 100)), x, y), knowledge(data), TabularAttack(name="tabular"))
    assert right_cells(result, x, data)[0].all()
    assert int(result.certified.sum()) >= 60
