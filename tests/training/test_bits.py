# SPDX-License-Identifier: Apache-2.0
"""A client's result is the same, to the last bit, whoever else is in the cohort."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fedsim.training import ExampleClipping, LocalWork, products, train_cohort

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
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads are used for work of any size, and are as many afterwards as before."""
    monkeypatch.setattr("fedsim.training.local._WORTH_A_THREAD", 0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
@pytest.mark.parametrize("name", ["mlp", "wide", "by mkl", "cnn", "conv1d", "groupnorm", "batchnorm", "transformer"])
def test_company_order_chunks_and_threads_change_nothing(federation, name, work, monkeypatch):
    if name == "by mkl":
        monkeypatch.setattr(products, "BEYOND_MKL", False)
        name = "wide"
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


@pytest.mark.parametrize("beyond_mkl", sorted({False, products.BEYOND_MKL}))
@pytest.mark.parametrize("name", ["mlp", "wide", "positions", "cnn", "conv1d"])
def test_packed_batches_change_nothing_either(federation, name, beyond_mkl, monkeypatch):
    """Poisson batches of large models are packed without padding: here those of small ones too, some batches empty."""
    monkeypatch.setattr(products, "BEYOND_MKL", beyond_mkl)
    monkeypatch.setattr("fedsim.training.local._PACKED", 0)
    work = LocalWork("fedavg", batch_size=3, epochs=2, example_dp=ExampleClipping(0.5, 0.5, "poisson"))
    packed = federation(name, sizes=SIZES)
    together = train_cohort(*packed.arguments(work))
    for clients in ([0], [4], [49, 3, 17, 0, 4, 12, 11], list(range(49, -1, -1))):
        for chunk in (None, 3):
            result = train_cohort(*packed.arguments(work, clients), chunk=chunk)
            assert torch.equal(result.updates, together.updates[clients])
            assert torch.equal(result.loss, together.loss[clients])
    monkeypatch.setattr("fedsim.training.local._PACKED", 1 << 40)
    padded = train_cohort(*federation(name, sizes=SIZES).arguments(work))
    torch.testing.assert_close(together.updates, padded.updates, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(together.loss, padded.loss)


@pytest.mark.parametrize("work", [WORKS["sgd"], WORKS["momentum"], WORKS["fedsgd"], WORKS["private"]])
@pytest.mark.parametrize("name", ["mlp", "wide", "cnn", "conv1d"])
def test_mkl_and_openblas_give_the_same(federation, name, work, monkeypatch):
    """Which of the two is used is a question of the processor: bits may differ between processors, numbers not.

    (Adam makes whole steps of the roundings of a gradient near 0.)
    """
    found = []
    for beyond_mkl in sorted({False, products.BEYOND_MKL}):
        monkeypatch.setattr(products, "BEYOND_MKL", beyond_mkl)
        found.append(train_cohort(*federation(name, sizes=SIZES[:6]).arguments(work)))
    torch.testing.assert_close(found[0].updates, found[-1].updates, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found[0].loss, found[-1].loss)


@pytest.mark.parametrize("epochs", [1, 2, 3, 9])
def test_steps_kept_as_factors_are_plain_training(federation, epochs):
    """A large layer's first steps are kept as factors, and then become weights of its own."""
    work = LocalWork("fedavg", batch_size=9, epochs=epochs, learning_rate=0.1)
    cohort = federation("wide", sizes=(20, 13, 40, 9))
    result = train_cohort(*cohort.arguments(work))
    for k in range(4):
        update, loss = cohort.plain(k, work)
        torch.testing.assert_close(result.updates[k], update, rtol=1e-3, atol=1e-5)
        assert result.loss[k].item() == pytest.approx(loss, rel=1e-4)
        alone = train_cohort(*cohort.arguments(work, [k]))
        assert torch.equal(alone.updates[0], result.updates[k])
