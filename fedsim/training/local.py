# SPDX-License-Identifier: Apache-2.0
"""The local work of a whole cohort: K clients trained at once, each with its own data, batches, noise and length.

Guarantees:
- A client's result does not depend, to the last bit, on who else is in the cohort, on their order, on the chunks in
  which they are computed, or on the number of threads. A client is a cohort of one.
- An example that is not in a client's batch (padding) contributes exactly nothing to it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedsim.errors import ModelError
from fedsim.randomness import ClientRandomness
from fedsim.training.batches import LocalWork, Rows, batch_schedule
from fedsim.training.chunk import Chunk
from fedsim.training.client import Client, CohortResult
from fedsim.training.layout import Layout, layout_of
from fedsim.training.one_by_one import train_one
from fedsim.training.replicas import ReplicaModel, Trial, expressible, mixes_examples, trial

_CACHE_BYTES = 48 << 20  # what the replicas of a chunk may need in one step: about the processor's last cache


def train_cohort(
    model: nn.Module,
    start: Tensor,
    x: Tensor,
    y: Tensor,
    members: Sequence[Rows],
    work: LocalWork,
    randomness: Sequence[ClientRandomness],
    *,
    chunk: int | None = None,
) -> CohortResult:
    """Do the local work of K clients that all start from the same weights.

    Args:
        model: the architecture; its own weights are neither read nor changed.
        start: (P,) the weights that the clients receive, in the order of `layout_of(model)`.
        x: (N, ...) the inputs of the whole training set, float32 or int64 tokens.
        y: (N,) int64 classes, or (N, T) int64 tokens to predict.
        members: for each client, the numbers of its rows.
        work: what each client does.
        randomness: for each client, where its batches and its noise come from.
        chunk: how many clients are computed at once; null: as many as fit the processor's cache.

    The loss is the cross-entropy, mean over the batch (of a sequence: over its tokens, then over the batch); with
    `example_dp` the gradient of a step is (Σ_i clip(g_i, C) + σC·N(0, I))/B for the expected batch size B. A client
    without rows does nothing: its update is 0.
    """
    layout = layout_of(model)
    _check(model, layout, start, x, y, members, work, randomness)
    clients = []
    for place, (rows, random) in enumerate(zip(members, randomness, strict=True)):
        if len(rows):
            generator = random.batches()
            clients.append(Client(place, rows, batch_schedule(len(rows), work, generator), work, random, generator))
    result = CohortResult.empty([len(rows) for rows in members], layout)
    if not clients:
        return result
    kernel = _kernel_for(model, layout, start, x, y)
    if kernel.trial.reason is not None:
        for client in clients:
            train_one(model, layout, start, x, y, client, work, result)
        return result
    with _single_threads() as threads:
        chunks = _chunks(clients, layout, kernel.trial, chunk, threads)
        if threads == 1 or len(chunks) == 1:
            for some in chunks:
                kernel.train(some, start, x, y, work, result)
        else:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                list(pool.map(lambda some: kernel.train(some, start, x, y, work, result), chunks))
    return result


def _check(
    model: nn.Module,
    layout: Layout,
    start: Tensor,
    x: Tensor,
    y: Tensor,
    members: Sequence[Rows],
    work: LocalWork,
    randomness: Sequence[ClientRandomness],
) -> None:
    """Refuse what cannot be trained."""
    if start.shape != (layout.size,):
        raise ModelError(f"the weights have shape {tuple(start.shape)}: this model needs a flat vector of {layout.size}")
    if len(members) != len(randomness):
        raise ValueError(f"{len(members)} clients but {len(randomness)} sources of randomness")
    if len(x) != len(y):
        raise ValueError(f"{len(x)} inputs but {len(y)} labels")
    mixing = mixes_examples(model)
    if work.example_dp is not None and mixing is not None:
        raise ModelError(
            f"layer '{mixing}' is a BatchNorm, by which the examples of a batch influence each other, so that no "
            "example's gradient can be clipped: use GroupNorm (norm: group) with example-level privacy"
        )


class _Kernel:
    """The replica models of one user's model, kept from call to call; one for each thread that is using one."""

    def __init__(self, model: nn.Module, layout: Layout, start: Tensor, x: Tensor, y: Tensor) -> None:
        self.signature = _signature(model, layout, x)
        reason = expressible(model)
        self.trial = trial(model, layout, start, x, y) if reason is None else Trial(reason)
        self._pristine = None if self.trial.reason else copy.deepcopy(model)
        self._layout = layout
        self._idle: list[ReplicaModel] = []

    def train(self, clients: list[Client], start: Tensor, x: Tensor, y: Tensor, work: LocalWork, into: CohortResult) -> None:
        """Train the clients of one chunk."""
        assert self._pristine is not None
        try:
            replicas = self._idle.pop()
        except IndexError:
            replicas = ReplicaModel(self._pristine, self._layout)
        Chunk(replicas, self.trial, start, x, y, clients, work).train(into)
        self._idle.append(replicas)


_kernels: WeakKeyDictionary[nn.Module, _Kernel] = WeakKeyDictionary()


def _kernel_for(model: nn.Module, layout: Layout, start: Tensor, x: Tensor, y: Tensor) -> _Kernel:
    kernel = _kernels.get(model)
    if kernel is None or kernel.signature != _signature(model, layout, x):
        kernel = _kernels[model] = _Kernel(model, layout, start, x, y)
    return kernel


def _signature(model: nn.Module, layout: Layout, x: Tensor) -> tuple[Layout, str, torch.Size]:
    """Changes when somebody changes the layers of a model after it was first used."""
    return layout, repr(model), x.shape[1:]


def _chunks(clients: list[Client], layout: Layout, tried: Trial, size: int | None, threads: int) -> list[list[Client]]:
    """Group clients of equal width, the longest work first, into chunks."""
    groups: dict[int, list[Client]] = {}
    for client in clients:
        groups.setdefault(client.width, []).append(client)
    chunks = []
    for width, group in groups.items():
        group.sort(key=lambda client: -len(client.schedule))
        most = size or min(
            max(4, _CACHE_BYTES // (4 * (2 * layout.size + width * tried.elements))), -(-len(group) // threads)
        )
        count = -(-len(group) // most)
        chunks += [group[len(group) * i // count : len(group) * (i + 1) // count] for i in range(count)]
    return chunks


@contextmanager
def _single_threads() -> Iterator[int]:
    """One thread for each operation; yields how many there were, to be used for whole chunks.

    PyTorch divides an element-wise operation among its threads wherever it likes, and computes the last elements of each
    part without vector instructions: with more than one thread the last bits of a client would depend on the others.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
