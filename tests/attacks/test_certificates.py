# SPDX-License-Identifier: Apache-2.0
"""A certificate states how near an example of the client is, and is withheld from the mean of several."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from certificates import hunt
from hard_batches import FAMILIES, Network, examples, near, network, observed, ordinary
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsim.attacks.closed_form import closed_form
from fedsim.attacks.exact import exact
from fedsim.attacks.exact_certificate import _minority, in_words
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction
from fedsim.scenario.attack import ClosedFormAttack, ExactAttack

IMAGES = Knowledge("image", (64,), 10, value_range=(torch.zeros(()), torch.ones(())))
SETTINGS = ExactAttack(name="exact")


def apart(items: Tensor, truth: Tensor) -> Tensor:
    """(n,) largest difference in any value to the nearest example."""
    return (items.flatten(1).double()[:, None] - truth.double()[None]).abs().amax(2).amin(1)


def batch(seed: int, size: int, share: float = 0.25, **change: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    return (
        near(change["pixels"], change["levels"], share)(examples("digits"), rng, size)
        if change
        else ordinary(examples("digits"), rng, size)
    )


def seen(x: Tensor, y: Tensor, sent: str = "gradient", kind: Network = Network()) -> Observation:  # noqa: B008
    return observed(network("digits", kind, 1.0), x, y, sent, np.random.default_rng(0))


def certified(result: Reconstruction) -> Tensor:
    assert result.certified is not None
    return result.certified


# --- exact ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [2, 80])
def test_the_mean_of_two_similar_images_is_not_certified(levels: int) -> None:
    x, y = batch(0, 8, 0.125, pixels=1, levels=levels)
    result = exact(seen(x, y), IMAGES, SETTINGS)
    sure = certified(result)
    assert result.radius is not None
    assert (apart(result.inputs, x)[sure] <= result.radius[sure]).all()
    assert (result.radius[~sure] == math.inf).all()
    mean = apart(result.inputs, x[:2].mean(0, keepdim=True)) < 0.01 * levels / 255
    assert not (mean & sure).any()
    assert int(sure.sum()) >= 3  # the other images of the batch keep theirs


@pytest.mark.parametrize("sent", ["clipped", "step", "epochs"])
def test_an_ordinary_batch_is_certified_however_it_was_sent(sent: str) -> None:
    x, y = batch(3, 8)
    result = exact(seen(x, y, sent), IMAGES, SETTINGS)
    assert certified(result).all()
    assert result.radius is not None
    assert (apart(result.inputs, x) <= result.radius).all()
    assert float(result.radius.max()) < 1 / 255


def test_the_radius_is_that_of_rounding_and_is_stated() -> None:
    x, y = batch(4, 8)
    result = exact(seen(x, y), IMAGES, SETTINGS)
    assert result.radius is not None
    assert 1e-7 < float(result.radius.max()) < 1e-4
    words = in_words(float(result.radius.max()), IMAGES)
    assert any(f"holds an example within {words} of it" in note for note in result.notes)
    assert words.endswith("grey levels of 256")


def test_a_radius_is_rounded_up() -> None:
    assert in_words(0.0123456 / 255, IMAGES) == "0.013 grey levels of 256"
    assert in_words(0.25, Knowledge("table", (3,), 2)) == "0.25"


def test_repeated_rows_are_not_certified_and_the_others_are() -> None:
    """Twice x has the gradient of x + e and x - e, if e changes neither a sign nor a logit."""
    x, y = batch(5, 8)
    x[1], y[1] = x[0], y[0]
    result = exact(seen(x, y), IMAGES, SETTINGS)
    twice = apart(result.inputs, x[:1]) < 1e-3
    assert torch.equal(certified(result), ~twice)
    assert any("mean of several similar or equal examples" in note for note in result.notes)


def test_without_the_size_of_the_batch_nothing_is_certified() -> None:
    """A batch in which every image is there twice has the gradient of half the batch."""
    x, y = batch(6, 8)
    told = seen(x, y)
    hidden = replace(told, examples=None, work=replace(told.work, batch_size=None))
    assert certified(exact(told, IMAGES, SETTINGS)).all()
    assert not certified(exact(hidden, IMAGES, SETTINGS)).any()


def test_images_that_all_are_there_twice_and_are_clipped_to_half() -> None:
    """The weight of two halves is that of one."""
    x, y = batch(7, 4)
    doubled = seen(x.repeat_interleave(2, 0), y.repeat_interleave(2))
    halved = replace(doubled, update={name: each / 2 for name, each in doubled.update.items()})
    for each in (doubled, halved):
        result = exact(each, IMAGES, SETTINGS)
        sure = certified(result)
        assert (apart(result.inputs, x)[sure] < 1e-3).all()
    assert not certified(exact(doubled, IMAGES, SETTINGS)).any()


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.02, 0.98),
    st.floats(-6, 6),
    st.integers(2, 12),
    st.integers(0, 10**6),
)
def test_the_entropy_of_the_weights_is_at_most_the_excess_of_log_odds(
    share: float, level: float, classes: int, seed: int
) -> None:
    """Two examples in a region where f is affine, with proportional softmax(f) - e_y: the bound of the certificate."""
    rng = np.random.default_rng(seed)
    weights = np.array([share, 1 - share])
    total = 1 / (1 + math.exp(-level)) / weights.max()  # k q, so that a k q < 1 for both
    others = rng.dirichlet(np.ones(classes - 1))
    mine = weights[:, None] * total * others  # softmax of each for the wrong classes
    logits = np.log(mine) - np.log(1 - mine.sum(1, keepdims=True))  # relative to that of the label
    mean = weights @ logits
    q = np.exp(mean).sum() / (1 + np.exp(mean).sum())
    if not 1e-12 < total < 1 - 1e-12:  # more than one example can weigh, which is no explanation of one
        return
    excess = math.log(total / (1 - total)) - math.log(q / (1 - q))
    entropy = -(weights * np.log(weights)).sum()
    assert excess >= entropy - 1e-6
    bound = _minority(torch.tensor([min(excess, math.log(2))], dtype=torch.float64))
    assert float(bound) >= weights.min() - 1e-6


@given(st.floats(1e-9, 0.5))
def test_the_smaller_of_two_shares_from_their_entropy(share: float) -> None:
    entropy = torch.tensor([-share * math.log(share) - (1 - share) * math.log1p(-share)], dtype=torch.float64)
    assert float(_minority(entropy)) == pytest.approx(share, rel=1e-3)


HARD = [
    "near: 1 by 80",
    "near: 16 by 3, two classes",
    "frames",
    "blank",
    "repeated",
    "saturated",
    "in grey levels",
    "clipped, near",
    "epochs, near",
    "noisy, near",
    "step, near",
]


@pytest.mark.parametrize("name", HARD)
def test_no_certificate_of_a_hard_batch_is_wrong(name: str) -> None:
    for family in (each for each in FAMILIES if each.name == name):
        short = replace(family, sizes=(4,), networks=family.networks[:1])
        for case, tally in hunt(short, "digits", 1, seed=0):
            assert tally.wrong == 0, case


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_certificate_of_any_family_is_wrong() -> None:
    found = 0
    for family in FAMILIES:
        for case, tally in hunt(family, "mnist-5000", 2, seed=1):
            assert tally.wrong == 0, case
            found += tally.certified
    assert found > 500


# --- closed form ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["gradient", "clipped", "epochs"])
def test_closed_form_does_not_certify_the_mean_of_similar_images(sent: str) -> None:
    for seed in range(6):
        x, y = batch(seed, 4, 0.5, pixels=4, levels=10)
        result = closed_form(seen(x, y, sent), IMAGES, ClosedFormAttack(name="closed-form"))
        assert (apart(result.inputs, x)[certified(result)] < 1 / 510).all()


def test_closed_form_certifies_a_clipped_batch_of_different_images() -> None:
    count = 0
    for seed in range(4):
        x, y = batch(seed, 4)
        result = closed_form(seen(x, y, "clipped"), IMAGES, ClosedFormAttack(name="closed-form"))
        assert (apart(result.inputs, x)[certified(result)] < 1 / 510).all()
        count += int(certified(result).sum())
    assert count >= 12
