# SPDX-License-Identifier: Apache-2.0
"""The client's local training, simulated so that it can be differentiated with respect to the inputs.

    w_{t+1} = step(w_t, gradient of the mean loss at w_t on batch t),   t = 0 .. T-1

is the client's own arithmetic (SGD with momentum and weight decay, or Adam), for K replicas at once: K clients, or K
starts of one. The gradient of any distance d(w_T - w_0) with respect to all inputs is found by running backwards
through the steps; only some states are kept, and what lies between is computed again (Chen et al. 2016): with segments
of sqrt(T/2) steps memory grows with the square root of the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedsim.training import LocalWork

_HELD_ANYWAY = 8  # steps whose graph is small enough to be held whatever their number

Distance = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Step:
    """The batch of one local step for K replicas."""

    inputs: Tensor
    """(K, B, ...); of text (K, B, T+1, V), distributions over the tokens of a window and of the one after it"""
    labels: Tensor
    """(K, B)"""
    shares: Tensor
    """(K, B): what each example counts for in the mean; 0 where a batch is not full."""


@dataclass(frozen=True, eq=False)
class State:
    """The weights (K, P) and the optimiser's memory after some steps."""

    weights: Tensor
    memory: tuple[Tensor, ...]
    steps: int

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that the next step depends on."""
        return (self.weights, *self.memory)

    def detached(self) -> State:
        """The same values as a new beginning, from which gradients are wanted."""
        weights, *memory = (tensor.detach().requires_grad_() for tensor in self.tensors())
        return State(weights, tuple(memory), self.steps)


class Simulator:
    """A client's local work on a model, from the weights that were sent."""

    def __init__(self, model: nn.Module, work: LocalWork, *, text: bool = False) -> None:
        parameters = dict(model.named_parameters())
        self.model, self.work, self.text = model, work, text
        self.names = tuple(parameters)
        self.shapes = [parameter.shape for parameter in parameters.values()]
        self.start = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        self._replicas = vmap(grad(self._loss))

    def _loss(self, weights: Tensor, x: Tensor, y: Tensor, shares: Tensor) -> Tensor:
        """sum_i s_i L(x_i, y_i): the mean cross-entropy of a batch.

        Of text, x (B, T+1, V) are distributions over tokens, each to be predicted from those before it; y is not used.
        """
        pieces = weights.split([shape.numel() for shape in self.shapes])
        named = {name: piece.view(shape) for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)}
        if self.text:
            predicted = functional_call(self.model, named, (x[:, :-1],)).log_softmax(dim=-1)
            losses = -(x[:, 1:] * predicted).sum(dim=-1).mean(dim=1)
        else:
            losses = F.cross_entropy(functional_call(self.model, named, (x,)), y, reduction="none")
        total: Tensor = (losses * shares).sum()
        return total

    def gradients(self, weights: Tensor, step: Step) -> Tensor:
        """(K, P): the gradients of the replicas; one alone is spared the detour over batched weights."""
        found: Tensor
        if len(weights) == 1:
            x = step.inputs[0]
            if x.dim() == 4:  # a fifth faster on a CPU
                x = x.contiguous(memory_format=torch.channels_last)
            found = grad(self._loss)(weights[0], x, step.labels[0], step.shares[0])[None]
        else:
            found = self._replicas(weights, step.inputs, step.labels, step.shares)
        return found

    def begin(self, replicas: int) -> State:
        """K replicas of the weights that the server sent."""
        weights = self.start.expand(replicas, -1).clone()
        count = 2 if self.work.optimizer == "adam" else 1 if self.work.momentum else 0
        return State(weights, tuple(torch.zeros_like(weights) for _ in range(count)), 0)

    def advance(self, state: State, step: Step) -> State:
        """One local step: the arithmetic of `torch.optim`."""
        work, weights, number = self.work, state.weights, state.steps + 1
        gradient = self.gradients(weights, step)
        if work.weight_decay:
            gradient = gradient + work.weight_decay * weights
        if work.optimizer == "adam":
            first = 0.9 * state.memory[0] + 0.1 * gradient
            second = 0.999 * state.memory[1] + 0.001 * gradient.square()
            # The square root has no slope at 0: where a weight has never had a gradient, it does not move either.
            root = torch.where(second > 0, second, 1.0).sqrt() / math.sqrt(1 - 0.999**number)
            moved = work.rate(state.steps) / (1 - 0.9**number) * first / (torch.where(second > 0, root, 0.0) + 1e-8)
            return State(weights - moved, (first, second), number)
        if work.momentum:
            velocity = work.momentum * state.memory[0] + gradient
            return State(weights - work.rate(state.steps) * velocity, (velocity,), number)
        return State(weights - work.rate(state.steps) * gradient, (), number)

    def update(self, steps: Sequence[Step]) -> Tensor:
        """(K, P): the weights after all steps minus those before, without a graph."""
        with torch.no_grad():
            state = self.begin(len(steps[0].inputs))
            for step in steps:
                state = self.advance(state, step)
            return state.weights - self.start

    def slope(
        self, steps: Sequence[Step], distance: Distance, *, last: int | None = None, segment: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """d(w_T - w_0), and its gradient with respect to the inputs of every step.

        `last` truncates: only the last so many steps are differentiated through, the others get the gradient zero.
        `segment` is the number of steps whose graph is held at once. With s of them T/s states are held, too, and the
        graph of a step is about twice a state: s = sqrt(T/2) is the least.
        """
        segment = segment or max(_HELD_ANYWAY, math.isqrt(len(steps) // 2))
        if segment >= len(steps) and last is None:
            return self._slope_at_once(steps, distance)
        *states, reached = self._states(steps, segment)
        end = reached.detached()
        value = distance(end.weights - self.start)
        cotangents = torch.autograd.grad(value, end.tensors(), allow_unused=True, materialize_grads=True)
        earliest = 0 if last is None else max(0, len(steps) - last)
        gradients: list[Tensor] = []  # from the last step to the first
        while states and len(steps) - len(gradients) > earliest:
            some = steps[segment * (len(states) - 1) : len(steps) - len(gradients)]
            cotangents, found = self._backwards(states.pop(), some, cotangents)
            gradients += reversed(found)
        untouched = [torch.zeros_like(step.inputs) for step in steps[:earliest]]
        return value.detach(), untouched + gradients[: len(steps) - earliest][::-1]

    def _slope_at_once(self, steps: Sequence[Step], distance: Distance) -> tuple[Tensor, list[Tensor]]:
        """The same in one go, where the graph of all steps can be held."""
        inputs = [step.inputs.detach().requires_grad_() for step in steps]
        state = self.begin(len(inputs[0]))
        state = State(state.weights.requires_grad_(), state.memory, 0)
        for x, step in zip(inputs, steps, strict=True):
            state = self.advance(state, Step(x, step.labels, step.shares))
        value = distance(state.weights - self.start)
        return value.detach(), list(torch.autograd.grad(value, inputs))

    def _states(self, steps: Sequence[Step], segment: int) -> list[State]:
        """The states before the first step of every segment, and the last one."""
        kept: list[State] = []
        with torch.no_grad():
            state = self.begin(len(steps[0].inputs))
            for t, step in enumerate(steps):
                if t % segment == 0:
                    kept.append(state)
                state = self.advance(state, step)
        return [*kept, state]

    def _backwards(
        self, state: State, steps: Sequence[Step], cotangents: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """From the gradient with respect to a segment's end to those of its beginning and of its inputs."""
        begun = state = state.detached()
        inputs = [step.inputs.detach().requires_grad_() for step in steps]
        for x, step in zip(inputs, steps, strict=True):
            state = self.advance(state, Step(x, step.labels, step.shares))
        wanted = (*begun.tensors(), *inputs)
        found = torch.autograd.grad(state.tensors(), wanted, cotangents, allow_unused=True, materialize_grads=True)
        return found[: len(begun.tensors())], found[len(begun.tensors()) :]
