# SPDX-License-Identifier: Apache-2.0
"""Whether the bounds of cells hold on tables that no constant was chosen on: FedSGD, FedAvg, with and without noise."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_wine
from torch import Tensor

from fedsim.attacks.cell_confidence import reliability
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.attacks.shadow_client import shadow_client
from fedsim.attacks.tabular import tabular
from fedsim.audit.reconstruction import score
from fedsim.data import Dataset
from fedsim.data.table import from_frame
from fedsim.models import build_model
from fedsim.scenario import EmbeddedData, MlpModel, TabularAttack
from fedsim.training import LocalWork


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@lru_cache
def table(name: str) -> Dataset:
    """`shops`: heavy tails and a category with many values; `likes`: answers that one opinion explains; or wine."""
    rng, rows = np.random.default_rng(5), 1200
    if name == "wine":
        frame = load_wine(as_frame=True).frame
    elif name == "shops":
        sold = np.round(rng.pareto(1.2, rows) * 100, 1)
        kinds = np.array([f"k{min(each, 40)}" for each in rng.zipf(1.4, rows)])
        size = np.where(sold > 300, "large", np.where(sold > 30, "medium", "small"))
        frame = pd.DataFrame({"sold": sold, "kind": kinds, "size": size, "staff": rng.geometric(0.4, rows)})
        frame["old"] = rng.choice(["y", "n"], rows, p=[0.9, 0.1])
        frame["target"] = np.where(sold * rng.lognormal(0, 1, rows) > 100, "yes", "no")
    else:
        opinion = rng.standard_normal(rows)
        asked = {f"q{i}": np.digitize(opinion + rng.standard_normal(rows), [-1, 0, 1]) for i in range(12)}
        frame = pd.DataFrame({key: [f"a{v}" for v in each] if len(key) == 2 else each for key, each in asked.items()})
        frame["target"] = np.where(opinion > 0, "yes", "no")
    return from_frame(name, frame, "target", EmbeddedData(source="breast_cancer"), 0)


def judged_cells(name: str, seed: int) -> tuple[Tensor, Tensor]:
    """(cells,) what is said of them and whether it is right, in one batch; odd seeds are FedAvg."""
    data, rng = table(name), np.random.default_rng(seed)
    size = int(rng.choice([1, 2, 4, 8]))
    activation = ("sigmoid", "tanh", "relu")[seed % 3]
    spec = MlpModel(name="mlp", hidden=(24,), activation=activation)
    model = build_model(spec, tuple(data.x_train.shape[1:]), data.classes, seed)
    work = LocalWork("fedsgd", batch_size=size)
    if seed % 2:
        work = LocalWork("fedavg", learning_rate=float(rng.choice([0.003, 0.03, 0.1])), epochs=2, batch_size=3)
    rows = torch.from_numpy(rng.permutation(len(data.x_train))[:size].copy())
    x, y = data.x_train[rows], data.y_train[rows]
    bounds = (data.x_test.amin(0), data.x_test.amax(0))
    known = Knowledge("table", tuple(x.shape[1:]), data.classes, value_range=bounds, encoding=data.encoding)
    kind = "update" if seed % 2 else "gradient"
    seen = shadow_client(Observation(model, {}, kind, work, examples=size), known, x, y, seed)
    if seed % 5 == 4:
        noise = torch.Generator().manual_seed(seed)
        update = {
            n: u + 0.02 * u.std(correction=0) * torch.randn(u.shape, generator=noise) for n, u in seen.update.items()
        }
        seen = replace(seen, update=update)
    chosen = TabularAttack(name="tabular", starts=8, iterations=60, walkers=64, sweeps=32)
    pairs = score(tabular(seen, known, chosen, seed=seed), x, y, known).cells
    return torch.tensor([said for said, _ in pairs]), torch.tensor([right for _, right in pairs])


def check(names: tuple[str, ...], seeds: range, least: int) -> None:
    """No bin of any table says more than its interval allows, for FedSGD and for FedAvg; and something is said."""
    stated = 0
    for name in names:
        for several in (0, 1):
            cells = [judged_cells(name, seed) for seed in seeds if seed % 2 == several]
            said, right = (torch.cat(each) for each in zip(*cells, strict=True))
            stated += int((said >= 0.5).sum())
            for each in reliability(said, right):
                assert each.said <= each.high, (name, several, each)
    assert stated >= least


def test_bounds_hold() -> None:
    check(("shops", "likes"), range(6), 40)


@pytest.mark.slow
def test_bounds_hold_on_more_batches() -> None:
    check(("shops", "likes", "wine"), range(100, 118), 100)
