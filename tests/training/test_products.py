# SPDX-License-Identifier: Apache-2.0
"""Products by oneDNN: right, and each row with the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.training import products

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise") or torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="this PyTorch was built without oneDNN, or this processor is without AVX2",
)
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 127, 128, 200, 256, 400, 784, 1000, 1024]))


@given(st.integers(2, 300), SIZES, SIZES, st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_row_does_not_depend_on_its_company(rows: int, inputs: int, outputs: int, turned: bool, data: st.DataObject):
    """As chunks of a cohort are of any size, a client's rows may be the first or the last, of few or of many."""
    generator = torch.Generator().manual_seed(inputs * outputs)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    weight = weight.t().contiguous().t() if turned else weight
    everybody = products.times_transposed(x, weight)
    torch.testing.assert_close(everybody, x @ weight.t(), rtol=1e-4, atol=1e-3)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    assert torch.equal(products.times_transposed(x[first:last], weight), everybody[first:last])


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 8, 20, 40])
def test_products_of_replicas(rows: int, onednn: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "ONEDNN", onednn)
    x, weight, d = torch.randn(3, rows, 200), torch.randn(90, 200), torch.randn(rows, 90)
    truth = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(products.times_shared(x, weight, torch.empty(3, rows, 90)), truth, rtol=1e-4, atol=1e-4)
    own, total = torch.empty(rows, 90), torch.empty(90, 200)
    products.times_own(x[0], weight, own)
    torch.testing.assert_close(own, truth[0], rtol=1e-4, atol=1e-4)
    products.write_sum_of_products(d, x[0], total)
    torch.testing.assert_close(total, (d.double().t() @ x[0].double()).float(), rtol=1e-4, atol=1e-4)
