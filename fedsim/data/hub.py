# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face hub through flwr-datasets: the only source that uses the network, and only when asked for."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.data.dataset import Array, Dataset, from_arrays
from fedsim.data.images import pixels
from fedsim.errors import DataError
from fedsim.scenario import HubData


def load_hub(spec: HubData, seed: int) -> Dataset:
    """An image column with class labels, or a table; the splits `train` and, where there is one, `test`."""
    splits = _download(spec)
    train, test = splits["train"], splits.get("test")
    columns = list(train.column_names)
    if spec.target not in columns:
        raise DataError(f"data.target names the column {spec.target}, but {spec.dataset} has {', '.join(columns)}")
    if spec.x not in columns:
        return _table(spec, seed, train, test)
    names = getattr(train.features[spec.target], "names", None)
    labels = [_labels(split, spec) for split in (train, test) if split is not None]
    count = max(int(part.max()) for part in labels) + 1
    inputs = [_inputs(split, spec) for split in (train, test) if split is not None]
    return from_arrays(
        spec.dataset, "image" if inputs[0].dim() == 4 else "table", inputs[0], labels[0], spec, seed,
        class_names=tuple(names) if names else tuple(map(str, range(count))),
        test=(inputs[1], labels[1]) if test is not None else None,
    )  # fmt: skip


def _download(spec: HubData) -> dict[str, Any]:
    """The splits by name. Flower's telemetry is switched off: a privacy tool does not report who uses it."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    try:
        from flwr_datasets import FederatedDataset
    except ImportError:
        raise DataError('data.source hub needs flwr-datasets; install it by pip install "fedsim[hub]"') from None
    splits: dict[str, Any] = {}
    try:
        federated = FederatedDataset(dataset=spec.dataset, subset=spec.subset, partitioners={}, shuffle=False)
        splits["train"] = federated.load_split("train")
    except Exception as error:  # the network, the hub and the data set's own reader: anything can come out of there
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(f"data.dataset {spec.dataset} cannot be loaded from the hub ({reason})") from None
    for name in ("test", "validation"):
        try:
            splits.setdefault("test", federated.load_split(name))
        except ValueError:  # flwr-datasets has no other way to ask which splits there are
            continue
    return splits


def _table(spec: HubData, seed: int, train: Any, test: Any) -> Dataset:
    from fedsim.data.table import from_frame

    held_out = None if test is None else test.to_pandas()
    try:
        return from_frame(spec.dataset, train.to_pandas(), spec.target, spec, seed, test=held_out)
    except TypeError:  # cells that are lists or dictionaries cannot be compared
        raise DataError(
            f"data.dataset {spec.dataset} is no table of numbers and texts; name its input column in data.x"
        ) from None


def _labels(split: Any, spec: HubData) -> Tensor:
    labels: Array = np.asarray(list(split[spec.target]))
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or (labels.size and labels.min() < 0):
        raise DataError(f"data.target {spec.target} of {spec.dataset} must hold class numbers from 0, one for each row")
    return torch.from_numpy(labels.astype(np.int64))


def _inputs(split: Any, spec: HubData) -> Tensor:
    """Images (PIL) as pixels, lists of numbers as features."""
    values = list(split[spec.x])
    if hasattr(values[0], "convert"):
        mode = "L" if all(image.mode in ("1", "L") for image in values) else "RGB"
        values = [np.asarray(image.convert(mode)) for image in values]
    shapes = {np.shape(value) for value in values}
    if len(shapes) > 1:
        raise DataError(f"data.x {spec.x} of {spec.dataset} has inputs of {len(shapes)} different sizes; one is needed")
    array = np.stack([np.asarray(value) for value in values])
    if array.dtype.kind not in "iuf" or array.ndim not in (2, 3, 4):
        raise DataError(
            f"data.x {spec.x} of {spec.dataset} holds neither images nor lists of numbers; name a column that does, or,"
            " for a table, a data.x that is no column"
        )
    if array.ndim == 2:
        return torch.from_numpy(array.astype(np.float32))
    return pixels(array, f"data.x {spec.x}")
