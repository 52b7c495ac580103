# SPDX-License-Identifier: Apache-2.0
"""A small decoder-only transformer: Vaswani et al. 2017 with the norm first, as in GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, dim) to (N, T, dim)."""
        x = x + self.proj(self._attention(self.qkv(self.norm1(x))))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y

    def _attention(self, qkv: Tensor) -> Tensor:
        """softmax(q k' / sqrt(d) + causal mask) v for every head.

        Written out, because the fused kernel of PyTorch has no second derivative, which attacks on gradients need.
        """
        n, t, width = qkv.shape
        q, k, v = qkv.view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(t, t, dtype=torch.bool, device=qkv.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        heads: Tensor = weights @ v
        return heads.transpose(1, 2).reshape(n, t, width // 3)


class Transformer(nn.Module):
    """Token and position embeddings, blocks, and a linear head that predicts each next token."""

    def __init__(self, vocabulary: int, length: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.title = f"transformer of {layers} blocks, width {dim}, {heads} heads"
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (N, T) to logits (N, T, vocabulary); the logits at a place depend on tokens up to it only.

        A distribution over the tokens (N, T, vocabulary) in the place of each is embedded as its mean.
        """
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], x.shape[1])
        embedded = x @ self.tokens.weight if x.is_floating_point() else self.tokens(x)
        logits: Tensor = self.head(self.norm(self.blocks(embedded + self.positions(places))))
        return logits
