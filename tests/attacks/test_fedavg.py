# SPDX-License-Identifier: Apache-2.0
"""Reconstruction from weight updates: the prior does not see the order, and the attack does not need it."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsim.attacks.epochs import Distance, Statistic, epoch_prior, order_free, pool_epochs
from fedsim.attacks.fedavg import fedavg, fedavg_clients, fedavg_rounds
from fedsim.attacks.fedavg_case import Case, round_target
from fedsim.attacks.fedavg_problem import Problem, _value
from fedsim.attacks.matching import loss_gradient
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.attacks.relaxation import relaxed_images
from fedsim.data import load_dataset
from fedsim.data.table import TableEncoding
from fedsim.models import build_model
from fedsim.scenario import CnnModel, EmbeddedData, FedAvgAttack, MlpModel
from fedsim.training import LocalWork
from fedsim.transformer import Transformer

DIGITS = load_dataset(EmbeddedData(source="digits"), 0)
RANGE = (torch.tensor(0.0), torch.tensor(1.0))


def knowing(labels: Tensor | None) -> Knowledge:
    return Knowledge(kind="image", input_shape=(1, 8, 8), classes=10, value_range=RANGE, labels=labels)


def local_training(model: nn.Module, x: Tensor, y: Tensor, work: LocalWork, seed: int) -> Observation:
    """A client of its own, in plain PyTorch, that shuffles in every epoch."""
    trained, order = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD(trained.parameters(), lr=work.learning_rate, momentum=work.momentum)
    for _ in range(work.epochs):
        for batch in torch.randperm(len(x), generator=order).split(work.batch_size or len(x)):
            optimiser.zero_grad()
            F.cross_entropy(trained(x[batch]), y[batch]).backward()
            optimiser.step()
    after, before = dict(trained.named_parameters()), dict(model.named_parameters())
    update = {name: (after[name] - before[name]).detach() for name in before}
    return Observation(model, update, "update", work, examples=len(x))


def psnr(found: Tensor, truth: Tensor) -> float:
    """Mean PSNR under the best assignment."""
    from scipy.optimize import linear_sum_assignment

    errors = torch.cdist(found.flatten(1).double(), truth.flatten(1).double()).square() / truth[0].numel()
    rows, columns = linear_sum_assignment(errors.numpy())
    return float((-10 * errors[rows, columns].clamp_min(1e-12).log10()).mean())


@settings(max_examples=30, deadline=None)
@given(
    statistic=st.sampled_from(["mean", "max", "sorted", "moments"]),
    distance=st.sampled_from(["l2", "l1", "cosine"]),
    seed=st.integers(0, 1000),
)
def test_the_prior_is_the_mean_over_all_pairs_and_does_not_see_the_order(
    statistic: Statistic, distance: Distance, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    shuffled = torch.stack([inputs[:, e, torch.randperm(4, generator=generator)] for e in range(3)], dim=1)
    value = epoch_prior(inputs, statistic, distance)
    torch.testing.assert_close(epoch_prior(shuffled, statistic, distance), value)
    same = inputs[:, :1].expand(-1, 3, -1, -1)
    torch.testing.assert_close(epoch_prior(same, statistic, distance), torch.zeros(2, dtype=torch.float64))
    g = order_free(inputs, statistic).flatten(2)

    def apart(a: Tensor, b: Tensor) -> Tensor:
        if distance == "cosine":
            return 1 - F.cosine_similarity(a, b, dim=-1)
        difference = a - b
        return (difference.square() if distance == "l2" else difference.abs()).mean(-1)

    pairs = sum(apart(g[:, a], g[:, b]) for a in range(3) for b in range(3)) / 9
    torch.testing.assert_close(value, torch.as_tensor(pairs))


def test_epochs_are_matched_within_their_labels_and_an_outlier_is_left_out() -> None:
    torch.manual_seed(0)
    truth, labels = torch.rand(6, 20), torch.tensor([0, 0, 0, 1, 1, 2])
    epochs = []
    for _ in range(5):
        order = torch.cat([torch.randperm(3), 3 + torch.randperm(2), torch.tensor([5])])
        epochs.append(truth[order] + 0.01 * torch.randn(6, 20))
    epochs[3][2] = torch.rand(20)
    pooled, spread = pool_epochs(torch.stack(epochs), labels)
    errors = torch.cdist(pooled, truth)
    assert errors.min(dim=1).values.max() < 0.1
    assert sorted(errors.argmin(dim=1).tolist()) == list(range(6))
    assert spread.argmax() == torch.cdist(epochs[3][2:3], pooled).argmin() or spread.max() > 3 * spread.median()


@pytest.mark.parametrize("kind", ["gradient", "update"])
def test_one_batch_of_one_epoch_is_the_gradient_attack(kind: str) -> None:
    model = build_model(CnnModel(name="cnn", variant="lenet"), (1, 8, 8), 10, 0, kind="image")
    x, y = DIGITS.x_train[:3], DIGITS.y_train[:3]
    work = LocalWork(kind="fedavg", learning_rate=0.5, batch_size=None)
    observation = local_training(model, x, y, work, 0)
    if kind == "gradient":
        gradient = dict(zip(observation.weights, loss_gradient(model, x, y), strict=True))
        observation = Observation(model, gradient, "gradient", LocalWork(kind="fedsgd", batch_size=None), examples=3)
    choices = FedAvgAttack(name="fedavg", optimizer="adam", total_variation=0, prior_weight=0)
    target = round_target([observation], [Case([observation], knowing(y), y)], choices, 1)
    problem = Problem([target], relaxed_images(knowing(y), 0.1), choices, torch.zeros(1))
    torch.manual_seed(1)
    guess = torch.rand(1, 1, 3, 1, 8, 8)
    loss, slopes = _value(problem, guess)
    direct = guess[0, 0].requires_grad_()
    found = torch.cat([g.flatten() for g in loss_gradient(model, direct, y, differentiable=True)])
    wanted = torch.cat([g.flatten() for g in observation.gradient.values()])
    expected = 1 - F.cosine_similarity(found, wanted, dim=0)
    torch.testing.assert_close(loss[0], expected.detach(), rtol=1e-3, atol=1e-5)
    slope = torch.autograd.grad(expected, direct)[0]
    assert F.cosine_similarity(slopes.flatten(), slope.flatten(), dim=0) > 0.999


FOUR = DIGITS.x_train[[0, 1, 2, 3]], DIGITS.y_train[[0, 1, 2, 3]]
BRIEF = FedAvgAttack(name="fedavg", iterations=250, learning_rate=0.05, total_variation=1e-4)


@pytest.fixture(scope="module")
def shuffled() -> Observation:
    model = build_model(CnnModel(name="cnn", variant="lenet"), (1, 8, 8), 10, 0, kind="image")
    return local_training(model, *FOUR, LocalWork(kind="fedavg", learning_rate=0.02, epochs=3, batch_size=2), 5)


def test_a_client_that_reshuffles_is_reconstructed_from_three_epochs(shuffled: Observation) -> None:
    found = fedavg(shuffled, knowing(FOUR[1]), BRIEF)
    assert found.loss < 1e-2
    assert psnr(found.inputs, FOUR[0]) > 20
    assert found.labels is not None
    assert sorted(found.labels.tolist()) == sorted(FOUR[1].tolist())


def test_the_update_is_not_one_gradient(shuffled: Observation) -> None:
    """The baseline that takes it for one explains less of it."""
    naive = fedavg(shuffled, knowing(FOUR[1]), BRIEF.model_copy(update={"simulation": "gradient", "iterations": 100}))
    simulated = fedavg(shuffled, knowing(FOUR[1]), BRIEF.model_copy(update={"iterations": 100}))
    assert simulated.loss < naive.loss


def test_a_wide_dense_layer_needs_no_simulation() -> None:
    model = build_model(MlpModel(name="mlp", hidden=(100,)), (1, 8, 8), 10, 0, kind="image")
    work = LocalWork(kind="fedavg", learning_rate=0.01, epochs=3, batch_size=2)
    found = fedavg(local_training(model, *FOUR, work, 5), knowing(None), FedAvgAttack(name="fedavg"))
    assert found.attack == "exact"
    assert psnr(found.inputs, FOUR[0]) > 60


def test_two_rounds_of_a_client_are_more_epochs(shuffled: Observation) -> None:
    again = local_training(shuffled.model, *FOUR, shuffled.work, 9)
    few = BRIEF.model_copy(update={"iterations": 40})
    both = fedavg_rounds([shuffled, again], knowing(FOUR[1]), few)
    assert len(both.inputs) == 4
    assert both.loss < 0.3


def test_the_mean_of_two_clients_is_simulated_as_two_clients() -> None:
    model = build_model(CnnModel(name="cnn", variant="lenet"), (1, 8, 8), 10, 0, kind="image")
    work = LocalWork(kind="fedavg", learning_rate=0.02, epochs=2, batch_size=1)
    parts = [local_training(model, FOUR[0][i : i + 2], FOUR[1][i : i + 2], work, i) for i in (0, 2)]
    mean = {name: (parts[0].update[name] + parts[1].update[name]) / 2 for name in parts[0].update}
    observation = Observation(model, mean, "update", work, clients=2, examples=4)
    found = fedavg(observation, knowing(FOUR[1]), BRIEF)
    assert len(found.inputs) == 4
    assert found.loss < 0.02
    assert psnr(found.inputs, FOUR[0]) > 14


def test_the_surrogate_brings_the_guess_nearer(shuffled: Observation) -> None:
    short = {"iterations": 5, "learning_rate": 0.02}
    cold = fedavg(shuffled, knowing(FOUR[1]), BRIEF.model_copy(update=short))
    warm = fedavg(shuffled, knowing(FOUR[1]), BRIEF.model_copy(update={**short, "surrogate": 60}))
    assert warm.loss < 0.5 * cold.loss


@pytest.mark.parametrize("epochs", [(), (3,)])
def test_a_search_begins_where_it_is_told_to(shuffled: Observation, epochs: tuple[int, ...]) -> None:
    one = BRIEF.model_copy(update={"iterations": 1})
    near = FOUR[0].expand(*epochs, *FOUR[0].shape)
    (found,) = fedavg_clients([([shuffled], knowing(FOUR[1]))], one, near=[near])
    torch.testing.assert_close(found.inputs, FOUR[0])
    assert found.labels is not None
    assert torch.equal(found.labels, FOUR[1])
    assert found.loss < 1e-3


def test_the_surrogate_does_not_depend_on_how_many_weights_of_the_prior_are_tried(shuffled: Observation) -> None:
    few = BRIEF.model_copy(update={"iterations": 1, "surrogate": 5, "restarts": 2})
    single = fedavg(shuffled, knowing(FOUR[1]), few.model_copy(update={"prior_weight": 0.0}))
    several = fedavg(shuffled, knowing(FOUR[1]), few.model_copy(update={"prior_weight": (0.0, 1.0, 2.0)}))
    torch.testing.assert_close(several.inputs, single.inputs, rtol=1e-3, atol=1e-3)


def test_clients_are_replicas_that_do_not_see_each_other(shuffled: Observation) -> None:
    other = local_training(shuffled.model, DIGITS.x_train[10:14], DIGITS.y_train[10:14], shuffled.work, 3)
    few = BRIEF.model_copy(update={"iterations": 15, "optimizer": "adam"})
    clients = [([shuffled], knowing(FOUR[1])), ([other], knowing(DIGITS.y_train[10:14]))]
    together = fedavg_clients(clients, few)
    for (rounds, knowledge), found in zip(clients, together, strict=True):
        alone = fedavg_rounds(rounds, knowledge, few)
        torch.testing.assert_close(found.inputs, alone.inputs, rtol=0.01, atol=0.02)
        assert found.loss == pytest.approx(alone.loss, rel=0.05)


def test_of_several_weights_that_which_explains_the_update_best_is_kept(shuffled: Observation) -> None:
    few = BRIEF.model_copy(update={"iterations": 60, "optimizer": "adam"})
    weights = (0.0, 1.0, 1e6)
    alone = [fedavg(shuffled, knowing(FOUR[1]), few.model_copy(update={"prior_weight": w})) for w in weights]
    chosen = fedavg(shuffled, knowing(FOUR[1]), few.model_copy(update={"prior_weight": weights}))
    assert chosen.loss == pytest.approx(min(each.loss for each in alone), rel=0.05)
    assert chosen.loss < 0.8 * max(each.loss for each in alone)


def test_an_unknown_number_of_epochs_is_found_by_trial(shuffled: Observation) -> None:
    asked = replace(shuffled, work=replace(shuffled.work, epochs=1))
    found = fedavg(asked, knowing(FOUR[1]), BRIEF.model_copy(update={"iterations": 60, "epochs": (1, 3, 9)}))
    assert "simulated 3 epochs" in found.notes[-1]
    assert "1 of 2: " in found.notes[0]


def test_an_unknown_batch_size_is_found_by_trial(shuffled: Observation) -> None:
    """Batches of 2 are 6 local steps; of 4, one half as many; of 1, twice as many."""
    asked = replace(shuffled, work=replace(shuffled.work, batch_size=4))
    found = fedavg(asked, knowing(FOUR[1]), BRIEF.model_copy(update={"iterations": 60, "batch_sizes": (4, 2, 1)}))
    tried = dict(re.findall(r"3 of (\d): ([^,]+)", found.notes[0]))
    assert set(tried) == {"4", "2", "1"}
    assert min(tried, key=lambda size: float(tried[size])) == "2"


def test_a_dense_layer_behind_convolutions_shows_the_images_in_any_order() -> None:
    """Its update is taken apart into the features of each image, whatever the order of the batches was."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    observation = local_training(model, *FOUR, LocalWork(kind="fedavg", learning_rate=0.01, epochs=3, batch_size=2), 5)
    found = fedavg(observation, knowing(None), BRIEF.model_copy(update={"iterations": 20}))
    assert any("by inverting what entered" in note for note in found.notes)
    assert psnr(found.inputs, FOUR[0]) > 30


def test_rows_of_a_table_are_found_through_the_simulation() -> None:
    table = load_dataset(EmbeddedData(source="breast_cancer"), 0)
    assert isinstance(table.encoding, TableEncoding)
    x, y = table.x_train[:4], table.y_train[:4]
    model = build_model(MlpModel(name="mlp", hidden=(20,)), tuple(x.shape[1:]), 2, 0, kind="table")
    work = LocalWork(kind="fedavg", learning_rate=0.05, epochs=2, batch_size=2)
    bounds = (table.x_test.amin(0), table.x_test.amax(0))
    known = Knowledge("table", tuple(x.shape[1:]), 2, bounds, labels=y, encoding=table.encoding)
    chosen = FedAvgAttack(name="fedavg", exact_first=False, iterations=300, learning_rate=0.1)
    found = fedavg(local_training(model, x, y, work, 2), known, chosen)
    guess = (table.x_test.mean(0).expand_as(x) - x).square().mean()
    nearest = torch.cdist(found.inputs, x).square().amin(0).mean() / x.shape[1]
    assert found.loss < 0.1
    assert nearest < 0.5 * guess


def test_texts_are_found_through_the_simulation() -> None:
    torch.manual_seed(0)
    model = Transformer(vocabulary=20, length=4, dim=16, heads=2, layers=1)
    windows = torch.tensor([[3, 7, 7, 1, 5], [2, 9, 4, 11, 3]])
    work = LocalWork(kind="fedavg", learning_rate=0.5, epochs=2, batch_size=1)
    trained = copy.deepcopy(model)
    optimiser = torch.optim.SGD(trained.parameters(), lr=0.5)
    for row in (0, 1, 1, 0):
        optimiser.zero_grad()
        F.cross_entropy(trained(windows[row : row + 1, :-1])[0], windows[row, 1:]).backward()
        optimiser.step()
    after, before = dict(trained.named_parameters()), dict(model.named_parameters())
    update = {name: (after[name] - before[name]).detach() for name in before}
    observation = Observation(model, update, "update", work, examples=2)
    chosen = FedAvgAttack(name="fedavg", iterations=200, learning_rate=0.1, restarts=4)
    found = fedavg(observation, Knowledge("text", (4,), 20), chosen)
    right = max((found.inputs[order] == windows[:, :-1]).float().mean() for order in ([0, 1], [1, 0]))
    assert set(found.inputs.flatten().tolist()) <= set(windows.flatten().tolist())
    assert right >= 0.75
    assert found.labels is not None
    assert found.labels.shape == (2, 4)
