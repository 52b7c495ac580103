# SPDX-License-Identifier: Apache-2.0
"""How good a reconstruction is: beside the truth, beside a stranger's guess, and beside what the privacy claim allows.

Items and originals are paired one to one so that as many as possible are right at η, then as many as possible are
exact, then closest (optimal assignment, Kuhn 1955). An original without an item is a failure in every rate, and counts
as the worst value in every mean. What a stranger could have guessed from public rows is no leak, so every score stands
beside that guess.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedsim.attacks.exact_certificate import in_words
from fedsim.attacks.observation import Knowledge, Reconstruction
from fedsim.audit.bounds import Kappa
from fedsim.audit.scores.baseline import Baseline, best_guesses, stranger, within
from fedsim.audit.scores.comparison import Comparison, Outcome, compare, together
from fedsim.audit.scores.grades import GRADES, Grade, Shown, shown_by
from fedsim.audit.scores.pairing import (
    assign,
    certain_pairs,
    label_mismatch,
    mean_metrics,
    metric_names,
    near_and_exact,
    pair_metrics,
)
from fedsim.audit.scores.reader import reader
from fedsim.audit.scores.shares import Share
from fedsim.audit.scores.yardsticks import NEAR, Yardstick, yardstick
from fedsim.errors import AttackError
from fedsim.privacy.claim import PrivacyClaim

MOST_PRIOR_ROWS = 1000
"""Public rows that a guess is made from; more are left out."""


@dataclass(frozen=True)
class ItemScore:
    """One reconstructed item."""

    original: int
    """Which original it was paired with; -1: none."""
    right: bool
    """Within η of it."""
    exact: bool
    """Every pixel within half a grey level; every cell, every token the same."""
    leaked: bool
    """Right, where a stranger's best guess for this original is not."""
    confidence: float | None
    """A lower bound of the probability that it is right; None where the attack was not calibrated."""
    certified: bool
    label_right: bool | None
    metrics: Mapping[str, float]
    recognisable: bool | None = None
    """Nearer to its original than to any other example of the gallery; None: there was no gallery."""
    better: bool | None = None
    """Clearly nearer to its original than a stranger's guess; None: there were no public rows to guess from."""
    class_read: bool | None = None
    """Whether a second model, of public pictures only, reads the true class; None: there is none that can."""

    @property
    def grade(self) -> Grade:
        """The highest grade that it reaches; each includes those below it."""
        reached = {"exact": self.exact, "near": self.right, "recognisable": self.recognisable, "better": self.better}
        return next((grade for grade in reversed(GRADES) if reached.get(grade)), "nothing")


@dataclass(frozen=True)
class ReconstructionScore:
    """A reconstruction beside the truth."""

    attack: str
    kind: Literal["image", "table", "text"]
    originals: int
    found: int
    eta: float
    within: str
    """What "right" means, for people."""
    assignment: tuple[int, ...]
    items: tuple[ItemScore, ...]
    right: Share
    exact: Share
    leaked: Share
    certified: Share | None
    """Certified items that are right as `certified_within` says, of all certified ones; None: no certificates."""
    metrics: Mapping[str, float]
    """Means over the originals."""
    label_accuracy: float | None
    """Overlap of the counted labels with the true ones, regardless of order."""
    baseline: Baseline | None
    comparisons: tuple[Comparison, ...]
    cells: tuple[tuple[float, bool], ...] = ()
    """(confidence, right) of every cell, where the attack says how sure it is of each."""
    certified_within: str = ""
    """How close a certified item must be to be right, for people: far closer than η."""
    gallery: int = 0
    """How many other examples an original was told from; 0: too few, and nobody knows what is recognisable."""
    luck: float = 0.0
    """The probability that an item which has nothing to do with the originals passes for recognisable."""
    reader_accuracy: float | None = None
    """How often the second model reads public pictures right that it has not seen."""
    label_guess: float | None = None
    """`label_accuracy` of a stranger who knows the number of labels, and how common each is."""

    def at_least(self, grade: Grade) -> Share:
        """The originals of which at least so much is shown."""
        reached = GRADES[GRADES.index(grade) :]
        return Share(sum(item.grade in reached for item in self.items), self.originals)

    @property
    def class_read(self) -> Share | None:
        """The originals whose class the second model reads from the reconstruction."""
        if self.reader_accuracy is None:
            return None
        return Share(sum(item.class_read is True for item in self.items), self.originals)

    @property
    def reliability(self) -> tuple[tuple[float, bool], ...]:
        """(confidence, right) of every item, where the attack was calibrated."""
        return tuple((item.confidence, item.right) for item in self.items if item.confidence is not None)

    def sentence(self) -> str:
        """Did it work? For people."""
        if not self.originals:
            return "There was nothing to reconstruct."
        noun = {"image": "picture", "table": "row", "text": "text"}[self.kind] + ("" if self.originals == 1 else "s")
        if not self.found:
            if self.label_accuracy is not None:
                said = (
                    f"Labels only: {100 * self.label_accuracy:.0f}% of the labels of {self.originals} {noun} are right"
                )
                return said + ("." if self.label_guess is None else f" (a stranger's guess: {self.label_guess:.0%}).")
            return f"Nothing of {self.originals} {noun} was reconstructed."
        parts = [graded_counts((self,), noun), *_headline(self.metrics, self.baseline)]
        if self.baseline is not None:
            better = [item.better for item in self.items if item.better is not None]
            above = sum(better) if better else self.leaked.right
            parts.append(f"{above} {'better than' if better else 'beyond'} a stranger's guess")
        broken = [c for c in self.comparisons if c.verdict == "violated"]
        return ", ".join(parts) + (f"; {broken[0].sentence()}" if broken else ".")

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        fields = dataclasses.asdict(self)
        for name in ("right", "exact", "leaked", "certified"):
            share: Share | None = getattr(self, name)
            fields[name] = None if share is None else share.to_dict()
        if self.baseline is not None:
            fields["baseline"]["success"] = self.baseline.success.to_dict()
        fields["comparisons"] = [comparison.to_dict() for comparison in self.comparisons]
        fields["sentence"] = self.sentence()
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ReconstructionScore:
        """What `to_dict` wrote."""
        own = {key: value for key, value in fields.items() if key != "sentence"}
        shares = ("right", "exact", "leaked", "certified")
        own |= {name: None if own[name] is None else Share.from_dict(own[name]) for name in shares}
        baseline = own["baseline"]
        if baseline is not None:
            blind = {name: Kappa(**baseline[name]) for name in ("blind", "blind_exact")}
            own["baseline"] = Baseline(**{**baseline, **blind, "success": Share.from_dict(baseline["success"])})
        own["comparisons"] = tuple(Comparison.from_dict(entry) for entry in own["comparisons"])
        own["items"] = tuple(ItemScore(**entry) for entry in own["items"])
        own["assignment"] = tuple(own["assignment"])
        own["cells"] = tuple((float(sure), bool(right)) for sure, right in own["cells"])
        return cls(**own)


def graded_counts(scores: Sequence[ReconstructionScore], noun: str) -> str:
    """How many originals are shown at each grade, over several updates; each count includes those after it."""
    total = sum(score.originals for score in scores)
    counts = {grade: sum(score.at_least(grade).right for score in scores) for grade in GRADES}
    ends = f"{counts['near']:,} near, {counts['exact']:,} exact"
    if all(score.gallery for score in scores if score.found):
        return f"{counts['recognisable']:,} of {total:,} {noun} recognisable, {ends}"
    return f"{counts['near']:,} of {total:,} {noun} near, {counts['exact']:,} exact"


def score(
    reconstruction: Reconstruction,
    originals: Tensor,
    labels: Tensor,
    knowledge: Knowledge,
    *,
    claims: Sequence[PrivacyClaim] = (),
    prior: Tensor | None = None,
    prior_labels: Tensor | None = None,
    others: Tensor | None = None,
    eta: float = NEAR,
    clients: int = 1,
    client: int | None = None,
) -> ReconstructionScore:
    """Score a reconstruction against the originals (b, *input_shape) with their labels.

    `prior` are public rows, from which a stranger would guess; without them there is no baseline and no comparison
    with a claim. `others` are private rows that the update was not computed from: with the public ones they are the
    gallery among which an original must be recognised. `clients`: how many clients' examples the originals are, under
    secure aggregation; `client`: whose they are, so that several updates of one client are not taken for independent
    trials.
    """
    _check(reconstruction, originals, knowledge)
    public = None if prior is None or not len(prior) else prior[:MOST_PRIOR_ROWS]
    gallery = [rows[:MOST_PRIOR_ROWS] for rows in (prior, others) if rows is not None]
    stick = yardstick(knowledge, originals, *(() if public is None else (public,)))
    truth, found = stick.prepare(originals), stick.prepare(reconstruction.inputs.detach())
    pairs = assign(stick, found, truth, label_mismatch(reconstruction, labels), eta)
    assignment = [dict(pairs).get(item, -1) for item in range(len(found))]
    metrics = pair_metrics(stick, found, truth, pairs)
    near, same = near_and_exact(stick, found, truth, pairs, eta)
    baseline, guesses, guessed = None, None, [False] * len(truth)
    if public is not None:
        granted = labels if knowledge.labels is not None else None
        public_labels = None if prior_labels is None else prior_labels[: len(public)]
        baseline, guesses = stranger(stick, truth, granted, stick.prepare(public), public_labels, found, eta)
        guessed = [within(stick, guess, original, eta) for guess, original in zip(guesses, truth, strict=True)]
    rivals = torch.cat([stick.prepare(rows) for rows in gallery]) if gallery else truth[:0]
    second = by_class = None
    if knowledge.kind == "image" and public is not None and prior_labels is not None and len(found):
        seen, known = stick.prepare(public), prior_labels[: len(public)]
        second, by_class = reader(seen, known), best_guesses(stick, truth, labels, seen, known)
    shown = shown_by(stick, found, truth, pairs, labels, rivals, guesses, second, by_class)
    items = _items(reconstruction, labels, assignment, metrics, near, same, guessed, shown)
    certain = certain_pairs(stick, found, truth, pairs, _apart(reconstruction, originals), reconstruction.radius)
    sure = [place in certain for place, item in enumerate(items) if item.certified]
    only_counts = reconstruction.label_counts is not None and not len(found)  # it tried to rebuild nothing
    return ReconstructionScore(
        attack=reconstruction.attack,
        kind=knowledge.kind,
        originals=len(truth),
        found=len(found),
        eta=eta,
        within=stick.within.format(eta=eta, decibels=-20 * math.log10(eta) if eta else math.inf),
        assignment=tuple(assignment),
        items=items,
        right=Share(sum(item.right for item in items), len(truth)),
        exact=Share(sum(item.exact for item in items), len(truth)),
        leaked=Share(sum(item.leaked for item in items), len(truth)),
        certified=Share(sum(sure), len(sure)) if reconstruction.certified is not None else None,
        metrics=mean_metrics([metrics[item] for item, _ in pairs], len(truth), metric_names(stick, truth)),
        label_accuracy=_label_accuracy(reconstruction, labels, knowledge.classes),
        baseline=baseline,
        comparisons=() if only_counts else _compare(claims, items, len(truth), baseline, clients, client),
        cells=_cell_reliability(stick, reconstruction, found, truth, assignment),
        certified_within=_certified_within(stick, reconstruction, knowledge),
        gallery=shown.gallery,
        luck=shown.luck,
        reader_accuracy=shown.reader_accuracy,
        label_guess=_label_guess(labels, prior_labels, knowledge.classes),
    )


def _apart(reconstruction: Reconstruction, originals: Tensor) -> Tensor:
    """(n, N): the largest difference in any value."""
    items, truth = (each.detach().double().flatten(1) for each in (reconstruction.inputs, originals))
    return torch.cdist(items, truth, p=math.inf)


def _certified_within(stick: Yardstick, reconstruction: Reconstruction, knowledge: Knowledge) -> str:
    sure, radius = reconstruction.certified, reconstruction.radius
    if sure is None or radius is None or not sure.any():
        return stick.certain_within
    return f"every value within the radius of its certificate, at most {in_words(float(radius[sure].max()), knowledge)}"


def _compare(
    claims: Sequence[PrivacyClaim],
    items: Sequence[ItemScore],
    originals: int,
    baseline: Baseline | None,
    clients: int,
    client: int | None,
) -> tuple[Comparison, ...]:
    """Beside each claim: what is right, and what is exact."""
    if baseline is None:
        return ()
    kinds = (
        ("a likeness", "right", baseline.blind, baseline.chance),
        ("an exact copy", "exact", baseline.blind_exact, baseline.chance_exact),
    )
    found: list[Comparison] = []
    for what, name, blind, chance in kinds:
        hit = {item.original for item in items if getattr(item, name)}
        each = tuple(original in hit for original in range(originals))
        found += compare(claims, Outcome(what, each, max(1, len(items)), blind, chance, clients, client))
    return together(found)


def _check(reconstruction: Reconstruction, originals: Tensor, knowledge: Knowledge) -> None:
    n = len(reconstruction.inputs)
    for name, tensor in (("originals", originals), ("inputs", reconstruction.inputs)):
        if tensor.shape[1:] != knowledge.input_shape:
            raise AttackError(
                f"{name} of {reconstruction.attack} have shape {tuple(tensor.shape)}, but an input has"
                f" {knowledge.input_shape}; score what the attack was played on"
            )
    for name in ("score", "confidence", "labels", "cells", "certified", "radius"):
        value: Tensor | None = getattr(reconstruction, name)
        if value is not None and n and len(value) != n:
            raise AttackError(
                f"{name} of {reconstruction.attack} has {len(value)} entries for {n} items; give one each"
            )


# --- items ----------------------------------------------------------------------------------------------------------


def _items(
    reconstruction: Reconstruction,
    labels: Tensor,
    assignment: Sequence[int],
    metrics: Mapping[int, Mapping[str, float]],
    near: set[int],
    same: set[int],
    guessed: Sequence[bool],
    shown: Shown,
) -> tuple[ItemScore, ...]:
    mine, certified, sure = reconstruction.labels, reconstruction.certified, reconstruction.confidence
    return tuple(
        ItemScore(
            original=original,
            right=item in near,
            exact=item in same,
            leaked=item in near and not guessed[original],
            confidence=None if sure is None else float(sure[item]),
            certified=bool(certified[item]) if certified is not None else False,
            label_right=bool((mine[item] == labels[original]).all()) if mine is not None and original >= 0 else None,
            metrics=metrics.get(item, {}),
            recognisable=None if shown.recognisable is None else item in shown.recognisable,
            better=None if shown.better is None else item in shown.better,
            class_read=None if shown.class_read is None else item in shown.class_read,
        )
        for item, original in enumerate(assignment)
    )


def _cell_reliability(
    stick: Yardstick, reconstruction: Reconstruction, found: Tensor, truth: Tensor, assignment: Sequence[int]
) -> tuple[tuple[float, bool], ...]:
    sure = reconstruction.cells
    if sure is None or stick.cells is None:
        return ()
    pairs: list[tuple[float, bool]] = []
    for item, original in enumerate(assignment):
        right = torch.zeros(found.shape[1], dtype=torch.bool)
        if original >= 0:
            right = stick.cells(found[item : item + 1], truth[original : original + 1])[0]
        pairs += zip(sure[item].double().tolist(), right.tolist(), strict=False)
    return tuple(pairs)


def _label_accuracy(reconstruction: Reconstruction, labels: Tensor, classes: int) -> float | None:
    counts = reconstruction.label_counts
    if counts is None and reconstruction.labels is not None and len(reconstruction.labels):
        counts = torch.bincount(reconstruction.labels.flatten().long().clamp(min=0), minlength=classes)
    if counts is None or not labels.numel():
        return None
    true = torch.bincount(labels.flatten().long(), minlength=len(counts))
    overlap = torch.minimum(counts.double().clamp(min=0), true[: len(counts)].double()).sum()
    return float(overlap / max(labels.numel(), float(counts.sum())))


def _label_guess(labels: Tensor, public: Tensor | None, classes: int) -> float | None:
    """What `_label_accuracy` is for a stranger: Σ min(n p_y, n_y) / n, with p the frequencies of public labels."""
    if public is None or not public.numel() or not labels.numel():
        return None
    true = torch.bincount(labels.flatten().long(), minlength=classes).double()
    common = torch.bincount(public.flatten().long(), minlength=len(true)).double()[: len(true)]
    return float(torch.minimum(common / common.sum() * labels.numel(), true).sum() / labels.numel())


def _headline(metrics: Mapping[str, float], baseline: Baseline | None) -> list[str]:
    """The one mean that a reader looks for, with the guess beside it."""
    words = {
        "psnr": ("{:.1f} dB", "on average"),
        "cells_right": ("{:.0%}", "of the cells right"),
        "tokens_right": ("{:.0%}", "of the tokens right"),
    }
    for name, (value, meaning) in words.items():
        if name in metrics:
            guess = f" (a stranger's guess: {value.format(baseline.metrics[name])})" if baseline else ""
            return [f"{value.format(metrics[name])} {meaning}{guess}"]
    return []
