# SPDX-License-Identifier: Apache-2.0
"""Scores of reconstructions whose quality is known, on real data."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor

from fedsim.attacks.observation import Knowledge, Reconstruction
from fedsim.audit.bounds import kappa_uniform, rero_gaussian
from fedsim.audit.reconstruction import MOST_PRIOR_ROWS, ReconstructionScore, score
from fedsim.audit.scores.comparison import Comparison, Outcome, compare, pooled
from fedsim.audit.scores.perceptual import HIGHEST_PSNR, gradient_distance, mean_squared_error, psnr, ssim
from fedsim.audit.scores.shares import Share, clopper_pearson
from fedsim.audit.scores.yardsticks import rouge_l, rouge_n
from fedsim.data.table import CategoricalColumn, NumericColumn, TableEncoding
from fedsim.errors import AttackError, PrivacyError
from fedsim.privacy import OUTSIDER, PrivacyClaim

IMAGES = Knowledge("image", (1, 8, 8), 10, (torch.tensor(0.0), torch.tensor(1.0)))
BATCH = 8


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.from_numpy(data.images).float()[:, None] / 16, torch.from_numpy(data.target)


def found(inputs: Tensor, **changes: Any) -> Reconstruction:
    made = Reconstruction("exact", inputs, None, 0.0, torch.full((len(inputs),), 0.9))
    return replace(made, **changes)


def noisy(x: Tensor, level: float, seed: int = 0) -> Tensor:
    return x + level * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


# --- pictures -------------------------------------------------------------------------------------------------------


def test_a_perfect_copy_in_another_order(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(1))
    result = score(found(x[:BATCH][order], labels=y[:BATCH][order]), x[:BATCH], y[:BATCH], IMAGES, prior=x[1000:])
    assert result.assignment == tuple(order.tolist())
    assert result.right == result.exact == result.leaked == Share(BATCH, BATCH)
    assert result.metrics["psnr"] == HIGHEST_PSNR
    assert result.metrics["ssim"] == pytest.approx(1)
    assert result.metrics["mse"] == 0
    assert result.metrics["perceptual"] == pytest.approx(0, abs=1e-12)
    assert result.label_accuracy == 1
    assert all(item.label_right for item in result.items)
    assert result.baseline is not None
    assert result.baseline.success.right < BATCH
    assert result.baseline.metrics["psnr"] < 15


def test_psnr_is_that_of_the_noise(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    for level in (0.01, 0.03):
        result = score(found(noisy(x[:64], level)), x[:64], y[:64], IMAGES)
        assert result.metrics["psnr"] == pytest.approx(-20 * math.log10(level), abs=0.3)
        assert result.right.right == 64
        assert result.exact.right == 0
        assert result.baseline is None


def test_half_a_grey_level_is_exact(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    for offset, exact in ((0.9 / 510, 4), (1.1 / 510, 0)):
        assert score(found(x[:4] + offset), x[:4], y[:4], IMAGES).exact.right == exact


def test_what_was_not_found_is_a_failure(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    half = score(found(x[:4]), x[:BATCH], y[:BATCH], IMAGES)
    assert half.right == Share(4, BATCH)
    assert half.metrics["psnr"] == HIGHEST_PSNR / 2
    assert half.metrics["mse"] == 0.5
    nothing = score(found(x[:0]), x[:BATCH], y[:BATCH], IMAGES, prior=x[1000:])
    assert nothing.right == nothing.exact == Share(0, BATCH)
    assert nothing.metrics["psnr"] == 0
    assert nothing.sentence().startswith("Nothing of 8 pictures")


def test_more_items_than_originals(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    result = score(found(torch.cat([x[100:104], x[:4]])), x[:4], y[:4], IMAGES)
    assert result.assignment == (-1, -1, -1, -1, 0, 1, 2, 3)
    assert result.right == Share(4, 4)
    assert [item.right for item in result.items] == [False] * 4 + [True] * 4
    assert result.reliability == ()  # the attack was not calibrated
    sure = score(found(x[:4], confidence=torch.full((4,), 0.25)), x[:4], y[:4], IMAGES)
    assert sure.reliability == ((0.25, True),) * 4


def test_an_exact_pair_is_never_broken_to_please_the_sum(digits: tuple[Tensor, Tensor]) -> None:
    # In squared distances 0→1 and −5→0 (26) beats 0→0 and −5→1 (36); the exact pair must win all the same.
    _, y = digits
    base = torch.zeros(1, 1, 8, 8)
    originals = torch.cat([base, base + 0.1])
    result = score(found(torch.cat([base - 0.5, base])), originals, y[:2], IMAGES)
    assert result.assignment == (1, 0)
    assert result.exact.right == 1


def test_what_is_no_number_is_paired_with_nothing(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    broken = x[:4].clone()
    broken[1, 0, 0, 0], broken[2, 0, 3, 3] = math.nan, math.inf
    result = score(found(broken), x[:4], y[:4], IMAGES, prior=x[1000:])
    assert result.assignment == (0, -1, -1, 3)
    assert result.right == Share(2, 4)
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_guess_is_no_leak(digits: tuple[Tensor, Tensor]) -> None:
    """Answering with the mean picture of each granted label is right for some, and leaks nothing."""
    x, y = digits
    knowledge = replace(IMAGES, labels=y[:BATCH])
    means = torch.stack([x[1000:][y[1000:] == label].mean(0) for label in y[:BATCH]])
    result = score(found(means), x[:BATCH], y[:BATCH], knowledge, prior=x[1000:], prior_labels=y[1000:], eta=0.25)
    assert result.right.right > 0
    assert result.leaked.right == 0
    assert result.baseline is not None
    assert "same label" in result.baseline.guess
    assert result.baseline.success.right == result.right.right


@given(seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_order_of_the_items_does_not_matter(digits: tuple[Tensor, Tensor], seed: int) -> None:
    x, y = digits
    generator = torch.Generator().manual_seed(seed)
    guess = x[:BATCH] + torch.rand(BATCH, 1, 1, 1, generator=generator) * torch.randn(
        BATCH, 1, 8, 8, generator=generator
    )
    order = torch.randperm(BATCH, generator=generator)
    one, other = (score(found(inputs), x[:BATCH], y[:BATCH], IMAGES) for inputs in (guess, guess[order]))
    assert (one.right, one.exact) == (other.right, other.exact)
    assert one.metrics == pytest.approx(other.metrics)
    assert [one.assignment[place] for place in order.tolist()] == list(other.assignment)


def test_granted_labels_make_guessing_easier(digits: tuple[Tensor, Tensor]) -> None:
    """Every class is one picture: who knows the label knows the picture, and no claim is broken by saying so."""
    x, _ = digits
    labels = torch.arange(10)
    public, public_labels = x[labels.repeat(50)], labels.repeat(50)
    known = replace(IMAGES, labels=labels[:1])
    arguments: Any = (found(x[:1]), x[:1], labels[:1])
    blind = score(*arguments, IMAGES, prior=public, prior_labels=public_labels, claims=[claim()])
    told = score(*arguments, known, prior=public, prior_labels=public_labels, claims=[claim()])
    assert blind.baseline is not None
    assert told.baseline is not None
    assert (blind.baseline.blind_exact.upper, blind.baseline.chance_exact) == (0.1, 0.1)
    assert (told.baseline.blind.upper, told.baseline.blind_exact.upper) == (1, 1)
    assert (told.baseline.chance, told.baseline.chance_exact) == (1, 1)
    assert all(c.allowed == 1 and c.advantage == 0 for c in told.comparisons)
    for nothing in ({}, {"prior_labels": public_labels + 1}):  # of public rows with this label nothing is known
        base = score(*arguments, known, prior=public, **nothing).baseline
        assert base is not None
        assert base.blind_exact.upper == 1
    half = replace(IMAGES, labels=labels[:2])  # different rows for label 0, none for label 1
    base = score(found(x[:2]), x[:2], labels[:2], half, prior=x[100:150], prior_labels=torch.zeros(50).long()).baseline
    assert base is not None
    assert (base.blind_exact.lower, base.blind_exact.upper) == (0.02, 1)


def test_a_certificate_means_more_than_likeness(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    guess = torch.stack([x[0], x[1] + 0.05])  # 26 dB: right at η, but not what was certified
    result = score(found(guess, certified=torch.tensor([True, True])), x[:2], y[:2], IMAGES)
    assert result.right == Share(2, 2)
    assert result.certified == Share(1, 2)
    assert "half a grey level" in result.certified_within


def test_a_certificate_is_held_to_the_radius_that_it_states(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    guess = torch.stack([x[0] + 0.001, x[1] + 0.001, x[2]])
    radius = torch.tensor([0.0011, 0.0009, math.inf])
    result = score(found(guess, certified=torch.tensor([True, True, False]), radius=radius), x[:3], y[:3], IMAGES)
    assert result.certified == Share(1, 2)
    assert "0.29 grey levels" in result.certified_within


def test_certificates_are_counted(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    guess = torch.cat([x[:3], x[500:501]])
    result = score(found(guess, certified=torch.tensor([True, True, False, True])), x[:4], y[:4], IMAGES)
    assert result.certified == Share(2, 3)  # the wrong certificate shows


def test_labels_alone(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    counts = torch.bincount(y[:BATCH], minlength=10)
    counts[0] -= 1
    counts[1] += 1
    result = score(found(x[:0], label_counts=counts), x[:BATCH], y[:BATCH], IMAGES)
    assert result.label_accuracy == (BATCH - 1) / BATCH


def test_there_and_back_again(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    result = score(
        found(noisy(x[:BATCH], 0.05)), x[:BATCH], y[:BATCH], IMAGES, prior=x[1000:], claims=[claim(), claim("client")]
    )
    assert ReconstructionScore.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False))) == result


def test_shapes_that_do_not_fit_are_refused(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    with pytest.raises(AttackError, match="an input has"):
        score(found(x[:4].flatten(1)), x[:4], y[:4], IMAGES)
    with pytest.raises(AttackError, match="confidence of exact has 1 entries"):
        score(found(x[:4], confidence=torch.ones(1)), x[:4], y[:4], IMAGES)


def test_likeness_measures(digits: tuple[Tensor, Tensor]) -> None:
    x = digits[0][:16].double()
    assert gradient_distance(x, x).max() < 1e-12
    slight, strong = gradient_distance(x, noisy(x, 0.05)), gradient_distance(x, noisy(x, 0.5))
    negative = gradient_distance(x, 1 - x)
    shifted = gradient_distance(x, (x + 0.05).clamp(0, 1))
    assert (slight < strong).all()
    assert (strong < negative).all()
    assert (shifted < 0.05).all()  # a little brighter is nearly the same picture
    assert (negative <= 1).all()
    assert torch.allclose(gradient_distance(x, noisy(x, 0.2)), gradient_distance(noisy(x, 0.2), x))
    assert ssim(x, x).min() == pytest.approx(1)
    assert (ssim(x, noisy(x, 0.5)) < ssim(x, noisy(x, 0.05))).all()
    assert psnr(torch.tensor([0.01])).item() == pytest.approx(20)
    assert mean_squared_error(x, x + 0.1).max() == pytest.approx(0.01)


# --- rows and texts -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table() -> tuple[Tensor, Tensor, Knowledge]:
    """Three numbers of one decimal or none, and a category."""
    data = load_breast_cancer()
    values = torch.from_numpy(data.data[:, :3]).double().round(decimals=1)
    mean, std = values.mean(0), values.std(0)
    codes = (values[:, 0] > mean[0]).long()
    names = ("radius", "texture", "perimeter")
    columns = [NumericColumn(n, float(m), float(s), 1, False) for n, m, s in zip(names, mean, std, strict=True)]
    encoding = TableEncoding((*columns, CategoricalColumn("size", ("small", "large"))))
    x = torch.cat([(values - mean) / std, torch.nn.functional.one_hot(codes, 2)], dim=1).float()
    return x, torch.from_numpy(data.target), Knowledge("table", (5,), 2, encoding=encoding)


def test_cells_right_and_exact(table: tuple[Tensor, Tensor, Knowledge]) -> None:
    x, y, knowledge = table
    guess = x[:4].clone()
    guess[0, 0] += 0.3  # within TabLeak's tolerance, not the value
    guess[1, 1] += 0.4  # beyond it
    guess[2, 3:] = guess[2, 3:].flip(0)  # the other category
    guess[3, 3:] = torch.tensor([0.4, 0.6]) if guess[3, 4] else torch.tensor([0.6, 0.4])  # decided by the largest
    result = score(found(guess), x[:4], y[:4], knowledge, prior=x[100:])
    cells = [item.metrics["cells_right"] for item in result.items]
    assert cells == [1.0, 0.75, 0.75, 1.0]
    assert [item.metrics["cells_exact"] for item in result.items] == [0.75, 0.75, 0.75, 1.0]
    assert [item.right for item in result.items] == [True, False, False, True]
    assert [item.exact for item in result.items] == [False, False, False, True]
    assert result.metrics["cells_right"] == pytest.approx(0.875)
    assert result.baseline is not None
    assert result.baseline.metrics["cells_right"] == 3 / 16


def test_the_confidence_of_cells_is_kept_beside_the_truth(table: tuple[Tensor, Tensor, Knowledge]) -> None:
    x, y, knowledge = table
    guess = x[:2].clone()
    guess[0, 0] += 1
    sure = torch.tensor([[0.2, 0.9, 0.9, 0.9], [0.8, 0.8, 0.8, 0.8]])
    result = score(found(guess, cells=sure), x[:2], y[:2], knowledge)
    assert [right for _, right in result.cells] == [False] + 7 * [True]
    assert [value for value, _ in result.cells] == pytest.approx(sure.flatten().tolist())


def test_certified_rows_and_texts(table: tuple[Tensor, Tensor, Knowledge]) -> None:
    x, y, knowledge = table
    guess = x[:3].clone()
    guess[0, 0] += 0.04
    guess[1, 1] += 0.06
    guess[2, 3:] = guess[2, 3:].flip(0)
    sure = torch.ones(3, dtype=torch.bool)
    rows = score(found(guess, certified=sure), x[:3], y[:3], knowledge, eta=0.5)
    assert (rows.right, rows.certified) == (Share(3, 3), Share(1, 3))
    assert "0.05 std" in rows.certified_within
    tokens = torch.arange(60).reshape(3, 20)
    other = tokens.clone()
    other[0, 3] = 59
    texts = score(found(other, certified=sure), tokens, tokens, Knowledge("text", (20,), 60))
    assert (texts.right, texts.certified) == (Share(3, 3), Share(2, 3))


def test_rows_without_an_encoding_are_numbers(table: tuple[Tensor, Tensor, Knowledge]) -> None:
    x, y, knowledge = table
    result = score(found(x[:3] + 0.1), x[:3], y[:3], replace(knowledge, encoding=None), prior=x[100:])
    assert result.metrics["cells_right"] == 1
    assert result.metrics["cells_exact"] == 0


def test_tokens_and_their_order() -> None:
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 2, 2]])
    guess = torch.tensor([[8, 7, 6, 5], [1, 2, 3, 4]])
    result = score(found(guess), tokens, tokens, Knowledge("text", (4,), 10), prior=torch.ones(20, 4).long())
    assert result.assignment == (1, 0)
    assert result.exact == Share(1, 3)
    backwards = result.items[0].metrics
    assert (backwards["tokens_right"], backwards["rouge_1"], backwards["rouge_2"]) == (0, 1, 0)
    assert backwards["rouge_l"] == 0.25
    assert result.metrics["tokens_right"] == pytest.approx(1 / 3)
    assert result.baseline is not None
    assert result.baseline.metrics["tokens_right"] == pytest.approx(3 / 12)  # the prior's token, 1, is in three places


def test_rouge_by_hand() -> None:
    the_cat, a_cat = [1, 2, 3, 4, 5], [1, 2, 9, 5]
    assert rouge_n(the_cat, a_cat, 1) == pytest.approx(2 * 3 / 9)
    assert rouge_n(the_cat, a_cat, 2) == pytest.approx(2 * 1 / 7)
    assert rouge_l(the_cat, a_cat) == pytest.approx(2 * 3 / 9)
    assert rouge_n([1, 1, 1], [1], 1) == pytest.approx(0.5)  # counted with repetition


# --- beside a claim -------------------------------------------------------------------------------------------------


def claim(unit: str = "example", **changes: Any) -> PrivacyClaim:
    fields: dict[str, Any] = {
        "epsilon": 1.0,
        "delta": 1e-6,
        "unit": unit,
        "adjacency": "replace",
        "sampling": "none",
        "released": "gradients",
        "observer": "the server",
        "accountant": "by hand",
        "mechanism": "laplace noise",
        "noise_multiplier": 1.0,
        "sample_rate": 1.0,
        "compositions": 1,
    }
    return PrivacyClaim(**fields | changes)


def test_a_claim_that_is_not_true_is_found_out(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    result = score(found(x[:BATCH]), x[:BATCH], y[:BATCH], IMAGES, prior=x[BATCH:], claims=[claim()])
    copies = next(c for c in result.comparisons if "exact" in c.success)
    # 8 guesses among 1,000 rows, times e: what is allowed is next to nothing, and the share was 1.
    assert copies.kappa == pytest.approx(8 / MOST_PRIOR_ROWS)
    assert copies.allowed < 0.022
    assert copies.measured == Share(8, 8)
    assert copies.verdict == "violated"
    assert "more than the claim allows" in copies.sentence()
    assert "more than the claim allows" in result.sentence()
    assert copies.advantage == 1
    assert copies.advantage > copies.advantage_allowed


def test_a_true_claim_is_not_accused(digits: tuple[Tensor, Tensor]) -> None:
    """Noise as large as the pictures: nothing is right, and nothing speaks against the claim."""
    x, y = digits
    result = score(
        found(noisy(x[:BATCH], 1.0)), x[:BATCH], y[:BATCH], IMAGES, prior=x[1000:], claims=[claim(), claim("client")]
    )
    assert len(result.comparisons) == 6  # likeness and copy: of an example; of any, and of every one, of a client's
    assert {c.verdict for c in result.comparisons} == {"consistent"}


def test_whom_a_claim_is_about(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    arguments: Any = (found(x[:BATCH]), x[:BATCH], y[:BATCH], IMAGES)
    assert not score(*arguments, prior=x[1000:], claims=[claim(observer=OUTSIDER)]).comparisons
    assert not score(*arguments, prior=x[1000:], claims=[claim(epsilon=math.inf)]).comparisons
    assert not score(*arguments, claims=[claim()]).comparisons  # nothing is known about guessing
    one, ten = (score(*arguments, prior=x[1000:], claims=[claim("client")], clients=n).comparisons for n in (1, 8))
    assert all(c.measured.of == 1 for c in one)  # an update is one trial
    any_one, any_ten = (next(c for c in cs if "exact copy of any" in c.success) for cs in (one, ten))
    assert any_one.kappa == pytest.approx(8 * any_ten.kappa)  # fewer examples each
    assert any_ten.allowed == pytest.approx(min(1, 8 * bound(any_ten.kappa)))  # any of eight clients


def bound(kappa: float) -> float:
    return (math.e * kappa + 1e-6) / (1 - kappa + math.e * kappa)


def comparison(right: int, of: int, allowed: float, client: int | None = None) -> Comparison:
    trials = () if client is None else ((client, right, of),)
    return Comparison("c", "s", 0.01, allowed, "(ε, δ)", Share(right, of), 0.1, 0.0, 1, trials)


def test_examples_of_one_update_are_not_independent() -> None:
    lucky = comparison(8, 8, 0.2)
    assert lucky.measured.interval[0] > lucky.allowed
    assert (lucky.verdict, lucky.p_value) == ("inconclusive", 0.2)
    assert comparison(8, 8, 0.01).verdict == "violated"
    assert comparison(0, 8, 0.0).p_value == 1
    (many,) = pooled([comparison(1, 1, 0.2, client) for client in range(4)])
    assert (many.measured, many.updates) == (Share(4, 4), 4)
    assert many.p_value == pytest.approx(0.2**4)
    assert many.verdict == "violated"


def test_updates_of_one_client_are_not_independent() -> None:
    for client in (3, None):  # whose updates they are may not be known either
        (same,) = pooled([comparison(1, 1, 0.2, client)] * 5)
        assert (same.measured, same.updates) == (Share(5, 5), 5)
        assert (same.verdict, same.p_value) == ("inconclusive", 0.2)
        assert "attack more updates of other clients" in same.sentence()
    # Each client is one trial, which wins at least half with probability 2 · 0.1.
    (several,) = pooled([comparison(1, 1, 0.1, client) for client in range(4) for _ in range(5)])
    assert several.p_value == pytest.approx(2 * 0.2**4)
    (mostly_lost,) = pooled([comparison(3, 10, 0.01, client) for client in range(4)])
    assert mostly_lost.p_value == pytest.approx(2 * 0.01 / 0.3)


def test_who_guesses_blindly_is_rarely_accused() -> None:
    """Five records, five updates of each of three clients, and the same guess for a client every time."""
    rng, accused = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        truth, guess = torch.randint(5, (2, 3), generator=rng).tolist()
        outcomes = [
            Outcome("a copy", (truth[client] == guess[client],), 1, kappa_uniform(5), 0.2, 1, client)
            for client in (0, 1, 2) * 5
        ]
        (one,) = pooled([c for o in outcomes for c in compare([claim(epsilon=0.01)], o)])
        accused += one.verdict == "violated"
    assert accused <= 0.05 * 400


def test_the_client_reaches_the_comparison(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    result = score(found(x[:2]), x[:2], y[:2], IMAGES, prior=x[1000:], claims=[claim()], client=7)
    assert all(c.trials == ((7, c.measured.right, c.measured.of),) for c in result.comparisons)
    assert ReconstructionScore.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_many_comparisons_share_the_five_percent(digits: tuple[Tensor, Tensor]) -> None:
    alone = comparison(8, 8, 0.03)
    assert alone.verdict == "violated"
    together = pooled([alone, replace(alone, success="another")])
    assert [(c.looks, c.verdict) for c in together] == [(2, "inconclusive")] * 2
    x, y = digits
    scored = score(found(x[:2]), x[:2], y[:2], IMAGES, prior=x[1000:], claims=[claim(), claim("client")])
    assert {c.looks for c in scored.comparisons} == {len(scored.comparisons)} == {6}


def test_a_comparison_says_what_it_rests_on() -> None:
    outcome = Outcome("a copy", (True,), 1, kappa_uniform(100), 0.01, 1)
    sampled = claim(adjacency="add/remove", sampling="poisson", sample_rate=0.1, mechanism="gaussian noise")
    for made, amplified in ((sampled, True), (claim(), False)):
        (one,) = compare([made], outcome)
        assert ("without amplification: the scored examples were drawn" in one.sentence()) == amplified
        assert "drawn like the public rows" in one.sentence()
    assert compare([sampled], outcome)[0].allowed == pytest.approx(rero_gaussian(1.0, 0.01))


def test_luck_adds_up_over_the_examples_of_a_client() -> None:
    outcome = Outcome("a likeness", (True, False), 1, kappa_uniform(10), 0.1, 1)
    any_, every = compare([claim("client")], outcome)
    assert any_.chance == pytest.approx(1 - 0.9**2)
    assert any_.advantage == pytest.approx(0.9**2)
    assert (any_.kappa, every.kappa, every.measured) == (pytest.approx(0.2), pytest.approx(0.1), Share(0, 1))


def test_pooling_keeps_the_weakest_bound() -> None:
    (both,) = pooled([comparison(1, 4, 0.1), comparison(3, 4, 0.3)])
    assert (both.allowed, both.measured, both.updates) == (0.3, Share(4, 8), 2)


# --- intervals ------------------------------------------------------------------------------------------------------


def test_clopper_pearson_known_values() -> None:
    # R: binom.test(0, 1000), binom.test(8, 8), binom.test(3, 10)
    assert clopper_pearson(0, 1000) == (0.0, pytest.approx(0.003682, abs=1e-6))
    assert clopper_pearson(8, 8) == (pytest.approx(0.630583, abs=1e-6), 1.0)
    assert clopper_pearson(3, 10) == (pytest.approx(0.06673951, abs=1e-7), pytest.approx(0.6524529, abs=1e-7))
    with pytest.raises(PrivacyError):
        clopper_pearson(3, 2)


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_clopper_pearson_covers(rate: float) -> None:
    n = 40
    intervals = [clopper_pearson(k, n) for k in range(n + 1)]
    missed = sum(binom.pmf(k, n, rate) for k, (low, high) in enumerate(intervals) if not low <= rate <= high)
    assert missed <= 0.05


def test_counted_labels_are_held_against_a_strangers_guess(digits: tuple[Tensor, Tensor]) -> None:
    """Guessing that every class is as common as in public has most labels of a large client right without looking."""
    x, y = digits
    blind = torch.full((10,), 50)
    result = score(found(x[:0], label_counts=blind), x[:500], y[:500], IMAGES, claims=[claim()], prior=x[500:],
                   prior_labels=y[500:])  # fmt: skip
    naive = sum(min(500 * float((y[500:] == k).double().mean()), int((y[:500] == k).sum())) for k in range(10)) / 500
    assert result.label_guess == pytest.approx(naive)
    assert result.label_guess > 0.9
    assert abs((result.label_accuracy or 0) - result.label_guess) < 0.05
    assert "a stranger's guess" in result.sentence()
    assert result.comparisons == ()  # nothing was rebuilt, so that no bound was put to the test
    assert score(found(x[:0], label_counts=blind), x[:500], y[:500], IMAGES).label_guess is None
