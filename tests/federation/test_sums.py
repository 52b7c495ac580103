# SPDX-License-Identifier: Apache-2.0
"""Norms and weighted sums of a cohort's updates."""

from __future__ import annotations

import math

import pytest
import torch

from fedsim.federation.sums import norms_and_sum


@pytest.mark.parametrize("size", [1, 7, 1000, (1 << 15) + 3, 100_001])
def test_norms_and_sum_are_those_of_double_precision(size: int) -> None:
    torch.manual_seed(size)
    rows, weights = torch.randn(9, size), [1.0, 60.0, 3.0, 1.0, 0.5, 1e6, 2.0, 7.0, 1.0]
    norms, total = norms_and_sum(list(rows), weights)
    assert norms == pytest.approx(rows.double().norm(dim=1).tolist(), rel=1e-5)
    truth = torch.tensor(weights, dtype=torch.float64) @ rows.double()
    torch.testing.assert_close(total.double(), truth, rtol=1e-4, atol=1.0)


def test_rows_that_lie_apart_give_the_same_bits() -> None:
    """Inline they are rows of one matrix; from other processes they come one by one."""
    torch.manual_seed(0)
    rows = torch.randn(5, 70_000)
    together, apart = norms_and_sum(list(rows), [1.0] * 5), norms_and_sum([row.clone() for row in rows], [1.0] * 5)
    assert together[0] == apart[0]
    assert torch.equal(together[1], apart[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_finite_shows_in_its_own_norm_only(bad: float) -> None:
    rows = torch.ones(3, 50)
    rows[1, 17] = bad
    norms, _ = norms_and_sum(list(rows), [1.0] * 3)
    assert not math.isfinite(norms[1])
    assert norms[0] == norms[2] == pytest.approx(math.sqrt(50))
