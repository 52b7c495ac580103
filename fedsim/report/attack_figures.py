# SPDX-License-Identifier: Apache-2.0
"""Two figures of an attack: whether its confidence can be trusted, and what the privacy claim would have allowed."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from fedsim.audit.scores.comparison import Comparison
from fedsim.audit.scores.shares import Share
from fedsim.report import words
from fedsim.report.blocks import Cell, Drawing, Table
from fedsim.report.figures import BLUE, MUTED, ORANGE, legend_below, make_drawing

BINS = 10
BOUND_COLUMNS = (
    "success",
    "blind guess, at most",
    "allowed",
    "measured",
    "95% low",
    "95% high",
    "trials",
    "advantage allowed",
    "advantage measured",
    "verdict",
)
Sure = Sequence[tuple[float, bool]]  # (confidence, right)
Bin = tuple[float, Share]  # mean confidence, how many were right


def binned(pairs: Sure) -> list[Bin]:
    """Ten bins of confidence of equal width, those that hold anything: mean confidence and the share that is right."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for confidence, right in pairs:
        bins[min(BINS - 1, max(0, int(BINS * confidence)))].append((confidence, right))
    return [
        (float(np.mean([sure for sure, _ in held])), Share(sum(right for _, right in held), len(held)))
        for held in bins
        if held
    ]


def reliability(name: str, series: Mapping[str, Sure]) -> Drawing | None:
    """Confidence against the share that is right, with counts; `series`: by what is counted ("cells", "pictures")."""
    lines = {what: binned(pairs) for what, pairs in series.items() if pairs}
    if not lines:
        return None
    rows = tuple(
        (f"{what}, confidence {sure:.2f}", sure, share.share, *share.interval, share.of)
        for what, bins in lines.items()
        for sure, share in bins
    )

    def draw(figure: Figure, narrow: bool) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        top.plot([0, 1], [0, 1], color=MUTED, linestyle=":", linewidth=1.4, label="as sure as right")
        width = 0.08 / len(lines)
        for number, (what, bins) in enumerate(lines.items()):
            colour, marker = ((BLUE, "o"), (ORANGE, "s"))[number % 2]
            x, y = [sure for sure, _ in bins], [share.share for _, share in bins]
            low, high = np.array([share.interval for _, share in bins]).T
            errors = np.maximum([np.array(y) - low, high - np.array(y)], 0)
            top.errorbar(
                x, y, yerr=errors, color=colour, marker=marker, linestyle="", capsize=3, elinewidth=1.2, label=what
            )
            places = np.array(x) + width * (number - (len(lines) - 1) / 2)
            bottom.bar(places, [share.of for _, share in bins], width=width, color=colour)
        top.set_ylabel("share that is right")
        top.set_ylim(-0.04, 1.04)
        bottom.set_xlim(-0.04, 1.04)
        bottom.set_ylabel("count")
        bottom.set_xlabel("confidence of the attacker")
        legend_below(figure, top, columns=1 if narrow else 3)

    said = "; ".join(
        f"{what}: {sum(share.right for _, share in bins)} of {sum(share.of for _, share in bins)} right"
        for what, bins in lines.items()
    )
    meaning = (
        "A confidence is a lower bound: points on or above the dotted line keep it. Points below it by more than their"
        " interval are cells or items of which the attacker was too sure."
    )
    return make_drawing(
        f"{name}-reliability",
        "Can the attacker trust its own confidence?",
        f"{meaning} Whiskers are 95% intervals; the bars below say how many there are.",
        f"Reliability chart of the attacker's confidence. {said}.",
        Table("Reliability", ("bin", "mean confidence", "share right", "95% low", "95% high", "count"), rows),
        draw,
        height=380,
        narrow_height=400,
    )


def _data_row(c: Comparison) -> tuple[Cell, ...]:
    measured = (c.measured.share, *c.measured.interval, c.measured.of)
    return (f"{c.success}; {c.claim}", c.kappa, c.allowed, *measured, c.advantage_allowed, c.advantage, c.verdict)


def allowed_and_measured(name: str, comparisons: Sequence[Comparison]) -> Drawing | None:
    """For each claim and notion of success: what blind guessing reaches, what the claim allows, what was measured."""
    if not comparisons:
        return None
    rows = tuple(_data_row(c) for c in comparisons)
    y = np.arange(len(comparisons))

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        share = np.array([c.measured.share for c in comparisons])
        low, high = np.array([c.measured.interval for c in comparisons]).T
        errors = np.maximum([share - low, high - share], 0)
        axes.barh(
            y, [c.allowed for c in comparisons], height=0.5, color=MUTED, alpha=0.25, label="allowed by the claim"
        )
        axes.plot(
            [c.kappa for c in comparisons], y, linestyle="", marker="D", color=MUTED, label="blind guess, at most"
        )
        axes.errorbar(
            share, y, xerr=errors, color=BLUE, marker="o", linestyle="", capsize=4, label="measured, with its interval"
        )
        axes.set_yticks(y, ["\n".join(textwrap.wrap(c.success, 18 if narrow else 34)) for c in comparisons])
        axes.set_ylim(len(y) - 0.4, -0.6)
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("probability of success")
        axes.grid(axis="y", visible=False)
        legend_below(figure, axes, columns=1 if narrow else 3)

    claims = "; ".join(dict.fromkeys(c.claim for c in comparisons))
    claims = f"The claims, from top to bottom: {claims}" if len({c.claim for c in comparisons}) > 1 else claims
    return make_drawing(
        f"{name}-bound",
        "What the claim allows, and what happened",
        f"{claims}. Each bar is the largest success that the claim allows to any attack whatever (reconstruction"
        " robustness), given what blind guessing with as many guesses reaches; a dot beyond its bar, with all of its"
        " whisker, speaks against the claim.",
        "Chart of allowed and measured success: "
        + "; ".join(f"{c.success}, allowed {words.number(c.allowed)}, measured {c.measured}" for c in comparisons)
        + ".",
        Table(
            "Allowed and measured",
            BOUND_COLUMNS,
            rows,
        ),
        draw,
        height=150 + 44 * len(y),
        narrow_height=230 + 76 * len(y),
    )
