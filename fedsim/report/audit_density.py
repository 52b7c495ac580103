# SPDX-License-Identifier: Apache-2.0
"""What counts leave open: the posterior density over (FPR, FNR), with the edge of what the claim allows.

With Jeffreys priors the rates are independent, FNR ~ Beta(½ + FN, ½ + TP) and FPR ~ Beta(½ + FP, ½ + TN)
(Zanella-Béguelin et al., ICML 2023); the mass outside the region of (ε, δ) is the probability that the attack has
already shown more than ε.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import betaincinv

from fedsim.audit.estimation.bayesian import epsilon_bayesian, posterior_cdf
from fedsim.audit.limits.tradeoff import approximate_dp
from fedsim.audit.verdict import Claim
from fedsim.privacy.loss import Floats
from fedsim.privacy.rounding import rounded_down, rounded_up
from fedsim.report.audit_figures import shade_region
from fedsim.report.audit_files import Counts
from fedsim.report.blocks import Drawing, Table
from fedsim.report.figures import BLUE, MUTED, legend_below, make_drawing

MASSES = (0.95, 0.8, 0.5)
"""Of the highest-density regions whose outlines are drawn."""
_FINE, _COARSE = 121, 31  # cells each way, of the figure and of its data
Ends = tuple[float, float]


def density_figure(name: str, claim: Claim, counts: Counts | None) -> Drawing | None:
    """The posterior density, on the whole square and near by."""
    if counts is None or not counts.usable:
        return None
    spans = _spans(claim, counts)
    x, y, values = density(counts, spans, _COARSE)
    rows = tuple((float(a), float(b), float(values[j, i])) for j, b in enumerate(y) for i, a in enumerate(x))
    inside = posterior_cdf(counts.tp, counts.fp, counts.tn, counts.fn, claim.delta)(claim.epsilon)
    found = epsilon_bayesian(counts.tp, counts.fp, counts.tn, counts.fn, claim.delta)
    median = f", with median {found.median:.3f}" if found.median is not None else ""
    about = f"at δ = {claim.delta:g} ({claim.adjacency} one {claim.unit})"

    def draw(figure: Figure, narrow: bool) -> None:
        made = figure.subplots(2 if narrow else 1, 1 if narrow else 2, squeeze=False)
        whole, near = (axes for row in made for axes in row)
        _region(whole, claim, (-0.02, 1.02), (-0.02, 1.02))
        whole.contour(*density(counts, spans, _FINE), levels=[_levels(counts, spans)[0]], colors=[BLUE], linewidths=1.2)
        whole.plot([counts.alarms.share], [counts.misses.share], color=BLUE, marker="o", linestyle="", label="measured")
        whole.set_title("all rates there are")
        _near(near, claim, counts, spans)
        near.set_title("near by: 50, 80, 95% of the mass")
        legend_below(figure, whole, columns=1 if narrow else 4)

    return make_drawing(
        f"{name}-density",
        "Which error rates the counts leave open",
        f"{counts.rule or 'A test with a fixed threshold'}: {counts.hits.right:,} of {counts.hits.of:,} members found,"
        f" {counts.alarms.right:,} of {counts.alarms.of:,} false alarms. The density of the two rates given these"
        " counts, by Jeffreys priors, if the trials are independent (Zanella-Béguelin et al. 2023); the outlines hold"
        f" 50, 80 and 95% of it. {_percent(inside)} of it lies in the shaded region that the claim, {claim}, allows."
        f" It amounts to ε between {rounded_down(found.lower)} and {rounded_up(found.upper or 0.0)}{median} {about},"
        " with 95% credibility: of what this attack shows under the priors (tier B), and no bound on a better one.",
        f"Density over false positive and false negative rate, around {counts.alarms.share:.3f} and"
        f" {counts.misses.share:.3f}; {_percent(inside)} of it within what the claim allows.",
        Table("Density", ("false positive rate", "false negative rate", "density"), rows),
        draw,
        height=390,
        narrow_height=760,
    )


def density(counts: Counts, spans: tuple[Ends, Ends], cells: int) -> tuple[Floats, Floats, Floats]:
    """(FPR, FNR, density), at the middles of so many cells each way; a density may be infinite at an end."""
    from scipy.stats import beta  # takes half a second to import, and most runs have no audit

    (left, right), (bottom, top) = spans
    middles = (np.arange(cells) + 0.5) / cells
    x, y = left + (right - left) * middles, bottom + (top - bottom) * middles
    across = beta.pdf(x, 0.5 + counts.fp, 0.5 + counts.tn)
    along = beta.pdf(y, 0.5 + counts.fn, 0.5 + counts.tp)
    return x, y, np.outer(along, across)


def _levels(counts: Counts, spans: tuple[Ends, Ends]) -> list[float]:
    """The densities above which 95, 80 and 50% of the mass lie, in rising order."""
    ordered = np.sort(density(counts, spans, _FINE)[2].ravel())[::-1]
    mass = np.cumsum(ordered) / ordered.sum()
    return [float(ordered[np.searchsorted(mass, share)]) for share in MASSES]


def _near(axes: Axes, claim: Claim, counts: Counts, spans: tuple[Ends, Ends]) -> None:
    x, y, values = density(counts, spans, _FINE)
    levels = _levels(counts, spans)
    _region(axes, claim, *spans)
    axes.contourf(x, y, values, levels=[*levels, np.inf], colors=[BLUE], alpha=0.22)
    for level in levels[1:]:
        axes.contourf(x, y, values, levels=[level, np.inf], colors=[BLUE], alpha=0.22)
    axes.contour(x, y, values, levels=levels, colors=[BLUE], linewidths=1.4)


def _region(axes: Axes, claim: Claim, across: Ends, along: Ends) -> None:
    shade_region(axes, approximate_dp(claim.epsilon, claim.delta))
    axes.plot([0, 1], [1, 0], color=MUTED, linestyle=":", linewidth=1.4, label="blind guessing")
    axes.set_xlim(*across)
    axes.set_ylim(*along)
    axes.set_xlabel("false positive rate")
    axes.set_ylabel("false negative rate")


def _spans(claim: Claim, counts: Counts) -> tuple[Ends, Ends]:
    """What is shown near by: the mass, and the edge of what is allowed where that is not far off."""
    across, along = _span(counts.fp, counts.tn), _span(counts.fn, counts.tp)
    edge = approximate_dp(claim.epsilon, claim.delta)  # its own inverse
    return _reaching(across, edge(counts.misses.share)), _reaching(along, edge(counts.alarms.share))


def _reaching(span: Ends, edge: float) -> Ends:
    low, high = span
    width = high - low
    return (max(0.0, edge - 0.1 * width), high) if low - 2 * width < edge < low else span


def _span(errors: int, others: int) -> Ends:
    """Where all but a ten-thousandth of the mass of a rate lies, with a margin."""
    low, high = (float(betaincinv(0.5 + errors, 0.5 + others, tail)) for tail in (5e-5, 1 - 5e-5))
    margin = 0.05 * (high - low)
    return (0.0 if not errors else max(0.0, low - margin)), (1.0 if not others else min(1.0, high + margin))


def _percent(share: float) -> str:
    """Rounded down: what lies within the claim must not look more than it is."""
    return f"{int(1000 * share) / 10:g}%"
