# SPDX-License-Identifier: Apache-2.0
"""A last batch that is not full: its examples count for more, and the update says whose they were."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedsim.attacks.fedavg import fedavg
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.attacks.short_batches import epoch_orders
from fedsim.data import load_dataset
from fedsim.models import build_model
from fedsim.scenario import CnnModel, EmbeddedData, FedAvgAttack
from fedsim.training import LocalWork

DIGITS = load_dataset(EmbeddedData(source="digits"), 0)
MODEL = build_model(CnnModel(name="cnn", variant="lenet"), (1, 8, 8), 10, 0, kind="image")


def knowing(labels: Tensor) -> Knowledge:
    return Knowledge("image", (1, 8, 8), 10, (torch.tensor(0.0), torch.tensor(1.0)), labels=labels)


def train(model: nn.Module, x: Tensor, y: Tensor, work: LocalWork, seed: int) -> tuple[Observation, Tensor]:
    """A client that shuffles in every epoch; and how often each example was in a short batch."""
    trained, order = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD(trained.parameters(), lr=work.learning_rate)
    turns, size = torch.zeros(len(x), dtype=torch.int64), work.batch(len(x))
    for _ in range(work.epochs):
        for batch in torch.randperm(len(x), generator=order).split(size):
            turns[batch] += int(len(batch) < size)
            optimiser.zero_grad()
            F.cross_entropy(trained(x[batch]), y[batch]).backward()
            optimiser.step()
    after, before = dict(trained.named_parameters()), dict(model.named_parameters())
    update = {name: (after[name] - before[name]).detach() for name in before}
    return Observation(model, update, "update", work, examples=len(x)), turns


def last_turns(orders: Tensor, rest: int) -> Tensor:
    """(n,): how often each example is among the last of an order."""
    return torch.bincount(orders[:, -rest:].flatten(), minlength=orders.shape[1])


def psnr(found: Tensor, truth: Tensor) -> float:
    """Mean PSNR under the best assignment."""
    errors = torch.cdist(found.flatten(1).double(), truth.flatten(1).double()).square() / truth[0].numel()
    rows, columns = linear_sum_assignment(errors.numpy())
    return float((-10 * errors[rows, columns].clamp_min(1e-12).log10()).mean())


@pytest.mark.parametrize("client", [0, 1, 2, 3])
def test_the_update_says_who_was_alone(client: int) -> None:
    x, y = (part[5 * client : 5 * client + 5] for part in (DIGITS.x_train, DIGITS.y_train))
    work = LocalWork("fedavg", learning_rate=0.02, epochs=3, batch_size=2)
    observation, turns = train(MODEL, x, y, work, client)
    orders = epoch_orders(observation, knowing(y), y, epochs=3, batch=2)
    assert len(y.unique()) == 5  # with two of a class only their sum would be known
    assert torch.equal(last_turns(orders, 1), turns)
    assert torch.equal(orders.sort(dim=1).values, torch.arange(5).expand(3, 5))


@pytest.mark.parametrize(("examples", "batch"), [(5, 2), (7, 3), (8, 3), (9, 5)])
def test_where_nothing_tells_all_are_there_equally_often(examples: int, batch: int) -> None:
    work = LocalWork("fedavg", optimizer="adam", epochs=examples, batch_size=batch)
    x, y = DIGITS.x_train[:examples], DIGITS.y_train[:examples]
    observation, _ = train(MODEL, x, y, work, 0)
    orders = epoch_orders(observation, knowing(y), y, epochs=examples, batch=batch)
    assert torch.equal(last_turns(orders, examples % batch), torch.full((examples,), examples % batch))


def test_full_batches_stay_as_they_are() -> None:
    work = LocalWork("fedavg", learning_rate=0.02, epochs=2, batch_size=2)
    observation, _ = train(MODEL, DIGITS.x_train[:4], DIGITS.y_train[:4], work, 0)
    orders = epoch_orders(observation, knowing(DIGITS.y_train[:4]), DIGITS.y_train[:4], epochs=2, batch=2)
    assert torch.equal(orders, torch.arange(4).expand(2, 4))


def test_five_images_in_batches_of_two_are_reconstructed() -> None:
    """With the same example alone in every epoch of the simulation this was 6 dB."""
    x, y = DIGITS.x_train[:5], DIGITS.y_train[:5]
    observation, _ = train(MODEL, x, y, LocalWork("fedavg", learning_rate=0.02, epochs=3, batch_size=2), 0)
    chosen = FedAvgAttack(name="fedavg", iterations=150, learning_rate=0.05, total_variation=1e-4, segment=9)
    found = fedavg(observation, knowing(y), chosen)
    assert found.loss < 0.01
    assert psnr(found.inputs, x) > 18
