# SPDX-License-Identifier: Apache-2.0
"""What is allowed but should be known before a run: a δ that is too large, natural clients or classes left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fedsim.privacy import rows_needed
from fedsim.scenario import ColumnPartition

if TYPE_CHECKING:
    from fedsim.federation.plan import Plan


MOST_CLIENTS = 10_000


def notes(plan: Plan) -> list[str]:
    """One sentence each."""
    return [
        *_rows_of_a_deployment(plan),
        *_large_deltas(plan),
        *_sums_of_one(plan),
        *_clients_left_out(plan),
        *_empty_classes(plan),
    ]


def _rows_of_a_deployment(plan: Plan) -> list[str]:
    """What is planned for a deployment supposes that clients hold what the server's file would give them."""
    if plan.scenario.engine.kind != "deploy" or not any(rows_needed(plan.scenario)):
        return []
    sizes = {plan.partition.size(client) for client in range(min(plan.population, MOST_CLIENTS))}
    held = f"{min(sizes):,}" if len(sizes) == 1 else f"{min(sizes):,} to {max(sizes):,}"
    defence = plan.scenario.defence
    found = defence.example_dp is not None and defence.example_dp.target_epsilon is not None
    return [
        f"ε before a run{', and the noise that target_epsilon asks for,' if found else ''} supposes that each client"
        f" holds {held} rows, as this machine's file would give it; what is"
        " claimed of the run follows from the rows that the clients say or vouch for (`fedsim deploy check` with a"
        " client's policy)"
    ]


def _large_deltas(plan: Plan) -> list[str]:
    """With δ ≥ 1/n, publishing everything about one unit of n, chosen at random, would keep the claim."""
    units = {"client": plan.population, "example": len(plan.dataset.x_train)}
    large = dict.fromkeys((c.delta, c.unit, units[c.unit]) for c in plan.claims if c.delta * units.get(c.unit, 0) >= 1)
    return [
        f"δ = {delta:g} is not below 1/{count:,}, one over the number of {unit}s: the claim would allow to publish one"
        f" {unit} outright; choose a delta well below {1 / count:.2g}"
        for delta, unit, count in large
    ]


def _sums_of_one(plan: Plan) -> list[str]:
    """Poisson sampling may draw one client, and not to answer then would tell that."""
    alone = sum(len(cohort) == 1 for cohort in plan.cohorts)
    if not alone or not plan.scenario.defence.secure_aggregation:
        return []
    return [
        f"in {alone:,} of {len(plan.cohorts):,} rounds one client is drawn, whose noised update is then the sum; raise"
        " cohort.size or rate"
    ]


def _clients_left_out(plan: Plan) -> list[str]:
    """Natural clients are drawn at random where cohort.population is smaller than their number."""
    section, dataset = plan.scenario.partition, plan.dataset
    if not isinstance(section, ColumnPartition) or plan.scenario.cohort.population is None:
        return []
    if section.column is None:
        there = len(dataset.group_names)
    else:
        there = dataset.table[section.column].nunique() if dataset.table is not None else 0
    if there <= plan.population:
        return []
    return [
        f"cohort.population {plan.population:,} leaves out {there - plan.population:,} of {there:,} natural clients and"
        " their rows; leave it away to have them all"
    ]


def _empty_classes(plan: Plan) -> list[str]:
    """Classes that the model can predict but never sees: a gap in the numbers of the labels, say."""
    dataset = plan.dataset
    if dataset.y_train.dim() > 1:
        return []
    counts = torch.bincount(dataset.y_train, minlength=dataset.classes)
    empty = [dataset.class_names[k] if dataset.class_names else str(k) for k in (counts == 0).nonzero().flatten()]
    if not empty:
        return []
    shown = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
    return [f"{len(empty):,} of {dataset.classes:,} classes ({shown}) have no row to train on; number them from 0"]
