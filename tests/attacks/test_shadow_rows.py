# SPDX-License-Identifier: Apache-2.0
"""Shadow batches: made by the attacker, disturbed as the real one was, and what they say about a curve."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.attacks.cell_confidence import CURVE, log_odds, mode_shift, pooled_confidence
from fedsim.attacks.ensemble import Problem, attack_rows
from fedsim.attacks.matching import Target
from fedsim.attacks.shadow_rows import as_observed, shadow_cells, shadow_shift
from fedsim.data import load_dataset
from fedsim.data.table import TableEncoding
from fedsim.scenario import EmbeddedData


def problem(size: int = 4) -> tuple[Problem, Tensor]:
    data = load_dataset(EmbeddedData(source="breast_cancer"), 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(data.x_train.shape[1], 40), nn.ReLU(), nn.Linear(40, 2))
    x, y = data.x_train[:size], data.y_train[:size].sort().values
    sent = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    assert isinstance(data.encoding, TableEncoding)
    bounds = (data.x_train.amin(0), data.x_train.amax(0))
    present = torch.ones(x.shape[1], dtype=torch.bool)
    return Problem(model.eval().requires_grad_(False), Target(list(sent)), y, data.encoding, present, bounds), x


def test_a_shadow_batch_is_attacked_like_the_real_one_and_is_repeatable() -> None:
    given, _ = problem()
    pooled = attack_rows(given, 5, 20, 0)
    cells, right = shadow_cells(given, pooled, 20, 3)
    assert cells.shape == (4 * 30, len(CURVE))
    assert right.shape == (4 * 30,)
    assert 0 < float(right.mean()) < 1
    assert shadow_shift(given, pooled, 20, 3) == shadow_shift(given, pooled, 20, 3)


def test_a_shift_moves_every_cell_the_same_way() -> None:
    given, _ = problem()
    pooled = attack_rows(given, 5, 10, 0)
    low, high = (pooled_confidence(pooled, given, shift) for shift in (-2.0, 2.0))
    assert (low < high).all()
    assert pooled_confidence(pooled, given).shape == low.shape
    assert torch.equal(log_odds(torch.zeros(3, len(CURVE), dtype=torch.float64)), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_shift_is_what_the_log_odds_lack(share: float) -> None:
    right = (torch.arange(1000) < 1000 * share).double()
    assert mode_shift(torch.zeros(1000).double(), right) == pytest.approx(math.log(share / (1 - share)), abs=0.05)
    assert abs(mode_shift(torch.zeros(2).double(), torch.ones(2).double())) < 2  # two cells prove little


def test_the_defence_is_played_on_the_shadow_too() -> None:
    gradient, noise = [torch.tensor([0.3, -0.02, 1.2])], [torch.ones(3)]
    for target, expected in (
        (Target(gradient), [0.3, -0.02, 1.2]),
        (Target(gradient, deviation=0.5), [0.8, 0.48, 1.7]),
        (Target(gradient, threshold=0.1), [0.3, 0.0, 1.2]),
        (Target(gradient, half_step=0.25), [0.5, 0.0, 1.0]),
        (Target(gradient, magnitude=0.7), [0.7, -0.7, 0.7]),
    ):
        torch.testing.assert_close(as_observed(gradient, noise, target)[0], torch.tensor(expected))
