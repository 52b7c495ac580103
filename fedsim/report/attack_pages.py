# SPDX-License-Identifier: Apache-2.0
"""A page for each attack: what the adversary knew, what it found beside the truth, and whether it worked, honestly.

Without a truth (a deployed federation's transcript) a page shows what the attacker sees: its reconstructions, and how
sure it is of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fedsim.audit.reconstruction import ReconstructionScore
from fedsim.audit.scores.comparison import Comparison, pooled
from fedsim.report import words
from fedsim.report.attack_answers import NOUNS, did_it_work, mean_over_originals
from fedsim.report.attack_figures import allowed_and_measured, reliability
from fedsim.report.attack_files import AttackedUpdate, AttackFiles
from fedsim.report.attack_items import side_by_side
from fedsim.report.blocks import Block, Bullets, Cell, Definitions, Paragraph, Section, Table
from fedsim.report.run_files import RunFiles

DEEDS = {
    "labels": "reads which classes were in the batch, and how many of each, from the last layer's gradient",
    "closed-form": "solves for the inputs by division and linear algebra: x = ∂L/∂W / ∂L/∂b, and its relatives",
    "exact": "finds the whole batch from the low rank and the sparsity of a linear-ReLU layer's gradient, with a proof",
    "gradient-matching": "searches for inputs whose gradient is the one that was observed",
    "tabular": "reconstructs rows of a table, exactly where it can, else by many starts that are matched and pooled",
    "text": "reads tokens off the embedding's gradient, and their order off the attention's",
    "fedavg": "simulates the client's local training on guessed inputs, and differentiates through it",
    "imprint": "reads what weights that were made to leak have collected",
    "auto": "tries what is exact first, then what fits the kind of data, and keeps the best by what the server can see",
}
MOST_CLASSES = 40  # of which counts are shown
METRICS = {
    "psnr": "mean PSNR, dB",
    "ssim": "mean SSIM",
    "perceptual": "perceptual distance",
    "cells_right": "cells right",
    "cells_exact": "cells exact",
    "tokens_right": "tokens right",
    "rouge_1": "ROUGE-1",
    "rouge_2": "ROUGE-2",
    "rouge_l": "ROUGE-L",
}


def attack_pages(run: RunFiles) -> tuple[Section, ...]:
    """One section for each attack that was played on the run."""
    return tuple(_page(run, files, number, len(run.attacks)) for number, files in enumerate(run.attacks, start=1))


def _page(run: RunFiles, files: AttackFiles, number: int, total: int) -> Section:
    document, scores = files.document, files.scores
    anchor = f"attack-{number}"
    compared = pooled([comparison for score in scores for comparison in score.comparisons])
    deed = DEEDS.get(document.attack, f"is called {document.attack}")
    tone, answer = did_it_work(files)
    knowledge = tuple(document.knowledge.items())
    blocks: list[Block | None] = [
        Paragraph(f"The attack {deed}."),
        Paragraph(answer, tone),
        Definitions(knowledge, "What the adversary knew") if knowledge else None,
        side_by_side(files, run.summary.class_names, _joint(run)),
        _summary(files),
        _label_table(files, run.summary.class_names),
        *_bounds(anchor, compared),
        _confidence_meaning(files),
        reliability(anchor, _confidence(files)),
        *_notes(document.observations),
    ]
    title = f"Attack {number}: {files.title}" if total > 1 else f"Attack: {files.title}"
    return Section(anchor, title, tuple(block for block in blocks if block is not None))


def _joint(run: RunFiles) -> str:
    return " " if getattr(run.scenario.data, "tokens", "characters") == "words" else ""


# --- tables ---------------------------------------------------------------------------------------------------------


def _summary(files: AttackFiles) -> Table | None:
    """One line for each update."""
    updates = files.document.observations
    if not updates:
        return None
    if not files.scores:
        plain = tuple((u.name, u.found, u.certified, u.loss, _mean_confidence(files, u)) for u in updates)
        shown = 5 if any(row[-1] is not None for row in plain) else 4
        heads = ("update", "found", "certified", "matching loss", "mean confidence")
        return Table("By update", heads[:shown], tuple(row[:shown] for row in plain))
    # Where an attack looks for labels only, no picture is compared with anything.
    names = [name for name in METRICS if any(name in score.metrics for score in files.scores if score.found)]
    columns = ("update", "originals", "found", "recognisable", "near", "exact", *(METRICS[name] for name in names))
    columns += ("labels right", "certified", "matching loss", "mean confidence")
    rows = tuple(_scored_row(files, update, names) for update in updates)
    rows += _guess_rows(files.scores, names, len(columns)) if names else ()
    empty = () if names else ("found", "recognisable", "near", "exact")
    said = [
        place
        for place, column in enumerate(columns)
        if column not in empty and any(row[place] is not None for row in rows)
    ]
    columns, rows = (tuple(columns[p] for p in said), tuple(tuple(row[p] for p in said) for row in rows))
    return Table("By update", columns, rows, _legend(files.scores))


def _scored_row(files: AttackFiles, update: AttackedUpdate, names: Sequence[str]) -> tuple[Cell, ...]:
    score = update.scored
    if score is None:
        return (update.name, None, update.found, *(None for _ in range(3 + len(names))), None, None, update.loss, None)
    recognisable = score.at_least("recognisable").right if score.gallery else None
    middle = (score.originals, score.found, recognisable, score.at_least("near").right, score.exact.right)
    metrics = (score.metrics.get(name) for name in names)
    end = (score.label_accuracy, update.certified, update.loss, _mean_confidence(files, update))
    return (update.name, *middle, *metrics, *end)


def _guess_rows(
    scores: Sequence[ReconstructionScore], names: Sequence[str], width: int
) -> tuple[tuple[Cell, ...], ...]:
    """A stranger's guess, over all updates."""
    compared = [score for score in scores if score.baseline is not None]
    if not compared:
        return ()
    guesses = {id(score): score.baseline.metrics for score in compared if score.baseline}
    success = [score.baseline.success for score in compared if score.baseline]
    total = sum(success[1:], success[0])
    means = [mean_over_originals(compared, guesses, name) for name in names]
    row: tuple[Cell, ...] = ("a stranger's guess", total.of, total.of, None, total.right, None, *means)
    return ((*row, *(None for _ in range(width - len(row)))),)


def _label_table(files: AttackFiles, names: Sequence[str]) -> Table | None:
    """How often each class was counted, beside the truth where it differs."""
    counted = [update for update in files.document.observations if update.label_counts]
    classes = max((len(update.label_counts or ()) for update in counted), default=0)
    if not 0 < classes <= MOST_CLASSES:
        return None
    columns = tuple(names) if len(names) == classes else tuple(str(label) for label in range(classes))
    rows = tuple((update.name, *_counts(update.label_counts or (), _true_counts(files, update))) for update in counted)
    return Table("Labels counted", ("update", *(f"class {name}" for name in columns)), rows)


def _true_counts(files: AttackFiles, update: AttackedUpdate) -> Counter[int] | None:
    labels = files.truth.get(f"{update.key}/labels")
    return None if labels is None else Counter(int(label) for label in labels.flatten().tolist())


def _counts(counted: Sequence[float], truth: Counter[int] | None) -> list[Cell]:
    if truth is None or all(count == truth[label] for label, count in enumerate(counted)):
        return [words.number(count) for count in counted]
    pairs = [(count, truth[label]) for label, count in enumerate(counted)]
    return [words.number(count) if count == true else f"{words.number(count)}, really {true}" for count, true in pairs]


def _legend(scores: Sequence[ReconstructionScore]) -> str:
    if not any(score.found for score in scores):
        return ""
    text = f"Near: {scores[0].within}. What was not found counts as the worst in every mean."
    if "perceptual" in scores[0].metrics:
        text += " Perceptual distance: differences of edges and brightness over several scales, 0 is the same."
    return text


def _mean_confidence(files: AttackFiles, update: AttackedUpdate) -> float | None:
    """Of the cells of a table, else of the items; None where it was not calibrated."""
    named = (files.found.get(f"{update.key}/{name}") for name in ("cells", "confidence"))
    confidence = next((tensor for tensor in named if tensor is not None and tensor.numel()), None)
    return float(confidence.double().mean()) if confidence is not None and update.event else None


def _confidence_meaning(files: AttackFiles) -> Paragraph:
    """What the confidences are the probability of, or that there are none."""
    events = dict.fromkeys(update.event for update in files.document.observations if update.event)
    if not events:
        return Paragraph(
            "No probability is given that an item without a certificate is right: this attack was not calibrated here."
            " Items are in the order of the attacker's own evidence. A small matching loss is no proof, because several"
            " batches may explain one update."
        )
    return Paragraph(f"A confidence is a lower bound of the probability that {'; or that '.join(events)}.")


def _bounds(anchor: str, compared: tuple[Comparison, ...]) -> list[Block]:
    if not compared:
        return []
    drawing = allowed_and_measured(anchor, compared)
    broken = [Paragraph(c.sentence(), "warning") for c in compared if c.verdict == "violated"]
    words_of = Bullets("What the claim says about it", tuple(c.sentence() for c in compared))
    return [*broken, *([drawing] if drawing else []), words_of]


def _confidence(files: AttackFiles) -> dict[str, list[tuple[float, bool]]]:
    plural = {"table": "cells"}
    scores = [update.scored for update in files.document.observations if update.event and update.scored]
    series = {
        plural.get(files.document.kind, "parts"): [pair for score in scores for pair in score.cells],
        f"{NOUNS[files.document.kind]}s": [pair for score in scores for pair in score.reliability],
    }
    return {what: pairs for what, pairs in series.items() if pairs}


def _notes(updates: Sequence[AttackedUpdate]) -> list[Block]:
    """What the attack said of itself, each once, and why it failed where it did."""
    said = Counter(note for update in updates for note in update.notes)
    errors = Counter(update.error for update in updates if update.error)
    items = tuple(f"{note} ({times} updates)" if times > 1 else note for note, times in (said + errors).items())
    return [Bullets("What the attack says of itself", items)] if items else []
