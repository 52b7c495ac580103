# SPDX-License-Identifier: Apache-2.0
"""A page for each attack: what the adversary knew, what it found beside the truth, and whether it worked, honestly.

Without a truth (a deployed federation's transcript) a page shows what the attacker sees: its reconstructions, and how
sure it is of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from fedsim.audit.reconstruction import ReconstructionScore
from fedsim.audit.scores.comparison import Comparison, pooled
from fedsim.audit.scores.perceptual import HIGHEST_PSNR
from fedsim.audit.scores.shares import Share
from fedsim.errors import counted
from fedsim.report import words
from fedsim.report.attack_figures import allowed_and_measured, reliability
from fedsim.report.attack_files import AttackedUpdate, AttackFiles
from fedsim.report.attack_items import side_by_side
from fedsim.report.blocks import Block, Bullets, Cell, Definitions, Paragraph, Section, Table
from fedsim.report.run_files import RunFiles

NOUNS = {"image": "picture", "table": "row", "text": "text"}
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
Tone = Literal["note", "warning"]
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
        Paragraph(f"The attack {deed}. It was played on {counted(len(document.observations), 'update')}."),
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


# --- the answer -----------------------------------------------------------------------------------------------------


def did_it_work(files: AttackFiles) -> tuple[Tone, str]:
    """The answer in a few sentences, over all updates together."""
    document, scores = files.document, files.scores
    noun = NOUNS[document.kind]
    failed = [update for update in document.observations if update.error]
    if failed and len(failed) == len(document.observations):
        return "note", f"It could not be played: {_sentence(failed[0].error or '')}"
    if not scores:
        found = sum(update.found for update in document.observations)
        return "note", (
            "Nobody here can say whether it worked: there is no truth to compare with. It offers"
            f" {counted(found, noun)}; what speaks for each stands beside it, and no more than that can be known."
        )
    right, exact, leaked = (_total(scores, name) for name in ("right", "exact", "leaked"))
    if not any(score.found for score in scores):
        return _labels_only(scores, noun, right.of)
    share = f"{right.right:,} of {counted(right.of, noun)}"
    text = f"{_yes_or_no(right, leaked, scores)} {share} {'was' if right.right == 1 else 'were'} reconstructed"
    text += f" ({scores[0].within}), {exact.right:,} of them exactly."
    text += f" {_against_guess(scores, right, leaked)}"
    certified = [score.certified for score in scores if score.certified is not None]
    if certified:
        sure = sum(certified[1:], certified[0])
        within = scores[0].certified_within or scores[0].within
        proved = f" {sure.of:,} came with a certificate, and {sure.right:,} of those are right ({within})."
        text += proved if sure.of else ""
    if failed:
        text += f" {counted(len(failed), 'update')} could not be attacked: {_sentence(failed[0].error or '')}"
    return ("warning" if leaked.right else "note"), text


def _yes_or_no(right: Share, leaked: Share, scores: Sequence[ReconstructionScore]) -> str:
    if right.right and not leaked.right and any(score.baseline for score in scores):
        return "No: what it found, a stranger could have guessed."
    if not right.right:
        return "No."
    if right.right == right.of:
        return "Yes, all of it."
    return "Yes, nearly all of it." if right.share >= 0.9 else "In part."


def _labels_only(scores: Sequence[ReconstructionScore], noun: str, originals: int) -> tuple[Tone, str]:
    known = [score.label_accuracy for score in scores if score.label_accuracy is not None]
    if not known:
        return "note", f"No. It found nothing of {counted(originals, noun)}."
    mean = sum(known) / len(known)
    return "warning" if mean > 0.5 else "note", (
        f"It counts labels only, and {100 * mean:.0f}% of the labels of {counted(originals, noun)} are right."
    )


def _against_guess(scores: Sequence[ReconstructionScore], right: Share, leaked: Share) -> str:
    """The same measure for a stranger, who has not seen the update."""
    compared = [score for score in scores if score.baseline is not None]
    if not compared:
        return "There are no public rows to guess from, so that this cannot be compared with a guess."
    name = next(name for name in ("psnr", "cells_right", "tokens_right") if name in compared[0].metrics)
    mine = _mean(compared, {id(score): score.metrics for score in compared}, name)
    theirs = _mean(compared, {id(s): s.baseline.metrics for s in compared if s.baseline}, name)
    unit = "{:.1f} dB" if name == "psnr" else f"{{:.0%}} of the {name.removesuffix('_right')}"
    reached = f"{HIGHEST_PSNR:.0f} dB or more" if name == "psnr" and mine >= HIGHEST_PSNR else unit.format(mine)
    guess = compared[0].baseline.guess if compared[0].baseline else ""
    text = f"On average it reaches {reached}; a stranger's best guess ({guess}) reaches {unit.format(theirs)}"
    if not right.right:
        return f"{text}."
    guessed = right.right - leaked.right
    return f"{text}, and finds {f'{guessed:,}' if guessed else 'none'} of those {right.right:,}."


def _mean(scores: Sequence[ReconstructionScore], metrics: Mapping[int, Mapping[str, float]], name: str) -> float:
    total = sum(score.originals for score in scores)
    return sum(metrics[id(score)][name] * score.originals for score in scores) / max(total, 1)


def _total(scores: Sequence[ReconstructionScore], name: str) -> Share:
    shares: list[Share] = [getattr(score, name) for score in scores]
    return sum(shares[1:], shares[0])


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


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
    columns = ("update", "originals", "found", "right", "exact", *(METRICS[name] for name in names))
    columns += ("labels right", "certified", "matching loss", "mean confidence")
    rows = tuple(_scored_row(files, update, names) for update in updates)
    rows += _guess_rows(files.scores, names, len(columns)) if names else ()
    empty = () if names else ("found", "right", "exact")
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
        return (update.name, None, update.found, None, None, *(None for _ in names), None, None, update.loss, None)
    middle = (score.originals, score.found, score.right.right, score.exact.right)
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
    means = [_mean(compared, guesses, name) for name in names]
    row: tuple[Cell, ...] = ("a stranger's guess", total.of, total.of, total.right, None, *means)
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
    text = f"Right: {scores[0].within}. What was not found counts as the worst in every mean."
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
