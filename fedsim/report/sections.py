# SPDX-License-Identifier: Apache-2.0
"""The sections of the report, in order: plain functions of the run's files, to one section, several, or None.

A later page is one more function in SECTIONS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedsim.errors import counted
from fedsim.report import words
from fedsim.report.attack_comparison import attacks_compared
from fedsim.report.attack_pages import attack_pages
from fedsim.report.audit_pages import audit_pages
from fedsim.report.blocks import Bullets, Cell, Definitions, Drawing, Paragraph, Section, Source, Table
from fedsim.report.figures import BLUE, GREEN, ORANGE, fill_cells, make_drawing, round_axis
from fedsim.report.privacy_spent import privacy_spent
from fedsim.report.run_files import PartitionPicture, RunFiles
from fedsim.report.server_view import server_view

MOST_CLASSES = 40  # more classes than this (words of a vocabulary) are no picture


def what_ran(run: RunFiles) -> Section:
    """The scenario in words, and as it was resolved."""
    source = Source("The scenario as it ran (scenario.yaml)", run.scenario_text)
    model = (Source("The model, layer by layer", run.summary.model_text),) if run.summary.model_text else ()
    notes = (Bullets("To know beforehand", run.summary.notes),) if run.summary.notes else ()
    return Section("what-ran", "What ran", (Definitions(words.describe(run)), *notes, source, *model))


def learning(run: RunFiles) -> Section | None:
    """Accuracy and losses by round."""
    if not run.rounds:
        return None
    columns = ("round", "test accuracy", "test loss", "training loss", "clients")
    rows = tuple((r.round, r.accuracy, r.loss, r.train_loss, r.clients) for r in run.rounds)
    summary = _learning_summary(run)
    gap = "; no client reported its training loss, which would be one more release"
    if any(r.train_loss is not None for r in run.rounds):
        gap = (
            ", and whether the training loss (on the clients' own rows) falls away from the test loss: membership"
            " inference lives on that gap"
        )

    def draw(figure: Figure, narrow: bool) -> None:
        accuracy, loss = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
        _curve(accuracy, rows, 1, BLUE, "o", "-", "test accuracy")
        accuracy.set_ylim(0, 1.02)
        _curve(loss, rows, 2, ORANGE, "s", "-", "test loss")
        _curve(loss, rows, 3, GREEN, "^", "--", "training loss")
        # The default margin is a share of what the values vary by: next to nothing, where a loss hardly falls.
        loss.set_ylim(0, 1.06 * max(loss.dataLim.ymax, 1e-9) if loss.lines else 1.0)
        if loss.lines:
            loss.legend(loc="best")
        for axes, label in ((accuracy, "accuracy on held-out rows"), (loss, "cross-entropy loss")):
            axes.set_title(label)
            axes.set_ylabel("accuracy" if axes is accuracy else "loss")
            round_axis(axes, 0, max(run.rounds_done, 1), ticks=6)

    drawing = make_drawing(
        "learning",
        "Learning curves",
        f"Round 0 is the model before training. Read off whether accuracy has levelled out{gap}.",
        f"Two line charts by round. {summary}",
        Table("Learning by round", columns, rows),
        draw,
        height=300,
        narrow_height=520,
    )
    return Section("learning", "Learning", (Paragraph(summary), drawing))


def _curve(
    axes: Axes, rows: Sequence[tuple[Cell, ...]], column: int, colour: str, marker: str, dashes: str, label: str
) -> None:
    """One line, where there is anything to draw: under some defences no training loss leaves the client."""
    points = [(row[0], row[column]) for row in rows if isinstance(row[column], float) and math.isfinite(row[column])]  # type: ignore[arg-type]
    x, y = [point[0] for point in points], [point[1] for point in points]
    if not points:
        return
    every = max(1, len(points) // 25)
    axes.plot(x, y, color=colour, linestyle=dashes, marker=marker, markevery=every, label=label)  # type: ignore[arg-type]


def _learning_summary(run: RunFiles) -> str:
    evaluated = [r for r in run.rounds if r.accuracy is not None]
    diverged = any(r.loss is not None and not math.isfinite(r.loss) for r in run.rounds)
    warning = " The loss stopped being a number: the training diverged." if diverged else ""
    if not evaluated:
        return "The model has not been evaluated yet." + warning
    first, last = evaluated[0], evaluated[-1]
    best = max(evaluated, key=lambda r: r.accuracy or 0.0)
    text = f"Accuracy on held-out rows is {last.accuracy:.3f} after round {last.round}"
    if first is not last:
        text += f"; it was {first.accuracy:.3f} in round {first.round}"
    if f"{best.accuracy:.3f}" != f"{last.accuracy:.3f}":
        text += f", and {best.accuracy:.3f} at best, in round {best.round}"
    return f"{text}.{warning}"


def partition(run: RunFiles) -> Section | None:
    """Who holds what: rows of each class for each client that is shown."""
    picture = run.summary.partition
    if not picture.clients:
        return None
    classes = len(picture.counts[0]) if picture.counts else 0
    heat = 0 < classes <= MOST_CLASSES
    population = run.summary.population or len(picture.clients)
    shown = len(picture.clients)
    which = "All clients" if shown == population else f"The {shown:,} of {population:,} clients that took part first"
    low, high, median = min(picture.sizes), max(picture.sizes), float(np.median(picture.sizes))
    text = f"{which} are shown. "
    if low == high:
        text += f"Each holds {counted(low, 'row')}."
    else:
        text += f"They hold between {low:,} and {counted(high, 'row')}, the median is {words.number(median)}."
    if heat:
        text += (
            f" A client's mix of classes differs from that of all of them together by {_skew(picture):.2f} on average"
            " (total variation distance: 0 is the same mix, 1 is nothing in common)."
        )
    if run.claims:
        text += " This is the ground truth of a simulation: no claim covers it, and no server sees it."
    drawing = _partition_drawing(picture, _class_names(run, classes), heat=heat)
    return Section("partition", "The partition", (Paragraph(text), drawing))


def _class_names(run: RunFiles, classes: int) -> tuple[str, ...]:
    names = run.summary.class_names
    return names if len(names) == classes else tuple(str(c) for c in range(classes))


def _skew(picture: PartitionPicture) -> float:
    """Mean total variation distance between a client's label distribution and that of all shown clients together."""
    counts, shares = np.array(picture.counts, dtype=np.float64), _shares(picture)
    held = counts.sum(axis=1) > 0
    return (
        float(0.5 * np.abs(shares[held] - counts.sum(axis=0) / counts.sum()).sum(axis=1).mean()) if held.any() else 0.0
    )


def _partition_drawing(picture: PartitionPicture, names: tuple[str, ...], *, heat: bool) -> Drawing:
    counts = picture.counts if heat else tuple(() for _ in picture.clients)
    labels = tuple(f"class {name}" for name in names) if heat else ()
    rows = tuple((client, n, *row) for client, n, row in zip(picture.clients, picture.sizes, counts, strict=True))
    x = np.arange(len(picture.clients))

    def draw(figure: Figure, narrow: bool) -> None:
        if heat:
            top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(1.0, len(names) / 6)])
            _heat_map(bottom, picture, names, narrow=narrow)
        else:
            top = bottom = figure.subplots()
        top.bar(x, picture.sizes, width=0.8, color=BLUE)
        top.grid(axis="x", visible=False)
        top.set_ylabel("rows")
        top.set_title("rows that each client holds")
        every = -(-len(x) // (10 if narrow else 20))
        bottom.set_xticks(x[::every], [str(client) for client in picture.clients[::every]])
        bottom.tick_params(axis="x", rotation=90 if max(picture.clients) > 999 else 0)
        bottom.set_xlabel("client")

    caption = "Bars: rows of each client." + (
        " Cells: how a client's rows are spread over the classes, each column by itself; full strength stands for"
        f" {100 * _full_strength(_shares(picture)):.0f}%. Even columns mean iid data; a few strong cells in each"
        " column mean label skew, where an update tells much about whose data it came from."
        if heat
        else " Uneven bars mean that some clients weigh more than others, and that small ones are easier to single out."
    )
    return make_drawing(
        "partition",
        "Clients and what they hold",
        caption,
        f"Bars of the rows of {counted(len(x), 'client')}"
        + (f" and a map of their {len(names)} classes." if heat else "."),
        Table("Rows of each client", ("client", "rows", *labels), rows),
        draw,
        height=260 + (14 * len(names) + 60 if heat else 0),
        narrow_height=260 + (14 * len(names) + 60 if heat else 0),
    )


def _heat_map(axes: Axes, picture: PartitionPicture, names: tuple[str, ...], *, narrow: bool) -> None:
    """Cells whose opacity is the class's share of the client's rows, in twenty steps up to full strength."""
    shares = _shares(picture)
    steps = np.ceil(20 * shares / _full_strength(shares)).astype(int)
    for step in range(1, 21):
        cells = [(int(client), int(label)) for client, label in np.argwhere(steps == step)]
        fill_cells(axes, cells, facecolor=BLUE, edgecolor="none", alpha=step / 20)
    axes.set_xlim(-0.6, len(shares) - 0.4)
    axes.set_ylim(len(names) - 0.4, -0.6)
    every = -(-len(names) // 20)
    limit = 12 if narrow else 20
    axes.set_yticks(range(0, len(names), every), [_short(name, limit) for name in names[::every]])
    axes.set_ylabel("class")
    axes.set_title("share of each class among them")
    axes.grid(visible=False)


def _shares(picture: PartitionPicture) -> NDArray[np.float64]:
    """(clients, classes): the share of each class among a client's rows."""
    counts = np.array(picture.counts, dtype=np.float64)
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares


def _full_strength(shares: NDArray[np.float64]) -> float:
    # The largest share, but at least a half: the chance differences of iid data must not look like skew.
    return max(0.5, float(shares.max(initial=0.0)))


def _short(name: str, limit: int) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


SECTIONS: tuple[Callable[[RunFiles], Section | Sequence[Section] | None], ...] = (
    what_ran,
    learning,
    partition,
    privacy_spent,
    server_view,
    attacks_compared,
    attack_pages,
    lambda run: audit_pages(run.audits, run.attacks),
)


def sections_of(run: RunFiles) -> tuple[Section, ...]:
    """All sections that have something to say, in order."""
    made = (make(run) for make in SECTIONS)
    return tuple(
        section for one in made if one is not None for section in ((one,) if isinstance(one, Section) else one)
    )
