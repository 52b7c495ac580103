# SPDX-License-Identifier: Apache-2.0
"""Reconstruction from a FedAvg update, whatever the order of the client's batches was.

Dimitrov, Balunović, Konstantinov, Vechev, "Data Leakage in Federated Averaging" (TMLR 2022), equation 5:

    argmin over x̃ of  d(Θ̃(x̃), Θ) + α · 1/E² Σ_{e1,e2} R(g(x̃_e1), g(x̃_e2)) + further priors

Θ̃ is the update that the client's local work gives on guessed inputs, which are free in every epoch; the prior pulls the
epochs towards the same set of examples without saying in which order they come. The settings contain the baselines of
the paper: no prior, one set of inputs for all epochs, one step for an epoch, one gradient for everything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedsim.attacks.epochs import epoch_prior, pool_epochs
from fedsim.attacks.labels import count_labels
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction, check_observation
from fedsim.attacks.simulation import Simulator, Step
from fedsim.attacks.surrogate import surrogate_guess
from fedsim.errors import AttackError
from fedsim.randomness import stream
from fedsim.scenario import ExactAttack, FedAvgAttack
from fedsim.training import LocalWork


@dataclass(frozen=True, eq=False)
class Target:
    """What K replicas have to reproduce: K starts on one update, K clients with one each, or K with their sum."""

    simulator: Simulator
    updates: Tensor
    """(K, P); (1, P) for the mean of K clients."""
    labels: Tensor
    """(K, n): the labels of the guessed examples, in an order that is arbitrary and the same in each epoch."""
    epochs: int
    batch: int

    @property
    def examples(self) -> int:
        """The number n of examples that a client has."""
        return self.labels.shape[1]


def fedavg(observation: Observation, knowledge: Knowledge, settings: FedAvgAttack, *, seed: int = 0) -> Reconstruction:
    """The client's examples: exactly where the first layer allows it, else by simulating the local work."""
    return fedavg_rounds([observation], knowledge, settings, seed=seed)


def fedavg_rounds(
    observations: Sequence[Observation], knowledge: Knowledge, settings: FedAvgAttack, *, seed: int = 0
) -> Reconstruction:
    """The same from several rounds of one client: its examples are the same, so a round is only more epochs."""
    for observation in observations:
        check_observation(observation, knowledge)
    if settings.exact_first and (found := _exactly(observations[0], knowledge, seed)) is not None:
        return found
    labels = _labels(observations[0], knowledge)
    order = torch.from_numpy(stream(seed, "attack-label-order").permutation(len(labels)))
    targets = [_target(each, knowledge, settings, labels[order]) for each in observations]
    inputs, losses = reconstruct(targets, knowledge, settings, seed=seed)
    return _reconstruction(targets, inputs, losses, knowledge, settings)


def _reconstruction(
    targets: Sequence[Target], inputs: Tensor, losses: Tensor, knowledge: Knowledge, settings: FedAvgAttack
) -> Reconstruction:
    summed = len(targets[0].updates) < len(inputs)
    chosen = list(range(len(inputs))) if summed else [int(losses.argmin())]
    pooled = [pool_epochs(inputs[k].flatten(2), targets[0].labels[k]) for k in chosen]
    labels = torch.cat([targets[0].labels[k] for k in chosen])
    spread = torch.cat([apart for _, apart in pooled])
    low, high = value_bounds(knowledge)
    loss = float(losses.min())
    return Reconstruction(
        attack="fedavg",
        inputs=torch.cat([items for items, _ in pooled]).view(-1, *knowledge.input_shape),
        labels=labels,
        loss=loss,
        confidence=torch.exp(-((10 * spread / float((high - low).mean())) ** 2)) * math.exp(-10 * loss),
        label_counts=torch.bincount(labels, minlength=knowledge.classes),
        notes=(
            f"simulated {targets[0].epochs} epochs in batches of {targets[0].batch} ({settings.simulation}, inputs"
            f" {settings.inputs}), from {len(targets)} rounds; the confidence is how well the epochs agree, not a"
            " probability",
        ),
    )


def _exactly(observation: Observation, knowledge: Knowledge, seed: int) -> Reconstruction | None:
    """Exact inversion, which the order of the batches does not concern; None where it is impossible or incomplete."""
    from fedsim.attacks.exact import exact

    try:
        found = exact(observation, knowledge, ExactAttack(name="exact"), seed=seed)
    except AttackError:
        return None
    certified = found.certified is not None and len(found.inputs) > 0 and bool(found.certified.all())
    return found if certified and len(found.inputs) == observation.examples else None


def _labels(observation: Observation, knowledge: Knowledge) -> Tensor:
    if knowledge.labels is not None:
        return knowledge.labels
    counts = count_labels(observation, knowledge).counts
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def _target(observation: Observation, knowledge: Knowledge, settings: FedAvgAttack, labels: Tensor) -> Target:
    """The update with the local work that is simulated, which for the baselines is less than what the client did."""
    if knowledge.kind == "text":
        raise AttackError("attack fedavg: tokens are not continuous; use attack text for a transformer")
    work, clients = observation.work, observation.clients
    n = len(labels) // clients
    replicas = clients if clients > 1 else settings.restarts
    divided = labels[: n * clients].view(clients, n) if clients > 1 else labels.expand(replicas, -1)
    batch = work.batch(n)
    in_epoch = math.ceil(n / batch)
    epochs = work.epochs if work.steps is None else math.ceil(work.steps / in_epoch)
    rate = work.learning_rate
    if observation.kind == "gradient":
        work, epochs, batch, rate = LocalWork(kind="fedavg"), 1, n, 1.0
    elif settings.simulation == "epochs":
        batch, rate = n, rate * in_epoch
    elif settings.simulation == "gradient":
        batch, rate, epochs = n, rate * in_epoch * epochs, 1
    simulated = replace(work, kind="fedavg", learning_rate=rate, epochs=epochs, steps=None, batch_size=batch)
    sign = -1.0 if observation.kind == "gradient" else 1.0
    update = torch.cat([sign * observation.update[name].flatten() for name in observation.weights])
    updates = update.expand(1 if clients > 1 else replicas, -1)
    return Target(Simulator(observation.model, simulated), updates, divided, epochs, batch)


def reconstruct(
    targets: Sequence[Target], knowledge: Knowledge, settings: FedAvgAttack, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """The inputs (K, E, n, ...) that were found for K replicas over all epochs, and their matching losses (K,)."""
    bounds = value_bounds(knowledge)
    guess = _first_guess(targets, bounds, settings, seed).requires_grad_()
    optimiser = torch.optim.Adam([guess], lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, settings.iterations, settings.learning_rate / 50)
    best, best_loss = guess.detach().clone(), torch.full((len(guess),), math.inf)
    until = math.inf if settings.seconds is None else time.monotonic() + settings.seconds
    for _ in range(settings.iterations):
        losses = _descend(targets, settings, guess)
        better = losses < best_loss
        best[better], best_loss[better] = guess.detach()[better], losses[better]
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            guess.clamp_(*bounds)
        if time.monotonic() > until:
            break
    return best, best_loss


def _first_guess(targets: Sequence[Target], bounds: tuple[Tensor, Tensor], settings: FedAvgAttack, seed: int) -> Tensor:
    """Noise around the middle of the range, drawn nearer by the surrogate model if that is asked for."""
    first, (low, high) = targets[0], bounds
    copies = sum(target.epochs for target in targets) if settings.inputs == "free" else 1
    replicas = len(first.labels)
    generator = torch.Generator().manual_seed(int(stream(seed, "attack-start").integers(2**63)))
    noise = torch.randn(replicas, 1, first.examples, *low.shape, generator=generator)
    guess = ((low + high) / 2 + settings.start_spread * (high - low) * noise).clamp(low, high)
    if settings.surrogate and len(first.updates) == replicas:
        rate = settings.learning_rate
        found = surrogate_guess(
            first.simulator, first.updates, first.labels, guess[:, 0], bounds, settings.surrogate, rate
        )
        guess = found[:, None]
    return guess.expand(-1, copies, *guess.shape[2:]).clone()


def _descend(targets: Sequence[Target], settings: FedAvgAttack, guess: Tensor) -> Tensor:
    """Set the gradient of the whole objective on the guess; the mean matching losses of the replicas."""
    total = torch.zeros(len(guess))
    guess.grad = torch.zeros_like(guess)
    first = 0
    for target in targets:
        losses: list[Tensor] = []

        def distance(update: Tensor, target: Target = target, losses: list[Tensor] = losses) -> Tensor:
            losses.append(_distance(update, target, settings) / len(targets))
            return losses[-1].sum()

        epochs = slice(first, first + target.epochs) if settings.inputs == "free" else slice(0, 1)
        steps = _steps(target, guess.detach()[:, epochs])
        _, slopes = target.simulator.slope(steps, distance, last=settings.unroll, segment=settings.segment)
        _scatter(target, slopes, guess.grad[:, epochs])
        total += losses[-1].detach()
        first += target.epochs
    prior = _priors(settings, guess)
    if prior.requires_grad:
        guess.grad += torch.autograd.grad(prior, guess)[0]
    if settings.optimizer == "signed":
        guess.grad.sign_()
    return total


def _distance(update: Tensor, target: Target, settings: FedAvgAttack) -> Tensor:
    """How far the simulated updates (K, P) are from those that were received, by replica; of a sum, of their mean."""
    if len(target.updates) < len(update):
        update = update.mean(dim=0, keepdim=True)
    if settings.distance == "cosine":
        return 1 - cosine_similarity(update, target.updates, dim=1)
    sizes = [update.shape[1]] if settings.distance == "whole" else [s.numel() for s in target.simulator.shapes]
    pairs = zip(update.split(sizes, dim=1), target.updates.split(sizes, dim=1), strict=True)
    relative = [(a - b).square().sum(dim=1) / b.square().sum(dim=1).clamp_min(1e-20) for a, b in pairs]
    return torch.stack(relative).mean(dim=0)


def _steps(target: Target, guess: Tensor) -> list[Step]:
    """The batches of all epochs, each of `batch` examples, the last of an epoch perhaps incomplete."""
    steps = []
    for epoch in range(target.epochs):
        inputs = guess[:, min(epoch, guess.shape[1] - 1)]
        for first in range(0, target.examples, target.batch):
            x, y = inputs[:, first : first + target.batch], target.labels[:, first : first + target.batch]
            steps.append(Step(x, y, torch.full(y.shape, 1 / y.shape[1])))
    return steps


def _scatter(target: Target, slopes: Sequence[Tensor], gradient: Tensor) -> None:
    """Add the gradients of all steps' inputs in the places that the inputs came from."""
    batches = math.ceil(target.examples / target.batch)
    for t, slope in enumerate(slopes):
        epoch, first = t // batches, (t % batches) * target.batch
        gradient[:, min(epoch, gradient.shape[1] - 1), first : first + target.batch] += slope


def _priors(settings: FedAvgAttack, guess: Tensor) -> Tensor:
    total = torch.zeros(())
    if settings.prior_weight and guess.shape[1] > 1:
        flat = guess.flatten(3)
        total = total + settings.prior_weight * epoch_prior(flat, settings.prior, settings.prior_distance).sum()
    if settings.total_variation and guess.dim() == 6:
        every = (1, 2, 3, 4, 5)
        variation = guess.diff(dim=-1).abs().mean(dim=every) + guess.diff(dim=-2).abs().mean(dim=every)
        total = total + settings.total_variation * variation.sum()
    return total


def value_bounds(knowledge: Knowledge) -> tuple[Tensor, Tensor]:
    """The range of each input; three standard deviations of standardised data where it is not known."""
    shape = knowledge.input_shape
    if knowledge.value_range is None:
        return torch.full(shape, -3.0), torch.full(shape, 3.0)
    low, high = knowledge.value_range
    return low.expand(shape), high.expand(shape)
