# SPDX-License-Identifier: Apache-2.0
"""Cells of tables: what may be said of them, and what is withheld."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsim.attacks.cell_confidence import (
    CURVE,
    EVIDENCE,
    LEAST,
    POOLED,
    PROVED,
    SEARCHED,
    SURE,
    cell_bounds,
    explains,
    mode_shift,
    terms,
)
from fedsim.attacks.observation import Knowledge, Observation
from fedsim.attacks.shadow_client import shadow_client, unexplained
from fedsim.attacks.shadow_rows import Batch, Shadow, bounds_with_shadow, right_cells, shadow_of
from fedsim.attacks.tabular import tabular
from fedsim.data import Dataset
from fedsim.data.table import TableEncoding, from_frame
from fedsim.models import build_model
from fedsim.scenario import DefenceSection, EmbeddedData, MlpModel, Quantise, TabularAttack
from fedsim.training import LocalWork


def people(rows: int = 400, seed: int = 0) -> Dataset:
    """Dependent columns, rare categories, counts that are mostly 0: unlike the tables of the calibration."""
    rng = np.random.default_rng(seed)
    age = np.clip(18 + rng.gamma(2, 9, rows), 18, 90).astype(int)
    visits = rng.negative_binomial(0.7, 0.2, rows)
    frame = pd.DataFrame(
        {
            "age": age,
            "group": np.where(age < 25, "young", np.where(age > 50, "old", "middle")),
            "visits": visits,
            "ward": np.array([f"w{min(each, 12)}" for each in rng.zipf(1.6, rows)]),
            "sex": rng.choice(["f", "m"], rows),
            "ill": np.where(0.1 * visits + 0.02 * age + rng.logistic(size=rows) > 1.5, "yes", "no"),
        }
    )
    return from_frame("people", frame, "ill", EmbeddedData(source="breast_cancer"), seed)


def knowledge(data: Dataset) -> Knowledge:
    bounds = (data.x_test.amin(0), data.x_test.amax(0))
    return Knowledge("table", tuple(data.x_train.shape[1:]), 2, value_range=bounds, encoding=data.encoding)


def observed(data: Dataset, size: int, seed: int, work: LocalWork | None = None) -> tuple[Observation, Tensor, Tensor]:
    """What a client with `size` random rows sends through a small smooth network, which no row search can undo."""
    model = build_model(
        MlpModel(name="mlp", hidden=(16,), activation="sigmoid"), tuple(data.x_train.shape[1:]), data.classes, seed
    )
    rows = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed))[:size]
    x, y = data.x_train[rows], data.y_train[rows]
    work = work or LocalWork("fedsgd", batch_size=size)
    kind = "gradient" if work.kind == "fedsgd" else "update"
    return shadow_client(Observation(model, {}, kind, work, examples=size), knowledge(data), x, y, seed), x, y


def batch(route: float, left: float, agreement: float = 2.0, rows: int = 3, columns: int = 4) -> Batch:
    evidence = torch.zeros(rows, columns, len(EVIDENCE), dtype=torch.float64)
    evidence[..., 0], evidence[..., 3], evidence[..., 4], evidence[..., 5] = route, agreement, -6, 2.0
    whole = torch.zeros(rows, dtype=torch.int64)
    return Batch(torch.zeros(rows, columns), whole, evidence, whole.bool(), left, left, torch.zeros(rows, columns), ())


EASY = Shadow(1e-6, 99, 100)


def test_a_proof_needs_no_shadow() -> None:
    assert (cell_bounds(batch(PROVED, 0.5), None) == SURE).all()
    assert (cell_bounds(batch(SEARCHED, 1e-9), None) == 0).all()


@pytest.mark.parametrize("route", [SEARCHED, POOLED])
@pytest.mark.parametrize(("left", "shadow"), [(0.2, 0.2), (1e-3, 1e-6), (0.09, 1e-3), (0.9, 1e-9)])
def test_what_does_not_explain_the_update_is_withheld(route: float, left: float, shadow: float) -> None:
    """A matching loss of 9.6, or wrong labels, leave most of the update, whatever the members agree on."""
    assert not explains(batch(route, left), replace(EASY, unexplained=shadow))
    assert (cell_bounds(batch(route, left), replace(EASY, unexplained=shadow)) == 0).all()


@given(
    left=st.floats(0, 1),
    shadow=st.floats(0, 1),
    right=st.integers(0, 100),
    agreement=st.floats(-2, 2),
    route=st.sampled_from([SEARCHED, POOLED]),
)
@settings(max_examples=100, deadline=None)
def test_a_worse_fit_or_a_worse_shadow_is_never_surer(
    left: float, shadow: float, right: int, agreement: float, route: float
) -> None:
    mine = cell_bounds(batch(route, left, agreement), Shadow(shadow, right, 100))
    assert ((mine == 0) | ((mine >= LEAST) & (mine <= SURE))).all()
    assert (cell_bounds(batch(route, min(1.0, 2 * left + 1e-6), agreement), Shadow(shadow, right, 100)) <= mine).all()
    assert (cell_bounds(batch(route, left, agreement), Shadow(shadow, max(0, right - 10), 100)) <= mine).all()


def test_terms_have_names() -> None:
    assert terms(batch(POOLED, 1e-3), EASY).shape == (3, 4, len(CURVE))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_shift_is_what_the_log_odds_lack(share: float) -> None:
    right = (torch.arange(1000) < 1000 * share).double()
    assert mode_shift(torch.zeros(1000).double(), right) == pytest.approx(np.log(share / (1 - share)), abs=0.05)
    assert abs(mode_shift(torch.zeros(2).double(), torch.ones(2).double())) < 2  # two cells prove little


WORKS = (
    LocalWork("fedsgd", batch_size=8),
    LocalWork("fedavg", learning_rate=0.05, epochs=2, batch_size=3, momentum=0.5),
)


@pytest.mark.parametrize("work", WORKS)
def test_a_shadow_client_sends_what_a_client_sends(work: LocalWork) -> None:
    data = people()
    seen, x, y = observed(data, 8, 1, work)
    assert unexplained(seen, x, y, 1) < 1e-9
    again = shadow_client(seen, knowledge(data), x, y, 1)
    assert all(torch.equal(again.update[name], each) for name, each in seen.update.items())
    assert unexplained(seen, x.roll(1, 0), y) > 1e-3
    assert unexplained(seen, x, 1 - y) > 0.9  # of two classes: nearly the same update in the opposite direction


def test_the_defence_is_played_on_the_shadow_too() -> None:
    data = people()
    seen, x, y = observed(data, 8, 1)
    known = replace(knowledge(data), defence=DefenceSection(compression=Quantise(kind="quantise", bits=2)))
    sent = torch.cat([each.flatten() for each in shadow_client(seen, known, x, y, 1).update.values()])
    assert len(sent.unique()) <= 4


def test_a_shadow_batch_is_repeatable_and_its_truth_is_known() -> None:
    data = people()
    seen, x, y = observed(data, 4, 2)
    calls = []

    def attack(observation: Observation) -> Batch:
        calls.append(observation)
        return replace(batch(POOLED, 1e-3), inputs=x, evidence=torch.full((4, 5, len(EVIDENCE)), POOLED))

    mine = replace(batch(POOLED, 1e-3), candidates=x, labels=y)
    assert isinstance(data.encoding, TableEncoding)
    shadows = [shadow_of(mine, attack, seen, knowledge(data), data.encoding, 3) for _ in range(2)]
    assert shadows == [Shadow(1e-3, 20, 20)] * 2
    assert unexplained(calls[0], x, y) < 1e-9
    assert right_cells(x[[2, 0, 1, 3]], x, data.encoding).all()


def test_a_sum_over_clients_is_not_calibrated() -> None:
    data = people()
    seen, _, _ = observed(data, 4, 2)
    assert isinstance(data.encoding, TableEncoding)
    several = replace(seen, clients=3)
    mine, known = batch(POOLED, 1e-9), knowledge(data)
    bounds, note = bounds_with_shadow(mine, lambda _: mine, several, known, data.encoding, 0)
    assert (bounds == 0).all()
    assert "sum over several clients" in note


@pytest.mark.parametrize("work", WORKS)
def test_an_update_that_the_rows_do_not_explain_gives_no_confidence(work: LocalWork) -> None:
    """Labels and rows are wrong. Cells of such batches were 71 to 93% sure."""
    data = people()
    seen, _, _ = observed(data, 8, 5, work)
    noise = torch.Generator().manual_seed(0)
    update = {n: each + 5 * each.std() * torch.randn(each.shape, generator=noise) for n, each in seen.update.items()}
    chosen = TabularAttack(name="tabular", starts=6, iterations=40, walkers=32, sweeps=16)
    found = tabular(replace(seen, update=update), knowledge(data), chosen)
    assert found.cells is not None
    assert (found.cells == 0).all()
    assert any("no probability" in note for note in found.notes)
