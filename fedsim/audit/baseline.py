# SPDX-License-Identifier: Apache-2.0
"""What a stranger achieves, without the update: a reconstruction that could have been guessed is no leak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.audit.bounds import Distance, Kappa, kappa
from fedsim.audit.pairing import mean_metrics, metric_names, pair_metrics
from fedsim.audit.shares import Share
from fedsim.audit.yardsticks import Yardstick


@dataclass(frozen=True)
class Baseline:
    """What somebody achieves who has seen the public rows, but not the update."""

    guess: str
    success: Share
    """Originals that the one best guess is right for."""
    metrics: Mapping[str, float]
    """Means over the originals."""
    blind: Kappa
    """κ_η: the success of the best blind guess on the public rows themselves."""
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
) -> tuple[Baseline, list[bool]]:
    """The stranger's guess for every original: one for all, or one for each label where the labels were granted."""
    by_label = granted is not None and public_labels is not None and granted.dim() == 1
    guesses = stick.guess(public).expand_as(truth).clone()
    if by_label and granted is not None and public_labels is not None:
        for label in granted.unique():
            if (public_labels == label).any():
                guesses[granted == label] = stick.guess(public[public_labels == label])
    guessed = [bool(stick.distance(g[None], t[None]) <= eta) for g, t in zip(guesses, truth, strict=True)]
    metrics = pair_metrics(stick, guesses, truth, [(i, i) for i in range(len(truth))])
    usable = found[torch.isfinite(found.flatten(1)).all(1)] if len(found) else found
    what = "the mean" if stick.cells is None else "the most frequent value, or the median, of each place"
    rows, (apart, limit) = public.float(), stick.same  # in half the precision, because all pairs are counted
    return Baseline(
        guess=f"{what} of {len(public)} public rows" + (" with the same label" if by_label else ""),
        success=Share(sum(guessed), len(guessed)),
        metrics=mean_metrics(list(metrics.values()), len(truth), metric_names(stick, truth)),
        blind=kappa(rows, stick.distance, eta, doubled=stick.doubled),
        chance=_hit(stick.distance, usable, public, eta),
        blind_exact=kappa(rows, apart, limit),
        chance_exact=_hit(apart, usable, public, limit),
    ), guessed


def _hit(distance: Distance, found: Tensor, public: Tensor, eta: float) -> float:
    """Share of the public rows that are within η of some item."""
    return float((distance(found, public) <= eta).any(0).double().mean()) if len(found) else 0.0
