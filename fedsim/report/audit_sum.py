# SPDX-License-Identifier: Apache-2.0
"""The homework experiment in the report: what one run of a noisy sum proves, by budget, canaries and dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsim.report.audit_files import SumOutcome, SumRow
from fedsim.report.blocks import Block, Definitions, Drawing, Table
from fedsim.report.figures import BLUE, INK, MUTED, ORANGE, PURPLE, make_drawing

LINES = (
    ("asked", "as asked: best k after looking (no bound)", MUTED, "v", ":"),
    ("corrected", "corrected for the choice of k (δ ignored)", PURPLE, "^", "-."),
    ("registered", "k fixed beforehand (δ ignored)", ORANGE, "s", "--"),
    ("valid", "valid: k fixed beforehand, with δ", BLUE, "o", "-"),
)
COLUMNS = (
    "varied", "value", "repeats", "ε of the mechanism", "δ",
    *(f"{name}{suffix}" for name, *_ in LINES for suffix in (", mean", ", s.d.")),
)  # fmt: skip
MEANINGS = (
    ("asked", "the largest bound over all numbers of guesses, chosen by looking: what the homework asks for, no bound"),
    ("corrected", "the same, with the error divided among all choices; a 95% bound for pure ε-DP only"),
    ("registered", "a tenth of the canaries guessed each way, fixed beforehand; a 95% bound for pure ε-DP only"),
    ("valid", "the same with δ paid for: the only one that is a 95% lower bound on the ε of a Gaussian sum (tier A)"),
)


@dataclass(frozen=True)
class _Question:
    title: str
    label: str
    short: str
    base: int


QUESTIONS = {
    "Q2.1": _Question("Q2.1: by the budget", "ε that the noise is made for", "a budget of", 2),
    "Q2.2": _Question("Q2.2: by the number of canaries", "canaries m", "m =", 2),
    "Q2.3": _Question("Q2.3: by the dimension", "dimension d", "d =", 10),
}


def sum_blocks(name: str, rows: Sequence[SumRow], outcomes: Sequence[SumOutcome]) -> list[Block]:
    """The questions that were played, each as a figure, and what the four lines are."""
    if not rows:
        return []
    figures = [
        _figure(name, question, [row for row in rows if row.question == question], _fixed(question, outcomes))
        for question in QUESTIONS
    ]
    return [Definitions(MEANINGS, "The four numbers of each point"), *(figure for figure in figures if figure)]


def _fixed(question: str, outcomes: Sequence[SumOutcome]) -> str:
    """What the question does not vary, as it was played."""
    played = [outcome for outcome in outcomes if outcome.question == question]
    kinds = {"budget ε =": "epsilon", "canaries m =": "canaries", "dimension d =": "dimension"}
    values = {words: {getattr(outcome, field) for outcome in played} for words, field in kinds.items()}
    said = ", ".join(f"{words} {min(found):,g}" for words, found in values.items() if len(found) == 1)
    return f"{said[0].upper()}{said[1:]}; " if said else ""


def _figure(name: str, question: str, rows: Sequence[SumRow], fixed: str) -> Drawing | None:
    if not rows:
        return None
    rows, about = sorted(rows, key=lambda row: row.value), QUESTIONS[question]
    delta = " and ".join(f"{value:g}" for value in sorted({row.delta for row in rows}))

    def draw(figure: Figure, narrow: bool) -> None:
        made = figure.subplots(2 if narrow else 1, 1 if narrow else 2, squeeze=False)
        beside, bounds = (axes for row in made for axes in row)
        _lines(bounds, rows, LINES)
        _lines(beside, rows, LINES[-1:])
        x = [row.value for row in rows]
        beside.plot(x, [row.true_epsilon for row in rows], color=INK, linewidth=1.6, label="ε of the mechanism")
        for axes, title in ((beside, "beside what the mechanism spends"), (bounds, "the four numbers")):
            axes.set_title(title)
            axes.set_xscale("log", base=about.base)
            axes.set_xticks(x, [_short(value) for value in x])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.set_xlabel(about.label)
            axes.set_ylabel(f"ε at δ = {delta}")
        handles, labels = bounds.get_legend_handles_labels()
        line, name = beside.get_legend_handles_labels()
        figure.legend([line[0], *handles], [name[0], *labels], loc="outside lower left", ncols=1 if narrow else 2)

    best = max(rows, key=lambda row: row.valid)
    fewest, most = min(row.repeats for row in rows), max(row.repeats for row in rows)
    return make_drawing(
        f"{name}-{question.lower().replace('.', '-')}",
        about.title,
        f"{fixed}δ = {delta}, add/remove one example. Points are means of {_range(fewest, most)} audits,"
        f" whiskers one standard deviation. The valid bound proves most at {about.short} {best.value:,g}:"
        f" ε ≥ {best.valid:.3f} on average, of {best.true_epsilon:.3f} that the mechanism spends at this δ.",
        f"Line chart of bounds on ε at δ = {delta} by {about.label}: valid bound "
        + ", ".join(f"{row.valid:.2f} at {row.value:,g}" for row in rows),
        Table(about.title, COLUMNS, tuple(_cells(row) for row in rows)),
        draw,
        height=390,
        narrow_height=720,
    )


def _lines(axes: Axes, rows: Sequence[SumRow], lines: Sequence[tuple[str, str, str, str, str]]) -> None:
    x = np.array([row.value for row in rows])
    for number, (field, label, colour, marker, dashes) in enumerate(lines):
        mean = np.array([getattr(row, field) for row in rows])
        spread = np.array([getattr(row, f"{field}_sd") for row in rows])
        shift = 1 + 0.008 * (number - (len(lines) - 1) / 2) * (
            np.log(x[-1] / x[0]) if len(x) > 1 else 1
        )  # whiskers side by side
        axes.errorbar(
            x * shift, mean, yerr=[np.minimum(spread, mean), spread], color=colour, marker=marker, linestyle=dashes,
            capsize=3, elinewidth=1.1, label=label,
        )  # fmt: skip


def _short(value: float) -> str:
    """16; 16,384; 10⁵ would not fit, hence 100k."""
    return f"{value / 1000:g}k" if value >= 10_000 and value % 1000 == 0 else f"{value:,g}"


def _cells(row: SumRow) -> tuple[str | int | float, ...]:
    numbers = [getattr(row, f"{name}{suffix}") for name, *_ in LINES for suffix in ("", "_sd")]
    return (row.varied, row.value, row.repeats, row.true_epsilon, row.delta, *numbers)


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
