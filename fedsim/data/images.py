# SPDX-License-Identifier: Apache-2.0
"""Pixels: arrays and folders of image files as float32 (N, C, H, W) in [0, 1]."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedsim.data.dataset import Array, Dataset, from_arrays, there
from fedsim.errors import DataError
from fedsim.scenario import ImageFolderData


def pixels(array: Array, what: str) -> Tensor:
    """(N, H, W), (N, H, W, C) or (N, C, H, W), uint8 or floats in [0, 1], as float32 (N, C, H, W) in [0, 1].

    With four dimensions the channels (1 or 3) are looked for in the last place first.
    """
    if array.ndim == 3:
        array = array[:, None]
    elif array.shape[-1] in (1, 3):
        array = np.moveaxis(array, -1, 1)
    elif array.shape[1] not in (1, 3):
        raise DataError(f"{what} has shape {array.shape}, where images need 1 or 3 channels last or second")
    if array.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32) / np.float32(255))
    if array.dtype.kind != "f":
        raise DataError(f"{what} holds pixels of type {array.dtype}; store them as uint8 (0 to 255) or float (0 to 1)")
    x = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    # A NaN is neither inside nor outside: it is reported as such when the data set is checked.
    if bool((x < 0).any()) or bool((x > 1).any()):
        low, high = (float(extreme) for extreme in torch.aminmax(x[~x.isnan()]))
        raise DataError(
            f"{what} holds float pixels outside 0 to 1 (from {low:g} to {high:g}); divide them, or store them as uint8"
        )
    return x


def load_folder(spec: ImageFolderData, seed: int) -> Dataset:
    """One sub-folder of images for each class, or `train` and `test` that each have such sub-folders."""
    root = Path(spec.path).expanduser()
    if not there(root) or not root.is_dir():
        remedy = "is a file, but a folder is needed" if there(root) else "does not exist"
        raise DataError(f"data.path {spec.path} {remedy}: one sub-folder of images for each class")
    names = _folders(root)
    if names == ["test", "train"] and _folders(root / "train"):
        names = _folders(root / "train")
        x, y = _read_classes(root / "train", names, spec)
        extra = sorted(set(_folders(root / "test")) - set(names))
        if extra:
            raise DataError(f"data.path {spec.path} has class {extra[0]} in test but not in train")
        test = _read_classes(root / "test", names, spec)
    else:
        (x, y), test = _read_classes(root, names, spec), None
    return from_arrays(root.name, "image", x, y, spec, seed, class_names=tuple(names), test=test)


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _read_classes(root: Path, names: list[str], spec: ImageFolderData) -> tuple[Tensor, Tensor]:
    """The images of every class in the order of their names; files that are no images by their suffix are left out."""
    suffixes = Image.registered_extensions()
    files = [
        (file, label)
        for label, name in enumerate(names)
        if (root / name).is_dir()
        for file in sorted((root / name).iterdir())
        if file.suffix.lower() in suffixes and not file.name.startswith(".")
    ]
    if not files:
        raise DataError(f"data.path {root} has no images in sub-folders; it needs one sub-folder for each class")
    x = pixels(np.stack([_read_image(file, spec) for file, _ in files]), f"data.path {spec.path}")
    return x, torch.tensor([label for _, label in files])


def _read_image(file: Path, spec: ImageFolderData) -> Array:
    try:
        with Image.open(file) as image:
            scaled = image.convert("L" if spec.grey else "RGB").resize(
                (spec.size, spec.size), Image.Resampling.BILINEAR
            )
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"data.path {spec.path}: image {file} cannot be read ({str(error) or type(error).__name__});"
            " mend or remove it"
        ) from None
    return np.asarray(scaled)
