# SPDX-License-Identifier: Apache-2.0
"""Grades of reconstructions: what anybody can read is not "0 of 8", and what luck explains is not recognised."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import binom
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor

from fedsim.attacks.observation import Knowledge, Reconstruction
from fedsim.audit.reconstruction import ReconstructionScore, graded_counts, score
from fedsim.audit.scores.grades import GRADES, LEAST_GALLERY, singled_out
from fedsim.audit.scores.reader import reader
from fedsim.audit.scores.yardsticks import yardstick
from fedsim.data import load_dataset
from fedsim.scenario import Scenario

UNIT = (torch.tensor(0.0), torch.tensor(1.0))


@pytest.fixture(scope="module")
def mnist() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and public pictures with labels."""
    data = load_dataset(Scenario.model_validate({"data": "mnist"}).data, 5)
    return data.x_train, data.y_train, data.x_test, data.y_test


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.from_numpy(data.images).float()[:, None] / 16, torch.from_numpy(data.target)


def graded(
    found: Tensor, truth: Tensor, labels: Tensor, public: tuple[Tensor, Tensor], others: Tensor
) -> ReconstructionScore:
    result = Reconstruction("auto", found, None, 0.0, torch.ones(len(found)))
    knowledge = Knowledge("image", tuple(truth.shape[1:]), 10, UNIT)
    return score(result, truth, labels, knowledge, prior=public[0], prior_labels=public[1], others=others)


def noisy(truth: Tensor, decibels: float, seed: int) -> Tensor:
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(seed))
    return truth + 10 ** (-decibels / 20) * noise


# --- pictures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decibels", [13, 15, 18])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_digits_that_anybody_can_read_are_recognisable(
    mnist: tuple[Tensor, Tensor, Tensor, Tensor], decibels: float, seed: int
) -> None:
    x, y, public, public_labels = mnist
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    truth, labels = x[rows[:8]], y[rows[:8]]
    found = graded(noisy(truth, decibels, seed), truth, labels, (public, public_labels), x[rows[8:1008]])
    assert found.right.right == 0  # by the cut at 20 dB: "0 of 8"
    assert found.at_least("recognisable").right == 8
    assert graded_counts((found,), "pictures") == "8 of 8 pictures recognisable, 0 near, 0 exact"
    assert found.sentence().startswith("8 of 8 pictures recognisable, 0 near, 0 exact")
    assert found.gallery == 1000 + 1000 + 7


def test_means_of_two_pictures_of_a_class_are_recognisable() -> None:
    """What gradient matching finds of two sevens in a batch: nobody's picture, and anybody reads a seven."""
    x, y = digits()
    pairs = [torch.nonzero(y == label).flatten()[:2] for label in range(10)]
    truth, labels = x[torch.cat(pairs)], y[torch.cat(pairs)]
    found = torch.stack([x[rows].mean(0) for rows in pairs for _ in rows])
    got = graded(found, truth, labels, (x[700:1100], y[700:1100]), x[1100:])
    assert got.right.right < 6
    assert got.at_least("recognisable").right >= 18


def showing_nothing(
    what: str, truth: Tensor, labels: Tensor, rest: tuple[Tensor, Tensor], public: tuple[Tensor, Tensor]
) -> Tensor:
    """What an attack may answer that has learned at most the labels."""
    generator = torch.Generator().manual_seed(len(truth))
    if what == "noise":
        return torch.rand(truth.shape, generator=generator)
    if what == "the public mean":
        return public[0].mean(0) + 0.02 * torch.randn(truth.shape, generator=generator)
    if what == "the class means":
        return torch.stack([public[0][public[1] == label].mean(0) for label in labels])
    if what == "others of the same classes":
        return torch.stack([rest[0][rest[1] == label][-1] for label in labels])
    return torch.full_like(truth, 0.5)


@pytest.mark.parametrize("what", ["others of the same classes", "noise", "the public mean", "grey", "the class means"])
def test_what_shows_nothing_of_the_originals_is_not_recognised(
    mnist: tuple[Tensor, Tensor, Tensor, Tensor], what: str
) -> None:
    x, y, *public = mnist
    scores = []
    for seed in range(4):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        truth, labels, rest = x[rows[:8]], y[rows[:8]], (x[rows[8:1500]], y[rows[8:1500]])
        found = showing_nothing(what, truth, labels, rest, (public[0], public[1]))
        scores.append(graded(found, truth, labels, (public[0], public[1]), rest[0][:1000]))
    recognised = sum(got.at_least("recognisable").right for got in scores)
    assert not any(got.right.right for got in scores)
    assert binom.sf(recognised - 1, 32, 8 / 2008) > 1e-3  # no more than luck
    assert all(got.luck == 8 / 2008 for got in scores)
    read = sum(got.class_read.right for got in scores if got.class_read is not None)
    assert (read >= 16) == (what in ("others of the same classes", "the class means"))  # that much they do show


def test_recognised_by_luck_is_as_rare_as_said() -> None:
    """By symmetry an unrelated item is nearest to one of b originals with probability b / (b + others)."""
    x, _ = digits()
    stick = yardstick(Knowledge("image", (1, 8, 8), 10, UNIT))
    hits = tries = 0
    for seed in range(150):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        truth, others, found = (x[part].double() for part in (rows[:16], rows[16:216], rows[216:232]))
        closest = [(i, int(stick.unlike(found[i : i + 1], truth).argmin())) for i in range(16)]  # the best for the item
        hits += sum(bool(singled_out(stick, found, truth, [pair], others)) for pair in closest)
        tries += 16
    expected = 16 / 216
    assert abs(hits / tries - expected) < 5 * math.sqrt(expected / tries)


def test_near_duplicates_of_the_original_are_no_rivals() -> None:
    x, y = digits()
    truth, labels = x[:4], y[:4]
    frames = truth + 0.01 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(0))
    got = graded(noisy(truth, 18, 0), truth, labels, (x[500:900], y[500:900]), torch.cat([frames, x[900:1200]]))
    assert got.at_least("recognisable").right == 4


def test_brightness_and_contrast_do_not_hide_a_picture() -> None:
    x, y = digits()
    got = graded(0.2 * x[:8] + 0.4, x[:8], y[:8], (x[500:900], y[500:900]), x[900:1200])
    assert got.right.right == 0
    assert got.at_least("recognisable").right == 8


def test_among_too_few_nothing_is_graded() -> None:
    x, y = digits()
    got = graded(noisy(x[:4], 15, 0), x[:4], y[:4], (x[500:510], y[500:510]), x[900:905])
    assert (got.gallery, {item.recognisable for item in got.items}) == (0, {None})
    assert graded_counts((got,), "pictures") == "0 of 4 pictures near, 0 exact"
    assert LEAST_GALLERY > 10 + 5


def test_grades_are_nested_and_survive_the_file() -> None:
    x, y = digits()
    found = torch.cat([x[:2], noisy(x[2:4], 25, 0), noisy(x[4:6], 14, 0), torch.rand(2, 1, 8, 8)])
    got = graded(found, x[:8], y[:8], (x[500:900], y[500:900]), x[900:1200])
    counts = [got.at_least(grade).right for grade in GRADES]
    assert counts == sorted(counts, reverse=True)
    assert counts[-3:] == [6, 4, 2]
    assert ReconstructionScore.from_dict(got.to_dict()) == got
    old = got.to_dict()  # as an earlier version wrote it
    for name in ("gallery", "luck", "reader_accuracy"):
        del old[name]
    old["items"] = [
        {k: v for k, v in item.items() if k not in ("recognisable", "better", "class_read")} for item in old["items"]
    ]
    assert graded_counts((ReconstructionScore.from_dict(old),), "pictures") == "4 of 8 pictures near, 2 exact"


def test_the_second_model_reads_what_it_has_not_seen(mnist: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, y, public, public_labels = mnist
    second = reader(public, public_labels)
    assert second is not None
    assert second.reliable
    held_out = float((second.read(x[:2000]) == y[:2000]).double().mean())
    assert second.accuracy == pytest.approx(held_out, abs=0.025)  # left one out, in closed form
    assert float((second.read(public) == public_labels).double().mean()) > 0.99  # which is not what `accuracy` says
    shuffled = public_labels[torch.randperm(len(public), generator=torch.Generator().manual_seed(0))]
    guesser = reader(public, shuffled)
    assert guesser is not None
    assert not guesser.reliable
    assert reader(public, torch.zeros(len(public), dtype=torch.long)) is None


# --- rows and texts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "recognised"), [(30, 8), (12, 8), (0, 0)])
def test_a_row_is_recognised_by_its_cells(right: int, recognised: int) -> None:
    """A row of 30 numbers of which 12 are right is nobody else's, though 18 are wrong."""
    raw = torch.from_numpy(load_breast_cancer().data)
    x = ((raw - raw.mean(0)) / raw.std(0)).float()
    truth, labels = x[:8], torch.zeros(8, dtype=torch.long)
    found = truth + 5.0  # every cell wrong
    found[:, :right] = truth[:, :right]
    result = Reconstruction("tabular", found, None, 0.0, torch.ones(8))
    got = score(result, truth, labels, Knowledge("table", (30,), 2), prior=x[300:450], others=x[8:300])
    assert abs(got.at_least("recognisable").right - recognised) <= (right == 0)  # one of eight may be by luck
    assert got.right.right == (8 if right == 30 else 0)
    assert got.class_read is None


def test_a_text_is_recognised_by_its_words_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 500, (300, 12), generator=generator)
    truth = x[:4]
    found = truth[:, torch.randperm(12, generator=generator)]
    result = Reconstruction("text", found, None, 0.0, torch.ones(4))
    got = score(result, truth, truth.roll(-1, 1), Knowledge("text", (12,), 500), prior=x[100:], others=x[4:100])
    assert got.right.right == 0
    assert got.at_least("recognisable").right == 4
