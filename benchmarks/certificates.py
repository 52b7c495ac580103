# SPDX-License-Identifier: Apache-2.0
"""Hunts for certificates of `exact` that are wrong: no example of the client within the radius that they state.

    python benchmarks/certificates.py [--data digits,mnist] [--batches 4] [--seed 0] [--only WORD] [--each] [--signs]

Every line is a family of batches that invites a mistake (`hard_batches.py`). By signs: what the zeros of the layer's
gradient alone would certify, wrong if no example is within half a grey level in every value.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from hard_batches import FAMILIES, RATE, Family, examples, network, observed
from torch import Tensor, nn

from fedsim.attacks.exact import exact, invert_layer
from fedsim.attacks.observation import Knowledge
from fedsim.errors import AttackError
from fedsim.randomness import stream
from fedsim.scenario.attack import ExactAttack

SETTINGS = ExactAttack(name="exact", seconds=60)
HALF_LEVEL = 1 / 510


@dataclass
class Tally:
    """What came out of a family."""

    batches: int = 0
    items: int = 0
    certified: int = 0
    wrong: int = 0
    radii: list[float] = field(default_factory=list)
    ratio: float = 0.0
    signs: int = 0
    signs_wrong: int = 0
    seconds: float = 0.0

    def line(self, name: str) -> str:
        """Of the table."""
        radii = np.array(self.radii or [math.nan])
        return (
            f"{name:<44} {self.batches:>5} {self.items:>6} {self.signs:>6} {self.signs_wrong:>6} {self.certified:>7}"
            f" {self.wrong:>5} {np.median(radii):>8.1g} {radii.max():>8.1g} {self.ratio:>6.2f} {self.seconds:>6.0f}"
        )


HEADING = (
    f"{'':<44} {'batch':>5} {'items':>6} {'signs':>6} {'wrong':>6} {'certif.':>7} {'wrong':>5}"
    f" {'r, grey':>8} {'most':>8} {'error/r':>6} {'CPU s':>6}"
)


def hunt(family: Family, data: str, batches: int, seed: int, signs: bool = False) -> Iterator[tuple[str, Tally]]:
    """The tally of every batch."""
    for kind in family.networks:
        for size in family.sizes:
            for number in range(batches):
                rng = stream(seed, f"certificates {family.name} {data} {kind} {size}", number)
                model = network(data, kind, family.scale)
                rows = examples(data)
                x, y = family.batch((rows[0], rows[1] % kind.classes if kind.classes else rows[1]), rng, size)
                yield f"{family.name}, {data}, {kind}, {size}, {number}", one(model, x, y, family, rng, signs)


def one(
    model: nn.Sequential, x: Tensor, y: Tensor, family: Family, rng: np.random.Generator, signs: bool = False
) -> Tally:
    """Invert one batch; errors are in units of the value range."""
    truth = (x * family.scale).double()
    seen = observed(model, x * family.scale, y, family.sent, rng)
    top = torch.tensor(family.scale)
    knowledge = Knowledge("image", (x.shape[1],), model[-1].out_features, value_range=(torch.zeros(()), top))
    begin = time.process_time()
    try:
        result = exact(seen, knowledge, SETTINGS)
    except AttackError:  # a saturated network: the gradient is zero
        return Tally(1, len(x.unique(dim=0)))
    seconds = time.process_time() - begin
    front = model[1]
    gradient = seen.gradient
    drift = RATE if seen.kind == "update" else 0.0
    by_signs = truth[:0]
    if signs:
        layer = front.weight.detach(), front.bias.detach(), gradient["1.weight"], gradient["1.bias"]
        batch = invert_layer(*layer, seconds=SETTINGS.seconds, drift=drift)
        by_signs = _apart(batch.inputs[batch.certified], truth) / family.scale
    apart = _apart(result.inputs.double(), truth) / family.scale
    sure = result.certified
    radii = (
        result.radius if result.radius is not None else torch.full((len(apart),), HALF_LEVEL)
    ).double() / family.scale
    return Tally(
        1,
        len(x.unique(dim=0)),
        int(sure.sum()),
        int((apart > radii)[sure].sum()),
        (255 * radii[sure]).tolist(),
        max((apart / radii)[sure].tolist(), default=0.0),
        len(by_signs),
        int((by_signs > HALF_LEVEL).sum()),
        seconds,
    )


def _apart(items: Tensor, truth: Tensor) -> Tensor:
    """(n,) largest difference in any value to the nearest example."""
    if not len(items):
        return items.new_zeros(0)
    return (items.flatten(1)[:, None] - truth[None]).abs().amax(2).amin(1)


def added(first: Tally, second: Tally) -> Tally:
    both = {name: getattr(first, name) + getattr(second, name) for name in vars(first)}
    return Tally(**{**both, "ratio": max(first.ratio, second.ratio)})


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits,mnist-5000")
    parser.add_argument("--batches", type=int, default=2, help="of each network and size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="families whose name contains this")
    parser.add_argument("--signs", action="store_true", help="also what the signs alone would certify")
    parser.add_argument("--each", action="store_true", help="also name every batch with a wrong certificate")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(HEADING)
    everything = Tally()
    for data in arguments.data.split(","):
        for family in FAMILIES:
            if arguments.only not in family.name:
                continue
            tally = Tally()
            for name, found in hunt(family, data, arguments.batches, arguments.seed, arguments.signs):
                tally = added(tally, found)
                if arguments.each and found.wrong:
                    print(f"  wrong: {name}: {found}")
            print(tally.line(f"{data}, {family.name}"), flush=True)
            everything = added(everything, tally)
    print(everything.line("all"))


if __name__ == "__main__":
    main()
