# SPDX-License-Identifier: Apache-2.0
"""Which classes were in a batch, and how many examples of each, from the last layer's gradient.

With logits z = W h + b and the mean cross-entropy over N predictions, dL/db = mean(p) - n/N, where p is the softmax and
n the counts. So n = N (mean(p) - dL/db): everything is known but mean(p). It is estimated in two ways: from the
features that the gradient itself tells, dL/dW ~ dL/db h' (iLRG, Ma et al. 2023, has one h for each class); and from
noise passed through the model. For FedAvg both are averaged over the way from the model that was sent to the one that
came back (Dimitrov et al. 2022, section 4.3). Which estimate holds, and by which factor the gradient was clipped, is
decided by what must be true: counts are integers, not negative, and sum to N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.attacks.last_layer import (
    HeadGradient,
    NoiseOutputs,
    head_gradient,
    noise_outputs,
    way_points,
    weights_on_way,
)
from fedsim.attacks.matching import client_gradient
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction, check_observation
from fedsim.attacks.softmax_batch import label_hypotheses, solve_softmax_batch
from fedsim.errors import AttackError
from fedsim.scenario.attack import LabelsAttack

_SURE = 0.999  # for `exact`: the probability, in the attacker's judgement, that no count is wrong
_FEW = 6  # predictions whose softmax equations are tried
_HYPOTHESES = 120  # and with how many count vectors
_SCALES = 400  # how many factors of a clipped gradient are tried
_BALANCE = (0.1, 1.0, 10.0, 100.0)  # of classes, from a few of them to all alike
_UNEXPECTED = 1e9  # odds against a clipped gradient where no clipping is known of


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """How many examples (of a text: predicted tokens) of each class an update was computed from."""

    counts: Tensor
    """(classes,) int64; they sum to the number of predictions."""
    estimate: Tensor
    """(classes,) float64, before rounding."""
    error: Tensor
    """(classes,) float64, the standard error of the estimate."""
    exact: bool
    """The counts follow from the gradient, or each is many standard errors from any other number."""
    notes: tuple[str, ...] = ()

    @property
    def labels(self) -> Tensor:
        """(n,) int64: the labels themselves, in ascending order."""
        return torch.repeat_interleave(torch.arange(len(self.counts)), self.counts)


def labels(observation: Observation, knowledge: Knowledge, settings: LabelsAttack, *, seed: int = 0) -> Reconstruction:
    """The labels of the batch, without its inputs."""
    found = count_labels(observation, knowledge)
    sure = "the counts are exact" if found.exact else f"standard error of a count up to {float(found.error.max()):.2g}"
    return Reconstruction(
        attack="labels",
        inputs=torch.empty(0, *knowledge.input_shape),
        labels=None,
        loss=math.nan,
        score=torch.empty(0),
        label_counts=found.counts,
        notes=(*found.notes, sure),
    )


def count_labels(observation: Observation, knowledge: Knowledge, batch_size: int | None = None) -> LabelCounts:
    """The number of examples of each class in the data that an update was computed from.

    Args:
        observation: a gradient, or the update of local SGD (momentum and weight decay are accounted for).
        knowledge: its value range and statistics make the noise inputs, its defence the expected errors.
        batch_size: how many distinct examples were used; None: as the observation says.

    Guarantees: counts are not negative and sum to the number of predictions (of a text: examples times length); one
    prediction without noise is exact. On a trained network, whose predictions differ from example to example, a batch
    is only estimated, and `error` says so.
    """
    check_observation(observation, knowledge)
    signal = head_gradient(observation, knowledge)
    size, notes = _examples_used(observation, batch_size)
    total = size * (math.prod(knowledge.input_shape) if knowledge.kind == "text" else 1)
    if total == 1:
        return _single(signal, notes)
    if observation.kind == "update" and observation.work.optimizer == "adam":
        raise AttackError(
            "the labels of a batch cannot be counted from an update of client.optimizer adam, which rescales every"
            " entry of the gradient; attack a client with optimizer sgd"
        )
    estimated = _batch(observation, knowledge, signal, total, notes)
    return estimated if estimated.exact else _solved(observation, signal, estimated, total) or estimated


def _examples_used(observation: Observation, batch_size: int | None) -> tuple[int, tuple[str, ...]]:
    work = observation.work
    notes: tuple[str, ...] = ()
    size = batch_size if batch_size is not None else observation.batch_size
    if size is None and observation.examples is not None:
        size, notes = work.batch(observation.examples), ("the batch size is random: its expected value was used",)
    if size is None:
        raise AttackError(
            "the counts of labels need the number of examples, which this client does not say; give batch_size"
        )
    if size < 1:
        raise AttackError(f"batch_size {size} is not a number of examples; give at least 1")
    if batch_size is None and observation.kind == "update":  # a client may take too few steps to use all that it has
        size = min(size, work.local_steps(size) * work.batch(size))
    return size, notes


def _single(signal: HeadGradient, notes: tuple[str, ...]) -> LabelCounts:
    """One prediction: dL/dz = p - e_y has one negative entry, at its class (iDLG, Zhao et al. 2020, equation 3)."""
    slopes = signal.bias if signal.bias is not None else _single_slopes(signal.weight)
    lowest, second = slopes.sort().values[:2].tolist()
    counts = torch.zeros(len(slopes), dtype=torch.int64)
    counts[slopes.argmin()] = 1
    wrong = 0.0 if signal.noise == 0 else 0.5 * math.erfc((second - lowest) / (2 * signal.noise))
    error = torch.full((len(slopes),), math.sqrt(wrong * (1 - wrong)), dtype=torch.float64)
    return LabelCounts(counts, counts.double(), error, lowest < 0 and 1 - wrong > _SURE, notes)


def _single_slopes(weight: Tensor) -> Tensor:
    """dL/dz up to a positive factor, from dL/dW = dL/dz h' of one example: its left singular vector.

    The sign: the entry at the class is negative, and as large as all others together. Two classes are equally large;
    there the features, which a ReLU or a sigmoid makes positive, decide.
    """
    left: Tensor = torch.linalg.svd(weight, full_matrices=False).U[:, 0]
    if len(left) == 2:
        return weight.sum(1)
    return -left if left[left.abs().argmax()] > 0 else left


def _solved(observation: Observation, signal: HeadGradient, estimated: LabelCounts, total: int) -> LabelCounts | None:
    """A few predictions, fewer than classes: the counts for which the softmax equations of one step have a solution."""
    observed = client_gradient(observation)
    most = min(len(estimated.counts) - 1, signal.weight.shape[1], _FEW)
    if observed is None or signal.bias is None or signal.layer.bias is None or signal.noise > 0 or total > most:
        return None
    layer = observation.weights[signal.layer.weight].double(), observation.weights[signal.layer.bias].double()
    hypotheses = label_hypotheses(estimated.estimate, estimated.error, total, _HYPOTHESES)
    found = solve_softmax_batch(layer, (signal.weight, signal.bias), hypotheses, starts=2)
    if found is None or (found.scale > 1.001 and observation.clients == 1):
        return None
    counts = torch.bincount(found.labels, minlength=len(estimated.counts))
    note = "the softmax equations have a solution with these labels"
    return LabelCounts(counts, counts.double(), torch.zeros(len(counts), dtype=torch.float64), True, (note,))


# --- batches ----------------------------------------------------------------------------------------------------------


def _batch(
    observation: Observation, knowledge: Knowledge, signal: HeadGradient, total: int, notes: tuple[str, ...]
) -> LabelCounts:
    """Weigh every pair of an estimate of mean(p) and a factor c by how well integer counts explain the gradient.

    Given both, n is N (mean(p) - g/c) rounded to counts of sum N, and c (mean(p) - n/N) - g is what is left, to be
    compared with what the noise and the spread of the estimates of mean(p) allow.
    """
    noise = noise_outputs(observation, knowledge, signal.layer)
    slopes, deviation = _slopes(signal, noise)
    means, spread, prior = _mean_softmax(observation, signal, noise, total)
    scales = _scales(observation, knowledge, slopes, means, free=signal.bias is None)
    estimates = total * (means[:, None] - slopes / scales[:, None])  # (groups, scales, classes)
    nearest = nearest_counts(estimates, total)
    left = scales[:, None] * (means[:, None] - nearest / total) - slopes
    floor = (left.square().sum(-1).min() + (1e-6 * slopes.norm()) ** 2) / len(slopes)
    doubt = (scales[:, None] * spread).square()
    variance = deviation**2 + doubt + floor  # (scales, classes)
    # Student's t with 3 degrees of freedom: how far a softmax may be off is only roughly known
    tails = 2 * (left.square() / (3 * variance)).log1p()
    fit = prior[:, None] + count_prior(nearest) - (tails + 0.5 * variance.log()).sum(-1)
    surprise = 0.0 if _clips(knowledge) else math.log(_UNEXPECTED)
    weights = (fit - torch.where(scales == 1, 0.0, surprise + math.log(len(scales)))).flatten().softmax(0)
    scale = float(scales[int(weights.argmax()) % len(scales)])
    estimate = weights @ estimates.flatten(0, 1)
    between = weights @ (estimates.flatten(0, 1) - estimate).square()
    within = (weights.unflatten(0, (len(means), -1)).sum(0) / scales**2) @ (variance + 2 * doubt)  # that of the t
    error = (between + total**2 * within + total * _unequal_use(observation) / len(slopes)).sqrt()
    counts = nearest_counts(estimate, total)
    sure = float(torch.special.ndtr((0.5 - (estimate - counts).abs()) / error).prod())
    if scale < 0.999:
        why = ": it was clipped" if _clips(knowledge) else ", and the reason is not known: local steps, or a scale"
        notes = (*notes, f"the gradient is {scale:.3g} times that of such a batch{why}")
    return LabelCounts(counts.long(), estimate, error, sure > _SURE, notes)


def _slopes(signal: HeadGradient, noise: NoiseOutputs) -> tuple[Tensor, float]:
    """mean(p) - n/N, up to noise: the bias's gradient, or dL/dW u / |u|^2 with u the mean feature (Geng et al. 2021).

    The second averages the noise over the entries of a row, but is only as right as u: whichever errs less is taken.
    """
    mean = noise.features.mean((0, 1))
    length = float(mean.norm())
    rows = signal.weight @ mean / length**2
    doubt = float((noise.features @ mean / length**2).std()) * float(rows.square().mean().sqrt())
    error = math.hypot(signal.noise / length, doubt)
    if signal.bias is None or error < signal.noise:
        return rows, error
    return signal.bias, signal.noise


def _mean_softmax(
    observation: Observation, signal: HeadGradient, noise: NoiseOutputs, total: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Estimates of mean(p) (groups, classes), how far they may be off (classes,), and their prior log-weights.

    The gradient's own estimate counts as much as its assumption, that examples have similar features, explains of it.
    """
    prior = torch.full((len(noise.softmax),), -math.log(len(noise.softmax)), dtype=torch.float64)
    spread = noise.variance / total + noise.softmax.var(0, correction=0)
    if signal.bias is None:
        return noise.softmax, spread.sqrt(), prior
    own, explained = _own_softmax(observation, signal, total)
    odds = math.log(max(explained, 1e-12)) - math.log(max(1 - explained, 1e-12))
    spread = spread / 4 + ((own - noise.softmax.mean(0)) / 2).square()
    spread = (spread + spread.mean()) / 2
    return torch.cat([noise.softmax, own[None]]), spread.sqrt(), torch.cat([prior, prior.new_tensor([odds])])


def _own_softmax(observation: Observation, signal: HeadGradient, total: int) -> tuple[Tensor, float]:
    """softmax(W h + b) at the mean feature h that dL/dW = dL/db h' gives by least squares; and the share explained.

    A row's deviation is the sum over its n_c examples, so rows are weighted by 1 / n_c, as estimated before.
    """
    assert signal.bias is not None
    assert signal.layer.bias is not None
    rows, slopes = signal.weight, signal.bias
    ways = [(weights_on_way(observation, way), weight) for way, weight in way_points(observation)]
    feature = slopes @ rows / slopes.square().sum()
    explained = 1 - float((rows - torch.outer(slopes, feature)).square().sum() / rows.square().sum())
    for _ in range(10):
        logits = [(w[signal.layer.weight].double() @ feature + w[signal.layer.bias].double(), s) for w, s in ways]
        own = torch.stack([weight * each.softmax(-1) for each, weight in logits]).sum(0)
        trust = slopes / ((total * (own - slopes)).clamp_min(0) + 0.1 * total / len(slopes))
        feature = trust @ rows / (trust @ slopes)
    return own, explained


def _scales(observation: Observation, knowledge: Knowledge, slopes: Tensor, means: Tensor, *, free: bool) -> Tensor:
    """The factors that the gradient may have been multiplied by: 1, and what keeps every count >= 0, up to 1."""
    one = torch.ones(1, dtype=torch.float64)
    clipping = knowledge.defence.client_dp
    if clipping is not None and clipping.noise == "gaussian" and knowledge.client_noise == 0 and not free:
        norm = math.sqrt(sum(float(entry.double().square().sum()) for entry in observation.update.values()))
        if norm < 0.999 * clipping.clipping_norm:
            return one
    least = 0.8 * float((slopes / means.clamp_min(1e-12)).amax(-1).min())
    most = 3.0 if free or observation.clients > 1 else 1.0
    if not 0 < least < most:
        return one
    return torch.cat([one, torch.logspace(math.log10(least), math.log10(most), _SCALES, dtype=torch.float64)])


def _clips(knowledge: Knowledge) -> bool:
    return knowledge.defence.client_dp is not None or knowledge.defence.example_dp is not None


def _unequal_use(observation: Observation) -> float:
    """The variance of how often an example is used, relative to the mean: by incomplete last batches and epochs."""
    work, examples = observation.work, observation.examples
    if observation.kind == "gradient" or not examples:
        return 0.0
    size, steps = work.batch(examples), work.local_steps(examples)
    rest, epochs = examples % size, steps / math.ceil(examples / size)
    batches = 0.0 if rest == 0 else (rest / examples) * (size / rest - 1) ** 2 / max(epochs, 1.0)
    return batches + (epochs % 1) * (1 - epochs % 1) / epochs**2


def count_prior(counts: Tensor) -> Tensor:
    """Log-probability of counts (..., classes) before any gradient: Dirichlet-multinomial, balanced or not at all.

    Without it a gradient that was clipped by an unknown factor is explained by whatever counts the least factor gives.
    """
    classes, total = counts.shape[-1], counts.sum(-1)
    arrangements = torch.lgamma(total + 1) - torch.lgamma(counts + 1).sum(-1)
    each = [
        math.lgamma(classes * a)
        - torch.lgamma(total + classes * a)
        + (torch.lgamma(counts + a) - math.lgamma(a)).sum(-1)
        for a in _BALANCE
    ]
    return arrangements + torch.stack(each).logsumexp(0) - math.log(len(_BALANCE))


def nearest_counts(estimates: Tensor, total: int) -> Tensor:
    """The integers n >= 0 with sum `total` near `estimates` (..., classes): projected on the simplex, then rounded.

    Rounding down and giving what is left to the largest fractions is the nearest integer point of the same sum.
    """
    ordered = estimates.sort(dim=-1, descending=True).values
    ranks = torch.arange(1, estimates.shape[-1] + 1, dtype=estimates.dtype)
    shifts = (ordered.cumsum(-1) - total) / ranks
    last = (ordered > shifts).long().sum(-1, keepdim=True).clamp_min(1) - 1
    inside = (estimates - shifts.gather(-1, last)).clamp_min(0)
    floors = (inside + 1e-9).floor()
    missing = total - floors.sum(-1, keepdim=True)
    places = (inside - floors).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return floors + (places < missing)
