# SPDX-License-Identifier: Apache-2.0
"""The flat vector of a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedsim.errors import ModelError
from fedsim.training import layout_of
from fedsim.training.layout import replica_rows


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def test_parameters_first_then_float_buffers():
    layout = layout_of(model())
    assert layout.names == (
        "0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "1.running_mean", "1.running_var"
    )  # fmt: skip
    assert layout.parameters == 18 + 2 + 2 + 2 + 24 + 3
    assert layout.size == layout.parameters + 4


def test_round_trip_and_views():
    net = model()
    layout = layout_of(net)
    flat = layout.flatten(net.state_dict())
    views = layout.unflatten(flat)
    other = copy.deepcopy(net)
    other.load_state_dict(views, strict=False)
    assert torch.equal(layout.flatten(other.state_dict()), flat)
    views["3.bias"].zero_()
    assert (flat[layout.parameters - 3 : layout.parameters] == 0).all()


def test_rows_of_replicas_are_views():
    layout = layout_of(model())
    rows = replica_rows(5, layout.size)
    views = layout.unflatten(rows)
    assert views["0.weight"].shape == (5, 2, 1, 3, 3)
    views["3.weight"].fill_(7)
    assert (rows == 7).sum() >= 5 * 24
    assert rows.stride(0) % 16 == 0
    assert rows.stride(0) > layout.size


def test_scalars_frozen_parameters_and_private_buffers():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.fixed = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3), requires_grad=False)
            self.register_buffer("kept", torch.ones(2))
            self.register_buffer("temporary", torch.ones(4), persistent=False)
            self.register_buffer("count", torch.tensor(3))

    layout = layout_of(Odd())
    assert layout.names == ("scale", "fixed", "kept")
    assert (layout.parameters, layout.size) == (1, 6)
    flat = layout.flatten(Odd().state_dict())
    assert layout.unflatten(flat)["scale"].shape == ()
    assert layout.unflatten(flat.repeat(4, 1))["scale"].shape == (4,)


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_the_state_of_another_model_is_refused(change):
    layout = layout_of(model())
    state = dict(model().state_dict())
    if change == "missing":
        del state["3.bias"]
    else:
        state["3.bias"] = torch.zeros(4)
    with pytest.raises(ModelError, match=r"3\.bias"):
        layout.flatten(state)
    with pytest.raises(ModelError, match="numbers does not fit"):
        layout.unflatten(torch.zeros(5))
