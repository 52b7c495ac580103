# SPDX-License-Identifier: Apache-2.0
"""A header of an .npz announces whatever it likes; nothing is allocated on its word."""

from __future__ import annotations

import io
import resource
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.data import load_dataset
from fedsim.errors import DataError
from fedsim.scenario import NpzData

X = np.arange(12 * 4 * 4, dtype=np.uint8).reshape(12, 4, 4)
Y = np.arange(12) % 3


def npy(array: np.ndarray, shape: str | None = None, descr: str | None = None) -> bytes:
    """An .npy file; its header may claim another shape or type."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    content = buffer.getvalue()
    length = int.from_bytes(content[8:10], "little")
    header = content[10 : 10 + length].decode()
    changed = header.replace(str(array.shape), shape) if shape else header
    changed = (changed.replace(array.dtype.str, descr) if descr else changed).rstrip()
    padded = changed + " " * (length - len(changed) - 1) + "\n"
    return content[:8] + len(padded).to_bytes(2, "little") + padded.encode() + content[10 + length :]


def archive(folder: Path, members: dict[str, bytes]) -> NpzData:
    file = folder / "data.npz"
    with zipfile.ZipFile(file, "w") as opened:
        for name, content in members.items():
            opened.writestr(name, content)
    return NpzData(source="npz", path=str(file))


@pytest.fixture
def _little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize(
    "shape", ["(1099511627776,)", "(12, 4, 1099511627776)", "(12, 4, 5)", "(0, 4, 4)", "(12, -4, -4)"]
)
def test_a_header_that_announces_what_is_not_there(tmp_path: Path, shape: str) -> None:
    spec = archive(tmp_path, {"x_train.npy": npy(X, shape), "y_train.npy": npy(Y)})
    with pytest.raises(DataError, match=r"data\.path .*data\.npz"):
        load_dataset(spec, 0)


@pytest.mark.usefixtures("_little_memory")
def test_zeros_that_are_more_than_the_memory(tmp_path: Path) -> None:
    spec = NpzData(source="npz", path=str(tmp_path / "data.npz"))
    with zipfile.ZipFile(spec.path, "w", zipfile.ZIP_DEFLATED) as opened:
        with opened.open("x_train.npy", "w") as member:
            member.write(npy(np.zeros((12, 4), np.uint8), "(400000, 1000)"))
            for _ in range(400):
                member.write(bytes(1_000_000))
        opened.writestr("y_train.npy", npy(Y))
    with pytest.raises(DataError, match=r"holds 400 MB of numbers, .* this machine has .*; use fewer rows"):
        load_dataset(spec, 0)


@pytest.mark.parametrize("members", [
    {"x_train": X.tobytes(), "y_train": Y.tobytes()},
    {"x_train.npy": b"", "y_train.npy": npy(Y)},
    {"x_train.npy": X.tobytes(), "y_train.npy": npy(Y)},
    {"x_train.npy": npy(X, descr="|O8"), "y_train.npy": npy(Y)},
    {"x_train.npy": b"\x93NUMPY\x09\x09", "y_train.npy": npy(Y)},
    {"x_train.npy": npy(X)[:20], "y_train.npy": npy(Y)},
    {"x_train.npy": npy(X), "y_train.npy": npy(Y.astype(np.float64))},
])  # fmt: skip
def test_members_that_are_no_arrays(tmp_path: Path, members: dict[str, bytes]) -> None:
    with pytest.raises(DataError, match=r"data\.path .*data\.npz"):
        load_dataset(archive(tmp_path, members), 0)


@pytest.mark.parametrize("label", [2**64 - 1, 2**63, 2**40, 2**24])
def test_a_label_that_is_no_class(tmp_path: Path, label: int) -> None:
    labels = Y.astype(np.uint64)
    labels[3] = label
    members = {"x_train.npy": npy(X), "y_train.npy": npy(labels), "class_names.npy": npy(np.array(["a", "b", "c"]))}
    with pytest.raises(DataError, match=rf"y_train has class {label}, and there are at most"):
        load_dataset(archive(tmp_path, members), 0)


def test_a_test_class_that_nobody_can_learn(tmp_path: Path) -> None:
    members = {"x_train.npy": npy(X), "y_train.npy": npy(Y), "x_test.npy": npy(X), "y_test.npy": npy(Y + 1)}
    with pytest.raises(DataError, match="y_test has class 3, which no row of y_train has"):
        load_dataset(archive(tmp_path, members), 0)
    named = {**members, "class_names.npy": npy(np.array(["a", "b", "c", "d"]))}
    assert load_dataset(archive(tmp_path, named), 0).classes == 4


@given(
    places=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8),
    cut=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_bytes_of_an_archive_may_be_anything(
    places: list[tuple[int, int]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("npz")
    spec = archive(folder, {"x_train.npy": npy(X), "y_train.npy": npy(Y)})
    content = bytearray(Path(spec.path).read_bytes())
    for place, value in places:
        content[place % len(content)] = value
    Path(spec.path).write_bytes(content[: len(content) - cut * 40])
    try:
        data = load_dataset(spec, 0)
    except DataError:
        return
    assert 0 <= int(data.y_train.min()) <= int(data.y_train.max()) < data.classes
