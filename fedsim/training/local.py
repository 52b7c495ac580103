# SPDX-License-Identifier: Apache-2.0
"""The local work of a whole cohort: K clients trained at once, each with its own data, batches, noise and length.

Guarantees:
- A client's result does not depend, to the last bit, on who else is in the cohort, on their order, on the chunks in
  which they are computed, or on the number of threads. A client is a cohort of one.
- Padding contributes exactly nothing, and a client that has finished does not change.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedsim.errors import ModelError, PrivacyError
from fedsim.randomness import ClientRandomness
from fedsim.training import products
from fedsim.training.batches import LocalWork, Rows
from fedsim.training.chunk import Chunk
from fedsim.training.client import Client, CohortResult, Task
from fedsim.training.layout import layout_of
from fedsim.training.one_by_one import check_one, train_one
from fedsim.training.optimisers import is_fused
from fedsim.training.replicas import ReplicaModel, expressible, packable
from fedsim.training.trial import Trial, mixes_examples, trial

SMALLEST_DEVIATION = 1e-15  # of a step's noise: its square, and what is added to it, are far from what floats lose
_LARGEST_DEVIATION = 1e15  # far from where its square would be infinite
_PACKED = 0 if products.BEYOND_MKL else 1 << 14  # weights from which a replica's product is worth a call of MKL
_WORTH_A_THREAD = 1 << 21  # numbers that a thread moves in a step: of fewer it is done before another has woken up
_CHUNK_BYTES = 32 << 20  # what the replicas of a chunk may need in one step: about the last cache


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
        chunk: how many clients are computed at once; None: as many as are good for speed.

    The loss is the cross-entropy, mean over the batch (of a sequence: over its tokens, then over the batch); with
    `example_dp` the gradient of a step is (Σ_i clip(g_i, C) + σC·N(0, I))/B for the expected batch size B. A client
    without rows does nothing: its update is 0. The updates may be computed only when they are read: until then neither
    `start` nor anything else that was given may be changed.
    """
    task = Task(model, layout_of(model), start, x, y, work)
    _check(task, members, randomness)
    everybody = enumerate(zip(members, randomness, strict=True))
    clients = [Client.of(place, rows, work, random) for place, (rows, random) in everybody if len(rows)]
    result = CohortResult.empty([len(rows) for rows in members], task.layout.size)
    if not clients:
        return result
    kernel = _kernel_for(task)
    if work.example_dp is not None:
        _check_noise(work, max(map(len, members)))
        _check_separate(kernel)
    if any(each.add_noise for each in randomness) or kernel.trial.reason is not None:
        for client in clients:
            train_one(task, client, result)
        return result
    with _single_threads() as threads:
        threads = _threads_that_pay(task, clients, kernel, threads)
        chunks = _chunks(task, clients, kernel, chunk, threads)
        if threads == 1 or len(chunks) == 1:
            for some in chunks:
                kernel.train(task, some, result)
        else:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                list(pool.map(lambda some: kernel.train(task, some, result), chunks))
    return result


def check_private_training(model: nn.Module, start: Tensor, x: Tensor, y: Tensor, work: LocalWork) -> None:
    """An error for a model whose examples have no gradients of their own to clip, or for noise that would be lost."""
    _check_noise(work, len(x))
    task = Task(model, layout_of(model), start, x, y, work)
    kernel = _kernel_for(task)
    _check_separate(kernel)
    if kernel.trial.reason is not None:
        check_one(task)


def _check_separate(kernel: _Kernel) -> None:
    if kernel.mixing:
        raise ModelError(
            f"by {kernel.mixing} the examples of a batch influence each other, so that no example's gradient can be "
            "clipped: use GroupNorm (norm: group) in place of BatchNorm with example-level privacy"
        )


def _check_noise(work: LocalWork, examples: int) -> None:
    """PrivacyError for noise so small that single precision loses it, while the gradients are still there."""
    dp = work.example_dp
    if dp is None or not examples:
        return
    deviation = dp.noise_multiplier * dp.clipping_norm / work.batch(examples)
    if deviation > _LARGEST_DEVIATION:
        raise PrivacyError(
            f"defence.example_dp: the noise of a step (noise_multiplier {dp.noise_multiplier:g} times clipping_norm"
            f" {dp.clipping_norm:g}, divided by the batch) is {deviation:.2g}, beyond single precision; use a smaller"
            " clipping_norm"
        )
    if 0 < deviation < SMALLEST_DEVIATION:
        raise PrivacyError(
            f"defence.example_dp: the noise of a step (noise_multiplier {dp.noise_multiplier:g} times clipping_norm"
            f" {dp.clipping_norm:g}, divided by the batch) is {deviation:.2g}, which single precision would lose; use a"
            " larger clipping_norm and a smaller learning rate"
        )


def _check(task: Task, members: Sequence[Rows], randomness: Sequence[ClientRandomness]) -> None:
    """Refuse what cannot be trained."""
    shape, size = tuple(task.start.shape), task.layout.size
    if shape != (size,):
        raise ModelError(f"the weights have shape {shape}: this model needs a flat vector of {size} numbers")
    if len(members) != len(randomness):
        raise ValueError(f"{len(members)} clients, but {len(randomness)} sources of randomness")
    if len(task.x) != len(task.y):
        raise ValueError(f"{len(task.x)} inputs, but {len(task.y)} labels")


class _Kernel:
    """What is kept of a user's model from call to call: what was learnt of it, and idle replica models."""

    def __init__(self, task: Task) -> None:
        self.signature = _signature(task)
        self._example = Task(copy.deepcopy(task.model), task.layout, task.start, task.x[:6], task.y[:6], task.work)
        self._reason = expressible(task.model)
        self._packable = self._reason is None and task.layout.size >= _PACKED and packable(task.model)
        self._idle: list[ReplicaModel] = []

    def packs(self, work: LocalWork) -> bool:
        """Whether batches are packed: Poisson batches, of a model that is large enough for products of its own."""
        return self._packable and work.example_dp is not None and work.example_dp.batches == "poisson"

    @cached_property
    def trial(self) -> Trial:
        """Whether it can be trained as replicas, and what that takes."""
        return trial(self._example) if self._reason is None else Trial(self._reason)

    @cached_property
    def mixing(self) -> str | None:
        """By what the examples of a batch influence each other, if they do."""
        return mixes_examples(self._example)

    def train(self, task: Task, clients: list[Client], into: CohortResult) -> None:
        """Train the clients of one chunk, with a replica model that no other thread is using."""
        try:
            replicas = self._idle.pop()
        except IndexError:
            replicas = ReplicaModel(self._example.model, task.layout)
        Chunk(replicas, self.trial, task, clients, self.packs(task.work)).train(into)
        replicas.forget()
        self._idle.append(replicas)


_kernels: WeakKeyDictionary[nn.Module, _Kernel] = WeakKeyDictionary()


def _kernel_for(task: Task) -> _Kernel:
    kernel = _kernels.get(task.model)
    if kernel is None or kernel.signature != _signature(task):
        kernel = _kernels[task.model] = _Kernel(task)
    return kernel


def _signature(task: Task) -> tuple[object, ...]:
    """Changes when somebody changes the layers of a model, or the shape of the data, after it was first used."""
    return task.layout, repr(task.model), task.x.shape[1:], task.y.shape[1:]


def _chunks(task: Task, clients: list[Client], kernel: _Kernel, size: int | None, threads: int) -> list[list[Client]]:
    """Group clients of equal width (if they are packed: of any), the longest work first, into chunks."""
    groups: dict[int, list[Client]] = {}
    packed = kernel.packs(task.work)
    for client in clients:
        groups.setdefault(0 if packed else client.width, []).append(client)
    chunks = []
    for group in groups.values():
        group.sort(key=lambda client: -len(client.schedule))
        width = max(client.width for client in group)
        own = task.layout.size * (1 if is_fused(task.work) else 2)  # weights and, where they are separate, gradients
        needed = 4 * (own + width * kernel.trial.elements)  # bytes for each replica
        most = size or max(2, min(_CHUNK_BYTES // needed, math.ceil(len(group) / threads)))
        count = math.ceil(len(group) / most)
        chunks += [group[len(group) * i // count : len(group) * (i + 1) // count] for i in range(count)]
    return chunks


def _threads_that_pay(task: Task, clients: list[Client], kernel: _Kernel, threads: int) -> int:
    """As many as there are, or one, where the work of a step is small; nobody's result depends on it."""
    moved = max(client.width for client in clients) * kernel.trial.elements
    if not is_fused(task.work):
        moved += 2 * task.layout.size
    return threads if moved * len(clients) >= threads * _WORTH_A_THREAD else 1


@contextmanager
def _single_threads() -> Iterator[int]:
    """One thread for each operation; yields how many there were, to be used for whole chunks.

    PyTorch divides an element-wise operation among its threads wherever it likes, and computes the last elements of
    each part without vector instructions: with several threads the last bits of a client would depend on the others.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
