# SPDX-License-Identifier: Apache-2.0
"""The ladder: the attack that proves most for the least work, chosen by what the server sees and never by the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fedsim.attacks.matching import client_gradient
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction, check_observation
from fedsim.errors import AttackError
from fedsim.scenario import (
    AutomaticAttack,
    ClosedFormAttack,
    ExactAttack,
    FedAvgAttack,
    GradientMatchingAttack,
    ImprintAttack,
    TabularAttack,
    TextAttack,
)

EXPLAINED = 1e-6  # a relative matching loss below float32's own: the reconstruction explains the whole update


def automatic(
    observation: Observation, knowledge: Knowledge, settings: AutomaticAttack, *, seed: int = 0
) -> Reconstruction:
    """Climb from closed form over exact inversion to optimisation; stop where an update is explained.

    An update is explained when every item is certified, or when the reconstruction's own gradient is the observed one.
    Where no rung explains it, the result with the most certified items is returned; among equals, that with the
    smallest matching loss.
    """
    check_observation(observation, knowledge)
    found: list[Reconstruction] = []
    impossible, spared = list(_unfit(observation, knowledge)), []
    for name, attack, rung_settings in _rungs(observation, knowledge, settings):
        if found and explains(found[-1], observation.batch_size):
            spared.append(f"{name}: not needed, the update is explained")
            continue
        try:
            result = attack(observation, knowledge, rung_settings, seed=seed)
        except AttackError as error:
            impossible.append(f"{name}: {error}")
            continue
        found.append(result)
    if not found:
        raise AttackError("no attack fits this update: " + "; ".join(impossible))
    best = min(found, key=_rank)
    tried = tuple(each.attack for each in found)
    note = (
        f"tried, in this order: {', '.join(tried)}; shown is the one with most certified items, then the least matching"
        " loss"
    )
    return replace(best, notes=(note, *best.notes), tried=tried, untried=(*impossible, *spared))


def _rank(result: Reconstruction) -> tuple[int, float, int]:
    """The least is the best: more certified items, a smaller loss (one that is not known is the largest), more items.

    What is proven comes first, since a result that has only a part of the batch has no loss to be compared by.
    """
    certified = 0 if result.certified is None else int(result.certified.sum())
    return -certified, math.inf if math.isnan(result.loss) else result.loss, -len(result.inputs)


def explains(result: Reconstruction, batch_size: int | None) -> bool:
    """Whether a reconstruction leaves nothing of the update unexplained."""
    complete = len(result.inputs) > 0 and (batch_size is None or len(result.inputs) >= batch_size)
    certified = result.certified is not None and bool(result.certified.all())
    return complete and (certified or result.loss < EXPLAINED)


def _unfit(observation: Observation, knowledge: Knowledge) -> Iterator[str]:
    """The attacks that are not among the rungs for this update, with the reason."""
    if knowledge.active is None:
        yield "imprint: the server did not craft its weights"
    if knowledge.kind == "image" and client_gradient(observation) is None:
        yield "gradient-matching: after several local steps there is no single gradient to match"


def _rungs(
    observation: Observation, knowledge: Knowledge, settings: AutomaticAttack
) -> Iterator[tuple[str, Callable[..., Reconstruction], Any]]:
    """The attacks to try, with their settings; each module is imported when its turn comes."""
    budget: dict[str, Any] = {"seconds": settings.seconds}
    if knowledge.active is not None:
        from fedsim.attacks.imprint import imprint

        yield "imprint", imprint, ImprintAttack(name="imprint", **budget)
    if knowledge.kind == "text":
        from fedsim.attacks.text import text

        yield "text", text, TextAttack(name="text", **budget)
        return
    from fedsim.attacks.closed_form import closed_form

    yield "closed-form", closed_form, ClosedFormAttack(name="closed-form", **budget)
    if knowledge.kind == "table":
        from fedsim.attacks.tabular import tabular

        yield "tabular", tabular, TabularAttack(name="tabular", **budget)
        return
    from fedsim.attacks.exact import exact
    from fedsim.attacks.fedavg import fedavg
    from fedsim.attacks.gradient_matching import gradient_matching

    yield "exact", exact, ExactAttack(name="exact", **budget)
    if client_gradient(observation) is None:  # several local steps: no single gradient to match
        yield "fedavg", fedavg, FedAvgAttack(name="fedavg", exact_first=False, **budget)
        return
    yield "gradient-matching", gradient_matching, GradientMatchingAttack(name="gradient-matching", **budget)
