# SPDX-License-Identifier: Apache-2.0
"""How much text one gradient contains: python benchmarks/text_inversion.py [--batches 20] [--path speakers.json.gz]

Batches of 4 sequences of 32 tokens, a transformer of 2 blocks and width 256, gradients in float32, one thread. The text
is that of scikit-learn's descriptions unless a file is given. A sequence counts as right if all its 32 tokens and the
token after them are right, and a token if it is right at its place.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedsim.attacks.observation import Knowledge, Observation, Reconstruction
from fedsim.attacks.text import text
from fedsim.data import load_dataset
from fedsim.data.dataset import Dataset
from fedsim.models import build_model
from fedsim.randomness import stream
from fedsim.scenario import TextAttack, TextData, TransformerModel
from fedsim.scenario.data import DescriptionsData
from fedsim.training import LocalWork

SEQUENCES, LENGTH, WIDTH = 4, 32, 256
Unit = Literal["characters", "words"]


@dataclass
class Tally:
    batches: int = 0
    token_sets: int = 0
    tokens: int = 0
    sequences: int = 0
    certified: int = 0
    wrongly_certified: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        all_sequences = self.batches * SEQUENCES
        return (
            f"{self.token_sets:4d}/{self.batches:<4d} {self.tokens / all_sequences / LENGTH:9.2%}"
            f" {self.sequences:8d}/{all_sequences:<5d} {self.certified:6d} {self.wrongly_certified:6d}"
            f" {self.seconds / self.batches:9.2f}"
        )


def trained(data: Dataset, layers: int, steps: int) -> torch.nn.Module:
    model = build_model(
        TransformerModel(name="transformer", dim=WIDTH, layers=layers), (LENGTH,), data.classes, 0, kind="text"
    )
    optimiser, rng = torch.optim.Adam(model.parameters(), lr=1e-3), stream(0, "benchmark-training")
    for _ in range(steps):
        rows = torch.from_numpy(rng.integers(len(data.x_train), size=16))
        optimiser.zero_grad()
        F.cross_entropy(model(data.x_train[rows]).flatten(0, 1), data.y_train[rows].flatten()).backward()
        optimiser.step()
    return model


def observed(model: torch.nn.Module, x: Tensor, y: Tensor, noise: float, seed: int) -> Observation:
    """The gradient as a client sends it, plus Gaussian noise of a norm of `noise` times its own."""
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradient = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    if noise:
        flat = torch.cat([part.flatten() for part in gradient.values()])
        scale, generator = noise * float(flat.norm()) / len(flat) ** 0.5, torch.Generator().manual_seed(seed)
        gradient = {
            name: part + scale * torch.randn(part.shape, generator=generator) for name, part in gradient.items()
        }
    return Observation(model, gradient, "gradient", LocalWork("fedsgd", batch_size=len(x)), examples=len(x))


def count(tally: Tally, found: Reconstruction, x: Tensor, y: Tensor) -> None:
    tally.batches += 1
    tally.token_sets += set(found.inputs.flatten().tolist()) == set(x.flatten().tolist())
    if not len(found.inputs) or found.labels is None:
        return
    same = (found.inputs[:, None] == x[None]).sum(-1)
    items, rows = linear_sum_assignment(-same.numpy())
    tally.tokens += int(same[items, rows].sum())
    right = (same[items, rows] == LENGTH) & (found.labels[items] == y[rows]).all(1)
    tally.sequences += int(right.sum())
    if found.certified is not None:
        tally.certified += int(found.certified.sum())
        tally.wrongly_certified += int(found.certified.sum()) - int((found.certified[items] & right).sum())


def measure(unit: Unit, path: str | None, layers: int, steps: int, noise: float, batches: int) -> Tally:
    spec = (
        TextData(source="text", path=path, tokens=unit, length=LENGTH)
        if path
        else DescriptionsData(source="descriptions", tokens=unit, length=LENGTH)
    )
    data = load_dataset(spec, 0)
    model, tally = trained(data, layers, steps), Tally()
    knowledge = Knowledge("text", (LENGTH,), data.classes, encoding=data.encoding)
    for number in range(batches):
        rows = torch.from_numpy(stream(0, "benchmark-batch", number).permutation(len(data.x_train))[:SEQUENCES])
        x, y = data.x_train[rows], data.y_train[rows]
        observation = observed(model, x, y, noise, number)
        begun = time.process_time()
        found = text(observation, knowledge, TextAttack(name="text"))
        tally.seconds += time.process_time() - begun
        count(tally, found, x, y)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--path", help="a text or a .json[.gz] of speakers in place of the embedded text")
    parser.add_argument("--steps", type=int, default=100, help="Adam steps of the trained model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'tokens':10s} {'blocks':>6s} {'steps':>5s} {'noise':>6s}   sets of tokens   in place  sequences"
          "   certif.  wrong   CPU s")  # fmt: skip
    units: tuple[Unit, Unit] = ("characters", "words")
    cases = [(2, 0, 0.0), (2, options.steps, 0.0), (1, 0, 0.0), (2, 0, 1e-3), (2, 0, 1e-2)]
    for unit in units:
        for layers, steps, noise in cases:
            batches = options.batches if layers == 2 and not noise else max(1, options.batches // 4)
            tally = measure(unit, options.path, layers, steps, noise, batches)
            print(f"{unit:10s} {layers:6d} {steps:5d} {noise:6.0e}  {tally.line()}", flush=True)


if __name__ == "__main__":
    main()
