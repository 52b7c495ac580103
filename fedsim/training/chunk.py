# SPDX-License-Identifier: Apache-2.0
"""The training of one chunk of replicas: the inner loop of everything."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.training.batches import BatchPlan, LocalWork
from fedsim.training.client import Client, CohortResult
from fedsim.training.layout import replica_rows
from fedsim.training.noise import add_noise
from fedsim.training.optimisers import is_plain_sgd, optimiser_for
from fedsim.training.replicas import ReplicaModel, Trial

_MINUS_ONE = torch.full((1,), -1.0)
_LEAST = 2  # a matrix library computes a batch of one product by another routine, with other last bits


class Chunk:
    """Clients whose batches are padded to the same width, longest work first; the active ones are always the first rows.

    A client that has finished drops out: nothing is masked, nothing can change it. A client that is alone is joined by a
    row that nobody reads.
    """

    def __init__(
        self,
        model: ReplicaModel,
        tried: Trial,
        start: Tensor,
        x: Tensor,
        y: Tensor,
        clients: list[Client],
        work: LocalWork,
    ) -> None:
        self._model, self._start, self._x, self._clients, self._work = model, start, x, clients, work
        count, layout = max(len(clients), _LEAST), model.layout
        nobody = [clients[0].rows[:1]] * (count - len(clients))
        schedules = [client.schedule for client in clients] + [[] for _ in nobody]
        self._lengths = [len(client.schedule) for client in clients]
        self._width = clients[0].width
        self._guard = tried.guard(self._width)
        self._plan = BatchPlan.of(schedules, [client.rows for client in clients] + nobody, self._width)
        self._labels = y[self._plan.rows.flatten(1)].unsqueeze(-1)
        self._log_likelihoods = torch.zeros(self._labels.shape)
        self._shares = self._plan.shares(private=work.example_dp is not None) / self._labels[0, 0].numel()
        self._weights = replica_rows(count, layout.size).copy_(start)
        # plain SGD is fused into the products that give the gradient, so that there is no gradient
        self._fused = work.kind == "fedavg" and is_plain_sgd(work)
        self._gradient = self._weights if self._fused else replica_rows(count, layout.size)
        self._optimiser = optimiser_for(self._weights[:, : layout.parameters], work)
        self._batch_sizes = torch.tensor([float(client.batch) for client in clients] + [1.0] * len(nobody))
        if work.example_dp is not None:
            self._noise = [client.randomness.noise() for client in clients]
        model.load_constants(start)

    @torch.no_grad()
    def train(self, into: CohortResult) -> None:
        """Take all steps of all clients, and write what they computed."""
        active = 0
        for step in range(self._lengths[0]):
            remaining = sum(length > step for length in self._lengths)
            if remaining != active:
                self._finish(remaining, active, into)
                active = remaining
                self._activate(max(active, _LEAST), shared=step == 0)
            elif step == 1:
                self._activate(max(active, _LEAST), shared=False)
            self._step(step, active)
        self._finish(0, active, into)

    def _activate(self, count: int, shared: bool) -> None:
        """Go on with the first `count` replicas; in the first step they share one set of weights, which is faster."""
        model = self._model
        model.batch.resize(count, self._width, self._guard)
        shared = shared and model.layout.size == model.layout.parameters  # buffers are changed in place
        weights = self._start.expand(count, -1) if shared else self._weights[:count]
        model.bind(weights, self._gradient[:count])

    def _step(self, step: int, active: int) -> None:
        """One local step of the first `active` clients."""
        model, work = self._model, self._work
        count = model.batch.replicas
        self._backpropagate(step)
        if not self._fused:
            self._gradient[:count].zero_()
        scale = -work.learning_rate if self._fused else 1.0
        factors = self._privatise(active, scale) if work.example_dp is not None else None
        for layer in model.layers:
            layer.add_gradient(scale, factors)
        if work.kind == "fedavg" and not self._fused:
            self._optimiser.step(self._gradient[:count, : model.layout.parameters])

    def _backpropagate(self, step: int) -> None:
        """Run the model forwards and backwards; the loss of each example counts with its share of the batch.

        Cross-entropy: the gradient with respect to the logits is softmax(logits) − onehot(label).
        """
        batch = self._model.batch
        batch.present = self._plan.present[step, : batch.replicas]
        rows = self._plan.rows[step, : batch.replicas].view(-1)
        used = len(rows)
        if batch.guard:
            rows = torch.cat([rows, rows.new_zeros(batch.guard)])
        with torch.enable_grad():
            outputs = self._model(self._x.index_select(0, rows))
        labels = self._labels[step, :used]
        gradient = torch.log_softmax(outputs[:used] if batch.guard else outputs, dim=-1)
        torch.gather(gradient, -1, labels, out=self._log_likelihoods[step, :used])
        gradient.exp_().scatter_add_(-1, labels, _MINUS_ONE.expand(labels.shape))
        gradient.mul_(self._shares[step, : batch.replicas].view(-1, *[1] * (gradient.dim() - 1)))
        if batch.guard:
            gradient = torch.cat([gradient, gradient.new_zeros(batch.guard, *gradient.shape[1:])])
        torch.autograd.backward(outputs, gradient)

    def _privatise(self, active: int, scale: float) -> Tensor:
        """Add the noise, and return what each example's gradient counts for: (K, B), min(1, C/|g_i|)/B."""
        dp = self._work.example_dp
        assert dp is not None
        batch, parameters = self._model.batch, self._model.layout.parameters
        sizes = self._batch_sizes[: batch.replicas]
        squares = torch.stack([layer.squared_norms() for layer in self._model.layers]).sum(0)
        if dp.noise_multiplier:
            deviations = dp.noise_multiplier * dp.clipping_norm / sizes[:active]
            add_noise(self._gradient[:active, :parameters], self._noise[:active], deviations, scale)
        factors = dp.clipping_norm / squares.sqrt_().clamp_min_(1e-30)
        return factors.clamp_max_(1).mul_(batch.present).div_(sizes.unsqueeze(1))

    def _finish(self, remaining: int, active: int, into: CohortResult) -> None:
        """Write the results of the clients in rows remaining..active-1."""
        if remaining == active:
            return
        layout = self._model.layout
        losses = -self._log_likelihoods.unflatten(1, (-1, self._width))[:, remaining:active].flatten(3).mean(3)
        sums = (losses * self._plan.present[:, remaining:active]).sum((0, 2), dtype=torch.float64).tolist()
        for k, loss in zip(range(remaining, active), sums, strict=True):
            gradient = self._gradient[k, : layout.parameters] if self._work.kind == "fedsgd" else None
            into.write(self._clients[k], layout, self._start, self._weights[k], gradient, loss)
