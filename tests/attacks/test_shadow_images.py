# SPDX-License-Identifier: Apache-2.0
"""The confidence of images: from shadow batches, as a lower bound of a named event, or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from scipy.stats import binom

from fedsim.attacks.gradient_matching import gradient_matching
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction
from fedsim.attacks.shadow_client import shadow_client
from fedsim.attacks.shadow_images import EVENT, Shadow, comparable, judged, lower_rate, right_images
from fedsim.audit.reconstruction import score
from fedsim.data import Dataset, load_dataset
from fedsim.errors import AttackError
from fedsim.models import build_model
from fedsim.scenario import CnnModel, EmbeddedData, GradientMatchingAttack
from fedsim.training import LocalWork

QUICK = GradientMatchingAttack(name="gradient-matching", iterations=60)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load_dataset(EmbeddedData(source="digits"), 0)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def knows(data: Dataset, **more: Any) -> Knowledge:
    bounds = (torch.tensor(0.0), torch.tensor(1.0))
    return Knowledge("image", (1, 8, 8), 10, value_range=bounds, public=(data.x_test, data.y_test), **more)


def lenet(data: Dataset, size: int, seed: int) -> tuple[Observation, torch.Tensor, torch.Tensor]:
    """A gradient of LeNet with sigmoids, and the images and labels behind it."""
    rows = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed))[:size]
    model = build_model(CnnModel(name="cnn", variant="lenet"), (1, 8, 8), 10, seed)
    empty = Observation(model, {}, "gradient", LocalWork("fedsgd", batch_size=size), examples=size)
    x, y = data.x_train[rows], data.y_train[rows]
    return shadow_client(empty, knows(data), x, y, seed), x, y


def test_wrong_images_behind_a_tiny_loss_are_not_sure(data: Dataset) -> None:
    """LeNet, batch 4: matching losses of 1e-4 and less, and images below 20 dB, which were 0.97 sure."""
    said, right, images, losses = 0.0, 0, 0, []
    for seed in range(3):
        seen, x, _ = lenet(data, 4, seed)
        alone = gradient_matching(seen, knows(data), QUICK, seed=seed)
        assert alone.confidence is None
        found = judged(gradient_matching, alone, seen, knows(data), QUICK, shadows=6, seed=seed)
        said += 0.0 if found.confidence is None else float(found.confidence.sum())
        right, images = right + int(right_images(found.inputs, x, knows(data)).sum()), images + 4
        losses.append(found.loss)
    assert min(losses) < 1e-3
    assert right < images
    assert binom.cdf(right, images, said / images) > 0.025  # what is said is not above the interval of what is right


def test_one_image_of_a_smooth_network_is_sure(data: Dataset) -> None:
    seen, x, _ = lenet(data, 1, 3)
    chosen = GradientMatchingAttack(name="gradient-matching", iterations=150)
    found = gradient_matching(seen, knows(data), chosen)
    found = judged(gradient_matching, found, seen, knows(data), chosen, shadows=5)
    assert right_images(found.inputs, x, knows(data)).all()
    assert found.event == EVENT
    assert found.confidence is not None
    assert float(found.confidence) == pytest.approx(0.05 ** (1 / 5), abs=1e-6)  # five of five: no more is proved
    assert any("5 of 5 shadows" in note for note in found.notes)


def test_an_update_that_is_not_explained_gives_no_number(data: Dataset) -> None:
    """Noise that the server does not know of: it fits far worse than its own batches."""
    seen, _, _ = lenet(data, 1, 4)
    rng = torch.Generator().manual_seed(0)
    update = {n: each + each.std() * torch.randn(each.shape, generator=rng) for n, each in seen.update.items()}
    seen = replace(seen, update=update)
    found = gradient_matching(seen, knows(data), QUICK)
    found = judged(gradient_matching, found, seen, knows(data), QUICK, shadows=4)
    assert found.confidence is None
    assert "far better than this one" in found.notes[-1]
    assert "matching loss of" in found.notes[-1]


@pytest.mark.parametrize(
    ("shadows", "change", "loss", "reason"),
    [
        (0, {}, 1e-9, "shadows is 0"),
        (5, {"public": None}, 1e-9, "adversary.knows.public_rows is false"),
        (5, {}, float("nan"), "no matching loss"),
    ],
)
def test_without_shadows_there_is_no_number(
    data: Dataset, shadows: int, change: dict[str, Any], loss: float, reason: str
) -> None:
    seen, x, y = lenet(data, 2, 0)
    sure = Reconstruction("auto", x, y, loss, torch.ones(2), confidence=torch.ones(2), event="stale")
    found = judged(gradient_matching, sure, seen, replace(knows(data), **change), QUICK, shadows=shadows)
    assert (found.confidence, found.event) == (None, "")
    assert reason in found.notes[-1]


def test_shadows_have_the_labels_that_were_found_and_failures_count_as_wrong(data: Dataset) -> None:
    seen, x, y = lenet(data, 4, 1)
    played: list[torch.Tensor] = []

    def attack(observation: Observation, knowledge: Knowledge, _settings: Any, *, seed: int) -> Reconstruction:
        assert knowledge.labels is not None
        played.append(knowledge.labels)
        if len(played) % 2:
            raise AttackError("not this one")
        return Reconstruction("exact", torch.zeros(4, 1, 8, 8), None, 0.0, torch.ones(4))

    known = knows(data, labels=y.sort().values)
    result = judged(attack, Reconstruction("exact", x, y, 0.0, torch.ones(4)), seen, known, QUICK, shadows=4)
    assert all(torch.equal(labels, y.sort().values) for labels in played)
    assert result.confidence is not None
    assert (result.confidence == 0).all()


def test_right_images_are_those_that_the_score_calls_right(data: Dataset) -> None:
    rng = torch.Generator().manual_seed(1)
    for spread in (0.05, 0.1, 0.12):
        x = data.x_train[:12]
        noisy = (x + spread * torch.randn(x.shape, generator=rng))[torch.randperm(12, generator=rng)]
        mine = int(right_images(noisy, x, knows(data)).sum())
        found = Reconstruction("exact", noisy, None, 0.0, torch.ones(12))
        assert mine == score(found, x, data.y_train[:12], knows(data)).right.right


@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=40))
@effort(max_examples=60, deadline=None)
def test_the_lower_rate_is_below_the_mean_and_rises_with_each_share(shares: list[float]) -> None:
    rate, mean = lower_rate(shares), sum(shares) / len(shares)
    assert 0 <= rate <= mean + 1e-9
    assert rate <= lower_rate([*shares[1:], 1.0]) + 1e-12


@given(rate=st.floats(0.05, 0.95), count=st.integers(2, 40), seed=st.integers(0, 1000))
@effort(max_examples=30, deadline=None)
def test_the_lower_rate_covers(rate: float, count: int, seed: int) -> None:
    """Shares that vary less than coins of the same mean, as those of batches of four do."""
    drawn = binom.rvs(4, rate, size=(200, count), random_state=seed) / 4
    above = sum(lower_rate(row.tolist()) > rate for row in drawn)
    assert binom.sf(above - 1, 200, 0.05) > 1e-4


def test_better_explained_shadows_are_not_counted() -> None:
    played = [Shadow(1e-9, 1.0), Shadow(1e-4, 0.5), Shadow(1e-2, 0.0)]
    assert comparable(1e-4, played) == played[1:]
    assert comparable(1e-12, played) == played
    assert comparable(1.0, played) == []
