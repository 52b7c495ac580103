# SPDX-License-Identifier: Apache-2.0
"""The kernel without privacy, against plain PyTorch loops."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim.errors import ModelError
from fedsim.randomness import ClientRandomness
from fedsim.training import LocalWork, batch_schedule, expressible, layout_of, train_cohort

MODELS = (
    "logistic", "mlp", "wide", "cnn", "conv1d", "layernorm", "groupnorm", "residual", "batchnorm", "batchnorm1d",
    "transformer",
)  # fmt: skip
WORKS = {
    "sgd": LocalWork("fedavg", learning_rate=0.1, batch_size=8),
    "momentum": LocalWork("fedavg", learning_rate=0.05, momentum=0.9, batch_size=8, epochs=2),
    "decay": LocalWork("fedavg", learning_rate=0.1, momentum=0.5, weight_decay=0.1, batch_size=5),
    "adam": LocalWork("fedavg", optimizer="adam", learning_rate=0.003, batch_size=8),
    "adam-decay": LocalWork(
        "fedavg", optimizer="adam", learning_rate=0.003, weight_decay=0.1, batch_size=None, epochs=3
    ),
    "schedule": LocalWork("fedavg", learning_rate=0.1, learning_rate_decay=0.7, batch_size=5, epochs=2),
    "steps": LocalWork("fedavg", learning_rate=0.1, steps=4, batch_size=6, shuffle=False),
}


def uses_kernel(federation) -> bool:
    from fedsim.training import local

    return local._kernels[federation.model].trial.reason is None


@pytest.mark.parametrize("name", MODELS)
def test_ragged_cohort_equals_plain_training_of_each_client(federation, name):
    work = WORKS["sgd"]
    sizes = (13, 20, 3, 20, 7, 2, 16)  # BatchNorm1d cannot be trained by PyTorch on one example
    cohort = federation(name, sizes=tuple(s + (s % 8 == 1) for s in sizes))
    result = train_cohort(*cohort.arguments(work))
    assert expressible(cohort.model) is None
    assert uses_kernel(cohort)
    for k, rows in enumerate(cohort.members):
        update, loss = cohort.plain(k, work)
        torch.testing.assert_close(result.updates[k], update, rtol=1e-4, atol=2e-6)
        assert result.loss[k] == pytest.approx(loss, rel=1e-5)
        assert result.examples[k] == len(rows)
        assert result.steps[k] == -(-len(rows) // 8)


@pytest.mark.parametrize("name", ["mlp", "residual", "layernorm"])
@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_optimisers_equal_torch_optim(federation, name, work):
    cohort = federation(name)
    result = train_cohort(*cohort.arguments(work))
    for k in range(len(cohort.members)):
        update, _ = cohort.plain(k, work)
        # Adam divides by √v, which enlarges the rounding of gradients near 0
        torch.testing.assert_close(
            result.updates[k], update, rtol=1e-3, atol=1e-4 if "adam" in work.optimizer else 1e-5
        )


def test_a_finished_client_does_not_change(federation):
    """With momentum and weight decay the weights would go on moving, even without a gradient."""
    work = LocalWork("fedavg", momentum=0.9, weight_decay=0.1, batch_size=4)
    cohort = federation("batchnorm", sizes=(4, 20, 20))
    short, _ = cohort.plain(0, work)
    result = train_cohort(*cohort.arguments(work), chunk=3)
    assert result.steps.tolist() == [1, 5, 5]
    torch.testing.assert_close(result.updates[0], short, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["cnn", "residual", "transformer"])
@pytest.mark.parametrize("batch_size", [6, None])
def test_fedsgd_is_the_gradient_of_one_batch(federation, name, batch_size):
    cohort = federation(name)
    work = LocalWork("fedsgd", batch_size=batch_size)
    result = train_cohort(*cohort.arguments(work))
    for k, rows in enumerate(cohort.members):
        batches = batch_schedule(len(rows), work, cohort.randomness[k].batches())
        assert len(batches) == 1
        assert len(batches[0]) == len(rows) if batch_size is None else min(6, len(rows))
        some = torch.from_numpy(rows[batches[0]])
        model = copy.deepcopy(cohort.model)
        F.cross_entropy(model(cohort.x[some]).flatten(0, -2), cohort.y[some].flatten()).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(result.updates[k, : len(gradient)], gradient, rtol=1e-4, atol=1e-6)
        assert result.updates[k, len(gradient) :].abs().sum() == 0


def test_fedsgd_over_all_rows_is_one_step_of_sgd_on_the_union(federation):
    """The gradients of clients, weighted by examples, are the gradient of all their rows together."""
    cohort = federation("cnn", sizes=(30, 30, 30))
    cohort.members[:] = list(np.arange(90).reshape(3, 30))
    result = train_cohort(*cohort.arguments(LocalWork("fedsgd", batch_size=None)))
    model = copy.deepcopy(cohort.model)
    F.cross_entropy(model(cohort.x), cohort.y).backward()
    union = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(result.updates.mean(0), union, rtol=1e-4, atol=1e-7)


def test_batchnorm_statistics_are_those_of_the_client(federation):
    cohort = federation("batchnorm", sizes=(12, 9))
    result = train_cohort(*cohort.arguments(LocalWork("fedavg", batch_size=5)))
    layout = layout_of(cohort.model)
    assert layout.parameters < layout.size
    assert (result.updates[:, layout.parameters :] != 0).all()
    for k in range(2):
        update, _ = cohort.plain(k, LocalWork("fedavg", batch_size=5))
        found, expected = layout.unflatten(result.updates[k]), layout.unflatten(update)
        for name in ("norms.0.running_mean", "norms.2.running_var"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_padding_contributes_exactly_nothing(federation):
    """What stands in the rows that fill up a batch (the client's first row) cannot be seen in the result."""
    work = LocalWork("fedavg", batch_size=4, shuffle=False)
    cohort = federation("groupnorm", sizes=(6, 6))
    first = train_cohort(*cohort.arguments(work))
    # the second batch has 2 examples and 2 rows of padding; let the padding be another row, by a client of 2 rows
    rows = cohort.members[0]
    cohort.members[0] = rows[4:]
    last = train_cohort(*cohort.arguments(LocalWork("fedsgd", batch_size=None), [0]))
    cohort.members[0] = np.concatenate([rows[5:], rows[4:5]])
    swapped = train_cohort(*cohort.arguments(LocalWork("fedsgd", batch_size=None), [0]))
    torch.testing.assert_close(last.updates, swapped.updates, rtol=1e-5, atol=1e-7)
    update, _ = cohort.plain(1, work)
    torch.testing.assert_close(first.updates[1], update, rtol=1e-4, atol=1e-6)


def test_nan_in_rows_of_other_clients_does_not_leak(federation):
    cohort = federation("batchnorm", sizes=(10, 10))
    cohort.members[:] = [np.arange(10), np.arange(10, 20)]
    work = LocalWork("fedavg", batch_size=4)
    clean = train_cohort(*cohort.arguments(work))
    cohort.x[10:20] = float("nan")
    dirty = train_cohort(*cohort.arguments(work))
    assert torch.equal(clean.updates[0], dirty.updates[0])
    assert dirty.updates[1].isnan().any()


def test_a_client_without_rows_does_nothing(federation):
    cohort = federation("mlp", sizes=(0, 5, 0))
    result = train_cohort(*cohort.arguments(LocalWork("fedavg")))
    assert result.updates[[0, 2]].abs().sum() == 0
    assert result.steps.tolist() == [0, 1, 0]
    assert result.examples.tolist() == [0, 5, 0]
    assert result.loss[0] == 0
    assert len(train_cohort(*cohort.arguments(LocalWork("fedavg"), [])).updates) == 0


def test_the_model_of_the_user_and_the_global_generator_are_left_alone(federation):
    cohort = federation("batchnorm")
    before, state = copy.deepcopy(cohort.model.state_dict()), torch.get_rng_state()
    threads, start = torch.get_num_threads(), cohort.start.clone()
    train_cohort(*cohort.arguments(LocalWork("fedavg", batch_size=6)))
    assert all(torch.equal(before[name], value) for name, value in cohort.model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(start, cohort.start)
    assert torch.get_num_threads() == threads


def test_a_model_that_is_changed_is_noticed(federation):
    cohort = federation("mlp")
    before = train_cohort(*cohort.arguments(LocalWork("fedavg")))
    cohort.model[2] = nn.ReLU()
    after = train_cohort(*cohort.arguments(LocalWork("fedavg")))
    assert not torch.allclose(before.updates, after.updates)


def test_a_layer_may_be_the_whole_model():
    model = nn.Linear(5, 3)
    start = layout_of(model).flatten(model.state_dict())
    x, y = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    work = LocalWork("fedavg", batch_size=None, learning_rate=1.0)
    result = train_cohort(model, start, x, y, [np.arange(8)], work, [ClientRandomness(0, 0, 0)])
    F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(result.updates[0], -torch.cat([model.weight.grad.flatten(), model.bias.grad]))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(5, 3)), "does not take examples of shape"),
        (nn.Sequential(nn.Flatten(), nn.Linear(128, 4), nn.Unflatten(1, (2, 2))), "one number for each class"),
        (nn.Sequential(nn.Flatten(), nn.Linear(128, 4)).double(), "convert the model"),
        (nn.Flatten(), "no trainable parameters"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(federation, model, words):
    cohort = federation("mlp")
    start = torch.cat([torch.empty(0)] + [p.detach().float().flatten() for p in model.parameters()])
    with pytest.raises(ModelError, match=words):
        train_cohort(model, start, cohort.x, cohort.y, cohort.members, LocalWork("fedavg"), cohort.randomness)


def test_weights_of_another_model_are_refused(federation):
    cohort = federation("mlp")
    with pytest.raises(ModelError, match="flat vector of"):
        train_cohort(cohort.model, cohort.start[1:], *cohort.arguments(LocalWork("fedavg"))[2:])
