# SPDX-License-Identifier: Apache-2.0
"""The products of replicas: right, nothing else touched, and each replica's with the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsim.training import products

SIZES = st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 127, 128, 200, 256, 400, 784, 1000]))
LIBRARIES = pytest.mark.parametrize("beyond_mkl", sorted({False, products.BEYOND_MKL}))


def _random(turned: bool, *shape: int) -> Tensor:
    count, rows, columns = shape
    return torch.randn(count, columns, rows).transpose(1, 2) if turned else torch.randn(*shape)


@LIBRARIES
def test_a_product_is_right_and_does_not_depend_on_its_company(beyond_mkl: bool, monkeypatch: pytest.MonkeyPatch):
    """For every way in which the matrices can lie in memory, into a part of a larger tensor that may hold anything."""
    monkeypatch.setattr(products, "BEYOND_MKL", beyond_mkl)

    @given(st.integers(1, 5), SIZES, SIZES, SIZES, st.tuples(*[st.booleans()] * 4), st.sampled_from([1.0, -0.3]))
    @settings(max_examples=200, deadline=None)
    def check(count: int, m: int, n: int, k: int, choices: tuple[bool, ...], scale: float) -> None:
        turned_a, turned_b, shared, add = choices
        torch.manual_seed(count * m * n * k)
        a, b = _random(turned_a, count, m, k), _random(turned_b, count, k, n)
        b = b[:1].expand(count, -1, -1) if shared else b
        before = 7.0 if add else torch.nan
        whole = torch.full((count, m + 2, n + 3), before)
        into = whole[:, 1:-1, 1 : n + 1]
        truth = scale * (a.double() @ b.double()) + (7.0 if add else 0.0)
        products.multiply(a, b, into, scale, add=add)
        torch.testing.assert_close(into.double(), truth, rtol=1e-4, atol=3e-6 * k)
        for own in range(count):
            alone = torch.full((1, m + 2, n + 3), before)[:, 1:-1, 1 : n + 1]
            products.multiply(a[own : own + 1].clone(), b[own : own + 1], alone, scale, add=add)
            assert torch.equal(alone[0], into[own])
        into.fill_(before)
        torch.testing.assert_close(whole, torch.full(whole.shape, before), rtol=0, atol=0, equal_nan=True)

    check()


@LIBRARIES
def test_products_of_replicas_with_rows_of_their_own(beyond_mkl: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "BEYOND_MKL", beyond_mkl)
    torch.manual_seed(0)
    sizes = [20, 0, 1, 33, 7]
    x, d, weights = torch.randn(61, 784), torch.randn(61, 128), torch.randn(5, 128, 784)
    y, gradient, total = torch.full((61, 128), torch.nan), torch.full((61, 784), torch.nan), torch.ones(5, 128, 784)
    products.multiply_rows(x, weights.transpose(1, 2), y, sizes)
    products.multiply_rows(d, weights, gradient, sizes)
    products.add_products(d, x, total, -0.5, sizes)
    first = 0
    for own, size in enumerate(sizes):
        rows = slice(first, first := first + size)
        close = {"rtol": 1e-4, "atol": 1e-3}
        torch.testing.assert_close(y[rows].double(), x[rows].double() @ weights[own].double().t(), **close)
        torch.testing.assert_close(gradient[rows].double(), d[rows].double() @ weights[own].double(), **close)
        torch.testing.assert_close(total[own].double(), 1 - 0.5 * d[rows].double().t() @ x[rows].double(), **close)
        alone = torch.empty(size, 128)
        products.multiply_rows(x[rows], weights[own : own + 1].transpose(1, 2), alone, [size])
        assert torch.equal(alone, y[rows])


@LIBRARIES
def test_matrices_that_lie_otherwise_are_copied_first(beyond_mkl: bool, monkeypatch: pytest.MonkeyPatch):
    """Every second column; one row that is repeated; one column; nothing at all."""
    monkeypatch.setattr(products, "BEYOND_MKL", beyond_mkl)
    torch.manual_seed(0)
    wide, b = torch.randn(2, 3, 10), torch.randn(2, 5, 4)
    for a in (wide[:, :, ::2], torch.randn(2, 1, 5).expand(2, 3, 5), torch.randn(5, 2, 3).permute(1, 2, 0)):
        torch.testing.assert_close(products.product(a, b), a @ b)
    column = torch.randn(2, 7, 1)
    torch.testing.assert_close(products.product(column, column.transpose(1, 2)), column @ column.transpose(1, 2))
    torch.testing.assert_close(products.product(column.transpose(1, 2), column), column.transpose(1, 2) @ column)
    assert products.product(torch.empty(2, 0, 5), b).shape == (2, 0, 4)
    assert products.product(torch.empty(2, 3, 0), torch.empty(2, 0, 4)).equal(torch.zeros(2, 3, 4))


@pytest.mark.skipif(not products.BEYOND_MKL, reason="MKL, by PyTorch, does its own checks")
def test_what_does_not_fit_is_refused_before_memory_is_touched():
    a, b, into = torch.zeros(2, 3, 4), torch.zeros(2, 4, 5), torch.zeros(2, 3, 5)
    for wrong in (torch.zeros(2, 5, 5), torch.zeros(1, 4, 5), torch.zeros(2, 4, 6)):
        with pytest.raises(ValueError, match="are multiplied"):
            products.multiply(a, wrong, into)
    with pytest.raises(TypeError, match="float32"):
        products.multiply(a.double(), b, into)
    with pytest.raises(ValueError, match="not contiguous"):
        products.multiply(a, b, torch.zeros(2, 5, 3).transpose(1, 2))
    with pytest.raises(ValueError, match="are multiplied"):
        products.multiply_rows(a[0], b, into[0], [2, 2])
    with pytest.raises(ValueError, match="are multiplied"):
        products.add_products(a[0], b[0], torch.zeros(2, 4, 5), 1.0, [1, 2])
