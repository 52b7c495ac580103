# SPDX-License-Identifier: Apache-2.0
"""Updates that wait until somebody asks for them are the ones that would have been written at once."""

from __future__ import annotations

import pytest
import torch

from fedsim.federation.arrays import Promised, tensor_of, to_flat, to_record, to_records
from fedsim.federation.sums import norms_and_sum
from fedsim.training import LocalWork, layout_of, products, train_cohort

WORK = LocalWork("fedavg", batch_size=7, epochs=2)
EQUAL, RAGGED = (14,) * 11, (14, 13, 20, 3, 1, 20, 16, 7, 20, 14, 14)
needs_openblas = pytest.mark.skipif(not products.BEYOND_MKL, reason="updates wait where OpenBLAS multiplies only")


@pytest.fixture(params=["wide", "cnn", "batchnorm"])
def trained(request, federation):
    """Trains the same cohort again and again."""

    def train(sizes, **options):
        cohort = federation(request.param, sizes=sizes)
        return train_cohort(*cohort.arguments(WORK), **options)

    return train


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("sizes", [EQUAL, RAGGED], ids=["equal", "ragged"])
def test_pieces_are_the_updates_to_the_last_bit(trained, sizes, chunk, monkeypatch):
    promised, partly = trained(sizes, chunk=chunk), trained(sizes, chunk=chunk)
    monkeypatch.setattr("fedsim.training.client._WAITING", 0)
    at_once = trained(sizes, chunk=chunk)
    assert not at_once._waiting
    for clients in (4, 1, 11, 20):
        pieces = [piece.clone() for piece in promised.updates_in_pieces(clients)]
        assert torch.equal(torch.cat(pieces), at_once.updates)
    next(partly.updates_in_pieces(4))
    assert torch.equal(partly.updates, at_once.updates)
    assert torch.equal(torch.cat(list(partly.updates_in_pieces(11))), at_once.updates)


@needs_openblas
def test_they_wait_and_are_written_once(trained):
    result = trained(EQUAL)
    assert result._waiting
    first = result.updates
    assert not result._waiting
    assert result.updates is first


@pytest.mark.parametrize("sizes", [EQUAL, RAGGED], ids=["equal", "ragged"])
def test_norms_and_sum_of_promises_have_the_bits_of_those_of_rows(trained, sizes):
    result, other = trained(sizes), trained(sizes)
    weights = [float(size) for size in sizes]
    promises = [Promised(result, place) for place in range(len(sizes))]
    norms, total = norms_and_sum(promises, weights)
    expected_norms, expected = norms_and_sum(list(other.updates), weights)
    assert norms == expected_norms
    assert torch.equal(total, expected)
    some = [3, 0, 7]  # as where clients failed, or came in another order
    norms, total = norms_and_sum([promises[k] for k in some], [weights[k] for k in some])
    expected_norms, expected = norms_and_sum([other.updates[k] for k in some], [weights[k] for k in some])
    assert norms == expected_norms
    assert torch.equal(total, expected)


def test_promises_of_two_cohorts_and_rows_may_come_together(trained):
    one, other = trained(EQUAL), trained(EQUAL)
    rows = [Promised(one, 0), Promised(other, 1), other.updates[2].clone()]
    norms, total = norms_and_sum(rows, [1.0, 2.0, 3.0])
    expected_norms, expected = norms_and_sum([tensor_of(row) for row in rows], [1.0, 2.0, 3.0])
    assert norms == expected_norms
    assert torch.equal(total, expected)


def test_a_record_of_a_promise_has_the_numbers_and_bytes_of_the_update(federation):
    cohort = federation("wide", sizes=EQUAL)
    layout, results = layout_of(cohort.model), [train_cohort(*cohort.arguments(WORK)) for _ in range(2)]
    (record,) = to_records([Promised(results[0], 5)], layout)
    written = to_record(results[1].updates[5], layout)
    assert {name: array.data for name, array in record.items()} == {name: a.data for name, a in written.items()}
    assert torch.equal(to_flat(record, layout), results[1].updates[5])
