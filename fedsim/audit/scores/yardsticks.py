# SPDX-License-Identifier: Apache-2.0
"""What "near" means for a picture, a row of a table and a text: a distance, what is success, and scores of pairs.

Inputs are first brought to a common form, `prepare`: pictures to values in [0, 1]; rows to one number a column (a
standardised number, or the place of a category); texts to their tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.attacks.observation import Knowledge
from fedsim.audit.bounds import Distance
from fedsim.audit.scores.perceptual import gradient_distance, mean_squared_error, psnr, ssim
from fedsim.data.table import CategoricalColumn, NumericColumn, TableEncoding

NEAR = 0.1
"""The default η: pictures of at least 20 dB; at most one cell, or one token, of ten wrong."""
TOLERANCE = 0.319
"""Standard deviations within which a number of a table counts as right (TabLeak, Vero et al. 2023)."""
CERTAIN = 0.05
"""Standard deviations within which a number of a table must be, if the attack has certified its row."""
HALF_LEVEL = 1 / 510
"""Half a grey level of 256: a picture with every pixel within it is the same picture once it is saved."""
MARGIN_DB = 1.0
"""By how many dB a picture must be nearer to its original than a stranger's guess, to be better than that."""
_SAME = 1e-3  # standard deviations within which a number without countable decimals is the same

WORST = {"psnr": 0.0, "ssim": 0.0, "mse": 1.0, "perceptual": 1.0}
"""What an item that was not found counts as in the means; 0 for everything else."""


@dataclass(frozen=True, eq=False)
class Yardstick:
    """How one kind of data is measured; all functions take what `prepare` gives."""

    within: str
    """What success at η says, for people; {eta} stands for the number."""
    prepare: Callable[[Tensor], Tensor]
    distance: Distance
    """(n, ...), (N, ...) -> (n, N)"""
    exact: Distance
    """The same shape, true where two are the same for all practical purposes."""
    metrics: Callable[[Tensor, Tensor], dict[str, Tensor]]
    """(k, ...), (k, ...) -> named scores (k,) of the pairs"""
    guess: Callable[[Tensor], Tensor]
    """(N, ...) -> (...): the best single guess from a prior's rows"""
    same: tuple[Distance, float]
    """A distance, and within which of it lies at least whatever is exact: for counting over many rows."""
    certain: Distance
    """As `exact`: true where an item is what a certificate must mean."""
    certain_within: str
    """What that says, for people."""
    unlike: Distance
    """(n, ...), (N, ...) -> (n, N): how unlike two are to whoever wants to recognise one, from 0 (a copy) to 1."""
    clearly_nearer: Callable[[float, float], bool]
    """Whether the first distance is smaller than the second by more than luck."""
    doubled: Distance | None = None
    """As `kappa` takes it."""
    cells: Distance | None = None
    """(k, ...), (k, ...) -> (k, columns): which cells or tokens of the pairs are right."""


def yardstick(knowledge: Knowledge, *known: Tensor) -> Yardstick:
    """The yardstick for data of this kind; `known` are all rows that may say what the range of values is."""
    if knowledge.kind == "image":
        low, high = _value_range(knowledge, known)
        return _picture_yardstick(lambda x: (x.double() - low) / (high - low))
    if knowledge.kind == "text":
        length = knowledge.input_shape[-1]
        equal = torch.full((length,), 0.5, dtype=torch.float64)
        return _cell_yardstick(lambda x: x.double().reshape(len(x), length), equal, equal, equal, text=True)
    return _table_yardstick(knowledge)


# --- pictures -------------------------------------------------------------------------------------------------------


def _value_range(knowledge: Knowledge, known: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    if knowledge.value_range is not None:
        low, high = (bound.double() for bound in knowledge.value_range)
        return low, torch.where(high > low, high, low + 1)
    values = torch.cat([x.double().flatten() for x in known if x.numel()] or [torch.zeros(1, dtype=torch.float64)])
    low, high = values.min().clamp(max=0.0), values.max().clamp(min=1.0)
    return low, high


def _picture_yardstick(prepare: Callable[[Tensor], Tensor]) -> Yardstick:
    return Yardstick(
        within="root mean square error at most {eta:g} of the value range, {decibels:.0f} dB or better",
        prepare=prepare,
        distance=_rms,
        exact=_same_picture,
        metrics=_picture_metrics,
        guess=lambda rows: rows.mean(0),
        same=(_rms, HALF_LEVEL),  # no pixel off by more, hence not the root of the mean square
        certain=_same_picture,
        certain_within="every pixel within half a grey level of 256",
        unlike=_unlike_pictures,
        clearly_nearer=lambda mine, theirs: mine <= theirs * 10 ** (-MARGIN_DB / 20) and mine < theirs,
    )


def _rms(a: Tensor, b: Tensor) -> Tensor:
    """(n, N): root mean square error."""
    return torch.cdist(a.flatten(1), b.flatten(1)) / math.sqrt(math.prod(a.shape[1:]))


def standardised(pictures: Tensor) -> Tensor:
    """(n, pixels): each picture with mean 0 and length 1, so that brightness and contrast do not count."""
    flat = torch.nan_to_num(pictures.detach().double().flatten(1))
    flat = flat - flat.mean(1, keepdim=True)
    return F.normalize(flat, dim=1)


def _unlike_pictures(a: Tensor, b: Tensor) -> Tensor:
    """1 − cosine, halved, of standardised pictures without what all of b have in common, which recognises nobody."""
    a, b = standardised(a), standardised(b)
    middle = b.mean(0)
    return (1 - F.normalize(a - middle, dim=1) @ F.normalize(b - middle, dim=1).T) / 2


def _unlike_texts(a: Tensor, b: Tensor) -> Tensor:
    """1 − the share of tokens that two texts have in common, in any order, counted with repetition."""
    size = 1 + int(max(a.max(), b.max()))
    bags = [torch.zeros(len(x), size).scatter_add_(1, x.long().clamp(min=0), torch.ones(x.shape)) for x in (a, b)]
    return torch.stack([1 - torch.minimum(bag, bags[1]).sum(1) / a.shape[1] for bag in bags[0]]).double()


def _same_picture(a: Tensor, b: Tensor) -> Tensor:
    most = torch.cdist(a.flatten(1), b.flatten(1), p=math.inf)
    return most <= HALF_LEVEL


def _picture_metrics(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    mse = mean_squared_error(a, b)
    return {"psnr": psnr(mse), "ssim": ssim(a, b), "mse": mse, "perceptual": gradient_distance(a, b)}


# --- rows and texts -------------------------------------------------------------------------------------------------


def _table_yardstick(knowledge: Knowledge) -> Yardstick:
    encoding = knowledge.encoding if isinstance(knowledge.encoding, TableEncoding) else None
    if encoding is None:
        width = math.prod(knowledge.input_shape)
        near = torch.full((width,), TOLERANCE, dtype=torch.float64)
        return _cell_yardstick(
            lambda x: x.double().flatten(1), near, 2 * near, torch.full_like(near, _SAME), text=False
        )
    rows = [_tolerances(column) for column in encoding.columns]
    near, twice, same = torch.tensor(rows, dtype=torch.float64).T
    return _cell_yardstick(partial(_cells_of, encoding), near, twice, same, text=False)


def _tolerances(column: NumericColumn | CategoricalColumn) -> tuple[float, float, float]:
    """Within which a cell is right, two right ones are of each other, and it is the same."""
    if isinstance(column, CategoricalColumn):
        return 0.5, 0.5, 0.5
    grid = _SAME if column.decimals is None else 0.5 * 10.0**-column.decimals / column.scale
    near = max(TOLERANCE, grid)  # what rounds to the very value is right
    return near, 2 * near, grid


def _cells_of(encoding: TableEncoding, x: Tensor) -> Tensor:
    """(n, columns): standardised numbers, and the places of the categories."""
    columns = zip(encoding.columns, encoding.slices().values(), strict=True)
    cells = [
        x[:, where].argmax(1) if isinstance(column, CategoricalColumn) else x[:, where.start]
        for column, where in columns
    ]
    return torch.stack([cell.double() for cell in cells], dim=1)


def _cell_yardstick(
    prepare: Callable[[Tensor], Tensor], near: Tensor, twice: Tensor, same: Tensor, *, text: bool
) -> Yardstick:
    def metrics(a: Tensor, b: Tensor) -> dict[str, Tensor]:
        right = {"tokens_right": _right(near, a, b).double().mean(1)}
        if text:
            return right | _rouge(a, b)
        return {"cells_right": right["tokens_right"], "cells_exact": _right(same, a, b).double().mean(1)}

    def guess(rows: Tensor) -> Tensor:
        # What is compared by equality is guessed by its mode, a number by its median.
        return torch.where(near == twice, rows.mode(0).values, rows.median(0).values)

    what = "tokens" if text else "cells"
    sure = torch.where(near == twice, near, torch.maximum(same, torch.tensor(CERTAIN, dtype=torch.float64)))
    return Yardstick(
        within=f"at most {{eta:.0%}} of the {what} wrong",
        prepare=prepare,
        distance=partial(_wrong, near),
        exact=lambda a, b: _wrong(same, a, b) == 0,
        metrics=metrics,
        guess=guess,
        same=(partial(_wrong, same), 0.0),
        certain=lambda a, b: _wrong(sure, a, b) == 0,
        certain_within="every token equal" if text else f"categories equal, numbers within {CERTAIN} std",
        unlike=_unlike_texts if text else partial(_wrong, near),
        clearly_nearer=lambda mine, theirs: theirs - mine >= NEAR - 1e-9,
        doubled=None if text else partial(_wrong, twice),
        cells=partial(_right, near),
    )


def _wrong(tolerance: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """(n, N): the share of the cells that differ by more than their tolerance."""
    if (tolerance == 0.5).all():  # equality
        return torch.cdist(a, b, p=0) / len(tolerance)
    wrong = torch.zeros(len(a), len(b), dtype=a.dtype)
    for column, most in enumerate(tolerance.tolist()):  # column by column, because all at once would not fit
        wrong += (a[:, None, column] - b[None, :, column]).abs() > most
    return wrong / len(tolerance)


def _right(tolerance: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """(k, columns)"""
    return (a - b).abs() <= tolerance


def _rouge(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """ROUGE-1, -2 and -L (Lin 2004), as F1 on tokens: shared tokens, shared pairs of neighbours, longest common row."""
    pairs = [([int(t) for t in x], [int(t) for t in y]) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    scores = {
        "rouge_1": [rouge_n(x, y, 1) for x, y in pairs],
        "rouge_2": [rouge_n(x, y, 2) for x, y in pairs],
        "rouge_l": [rouge_l(x, y) for x, y in pairs],
    }
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in scores.items()}


def rouge_n(a: Sequence[int], b: Sequence[int], n: int) -> float:
    """F1 of the n-grams that two texts share, counted with repetition."""
    first, second = (Counter(zip(*(text[i:] for i in range(n)), strict=False)) for text in (a, b))
    total = sum(first.values()) + sum(second.values())
    return 2 * sum((first & second).values()) / total if total else float(list(a) == list(b))


def rouge_l(a: Sequence[int], b: Sequence[int]) -> float:
    """F1 of the longest common subsequence."""
    lengths = [0] * (len(b) + 1)
    for token in a:
        diagonal = 0
        for place, other in enumerate(b, 1):
            above = lengths[place]
            lengths[place] = diagonal + 1 if token == other else max(above, lengths[place - 1])
            diagonal = above
    return 2 * lengths[-1] / (len(a) + len(b)) if a or b else 1.0
