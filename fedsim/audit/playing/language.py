# SPDX-License-Identifier: Apache-2.0
"""Games of language models: how does this row go on, and which rows are there at all?

The adversary may only ask the model what comes next. A row counts as rebuilt if it is so word for word: how often that
happens with rows that were not trained on is subtracted, so that what any reader could have guessed does not count.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.audit.playing.arena import Arena, Numbers, Rows
from fedsim.audit.playing.shadows import Played, coins, draw, train_with
from fedsim.errors import AuditError
from fedsim.randomness import stream

CONTINUED = 5
"""Tokens by which a row must be continued as it is."""
EXTRACTED = 8
"""Tokens in a row that must be those of the data."""
_SAMPLES = 16
_REFERENCES = 4


def completion(arena: Arena, trials: int) -> Played:
    """Given its first half, does the model go on as the row does? (Carlini et al. 2023, definition 3.1.)"""
    flips, orders = coins(arena, trials), draw(arena, trials, "game rows")
    weights, half = train_with(arena, orders, flips), _length(arena) // 2
    right = np.zeros(trials)
    for k, order in enumerate(orders):
        row = arena.x[order[-1]]
        told = write_on(arena, weights[k], row[None, :half], half + CONTINUED)
        right[k] = torch.equal(told[0], row[: half + CONTINUED])
    said = f"{arena.work.steps} steps on {arena.rows} rows a trial; {half} tokens shown, the next {CONTINUED} asked for"
    return Played(flips, right, "replace", (said,))


def extraction(arena: Arena, trials: int) -> Played:
    """Heads: are eight tokens of what the model writes by itself in its data? Tails: in other data of the same size?

    Of several texts the adversary hands in the one that the model finds likelier than reference models do (Carlini et
    al. 2021, section 5.2).
    """
    flips, orders, length = coins(arena, trials), draw(arena, trials, "game rows"), _length(arena)
    if 2 * arena.rows > len(arena.x):
        raise AuditError(
            f"game RC-Untarg compares {arena.rows} rows with as many others, and there are {len(arena.x)}; set"
            " partition.examples_per_client to fewer"
        )
    weights = arena.train([order[: arena.rows] for order in orders])
    references = arena.train([order[: arena.rows] for order in draw(arena, _REFERENCES, "game shadows")], first=1 << 20)
    right = np.zeros(trials)
    for k, order in enumerate(orders):
        rng = stream(arena.seed, "game texts", k)
        begin = arena.x[torch.from_numpy(rng.choice(len(arena.x), _SAMPLES)), :1]
        texts = write_on(arena, weights[k], begin, length, rng)
        told = _surprise(arena, weights[k : k + 1], texts) - _surprise(arena, references, texts)
        data = order[: arena.rows] if flips[k] else order[-arena.rows :]
        right[k] = _is_in(texts[int(told.argmin())], arena, data)
    said = f"the best of {_SAMPLES} texts, by {_REFERENCES} reference models; {EXTRACTED} tokens in a row count"
    return Played(flips, right, "replace", (f"{arena.work.steps} steps on {arena.rows} rows a trial; {said}",))


def write_on(
    arena: Arena, weights: Tensor, prompts: Tensor, length: int, rng: np.random.Generator | None = None
) -> Tensor:
    """(n, length): the prompts (n, p), continued by the likeliest token each time or, with `rng`, by one drawn.

    What is not written yet is the token 0, so that a model that looks ahead sees nothing.
    """
    tokens = torch.zeros(len(prompts), _length(arena), dtype=torch.int64)
    tokens[:, : prompts.shape[1]] = prompts
    for place in range(prompts.shape[1], length):
        scores = arena.outputs(weights[None], tokens)[0, :, place - 1].double()
        if rng is not None:  # the largest of log p + Gumbel noise is a draw from p
            scores = scores.log_softmax(-1) + torch.from_numpy(rng.gumbel(size=scores.shape))
        tokens[:, place] = scores.argmax(-1)
    return tokens[:, :length]


def _surprise(arena: Arena, weights: Tensor, texts: Tensor) -> Numbers:
    """(n,): −log p of a token, mean over the text and over the models (K, P)."""
    scores = arena.outputs(weights, texts)[:, :, :-1].double()
    targets = texts[None, :, 1:].expand(len(weights), -1, -1)
    each = F.cross_entropy(scores.flatten(0, 2), targets.flatten(), reduction="none")
    means: Numbers = each.view(targets.shape).mean((0, 2)).numpy()
    return means


def _is_in(text: Tensor, arena: Arena, rows: Rows) -> bool:
    """Whether some EXTRACTED tokens in a row of a text are in a row of the data."""
    pieces = arena.x[rows].unfold(1, EXTRACTED, 1).flatten(0, 1)
    return bool((text.unfold(0, EXTRACTED, 1)[:, None] == pieces).all(-1).any())


def _length(arena: Arena) -> int:
    """T, the tokens of a row."""
    length = arena.x.shape[1]
    if length < 2 * CONTINUED:
        raise AuditError(f"data.length is {length}; texts are continued by {CONTINUED} tokens: give at least 10")
    return int(length)
