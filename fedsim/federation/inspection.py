# SPDX-License-Identifier: Apache-2.0
"""A client looks at the model that it was sent: is it made to leak?

There are two kinds of tests. Those of the weights alone tell nobody anything about the client. Those of what the
weights do to the client's own examples see more; but a refusal that depends on data is a release, so under a privacy
claim they are not used. Each suspicion names the number that raised it; the thresholds are far beyond what honest
models of the zoo show, trained or not (tests/federation/test_inspection.py).

What it misses. Rows that differ where the inputs are always zero (a border of black pixels) are not parallel and sort
the examples all the same: the weights alone do not show it, the activations do. A model that was trained to leak (SEER,
Garov et al. 2024) has no absurd weights, and is seen only if one example really dominates the client's gradient. Fewer
than a tenth of a layer's rows can be bins unseen. And what an honest gradient gives away is no fault of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedsim.models import evaluating

_ROWS = 2048  # of a layer's rows, at most so many are compared with each other

# Thresholds, and the largest value that honest models showed (zoo, untrained and trained, digits and breast_cancer).
PARALLEL_SHARE = 0.1  # 0
ABSURD_BIAS = 10.0  # 0.6
ABSURD_WEIGHT = 1000.0  # 1 untrained
UNBALANCED = 0.97  # 0.64
INACTIVE = 0.95  # 0.68
NESTED = 0.9  # 0.22
DOMINANCE = 100.0  # 2.4; a model that fits all of a client's examples but one shows more
STEEP = 100.0  # 20


@dataclass(frozen=True)
class Suspicion:
    """Why a model looks as if it were made to leak: the test, the layer, and the number beyond its threshold."""

    test: str
    layer: str
    value: float
    threshold: float

    def __str__(self) -> str:
        return f"{self.test} in {self.layer} ({self.value:.3g}, honest models stay below {self.threshold:g})"


def inspect_model(
    model: nn.Module, weights: Mapping[str, Tensor], examples: tuple[Tensor, Tensor] | None = None
) -> tuple[Suspicion, ...]:
    """What is suspicious about a model with these weights; `examples` are some of the client's own, with labels."""
    suspicions = list(_weights_alone(model, weights))
    if examples is not None and len(examples[0]) >= 8:
        suspicions += _on_examples(model, weights, *examples)
    return tuple(suspicions)


# --- the weights alone ----------------------------------------------------------------------------------------------


def _weights_alone(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[Suspicion]:
    parameters = {name for name, _ in model.named_parameters()}
    for name in sorted(parameters & weights.keys()):
        largest = float(weights[name].detach().abs().nan_to_num(nan=math.inf, posinf=math.inf).max())
        yield from _beyond("absurd weights, or none that are numbers,", name, largest, ABSURD_WEIGHT)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        key = f"{name}." if name else ""
        matrix = weights[f"{key}weight"].detach().flatten(1)
        bias = weights.get(f"{key}bias")
        rows, inputs = matrix.shape
        if rows >= 4 and inputs >= 8:
            yield from _beyond("parallel rows", name, parallel_share(matrix), PARALLEL_SHARE)
        if rows >= 4 and bias is not None:
            scale = matrix.norm(dim=1).median().clamp_min(1e-12)
            yield from _beyond("absurd biases", name, float(bias.abs().max() / scale), ABSURD_BIAS)
        if rows >= 32 and inputs >= 32 and isinstance(module, nn.Linear):
            yield from _beyond("rows that are negative in sum", name, negative_share(matrix), UNBALANCED)


def _beyond(test: str, layer: str, value: float, threshold: float) -> Iterator[Suspicion]:
    if value > threshold:
        yield Suspicion(test, layer or "the model", value, threshold)


def parallel_share(matrix: Tensor) -> float:
    """The share of the rows (m, d) that point the same way as another, to a cosine of 0.99; zero rows do not count."""
    norms = matrix.norm(dim=1)
    units = (matrix / norms.clamp_min(1e-30)[:, None])[norms > 1e-12 * norms.max().clamp_min(1e-30)][:_ROWS]
    if len(units) < 2:
        return 0.0
    cosine = units @ units.T
    cosine.fill_diagonal_(-1.0)
    return float((cosine.amax(dim=1) > 0.99).float().sum() / len(matrix))


def negative_share(matrix: Tensor) -> float:
    """The share of the rows whose entries sum to less than zero: a half, in honest layers; all, in trap weights."""
    return float((matrix.sum(dim=1) < 0).float().mean())


# --- what they do to the client's examples --------------------------------------------------------------------------


def _on_examples(model: nn.Module, weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Iterator[Suspicion]:
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _m, _i, output, name=name: seen.setdefault(name, output.detach()))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        with evaluating(model):
            logits = functional_call(model, dict(weights), (x,))
    finally:
        for handle in handles:
            handle.remove()
    yield from _beyond("a head too steep", "the logits", float(logits.std()), STEEP)
    first = next(iter(seen.items()), None)
    if first is not None and first[1].dim() == 2 and first[1].shape[1] >= 16 and first[1] is not logits:
        active = first[1] > 0
        yield from _beyond("rows that almost no example activates", first[0], float((~active).float().mean()), INACTIVE)
        yield from _beyond("rows that sort the examples", first[0], nested_share(active), NESTED)
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        yield from _beyond(
            "one example dominates the gradient", "the model", dominance(model, weights, x, y), DOMINANCE
        )


def nested_share(active: Tensor) -> float:
    """In which share of the pairs of neighbouring rows (n, m) one is active for a subset of the other's examples.

    Bins are thresholds of one answer, so all of them are nested. Pairs in which a row is active for nobody or for
    everybody do not count.
    """
    mixed = active[:, active.any(dim=0) & ~active.all(dim=0)]
    if mixed.shape[1] < 16:
        return 0.0
    left, right = mixed[:, :-1], mixed[:, 1:]
    nested = (~(left & ~right).any(dim=0)) | (~(right & ~left).any(dim=0))
    return float(nested.float().mean())


def dominance(model: nn.Module, weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> float:
    """The largest ||g_i|| / ||sum of the others' g|| of at most 64 examples i (the D-SNR of Garov et al. 2024)."""
    parameters = {name: tensor for name, tensor in weights.items() if name in dict(model.named_parameters())}

    def loss(values: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, {**weights, **values}, (one[None],))
        return nn.functional.cross_entropy(logits.flatten(0, -2), label.view(-1))

    some = slice(0, 64)
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x[some], y[some])
    flat = torch.cat([g.flatten(1) for g in gradients.values()], dim=1)
    rest = (flat.sum(dim=0) - flat).norm(dim=1)
    return float((flat.norm(dim=1) / rest.clamp_min(1e-30)).max())
