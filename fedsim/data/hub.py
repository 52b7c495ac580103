# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face hub through flwr-datasets: the only source that uses the network, and only when asked for."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from fedsim.data.dataset import Array, Dataset, from_arrays
from fedsim.data.images import pixels
from fedsim.data.table import check_columns, class_codes, from_frame
from fedsim.errors import DataError
from fedsim.scenario import HubData

# A privacy tool does not report who uses it: not to Flower, not to the hub, and not to the counter of downloads, which
# is on another host. They are read when the client is imported.
_UNREPORTED = {"FLWR_TELEMETRY_ENABLED": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",  # two lines for each of five attempts to reach a hub that is not there
}


def load_hub(spec: HubData, seed: int) -> Dataset:
    """A column of images or of lists of numbers with classes, or a table."""
    parts = _download(spec)
    x = spec.x or _image_column(parts[0], spec)
    if x is None:
        return _table(parts, spec, seed)
    labels, names = _labels(parts, spec)
    inputs = _inputs(parts, x, spec)
    rows = len(parts[0])
    return from_arrays(
        spec.dataset, "image" if inputs.dim() == 4 else "table", inputs[:rows], labels[:rows], spec, seed,
        class_names=names, test=(inputs[rows:], labels[rows:]) if len(parts) == 2 else None,
    )  # fmt: skip


def _download(spec: HubData) -> list[Any]:
    """The split `train` and, where there is one with labels, `test` or else `validation`."""
    for variable, value in {**_UNREPORTED, **({} if sys.stderr.isatty() else _QUIET)}.items():
        os.environ.setdefault(variable, value)
    try:
        from flwr_datasets import FederatedDataset
    except ImportError:
        raise DataError('data.source hub needs flwr-datasets; install it by pip install "fedsim[hub]"') from None
    try:
        federated = FederatedDataset(dataset=spec.dataset, subset=spec.subset, partitioners={}, shuffle=False)
        train = federated.load_split("train")
    except Exception as error:  # the network, the hub and the data set's own reader: anything can come out of there
        raise DataError(f"data.dataset {spec.dataset} cannot be loaded from the hub ({_reason(error)})") from None
    named = {"x": (spec.x,) if spec.x else (), "target": (spec.target,), **_lists(spec)}
    check_columns(named, train.column_names, spec.dataset)
    for name in ("test", "validation"):
        try:
            split = federated.load_split(name)
        except ValueError:  # flwr-datasets has no other way to ask which splits there are
            continue
        if any(label not in (None, -1) for label in split[spec.target]):  # a contest withholds its answers as -1
            return [train, split]
    return [train]


def _lists(spec: HubData) -> dict[str, tuple[str, ...]]:
    return {"drop": spec.drop, "categorical": spec.categorical}


def _reason(error: Exception) -> str:
    """What went wrong in one line, and what can be done about it."""
    generated = type(error).__name__ == "DatasetGenerationError"  # says nothing itself
    words = str(error.__cause__ if generated else error)
    reason = " ".join(words.split())[:300].rstrip(".") or type(error).__name__
    if isinstance(error, ConnectionError):
        return f"{reason}, and it is not in the cache of an earlier download; check the connection"
    if isinstance(error, FileNotFoundError):
        return f"{reason}; check the name, or, if it is private or gated, log in by `hf auth login` or HF_TOKEN"
    if isinstance(error, ValueError) and "onfig" in reason:  # of several configurations none is named, or none of them
        return f"{reason}; name one in data.subset"
    return reason


def _image_column(train: Any, spec: HubData) -> str | None:
    """The only column of images; null for a table."""
    kinds = {name: getattr(feature, "dtype", None) for name, feature in train.features.items()}
    found = [name for name, kind in kinds.items() if kind == "PIL.Image.Image" and name not in spec.drop]
    if len(found) > 1:
        raise DataError(f"data.dataset {spec.dataset} has the image columns {', '.join(found)}; name one in data.x")
    return found[0] if found else None


# --- tables ---------------------------------------------------------------------------------------------------------


def _table(parts: list[Any], spec: HubData, seed: int) -> Dataset:
    frames = [_frame(split) for split in parts]
    try:
        return from_frame(
            spec.dataset, frames[0], spec.target, spec, seed, **_lists(spec),
            test=frames[1] if len(frames) == 2 else None,
        )  # fmt: skip
    except TypeError:  # cells that are lists or dictionaries cannot be compared
        raise DataError(
            f"data.dataset {spec.dataset} is no table of numbers and texts; name its input column in data.x, or leave"
            " out what is neither by data.drop"
        ) from None


def _frame(split: Any) -> pd.DataFrame:
    """The rows of a split: classes by name (their numbers are no quantities), decimals as floats, dates as text."""
    frame: pd.DataFrame = split.to_pandas()
    for column, feature in split.features.items():
        if names := getattr(feature, "names", None):
            frame[column] = frame[column].map(dict(enumerate(names)))
        elif str(getattr(feature, "dtype", "")).startswith("decimal"):
            frame[column] = frame[column].astype(np.float64)
        elif frame[column].dtype.kind in "mM":
            frame[column] = frame[column].astype("str")
    return frame


# --- images and lists of numbers ------------------------------------------------------------------------------------


def _labels(parts: list[Any], spec: HubData) -> tuple[Tensor, tuple[str, ...]]:
    """The class numbers of all parts, and the names of the classes: those of the hub, else the values themselves."""
    values = pd.Series([label for split in parts for label in split[spec.target]], name=spec.target)
    names = getattr(parts[0].features[spec.target], "names", None)
    missing = int((values.isna() | (values == -1 if names else False)).sum())
    if missing:
        raise DataError(f"data.target {spec.target} of {spec.dataset} has {missing:,} rows without a class")
    try:
        codes, distinct = (values.to_numpy(np.int64), tuple(names)) if names else class_codes(values, spec.dataset)
    except TypeError:  # lists cannot be compared
        raise DataError(f"data.target {spec.target} of {spec.dataset} must hold one class for each row") from None
    return torch.tensor(codes), distinct


def _inputs(parts: list[Any], x: str, spec: HubData) -> Tensor:
    """All parts: images as pixels, grey if all are grey; lists of numbers as features."""
    what = f"data.x {x} of {spec.dataset}"
    try:
        arrays = [_array(value, spec, what) for split in parts for value in split[x]]
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{what} has an input that cannot be read ({type(error).__name__})") from None
    if any(array.ndim == 3 for array in arrays):
        arrays = [np.stack([array] * 3, axis=-1) if array.ndim == 2 else array for array in arrays]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise DataError(f"{what} has inputs of {len(shapes)} different sizes; scale images to one by data.size")
    stacked = np.stack(arrays)
    if stacked.dtype.kind not in "iuf" or stacked.ndim not in (2, 3, 4):
        raise DataError(
            f"{what} holds neither images nor lists of numbers; name a column that does, or, for a table, no data.x"
        )
    return torch.from_numpy(stacked.astype(np.float32)) if stacked.ndim == 2 else pixels(stacked, what)


def _array(value: Any, spec: HubData, what: str) -> Array:
    """An image as (H, W) or (H, W, 3) bytes; anything else as it is."""
    if value is None:
        raise DataError(f"{what} has rows without an input; leave them out")
    if not isinstance(value, Image.Image):
        return np.asarray(value)
    if value.mode[0] in "IF":  # Pillow would cut them off at 255
        raise DataError(f"{what} has images of mode {value.mode}; only pixels of 8 bits have a range that is known")
    image = value.convert("L" if value.mode in ("1", "L", "LA") else "RGB")
    return np.asarray(image.resize((spec.size, spec.size), Image.Resampling.BILINEAR) if spec.size else image)
