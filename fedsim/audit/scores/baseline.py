# SPDX-License-Identifier: Apache-2.0
"""What a stranger achieves, without the update: a reconstruction that could have been guessed is no leak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.audit.bounds import Distance, Kappa, kappa
from fedsim.audit.scores.pairing import mean_metrics, metric_names, pair_metrics
from fedsim.audit.scores.shares import Share
from fedsim.audit.scores.yardsticks import Yardstick


@dataclass(frozen=True)
class Baseline:
    """What somebody achieves who has seen the public rows, but not the update."""

    guess: str
    success: Share
    """Originals that the one best guess is right for."""
    metrics: Mapping[str, float]
    """Means over the originals."""
    blind: Kappa
    """κ_η: the success of the best blind guess on the public rows themselves; where labels were granted, for the
    granted label for which guessing is easiest."""
    chance: float
    """Share of the public rows that some item of the reconstruction is right for: luck, or a prior that was learned."""
    blind_exact: Kappa
    """The same two for exact copies instead of η."""
    chance_exact: float


def stranger(
    stick: Yardstick,
    truth: Tensor,
    granted: Tensor | None,
    public: Tensor,
    public_labels: Tensor | None,
    found: Tensor,
    eta: float,
) -> tuple[Baseline, Tensor]:
    """How a stranger fares, and its guess for every original: one for all, or one a label where labels were granted."""
    by_label = granted is not None and public_labels is not None and granted.dim() == 1
    guesses = best_guesses(stick, truth, granted, public, public_labels)
    guessed = [within(stick, guess, original, eta) for guess, original in zip(guesses, truth, strict=True)]
    metrics = pair_metrics(stick, guesses, truth, [(i, i) for i in range(len(truth))])
    usable = found[torch.isfinite(found.flatten(1)).all(1)] if len(found) else found
    what = "the mean" if stick.cells is None else "the most frequent value, or the median, of each place"
    apart, limit = stick.same
    parts: list[tuple[Tensor, int]] = [(public, 1)]  # public rows, and how many originals are drawn like them
    if by_label and granted is not None and public_labels is not None:
        known, times = granted.unique(return_counts=True)
        parts = [(public[public_labels == label], int(n)) for label, n in zip(known, times, strict=True)]
    elif granted is not None:
        parts = []  # nothing is known about rows with these labels
    return Baseline(
        guess=f"{what} of {len(public):,} public rows" + (" with the same label" if by_label else ""),
        success=Share(sum(guessed), len(guessed)),
        metrics=mean_metrics(list(metrics.values()), len(truth), metric_names(stick, truth)),
        blind=_easiest(parts, stick.distance, eta, stick.doubled),
        chance=_chance(parts, stick.distance, usable, public, eta),
        blind_exact=_easiest(parts, apart, limit, None),
        chance_exact=_chance(parts, apart, usable, public, limit),
    ), guesses


def best_guesses(
    stick: Yardstick, truth: Tensor, labels: Tensor | None, public: Tensor, public_labels: Tensor | None
) -> Tensor:
    """The best guess for every original: one for all, or one for each label (n,) where they are known."""
    guesses = stick.guess(public).expand_as(truth).clone()
    if labels is not None and public_labels is not None and labels.dim() == 1:
        for label in labels.unique():
            if (public_labels == label).any():
                guesses[labels == label] = stick.guess(public[public_labels == label])
    return guesses


def within(stick: Yardstick, one: Tensor, other: Tensor, eta: float) -> bool:
    """Whether two examples are within η of each other."""
    return bool(stick.distance(one[None], other[None]) <= eta)


def _easiest(parts: list[tuple[Tensor, int]], distance: Distance, eta: float, doubled: Distance | None) -> Kappa:
    """The largest κ_η of the parts; where one holds no rows, nothing is known, and guessing may always succeed."""
    # In half the precision, because all pairs are counted.
    each = [kappa(rows.float(), distance, eta, doubled=doubled) for rows, _ in parts if len(rows)]
    known = max(each, key=lambda one: one.upper, default=Kappa(0.0, 1.0, 0))
    return known if len(each) == len(parts) else Kappa(known.lower, 1.0, known.rows)


def _chance(parts: list[tuple[Tensor, int]], distance: Distance, found: Tensor, public: Tensor, eta: float) -> float:
    """The mean over the originals of the share that is hit of the rows that each is drawn like; else of all rows."""
    shares = [(_hit(distance, found, rows if len(rows) else public, eta), times) for rows, times in parts]
    total = sum(times for _, times in shares)
    return sum(s * times for s, times in shares) / total if total else _hit(distance, found, public, eta)


def _hit(distance: Distance, found: Tensor, public: Tensor, eta: float) -> float:
    """Share of the public rows that are within η of some item."""
    return float((distance(found, public) <= eta).any(0).double().mean()) if len(found) else 0.0
