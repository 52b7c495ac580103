# SPDX-License-Identifier: Apache-2.0
"""Whether the confidence of reconstructed images holds: said, right, number of images, 95% interval.

    python benchmarks/image_calibration.py [--batches 5] [--shadows 20] [--iterations 150] [--seed 1] [--surrogate]

Gradient matching on scikit-learn's digits (8x8), each batch behind a network of its own, labels inferred; the public
images are held-out rows that no client has. With --surrogate they are of another kind: clients hold MNIST, the server
Fashion-MNIST, both averaged to 8x8 (../shared/data), and the promise does not cover that. Nothing is fitted: a
confidence comes from the shadow batches of its own network alone. Intervals of a line take a batch as one trial; beside
them is what the score of before said, which had no such meaning.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Tensor
from torch.nn.functional import avg_pool2d

from fedsim.attacks.gradient_matching import gradient_matching
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.attacks.shadow_client import shadow_client
from fedsim.attacks.shadow_images import judged, right_images
from fedsim.data import load_dataset
from fedsim.models import build_model
from fedsim.scenario import CnnModel, EmbeddedData, GradientMatchingAttack, MlpModel
from fedsim.training import LocalWork

NETWORKS = {
    "LeNet (sigmoid)": CnnModel(name="cnn", variant="lenet"),
    "CNN (ReLU, max-pooling)": CnnModel(name="cnn", variant="small"),
    "MLP (sigmoid, 32)": MlpModel(name="mlp", hidden=(32,), activation="sigmoid"),
}
SIZES = (1, 4, 8)
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Judgement:
    """One attacked batch."""

    said: float
    """The confidence of each of its images; NaN where none is given."""
    score: float
    right: int
    images: int


def digits() -> tuple[Labelled, Labelled]:
    """What clients hold, and what the server holds."""
    data = load_dataset(EmbeddedData(source="digits"), 0)
    return (data.x_train, data.y_train), (data.x_test, data.y_test)


def surrogate() -> tuple[Labelled, Labelled]:
    """Clients with MNIST, a server with Fashion-MNIST."""
    return _small("mnist"), _small("fashion_mnist")


def _small(name: str) -> Labelled:
    with np.load(SHARED / f"{name}.npz") as file:
        x, y = torch.from_numpy(file["x_test"]).float()[:, None] / 255, torch.from_numpy(file["y_test"]).long()
    return avg_pool2d(x[:, :, 2:26, 2:26], 3), y


def judge(
    network: str, size: int, clients: Labelled, public: Labelled, shadows: int, iterations: int, seed: int
) -> Judgement:
    """Attack one batch behind one network, and compare with the truth."""
    (x, y), shape = clients, tuple(clients[0].shape[1:])
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:size]
    bounds = (torch.tensor(0.0), torch.tensor(1.0))
    knowledge = Knowledge("image", shape, 10, value_range=bounds, public=public)
    empty = Observation(
        build_model(NETWORKS[network], shape, 10, seed), {}, "gradient", LocalWork("fedsgd", batch_size=size)
    )
    seen = shadow_client(empty, knowledge, x[rows], y[rows], seed)
    settings = GradientMatchingAttack(name="gradient-matching", iterations=iterations)
    found = gradient_matching(seen, knowledge, settings, seed=seed)
    result = judged(gradient_matching, found, seen, knowledge, settings, shadows=shadows, seed=seed)
    said = math.nan if result.confidence is None else float(result.confidence[0])
    right = int(right_images(result.inputs, x[rows], knowledge).sum())
    return Judgement(said, float(result.score.mean()), right, size)


def line(found: list[Judgement]) -> str:
    """Said, right, and the interval of what is right with a batch as one trial."""
    given = [each for each in found if not math.isnan(each.said)]
    if not given:
        return f"| no number | | 0 of {len(found)} | |"
    images, right = sum(each.images for each in given), sum(each.right for each in given)
    said, score = (sum(getattr(e, name) * e.images for e in given) / images for name in ("said", "score"))
    share = right / images
    # the rounding is to the side of a shorter promise: fewer hits make the upper end lower
    ends = binomtest(math.floor(share * len(given)), len(given)).proportion_ci()
    verdict = "" if said <= ends.high else " TOO HIGH"
    return (
        f"| {score:.2f} | {said:.2f} | {share:.2f} ({right} of {images}; {len(given)} of {len(found)} batches)"
        f" | {ends.low:.2f} to {ends.high:.2f}{verdict} |"
    )


def main() -> None:
    """Print a line for each network and size of batch, and one for each range of confidence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--shadows", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--surrogate", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clients, public = surrogate() if options.surrogate else digits()
    everything: list[Judgement] = []
    print("| network, batch | score | said | right | 95% interval |\n|---|---|---|---|---|")
    for network in NETWORKS:
        for size in SIZES:
            seeds = range(1000 * options.seed, 1000 * options.seed + options.batches)
            found = [judge(network, size, clients, public, options.shadows, options.iterations, seed) for seed in seeds]
            everything += found
            print(f"| {network}, {size} {line(found)}", flush=True)
    for low, high in ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)):
        inside = [each for each in everything if low <= each.said < high]
        if inside:
            print(f"| said {low} to {high} {line(inside)}")


if __name__ == "__main__":
    main()
