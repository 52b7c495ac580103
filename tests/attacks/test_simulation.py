# SPDX-License-Identifier: Apache-2.0
"""With the true batches in their true order, the simulated update is the client's own; and its slope is right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsim.attacks.simulation import Simulator, Step
from fedsim.data import load_dataset
from fedsim.models import build_model
from fedsim.randomness import ClientRandomness
from fedsim.scenario import CnnModel, EmbeddedData, MlpModel, ModelSection
from fedsim.training import LocalWork, batch_schedule, layout_of, train_cohort

DIGITS = load_dataset(EmbeddedData(source="digits"), 0)
MODELS: dict[str, ModelSection] = {
    "mlp": MlpModel(name="mlp", hidden=(12,)),
    "cnn": CnnModel(name="cnn", variant="lenet"),
}


def steps_of(rows: np.ndarray, work: LocalWork, randomness: ClientRandomness) -> list[Step]:
    schedule = [rows[positions] for positions in batch_schedule(len(rows), work, randomness.batches())]
    return [step(DIGITS.x_train[batch], DIGITS.y_train[batch], work.batch(len(rows))) for batch in schedule]


def step(x: Tensor, y: Tensor, width: int) -> Step:
    """One replica's batch, padded to a width."""
    missing = width - len(x)
    shares = torch.cat([torch.full((len(x),), 1 / len(x)), torch.zeros(missing)])
    x = torch.cat([x, torch.zeros(missing, *x.shape[1:])])
    return Step(x[None], torch.cat([y, torch.zeros(missing, dtype=torch.int64)])[None], shares[None])


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    optimizer=st.sampled_from(["sgd", "adam"]),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.01]),
    decay=st.sampled_from([1.0, 0.8]),
    epochs=st.integers(1, 3),
    batch=st.sampled_from([1, 4, 7, None]),
    examples=st.integers(1, 9),
)
def test_the_simulated_update_is_the_clients(
    name: str,
    optimizer: str,
    momentum: float,
    weight_decay: float,
    decay: float,
    epochs: int,
    batch: int | None,
    examples: int,
) -> None:
    work = LocalWork(
        kind="fedavg",
        optimizer=optimizer,  # type: ignore[arg-type]
        learning_rate=0.05 if optimizer == "sgd" else 0.001,
        momentum=momentum if optimizer == "sgd" else 0.0,
        weight_decay=weight_decay,
        learning_rate_decay=decay,
        epochs=epochs,
        batch_size=batch,
    )
    model = build_model(MODELS[name], DIGITS.input_shape, DIGITS.classes, 3, kind="image")
    rows, randomness = np.arange(20, 20 + examples), ClientRandomness(5, 1, 0)
    layout = layout_of(model)
    start = layout.flatten(model.state_dict())
    truth = train_cohort(model, start, DIGITS.x_train, DIGITS.y_train, [rows], work, [randomness]).updates[0]
    simulated = Simulator(model, work).update(steps_of(rows, work, randomness))[0]
    if optimizer == "adam":  # a gradient of rounding errors only moves a weight as far as any other
        assert torch.quantile((simulated - truth).abs(), 0.99) < 1e-4
    else:
        torch.testing.assert_close(simulated, truth, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_the_slope_is_the_one_of_finite_differences_and_does_not_depend_on_the_segments(optimizer: str) -> None:
    momentum = 0.9 if optimizer == "momentum" else 0.0
    kind = "adam" if optimizer == "adam" else "sgd"
    work = LocalWork(kind="fedavg", optimizer=kind, learning_rate=0.1, momentum=momentum, epochs=3, batch_size=2)  # type: ignore[arg-type]
    model = build_model(MlpModel(name="mlp", hidden=(6,), activation="tanh"), (1, 8, 8), 10, 1, kind="image").double()
    randomness = ClientRandomness(5, 1, 0)
    steps = [Step(s.inputs.double(), s.labels, s.shares.double()) for s in steps_of(np.arange(5), work, randomness)]
    simulator = Simulator(model, work)
    torch.manual_seed(0)
    target = torch.randn(simulator.start.numel(), dtype=torch.float64)

    def distance(update: Tensor) -> Tensor:
        return ((update - 0.01 * target) ** 2).sum()

    value, gradients = simulator.slope(steps, distance)
    for segment in (1, 4, 100):
        torch.testing.assert_close(simulator.slope(steps, distance, segment=segment)[1], gradients)
    for t in (0, 4, 8):
        # Adam is not smooth where a gradient is zero: only pixels that are not black are moved.
        nudge = torch.randn_like(steps[t].inputs) * (steps[t].inputs > 0)
        moved = [Step(s.inputs + 1e-6 * nudge * (i == t), s.labels, s.shares) for i, s in enumerate(steps)]
        difference = (distance(simulator.update(moved)) - value) / 1e-6
        torch.testing.assert_close((gradients[t] * nudge).sum(), difference, rtol=1e-3, atol=1e-6)


def test_truncation_leaves_the_early_steps_alone() -> None:
    work = LocalWork(kind="fedavg", learning_rate=0.1, epochs=4, batch_size=2)
    model = build_model(MODELS["mlp"], DIGITS.input_shape, DIGITS.classes, 1, kind="image")
    steps = steps_of(np.arange(4), work, ClientRandomness(5, 1, 0))
    _, gradients = Simulator(model, work).slope(steps, lambda update: update.square().sum(), last=3)
    assert [bool(gradient.any()) for gradient in gradients] == [False] * 5 + [True] * 3


def test_replicas_do_not_disturb_each_other() -> None:
    work = LocalWork(kind="fedavg", learning_rate=0.1, epochs=2, batch_size=3)
    model = build_model(MODELS["cnn"], DIGITS.input_shape, DIGITS.classes, 1, kind="image")
    alone = [steps_of(np.arange(first, first + 5), work, ClientRandomness(5, 1, first)) for first in (0, 30)]
    together = [
        Step(*(torch.cat(pair) for pair in zip(*(vars(s).values() for s in both), strict=True)))
        for both in zip(*alone, strict=True)
    ]
    both = Simulator(model, work).update(together)
    for k, steps in enumerate(alone):
        torch.testing.assert_close(both[k], Simulator(model, work).update(steps)[0], rtol=1e-4, atol=1e-6)
