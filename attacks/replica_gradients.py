# SPDX-License-Identifier: Apache-2.0
"""The gradients of many guesses at once, differentiable by the guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedsim.attacks.matching import mean_cross_entropy, private_copy
from fedsim.attacks.priors import BatchStatistics, statistics_apart

_KINKS = ("Relu", "LeakyRelu", "Prelu", "MaxPool", "Hardtanh", "Threshold", "Clamp", "Abs", "Max", "Min", "Sign")


def is_smooth(model: nn.Module, shape: Sequence[int]) -> bool:
    """Whether no operation from inputs to logits has a kink, so that the gradient itself can be differentiated."""
    logits = private_copy(model, torch.float64)(torch.zeros(2, *shape, dtype=torch.float64))
    waiting, seen = [logits.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith(_KINKS):
            return False
        waiting += [before for before, _ in node.next_functions]
    return True


class ReplicaGradients:
    """(inputs (R, n, *shape), labels (R, n) or (R, n, classes)) -> gradients [(R, *shape)], BatchNorm distance (R,).

    One restart goes through autograd. Several go through `vmap(grad)`, which was 1.2 (large convolutions) to 2 times
    (small networks) faster on one core than one after the other, and than weights repeated for each restart.
    """

    def __init__(self, model: nn.Module, known: Mapping[str, BatchStatistics]) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._fixed = {name: parameter.detach() for name, parameter in self._parameters.items()}
        self._apart: list[Tensor] = []
        self._vectorised = True
        dtype = next(iter(self._parameters.values())).dtype
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                # statistics of the batch in every pass, and none kept: vmap allows no change in place
                module.running_mean = module.running_var = module.num_batches_tracked = None
                if name in known:
                    self._watch(module, known[name], dtype)

    def _watch(self, module: nn.Module, known: BatchStatistics, dtype: torch.dtype) -> None:
        wanted = BatchStatistics(known.mean.to(dtype), known.variance.to(dtype))

        def note(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            self._apart.append(statistics_apart(arguments[0], wanted))

        module.register_forward_pre_hook(note)

    def __call__(self, inputs: Tensor, labels: Tensor) -> tuple[list[Tensor], Tensor]:
        """As the class says."""
        if len(inputs) > 1 and self._vectorised:
            try:
                found, apart = vmap(grad(self._loss, has_aux=True), (None, 0, 0), randomness="same")(
                    self._fixed, inputs, labels
                )
                return [found[name] for name in self._parameters], apart
            except (RuntimeError, ValueError):  # an operation that vmap does not know
                self._vectorised = False
        each = [self._one(x, y) for x, y in zip(inputs, labels, strict=True)]
        return [torch.stack(parts) for parts in zip(*(g for g, _ in each), strict=True)], torch.stack(
            [apart for _, apart in each]
        )

    def _loss(self, parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self._apart.clear()
        logits = functional_call(self._model, parameters, (inputs,))
        return mean_cross_entropy(logits, labels), sum(self._apart, inputs.new_zeros(()))

    def _one(self, inputs: Tensor, labels: Tensor) -> tuple[list[Tensor], Tensor]:
        self._apart.clear()
        loss = mean_cross_entropy(self._model(inputs), labels)
        apart = sum(self._apart, inputs.new_zeros(()))
        parameters = list(self._parameters.values())
        found = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)], apart
