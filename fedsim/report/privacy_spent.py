# SPDX-License-Identifier: Apache-2.0
"""The privacy that was spent: by round, as a claim with everything that it rests on, and in a sentence for people."""

from __future__ import annotations

import math
import textwrap
from collections import Counter, defaultdict
from dataclasses import fields

from matplotlib.figure import Figure

from fedsim.errors import counted
from fedsim.privacy.claim import PrivacyClaim
from fedsim.report import words
from fedsim.report.blocks import Block, Bullets, Drawing, Paragraph, Section, Table
from fedsim.report.figures import COLOURS, DASHES, MARKERS, legend_below, make_drawing, round_axis
from fedsim.report.run_files import RunFiles, Spent

Key = tuple[float, str, str, str, int]  # delta, unit, adjacency, observer, and which of several that agree in all these


def no_claim(run: RunFiles) -> str:
    """What the absence of a claim means in this run."""
    defence = run.scenario.defence
    if defence.secure_aggregation:
        return "no privacy claim: the server sees the sum of each round's updates as it is"
    if defence.compression is not None:
        return "no privacy claim: the server sees every update, compressed, and no noise hides anything"
    if defence.client_dp or defence.example_dp:
        return "no privacy claim: clipping without noise supports none"
    return "no privacy claim: the server sees every update as it is"


def promises_noise(run: RunFiles) -> bool:
    """Whether the scenario asks for noise, so that a claim is to be expected."""
    parts = (run.scenario.defence.example_dp, run.scenario.defence.client_dp)
    return any(part is not None and part.noise_multiplier != 0 for part in parts)


def full_claim(spent: Spent | PrivacyClaim) -> str:
    """Everything without which ε means nothing, but ε itself."""
    parts = [f"δ\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{words.number(spent.delta)}", f"per {spent.unit}"]
    parts += [f"{spent.adjacency} adjacency"] if spent.adjacency else []
    parts += [f"observed by {spent.observer}"] if spent.observer else []
    return ", ".join(parts)


def privacy_spent(run: RunFiles) -> Section:
    """ε by round for each claim, and all fields of each claim."""
    lines = spent_lines(run)
    blocks: list[Block] = []
    if not run.claims and not lines:
        if promises_noise(run) and not run.finished:
            blocks.append(Paragraph("Nothing has been accounted for yet.", "note"))
        else:
            sentence = no_claim(run)
            blocks.append(Paragraph(f"{sentence[0].upper()}{sentence[1:]}.", "warning"))
            blocks.append(Paragraph(_no_claim_means(run)))
    if run.claims and not run.finished:
        blocks.append(Paragraph(f"The run has not ended. {_what_claims_cover(run)}", "note"))
    blocks += [Paragraph(claim.sentence(), "plain" if claim.finite else "warning") for claim in run.claims]
    if lines:
        blocks.append(_drawing(run, lines))
    if run.claims:
        blocks.append(_claims_table(run))
        blocks += [
            Bullets(f"Claim {number} holds only if", claim.assumptions)
            for number, claim in enumerate(run.claims, start=1)
            if claim.assumptions
        ]
    return Section("privacy", "Privacy spent", tuple(blocks))


def _what_claims_cover(run: RunFiles) -> str:
    """Of a deployment nobody knows beforehand who will be asked, and with how many rows."""
    if run.scenario.engine.kind == "deploy":
        return "The claims hold for what the clients have been asked for so far, and grow with every round."
    planned = counted(run.scenario.rounds, "planned round")
    return f"The claims hold for all {planned}; the figure shows what is spent."


def spent_lines(run: RunFiles) -> dict[Key, list[tuple[int, float]]]:
    """For each claim the points (round, ε) that the metrics hold, where ε is finite."""
    lines: defaultdict[Key, list[tuple[int, float]]] = defaultdict(list)
    for line in run.rounds:
        seen: Counter[tuple[float, str, str, str]] = Counter()
        for spent in line.privacy:
            same = (spent.delta, spent.unit, spent.adjacency, spent.observer)
            if math.isfinite(spent.epsilon):
                lines[(*same, seen[same])].append((line.round, spent.epsilon))
            seen[same] += 1
    return dict(lines)


def _no_claim_means(run: RunFiles) -> str:
    what = "the sums that it received" if run.scenario.defence.secure_aggregation else "the updates that it received"
    return (
        f"Nothing bounds what the server can infer from {what}: differential privacy needs noise, and none was added."
        " What attacks achieve on this transcript is a lower bound on what leaks, never an upper one."
    )


def _drawing(run: RunFiles, lines: dict[Key, list[tuple[int, float]]]) -> Drawing:
    labels = [_label(key, number, len(lines)) for number, key in enumerate(lines, start=1)]
    rounds = sorted({round_ for points in lines.values() for round_, _ in points})
    values = [dict(points) for points in lines.values()]
    rows = tuple((round_, *(line.get(round_) for line in values)) for round_ in rounds)

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        for number, (points, label) in enumerate(zip(lines.values(), labels, strict=True)):
            axes.plot(
                [r for r, _ in points],
                [e for _, e in points],
                color=COLOURS[number % len(COLOURS)],
                marker=MARKERS[number % len(MARKERS)],
                linestyle=DASHES[number % len(DASHES)],
                drawstyle="steps-post",  # nothing is spent between rounds
                markevery=max(1, len(points) // 25),
                label="\n".join(textwrap.wrap(label, 40 if narrow else 100)),
            )
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ε spent (δ and unit below)")
        round_axis(axes, 0, max(run.rounds_done, 1), ticks=6 if narrow else 12)
        legend_below(figure, axes, columns=1)

    last = "; ".join(
        f"ε ≤ {words.epsilon(points[-1][1])} at δ = {words.number(key[0])} per {key[1]} after round {points[-1][0]}"
        for key, points in lines.items()
    )
    return make_drawing(
        "privacy",
        "Privacy spent by round",
        "What each further round costs. A line never falls: what was revealed stays revealed. Compare lines only where"
        " δ, the unit, adjacency and the observer agree; they are different promises.",
        f"Line chart of the privacy spent by round: {last}.",
        Table("Privacy spent by round", ("round", *labels), rows, round_up=True),
        draw,
        height=290 + 22 * len(lines),
        narrow_height=290 + 56 * len(lines),
    )


def _label(key: Key, number: int, total: int) -> str:
    delta, unit, adjacency, observer, _ = key
    spent = Spent(epsilon=0.0, delta=delta, unit=unit, adjacency=adjacency, observer=observer)
    return (f"claim {number}: " if total > 1 else "") + f"ε at {full_claim(spent)}"


_FIELD_NAMES = {
    "epsilon": "ε at δ, per unit",
    "delta": "δ",
    "unit": "protected unit",
    "released": "what is released",
    "noise_multiplier": "noise multiplier σ",
    "sample_rate": "sample rate q",
    "compositions": "compositions T",
}


def _claims_table(run: RunFiles) -> Table:
    """One column for each claim, one row for each field of PrivacyClaim; the assumptions follow as lists."""
    rows = []
    for field in fields(PrivacyClaim):
        if field.name != "assumptions":
            values = [getattr(claim, field.name) for claim in run.claims]
            shown = [words.number(value) for value in values]
            if field.name == "noise_multiplier":  # all that is printed elsewhere: fewer digits could say more noise
                shown = [f"{value:.6g}" for value in values]
            if field.name == "epsilon":
                shown = [f"{words.epsilon(c.epsilon)} at δ = {words.number(c.delta)}, per {c.unit}" for c in run.claims]
            rows.append((_FIELD_NAMES.get(field.name, field.name.replace("_", " ")), *shown))
    columns = ("what the claim says", *(f"claim {number}" for number in range(1, len(run.claims) + 1)))
    return Table("The claims in full", columns, tuple(rows))
