# SPDX-License-Identifier: Apache-2.0
"""The training of one chunk of replicas: the inner loop of everything."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from fedsim.training import products
from fedsim.training.batches import ExampleClipping
from fedsim.training.client import Client, CohortResult, Task
from fedsim.training.factors import Factors
from fedsim.training.layers import backpropagate
from fedsim.training.laying import Batches, Examples, PackedBatches, PaddedBatches
from fedsim.training.layout import replica_rows
from fedsim.training.noise import NoiseStreams
from fedsim.training.optimisers import is_fused, optimiser_for
from fedsim.training.replicas import ReplicaModel
from fedsim.training.trial import Trial

_LEAST = 2  # a matrix library computes a batch of one product by another routine, with other last bits


class Chunk:
    """Clients that are trained together, longest work first, so that the active ones come first.

    Their batches are padded to the same width or, `packed`, follow each other without padding. A client that has
    finished drops out: nothing is masked, and nothing can change it. A client that is alone is joined by a row that
    nobody reads.
    """

    def __init__(self, model: ReplicaModel, tried: Trial, task: Task, clients: list[Client], packed: bool) -> None:
        self._model, self._task, self._clients = model, task, clients
        work, layout, count = task.work, task.layout, max(len(clients), _LEAST)
        nobody = [clients[0].rows[:1]] * (count - len(clients))
        schedules = [client.schedule for client in clients] + [[] for _ in nobody]
        members = [client.rows for client in clients] + nobody
        self._lengths = [len(client.schedule) for client in clients]
        private = work.example_dp is not None
        self._batches: Batches = (
            PackedBatches(schedules, members, task.y, tried.packed_guard)
            if packed
            else PaddedBatches(schedules, members, task.y, clients[0].width, tried.guard(clients[0].width), private)
        )
        self._weights = replica_rows(count, layout.size)
        self._fused = is_fused(work)
        self._gradient = self._weights if self._fused else replica_rows(count, layout.size)
        # In the first step the replicas share one set of weights, which is faster; but buffers are changed in place.
        self._shared = layout.size == layout.parameters
        self._start = layout.unflatten(task.start)
        for layer in model.layers:
            layer.begin(self._start, self._lengths[0] if self._fused and self._shared else 0)
        if not (self._fused and self._shared):
            self._weights.copy_(task.start)
        self._optimiser = optimiser_for(self._weights[:, : layout.parameters], work)
        self._batch_sizes = torch.tensor([float(client.batch) for client in clients] + [1.0] * len(nobody))
        noisy = work.example_dp is not None and work.example_dp.noise_multiplier > 0
        self._noise = NoiseStreams([c.randomness.noise_key() for c in clients], layout.parameters) if noisy else None
        self._room = task.x[:0]
        model.load_constants(task.start)

    @torch.no_grad()
    def train(self, into: CohortResult) -> None:
        """Take all steps of all clients, and write what they computed."""
        active = 0
        for step in range(self._lengths[0]):
            remaining = sum(length > step for length in self._lengths)
            if remaining != active:
                self._finish(remaining, active, into)
                active = remaining
                self._activate(max(active, _LEAST), step)
            elif step == 1:
                self._activate(max(active, _LEAST), step)
            self._step(step, active)
        self._finish(0, active, into)

    def _activate(self, count: int, step: int) -> None:
        """Go on with the first `count` replicas."""
        model, self._count = self._model, count
        shared = self._shared and step == 0
        weights = self._task.start.expand(count, -1) if shared else self._weights[:count]
        model.bind(weights, self._gradient[:count])

    def _step(self, step: int, active: int) -> None:
        """One local step of the first `active` clients."""
        model, work, count = self._model, self._task.work, self._count
        examples = self._batches.lay(step, count, model.batch)
        if len(examples.rows):
            self._backpropagate(step, examples)
        if self._fused and self._shared and step == 0:
            kept = self._kept()
            for name, weight in model.layout.unflatten(self._weights).items():
                if name not in kept:
                    weight.copy_(self._start[name])
        scale = -work.learning_rate if self._fused else 1.0
        factors = None
        if work.example_dp is not None:
            self._begin_with_noise(active, work.example_dp)
            factors = self._clipping_factors(work.example_dp) if len(examples.rows) else None
        elif not self._fused:
            self._gradient[:count].zero_()
        for layer in model.layers if len(examples.rows) else ():
            layer.add_gradient(scale, factors)
        if work.kind == "fedavg" and not self._fused:
            self._optimiser.step(self._gradient[:count, : model.layout.parameters])

    def _backpropagate(self, step: int, examples: Examples) -> None:
        """Run the model forwards and backwards; the loss of each example counts with its share of the batch.

        Cross-entropy: the gradient with respect to the logits is softmax(logits) − onehot(label).
        """
        guard, labels, share = self._model.batch.guard, examples.labels, examples.shares
        rows = torch.cat([examples.rows, examples.rows.new_zeros(guard)]) if guard else examples.rows
        inputs = torch.index_select(self._task.x, 0, rows, out=self._inputs(len(rows)))
        with torch.enable_grad():
            outputs = self._model(inputs)
        gradient = outputs[: len(labels)] if guard else outputs
        gradient = gradient - gradient.amax(-1, keepdim=True)
        log_likelihood = gradient.gather(-1, labels)
        total = gradient.exp_().sum(-1, keepdim=True)
        gradient.mul_(share / total).scatter_add_(-1, labels, (-share).expand(labels.shape))
        self._batches.note(step, log_likelihood.sub_(total.log_()))
        if guard:
            gradient = torch.cat([gradient, gradient.new_zeros(guard, *gradient.shape[1:])])
        backpropagate(outputs, gradient)

    def _inputs(self, rows: int) -> Tensor:
        """Memory for the inputs of a step: that of the step before, which is still in the cache."""
        x = self._task.x
        if rows > len(self._room):
            self._room = x.new_empty(rows, *x.shape[1:])
        return self._room[:rows]

    def _begin_with_noise(self, active: int, dp: ExampleClipping) -> None:
        """Set the gradients of the active clients to σC·N(0, I)/B, to which the clipped sums are then added."""
        count, parameters = self._count, self._model.layout.parameters
        if not dp.noise_multiplier:
            self._gradient[:count].zero_()
            return
        assert self._noise is not None
        deviations = dp.noise_multiplier * dp.clipping_norm / self._batch_sizes[:active]
        self._noise.write(self._gradient[:active, :parameters], deviations)
        self._gradient[active:count].zero_()
        self._gradient[:count, parameters:].zero_()

    def _clipping_factors(self, dp: ExampleClipping) -> Tensor:
        """What each example's gradient counts for: (K, B), min(1, C/|g_i|)/B."""
        batch = self._model.batch
        squares = torch.zeros(batch.replicas, batch.width)
        for layer in self._model.layers:  # one after the other: a sum over all would be divided as K suggests
            squares += layer.squared_norms()
        broken = ~squares.isfinite()
        if broken.any():
            # A gradient that is not finite has no direction to be scaled down, and 0·∞ is no number: it counts as zero.
            for layer in self._model.layers:
                layer.forget(broken)
            squares.masked_fill_(broken, 0)
        factors = dp.clipping_norm / squares.sqrt_().clamp_min_(1e-30)
        return self._batches.divided(factors.clamp_max_(1), self._batch_sizes[: self._count])

    def _finish(self, remaining: int, active: int, into: CohortResult) -> None:
        """Write the results of the clients in rows remaining..active-1."""
        if remaining >= active:  # nobody has finished, or nobody has begun
            return
        done = slice(remaining, active)
        ends, gradients = self._weights[done], self._gradient[done]
        write_updates = partial(_write_updates, self._task, self._start, ends, gradients, self._kept(), remaining)
        # The last ones to finish are not touched again. Only the weights are kept for them, not what other steps need.
        later = remaining == 0 and self._fused and products.BEYOND_MKL
        into.write(self._task, self._clients[done], write_updates, self._batches.losses(done), later=later)

    def _kept(self) -> dict[str, Factors]:
        """The weights whose steps are kept as factors."""
        return {layer.names["weight"]: layer.factors for layer in self._model.layers if layer.factors is not None}


def _write_updates(
    task: Task,
    start: Mapping[str, Tensor],
    ends: Tensor,
    gradients: Tensor,
    kept: Mapping[str, Factors],
    first: int,
    some: slice,
    updates: Tensor,
) -> None:
    """Write to `updates` (k, P) how the weights of some of the replicas first, ... changed; FedSGD: their gradients.

    Their weights are the rows of `ends`, but for those whose steps are `kept` as factors.
    """
    layout = task.layout
    if not kept:
        torch.sub(ends[some], task.start, out=updates)
        if task.work.kind == "fedsgd":
            updates[:, : layout.parameters] = gradients[some, : layout.parameters]
        return
    parts = layout.unflatten(ends[some])
    for name, update in layout.unflatten(updates).items():
        if name in kept:
            kept[name].write_change(slice(first + some.start, first + some.stop), update)
        else:
            torch.sub(parts[name], start[name], out=update)
