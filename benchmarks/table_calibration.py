# SPDX-License-Identifier: Apache-2.0
"""Fits the curve of attacks/cell_confidence.py on attacked batches, and checks it on tables that it has not seen.

    python benchmarks/table_calibration.py [--data ../shared/data] [--batches 400] [--seed 31]
    python benchmarks/table_calibration.py --held-out [--batches 120] [--seed 7]

Every batch draws its size, network, training, local work (FedSGD, or FedAvg with up to five epochs), noise and effort;
labels are inferred. The whole attack is played, and whole again on its shadow batch. Each table is checked with the
curve of all other tables, less the margin. --held-out prints no fit: it checks the constants in use on tables
(`made_tables.HELD_OUT`) and seeds on which no constant was chosen. Intervals take cells as independent. Those of a
batch are not, so that the intervals are too narrow, and the check is the stricter for it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from made_tables import FITTED, HELD_OUT, made
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from table_inversion import network
from torch import Tensor

from fedsim.attacks.cell_confidence import (
    CURVE,
    MARGIN,
    PROVED,
    SURE,
    explained,
    logistic,
    mode_shift,
    reliability,
    terms,
)
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction
from fedsim.attacks.shadow_client import shadow_client
from fedsim.attacks.shadow_rows import Batch, Shadow, shadow_of
from fedsim.attacks.tabular import find_batch
from fedsim.audit.reconstruction import score
from fedsim.data import Dataset, load_dataset
from fedsim.data.table import TableEncoding, from_frame
from fedsim.errors import AttackError
from fedsim.scenario import CsvData, EmbeddedData, TabularAttack
from fedsim.training import LocalWork

CSV = {"adult": "income", "german_credit": "credit-risk", "law_school": "pass_bar"}
SOURCE = {"mixed": "cancer"}
"""Tables made of the same data are left out together."""
BINS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, eq=False)
class Record:
    """The cells of one attacked batch: those of which something is said, but for the margin."""

    source: str
    several: bool
    terms: Tensor
    right: Tensor
    proved: tuple[int, int]
    """How many cells of proved rows are right, of how many."""
    withheld: tuple[int, int]
    """The same of the cells that are withheld because the batch is not explained."""


def binned(name: str, frame: pd.DataFrame, target: pd.Series, categorical: int) -> Dataset:
    """A mixed table: the first columns in 3, 4, ... bins of equal numbers of rows, the others as they are."""
    frame = frame.copy()
    for index, column in enumerate(frame.columns[:categorical]):
        bins = 3 + index
        labels = [f"bin {i}" for i in range(bins)]
        frame[column] = pd.qcut(frame[column].rank(method="first"), bins, labels=labels).astype(str)
    frame["target"] = target.astype(str)
    return from_frame(name, frame, "target", EmbeddedData(source="breast_cancer"), 0)


def location(path: Path) -> Dataset:
    """Who was seen where (Shokri et al. 2017): the forty most frequent places, yes or no, thirty classes."""
    with np.load(path) as file:
        x, y = file["x_train"].reshape(len(file["x_train"]), -1), file["y_train"]
    places = np.argsort(-x.mean(0))[:40]
    frame = pd.DataFrame({f"place {i}": np.where(x[:, column] > 0, "yes", "no") for i, column in enumerate(places)})
    return from_frame("location", frame.assign(target=y.astype(str)), "target", EmbeddedData(source="breast_cancer"), 0)


def tables(folder: Path) -> dict[str, Dataset]:
    """Four tables that scikit-learn carries, four made-up ones, and those of the folder that are there."""
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
    found |= {name: made(name) for name in FITTED}
    return found | ({"location": location(path)} if (path := folder / "location30.npz").is_file() else {})


# --- one batch ------------------------------------------------------------------------------------------------------


def random_update(data: Dataset, rng: np.random.Generator) -> tuple[Observation, Knowledge, Tensor, Tensor]:
    """What a client with random rows sends from behind a random network, with what the server knows, and the rows."""
    size, seed = int(rng.choice([1, 2, 4, 4, 8, 8, 16, 24])), int(rng.integers(1 << 30))
    hidden = [(60, 60), (50, 50), (100,), (30, 30), (20, 20), (12,)][rng.integers(6)]
    activation = ("relu", "sigmoid", "tanh")[rng.integers(3)]
    model = network(data, hidden, int(rng.choice([0, 0, 200, 1000])), seed, activation)
    work = LocalWork("fedsgd", batch_size=size)
    if rng.random() < 0.45:
        rate, momentum = float(rng.choice([0.001, 0.003, 0.01, 0.05])), float(rng.choice([0, 0, 0, 0.9]))
        epochs, batch = int(rng.choice([1, 2, 5])), int(rng.choice([2, 4, 8, 16]))
        work = LocalWork("fedavg", learning_rate=rate, epochs=epochs, batch_size=batch, momentum=momentum)
    rows = torch.from_numpy(rng.permutation(len(data.x_train))[:size].copy())
    x, y = data.x_train[rows], data.y_train[rows]
    bounds = (data.x_test.amin(0), data.x_test.amax(0))
    knowledge = Knowledge("table", tuple(x.shape[1:]), data.classes, value_range=bounds, encoding=data.encoding)
    kind = "gradient" if work.kind == "fedsgd" else "update"
    seen = shadow_client(Observation(model, {}, kind, work, examples=size), knowledge, x, y, seed)
    if rng.random() < 0.5:
        seen = noisy(seen, float(10 ** rng.uniform(-4, -1)), seed)
    return seen, knowledge, x, y


def noisy(seen: Observation, relative: float, seed: int) -> Observation:
    """With noise of this share of the update's length, of which the server is not told."""
    length = torch.cat([each.flatten() for each in seen.update.values()]).square().mean().sqrt()
    rng = torch.Generator().manual_seed(seed)
    update = {n: each + relative * length * torch.randn(each.shape, generator=rng) for n, each in seen.update.items()}
    return Observation(seen.model, update, seen.kind, seen.work, examples=seen.examples)


def attacked(name: str, data: Dataset, rng: np.random.Generator) -> Record:
    """One random batch, and its shadow."""
    seen, knowledge, x, y = random_update(data, rng)
    starts, iterations = int(rng.choice([10, 16, 30])), int(rng.choice([60, 120, 300]))
    walkers, sweeps = int(rng.choice([64, 256])), int(rng.choice([0, 48, 240]))
    settings = TabularAttack(name="tabular", starts=starts, iterations=iterations, walkers=walkers, sweeps=sweeps)
    assert isinstance(data.encoding, TableEncoding)

    def attack(observation: Observation) -> Batch:
        return find_batch(observation, knowledge, settings, 0, None)

    batch = attack(seen)
    cells = torch.ones(batch.evidence.shape[:2])
    found = Reconstruction("tabular", batch.inputs, batch.labels, batch.loss, torch.zeros(len(cells)), cells=cells)
    right = torch.tensor([hit for _, hit in score(found, x, y, knowledge).cells]).view_as(cells)
    proved = batch.evidence[..., 0] == PROVED
    shadow, said = Shadow(0.0, 0, 1), torch.zeros_like(proved)
    if not proved.all():
        try:
            shadow = shadow_of(batch, attack, seen, knowledge, data.encoding, 1)
            said = explained(batch, shadow) & ~proved
        except AttackError:
            pass
    counts = [(int(right[chosen].sum()), int(chosen.sum())) for chosen in (proved, ~proved & ~said)]
    source, several = SOURCE.get(name, name), seen.kind == "update"
    return Record(source, several, terms(batch, shadow)[said], right[said].double(), counts[0], counts[1])


# --- fit and check --------------------------------------------------------------------------------------------------


def fitted(records: list[Record]) -> Tensor:
    """The curve; a batch weighs as the square root of its cells, which are right and wrong together."""
    records = [each for each in records if len(each.right)]
    weight = torch.cat([torch.full((len(r.right),), 5 / math.sqrt(len(r.right))).double() for r in records])
    x, right = torch.cat([each.terms for each in records]), torch.cat([each.right for each in records])
    return logistic(x, right, weight, strength=3.0)


def left_out(records: list[Record]) -> list[Tensor]:
    """The log-odds of each record by the curve of all other tables."""
    curves = {s: fitted([r for r in records if r.source != s]) for s in {r.source for r in records}}
    return [each.terms @ curves[each.source] for each in records]


def show(records: list[Record], logits: list[Tensor], margin: float) -> None:
    """Print said, right, number of cells and interval: of all, and wherever too much is said of a table."""
    print("| cells | said | right | cells | 95% interval |\n|---|---|---|---|---|")
    for title, several in (("FedSGD", False), ("FedAvg", True)):
        _lines(title, [(r, x) for r, x in zip(records, logits, strict=True) if r.several == several], margin)
        for source in sorted({r.source for r in records}):
            chosen = [
                (r, x) for r, x in zip(records, logits, strict=True) if (r.source, r.several) == (source, several)
            ]
            _lines(f"{title}, {source}: TOO HIGH", chosen, margin, only_wrong=True)
    for what in ("proved", "withheld"):
        counts = [getattr(each, what) for each in records]
        right, cells = (sum(each) for each in zip(*counts, strict=True))
        print(f"{what}: {right} of {cells} right, in {sum(count > 0 for _, count in counts)} batches")


def _lines(title: str, chosen: list[tuple[Record, Tensor]], margin: float, *, only_wrong: bool = False) -> None:
    if not chosen:
        return
    said = torch.cat([torch.sigmoid(x - margin).clamp_max(SURE) for _, x in chosen])
    for each in reliability(said, torch.cat([r.right for r, _ in chosen]), BINS):
        if each.said >= BINS[0] and (each.said > each.high or not only_wrong):
            numbers = f"{each.said:.3f} | {each.right:.3f} | {each.cells} | {each.low:.3f} to {each.high:.3f}"
            print(f"| {title} | {numbers} |")


def _records(data: dict[str, Dataset], batches: int, seed: int) -> Iterator[Record]:
    rng, names = np.random.default_rng(seed), list(data)
    for number in range(batches):
        name = names[number % len(names)]
        yield attacked(name, data[name], rng)


def main() -> None:
    """Attack random batches, and print what they teach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.held_out:
        records = list(_records({name: made(name) for name in HELD_OUT}, options.batches, options.seed))
        curve = torch.tensor(list(CURVE.values()), dtype=torch.float64)
        print(f"the curve in use, margin {MARGIN}, on {options.batches} batches of {', '.join(HELD_OUT)}")
        show(records, [each.terms @ curve for each in records], MARGIN)
        return
    records = list(_records(tables(options.data), options.batches, options.seed))
    for name, value in zip(CURVE, fitted(records).tolist(), strict=True):
        print(f"{name}: {value:.3f} (in use: {CURVE[name]:.3f})")
    logits = left_out(records)
    shifts = torch.tensor([mode_shift(x, r.right) for x, r in zip(logits, records, strict=True) if len(x)])
    print(f"a tenth of {len(shifts)} batches lack {-float(shifts.quantile(0.1)):.2f} (margin in use: {MARGIN})")
    show(records, logits, MARGIN)


if __name__ == "__main__":
    main()
