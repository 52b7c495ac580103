# SPDX-License-Identifier: Apache-2.0
"""Text from the gradient of a decoder: the tokens exactly, their order, and the sequences.

Which tokens: only the rows of used tokens have a gradient in the embedding. Their order: `text_search`. Which sequence
how often, and the token after its last: the head's gradient. At last the gradient of the batch that was found is
computed: if it is the observed one up to rounding, the batch is certified.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.attacks.matching import client_gradient, matching_loss, private_copy
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction, check_observation
from fedsim.attacks.text_search import Prefix, Search, Span, span_of
from fedsim.errors import AttackError
from fedsim.scenario import Prune, TextAttack
from fedsim.transformer import Transformer

_ROUNDING = 1e-9  # of the squared relative difference between two computations of a gradient in float32
_ALTERNATIVES = 16  # tokens that are tried at least, so that there are wrong ones to compare with


@dataclass(frozen=True, eq=False)
class _Batch:
    """Sequences (n, T) with their next tokens (n, T), the share of each in the gradient, and how sure each is."""

    inputs: Tensor
    labels: Tensor
    weights: Tensor
    sure: Tensor


def text(observation: Observation, knowledge: Knowledge, settings: TextAttack, *, seed: int = 0) -> Reconstruction:
    """The sequences of a batch, with the token that follows each place as its label.

    Needs fewer different prefixes in the batch (at most sequences times places) than the width of the model, and takes
    no chance, so no `seed`; of wider batches only the set of tokens is found. Updates of a few small local steps and
    gradients with a little noise are searched in the same way, and nothing is certified then.
    """
    check_observation(observation, knowledge)
    deadline = time.monotonic() + (settings.seconds or math.inf)
    model, gradient = _decoder(observation, knowledge), _summed_gradient(observation)
    length, examples = knowledge.input_shape[0], observation.batch_size
    places = None if examples is None else examples * length
    present = _present_tokens(gradient["tokens.weight"], knowledge)
    notes = [_token_note(present, knowledge)]
    spans = _spans(model, gradient, places)
    if spans is None:
        notes.append(
            f"the {places or 'unknown number of'} places of the batch fill the model's width of"
            f" {model.tokens.embedding_dim}, so that every token fits everywhere and no order can be found"
        )
        return _partial([], length, notes)
    tokens = _tried(gradient["tokens.weight"], present, places)
    search = Search(model, spans, tokens, examples, settings.beam, deadline, client_gradient(observation) is not None)
    notes.append(_span_note(search))
    with torch.no_grad():
        found = search.run(length)
        if len(found[0].tokens) < length:
            notes.append(
                f"the time was over after {len(found[0].tokens)} of {length} places, the rest is filled with 0"
            )
            return _partial(found, length, notes)
        batch = _weighed(model, gradient["head.weight"], found, examples, exact=search.sharp)
    return _verified(observation, knowledge, model, gradient, batch, notes)


def _decoder(observation: Observation, knowledge: Knowledge) -> Transformer:
    """The model in float64, so that there is no rounding but the client's."""
    if knowledge.kind != "text" or not isinstance(observation.model, Transformer):
        raise AttackError(
            f"attack text reads the layers of the model transformer on text, not {type(observation.model).__name__} on"
            f" data of kind {knowledge.kind}; use another attack"
        )
    if observation.kind == "update" and observation.work.optimizer != "sgd":
        raise AttackError(
            f"attack text needs an update that is a sum of gradients, but client.optimizer"
            f" {observation.work.optimizer} sends another; attack clients that use sgd, or fedsgd"
        )
    model = private_copy(observation.model, torch.float64)
    assert isinstance(model, Transformer)
    return model


def _summed_gradient(observation: Observation) -> dict[str, Tensor]:
    """The gradient, or the sum over local steps; weight decay, which has the weights' full rank, is taken out."""
    work, share = observation.work, 0.0
    if observation.kind == "update" and work.weight_decay and observation.examples is not None:
        steps = work.local_steps(observation.examples)
        share = (1 - (1 - work.learning_rate * work.weight_decay) ** steps) / work.learning_rate
    return {
        name: tensor.double() - share * observation.weights[name].double()
        for name, tensor in observation.gradient.items()
    }


def _spans(model: Transformer, gradient: dict[str, Tensor], places: int | None) -> dict[str, Span] | None:
    """The spans of the layers that tell order; None where one of them is the whole space."""
    later = [f"blocks.{number}.{layer}" for number in range(1, len(model.blocks)) for layer in ("qkv", "mlp.0")]
    found: dict[str, Span] = {}
    for name in ["blocks.0.mlp.0", *later]:
        span = span_of(gradient[f"{name}.weight"], places)
        if span is None:
            return None
        found[name] = span
    return found


def _present_tokens(gradient: Tensor, knowledge: Knowledge) -> Tensor | None:
    """The tokens of the batch: the rows of the embedding that have a gradient. None where every row is disturbed."""
    used = gradient.any(dim=1)
    if isinstance(knowledge.defence.compression, Prune) or (used.all() and len(used) > _ALTERNATIVES):
        return None
    return used.nonzero().squeeze(1)


def _tried(gradient: Tensor, present: Tensor | None, places: int | None) -> Tensor:
    """The tokens that are present and, for comparison, a few others; under noise the rows of the largest gradients."""
    if present is None:
        largest: Tensor = gradient.norm(dim=1).argsort(descending=True, stable=True)
        return largest[: 2 * places if places else None]
    absent = (~gradient.any(dim=1)).nonzero().squeeze(1)
    return torch.cat([present, absent[: max(_ALTERNATIVES - len(present), 0)]])


def _weighed(model: Transformer, gradient: Tensor, found: list[Prefix], examples: int | None, *, exact: bool) -> _Batch:
    """How much of the head's gradient each sequence explains, how often it was there, and the token after its last.

    The head has the weight gradient G = Σ_u w_u (Σ_p q_up h_up' - Σ_{p<T} e_{x_u,p+1} h_up') - Σ_u w_u e_{y_u} h_uT',
    with probabilities q, inputs h and one-hot e. What is unknown in the last sum is only in the span of the h_uT:
    outside it the weights w are a problem of least squares, and with them the last tokens y are another.
    """
    x = torch.tensor([prefix.tokens for prefix in found])
    hidden = model.norm(model.blocks(model.tokens(x) + model.positions(torch.arange(x.shape[1]))))
    error = model.head(hidden).softmax(-1)
    error[:, :-1] -= F.one_hot(x[:, 1:], error.shape[2])
    parts, ends = error.transpose(1, 2) @ hidden, hidden[:, -1]  # (n, V, d), (n, d)
    outside = torch.eye(ends.shape[1], dtype=ends.dtype) - torch.linalg.pinv(ends) @ ends
    weights = _least_squares((parts @ outside).flatten(1).T, (gradient @ outside).reshape(-1, 1)).squeeze(1)
    order = weights.argsort(descending=True, stable=True)[: examples or len(found)]
    order = order[weights[order] > 0.1 * weights[order[0]]]  # sequences that were not there explain nothing
    weights = weights[order]
    following = _least_squares(ends[order].T, (torch.einsum("n,nvd->dv", weights, parts[order]) - gradient.T))
    copies = _copies(weights, examples) if exact else [1] * len(weights)
    return _copied([found[i] for i in order.tolist()], weights, following, copies)


def _least_squares(design: Tensor, target: Tensor) -> Tensor:
    """The s of smallest ||design s - target||, and of those the shortest."""
    solution: Tensor = torch.linalg.lstsq(design, target, driver="gelsd").solution
    return solution


def _copies(weights: Tensor, examples: int | None) -> list[int]:
    """How often each sequence was in the batch: in proportion to its weight, at least once, `examples` in all."""
    unit = float(weights.sum()) / examples if examples else float(weights.min())
    counts = [max(1, round(float(weight) / unit)) for weight in weights]
    fits = examples is None or sum(counts) == examples
    return counts if fits else [1] * len(counts)  # unequal weights of sequences that were there once: clipped examples


def _copied(found: list[Prefix], weights: Tensor, following: Tensor, copies: list[int]) -> _Batch:
    """Every sequence as often as it was there, each copy with one of the tokens (n, V) that follow it."""
    inputs, labels, shares, sure = [], [], [], []
    for prefix, weight, tokens, count in zip(found, weights.tolist(), following.clone(), copies, strict=True):
        for _ in range(count):
            last = int(tokens.argmax())
            tokens[last] -= weight / count
            inputs.append(prefix.tokens)
            labels.append((*prefix.tokens[1:], last))
            shares.append(weight / count)
            sure.append(prefix.sure)
    return _Batch(
        torch.tensor(inputs), torch.tensor(labels), torch.tensor(shares, dtype=torch.float64), torch.tensor(sure)
    )


def _verified(
    observation: Observation,
    knowledge: Knowledge,
    model: Transformer,
    gradient: dict[str, Tensor],
    batch: _Batch,
    notes: list[str],
) -> Reconstruction:
    """The batch, certified if its gradient, with the weights that clipping may give, is the observed one."""
    apart = _apart(model, gradient, batch)
    certain = apart < _ROUNDING
    if certain:
        notes = [*notes, "the gradient of the batch that was found is the observed one up to rounding"]
    clipped = knowledge.defence.client_dp is not None or knowledge.defence.example_dp is not None
    return Reconstruction(
        attack="text",
        inputs=batch.inputs,
        labels=batch.labels,
        loss=apart if clipped else matching_loss(observation, batch.inputs, batch.labels),
        score=torch.ones(len(batch.inputs)) if certain else batch.sure,
        certified=torch.full((len(batch.inputs),), certain),
        label_counts=torch.bincount(batch.labels.flatten(), minlength=knowledge.classes),
        notes=tuple(notes),
    )


def _apart(model: Transformer, gradient: dict[str, Tensor], batch: _Batch) -> float:
    """||Σ_u w_u g(x_u, y_u) - g||² / ||g||², over all parameters."""
    each = F.cross_entropy(model(batch.inputs).transpose(1, 2), batch.labels, reduction="none").sum(1)
    parts = torch.autograd.grad(each @ batch.weights, list(model.parameters()))
    difference = sum(float((part - seen).square().sum()) for part, seen in zip(parts, gradient.values(), strict=True))
    return difference / sum(float(seen.square().sum()) for seen in gradient.values())


def _partial(found: list[Prefix], length: int, notes: list[str]) -> Reconstruction:
    """Beginnings of sequences, or none."""
    inputs = torch.zeros(len(found), length, dtype=torch.int64)
    for row, prefix in zip(inputs, found, strict=True):
        row[: len(prefix.tokens)] = torch.tensor(prefix.tokens)
    return Reconstruction("text", inputs, None, math.nan, torch.zeros(len(found)), notes=tuple(notes))


def _token_note(present: Tensor | None, knowledge: Knowledge) -> str:
    if present is None:
        return "every token of the vocabulary has a gradient, so that the set of tokens is not certain"
    return f"{len(present)} of {knowledge.classes:,} tokens occur in the batch: exactly those have a gradient"


def _span_note(search: Search) -> str:
    rank, gap = min((span.rank, span.gap) for span in search.spans.values())
    if search.sharp:
        return f"the layers' gradients have rank {rank}, with a gap of {gap:.0e} to their rounding"
    return f"noise or several local steps blur the spans of the layers' gradients (gap {gap:.1f} at rank {rank})"
