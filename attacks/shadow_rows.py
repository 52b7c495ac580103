# SPDX-License-Identifier: Apache-2.0
"""A batch of rows that the server makes itself, attacked like the real one.

How often cells are right depends on the network, the table, the size of the batch and the local work. All are at hand:
the reconstructed rows are a batch of this table as the server sees it. A client that held them would have sent
`shadow_client`; attacked in the same way, it shows what this attack reaches where the truth is known (a parametric
bootstrap, Efron and Tibshirani 1993, section 6.5). Such rows are easier than real ones, because the attack has found
them once already. So a shadow never raises a confidence by itself: it limits what a real batch may leave unexplained,
and enters a curve that was fitted on real batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedsim.attacks.cell_confidence import PROVED, UNEXPLAINED, cell_bounds, explains
from fedsim.attacks.ensemble import wrong_cells
from fedsim.attacks.observation import Knowledge, Observation, check_observation
from fedsim.attacks.shadow_client import shadow_client
from fedsim.data.table import TableEncoding
from fedsim.errors import AttackError

_WITHHELD = "no probability is given for cells of rows without a proof, because"


@dataclass(frozen=True, eq=False)
class Batch:
    """All rows that were found, by whichever route."""

    inputs: Tensor
    """(n, F) valid rows."""
    labels: Tensor
    evidence: Tensor
    """(n, columns, len(EVIDENCE)): see `cell_confidence`."""
    certified: Tensor
    loss: float
    """The matching loss of all rows together; NaN for several local steps."""
    unexplained: float
    """What the rows leave of the whole update, whatever its scale."""
    candidates: Tensor
    """(n, F) the rows again, those of an ensemble as one of its members has them."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Shadow:
    """How the attack fared on the batch that the server made."""

    unexplained: float
    right: int
    """Of the cells that were not proved."""
    cells: int


def shadow_of(
    batch: Batch,
    attack: Callable[[Observation], Batch],
    observation: Observation,
    knowledge: Knowledge,
    encoding: TableEncoding,
    seed: int,
) -> Shadow:
    """Send what a client with the candidate rows would have sent, and attack it.

    Raises:
        AttackError: where that is zero: a network that has learnt these rows shows nothing of them.
    """
    sent = shadow_client(observation, knowledge, batch.candidates, batch.labels, seed)
    check_observation(sent, knowledge)
    found = attack(sent)
    right = right_cells(found.inputs, batch.candidates, encoding)[found.evidence[..., 0] != PROVED]
    return Shadow(found.unexplained, int(right.sum()), right.numel())


def right_cells(found: Tensor, truth: Tensor, encoding: TableEncoding) -> Tensor:
    """(n, columns) bool: which cells are right, each row beside the true one with which most cells are."""
    wrong = wrong_cells(found[:, None], truth[None], encoding)
    rows, order = linear_sum_assignment(wrong.double().sum(2).numpy())
    right = torch.zeros(wrong.shape[0], wrong.shape[2], dtype=torch.bool)
    right[rows] = ~wrong[rows, order]
    return right


def bounds_with_shadow(
    batch: Batch,
    attack: Callable[[Observation], Batch],
    observation: Observation,
    knowledge: Knowledge,
    encoding: TableEncoding,
    seed: int,
    deadline: float | None = None,
) -> tuple[Tensor, str]:
    """(n, columns) lower bounds for all cells, and what they rest on, or why those of rows without a proof are 0."""
    reason, shadow = _hopeless(batch, observation, deadline), None
    if bool((batch.evidence[..., 0] == PROVED).all()):
        return cell_bounds(batch, None), "every row is proved"
    if reason is None:
        try:
            shadow = shadow_of(batch, attack, observation, knowledge, encoding, seed + 1)
        except AttackError as error:
            return cell_bounds(batch, None), f"{_WITHHELD} a shadow batch cannot be attacked: {error}"
        left = f"all rows together leave {batch.unexplained:.1e} of the update, a shadow batch {shadow.unexplained:.1e}"
        if deadline is not None and time.monotonic() > deadline:
            reason = "there was no time for a whole shadow batch"
        elif explains(batch, shadow):
            return cell_bounds(batch, shadow), f"calibrated with a shadow batch: {left}"
        else:
            reason = left
    return cell_bounds(batch, None), f"{_WITHHELD} {reason}"


def _hopeless(batch: Batch, observation: Observation, deadline: float | None) -> str | None:
    """Why a shadow batch would be in vain."""
    if observation.clients > 1:
        return "the update is a sum over several clients"
    if batch.unexplained > UNEXPLAINED:
        return f"all rows together leave {100 * batch.unexplained:.0f}% of the update"
    late = deadline is not None and time.monotonic() > deadline
    return "there was no time for a shadow batch" if late else None
