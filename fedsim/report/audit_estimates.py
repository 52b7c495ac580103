# SPDX-License-Identifier: Apache-2.0
"""What was proved about ε: lower bounds by estimator beside the claim, tier A apart from tier B."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsim.audit.estimate import Estimate
from fedsim.audit.verdict import Claim
from fedsim.privacy.rounding import rounded_down
from fedsim.report.blocks import Cell, Drawing, Table
from fedsim.report.figures import BLUE, INK, ORANGE, make_drawing


def four_digits_down(value: float) -> float:
    """Rounded down to the four digits that a table shows; infinity stays."""
    if value <= 0 or math.isinf(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.floor(value / unit + 1e-9) * unit


def estimates_figure(name: str, claim: Claim, estimates: Sequence[Estimate]) -> Drawing | None:
    """Lower bounds on ε by estimator, tier A apart from tier B, beside the claim."""
    tiers = [(tier, [one for one in estimates if one.tier == tier]) for tier in ("A", "B")]
    tiers = [(tier, found) for tier, found in tiers if found]
    if not tiers:
        return None
    right = 1.15 * max(claim.epsilon, 0.1, *(one.lower for one in estimates if math.isfinite(one.lower)))

    def draw(figure: Figure, narrow: bool) -> None:
        ratios = [len(found) for _, found in tiers]
        made = figure.subplots(len(tiers), 1, sharex=True, squeeze=False, height_ratios=ratios)
        for (axes,), (tier, found) in zip(made, tiers, strict=True):
            _tier_panel(axes, tier, found, claim, right, narrow=narrow)
        made[-1][0].set_xlabel(
            f"ε at δ = {claim.delta:g}" + ("" if narrow else f", {claim.adjacency} one {claim.unit}")
        )

    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (e.method, e.tier, four_digits_down(e.lower), e.upper, e.confidence, e.delta, claim.unit, claim.adjacency)
        for e in estimates
    )
    columns = ("estimator", "tier", "ε at least (rounded down)", "ε at most", "confidence", "δ", "unit", "adjacency")
    return make_drawing(
        f"{name}-bounds",
        "What was proved about ε, beside the claim",
        f"The line is the claim, {claim}. A bar ends at the lower bound: all that it covers is refuted, at the"
        " confidence beside it. Tier A (full bars) holds without a model of what is released; tier B (hatched) holds"
        " under the model that its assumptions name. They are never merged, and each confidence is that of one bound by"
        " itself, not of the largest of them. A whisker leads to an upper end, of what this attack shows.",
        f"Lower bounds on ε; claimed is {claim}. "
        + "; ".join(f"tier {e.tier}, {e.method}: {rounded_down(e.lower)}" for e in estimates),
        Table("Bounds on ε", columns, rows),
        draw,
        height=110 + 50 * len(estimates) + 26 * len(tiers),
        narrow_height=120 + 66 * len(estimates) + 26 * len(tiers),
    )


def _tier_panel(axes: Axes, tier: str, found: Sequence[Estimate], claim: Claim, right: float, *, narrow: bool) -> None:
    colour = BLUE if tier == "A" else ORANGE
    style = (
        {"color": colour, "alpha": 0.85} if tier == "A" else {"facecolor": "none", "edgecolor": colour, "hatch": "////"}
    )
    y = np.arange(len(found))
    shown = [min(one.lower, right) for one in found]
    axes.barh(y, shown, height=0.5, **style)
    for place, one in zip(y, found, strict=True):
        if one.upper is not None:
            end, marker = (one.upper, "|") if one.upper <= right else (right, ">")
            axes.plot([one.lower, end], [place, place], color=colour, linewidth=1.4)
            axes.plot([end], [place], color=colour, marker=marker, markersize=9, clip_on=False)
    axes.axvline(claim.epsilon, color=INK, linewidth=2)
    axes.set_yticks(y, [_label(one, narrow=narrow) for one in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, right)
    axes.grid(axis="y", visible=False)
    model = "without a model of what is released" if tier == "A" else "under a model"
    axes.set_title(f"tier {tier}" if narrow else f"tier {tier}: {model}")


def _label(estimate: Estimate, *, narrow: bool) -> str:
    sure = "no confidence" if estimate.confidence is None else f"{100 * estimate.confidence:g}%"
    name = textwrap.wrap(estimate.method, 22 if narrow else 42)
    kind = ["of curves as claimed"] if curves_named(estimate) else []
    return "\n".join([*name, *kind, f"ε ≥ {rounded_down(estimate.lower)}, {sure}"])


def curves_named(estimate: Estimate) -> str:
    """What kind of trade-off curve a bound takes from the claim; empty if it takes none."""
    return next((said for said in estimate.assumptions if said.startswith("the claim is")), "")
