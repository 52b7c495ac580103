# SPDX-License-Identifier: Apache-2.0
"""Fits the curve of attacks/cell_confidence.py on simulated attacks, and checks it on tables that it has not seen.

    python benchmarks/table_calibration.py [--data ../shared/data] [--batches 150] [--seed 1]

Every batch draws its size, network (width, depth, activation, training), noise, members and iterations; the search for
rows is left out, so that the ensemble is what is measured. A table is checked with the curve of all other tables, with
and without a shadow batch (attacks/shadow_rows.py). Intervals take cells as independent, which those of a batch are
not: they are too narrow.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from table_inversion import network
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsim.attacks.cell_confidence import CURVE, SHADOW, evidence, log_odds, logistic, mode_shift, reliability
from fedsim.attacks.ensemble import Problem, attack_rows, right_cells
from fedsim.attacks.matching import Target
from fedsim.attacks.shadow_rows import shadow_cells
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
    shadow: tuple[Tensor, Tensor]
    """The same two of a shadow batch."""

    @property
    def source(self) -> str:
        """Whose rows the table has."""
        return SOURCE.get(self.table, self.table)


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
    right = right_cells(pooled.inputs, x, y, data.encoding).flatten().double()
    return Record(name, evidence(pooled, problem), right, shadow_cells(problem, pooled, iterations, seed))


def fitted(records: list[Record]) -> tuple[Tensor, Tensor]:
    """The curve, every cell with the same weight, and how it is corrected by a shadow batch."""
    right = torch.cat([each.right for each in records])
    curve = logistic(torch.cat([each.evidence for each in records]), right, torch.ones_like(right))
    return curve, logistic(torch.cat([corrected(each, curve) for each in records]), right, torch.ones_like(right))


def corrected(record: Record, curve: Tensor) -> Tensor:
    """(cells, len(SHADOW)): log-odds by the curve, one, and the shift that a shadow batch asks for."""
    logits, (cells, right) = record.evidence @ curve, record.shadow
    one = torch.ones_like(logits)
    return torch.stack([logits, one, one * mode_shift(cells @ curve, right)], 1)


def show(records: list[Record]) -> None:
    """Print the curves, and how reliable they are on the tables that they were not fitted on."""
    for names, values in zip((CURVE, SHADOW), fitted(records), strict=True):
        for name, value in zip(names, values.tolist(), strict=True):
            print(f"{name}: {value:.3f} (in use: {names[name]:.3f})")
    others = {s: fitted([each for each in records if each.source != s]) for s in {each.source for each in records}}
    right = torch.cat([each.right for each in records])
    plain = torch.cat([torch.sigmoid(each.evidence @ others[each.source][0]) for each in records])
    shadowed = [torch.sigmoid(corrected(each, others[each.source][0]) @ others[each.source][1]) for each in records]
    in_use = torch.cat(
        [torch.sigmoid(log_odds(r.evidence, mode_shift(log_odds(r.shadow[0]), r.shadow[1]))) for r in records]
    )
    curves = {"the curve alone": plain, "with a shadow batch": torch.cat(shadowed), "as it is in use": in_use}
    for title, said in curves.items():
        loss = torch.nn.functional.binary_cross_entropy(said, right)
        print(f"{title}: {len(records)} batches, mean log loss {loss:.4f}")
        for b in reliability(said, right):
            print(f"said {b.said:.3f}: right {b.right:.3f} [{b.low:.3f}, {b.high:.3f}] of {b.cells} cells")


def main() -> None:
    """Attack random batches, and print what they teach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--batches", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, rng = tables(options.data), np.random.default_rng(options.seed)
    names = [list(found)[i % len(found)] for i in range(options.batches)]
    records = [attacked(name, found[name], rng) for name in names]
    show(records)


if __name__ == "__main__":
    main()
