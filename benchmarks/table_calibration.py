# SPDX-License-Identifier: Apache-2.0
"""Fits the curve of attacks/cell_confidence.py on simulated attacks, and checks it on tables that it has not seen.

    python benchmarks/table_calibration.py [--data ../shared/data] [--batches 150] [--seed 1]

Every batch draws its size, network (width, depth, activation, training), noise, members and iterations; the search for
rows is left out, so that the ensemble is what is measured. A table is checked with the curve of all other tables.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from table_inversion import network
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsim.attacks.cell_confidence import CURVE, evidence, logistic, reliability
from fedsim.attacks.ensemble import Problem, attack_rows, wrong_cells
from fedsim.attacks.matching import Target
from fedsim.data import Dataset, load_dataset
from fedsim.data.table import TableEncoding, from_frame
from fedsim.models import build_model
from fedsim.scenario import CsvData, EmbeddedData, MlpModel

CSV = {"adult": "income", "german_credit": "credit-risk", "law_school": "pass_bar"}
SOURCE = {"mixed": "breast cancer", "cancer": "breast cancer"}
"""Tables made of the same data are left out together."""


@dataclass(frozen=True, eq=False)
class Record:
    """The cells of one attacked batch."""

    table: str
    evidence: Tensor
    right: Tensor


def binned(name: str, frame: pd.DataFrame, target: pd.Series, categorical: int) -> Dataset:
    """A mixed table: the first columns in 3, 4, ... bins of equal numbers of rows, the others as they are."""
    frame = frame.copy()
    for index, column in enumerate(frame.columns[:categorical]):
        bins = 3 + index
        labels = [f"bin {i}" for i in range(bins)]
        frame[column] = pd.qcut(frame[column].rank(method="first"), bins, labels=labels).astype(str)
    frame["target"] = target.astype(str)
    return from_frame(name, frame, "target", EmbeddedData(source="breast_cancer"), 0)


def tables(folder: Path) -> dict[str, Dataset]:
    """Four tables that scikit-learn carries, and those of the folder that are there."""
    cancer, wine, sugar = (load(as_frame=True) for load in (load_breast_cancer, load_wine, load_diabetes))
    found = {
        "mixed": binned("mixed", cancer.data.iloc[:, :10], cancer.target, 6),
        "wine": binned("wine", wine.data, wine.target, 5),
        "diabetes": binned("diabetes", sugar.data, pd.qcut(sugar.target, 2, labels=False), 3),
        "cancer": load_dataset(EmbeddedData(source="breast_cancer"), 0),
    }
    for name, target in CSV.items():
        path = folder / f"{name}.csv.gz"
        if path.is_file():
            drop = ("split",) if name == "adult" else ()
            found[name] = load_dataset(CsvData(source="csv", path=str(path), target=target, drop=drop), 0)
    return found


def attacked(name: str, data: Dataset, rng: np.random.Generator) -> Record:
    """One random batch behind one random network."""
    size, members, iterations = (int(rng.choice(c)) for c in ([1, 2, 4, 8, 12, 16, 24], [10, 16], [60, 120, 240]))
    hidden = [(100, 100), (100, 100), (50, 50), (100,), (20, 20)][rng.integers(5)]
    steps, seed = int(rng.choice([0, 0, 200, 1000])), int(rng.integers(1 << 30))
    noise = 0.0 if rng.random() < 0.6 else float(10 ** rng.uniform(-3, 0.5))
    model = network(data, hidden, steps, seed)
    if steps == 0 and rng.random() < 1 / 3:
        spec = MlpModel(name="mlp", hidden=hidden, activation="sigmoid")
        model = build_model(spec, tuple(data.x_train.shape[1:]), data.classes, seed)
    rows = torch.from_numpy(rng.permutation(len(data.x_train))[:size])
    rows = rows[data.y_train[rows].argsort()]
    x, y = data.x_train[rows], data.y_train[rows]
    sent = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    present = torch.ones(x.shape[1], dtype=torch.bool) if noise else sent[0].ne(0).any(0)
    length = torch.cat([each.flatten() for each in sent]).square().mean().sqrt()
    generator = torch.Generator().manual_seed(seed)
    target = [each + noise * length * torch.randn(each.shape, generator=generator) for each in sent]
    assert isinstance(data.encoding, TableEncoding)
    bounds = (data.x_train.amin(0), data.x_train.amax(0))
    problem = Problem(model.eval().requires_grad_(False), Target(target), y, data.encoding, present, bounds)
    pooled = attack_rows(problem, members, iterations, seed)
    wrong = wrong_cells(pooled.inputs[:, None], x[None], data.encoding)
    foreign = 1e3 * (y[:, None] != y[None]).double()
    order = linear_sum_assignment((wrong.double().sum(2) + foreign).numpy())
    return Record(name, evidence(pooled, problem), (~wrong[order]).flatten().double())


def fitted(records: list[Record]) -> Tensor:
    """The curve, every cell with the same weight."""
    right = torch.cat([each.right for each in records])
    return logistic(torch.cat([each.evidence for each in records]), right, torch.ones_like(right))


def main() -> None:
    """Print the curve, and how reliable it is on the tables that it was not fitted on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--batches", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, rng = tables(options.data), np.random.default_rng(options.seed)
    names = [list(found)[i % len(found)] for i in range(options.batches)]
    records = [attacked(name, found[name], rng) for name in names]
    for name, value in zip(CURVE, fitted(records).tolist(), strict=True):
        print(f"{name}: {value:.3f} (in use: {CURVE[name]:.3f})")
    said = []
    for record in records:
        same = SOURCE.get(record.table, record.table)
        others = [each for each in records if SOURCE.get(each.table, each.table) != same]
        said.append(torch.sigmoid(record.evidence @ fitted(others)))
    for b in reliability(torch.cat(said), torch.cat([each.right for each in records])):
        print(f"said {b.said:.3f}: right {b.right:.3f} [{b.low:.3f}, {b.high:.3f}] of {b.cells} cells")


if __name__ == "__main__":
    main()
