# SPDX-License-Identifier: Apache-2.0
"""The errors of an audit's tests against what the claim allows: the trade-off curve, and the ROC on logarithmic axes.

The errors that were measured are no proof: a threshold that is picked by looking at them is the luckiest of many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from fedsim.audit.limits.membership import advantage_of_curve
from fedsim.audit.limits.tradeoff import Curve
from fedsim.privacy.loss import Floats
from fedsim.report.audit_files import Counts, Rates
from fedsim.report.blocks import Cell, Drawing, Table
from fedsim.report.figures import BLUE, INK, MUTED, ORANGE, PURPLE, legend_below, make_drawing


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


def _drawn_by(panel: Callable[[Axes, View], None], views: Sequence[View]) -> Callable[[Figure, bool], None]:
    """One panel beside the other, or below it where it is narrow; one legend for all."""

    def draw(figure: Figure, narrow: bool) -> None:
        places = _panels(figure, len(views), narrow)
        for axes, view in zip(places, views, strict=True):
            panel(axes, view)
        legend_below(figure, places[0], columns=1 if narrow else 2)

    return draw


def trade_off_figure(name: str, views: Sequence[View], claim: str, caution: str) -> Drawing | None:
    """False negatives against false positives, with the region that the claim allows."""
    views = [view for view in views if len(view.rates)]
    if not views:
        return None

    return make_drawing(
        f"{name}-tradeoff",
        "The trade-off: how many members are missed, at how many false alarms",
        f"The nearer a line comes to the corner at the lower left, the better the adversary tells the two worlds apart."
        f" {_shaded(views, claim)} Below and to the left of it no test may lie. {caution}",
        f"Trade-off curves of {len(views)} tests: {'; '.join(_said(view) for view in views)}.",
        Table("Errors", ("test", "false positive rate", "false negative rate", "least FNR allowed"), _rows(views)),
        _drawn_by(_trade_off_panel, views),
        height=400 if len(views) > 1 else 430,
        narrow_height=450 * len(views) + 90,
    )


def roc_figure(name: str, views: Sequence[View], claim: str, caution: str) -> Drawing | None:
    """True positives against false positives, both logarithmic: a claim is tested where false alarms are rare."""
    views = [view for view in views if len(view.rates)]
    if not views:
        return None

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
        _drawn_by(_roc_panel, views),
        height=400 if len(views) > 1 else 430,
        narrow_height=450 * len(views) + 90,
    )


def _panels(figure: Figure, number: int, narrow: bool) -> list[Axes]:
    made = figure.subplots(number if narrow else 1, 1 if narrow else number, squeeze=False)
    return [axes for row in made for axes in row]


def _trade_off_panel(axes: Axes, view: View) -> None:
    if view.allowed is not None:
        shade_region(axes, view.allowed)
    if view.releases is not None:
        fpr, least, _ = _region(view.releases)
        axes.plot(fpr, least, color=PURPLE, linestyle="--", linewidth=1.4, label="the claimed releases, at their worst")
    axes.plot([0, 1], [1, 0], color=MUTED, linestyle=":", linewidth=1.4, label="blind guessing")
    axes.plot(*view.rates.arrays, color=BLUE, label="measured, at every threshold")
    _crosses(axes, view.counts, of_misses=True)
    _unit_square(axes, "false positive rate", "false negative rate")
    axes.set_title(view.title)


def _roc_panel(axes: Axes, view: View) -> None:
    least = 10.0 ** math.floor(math.log10(view.least))
    grid = np.geomspace(least, 1, 200)
    if view.allowed is not None:
        edge = np.array([1 - view.allowed(float(x)) for x in grid])
        axes.fill_between(grid, least / 10, edge, color=MUTED, alpha=0.16, linewidth=0, label="allowed by the claim")
        axes.plot(grid, edge, color=INK, linewidth=1.4, label="edge of what is allowed")
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
        label="at a threshold fixed or held out, 95%",
    )  # fmt: skip


def _unit_square(axes: Axes, x: str, y: str) -> None:
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def shade_region(axes: Axes, curve: Curve) -> None:
    """What a trade-off curve allows, and its edge."""
    fpr, least, most = _region(curve)
    axes.fill_between(fpr, least, most, color=MUTED, alpha=0.16, linewidth=0, label="allowed by the claim")
    axes.plot(fpr, least, color=INK, linewidth=1.4, label="edge of what is allowed")
    axes.plot(fpr, most, color=INK, linewidth=1.4)


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
