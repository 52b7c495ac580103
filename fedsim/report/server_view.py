# SPDX-License-Identifier: Apache-2.0
"""The server's view: what it saw, of whom, how often, what it kept, and what it did not see."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedsim.errors import counted
from fedsim.report import words
from fedsim.report.blocks import Block, Bullets, Drawing, Paragraph, Section, Table
from fedsim.report.figures import BLUE, INK, ORANGE, fill_cells, make_drawing, round_axis
from fedsim.report.run_files import Message, RunFiles

MOST_CLIENTS = 60  # in the raster of who took part
MOST_MARKS = 4000  # dots in a figure; more are summed up
MOST_FAILURES = 50  # in the table
SHOWN_ROUNDS = 40  # in the table of messages
UNFOLDED = 10  # a longer one hides what comes after it

Participation = Mapping[int, Mapping[int, bool]]  # client: {round: whether its answer arrived}


def server_view(run: RunFiles) -> Section:
    """What the transcript says."""
    if not run.messages:
        return Section("server", "The server's view", (Paragraph("The transcript holds no message yet.", "note"),))
    took_part = participation(run)
    blocks: list[Block | None] = [
        Paragraph(f"The server sent crafted weights {how}.", "red") if (how := words.crafted(run)) else None,
        Bullets("What the server saw", _saw(run, took_part)),
        Bullets("What it did not see", _did_not_see(run)),
        _norms(run),
        _participation_drawing(run, took_part),
        _messages_table(run),
        kept(run),
        *_failures(run),
    ]
    return Section("server", "The server's view", tuple(block for block in blocks if block is not None))


def participation(run: RunFiles) -> Participation:
    """Who took part in which round: from the cohorts where the run names them, else from the messages."""
    failed = {(m.client, m.round) for m in run.failures}
    result: defaultdict[int, dict[int, bool]] = defaultdict(dict)
    for round_, cohort in enumerate(run.summary.cohorts[: run.rounds_done], start=1):
        for client in cohort:
            result[client][round_] = (client, round_) not in failed
    for message in (m for m in run.messages if m.direction == "received" and m.client is not None):
        result[message.client or 0][message.round] = message.kind != "error"
    return {client: result[client] for client in sorted(result)}


def _saw(run: RunFiles, took_part: Participation) -> tuple[str, ...]:
    sums = [m for m in run.received if m.kind == "sum"]
    single = [m for m in run.received if m.kind != "sum"]
    beside = " (the claims cover only what they name as released)" if run.claims else ""
    items = []
    if single:
        what = "gradient" if single[0].kind == "gradient" else "update"
        how = " after clipping and noise" if run.scenario.defence.client_dp else ""
        items.append(f"{counted(len(single), what)}{how}, each with the client that it came from")
    if sums:
        items.append(f"{counted(len(sums), 'sum')} of a round's updates")
    yet = "" if run.finished else " so far"
    items.append(f"who took part in each round ({counted(len(took_part), 'different client')}{yet})")
    if any(m.examples is not None for m in single):
        items.append(f"how many examples each client holds{beside}")
    if any(m.loss is not None for m in single):
        items.append(f"the training loss that each client reports{beside}")
    if run.failures:
        items.append(f"{counted(len(run.failures), 'failure')} with the reason given")
    items.append("the model before and after every round, which it computes itself")
    return tuple(items)


def _did_not_see(run: RunFiles) -> tuple[str, ...]:
    defence = run.scenario.defence
    items = ["the clients' rows, and the order and batches in which a client used them"]
    if defence.secure_aggregation:
        alone = any(message.clients == 1 for message in run.received)
        what = "any single update that was summed with others" if alone else "any single update"
        items.insert(0, f"{what}: secure aggregation shows it sums only (an access model here, not a protocol)")
    if defence.client_dp:
        items.append("an update before it was clipped and noised")
    if defence.example_dp:
        items.append("a gradient before its examples were clipped and noise was added")
    return tuple(items)


def _norms(run: RunFiles) -> Drawing | None:
    """The L2 norm of everything that came back: a dot for each message, or quantiles where there are too many."""
    messages = [m for m in run.received if m.norm is not None and math.isfinite(m.norm)]
    if not messages:
        return None
    by_round: defaultdict[int, list[Message]] = defaultdict(list)
    for message in messages:
        by_round[message.round].append(message)
    sums = all(m.kind == "sum" for m in messages)
    what = "sum of a round's updates" if sums else f"{messages[0].kind} that arrived"
    rounds = sorted(by_round)
    median = [float(np.median([m.norm or 0.0 for m in by_round[r]])) for r in rounds]
    norms = np.array([m.norm for m in messages])
    dots = len(messages) <= MOST_MARKS

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        if dots:
            x = [r + offset for r in rounds for offset in _spread(len(by_round[r]))]
            y = [m.norm or 0.0 for r in rounds for m in by_round[r]]
            label = "sum" if sums else "one client"
            axes.plot(
                x, y, linestyle="", marker="o", markersize=3.5 if narrow else 4.5, color=BLUE, alpha=0.65, label=label
            )
        else:
            low, high = (
                [float(np.quantile([m.norm or 0.0 for m in by_round[r]], q)) for r in rounds] for q in (0.1, 0.9)
            )
            axes.fill_between(rounds, low, high, color=BLUE, alpha=0.3, linewidth=0, label="10% to 90% of the clients")
        if not sums:
            every = max(1, len(rounds) // 25)
            axes.plot(
                rounds, median, color=ORANGE, marker="s", markevery=every, linewidth=1.4, markersize=4, label="median"
            )
        if norms.min() > 0 and norms.max() / norms.min() > 50:
            axes.set_yscale("log")
        elif norms.min() < 0.7 * norms.max():  # where all are nearly alike, their differences need the room
            axes.set_ylim(bottom=0)
        axes.set_ylabel("L2 norm")
        round_axis(axes, 1, max(rounds), ticks=6 if narrow else 12)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)

    noise = " Each norm includes the client's own noise." if run.scenario.defence.client_dp and not sums else ""
    caption = (
        "One norm a round is all that the server can compare here: no client stands out from a sum with others."
        if sums
        else "A client whose dots lie apart is one that the server can tell from the others: little or odd data, or a"
        f" fault.{noise}"
    )
    return make_drawing(
        "norms",
        f"Norm of each {what}",
        caption,
        f"Chart of the L2 norms by round: from {words.number(float(norms.min()))} to"
        f" {words.number(float(norms.max()))}, in the last round {words.number(median[-1])} in the median.",
        Table("Norms", ("round", "client", "L2 norm"), tuple((m.round, m.client, m.norm) for m in messages)),
        draw,
        height=300,
        narrow_height=290,
    )


def _spread(amount: int) -> np.ndarray:
    """Offsets that set the clients of a round side by side, so that dots do not hide each other."""
    return np.linspace(-0.28, 0.28, amount) if amount > 1 else np.zeros(amount)


def _participation_drawing(run: RunFiles, took_part: Participation) -> Drawing | None:
    """A raster of clients and rounds or, for many clients, how many took part how often."""
    marks = sum(len(rounds) for rounds in took_part.values())
    if not marks:
        return None
    return _raster(took_part) if len(took_part) <= MOST_CLIENTS and marks <= MOST_MARKS else _histogram(run, took_part)


def _raster(took_part: Participation) -> Drawing:
    clients = list(took_part)
    last = max(max(rounds) for rounds in took_part.values())
    arrived = [(r, row) for row, client in enumerate(clients) for r, ok in took_part[client].items() if ok]
    failed = [(r, row) for row, client in enumerate(clients) for r, ok in took_part[client].items() if not ok]

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        fill_cells(axes, arrived, facecolor=BLUE, edgecolor="none", label="took part")
        fill_cells(axes, failed, facecolor="none", edgecolor=ORANGE, linewidth=1.2)
        if failed:
            x, y = zip(*failed, strict=True)
            axes.plot(x, y, linestyle="", marker="x", markersize=5, color=ORANGE, markeredgewidth=1.6, label="failed")
        every = -(-len(clients) // 30)
        axes.set_yticks(range(0, len(clients), every), [str(client) for client in clients[::every]])
        axes.set_ylim(len(clients) - 0.4, -0.6)
        axes.set_ylabel("client")
        axes.grid(visible=False)
        round_axis(axes, 1, last, ticks=6 if narrow else 12)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)

    most = max(took_part, key=lambda client: len(took_part[client]))
    rows = tuple(
        (client, r, "took part" if ok else "failed")
        for client in clients
        for r, ok in sorted(took_part[client].items())
    )
    height = 130 + max(60, 13 * len(clients))
    return make_drawing(
        "participation",
        "Who took part",
        "Each filled cell is an answer that reached the server, a crossed one is a failure. The more often a client"
        " takes part, the more the server can add up about it.",
        f"Raster of {counted(len(clients), 'client')} by {counted(last, 'round')}: client {most} was asked most"
        f" often, {counted(len(took_part[most]), 'time')}; {counted(len(failed), 'failure')}.",
        Table("Who took part", ("client", "round", "outcome"), rows),
        draw,
        height=height,
        narrow_height=height,
    )


def _histogram(run: RunFiles, took_part: Participation) -> Drawing:
    times = Counter(len(rounds) for rounds in took_part.values())
    shown = sorted(times)
    population = run.summary.population or len(took_part)
    never = population - len(took_part)
    reached = f"{counted(len(took_part), 'client')} of {population:,} took part at all; the others sent nothing."
    if not never:
        reached = f"All {counted(population, 'client')} took part at some time."
    parts = [f"{counted(times[t], 'client')} took part in {counted(t, 'round')}" for t in shown]

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        bars = axes.bar(shown, [times[t] for t in shown], color=BLUE, width=0.7)
        if len(shown) <= (5 if narrow else 12):
            axes.bar_label(bars, [f"{times[t]:,}" for t in shown], padding=3, color=INK)
            axes.margins(y=0.15)
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("rounds in which a client took part")
        axes.set_ylabel("clients")
        axes.set_xlim(min(shown) - 0.7, max(max(shown), 4) + 0.7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return make_drawing(
        "participation",
        "How often clients took part",
        f"{reached} The further to the right, the more the server can add up about a client.",
        f"Bar chart: {'; '.join(parts[:10])}.",
        Table("How often clients took part", ("rounds", "clients"), ((0, never), *((t, times[t]) for t in shown))),
        draw,
        height=280,
        narrow_height=270,
    )


def _messages_table(run: RunFiles) -> Table:
    """What crossed the wire in each round."""
    rows = []
    scale, unit = (1e6, "MB") if max(m.bytes for m in run.messages) >= 1e5 else (1e3, "kB")
    for round_, messages in run.messages_by_round.items():
        sent = [m for m in messages if m.direction == "sent" and m.kind != "error"]
        back = [m for m in messages if m.direction == "received" and m.kind != "error"]
        models = sum(m.clients or 1 for m in sent)
        down, up = sum(m.bytes * (m.clients or 1) for m in sent), sum(m.bytes for m in back)
        errors = sum(m.kind == "error" for m in messages)
        kept = sum(m.file is not None for m in messages)
        norms = [m.norm for m in back if m.norm is not None]
        mean = float(np.mean(norms)) if norms else None
        rows.append((round_, models, len(back), errors, down / scale, up / scale, kept, mean))
    back_name = "sums received" if run.scenario.defence.secure_aggregation else "updates received"
    sizes = (f"sent, {unit}", f"received, {unit}")
    columns = ("round", "models sent", back_name, "failures", *sizes, "tensors kept", "mean norm")
    table = Table("Messages by round", columns, tuple(rows))
    shown = tuple(table.shown(SHOWN_ROUNDS))
    note = (
        f"{len(shown)} of {len(rows)} rounds are shown; all are in transcript/messages.jsonl."
        if len(shown) < len(rows)
        else ""
    )
    return Table(table.title, columns, shown, note, folded=len(shown) > UNFOLDED)


def kept(run: RunFiles) -> Paragraph:
    """What lies on the disk of what was seen."""
    lines = [m for m in run.messages if m.file]
    files = [size for name, size in run.transcript_sizes.items() if name.endswith(".safetensors")]
    text = (
        f"Kept in the transcript: the tensors of {len(lines):,} of {counted(len(run.messages), 'message')},"
        f" {words.size(sum(files))} in {counted(len(files), 'file')}."
    )
    missing = sorted({m.file for m in lines if m.file and m.file not in run.transcript_sizes})
    if missing:
        return Paragraph(
            f"{text} {counted(len(missing), 'file')} that the transcript names are missing: {missing[0]}.",
            "warning",
        )
    return Paragraph(f"{text} A real server could have kept everything that is listed here.")


def _failures(run: RunFiles) -> list[Block]:
    if not run.failures:
        return [Paragraph("No client failed.")]
    rows = tuple((m.round, m.client, m.reason or "no reason given") for m in run.failures)
    note = f"The first {MOST_FAILURES} of {len(rows)} are shown." if len(rows) > MOST_FAILURES else ""
    return [Table("Failures", ("round", "client", "reason"), rows[:MOST_FAILURES], note)]
