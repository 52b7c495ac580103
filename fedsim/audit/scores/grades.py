# SPDX-License-Identifier: Apache-2.0
"""How much of an original a reconstruction shows, in grades.

| grade        | when                                                                                             |
|--------------|--------------------------------------------------------------------------------------------------|
| exact        | every pixel within half a grey level; every cell, every token the same                            |
| near         | within η of its original: 20 dB, or at most one cell or token of ten wrong                        |
| recognisable | nearer to its original than to every other example of a gallery of public and private examples    |
|              | (top-1 retrieval); or a second model reads the true class from it, and it is clearly nearer than   |
|              | the best guess of somebody who knows the class: a mean of two sevens of the batch is a seven       |
| better       | clearly nearer to its original than a stranger's best guess is (`MARGIN`)                         |
| nothing      | none of these                                                                                    |

A cut at 20 dB alone would call eight digits that anybody can read "0 of 8".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsim.audit.scores.reader import Reader
from fedsim.audit.scores.yardsticks import Yardstick

Grade = Literal["nothing", "better", "recognisable", "near", "exact"]
GRADES: tuple[Grade, ...] = ("nothing", "better", "recognisable", "near", "exact")
LEAST_GALLERY = 20
"""Other examples among which an original must be found; among fewer, retrieval succeeds by luck."""
COPY = 0.05
"""How unlike two examples may be, from 0 to 1, that retrieval takes for the same one (a neighbouring video frame)."""


@dataclass(frozen=True)
class Shown:
    """Which items show what of their originals; None: there is nothing to decide it by."""

    recognisable: set[int] | None
    better: set[int] | None
    class_read: set[int] | None
    gallery: int
    """How many other examples an original was told from; 0: too few."""
    luck: float
    reader_accuracy: float | None


def shown_by(
    stick: Yardstick,
    found: Tensor,
    truth: Tensor,
    pairs: Sequence[tuple[int, int]],
    labels: Tensor,
    others: Tensor,
    guesses: Tensor | None,
    second: Reader | None,
    class_guesses: Tensor | None,
) -> Shown:
    """What the paired items show: by retrieval among `others`, by a stranger's guesses, by a second model.

    `class_guesses` are the guesses of a stranger who knows the class of each original.
    """
    enough = len(others) >= LEAST_GALLERY
    alone = singled_out(stick, found, truth, pairs, others) if enough else None
    read = None
    if second is not None and second.reliable and labels.dim() == 1:
        read = {item for item, original in pairs if second.read(found[item][None])[0] == labels[original]}
    if alone is not None and read is not None and class_guesses is not None:
        alone |= read & better_than_guess(stick, found, truth, pairs, class_guesses)
    return Shown(
        recognisable=alone,
        better=None if guesses is None else better_than_guess(stick, found, truth, pairs, guesses),
        class_read=read,
        gallery=len(others) + len(truth) - 1 if enough else 0,
        luck=luck(len(truth), len(others)),
        reader_accuracy=None if read is None or second is None else second.accuracy,
    )


def singled_out(
    stick: Yardstick, found: Tensor, truth: Tensor, pairs: Sequence[tuple[int, int]], others: Tensor
) -> set[int]:
    """The items that are nearer to their own original than to any other example.

    The rivals of an original are the other originals and `others`, without copies of itself. A tie is not a success.
    """
    gallery = torch.cat([truth, others])
    if not pairs or not len(gallery):
        return set()
    items, originals = (list(side) for side in zip(*pairs, strict=True))
    unlike = stick.unlike(found[items], gallery)
    copies = stick.unlike(truth[originals], gallery) <= COPY
    own = unlike[range(len(pairs)), originals]
    copies[range(len(pairs)), originals] = True
    nearest_rival = unlike.masked_fill(copies, torch.inf).amin(1)
    return {item for item, alone in zip(items, (own < nearest_rival).tolist(), strict=True) if alone}


def luck(originals: int, others: int) -> float:
    """The probability that an item which has nothing to do with the originals is nearest to one of them."""
    return originals / (originals + others) if originals else 0.0


def better_than_guess(
    stick: Yardstick, found: Tensor, truth: Tensor, pairs: Sequence[tuple[int, int]], guesses: Tensor
) -> set[int]:
    """The items that are nearer to their original than a stranger's guess for it, by the yardstick's margin."""
    better = set()
    for item, original in pairs:
        mine, theirs = (
            float(stick.distance(rows[None], truth[original : original + 1]))
            for rows in (found[item], guesses[original])
        )
        if stick.clearly_nearer(mine, theirs):
            better.add(item)
    return better
