# SPDX-License-Identifier: Apache-2.0
"""The hub source against a stand-in with the public API of flwr-datasets 0.6.1, where the extra is not installed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedsim.data import load_dataset
from fedsim.data.sources import _load
from fedsim.errors import DataError
from fedsim.scenario import HubData


class Split:
    """What fedsim uses of datasets.Dataset."""

    def __init__(self, columns: dict[str, list[Any]], names: list[str] | None = None) -> None:
        self.columns = columns
        self.column_names = list(columns)
        pictures = {name for name, values in columns.items() if isinstance(values[0], Image.Image)}
        self.features = {name: SimpleNamespace(dtype="PIL.Image.Image" if name in pictures else "") for name in columns}
        if names:
            self.features["label"] = SimpleNamespace(names=names)

    def __len__(self) -> int:
        return len(self.columns[self.column_names[0]])

    def __getitem__(self, column: str) -> Any:
        return iter(self.columns[column])  # a Column of datasets 4 is lazy, and no list either

    def to_pandas(self) -> pd.DataFrame:
        return pd.DataFrame(self.columns)


def install(monkeypatch: pytest.MonkeyPatch, splits: dict[str, Split]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    class FederatedDataset:
        def __init__(
            self, *, dataset: str, subset: str | None = None, partitioners: dict[str, Any], shuffle: bool = True
        ) -> None:
            calls.append({"dataset": dataset, "subset": subset, "shuffle": shuffle})

        def load_split(self, split: str) -> Split:
            if split not in splits:
                raise ValueError(
                    f"The given split: '{split}' is not present in the dataset's splits: '{list(splits)}'."
                )
            return splits[split]

    module = ModuleType("flwr_datasets")
    module.FederatedDataset = FederatedDataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flwr_datasets", module)
    _load.cache_clear()
    return calls


def images(count: int, mode: str = "L", size: int = 6) -> Split:
    rng = np.random.default_rng(0)
    shape = (size, size) if mode == "L" else (size, size, 3)
    pictures = [Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(count)]
    return Split({"image": pictures, "label": [i % 2 for i in range(count)]}, ["cat", "dog"])


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_images(monkeypatch: pytest.MonkeyPatch, mode: str, channels: int) -> None:
    train, test = images(10, mode), images(4, mode)
    calls = install(monkeypatch, {"train": train, "test": test})
    data = load_dataset(HubData(source="hub", dataset="who/what", subset="v2"), 0)
    assert calls == [{"dataset": "who/what", "subset": "v2", "shuffle": False}]
    assert data.x_train.shape == (10, channels, 6, 6)
    assert data.class_names == ("cat", "dog")
    assert len(data.x_test) == 4
    first = np.asarray(train.columns["image"][0]).reshape(6, 6, channels).transpose(2, 0, 1)
    torch.testing.assert_close(data.x_train[0], torch.from_numpy(first / np.float32(255)))


def test_without_test_split_the_seed_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"train": images(10)})
    assert len(load_dataset(HubData(source="hub", dataset="who/d"), 0).x_test) == 2
    install(monkeypatch, {"train": images(10), "validation": images(5)})
    assert len(load_dataset(HubData(source="hub", dataset="who/d"), 0).x_test) == 5


def test_table_and_features(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: dict[str, list[Any]] = {"age": list(range(20)), "city": ["a", "b"] * 10, "label": ["no", "yes"] * 10}
    install(monkeypatch, {"train": Split(rows)})
    data = load_dataset(HubData(source="hub", dataset="who/table"), 0)
    assert data.kind == "table"
    assert data.x_train.shape == (16, 3)
    assert data.class_names == ("no", "yes")
    features: dict[str, list[Any]] = {"vector": [[float(i), 1.0] for i in range(20)], "label": [0, 1] * 10}
    install(monkeypatch, {"train": Split(features)})
    assert load_dataset(HubData(source="hub", dataset="who/v", x="vector"), 0).x_train.shape == (16, 2)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = HubData(source="hub", dataset="who/d")
    mixed = [*images(3).columns["image"], *images(2, size=5).columns["image"]]
    named, few = spec.model_copy(update={"x": "image"}), images(3).columns["image"]
    cases: list[tuple[dict[str, list[Any]], HubData, str]] = [
        (images(4).columns, spec.model_copy(update={"target": "species"}), "species, but who/d has image, label"),
        ({"image": mixed, "label": [0, 1, 0, 1, 0]}, spec, "2 different sizes"),
        ({"image": ["a", "b", "c"], "label": [0, 1, 0]}, named, "neither images nor lists"),
        ({"image": few, "label": [[0], [1], [0]]}, spec, "one class for each row"),
        ({"image": few, "label": [0, None, 1]}, spec, "1 rows without a class"),
        ({"image": few, "mask": few, "label": [0, 1, 0]}, spec, "image, mask; name one in data.x"),
        ({"image": [*few[:2], None], "label": [0, 1, 0]}, spec, "rows without an input"),
        ({"cell": [[1], [2], [3]], "label": ["a", "b", "a"]}, spec, "no table"),
    ]
    install(monkeypatch, {"test": images(4)})
    with pytest.raises(DataError, match="cannot be loaded from the hub"):
        load_dataset(spec, 0)
    for columns, asked, words in cases:
        install(monkeypatch, {"train": Split(columns)})
        with pytest.raises(DataError, match=words) as caught:
            load_dataset(asked, 0)
        assert "\n" not in str(caught.value)


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    _load.cache_clear()
    with pytest.raises(DataError, match=r'pip install "fedsim\[hub\]"'):
        load_dataset(HubData(source="hub", dataset="who/d"), 0)
