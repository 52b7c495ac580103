# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.data import load_dataset
from fedsim.errors import DataError
from fedsim.scenario import ImageFolderData, NpzData

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the data of ../shared/data is not at hand")

X = np.arange(12 * 4 * 4, dtype=np.uint8).reshape(12, 4, 4)
Y = np.arange(12) % 3


def npz(tmp_path: Path, **arrays: object) -> NpzData:
    file = tmp_path / "data.npz"
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return NpzData(source="npz", path=str(file))


@pytest.mark.parametrize("shape", [(12, 4, 4), (12, 4, 4, 1), (12, 1, 4, 4)])
def test_pixels_in_any_layout(tmp_path: Path, shape: tuple[int, ...]) -> None:
    data = load_dataset(
        npz(tmp_path, x_train=X.reshape(shape), y_train=Y, x_test=X[:2].reshape(2, *shape[1:]), y_test=Y[:2]), 0
    )
    assert data.input_shape == (1, 4, 4)
    torch.testing.assert_close(data.x_train[:, 0], torch.from_numpy(X / np.float32(255)))
    assert data.kind == "image"
    assert data.classes == 3


def test_colour_channels_move_to_the_front(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (12, 5, 6, 3), dtype=np.uint8)
    data = load_dataset(npz(tmp_path, x_train=x, y_train=Y, x_test=x, y_test=Y), 0)
    assert data.input_shape == (3, 5, 6)
    assert data.x_train[7, 2, 3, 4] == x[7, 3, 4, 2] / np.float32(255)


def test_features_are_taken_as_they_are(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(5, 3, (12, 7))
    data = load_dataset(npz(tmp_path, x_train=x, y_train=Y, x_test=x, y_test=Y), 0)
    assert data.kind == "table"
    assert torch.equal(data.x_train, torch.from_numpy(x.astype(np.float32)))


def test_without_a_test_part_the_seed_splits_and_clients_go_with_their_rows(tmp_path: Path) -> None:
    client = np.array(["b", "a"] * 6)
    data = load_dataset(npz(tmp_path, x_train=X, y_train=Y, client_train=client), 0)
    assert len(data.x_train) == 10
    assert data.group_names == ("a", "b")
    assert data.groups is not None
    first = {float(X[row].ravel()[0] / np.float32(255)): str(client[row]) for row in range(12)}
    assert [data.group_names[g] for g in data.groups] == [first[float(v)] for v in data.x_train[:, 0, 0, 0]]


def test_names_of_classes_and_clients(tmp_path: Path) -> None:
    arrays = {"class_names": np.array(["x", "y", "z", "never"]), "client_names": np.array(["p", "q", "r"])}
    data = load_dataset(npz(tmp_path, x_train=X, y_train=Y, client_train=Y * 2 % 3, **arrays), 0)
    assert data.class_names == ("x", "y", "z", "never")
    assert data.group_names == ("p", "q", "r")


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    spec = npz(tmp_path, x_train=X, y_train=Y)
    before = load_dataset(spec, 0)
    assert load_dataset(spec, 0) is before
    npz(tmp_path, x_train=X[:9], y_train=Y[:9])
    assert len(load_dataset(spec, 0).x_train) == 7


NAN = np.where(np.eye(12, 5) > 0, np.nan, 1.0)
ONE_NAN = np.where(np.arange(60).reshape(12, 5) == 7, np.nan, 1.0)
BAD_NPZ: dict[str, tuple[dict[str, Any], str]] = {
    "no y": ({"x_train": X}, "no array y_train; it has x_train"),
    "lengths differ": ({"x_train": X, "y_train": Y[:5]}, "12 rows, but y_train has 5"),
    "NaN": ({"x_train": NAN, "y_train": Y}, "NaN or infinite"),
    "a single NaN": ({"x_train": ONE_NAN, "y_train": Y}, "has 1 value that is NaN"),
    "inf": ({"x_train": np.nan_to_num(NAN, nan=np.inf), "y_train": Y}, "NaN or infinite"),
    "NaN pixels": ({"x_train": np.full((12, 4, 4), np.nan), "y_train": Y}, "NaN or infinite"),
    "one class": ({"x_train": X, "y_train": Y * 0}, "1 class"),
    "one of two names": ({"x_train": X, "y_train": Y * 0, "class_names": np.array(["a", "b"])}, "1 class"),
    "float labels": ({"x_train": X, "y_train": Y + 0.5}, "class numbers"),
    "text labels": ({"x_train": X, "y_train": Y.astype(str)}, "class numbers"),
    "negative labels": ({"x_train": X, "y_train": Y - 1}, "with -1"),
    "gaps": ({"x_train": X, "y_train": Y * 1000}, "without gaps"),
    "two-dimensional labels": ({"x_train": X, "y_train": Y[:, None]}, "class numbers"),
    "object array": ({"x_train": np.array([{}] * 12), "y_train": Y}, "Python objects"),
    "channels": ({"x_train": np.zeros((12, 4, 4, 2), np.uint8), "y_train": Y}, "1 or 3 channels"),
    "float pixels": ({"x_train": X * 1.0, "y_train": Y}, "outside 0 to 1"),
    "int pixels": ({"x_train": X.astype(np.int32), "y_train": Y}, "uint8"),
    "one dimension": ({"x_train": Y, "y_train": Y}, "must be numbers of shape"),
    "a single number": ({"x_train": 3.0, "y_train": [0, 1]}, r"x_train must be numbers of shape .* of shape \(\)"),
    "a single test number": ({"x_train": X, "y_train": Y, "x_test": 3, "y_test": Y}, "x_test must be numbers of shape"),
    "a single name of clients": (
        {"x_train": X, "y_train": Y, "client_train": Y, "client_names": "a"},
        "client_names must be a list of names",
    ),
    "text": ({"x_train": X.astype(str), "y_train": Y}, "must be numbers of shape"),
    "empty": ({"x_train": X[:0], "y_train": Y[:0]}, "must be numbers of shape"),
    "two rows": ({"x_train": X[:2], "y_train": Y[:2]}, "at least 3"),
    "half a test part": ({"x_train": X, "y_train": Y, "x_test": X}, "only one of"),
    "other test shape": ({"x_train": X, "y_train": Y, "x_test": X[:, :3], "y_test": Y}, "different shapes"),
    "names too few": ({"x_train": X, "y_train": Y, "class_names": np.array(["a", "b"])}, "every class"),
    "clients too few": ({"x_train": X, "y_train": Y, "client_train": Y[:4]}, "for each of the 12 rows"),
}


@pytest.mark.parametrize("case", BAD_NPZ)
def test_bad_npz(tmp_path: Path, case: str) -> None:
    arrays, words = BAD_NPZ[case]
    with pytest.raises(DataError, match=words) as caught:
        load_dataset(npz(tmp_path, **arrays), 0)
    one_sentence(caught.value)
    assert re.match(r"data\b", str(caught.value)), "the field comes first, so that its line can be found"


def one_sentence(error: Exception) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b"not a zip", "no NumPy archive"),
        (b"PK\x03\x04 broken", "cannot be read"),
        (None, "is a folder"),
    ],
)
def test_unreadable_npz(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "data.npz"
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load_dataset(NpzData(source="npz", path=str(file)), 0)
    one_sentence(caught.value)


def test_npy_and_missing_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "x.npy").rename(tmp_path / "x.npz")
    with pytest.raises(DataError, match=r"x\.npz is a single array \(\.npy\), .* np\.savez\(file, x_train=") as caught:
        load_dataset(NpzData(source="npz", path=str(tmp_path / "x.npz")), 0)
    one_sentence(caught.value)
    with pytest.raises(DataError, match="does not exist"):
        load_dataset(NpzData(source="npz", path="nowhere.npz"), 0)


def test_truncated_npz(tmp_path: Path) -> None:
    spec = npz(tmp_path, x_train=X, y_train=Y)
    content = bytearray(Path(spec.path).read_bytes())
    content[80:120] = bytes(40)
    Path(spec.path).write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        load_dataset(spec, 0)


@needs_shared
def test_shared_npz() -> None:
    data = load_dataset(NpzData(source="npz", path=str(SHARED / "omniglot_by_drawer.npz")), 0)
    assert data.input_shape == (1, 28, 28)
    assert len(data.group_names) == 160
    binary = load_dataset(NpzData(source="npz", path=str(SHARED / "location30.npz"), limit=300), 0)
    assert binary.x_train.shape == (300, 446)
    assert set(binary.x_train.flatten().tolist()) == {0.0, 1.0}


# --- image folders --------------------------------------------------------------------------------------------------


def write_image(file: Path, colour: tuple[int, int, int], size: tuple[int, int] = (9, 7)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)


def folder(tmp_path: Path, parts: tuple[str, ...] = ("",)) -> ImageFolderData:
    for part in parts:
        for number in range(5):
            write_image(tmp_path / part / "blue" / f"{number}.png", (0, 0, 255))
            write_image(tmp_path / part / "red" / f"{number}.PNG", (255, 0, 0), size=(20, 30))
        (tmp_path / part / "red" / "notes.txt").write_text("no image")
    return ImageFolderData(source="images", path=str(tmp_path), size=8)


def test_image_folder(tmp_path: Path) -> None:
    data = load_dataset(folder(tmp_path), 0)
    assert data.class_names == ("blue", "red")
    assert data.input_shape == (3, 8, 8)
    for x, y in zip(data.x_train, data.y_train, strict=True):
        assert x[:, 4, 4].tolist() == ([1.0, 0.0, 0.0] if y == 1 else [0.0, 0.0, 1.0])
    assert len(data.x_test) == 2
    assert load_dataset(folder(tmp_path).model_copy(update={"grey": True}), 0).input_shape == (1, 8, 8)


def test_image_folder_with_its_own_test_part(tmp_path: Path) -> None:
    spec = folder(tmp_path, ("train", "test"))
    data = load_dataset(spec, 0)
    assert data.class_names == ("blue", "red")
    assert (len(data.x_train), len(data.x_test)) == (10, 10)
    write_image(tmp_path / "test" / "green" / "0.png", (0, 255, 0))
    with pytest.raises(DataError, match="class green in test but not in train"):
        load_dataset(spec, 0)


def test_bad_image_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_dataset(ImageFolderData(source="images", path=str(tmp_path / "no")), 0)
    with pytest.raises(DataError, match="no images in sub-folders"):
        load_dataset(ImageFolderData(source="images", path=str(tmp_path)), 0)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is a file"):
        load_dataset(ImageFolderData(source="images", path=str(tmp_path / "file")), 0)
    spec = folder(tmp_path / "pictures")
    broken = tmp_path / "pictures" / "red" / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n broken")
    os.utime(broken.parent, ns=(1, 1))
    with pytest.raises(DataError, match=r"^data\.path .*broken\.png cannot be read") as caught:
        load_dataset(spec, 0)
    one_sentence(caught.value)


def test_one_class_of_images(tmp_path: Path) -> None:
    for number in range(4):
        write_image(tmp_path / "only" / f"{number}.png", (0, 0, 255))
    with pytest.raises(DataError, match="1 class"):
        load_dataset(ImageFolderData(source="images", path=str(tmp_path)), 0)
