# SPDX-License-Identifier: Apache-2.0
"""Originals and reconstructions side by side: pictures, rows of a table, texts."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedsim.attacks.observation import Knowledge
from fedsim.audit.reconstruction import ItemScore
from fedsim.audit.scores.perceptual import HIGHEST_PSNR
from fedsim.audit.scores.yardsticks import yardstick
from fedsim.report.attack_files import AttackedUpdate, AttackFiles
from fedsim.report.blocks import Pair, Pairs, Part, Picture, Pictures

MOST_ITEMS = 24
SMALLEST_SIDE = 96  # pixels of a picture on the page
Decode = Callable[[Tensor], list[str]]


@dataclass(frozen=True, eq=False)
class Item:
    """One reconstruction, or an original that none was found for (`found` is None)."""

    update: AttackedUpdate
    order: float
    """The attacker's own order of its items: a score that is never shown."""
    confidence: float | None
    """A lower bound of the probability that it is right; None where the attack was not calibrated."""
    original: Tensor | None
    found: Tensor | None
    cells: Tensor | None
    certified: bool
    score: ItemScore | None


def items_of(files: AttackFiles) -> list[Item]:
    """Every item of every update, the surest first, and at the end what was not found."""
    found = [item for update in files.document.observations for item in _found(files, update)]
    missing = [item for update in files.document.observations for item in _missing(files, update)]
    return sorted(found, key=lambda item: -item.order) + missing


def _found(files: AttackFiles, update: AttackedUpdate) -> list[Item]:
    inputs = files.found.get(f"{update.key}/inputs")
    if inputs is None:
        return []
    names = ("score", "confidence", "cells", "certified")
    order, confidence, cells, certified = (files.found.get(f"{update.key}/{name}") for name in names)
    if not update.event:  # a run of before confidences were calibrated, or a table whose cells are only agreed upon
        order, confidence, cells = confidence if order is None else order, None, None
    truth, score = files.truth.get(f"{update.key}/inputs"), update.scored
    items = []
    for place in range(len(inputs)):
        one = score.items[place] if score is not None and place < len(score.items) else None
        paired = one is not None and one.original >= 0 and truth is not None
        items.append(
            Item(
                update=update,
                order=float(order[place]) if order is not None else 0.0,
                confidence=float(confidence[place]) if confidence is not None else None,
                original=truth[one.original] if paired and truth is not None and one is not None else None,
                found=inputs[place],
                cells=cells[place] if cells is not None else None,
                certified=bool(certified[place]) if certified is not None else False,
                score=one,
            )
        )
    return items


def _missing(files: AttackFiles, update: AttackedUpdate) -> list[Item]:
    truth, score = files.truth.get(f"{update.key}/inputs"), update.scored
    if truth is None or score is None:
        return []
    return [
        Item(update, 0.0, None, truth[place], None, None, False, None)
        for place in range(len(truth))
        if place not in score.assignment
    ]


def shown(items: Sequence[Item]) -> tuple[list[Item], str]:
    """At most MOST_ITEMS, from both ends, and a sentence that says so."""
    if len(items) <= MOST_ITEMS:
        return list(items), "All are shown, the surest first." if len(items) > 1 else ""
    half = MOST_ITEMS // 2
    return [*items[:half], *items[-half:]], (
        f"{MOST_ITEMS} of {len(items):,} are shown: the {half} that the attacker is surest of, then the {half} that it"
        " is least sure of or did not find."
    )


def side_by_side(files: AttackFiles, vocabulary: Sequence[str], joint: str) -> Pictures | Pairs | None:
    """The block for this kind of data; None where nothing was found and nothing is known."""
    items, note = shown(items_of(files))
    if not items or all(item.found is None for item in items):
        return None
    kind = files.document.kind
    if kind == "image":
        return Pictures("Side by side", tuple(_picture(item) for item in items), note)
    if kind == "text":
        return Pairs("Side by side", (), tuple(_text(item, vocabulary, joint) for item in items), _marks(items, note))
    names, decode = _reader(files)
    pairs = tuple(_row(item, files, decode) for item in items)
    return Pairs("Side by side", names, pairs, _marks(items, note))


def _marks(items: Sequence[Item], note: str) -> str:
    marked = any(item.original is not None and item.found is not None for item in items)
    return f"{note} What is wrong is marked.".strip() if marked else note


def percent_down(probability: float) -> str:
    """Whole per cent, rounded down: a lower bound must not grow by rounding."""
    return f"{math.floor(100 * probability + 1e-9)}%"


def _caption(item: Item) -> str:
    parts = [item.update.name[0].upper() + item.update.name[1:]]
    if item.found is None:
        return f"{parts[0]}: not found"
    if item.confidence is not None and not item.certified:  # a certified item wears a badge, which says more
        parts.append(f"at least {percent_down(item.confidence)} sure")
    if item.score is not None:
        parts += _metrics(item.score)
    return ", ".join(parts)


def _metrics(score: ItemScore) -> list[str]:
    metrics = score.metrics
    if score.original < 0:
        return ["is nobody's"]
    grade = {"better": ["better than a guess"], "nothing": []}.get(score.grade, [score.grade])
    if "psnr" in metrics:
        ssim = [f"SSIM {metrics['ssim']:.2f}"] if "ssim" in metrics else []
        high = f"{HIGHEST_PSNR:.0f} dB or more" if metrics["psnr"] >= HIGHEST_PSNR else f"{metrics['psnr']:.1f} dB"
        return [high, *ssim, *grade]
    name = "cells" if "cells_right" in metrics else "tokens"
    return [f"{100 * metrics[f'{name}_right']:.0f}% of the {name} right", *grade]


# --- pictures -------------------------------------------------------------------------------------------------------


def _picture(item: Item) -> Picture:
    right = item.score.grade != "nothing" if item.score is not None else (False if item.found is None else None)
    return Picture(
        original=None if item.original is None else png_link(item.original),
        found=None if item.found is None else png_link(item.found),
        caption=_caption(item),
        alt=item.update.name,
        right=right,
        certified=item.certified,
    )


def png_link(picture: Tensor) -> str:
    """A picture with values in [0, 1] as PNG in a `data:` link, enlarged by a whole factor without smoothing."""
    values = torch.nan_to_num(picture.detach().double(), nan=0.5).clamp(0, 1)
    values = values.reshape(-1, *values.shape[-2:]) if values.dim() > 1 else values.reshape(1, 1, -1)
    pixels: np.ndarray = np.round(255 * values.numpy()).astype(np.uint8)
    pixels = pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0]
    factor = max(1, math.ceil(SMALLEST_SIDE / max(pixels.shape[:2])))
    buffer = io.BytesIO()
    Image.fromarray(pixels.repeat(factor, 0).repeat(factor, 1)).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


# --- rows -----------------------------------------------------------------------------------------------------------


def _reader(files: AttackFiles) -> tuple[tuple[str, ...], Decode]:
    """The names of a table's columns, and how a row reads; without an encoding, the numbers as the model takes them."""
    encoding = files.encoding
    if encoding is None:
        width = next(tensor.shape[1] for name, tensor in files.found.items() if name.endswith("/inputs"))
        return tuple(f"input {place}" for place in range(1, width + 1)), lambda row: [f"{v:.3g}" for v in row.tolist()]

    def decode(row: Tensor) -> list[str]:
        return [_value(value) for value in encoding.decode(row[None]).iloc[0].tolist()]

    return tuple(column.name for column in encoding.columns), decode


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _row(item: Item, files: AttackFiles, decode: Decode) -> Pair:
    wrong = _wrong_cells(item, files)
    sure = item.cells.tolist() if item.cells is not None else None
    original = None if item.original is None else tuple(Part(text) for text in decode(item.original))
    if item.found is None:
        return Pair(original, None, _caption(item))
    texts = decode(item.found)
    bounds = sure if sure is not None and len(sure) == len(texts) else [0.0] * len(texts)
    notes = [f"≥ {percent_down(bound)}" if bound else "" for bound in bounds]
    found = tuple(Part(text, bool(bad), note) for text, bad, note in zip(texts, wrong, notes, strict=True))
    return Pair(original, found, _caption(item), item.certified)


def _wrong_cells(item: Item, files: AttackFiles) -> list[bool]:
    """By the same yardstick as the score."""
    if item.found is None:
        return []
    stick = yardstick(Knowledge("table", tuple(item.found.shape), 0, encoding=files.encoding))
    found = stick.prepare(item.found[None])
    if item.original is None or stick.cells is None:
        return [False] * found.shape[1]
    return [not right for right in stick.cells(found, stick.prepare(item.original[None]))[0].tolist()]


# --- texts ----------------------------------------------------------------------------------------------------------


def _text(item: Item, vocabulary: Sequence[str], joint: str) -> Pair:
    def parts(tokens: Tensor, other: Tensor | None) -> tuple[Part, ...]:
        numbers = [int(token) for token in tokens.flatten().tolist()]
        others = numbers if other is None else [int(token) for token in other.flatten().tolist()]
        read = [vocabulary[n] if 0 <= n < len(vocabulary) else f"⟨{n}⟩" for n in numbers]
        shown = [text.replace("\n", "⏎\n") + joint for text in read]
        return tuple(Part(text, a != b) for text, a, b in zip(shown, numbers, others, strict=True))

    original = None if item.original is None else parts(item.original, None)
    found = None if item.found is None else parts(item.found, item.original)
    return Pair(original, found, _caption(item), item.certified)
