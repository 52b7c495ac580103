# SPDX-License-Identifier: Apache-2.0
"""A client's result is the same, to the last bit, whoever else is in the cohort."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fedsim.training import ExampleClipping, LocalWork, train_cohort

WORKS = {
    "sgd": LocalWork("fedavg", batch_size=7, epochs=2),
    "adam": LocalWork("fedavg", optimizer="adam", weight_decay=0.01, batch_size=5),
    "momentum": LocalWork("fedavg", momentum=0.9, batch_size=None, epochs=2),
    "fedsgd": LocalWork("fedsgd", batch_size=9),
    "private": LocalWork("fedavg", batch_size=6, example_dp=ExampleClipping(0.5, 0.5, "poisson")),
    "private-adam": LocalWork(
        "fedavg", optimizer="adam", batch_size=7, example_dp=ExampleClipping(0.5, 0.5, "shuffle")
    ),
}
SIZES = (20, 13, 20, 3, 1, 20, 16, 7, 20, 20) * 5


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
@pytest.mark.parametrize("name", ["mlp", "wide", "cnn", "conv1d", "groupnorm", "batchnorm", "transformer"])
def test_company_order_chunks_and_threads_change_nothing(federation, name, work):
    if name == "batchnorm" and work.example_dp is not None:
        pytest.skip("refused")
    cohort = federation(name, sizes=SIZES)
    torch.set_num_threads(1)
    all_of_them = train_cohort(*cohort.arguments(work))
    assert all_of_them.updates.isfinite().all()
    some = [49, 3, 17, 0, 4, 12, 11]

    def same(clients: list[int], **options: int) -> None:
        result = train_cohort(*cohort.arguments(work, clients), **options)
        for place, k in enumerate(clients):
            assert torch.equal(result.updates[place], all_of_them.updates[k]), (k, options)
            assert result.loss[place] == all_of_them.loss[k]

    for threads in (1, 2):
        torch.set_num_threads(threads)
        for k in (0, 1, 4):
            same([k])
        same(some)
        same(list(range(49, -1, -1)), chunk=50)
        for chunk in (1, 3):
            same(some, chunk=chunk)


def test_repeated_runs_are_equal(federation):
    cohort = federation("cnn")
    work = WORKS["private"]
    assert torch.equal(train_cohort(*cohort.arguments(work)).updates, train_cohort(*cohort.arguments(work)).updates)
