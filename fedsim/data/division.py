# SPDX-License-Identifier: Apache-2.0
"""The random part of a partition: an owner for every row (divided), or the rows of one client (drawn)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from fedsim.data.dataset import Array, Rows

Rng = np.random.Generator


def even_owner(n: int, population: int, rng: Rng) -> Rows:
    """Sizes that differ by at most one."""
    return rng.permutation(np.arange(n) * population // n)


def dirichlet_owner(labels: Array, population: int, alpha: float, rng: Rng) -> Rows:
    """For every class, the clients' shares are Dirichlet(alpha, ..., alpha); its shuffled rows are cut accordingly."""
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        ends = np.round(np.cumsum(_dirichlet(rng, alpha, population)) * len(rows))
        owner[rows] = np.minimum(np.searchsorted(ends, np.arange(len(rows)), side="right"), population - 1)
    return owner


def _dirichlet(rng: Rng, alpha: float, k: int) -> Array:
    """Dirichlet(alpha, ..., alpha) of k shares; beyond these limits only floats overflow, nothing changes."""
    return rng.dirichlet(np.full(k, min(max(alpha, 1e-6), 1e9)))


def lift_smallest(owner: Rows, population: int, least: int, rng: Rng) -> None:
    """Clients below `least` get random rows of whoever is largest at that moment (`owner` is changed in place).

    Unlike drawing again until it fits, this ends for every population that has enough rows.
    """
    sizes = np.bincount(owner, minlength=population)
    short = np.flatnonzero(sizes < least)
    if not len(short):
        return
    held = {int(c): rng.permutation(np.flatnonzero(owner == c)).tolist() for c in np.flatnonzero(sizes > least)}
    largest = [(-len(rows), client) for client, rows in held.items()]
    heapq.heapify(largest)
    for client in short:
        for _ in range(least - int(sizes[client])):
            negative, giver = largest[0]
            owner[held[giver].pop()] = client
            heapq.heapreplace(largest, (negative + 1, giver))


def shard_owner(labels: Array, population: int, shards_per_client: int, rng: Rng) -> Rows:
    """Rows sorted by label are cut into equal shards, which are dealt at random."""
    order = rows_by_label(labels, rng)
    shards = population * shards_per_client
    dealt = rng.permutation(np.arange(shards) // shards_per_client)
    owner = np.empty(len(labels), dtype=np.int64)
    owner[order] = dealt[np.arange(len(labels)) * shards // len(labels)]
    return owner


def rows_by_label(labels: Array, rng: Rng) -> Rows:
    """All rows sorted by label, at random within one."""
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def power_law_sizes(n: int, population: int, exponent: float, least: int) -> Rows:
    """Sizes proportional to rank**-exponent, but at least `least`, that sum to n (largest remainders get the rest)."""
    weight = np.arange(1, population + 1, dtype=np.float64) ** -exponent
    free = np.ones(population, dtype=bool)
    while True:
        share = np.where(free, (n - least * (~free).sum()) * weight / weight[free].sum(), least)
        below = free & (share < least)
        if not below.any():
            break
        free &= ~below
    sizes = np.floor(share).astype(np.int64)
    rest = np.argsort(sizes - share, kind="stable")[: n - sizes.sum()]
    sizes[rest] += 1
    return sizes


@dataclass(frozen=True, eq=False)
class Labelled:
    """Rows grouped by label: class c has rows[first[c]:first[c] + sizes[c]]."""

    rows: Rows
    first: Rows
    sizes: Rows


def labelled(labels: Array) -> Labelled:
    """The rows of every class that occurs."""
    sizes = np.unique(labels, return_counts=True)[1]
    return Labelled(np.argsort(labels, kind="stable"), np.cumsum(sizes) - sizes, sizes)


def dirichlet_rows(data: Labelled, m: int, alpha: float, rng: Rng) -> Rows:
    """The m rows of one client, whose classes have the client's own shares p.

    p is proportional to g times the size of each class, where g follows Dirichlet(alpha, ..., alpha): what a client of
    a large divided population has. Counts are multinomial; what a class cannot give goes to the others.
    """
    share = _dirichlet(rng, alpha, len(data.sizes)) * data.sizes
    counts = rng.multinomial(m, share / share.sum())
    while (counts > data.sizes).any():
        counts = np.minimum(counts, data.sizes)
        room = np.where(counts < data.sizes, share, 0.0)
        room = room if room.sum() > 1e-300 else (data.sizes - counts).astype(np.float64)
        counts += rng.multinomial(m - counts.sum(), room / room.sum())
    return _distinct(data, counts, rng)


def _distinct(data: Labelled, counts: Rows, rng: Rng) -> Rows:
    """`counts[c]` different rows of every class c, uniformly: doubles are drawn again until there are none.

    One vectorised draw for all classes; where a class gives most of its rows, that would go on for long.
    """
    if (2 * counts > data.sizes).any():
        drawn = [f + rng.choice(n, k, replace=False) for f, n, k in zip(data.first, data.sizes, counts, strict=True)]
        return data.rows.take(np.concatenate(drawn))
    label = np.repeat(np.arange(len(counts)), counts)
    first, sizes = data.first[label], data.sizes[label]
    places = first + rng.integers(0, sizes)
    while True:
        places.sort()  # classes lie one after another, so a place stays beside its label
        doubles = np.flatnonzero(places[1:] == places[:-1])
        if not len(doubles):
            return data.rows.take(places)
        places[doubles] = first[doubles] + rng.integers(0, sizes[doubles])
