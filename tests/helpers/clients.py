# SPDX-License-Identifier: Apache-2.0
"""What clients with embedded data send: gradients and updates of any model, as an attack observes them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import nn

from fedsim.attacks.observation import Knowledge, Observation
from fedsim.data import Dataset, load_dataset
from fedsim.models import build_model
from fedsim.randomness import ClientRandomness
from fedsim.scenario import DataSection, ModelSection
from fedsim.training import LocalWork, layout_of, train_cohort


@cache
def data(source: str) -> Dataset:
    return load_dataset(TypeAdapter(DataSection).validate_python({"source": source}), 0)


def model_for(each: Dataset, seed: int = 0, **spec: Any) -> nn.Module:
    section: ModelSection = TypeAdapter(ModelSection).validate_python(spec)
    return build_model(section, each.input_shape, each.classes, seed, kind=each.kind)


def knowledge_of(each: Dataset, **more: Any) -> Knowledge:
    bounds = (torch.zeros(()), torch.ones(())) if each.kind == "image" else None
    return Knowledge(each.kind, each.input_shape, each.classes, value_range=bounds, **more)


def gradient_of(model: nn.Module, each: Dataset, rows: Any, scale: float = 1.0) -> Observation:
    twin = copy.deepcopy(model)
    loss = F.cross_entropy(twin(each.x_train[rows]), each.y_train[rows])
    entries = torch.autograd.grad(loss, list(twin.parameters()))
    update = {name: scale * entry for (name, _), entry in zip(twin.named_parameters(), entries, strict=True)}
    return Observation(model, update, "gradient", LocalWork("fedsgd", batch_size=len(rows)), examples=len(rows))


def update_of(model: nn.Module, each: Dataset, rows: Any, work: LocalWork) -> Observation:
    layout = layout_of(model)
    start, random = layout.flatten(model.state_dict()), [ClientRandomness(0, 1, 0)]
    result = train_cohort(model, start, each.x_train, each.y_train, [np.asarray(rows)], work, random)
    update = {name: entry.clone() for name, entry in layout.unflatten(result.updates[0]).items()}
    return Observation(model, update, "update", work, examples=len(rows))
