# SPDX-License-Identifier: Apache-2.0
"""The order of the batches can be searched: where it matters, the examples are found with it and not without it."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedsim.attacks.fedavg import fedavg_clients
from fedsim.attacks.fedavg_case import Case, round_target
from fedsim.attacks.fedavg_problem import Target, mismatch
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.attacks.order_search import better_orders
from fedsim.data import load_dataset
from fedsim.models import build_model
from fedsim.scenario import CnnModel, EmbeddedData, FedAvgAttack
from fedsim.training import LocalWork

DIGITS = load_dataset(EmbeddedData(source="digits"), 0)
X, Y = DIGITS.x_train[:5], DIGITS.y_train[:5]
CHOSEN = FedAvgAttack(
    name="fedavg", inputs="shared", iterations=60, learning_rate=0.05, total_variation=1e-4, features=False
)


def observed(images: int, epochs: int) -> tuple[Observation, Knowledge]:
    """What a client sends that shuffles in every epoch, at a rate at which the order matters."""
    model = build_model(CnnModel(name="cnn", variant="lenet"), (1, 8, 8), 10, 0, kind="image")
    trained, order = copy.deepcopy(model), torch.Generator().manual_seed(0)
    optimiser = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(epochs):
        for batch in torch.randperm(images, generator=order).split(2):
            optimiser.zero_grad()
            F.cross_entropy(trained(X[batch]), Y[batch]).backward()
            optimiser.step()
    after, before = dict(trained.named_parameters()), dict(model.named_parameters())
    update = {name: (after[name] - before[name]).detach() for name in before}
    work = LocalWork("fedavg", learning_rate=0.1, epochs=epochs, batch_size=2)
    known = Knowledge("image", (1, 8, 8), 10, (torch.tensor(0.0), torch.tensor(1.0)), labels=Y[:images])
    return Observation(model, update, "update", work, examples=images), known


def psnr(found: Tensor, truth: Tensor) -> float:
    """Mean PSNR under the best assignment."""
    errors = torch.cdist(found.flatten(1).double(), truth.flatten(1).double()).square() / truth[0].numel()
    rows, columns = linear_sum_assignment(errors.numpy())
    return float((-10 * errors[rows, columns].clamp_min(1e-12).log10()).mean())


@pytest.mark.parametrize(("images", "left"), [(4, 1e-9), (5, 0.005)])
def test_a_search_with_the_true_examples_finds_an_order_that_explains_the_update(images: int, left: float) -> None:
    observation, known = observed(images, 3)
    target: Target = round_target([observation], [Case([observation], known, Y[:images])], CHOSEN, 1)
    random, examples = np.random.default_rng(0), X[None, :images]
    losses = [float(mismatch(target, examples))]
    for _ in range(6):
        target = better_orders(target, examples, random)
        losses.append(float(mismatch(target, examples)))
    assert all(after <= before + 1e-9 for before, after in pairwise(losses))
    assert losses[-1] < left < 0.02 < losses[0]
    assert torch.equal(target.orders.sort(dim=2).values, torch.arange(images).expand(1, 3, images))


def test_where_the_order_matters_it_is_searched_or_nothing_is_found() -> None:
    observation, known = observed(4, 3)
    (blind,) = fedavg_clients([([observation], known)], CHOSEN.model_copy(update={"iterations": 120}))
    (found,) = fedavg_clients([([observation], known)], CHOSEN.model_copy(update={"order_turns": 2}))
    assert found.loss < 0.01 * blind.loss
    assert psnr(blind.inputs, X[:4]) < 19
    assert psnr(found.inputs, X[:4]) > 30
    assert any("order of the batches was searched in" in note for note in found.notes)
