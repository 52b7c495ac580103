# SPDX-License-Identifier: Apache-2.0
"""Rows of a table from one gradient: cells right, rows right, rows proved, CPU seconds; beside TabLeak.

    python benchmarks/table_inversion.py [--csv ../shared/data/adult.csv.gz] [--batches 5] [--sizes 8 16 32 64]

Network [100, 100, 2] untrained and trained, gradients in float32, labels inferred, one thread. A number is right within
0.319 standard deviations, TabLeak's tolerance; rows "to the digit" are equal in every digit of every cell. The baseline
guesses the most frequent category and the median of every column. TabLeak's figures (Vero et al. 2023, the authors'
code, 30 members of 1,500 iterations, 15 at batch 64) were measured on Adult, one batch each, labels given, one thread.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.attacks.cell_confidence import reliability
from fedsim.attacks.ensemble import project, wrong_cells
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.attacks.tabular import tabular
from fedsim.data import Dataset, load_dataset
from fedsim.data.table import TableEncoding
from fedsim.models import build_model
from fedsim.scenario import CsvData, EmbeddedData, MlpModel, TabularAttack
from fedsim.training import LocalWork

TABLEAK = {8: "100.0% in 261 s", 16: "89.3% in 244 s", 32: "79.7% in 288 s", 64: "74.4% in 131 s"}


def network(data: Dataset, hidden: tuple[int, ...], steps: int, seed: int, activation: str = "relu") -> nn.Module:
    """An MLP after `steps` steps of SGD with batches of 64."""
    spec = MlpModel.model_validate({"name": "mlp", "hidden": hidden, "activation": activation})
    model = build_model(spec, tuple(data.x_train.shape[1:]), data.classes, seed)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        rows = torch.randint(len(data.x_train), (64,), generator=generator)
        optimiser.zero_grad()
        cross_entropy(model(data.x_train[rows]), data.y_train[rows]).backward()
        optimiser.step()
    return model


def observed(model: nn.Module, x: Tensor, y: Tensor) -> Observation:
    """What a FedSGD client with exactly these rows sends."""
    found = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    update = dict(zip([name for name, _ in model.named_parameters()], found, strict=True))
    work = LocalWork(kind="fedsgd", batch_size=len(x))
    return Observation(model=model, update=update, kind="gradient", work=work, examples=len(x))


def granted(data: Dataset) -> Knowledge:
    """The encoding and the range of each column."""
    bounds = (data.x_train.amin(0), data.x_train.amax(0))
    shape = tuple(data.x_train.shape[1:])
    return Knowledge("table", shape, data.classes, value_range=bounds, encoding=data.encoding)


def matched(found: Tensor, truth: Tensor, encoding: TableEncoding) -> tuple[Tensor, Tensor]:
    """(n, columns) which cells are right, and the truth in the order of the rows found."""
    wrong = wrong_cells(found[:, None], truth[None], encoding)
    rows, order = (torch.from_numpy(each) for each in linear_sum_assignment(wrong.double().sum(2).numpy()))
    return ~wrong[rows, order], truth[order]


def guess(data: Dataset, encoding: TableEncoding) -> Tensor:
    """(1, F): the most frequent category and the median of every column, without any gradient."""
    centre = data.x_train.mean(0, keepdim=True)
    median = data.x_train.median(0, keepdim=True).values
    valid = project(centre, encoding)
    numeric = torch.cat([torch.full((column.width,), column.width == 1) for column in encoding.columns])
    return torch.where(numeric, median, valid)


def measure(
    data: Dataset, size: int, batches: int, settings: TabularAttack, hidden: tuple[int, ...], steps: int
) -> str:
    """One line of the table."""
    encoding = data.encoding
    assert isinstance(encoding, TableEncoding)
    cells, exact, proved, false, seconds, prior, said = [], 0, 0, 0, 0.0, [], []
    for seed in range(batches):
        model = network(data, hidden, steps, seed)
        rows = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(1000 * size + seed))[:size]
        x, observation = data.x_train[rows], observed(model, data.x_train[rows], data.y_train[rows])
        start = time.process_time()
        result = tabular(observation, granted(data), settings, seed=seed)
        seconds += time.process_time() - start
        right, truth = matched(result.inputs, x, encoding)
        cells.append(right)
        exact += int((encoding.decode(result.inputs) == encoding.decode(truth)).all(axis=1).sum())
        assert result.certified is not None
        assert result.cells is not None
        proved += int(result.certified.sum())
        false += int((result.certified & ~right.all(1)).sum())
        said.append(result.cells)
        prior.append(matched(guess(data, encoding).expand(size, -1), x, encoding)[0].double().mean())
    share, whole = torch.cat(cells).double().mean(), torch.cat(cells).all(1).double().mean()
    curve = reliability(torch.cat(said), torch.cat(cells))
    if share < 1:
        print("    said: right [95% interval] (cells)")
        for b in curve:
            print(f"    {b.said:.3f}: {b.right:.3f} [{b.low:.3f}, {b.high:.3f}] ({b.cells})")
    total = batches * size
    return (
        f"| {data.name} | {list(hidden)} | {steps} | {size} x {batches} | {share:.2%} | {whole:.1%} |"
        f" {exact / total:.1%} |"
        f" {proved}/{total}, {false} wrong | {seconds / batches:.1f} | {float(torch.stack(prior).mean()):.1%} |"
        f" {TABLEAK.get(size, '') if data.name.startswith('adult') else ''} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", default="../shared/data/adult.csv.gz")
    parser.add_argument("--target", default="income")
    parser.add_argument("--drop", nargs="*", default=["split"])
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--steps", type=int, nargs="*", default=[0, 1000])
    parser.add_argument("--hidden", type=int, nargs="*", default=[100, 100])
    parser.add_argument("--ensemble", action="store_true", help="the ensemble alone, without the search for rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = TabularAttack(name="tabular", sweeps=0 if options.ensemble else 240)
    tables = [load_dataset(EmbeddedData(source="breast_cancer"), 0)]
    if Path(options.csv).is_file():
        csv = CsvData(source="csv", path=options.csv, target=options.target, drop=tuple(options.drop))
        tables.append(load_dataset(csv, 0))
    print(
        "| table | hidden | trained | batch | cells right | rows right | to the digit | proved | CPU s | baseline |"
        " TabLeak |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for data in reversed(tables):
        for steps in options.steps:
            for size in options.sizes:
                print(measure(data, size, options.batches, settings, tuple(options.hidden), steps), flush=True)


if __name__ == "__main__":
    main()
