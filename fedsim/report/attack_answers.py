# SPDX-License-Identifier: Apache-2.0
"""Did an attack work? The question, what was tried and what was not, and the answer in grades and in one colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedsim.audit.reconstruction import ReconstructionScore, graded_counts
from fedsim.audit.scores.perceptual import HIGHEST_PSNR
from fedsim.audit.scores.shares import Share
from fedsim.errors import counted
from fedsim.report.attack_files import AttackedUpdate, AttackFiles
from fedsim.report.blocks import Tone
from fedsim.report.standing import Leak, Standing, tone

NOUNS = {"image": "picture", "table": "row", "text": "text"}
LUCKY = 0.01
"""How improbable it must be that so many reconstructions are recognisable by luck, to call it a leak."""


def did_it_work(files: AttackFiles) -> tuple[Tone, str]:
    """The question and the answer in a few sentences, over all updates together, and the colour."""
    return tone(standing_of(files)), " ".join([_question(files), _tried(files), *_answer(files)])


def standing_of(files: AttackFiles) -> Standing:
    """An attack that found nothing settles nothing; one that was not played or cannot be scored tested nothing."""
    leak = leak_of(files)
    tested = bool(files.scores) and leak == "nothing" and not _impossible(files)
    return Standing(tested="inconclusive" if tested else "untested", leak=leak)


def _impossible(files: AttackFiles) -> bool:
    """Whether the attack could be played on no update at all."""
    return bool(files.document.observations) and all(update.error for update in files.document.observations)


def leak_of(files: AttackFiles) -> Leak:
    """How much an attack shows that nobody could have guessed.

    Much: more originals are recognisable than luck explains, or one is near that a stranger would not have guessed, or
    an attack that looks for labels only has half of those that a stranger cannot guess. Without a truth only a
    certificate shows anything.
    """
    scores = files.scores
    if not scores:
        certified = sum(update.certified or 0 for update in files.document.observations)
        return "much" if certified else "unknown"
    near = any(item.leaked or (item.right and score.baseline is None) for score in scores for item in score.items)
    labels = _label_gain(scores)
    nothing_else = not any(score.found for score in scores)
    broken = any(comparison.verdict == "violated" for score in scores for comparison in score.comparisons)
    if near or broken or beyond_luck(scores) or (nothing_else and labels is not None and labels >= _MOST_LABELS):
        return "much"
    better = any(item.better for score in scores for item in score.items)
    return "little" if better or (labels is not None and labels > _SOME_LABELS) else "nothing"


def beyond_luck(scores: Sequence[ReconstructionScore]) -> bool:
    """Whether more originals are recognisable than items that have nothing to do with them would reach."""
    from scipy.stats import binom  # takes half a second to import

    graded = [score for score in scores if score.gallery]
    recognised = sum(item.recognisable is True for score in graded for item in score.items)
    tries, chance = sum(score.found for score in graded), max((score.luck for score in graded), default=0.0)
    return recognised > 0 and float(binom.sf(recognised - 1, tries, chance)) < LUCKY


def graded_total(files: AttackFiles) -> str:
    """For the top of the page: "8 of 8 pictures recognisable, 0 near, 0 exact"."""
    noun, found = NOUNS[files.document.kind], sum(update.found for update in files.document.observations)
    if _impossible(files):
        return "not played"
    if not files.scores:
        return f"{counted(found, noun)} offered, not scored"
    labels = _label_share(files.scores)
    if labels is not None and not found:
        return f"{100 * labels:.0f}% of the labels right"
    return graded_counts(files.scores, f"{noun}s")


def tried_by(attacks: Sequence[AttackFiles]) -> str:
    """The attacks on a run, for the top of the page: what was tried, and what was not."""
    updates = [(files, update) for files in attacks for update in files.document.observations]
    played = dict.fromkeys(name for files, update in updates for name in update.tried or (files.title,))
    left = dict.fromkeys(reason.partition(":")[0] for _, update in updates for reason in update.untried)
    missing = [name for name in left if name not in played]
    return f"tried: {', '.join(played)}" + (f"; not tried: {', '.join(missing)}" if missing else "")


# --- the question ---------------------------------------------------------------------------------------------------


def _question(files: AttackFiles) -> str:
    updates, noun = files.document.observations, NOUNS[files.document.kind]
    sums = any(update.client is None for update in updates)
    what = "1 update" if len(updates) == 1 else f"{len(updates):,} updates"
    if sums:
        what = "1 sum of updates" if len(updates) == 1 else f"{len(updates):,} sums of updates"
    if files.document.attack == "labels":
        return f"Can the server tell which labels were behind {what}?"
    return f"Can the server rebuild the {noun}s behind {what}?"


def _tried(files: AttackFiles) -> str:
    """What was played, with its limits, and what was not."""
    document = files.document
    played = list(dict.fromkeys(name for update in document.observations for name in update.tried))
    left = list(dict.fromkeys(reason for update in document.observations for reason in update.untried))
    strength = _limits(document.settings)
    if not played:
        return f"Tried: {document.attack} alone{strength}; no other attack is part of this answer."
    text = f"Tried: {', '.join(played)}{strength}."
    return text + (f" Not tried: {'; '.join(left)}." if left else "")


def _limits(settings: Mapping[str, object]) -> str:
    """How hard it tried: the settings that bound its work."""
    limits = [f"{settings['seconds']} s"] if settings.get("seconds") else []
    for noun in ("restart", "iteration"):
        most = settings.get(f"{noun}s")
        limits += [counted(most, noun)] if isinstance(most, int) else []
    return f", with at most {' and '.join(limits)} for each update" if limits else ""


# --- the answer -----------------------------------------------------------------------------------------------------


def _answer(files: AttackFiles) -> list[str]:
    document, scores = files.document, files.scores
    noun = NOUNS[document.kind]
    failed = [update for update in document.observations if update.error]
    if _impossible(files):
        return [f"It could not be played: {_sentence(failed[0].error or '')}", _UNKNOWN]
    if not scores:
        found = sum(update.found for update in document.observations)
        return [
            "Nobody here can say whether it worked: there is no truth to compare with. It offers"
            f" {counted(found, noun)}; what speaks for each stands beside it, and no more than that can be known."
        ]
    if not any(score.found for score in scores):
        return _labels_only(scores, noun)
    parts = [_in_grades(scores, noun), *_ungraded(scores), _against_guess(scores)]
    parts += _certificates(scores) + _failures(failed)
    return parts if leak_of(files) != "nothing" else [*parts, _UNKNOWN]


_SOME_LABELS, _MOST_LABELS = 0.05, 0.5
"""Shares of the labels that a stranger would have got wrong: from where labels leak a little, and much."""
_UNKNOWN = "What a stronger attack, or more time, would find is not known."


def _in_grades(scores: Sequence[ReconstructionScore], noun: str) -> str:
    """The counts, with what each grade means."""
    text = f"Found: {graded_counts(scores, f'{noun}s')}."
    graded = [score for score in scores if score.gallery]
    if graded:
        among = min(score.gallery for score in graded)
        lucky = sum(score.luck * score.found for score in graded)
        text += (
            f" Recognisable: nearer to its original than to any of {among:,} other {noun}s ({lucky:.2g} expected by"
            " luck)"
        )
        text += _second_model(graded, noun)
    return f"{text} Near: {scores[0].within}."


def _second_model(scores: Sequence[ReconstructionScore], noun: str) -> str:
    """What a second model, which knows public pictures only, makes of the reconstructions."""
    shares = [share for score in scores if (share := score.class_read) is not None]
    if not shares:
        return "."
    total = sum(shares, Share(0, 0))
    accuracy = min(score.reader_accuracy for score in scores if score.reader_accuracy is not None)
    return (
        ", or its class can be read and it is clearly nearer than the best guess by class. A second model, which knows"
        f" public {noun}s only ({100 * accuracy:.0f}% right on others), reads the true class from {total.right:,} of"
        f" {total.of:,}."
    )


def _ungraded(scores: Sequence[ReconstructionScore]) -> list[str]:
    if all(score.gallery for score in scores if score.found):
        return []
    return ["Whether more is recognisable was not graded: there are too few other examples to tell the originals from."]


def _labels_only(scores: Sequence[ReconstructionScore], noun: str) -> list[str]:
    originals, known = sum(score.originals for score in scores), _label_share(scores)
    if known is None:
        return [f"Found: nothing of {counted(originals, noun)}.", _UNKNOWN]
    guesses = [score.label_guess for score in scores if score.label_guess is not None]
    guess = f"; a stranger who knows how common each class is has {sum(guesses) / len(guesses):.0%}" if guesses else ""
    return [f"It counts labels only, and {known:.0%} of the labels of {counted(originals, noun)} are right{guess}."]


def _label_share(scores: Sequence[ReconstructionScore]) -> float | None:
    known = [score.label_accuracy for score in scores if score.label_accuracy is not None]
    return sum(known) / len(known) if known else None


def _label_gain(scores: Sequence[ReconstructionScore]) -> float | None:
    """The mean share of the labels right that a stranger would have got wrong; negative if the attack is worse."""
    compared = [
        (score.label_accuracy, score.label_guess or 0.0) for score in scores if score.label_accuracy is not None
    ]
    gains = [(right - guess) / (1 - guess) if guess < 1 else 0.0 for right, guess in compared]
    return sum(gains) / len(gains) if gains else None


def _against_guess(scores: Sequence[ReconstructionScore]) -> str:
    """The same measure for a stranger, who has not seen the update."""
    compared = [score for score in scores if score.baseline is not None]
    if not compared:
        return "There are no public rows to guess from, so that this cannot be compared with a guess."
    name = next(name for name in ("psnr", "cells_right", "tokens_right") if name in compared[0].metrics)
    mine = mean_over_originals(compared, {id(score): score.metrics for score in compared}, name)
    theirs = mean_over_originals(compared, {id(s): s.baseline.metrics for s in compared if s.baseline}, name)
    unit = "{:.1f} dB" if name == "psnr" else f"{{:.0%}} of the {name.removesuffix('_right')}"
    reached = f"{HIGHEST_PSNR:.0f} dB or more" if name == "psnr" and mine >= HIGHEST_PSNR else unit.format(mine)
    guess = compared[0].baseline.guess if compared[0].baseline else ""
    better = sum(item.better is True for score in compared for item in score.items)
    right, leaked = _total(scores, "right"), _total(scores, "leaked")
    text = (
        f"On average it reaches {reached}; a stranger's best guess ({guess}) reaches {unit.format(theirs)}, and"
        f" {better:,} of {sum(score.originals for score in compared):,} are clearly better than that guess."
    )
    guessed = right.right - leaked.right
    if not guessed:
        return text
    return f"{text} A stranger would have guessed {guessed:,} of the {right.right:,} that are near."


def _certificates(scores: Sequence[ReconstructionScore]) -> list[str]:
    certified = [score.certified for score in scores if score.certified is not None]
    sure = sum(certified, Share(0, 0))
    within = scores[0].certified_within or scores[0].within
    text = f"{sure.of:,} came with a certificate, and {sure.right:,} of those are right ({within})."
    return [text] if sure.of else []


def _failures(failed: Sequence[AttackedUpdate]) -> list[str]:
    reason = _sentence(failed[0].error or "") if failed else ""
    return [f"{counted(len(failed), 'update')} could not be attacked: {reason}"] if failed else []


def mean_over_originals(
    scores: Sequence[ReconstructionScore], metrics: Mapping[int, Mapping[str, float]], name: str
) -> float:
    """A metric, weighted by how many originals each update has."""
    total = sum(score.originals for score in scores)
    return sum(metrics[id(score)][name] * score.originals for score in scores) / max(total, 1)


def _total(scores: Sequence[ReconstructionScore], name: str) -> Share:
    return sum((getattr(score, name) for score in scores), Share(0, 0))


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
