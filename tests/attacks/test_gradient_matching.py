# SPDX-License-Identifier: Apache-2.0
"""Gradient matching: what it reconstructs, that each part does what it says, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedsim.attacks.descent import Budget, Value, adam, lbfgs, step_size
from fedsim.attacks.feature_inversion import gates_like_relu
from fedsim.attacks.gradient_matching import gradient_matching
from fedsim.attacks.guess import first_guess
from fedsim.attacks.matching import DISTANCES, Target, client_gradient, loss_gradient, matching_loss, target_of
from fedsim.attacks.matching_problem import problem_of
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.attacks.priors import (
    batch_statistics,
    group_consistency,
    l2,
    outside_range,
    patch,
    statistics_apart,
    total_variation,
)
from fedsim.attacks.replica_gradients import ReplicaGradients, is_smooth
from fedsim.attacks.units import units_of
from fedsim.errors import AttackError
from fedsim.privacy import prune, quantise, sign
from fedsim.scenario import DefenceSection
from fedsim.scenario.attack import GradientMatchingAttack
from fedsim.training import LocalWork


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digits(count: int) -> tuple[Tensor, Tensor]:
    """The first examples of different classes."""
    data = load_digits()
    chosen = [int((data.target == label).argmax()) for label in range(count)]
    images = torch.tensor(data.images[chosen], dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(data.target[chosen])


def smooth_net() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(), nn.Conv2d(8, 8, 3, padding=1), nn.Sigmoid(), nn.Flatten(),
        nn.Linear(512, 10),
    )  # fmt: skip
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def relu_net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(256, 100), nn.ReLU(), nn.Linear(100, 10),
    )  # fmt: skip


def norm_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    ).train()


def observe(model: nn.Module, images: Tensor, labels: Tensor, **fields: Any) -> Observation:
    gradient = loss_gradient(model, images, labels)
    names = [name for name, _ in model.named_parameters()]
    work = LocalWork(kind="fedsgd", batch_size=len(images))
    return Observation(
        model=model,
        update=dict(zip(names, gradient, strict=True)),
        **{"kind": "gradient", "work": work, "examples": len(images), **fields},
    )


def changed(observation: Observation, change: Any) -> Observation:
    """The same observation after a client-level mechanism on the flat gradient (1, P)."""
    flat = torch.cat([each.flatten() for each in observation.update.values()])[None]
    sizes = [each.numel() for each in observation.update.values()]
    parts = zip(observation.update.items(), change(flat)[0].split(sizes), strict=True)
    return Observation(
        model=observation.model,
        update={name: part.view_as(old) for (name, old), part in parts},
        kind="gradient",
        work=observation.work,
        examples=observation.examples,
    )


def knows(labels: Tensor | None, **fields: Any) -> Knowledge:
    span = (torch.tensor(0.0), torch.tensor(1.0))
    return Knowledge(
        **{"kind": "image", "input_shape": (1, 8, 8), "classes": 10, "value_range": span, "labels": labels, **fields}
    )


def settings(**fields: Any) -> GradientMatchingAttack:
    return GradientMatchingAttack(name="gradient-matching", **fields)


def psnr(found: Tensor, images: Tensor) -> float:
    """The mean over the originals, each with the nearest reconstruction."""
    errors = (found[:, None] - images[None]).square().flatten(2).mean(-1)
    return float(-10 * errors.min(0).values.clamp_min(1e-20).log10().mean())


# --- quality --------------------------------------------------------------------------------------------------------


def test_smooth_network_by_lbfgs() -> None:
    images, labels = digits(1)
    chosen = settings(features=False, iterations=300)
    found = gradient_matching(observe(smooth_net(), images, labels), knows(labels), chosen)
    assert psnr(found.inputs, images) > 30
    assert found.loss < 1e-4
    assert any("lbfgs on the squared" in note for note in found.notes)


def test_single_example_through_features() -> None:
    images, labels = digits(1)
    found = gradient_matching(observe(relu_net(), images, labels), knows(labels), settings())
    assert psnr(found.inputs, images) > 60
    assert found.loss < 1e-8
    assert found.score.min() > 0.99


def test_batch_through_features() -> None:
    images, labels = digits(4)
    found = gradient_matching(observe(relu_net(), images, labels), knows(labels), settings())
    assert psnr(found.inputs, images) > 50
    assert found.labels is not None
    nearest = (found.inputs[:, None] - images[None]).square().flatten(2).sum(-1).argmin(1)
    assert torch.equal(found.labels, labels[nearest])


def test_relu_network_by_signed_adam() -> None:
    images, labels = digits(1)
    chosen = settings(features=False, iterations=200)
    found = gradient_matching(observe(relu_net(), images, labels), knows(labels), chosen)
    assert psnr(found.inputs, images) > 25
    assert any("signed-adam on the cosine" in note for note in found.notes)


def test_labels_are_inferred() -> None:
    images, labels = digits(4)
    found = gradient_matching(observe(relu_net(), images, labels), knows(None), settings(iterations=60))
    assert found.labels is not None
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())


def test_labels_are_optimised_where_they_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AttackError("no head")

    monkeypatch.setattr("fedsim.attacks.labels.count_labels", refuse)
    images, labels = digits(1)
    chosen = settings(features=False, iterations=200)
    found = gradient_matching(observe(smooth_net(), images, labels), knows(None), chosen)
    assert found.labels is not None
    assert found.labels.tolist() == labels.tolist()
    assert found.loss < 0.05


def test_one_local_step_of_fedavg() -> None:
    images, labels = digits(1)
    model = relu_net()
    seen = observe(model, images, labels)
    work = LocalWork(kind="fedavg", learning_rate=0.1, weight_decay=0.01, batch_size=1)
    update = {name: -0.1 * (g + 0.01 * seen.weights[name]) for name, g in seen.update.items()}
    step = Observation(model=model, update=update, kind="update", work=work, examples=1)
    assert matching_loss(step, images, labels) < 1e-8
    assert psnr(gradient_matching(step, knows(labels), settings()).inputs, images) > 50


def test_repeats_exactly_and_leaves_the_model_alone() -> None:
    images, labels = digits(2)
    model = norm_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = observe(model, images, labels)
    model.load_state_dict(before)  # the client's own pass has moved the running statistics
    chosen = settings(iterations=10, restarts=2)
    first, second = (gradient_matching(seen, knows(labels), chosen, seed=5) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", ["squared", "cosine", "l1", "angular"])
@pytest.mark.parametrize("optimizer", ["adam", "signed-adam", "lbfgs"])
def test_every_distance_and_optimiser_reduces_the_loss(distance: str, optimizer: str) -> None:
    images, labels = digits(1)
    seen = observe(smooth_net(), images, labels)
    grey = matching_loss(seen, torch.full_like(images, 0.5), labels)
    chosen = settings(features=False, distance=distance, optimizer=optimizer, iterations=60)
    assert gradient_matching(seen, knows(labels), chosen).loss < 0.3 * grey


@pytest.mark.parametrize(
    "priors",
    [
        {"total_variation": 0.05},
        {"l2": 0.01},
        {"patch": 0.01},
        {"value_range": "soft"},
        {"value_range": "off"},
        {"group_consistency": 0.1, "restarts": 2},
        {"decay": "steps"},
        {"decay": "none"},
    ],
)
def test_every_prior_runs_and_the_loss_falls(priors: dict[str, Any]) -> None:
    images, labels = digits(2)
    seen = observe(relu_net(), images, labels)
    grey = matching_loss(seen, torch.full_like(images, 0.5), labels)
    found = gradient_matching(seen, knows(labels), settings(features=False, iterations=60, **priors))
    assert found.loss < 0.5 * grey


def test_priors_by_hand() -> None:
    ramp = torch.arange(8.0).expand(1, 1, 1, 8, 8)
    assert float(total_variation(ramp)) == pytest.approx(1.0, abs=1e-2)
    assert float(total_variation(torch.ones(1, 3, 5))) == 0
    assert float(l2(torch.full((1, 2, 3), 2.0))) == 4
    assert float(patch(ramp, 4)) == pytest.approx(1.0)
    block = torch.zeros(1, 1, 1, 8, 8)
    block[..., 4:] = 3.0
    assert float(patch(block, 4)) == pytest.approx(9.0)
    assert float(patch(block[..., 1:], 4)) == 0  # the jump is now inside a patch
    outside = outside_range(torch.tensor([[[-1.0, 0.5, 2.0, 1.0]]]), torch.tensor(0.0), torch.tensor(1.0))
    assert float(outside) == pytest.approx(0.5)
    assert torch.equal(group_consistency(torch.ones(3, 2, 4)), torch.zeros(3))
    assert float(group_consistency(torch.tensor([[[0.0]], [[2.0]]]))[0]) == 1


def test_batch_statistics_are_read_exactly() -> None:
    images, labels = digits(4)
    model = norm_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = observe(model, images, labels)
    buffers = {name: value.detach() - before[name] for name, value in model.named_buffers()}
    model.load_state_dict(before)
    seen = Observation(model=model, update={**seen.update, **buffers}, kind="gradient", work=seen.work, examples=4)
    (known,) = batch_statistics(seen).values()
    with torch.no_grad():
        hidden, other = model[0](images), model[0](images * 0.5)  # type: ignore[operator]
    assert torch.allclose(known.mean, hidden.mean((0, 2, 3)), atol=1e-5)
    assert float(statistics_apart(hidden, known)) < 1e-8
    assert float(statistics_apart(other, known)) > 1e-2
    found = gradient_matching(seen, knows(labels), settings(iterations=60))
    assert found.loss < 0.5


def test_restarts_side_by_side_equal_one_at_a_time() -> None:
    images, labels = digits(2)
    seen, known = observe(relu_net(), images, labels), knows(labels)
    chosen = settings(features=False, iterations=20, restarts=3)
    target, units = target_of(seen, known, dict(seen.gradient)), units_of(known)
    guess = first_guess(seen, known, chosen, target, units, seed=0, deadline=math.inf)
    problem = problem_of(seen, chosen, target, units, guess)
    generator = torch.Generator().manual_seed(0)
    starts = torch.rand(3, problem.size, generator=generator)
    budget = Budget(20, 20)

    def run(rows: Tensor) -> Tensor:
        return adam(problem.value, rows, budget, rate=0.03, signed=False, project=problem.project).points

    together = run(starts)
    alone = torch.cat([run(row[None]) for row in starts])
    assert torch.allclose(together, alone, atol=1e-3)


def test_vectorised_gradients_equal_plain_ones() -> None:
    images, labels = digits(4)
    for model in (relu_net(), smooth_net(), norm_net()):
        stacked = torch.stack([images, images * 0.5])
        together, _ = ReplicaGradients(model, {})(stacked, labels.expand(2, -1))
        for number, inputs in enumerate(stacked):
            plain = loss_gradient(model, inputs, labels)
            assert all(torch.allclose(a[number], b, atol=1e-6) for a, b in zip(together, plain, strict=True))


def test_kinks_are_seen_in_the_graph() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x).relu())

    assert is_smooth(smooth_net(), (1, 8, 8))
    assert not is_smooth(relu_net(), (1, 8, 8))
    assert not is_smooth(Hidden(), (4,))
    probe = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert gates_like_relu(Hidden(), "layer", probe)
    assert not gates_like_relu(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), "0", probe)


def test_optimisers_find_the_minimum_of_a_quadratic() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    matrix, middle = root @ root.T + torch.eye(6), torch.randn(2, 6, generator=generator, dtype=torch.float64)

    def objective(points: Tensor, rows: Tensor, _progress: float) -> Value:
        apart = points - middle[rows]
        return Value(0.5 * ((apart @ matrix) * apart).sum(1), apart @ matrix)

    start = torch.zeros(2, 6, dtype=torch.float64)
    found = lbfgs(objective, start, Budget(100, 100, 1e-16))
    assert torch.allclose(found.points, middle, atol=1e-6)
    assert found.iterations < 60
    slow = adam(objective, start, Budget(2000, 2000, 1e-12), rate=0.1, signed=False)
    assert torch.allclose(slow.points, middle, atol=1e-3)
    stopped = adam(objective, start, Budget(2000, 7, math.inf), rate=0.1, signed=False)
    assert stopped.iterations == 1
    assert step_size(1.0, "steps", 0.9) == pytest.approx(1e-3)
    assert step_size(1.0, "cosine", 0.5) == pytest.approx(0.5)


def test_distances_are_zero_at_the_truth_and_scale_free_where_they_say() -> None:
    images, labels = digits(2)
    gradient = loss_gradient(smooth_net(), images, labels)
    target = Target(gradient)
    same, half = [g.unsqueeze(0) for g in gradient], [0.5 * g.unsqueeze(0) for g in gradient]
    for distance in DISTANCES.values():
        assert float(distance(same, target)) == pytest.approx(0, abs=1e-5)
    assert float(DISTANCES["squared"](half, target)) == pytest.approx(0.25, rel=1e-4)
    assert float(DISTANCES["l1"](half, target)) == pytest.approx(0.5, rel=1e-4)
    for name in ("cosine", "angular"):
        assert float(DISTANCES[name](half, target)) == pytest.approx(0, abs=1e-5)
    assert float(DISTANCES["squared"](half, Target(gradient, scaled=True))) == pytest.approx(0, abs=1e-5)
    opposite = [-g for g in same]
    assert float(DISTANCES["cosine"](opposite, target)) == pytest.approx(2)
    assert float(DISTANCES["angular"](opposite, target)) == pytest.approx(1, abs=1e-3)


# --- defences -------------------------------------------------------------------------------------------------------


def test_what_the_truth_sends_contradicts_nothing() -> None:
    images, labels = digits(2)
    seen = observe(relu_net(), images, labels)
    truth = [g.unsqueeze(0) for g in seen.update.values()]
    for kind, mechanism in (
        ({"kind": "prune", "keep": 0.1}, lambda flat: prune(flat, 0.1)),
        ({"kind": "quantise", "bits": 4}, lambda flat: quantise(flat, 4)),
    ):
        known = knows(labels, defence=DefenceSection.model_validate({"compression": kind}))
        sent = changed(seen, mechanism)
        target = target_of(sent, known, dict(sent.gradient))
        adapted = float(DISTANCES["squared"](target.as_sent(truth), target))
        assert adapted < 1e-9
        assert float(DISTANCES["squared"](truth, target)) > 1e-4


@pytest.mark.parametrize(
    ("defence", "mechanism", "floor"),
    [
        ({"client_dp": {"clipping_norm": 0.5, "noise_multiplier": 0}}, lambda flat: 0.5 * flat / flat.norm(), 50),
        ({"compression": {"kind": "prune", "keep": 0.2}}, lambda flat: prune(flat, 0.2), 20),
        ({"compression": {"kind": "quantise", "bits": 8}}, lambda flat: quantise(flat, 8), 25),
        ({"compression": {"kind": "sign"}}, sign, 8),  # signs hide most: without adapting it is 5 dB
    ],
)
def test_defences_are_adapted_to(defence: dict[str, Any], mechanism: Any, floor: float) -> None:
    images, labels = digits(1)
    seen = changed(observe(relu_net(), images, labels), mechanism)
    known = knows(labels, defence=DefenceSection.model_validate(defence))
    found = gradient_matching(seen, known, settings(iterations=150))
    assert psnr(found.inputs, images) > floor
    assert len(found.notes) >= 2


def test_noise_lowers_the_score_and_is_not_fitted() -> None:
    images, labels = digits(1)
    clean = observe(relu_net(), images, labels)
    generator = torch.Generator().manual_seed(0)
    scores = []
    for deviation in (0.001, 0.1):
        seen = changed(clean, lambda flat, s=deviation: flat + s * torch.randn(flat.shape, generator=generator))
        defence = {"client_dp": {"clipping_norm": 100.0, "noise_multiplier": deviation / 100}}
        known = knows(labels, defence=DefenceSection.model_validate(defence), client_noise=deviation / 100)
        found = gradient_matching(seen, known, settings(iterations=100))
        share = target_of(seen, known, dict(seen.gradient)).noise_share
        assert any("noise makes" in note for note in found.notes)
        assert found.loss > 0.5 * share
        scores.append(float(found.score.mean()))
    assert scores[0] > 0.5 > scores[1]


# --- refusals -------------------------------------------------------------------------------------------------------


def test_several_local_steps_are_not_one_gradient() -> None:
    images, labels = digits(2)
    seen = observe(relu_net(), images, labels)
    work = LocalWork(kind="fedavg", epochs=2, batch_size=1)
    steps = Observation(model=seen.model, update=seen.update, kind="update", work=work, examples=2)
    assert client_gradient(steps) is None
    assert math.isnan(matching_loss(steps, images, labels))
    with pytest.raises(AttackError, match="several local steps"):
        gradient_matching(steps, knows(labels), settings())


def test_bad_observations() -> None:
    images, labels = digits(1)
    seen = observe(relu_net(), images, labels)
    for update, sentence in (
        ({name: g * math.nan for name, g in seen.update.items()}, "NaN"),
        ({name: g * 0 for name, g in seen.update.items()}, "zero in every entry"),
        ({name: g[:1] for name, g in seen.update.items()}, "has shape"),
        ({}, "has no tensor"),
    ):
        bad = Observation(model=seen.model, update=update, kind="gradient", work=seen.work, examples=1)
        with pytest.raises(AttackError, match=sentence):
            gradient_matching(bad, knows(labels), settings())
    with pytest.raises(AttackError, match="tokens"):
        gradient_matching(seen, knows(labels, kind="text"), settings())
    unknown = Observation(
        model=seen.model, update=seen.update, kind="gradient", work=LocalWork(kind="fedsgd", batch_size=None)
    )
    with pytest.raises(AttackError, match="how many"):
        gradient_matching(unknown, knows(None), settings())


def test_loss_of_no_items_is_nan() -> None:
    images, labels = digits(1)
    assert math.isnan(matching_loss(observe(relu_net(), images, labels), images[:0], labels[:0]))


def test_wall_clock_budget_ends_it() -> None:
    images, labels = digits(2)
    chosen = settings(features=False, iterations=100_000, patience=100_000, seconds=0.2)
    found = gradient_matching(observe(relu_net(), images, labels), knows(labels), chosen)
    assert found.inputs.shape == images.shape
