# SPDX-License-Identifier: Apache-2.0
"""The figures of an audit: errors against what the claim allows, bounds on ε beside it, and what the counts leave open.

The errors that were measured are no proof: a threshold that is picked by looking at them is the luckiest of many.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from fedsim.audit.estimate import Estimate
from fedsim.audit.membership import advantage_of_curve
from fedsim.audit.tradeoff import Curve
from fedsim.audit.verdict import Claim
from fedsim.privacy.loss import Floats
from fedsim.report.audit_files import Counts, Rates
from fedsim.report.blocks import Cell, Drawing, Table
from fedsim.report.figures import BLUE, GREEN, MUTED, ORANGE, PURPLE, legend_below, make_drawing


@dataclass(frozen=True, eq=False)
class View:
    """One test, its errors, and what it is held against."""

    title: str
    rates: Rates
    allowed: Curve | None = None
    """The trade-off curve of what is claimed; none where nothing is."""
    allowed_by: str = ""
    releases: Curve | None = None
    """The curve of the claimed releases themselves, where the claim names them: above that of its (ε, δ)."""
    counts: tuple[Counts, ...] = ()
    """Of thresholds that were fixed beforehand, or chosen on other trials."""
    least: float = 1e-3
    """The smallest rate that so many trials can show."""


# --- numbers for people ---------------------------------------------------------------------------------------------


def rounded_down(epsilon: float) -> str:
    """Three decimals, rounded down: a lower bound must not grow by being printed."""
    return "∞" if math.isinf(epsilon) else f"{math.floor(epsilon * 1000 + 1e-9) / 1000:.3f}"


def four_digits_down(value: float) -> float:
    """Rounded down to the four digits that a table shows; infinity stays."""
    if value <= 0 or math.isinf(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.floor(value / unit + 1e-9) * unit


# --- errors ---------------------------------------------------------------------------------------------------------


def trade_off_figure(name: str, views: Sequence[View], claim: str, caution: str) -> Drawing | None:
    """False negatives against false positives, with the region that the claim allows."""
    views = [view for view in views if len(view.rates)]
    if not views:
        return None

    def draw(figure: Figure, narrow: bool) -> None:
        places = _panels(figure, len(views), narrow)
        for axes, view in zip(places, views, strict=True):
            _trade_off_panel(axes, view, titled=len(views) > 1)
        legend_below(figure, places[0], columns=1 if narrow else 2)

    return make_drawing(
        f"{name}-tradeoff",
        "The trade-off: how many members are missed, at how many false alarms",
        f"The nearer a line comes to the corner at the lower left, the better the adversary tells the two worlds apart."
        f" {_shaded(views, claim)} Below and to the left of it no test may lie. {caution}",
        f"Trade-off curves of {len(views)} tests: {'; '.join(_said(view) for view in views)}.",
        Table("Errors", ("test", "false positive rate", "false negative rate", "least FNR allowed"), _rows(views)),
        draw,
        height=400 if len(views) > 1 else 430,
        narrow_height=450 * len(views) + 90,
    )


def roc_figure(name: str, views: Sequence[View], claim: str, caution: str) -> Drawing | None:
    """True positives against false positives, both logarithmic: a claim is tested where false alarms are rare."""
    views = [view for view in views if len(view.rates)]
    if not views:
        return None

    def draw(figure: Figure, narrow: bool) -> None:
        places = _panels(figure, len(views), narrow)
        for axes, view in zip(places, views, strict=True):
            _roc_panel(axes, view, titled=len(views) > 1)
        legend_below(figure, places[0], columns=1 if narrow else 2)

    rows = tuple(
        (view.title, fpr, 1 - fnr, None if view.allowed is None else 1 - view.allowed(fpr))
        for view in views
        for fpr, fnr in zip(view.rates.fpr, view.rates.fnr, strict=True)
    )
    return make_drawing(
        f"{name}-roc",
        "ROC on logarithmic axes: what is found where false alarms are rare",
        f"An attack that is only sure of a few is seen here, and not in an average. {_shaded(views, claim)} Above it no"
        f" test may lie. A rate below one in the number of trials cannot be seen. {caution}",
        f"ROC curves on logarithmic axes of {len(views)} tests: {'; '.join(_said(view) for view in views)}.",
        Table("ROC", ("test", "false positive rate", "true positive rate", "largest TPR allowed"), rows),
        draw,
        height=400 if len(views) > 1 else 430,
        narrow_height=450 * len(views) + 90,
    )


def _panels(figure: Figure, number: int, narrow: bool) -> list[Axes]:
    made = figure.subplots(number if narrow else 1, 1 if narrow else number, squeeze=False)
    return [axes for row in made for axes in row]


def _trade_off_panel(axes: Axes, view: View, *, titled: bool) -> None:
    if view.allowed is not None:
        shade_region(axes, view.allowed)
    if view.releases is not None:
        fpr, least, _ = _region(view.releases)
        axes.plot(fpr, least, color=PURPLE, linestyle="--", linewidth=1.4, label="the claimed releases, at their worst")
    axes.plot([0, 1], [1, 0], color=MUTED, linestyle=":", linewidth=1.4, label="blind guessing")
    axes.plot(*view.rates.arrays, color=BLUE, label="measured, at every threshold")
    _crosses(axes, view.counts, of_misses=True)
    _unit_square(axes, "false positive rate", "false negative rate")
    if titled:
        axes.set_title(view.title)


def _roc_panel(axes: Axes, view: View, *, titled: bool) -> None:
    least = 10.0 ** math.floor(math.log10(view.least))
    grid = np.geomspace(least, 1, 200)
    if view.allowed is not None:
        edge = np.array([1 - view.allowed(float(x)) for x in grid])
        axes.fill_between(grid, least / 10, edge, color=GREEN, alpha=0.16, linewidth=0, label="allowed by the claim")
        axes.plot(grid, edge, color=GREEN, linewidth=1.4, label="edge of what is allowed")
    if view.releases is not None:
        worst = [1 - view.releases(float(x)) for x in grid]
        axes.plot(
            grid, worst, color=PURPLE, linestyle="--", linewidth=1.4, label="the claimed releases, at their worst"
        )
    axes.plot(grid, grid, color=MUTED, linestyle=":", linewidth=1.4, label="blind guessing")
    fpr, fnr = view.rates.arrays
    first = max(0, int(np.searchsorted(fpr, view.least, "right")) - 1)
    # no false alarm in so many trials is drawn as one: less cannot be told from it
    axes.plot(
        np.maximum(fpr[first:], view.least),
        np.maximum(1 - fnr[first:], least / 10),
        color=BLUE,
        label="measured, at every threshold",
    )
    _crosses(axes, [counts for counts in view.counts if counts.fp and counts.tp], of_misses=False)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(least, 1.1)
    axes.set_ylim(least, 1.3)
    for axis, name in ((axes.xaxis, "false positive rate"), (axes.yaxis, "true positive rate")):
        axis.set_label_text(name)
        axis.set_major_locator(LogLocator(numticks=6))
        axis.set_major_formatter(lambda rate, _: f"{rate:g}")
        axis.set_minor_locator(NullLocator())
    if titled:
        axes.set_title(view.title)


def _crosses(axes: Axes, found: Sequence[Counts], *, of_misses: bool) -> None:
    """Points with the 95% interval of either rate."""
    pairs = [(one.alarms, one.misses if of_misses else one.hits) for one in found if one.usable]
    if not pairs:
        return
    (x, across), (y, along) = (
        (np.array([share.share for share in side]), np.array([share.interval for share in side]).T)
        for side in zip(*pairs, strict=True)
    )
    axes.errorbar(
        x, y, xerr=np.maximum([x - across[0], across[1] - x], 0), yerr=np.maximum([y - along[0], along[1] - y], 0),
        color=ORANGE, marker="D", linestyle="", capsize=3, elinewidth=1.4, zorder=5,
        label="at a threshold fixed beforehand, 95 %",
    )  # fmt: skip


def _unit_square(axes: Axes, x: str, y: str) -> None:
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def shade_region(axes: Axes, curve: Curve) -> None:
    """What a trade-off curve allows, and its edge."""
    fpr, least, most = _region(curve)
    axes.fill_between(fpr, least, most, color=GREEN, alpha=0.16, linewidth=0, label="allowed by the claim")
    axes.plot(fpr, least, color=GREEN, linewidth=1.4, label="edge of what is allowed")
    axes.plot(fpr, most, color=GREEN, linewidth=1.4)


def _region(curve: Curve) -> tuple[Floats, Floats, Floats]:
    """FPR, and the least and the largest FNR, dense where a curve is steep; a test's opposite has both complements."""
    corner = (1 - advantage_of_curve(curve)) / 2
    half = np.concatenate([[0.0, corner], np.geomspace(1e-6, 0.5, 60), np.linspace(0.02, 0.5, 25)])
    fpr = np.unique(np.concatenate([half, 1 - half]))
    least = np.array([curve(float(x)) for x in fpr])
    return fpr, least, 1 - least[::-1]


def _rows(views: Sequence[View]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(
        (view.title, fpr, fnr, None if view.allowed is None else view.allowed(fpr))
        for view in views
        for fpr, fnr in zip(view.rates.fpr, view.rates.fnr, strict=True)
    )


def _shaded(views: Sequence[View], claim: str) -> str:
    allowed = [f"{view.title}: {view.allowed_by}" if len(views) > 1 else view.allowed_by for view in views]
    if not any(view.allowed for view in views):
        return "Nothing is claimed that would bound it, so that nothing is shaded."
    return f"Shaded is what {claim} allows ({'; '.join(allowed)})."


def _said(view: View) -> str:
    fpr, fnr = view.rates.arrays
    return f"{view.title}, errors together at best {float((fpr + fnr).min()):.3f} (blind guessing 1)"


# --- bounds ---------------------------------------------------------------------------------------------------------


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
        " confidence beside it. Tier A (full bars) holds without a model of the mechanism; tier B (hatched) holds under"
        " the model that its assumptions name. They are never merged, and each confidence is that of one bound by"
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
    axes.axvline(claim.epsilon, color=GREEN, linewidth=2)
    axes.set_yticks(y, [_label(one, narrow=narrow) for one in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, right)
    axes.grid(axis="y", visible=False)
    model = "without assumptions on the mechanism" if tier == "A" else "under a model"
    axes.set_title(f"tier {tier}" if narrow else f"tier {tier}: {model}")


def _label(estimate: Estimate, *, narrow: bool) -> str:
    sure = "no confidence" if estimate.confidence is None else f"{100 * estimate.confidence:g} %"
    name = textwrap.wrap(estimate.method, 22 if narrow else 42)
    return "\n".join([*name, f"ε ≥ {rounded_down(estimate.lower)}, {sure}"])
