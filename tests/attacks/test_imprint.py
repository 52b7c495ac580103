# SPDX-License-Identifier: Apache-2.0
"""Crafted weights and what is read from their updates, on real images."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.attacks.cells import find_cells
from fedsim.attacks.crafting import craft_imprint, craft_per_client, craft_trap, find_front, ladder
from fedsim.attacks.fishing import craft_fishing
from fedsim.attacks.imprint import imprint
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction
from fedsim.data import Dataset, load_dataset
from fedsim.errors import AttackError
from fedsim.models import build_model
from fedsim.privacy import prune, quantise
from fedsim.scenario import (
    CnnModel,
    DefenceSection,
    EmbeddedData,
    FishingServer,
    ImprintAttack,
    ImprintModel,
    ImprintServer,
    LogisticModel,
    MlpModel,
    PerClientServer,
    Prune,
    Quantise,
    Section,
    TrapServer,
)
from fedsim.training import LocalWork

SETTINGS = ImprintAttack(name="imprint")


@cache
def mnist() -> Dataset:
    return load_dataset(EmbeddedData(source="mnist"), 0)


def network(spec: Any, data: Dataset) -> nn.Module:
    return build_model(spec, data.input_shape, data.classes, 0, kind=data.kind)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def batch(data: Dataset, size: int, seed: int) -> tuple[Tensor, Tensor]:
    rows = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed))[:size]
    return data.x_train[rows], data.y_train[rows]


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def observed(model: nn.Module, x: Tensor, y: Tensor, noise: float = 0.0) -> Observation:
    update = gradient(model, x, y)
    size = math.sqrt(sum(float(t.square().sum()) for t in update.values()) / sum(t.numel() for t in update.values()))
    rng = torch.Generator().manual_seed(1)
    update = {name: t + noise * size * torch.randn(t.shape, generator=rng) for name, t in update.items()}
    work = LocalWork(kind="fedsgd", batch_size=len(x))
    return Observation(model=model, update=update, kind="gradient", work=work, examples=len(x), client=0)


def knowledge(data: Dataset, active: Section | None = None) -> Knowledge:
    bounds = (torch.tensor(0.0), torch.tensor(1.0)) if data.kind == "image" else None
    return Knowledge(data.kind, data.input_shape, data.classes, value_range=bounds, active=active)


def psnr(found: Tensor, originals: Tensor) -> Tensor:
    """(n, b): of each item and each original."""
    return -10 * torch.log10(
        torch.cdist(found.flatten(1).double(), originals.flatten(1).double()) ** 2 / originals[0].numel() + 1e-20
    )


def recovered(result: Reconstruction, originals: Tensor, db: float = 100.0) -> int:
    if not len(result.inputs):
        return 0
    return int((psnr(result.inputs, originals).amax(dim=0) > db).sum())


def certificates_hold(result: Reconstruction, originals: Tensor) -> bool:
    assert result.certified is not None
    proven = result.inputs[result.certified]
    return not len(proven) or bool((psnr(proven, originals).amax(dim=1) > 60).all())


@pytest.mark.parametrize(
    ("spec", "section", "least"),
    [
        (MlpModel(name="mlp", hidden=(512,)), ImprintServer(kind="imprint"), 64),
        (MlpModel(name="mlp", hidden=(512,)), ImprintServer(kind="imprint", queries=1), 50),
        (MlpModel(name="mlp", hidden=(512,)), ImprintServer(kind="imprint", query="average", queries=1), 50),
        (
            MlpModel(name="mlp", hidden=(512, 64)),
            ImprintServer(kind="imprint", query="cosine", statistics="gaussian"),
            62,
        ),
        (MlpModel(name="mlp", hidden=(512,)), ImprintServer(kind="imprint", bins=128), 55),
        pytest.param(ImprintModel(name="imprint"), ImprintServer(kind="imprint"), 62, marks=pytest.mark.slow),
        pytest.param(
            ImprintModel(name="imprint", activation="hardtanh"),
            ImprintServer(kind="imprint"),
            58,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bins_read_a_batch_of_64_exactly(spec: Any, section: ImprintServer, least: int) -> None:
    data = mnist()
    model = network(spec, data)
    front = find_front(model, data.input_shape)
    model.load_state_dict(craft_imprint(weights_of(model), front, data.x_test, section, seed=3))
    x, y = batch(data, 64, 0)
    result = imprint(observed(model, x, y), knowledge(data), SETTINGS)
    assert recovered(result, x, 90) >= least
    assert certificates_hold(result, x)


def test_a_whole_batch_is_certified_with_its_labels() -> None:
    data = mnist()
    model = network(MlpModel(name="mlp", hidden=(512,)), data)
    front = find_front(model, data.input_shape)
    model.load_state_dict(craft_imprint(weights_of(model), front, data.x_test, ImprintServer(kind="imprint"), seed=0))
    for seed in range(4):
        x, y = batch(data, 64, seed)
        result = imprint(observed(model, x, y), knowledge(data), SETTINGS)
        assert result.certified is not None
        assert result.labels is not None
        assert int(result.certified.sum()) == 64
        assert result.loss < 1e-9
        assert torch.equal(result.labels, y[psnr(result.inputs, x).argmax(dim=1)])


@pytest.mark.parametrize(("hat", "noise", "least"), [(False, 1e-3, 40), (True, 1e-2, 40), (True, 1.0, 0)])
def test_noise_ends_it_and_the_attacker_knows(hat: bool, noise: float, least: int) -> None:
    data = load_dataset(EmbeddedData(source="digits"), 0)
    model = network(ImprintModel(name="imprint", activation="hardtanh" if hat else "relu"), data)
    front = find_front(model, data.input_shape)
    model.load_state_dict(craft_imprint(weights_of(model), front, data.x_test, ImprintServer(kind="imprint"), seed=0))
    x, y = batch(data, 64, 0)
    result = imprint(observed(model, x, y, noise), knowledge(data), SETTINGS)
    assert recovered(result, x, 20) >= least
    assert certificates_hold(result, x)
    if noise == 1.0:
        assert recovered(result, x, 20) == 0
        assert float(result.score.sum()) < 8


def test_fedavg_over_several_steps() -> None:
    data = mnist()
    model = network(MlpModel(name="mlp", hidden=(512,)), data)
    front = find_front(model, data.input_shape)
    start = craft_imprint(weights_of(model), front, data.x_test, ImprintServer(kind="imprint"), seed=0, steps=4)
    model.load_state_dict(start)
    x, y = batch(data, 32, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for rows in torch.arange(32).split(8):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    update = {name: p.detach() - start[name] for name, p in model.named_parameters()}
    model.load_state_dict(start)
    work = LocalWork(kind="fedavg", batch_size=8, learning_rate=0.02)
    seen = Observation(model=model, update=update, kind="update", work=work, examples=32, client=0)
    result = imprint(seen, knowledge(data), SETTINGS)
    assert recovered(result, x, 20) >= 28
    assert certificates_hold(result, x)


@pytest.mark.parametrize(("size", "least"), [(32, 30), (64, 55), (100, 60)])
def test_trap_weights_on_pixels(size: int, least: int) -> None:
    data = mnist()
    model = network(MlpModel(name="mlp", hidden=(512,)), data)
    front = find_front(model, data.input_shape)
    trap = TrapServer(kind="trap")
    model.load_state_dict(craft_trap(weights_of(model), front, data.x_test, trap, batch_size=size, seed=0))
    x, y = batch(data, size, 1)
    result = imprint(observed(model, x, y), knowledge(data), SETTINGS)
    assert recovered(result, x) >= least
    assert certificates_hold(result, x)


def test_trap_weights_on_a_standardised_table() -> None:
    data = load_dataset(EmbeddedData(source="breast_cancer"), 0)
    model = network(MlpModel(name="mlp", hidden=(256,)), data)
    front = find_front(model, data.input_shape)
    trap = TrapServer(kind="trap")
    model.load_state_dict(craft_trap(weights_of(model), front, data.x_test, trap, batch_size=16, seed=0))
    x, y = batch(data, 16, 0)
    result = imprint(observed(model, x, y), knowledge(data), SETTINGS)
    assert recovered(result, x, 80) >= 10
    assert certificates_hold(result, x)


def test_fishing_isolates_one_example_or_says_that_it_did_not() -> None:
    data = mnist()
    model = network(MlpModel(name="mlp", hidden=(512,)), data)
    section = FishingServer(kind="fishing")
    honest = weights_of(model)
    crafted = craft_fishing(model, honest, data.x_test, data.y_test, section, batch_size=64)
    assert torch.equal(crafted["1.weight"], honest["1.weight"])
    model.load_state_dict(crafted)
    caught = 0
    for seed in range(12):
        x, y = batch(data, 64, seed)
        result = imprint(observed(model, x, y), knowledge(data, section), SETTINGS)
        assert certificates_hold(result, x)
        right = recovered(result, x, 30) == 1
        caught += right
        if result.score[0] > 0.9:
            assert right
            if result.labels is not None:
                assert int(result.labels[0]) == int(y[psnr(result.inputs, x).argmax()])
    assert caught >= 4


@pytest.mark.parametrize("known", [False, True])
def test_what_compression_made_of_a_fished_example_is_not_certified(known: bool) -> None:
    """Rounding and pruning can leave a first layer's gradient of rank one that is no example's, told of or not."""
    data = load_dataset(EmbeddedData(source="digits"), 0)
    section = FishingServer(kind="fishing")
    compression: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
        *((Quantise(kind="quantise", bits=bits), partial(quantise, bits=bits)) for bits in (1, 8)),
        *((Prune(kind="prune", keep=keep), partial(prune, keep=keep)) for keep in (0.02, 0.1)),
    ]
    clean = 0
    for seed in range(6):
        model = fishing_model(data, section, seed)
        x, y = batch(data, 16, seed)
        seen, granted = observed(model, x, y), knowledge(data, section)
        plain = imprint(seen, granted, SETTINGS)
        assert certificates_hold(plain, x)
        clean += int(certified(plain))
        for kind, change in compression:
            row = change(torch.cat([entry.flatten() for entry in seen.update.values()])[None])[0]
            parts = row.split([entry.numel() for entry in seen.update.values()])
            pairs = zip(seen.update.items(), parts, strict=True)
            sent = replace(seen, update={name: part.view_as(entry) for (name, entry), part in pairs})
            told = replace(granted, defence=DefenceSection(compression=kind)) if known else granted
            result = imprint(sent, told, SETTINGS)
            assert certificates_hold(result, x)
            assert not (known and certified(result))
            assert result.score[0] < 0.5 or recovered(result, x, 20) == 1
    assert clean >= 2


def test_a_fished_example_is_certified_within_the_value_range_and_without_noise_only() -> None:
    data = load_dataset(EmbeddedData(source="digits"), 0)
    section = FishingServer(kind="fishing")
    noisy = DefenceSection.model_validate({"client_dp": {"clipping_norm": 1.0, "noise_multiplier": 1e-9}})
    granted = knowledge(data, section)
    for seed in range(6):
        x, y = batch(data, 16, seed)
        seen = observed(fishing_model(data, section, seed), x, y)
        if certified(imprint(seen, granted, SETTINGS)):
            narrow = replace(granted, value_range=(torch.tensor(0.0), torch.tensor(0.9)))
            assert not certified(imprint(seen, narrow, SETTINGS))
            columns = (data.x_train.amin(dim=0), data.x_train.amax(dim=0))  # some pixels are always black
            assert bool((columns[0] == columns[1]).any())
            assert certified(imprint(seen, replace(granted, value_range=columns), SETTINGS))
            assert not certified(imprint(seen, replace(granted, defence=noisy, client_noise=1e-9), SETTINGS))
            return
    pytest.fail("no example was fished")


def test_the_mean_of_two_similar_examples_that_were_fished_is_not_certified() -> None:
    data = load_dataset(EmbeddedData(source="digits"), 0)
    section = FishingServer(kind="fishing")
    for seed in range(16):
        x, y = batch(data, 8, seed)
        x, y = x.repeat_interleave(2, 0), y.repeat_interleave(2)
        x[1::2, :, 3:5, 3:5] = (x[1::2, :, 3:5, 3:5] - 0.04).abs()  # 10 of 255
        for clipped in (1.0, 0.3):
            seen = observed(fishing_model(data, section, seed), x, y)
            seen = replace(seen, update={name: clipped * each for name, each in seen.update.items()})
            result = imprint(seen, knowledge(data, section), SETTINGS)
            near = bool((result.inputs - x).abs().flatten(1).amax(1).min() < 1 / 510)
            assert near or not certified(result)


def certified(result: Reconstruction) -> bool:
    assert result.certified is not None
    return bool(result.certified.any())


def fishing_model(data: Dataset, section: FishingServer, seed: int) -> nn.Module:
    """A network that has learnt a little, with a head that fishes."""
    model = build_model(MlpModel(name="mlp", hidden=(60, 60)), data.input_shape, data.classes, seed, kind=data.kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(data.x_test), data.y_test).backward()
        optimizer.step()
    model.load_state_dict(craft_fishing(model, weights_of(model), data.x_test, data.y_test, section, batch_size=16))
    return model


def test_a_sum_of_clients_falls_apart_into_blocks() -> None:
    data = mnist()
    model = network(MlpModel(name="mlp", hidden=(512,)), data)
    front = find_front(model, data.input_shape)
    section = PerClientServer(kind="per-client")
    clients = [4, 7, 11, 20, 30]
    everybody, models = craft_per_client(weights_of(model), front, data.x_test, section, clients, seed=0)
    x, y = batch(data, 40, 0)
    total: dict[str, Tensor] = {}
    for k, client in enumerate(clients):
        model.load_state_dict(models[client])
        for name, value in gradient(model, x[8 * k : 8 * k + 8], y[8 * k : 8 * k + 8]).items():
            total[name] = total.get(name, torch.zeros(())) + value / 5
        block = total["1.bias"].view(-1)[: 102 * len(clients)].view(5, 102)
        assert not block[k + 1 :].any(), "a dead block has a gradient"
    model.load_state_dict(everybody)
    work = LocalWork(kind="fedsgd", batch_size=8)
    seen = Observation(model=model, update=total, kind="gradient", work=work, examples=40, client=None, clients=5)
    result = imprint(seen, knowledge(data, section), SETTINGS)
    assert recovered(result, x) >= 36
    assert len(result.notes) == 5
    assert certificates_hold(result, x)


def test_bins_are_equally_likely_and_rows_are_recognised() -> None:
    answers = torch.randn(3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).abs()
    edges = ladder(answers, 20)
    counts = torch.histogram(answers, edges).hist
    assert float((counts / 150 - 1).abs().max()) < 0.5
    data = mnist()
    model = network(MlpModel(name="mlp", hidden=(30,)), data)
    front = find_front(model, data.input_shape)
    crafted = craft_imprint(weights_of(model), front, data.x_test, ImprintServer(kind="imprint"), seed=0)
    cells = find_cells(crafted[front.weight], crafted[front.bias], hat=False)
    assert torch.bincount(cells.group).tolist() == [10, 10, 10]
    honest = find_cells(weights_of(model)[front.weight], weights_of(model)[front.bias], hat=False)
    assert int((honest.following >= 0).sum()) == 0


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (CnnModel(name="cnn"), "not dense"),
        (LogisticModel(name="logistic"), "not followed"),
        (MlpModel(name="mlp", activation="tanh"), "not followed"),
    ],
)
def test_models_that_cannot_be_read_are_named(spec: Any, sentence: str) -> None:
    data = mnist()
    model = network(spec, data)
    x, y = batch(data, 4, 0)
    with pytest.raises(AttackError, match=sentence):
        imprint(observed(model, x, y), knowledge(data), SETTINGS)
