# SPDX-License-Identifier: Apache-2.0
"""Sequences of tokens, place by place, by the span test of DAGER (Petrov et al. 2024).

A linear layer with inputs h_p and output gradients d_p, one of each for every place p of every sequence, has the weight
gradient G = Σ_p d_p h_p'. While the places are fewer than the width of h, its rows span exactly the inputs, so that a
guessed input can be tested: it is in the span, or it is not. In a causal decoder the input at a place depends on the
tokens up to it, so sequences grow token by token and every wrong token is refused at once.

Which layers: not the first attention. Its inputs are norm(E[v] + P[p]), and E[v] + P[p] = (E[v] + P[q]) + (E[w] + P[p])
- (E[w] + P[q]): where tokens recur, all their pairs with all places are in its span, and it tells tokens, not order.
The layers after the first softmax have no such relation: the first layer of each block's mlp and every later attention.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.transformer import Block, Transformer

_UNLIKELY = 4.0  # standard deviations of the wrong tokens' scores below their mean
_SHARP = 100.0  # a drop in the spectrum that no noise makes: random matrices have a few per cent between neighbours
_TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Span:
    """The row space of a layer's gradient, as far as it rises above the rounding and the noise in it."""

    test: Tensor
    """(d, d) diag(f / sqrt(s² + f²)) V': singular values s, right singular vectors V, noise floor f."""
    rank: int
    gap: float
    """The singular value at the rank over the one after it."""

    def log_distance(self, inputs: Tensor) -> Tensor:
        """log(||test h|| / ||h||) of inputs (n, d): about log(f / s) in the span, about 0 outside."""
        outside: Tensor = (inputs @ self.test.T).norm(dim=1) / inputs.norm(dim=1)
        return outside.clamp(min=_TINY).log()


def span_of(gradient: Tensor, places: int | None) -> Span | None:
    """The span of the inputs of a layer with this weight gradient (outputs, d); None where it is the whole space.

    The noise is read from the spectrum: from the singular value after the last that `places` inputs can cause, and
    where they are not known (or too many, but perhaps equal) after the widest gap.
    """
    _, values, vectors = torch.linalg.svd(gradient.double(), full_matrices=False)
    values = values.clamp(min=_TINY * float(values[0]))
    room = len(values) - 1  # the centring of LayerNorm takes one direction from whatever comes
    if places is not None and places < room:
        floor = values[places]
        rank = int((values > 10 * floor).sum())
    else:
        rank = int((values[: room - 1] / values[1:room]).argmax()) + 1
        floor = values[rank]
    gap = float(values[rank - 1] / values[rank]) if rank else 1.0
    if gap < _SHARP and (places is None or places >= room):
        return None
    return Span((floor / (values.square() + floor.square()).sqrt()).unsqueeze(1) * vectors, rank, gap)


@dataclass(frozen=True, eq=False)
class Prefix:
    """The first tokens of a sequence, with the keys and values that each block made of them."""

    tokens: tuple[int, ...]
    cache: tuple[Tensor, ...]
    """For each block (2, heads, t, head width)."""
    score: float = 0.0
    """Σ over places of the mean log-distance over layers."""
    sure: float = 1.0
    """Probability that no token is a wrong one that passed by chance."""
    clear: bool = True
    """Every token was below all that wrong tokens reach."""


@dataclass(frozen=True, eq=False)
class _Child:
    parent: Prefix
    token: int
    distance: float
    added: tuple[Tensor, ...]
    """For each block (2, heads, head width)."""


@dataclass(frozen=True, eq=False)
class Search:
    """How to grow sequences: a float64 model, the spans of its layers, the tokens to try and the limits."""

    model: Transformer
    spans: Mapping[str, Span]
    tokens: Tensor
    """(c,) the tokens that are tried at every place."""
    examples: int | None
    """At most as many prefixes are true."""
    beam: int
    deadline: float
    """On the clock of `time.monotonic`."""
    one_step: bool
    """Whether all inputs of a layer come from the same weights."""

    @property
    def sharp(self) -> bool:
        """Whether there is no noise to speak of: then a true token is always unmistakable."""
        return self.one_step and all(span.gap > _SHARP for span in self.spans.values())

    def run(self, length: int) -> list[Prefix]:
        """Every sequence of `length` tokens that the spans admit; shorter ones if the time ends before."""
        blocks: list[Block] = list(self.model.blocks.children())  # type: ignore[arg-type] # a Sequential of Blocks
        width = self.model.tokens.embedding_dim // blocks[0].heads
        empty = self.model.tokens.weight.new_zeros(2, blocks[0].heads, 0, width)
        prefixes = [Prefix((), tuple(empty for _ in blocks))]
        for _ in range(length):
            if time.monotonic() > self.deadline:
                break
            prefixes = self._kept([child for prefix in prefixes for child in self._children(prefix, blocks)])
        clear = [prefix for prefix in prefixes if prefix.clear]
        return clear if self.sharp and clear else prefixes

    def _children(self, parent: Prefix, blocks: list[Block]) -> list[_Child]:
        """The nearest continuations of a prefix: all by the first block's mlp, the best of them by every layer."""
        place = torch.tensor(len(parent.tokens))
        x = self.model.tokens(self.tokens) + self.model.positions(place)
        x, added = _attend(blocks[0], x, parent.cache[0])
        nearest = self.spans["blocks.0.mlp.0"].log_distance(blocks[0].norm2(x))
        best = nearest.argsort()[: max(8, 2 * (self.examples or 8))]
        x, distances, caches = x[best], [nearest[best]], [added[:, best]]
        for number, block in enumerate(blocks):
            if number:
                distances.append(self.spans[f"blocks.{number}.qkv"].log_distance(block.norm1(x)))
                x, added = _attend(block, x, parent.cache[number])
                distances.append(self.spans[f"blocks.{number}.mlp.0"].log_distance(block.norm2(x)))
                caches.append(added)
            x = x + block.mlp(block.norm2(x))
        mean = torch.stack(distances).mean(0)
        return [
            _Child(parent, int(self.tokens[best[i]]), float(mean[i]), tuple(added[:, i] for added in caches))
            for i in range(len(best))
        ]

    def _kept(self, children: list[_Child]) -> list[Prefix]:
        """The continuations that wrong tokens cannot explain; under noise also the best one of each prefix.

        Wrong are all but the `examples` nearest, so that their mean and spread can be taken without knowing the truth.
        """
        children = sorted(children, key=lambda child: child.distance)
        most = min(self.examples or self.beam, max(len(children) // 2, 1))
        wrong = torch.tensor([child.distance for child in children[most:]] or [0.0], dtype=torch.float64)
        mean, spread = float(wrong.mean()), max(float(wrong.std(correction=0)), 0.5 if self.sharp else 0.1)
        tried = len({child.parent for child in children}) * len(self.tokens)
        chosen = [child for child in children if child.distance < mean - _UNLIKELY * spread]
        if not self.sharp or not chosen:
            alone = {child.parent for child in children} - {child.parent for child in chosen}
            first = not children[0].parent.tokens
            others = [child for child in children if child not in set(chosen)]
            chosen += others[: max(most - len(chosen), 0)] if first else [_first_of(others, parent) for parent in alone]
        grown = [_grow(child, (child.distance - mean) / spread, tried) for child in chosen]
        limit = min(self.beam, 2 * self.examples) if self.examples else self.beam
        return sorted(grown, key=lambda prefix: (prefix.score, prefix.tokens))[:limit]


def _first_of(children: list[_Child], parent: Prefix) -> _Child:
    return next(child for child in children if child.parent is parent)


def _grow(child: _Child, deviations: float, tried: int) -> Prefix:
    parent = child.parent
    cache = tuple(torch.cat([old, new.unsqueeze(2)], 2) for old, new in zip(parent.cache, child.added, strict=True))
    chance = tried * 0.5 * math.erfc(-deviations / math.sqrt(2))  # how many wrong ones are expected to be as near
    return Prefix(
        (*parent.tokens, child.token),
        cache,
        parent.score + child.distance,
        parent.sure * max(0.0, 1 - chance),
        parent.clear and deviations < -_UNLIKELY,
    )


def _attend(block: Block, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """The next place of n alternatives x (n, dim): x + attention(norm1(x)), and keys and values (2, n, heads, w)."""
    q, k, v = block.qkv(block.norm1(x)).view(len(x), 3, block.heads, -1).unbind(1)
    past = torch.einsum("nhw,htw->nht", q, cache[0])
    own = (q * k).sum(-1, keepdim=True)
    weights = (torch.cat([past, own], -1) / math.sqrt(q.shape[-1])).softmax(-1)
    mixed = torch.einsum("nht,htw->nhw", weights[..., :-1], cache[1]) + weights[..., -1:] * v
    return x + block.proj(mixed.reshape(x.shape)), torch.stack([k, v])
