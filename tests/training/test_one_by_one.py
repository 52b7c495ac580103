# SPDX-License-Identifier: Apache-2.0
"""Models that the kernel cannot express run one client at a time, with the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fedsim.errors import ModelError
from fedsim.training import ExampleClipping, LocalWork, expressible, layout_of, local, train_cohort
from fedsim.training.client import Client, CohortResult, Task
from fedsim.training.one_by_one import train_one

WORKS = {
    "sgd": LocalWork("fedavg", learning_rate=0.1, batch_size=8),
    "schedule": LocalWork("fedavg", learning_rate_decay=0.8, momentum=0.5, batch_size=8, epochs=2),
    "momentum": LocalWork("fedavg", momentum=0.9, weight_decay=0.1, batch_size=8, steps=3),
    "fedsgd": LocalWork("fedsgd", batch_size=8),
    "private": LocalWork("fedavg", batch_size=8, example_dp=ExampleClipping(0.3, 0.8, "poisson"), epochs=2),
    "private-decay": LocalWork(
        "fedavg", batch_size=8, momentum=0.5, weight_decay=0.1, example_dp=ExampleClipping(0.3, 0.8, "shuffle")
    ),
    "private-fedsgd": LocalWork("fedsgd", batch_size=8, example_dp=ExampleClipping(0.3, 0.8, "poisson")),
}


def one_by_one(cohort, work) -> CohortResult:
    layout = layout_of(cohort.model)
    task = Task(cohort.model, layout, cohort.start, cohort.x, cohort.y, work)
    result = CohortResult.empty([len(rows) for rows in cohort.members], layout.size)
    for k, rows in enumerate(cohort.members):
        train_one(task, Client.of(k, rows, work, cohort.randomness[k]), result)
    return result


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
@pytest.mark.parametrize("name", ["mlp", "cnn", "residual", "transformer"])
def test_the_same_numbers_as_the_kernel(federation, name, work):
    """Also the same noise, from the same streams."""
    cohort = federation(name, sizes=(13, 20, 3, 1))
    together, alone = train_cohort(*cohort.arguments(work)), one_by_one(cohort, work)
    assert local._kernels[cohort.model].trial.reason is None
    torch.testing.assert_close(together.updates, alone.updates, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(together.loss, alone.loss, rtol=1e-4, atol=1e-5)
    assert torch.equal(together.steps, alone.steps)
    assert torch.equal(together.examples, alone.examples)


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(128, 128), nn.Linear(128, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x.flatten(1))))))


class Tied(nn.Module):
    """One parameter in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


class Scaled(nn.Module):
    """A parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.tensor(0.5)), nn.Linear(128, 4)

    def forward(self, x):
        return self.scale * self.head(x.flatten(1))


class ByWeight(nn.Module):
    """Takes a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(128, 4)

    def forward(self, x):
        return F.linear(x.flatten(1), self.head.weight, self.head.bias)


class Centred(nn.Module):
    """Mixes the examples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(128, 4)

    def forward(self, x):
        return self.head(x.flatten(1) - x.flatten(1).mean(0))


class Random(nn.Module):
    """Draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(128, 4)

    def forward(self, x):
        return self.head(F.dropout(x.flatten(1), training=self.training))


class Stepped(nn.Module):
    """A layer behind which no gradient passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(128, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head((self.first(x.flatten(1)) > 0).float())


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(128, 8), nn.Tanh(), nn.Linear(8, 4))
    model[1].weight.requires_grad_(False)
    return model


ODD = {
    "twice": (Twice, "twice"),
    "tied": (Tied, "two names"),
    "scaled": (Scaled, "another kind"),
    "by-weight": (ByWeight, "several replicas"),
    "centred": (Centred, "mixes"),
    "random": (Random, "random"),
    "stepped": (Stepped, "no gradient"),
    "frozen": (frozen, "frozen"),
    "dropout": (lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(128, 4)), "random"),
    "groups": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(144, 4)), "groups"),
    "even": (lambda: nn.Sequential(nn.Conv2d(2, 4, 4, padding="same"), nn.Flatten(), nn.Linear(256, 4)), "sides"),
    "weight-norm": (lambda: nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(128, 4))), "another kind"),
    "circular": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(256, 4)),
        "something else than zeros",
    ),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("make", "reason"), ODD.values(), ids=ODD)
def test_an_odd_model_is_recognised_and_trained(federation, make, reason):
    cohort = federation("mlp", sizes=(9, 4))
    model = make()
    object.__setattr__(cohort, "model", model)
    object.__setattr__(cohort, "start", layout_of(model).flatten(model.state_dict()))
    work = LocalWork("fedavg", batch_size=5, momentum=0.5)
    result = train_cohort(*cohort.arguments(work))
    assert reason in str(local._kernels[model].trial.reason)
    assert reason in (expressible(model) or reason)
    again = train_cohort(*cohort.arguments(work, [1, 0]))
    assert torch.equal(result.updates, again.updates.flip(0))
    if reason != "random":
        update, loss = cohort.plain(0, work)
        torch.testing.assert_close(result.updates[0], update, rtol=1e-4, atol=1e-6)
        assert result.loss[0] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("name", ["twice", "tied", "scaled", "groups", "frozen", "weight-norm"])
def test_an_odd_model_with_privacy_equals_the_definition(federation, name):
    cohort = federation("mlp", sizes=(7,))
    model = ODD[name][0]()
    start = layout_of(model).flatten(model.state_dict())
    work = LocalWork("fedsgd", batch_size=None, example_dp=ExampleClipping(0.5, 0.0, "shuffle"))
    result = train_cohort(model, start, *cohort.arguments(work)[2:])
    total = torch.zeros(layout_of(model).parameters)
    for row in cohort.members[0]:
        model.zero_grad()
        F.cross_entropy(model(cohort.x[row : row + 1]), cohort.y[row : row + 1]).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        total += gradient * min(1.0, 0.5 / float(gradient.norm()))
    torch.testing.assert_close(result.updates[0, : len(total)], total / 7, rtol=1e-3, atol=1e-6)


def test_dropout_with_privacy_is_clipped(federation):
    """A client of one example whose gradient is clipped has a gradient of norm C."""
    cohort = federation("mlp", sizes=(1, 1))
    model = ODD["dropout"][0]()
    start = layout_of(model).flatten(model.state_dict())
    work = LocalWork("fedsgd", example_dp=ExampleClipping(1e-3, 0.0, "shuffle"))
    result = train_cohort(model, start, *cohort.arguments(work)[2:])
    torch.testing.assert_close(result.updates.norm(dim=1), torch.full((2,), 1e-3), rtol=1e-4, atol=0)


def test_what_opacus_cannot_do_is_refused_in_a_sentence(federation):
    """Opacus does not complain: it would silently leave a gradient out."""
    cohort = federation("mlp", sizes=(4,))
    model = ByWeight()
    start = layout_of(model).flatten(model.state_dict())
    work = LocalWork("fedsgd", example_dp=ExampleClipping(1.0, 0.0, "shuffle"))
    with pytest.raises(ModelError, match="Opacus cannot compute"):
        train_cohort(model, start, *cohort.arguments(work)[2:])


def test_an_example_whose_gradient_is_not_finite_counts_as_zero(federation):
    """As in the kernel: it has no direction that could be scaled down."""
    cohort = federation("mlp", sizes=(8,))
    work = LocalWork("fedsgd", batch_size=None, example_dp=ExampleClipping(0.5, 0.0, "shuffle"))
    others = copy.copy(cohort)
    object.__setattr__(others, "members", [cohort.members[0][1:]])
    expected = one_by_one(others, work).updates * 7 / 8
    cohort.x[cohort.members[0][0]] = torch.inf
    found = one_by_one(cohort, work).updates
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
