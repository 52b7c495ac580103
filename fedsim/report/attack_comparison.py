# SPDX-License-Identifier: Apache-2.0
"""The attacks of a run beside each other: one line for each method, over all clients that it was played on.

For images this is the table of Dimitrov et al. 2022 ("Data Leakage in Federated Averaging", table 1): the share of
images above 19 dB, the mean PSNR, the labels that were counted right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from fedsim.audit.reconstruction import ReconstructionScore
from fedsim.errors import counted
from fedsim.report.attack_files import AttackFiles
from fedsim.report.blocks import Block, Cell, Paragraph, Section, Table
from fedsim.report.run_files import RunFiles

ABOVE = 19.0
"""dB: the threshold of the paper for CIFAR-100."""
_HEADLINES = {
    "image": ("psnr", "mean PSNR, dB"),
    "table": ("cells_right", "cells right"),
    "text": ("tokens_right", "tokens right"),
}


@dataclass(frozen=True)
class Mean:
    """A mean over clients, and its 95% interval: Student's, as each client is one independent draw."""

    value: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.value:.3g}" + (f" ± {self.half_width:.2g}" if math.isfinite(self.half_width) else "")


def mean_over_clients(values: Sequence[float]) -> Mean:
    """The mean and half the width of its 95% interval, infinite for one client."""
    if len(values) < 2:
        return Mean(float(np.mean(values)), math.inf)
    quantile = float(stdtrit(len(values) - 1, 0.975))
    return Mean(float(np.mean(values)), quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values)))


def attacks_compared(run: RunFiles) -> tuple[Section, ...]:
    """A section where several attacks were played on updates whose truth is known."""
    scored = [files for files in run.attacks if files.scores and any(score.found for score in files.scores)]
    if len(scored) < 2:
        return ()
    kind = scored[0].document.kind
    noun = {"image": "pictures", "table": "rows", "text": "texts"}[kind]
    good = f"above {ABOVE:g} dB" if kind == "image" else "right"
    columns = ("attack", "clients", noun, "recognisable", good, _HEADLINES[kind][1], "labels right")
    rows = tuple(_row(files) for files in scored)
    blocks: tuple[Block, ...] = (
        Paragraph(_answer(run, scored)),
        Table("By method", columns, rows, _note(kind)),
    )
    return (Section("attacks-compared", "The attacks beside each other", blocks),)


def _note(kind: str) -> str:
    above = f" {ABOVE:g} dB is the threshold of Dimitrov et al. 2022." if kind == "image" else ""
    return f"Means over clients with 95% intervals (Student's t; one client has none).{above}"


def _row(files: AttackFiles) -> tuple[Cell, ...]:
    scores, (metric, _) = files.scores, _HEADLINES[files.document.kind]
    labels = [score.label_accuracy for score in scores if score.label_accuracy is not None]
    return (
        files.title,
        len(scores),
        sum(score.originals for score in scores),
        str(_recognised(files)),
        str(mean_over_clients([success(score) for score in scores])),
        str(mean_over_clients([score.metrics[metric] for score in scores])),
        str(mean_over_clients(labels)) if labels else None,
    )


def success(score: ReconstructionScore) -> float:
    """The share of the originals that were reconstructed: above 19 dB, or right."""
    if score.kind != "image":
        return score.right.share
    good = {item.original for item in score.items if item.original >= 0 and item.metrics.get("psnr", 0.0) > ABOVE}
    return len(good) / max(score.originals, 1)


def _answer(run: RunFiles, scored: Sequence[AttackFiles]) -> str:
    """What averaging left to find, by the attack that found most."""
    best = max(scored, key=lambda files: _recognised(files).value)
    share, noun = _recognised(best).value, {"image": "pictures", "table": "rows", "text": "texts"}[best.document.kind]
    found = f"Most was found by {best.title}: {100 * share:.0f}% of the {noun} are recognisable."
    if run.scenario.strategy.name != "fedavg":
        return found
    epochs = counted(run.scenario.client.epochs, "local epoch")
    if share < 0.05:
        return f"{found} After {epochs} of averaging these attacks find little; what others would find is not known."
    return f"{found} Averaging over {epochs} did not protect them."


def _recognised(files: AttackFiles) -> Mean:
    """The share of the originals that are at least recognisable, over clients."""
    return mean_over_clients([score.at_least("recognisable").share for score in files.scores])
