# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord

from fedsim.federation.arrays import TensorArray, stack, to_flat, to_record
from fedsim.training import layout_of

MODEL = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
LAYOUT = layout_of(MODEL)


def test_a_record_is_a_view_and_comes_back_without_a_copy() -> None:
    flat = torch.arange(LAYOUT.size, dtype=torch.float32)
    record = to_record(flat, LAYOUT)
    assert tuple(record) == LAYOUT.names
    assert all(isinstance(array, Array) for array in record.values())
    assert np.array_equal(record["0.weight"].numpy(), flat[:15].reshape(3, 5).numpy())
    assert to_flat(record, LAYOUT) is flat


def test_the_bytes_are_those_that_flower_writes() -> None:
    tensor = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    ours, flowers = TensorArray(tensor.flatten(), 0, (3, 4)), Array(tensor.numpy())
    assert (ours.dtype, ours.shape, ours.stype, ours.data) == (
        flowers.dtype,
        flowers.shape,
        flowers.stype,
        flowers.data,
    )
    assert isinstance(ours, Array)
    assert ours.object_id == flowers.object_id


def test_a_record_that_crossed_a_network_gives_the_same_vector() -> None:
    flat = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(1))
    travelled = ArrayRecord(
        {k: Array(v.dtype, v.shape, v.stype, v.data) for k, v in to_record(flat, LAYOUT).items()}  # type: ignore[call-overload]
    )
    assert torch.equal(to_flat(travelled, LAYOUT), flat)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("0.weight"), "missing"),
        (lambda arrays: arrays.update({"0.weight": np.zeros((4, 5), np.float32)}), r"0\.weight is float32\[4, 5\]"),
        (lambda arrays: arrays.update({"0.weight": np.zeros((3, 5), np.float64)}), r"0\.weight is float64"),
        (lambda arrays: arrays.update({"extra": np.zeros(1, np.float32)}), "unknown"),
    ],
)
def test_what_does_not_fit_is_refused(change, message) -> None:  # type: ignore[no-untyped-def]
    arrays = {name: np.zeros(tuple(shape), np.float32) for name, shape in zip(LAYOUT.names, LAYOUT.shapes, strict=True)}
    change(arrays)
    with pytest.raises(ValueError, match=message):
        to_flat(ArrayRecord({name: Array(array) for name, array in arrays.items()}), LAYOUT)


def test_adjacent_rows_are_stacked_without_a_copy_and_others_with_one() -> None:
    matrix = torch.randn(4, 7)
    rows = list(matrix)
    assert stack(rows).data_ptr() == matrix.data_ptr()
    assert torch.equal(stack(rows), matrix)
    shuffled = [rows[2], rows[0], rows[3]]
    assert torch.equal(stack(shuffled), matrix[[2, 0, 3]])
    assert torch.equal(stack([rows[1], rows[2]]), matrix[1:3])
