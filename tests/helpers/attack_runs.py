# SPDX-License-Identifier: Apache-2.0
"""RUN/attacks/ as `fedsim attack` writes it: real gradients, simple attacks, real scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

from fedsim.attacks.observation import Knowledge, Reconstruction
from fedsim.audit.reconstruction import score
from fedsim.audit.scores.columns import columns_to_list
from fedsim.data.table import CategoricalColumn, NumericColumn, TableEncoding
from fedsim.privacy.claim import PrivacyClaim
from fedsim.report import read_run_files

Case = tuple[Reconstruction, Tensor, Tensor]  # what was found, the originals, their labels
KNOWN = {"architecture": "mlp 64-200-10", "batch size": "8", "labels": "inferred", "value range": "[0, 1]"}


def write_attack(
    run: Path,
    number: int,
    cases: Sequence[Case],
    knowledge: Knowledge,
    *,
    prior: Tensor | None = None,
    claims: Sequence[PrivacyClaim] = (),
    truth: bool = True,
    extra: dict[str, Any] | None = None,
) -> None:
    """The three files of one attack, one update for each case."""
    folder = run / "attacks"
    folder.mkdir(exist_ok=True)
    name = cases[0][0].attack
    found: dict[str, Tensor] = {}
    originals: dict[str, Tensor] = {}
    entries = []
    for place, (result, inputs, labels) in enumerate(cases):
        key = f"round-1/client-{place}"
        tensors = {
            "inputs": result.inputs,
            "score": result.score,
            "confidence": result.confidence,
            "cells": result.cells,
        }
        certified = result.certified
        tensors["certified"] = None if certified is None else certified.to(torch.uint8)
        found |= {f"{key}/{part}": tensor.contiguous() for part, tensor in tensors.items() if tensor is not None}
        scored = score(result, inputs, labels, knowledge, claims=claims, prior=prior, client=place)
        measured = scored if truth else None
        if measured is not None:
            originals[f"{key}/inputs"], originals[f"{key}/labels"] = inputs.contiguous(), labels.contiguous()
            originals[f"{key}/assignment"] = torch.tensor(measured.assignment)
        entry = {"round": 1, "client": place, "key": key, "found": len(result.inputs), "loss": result.loss}
        entry |= {"certified": None if certified is None else int(certified.sum()), "notes": list(result.notes)}
        entry |= {
            "event": result.event,
            "label_counts": None,
            "error": None,
            "score": measured.to_dict() if measured else None,
        }
        entries.append(entry)
    document = {"attack": name, "settings": {}, "knowledge": KNOWN, "kind": knowledge.kind, "observations": entries}
    stem = folder / f"{number:03d}-{name}"
    stem.with_suffix(".json").write_text(json.dumps(document | (extra or {})))
    save_file(found, stem.with_suffix(".safetensors"))
    if originals:
        save_file(originals, folder / f"{number:03d}-{name}-truth.safetensors")


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.from_numpy(data.images).float()[:, None] / 16, torch.from_numpy(data.target)


def quotients(inputs: Tensor, labels: Tensor, width: int = 600) -> Tensor:
    """dL/dW / dL/db, row by row, of a wide layer that few examples wake: alone in a row, an example is exact."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(inputs[0].numel(), width), nn.ReLU(), nn.Linear(width, 10))
    first = model[1]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.bias -= 0.55
    loss = nn.functional.cross_entropy(model(inputs), labels)
    weight, bias = torch.autograd.grad(loss, [first.weight, first.bias])
    rows = bias.abs().argsort(descending=True)
    return (weight[rows] / bias[rows, None].where(bias[rows, None] != 0, torch.ones(()))).reshape(-1, *inputs.shape[1:])


def picture_cases(updates: int = 2, batch: int = 8) -> list[Case]:
    """What several rows agree on is an example; what one row says may be a mixture: some exact, some not."""
    x, y = digits()
    cases = []
    for update in range(updates):
        rows = slice(batch * update, batch * (update + 1))
        candidates = quotients(x[rows], y[rows])
        inside = (candidates.flatten(1).amin(1) >= -1e-4) & (candidates.flatten(1).amax(1) <= 1 + 1e-4)
        candidates = candidates[inside & (candidates.flatten(1).abs().amax(1) > 0)]
        agree = torch.cdist(candidates.flatten(1), candidates.flatten(1), p=torch.inf) < 1e-3
        first = [place for place in range(len(agree)) if not agree[place, :place].any()]
        order = sorted(first, key=lambda place: -int(agree[place].sum()))[: batch - 1]
        certified = agree[order].sum(1) > 1
        sure = torch.where(certified, 0.97, 0.3)
        result = Reconstruction(
            "closed-form", candidates[order], None, 1e-3, sure, certified=certified, notes=("by rows",)
        )
        cases.append((result, x[rows], y[rows]))
    return cases


def pictures() -> Knowledge:
    return Knowledge("image", (1, 8, 8), 10, (torch.tensor(0.0), torch.tensor(1.0)))


def table() -> tuple[Tensor, Tensor, Knowledge]:
    """Breast cancer: six numbers, and one of them in three classes as a category."""
    data = load_breast_cancer()
    values = torch.from_numpy(data.data[:, :6]).double()
    mean, std = values.mean(0), values.std(0)
    levels = torch.bucketize(
        values[:, 0].contiguous(), torch.quantile(values[:, 0], torch.tensor([1 / 3, 2 / 3]).double())
    )
    numeric = [
        NumericColumn(str(n), float(m), float(s), 4, False)
        for n, m, s in zip(data.feature_names, mean, std, strict=False)
    ]
    encoding = TableEncoding((*numeric, CategoricalColumn("size", ("<small>", "medium", "large"))))
    x = torch.cat([(values - mean) / std, nn.functional.one_hot(levels, 3)], dim=1).float()
    return x, torch.from_numpy(data.target), Knowledge("table", (9,), 2, encoding=encoding)


def table_cases(updates: int = 2, batch: int = 6) -> list[Case]:
    """Noise that the attacker knows of: a cell is as sure as it is small."""
    x, y, _ = table()
    cases = []
    for update in range(updates):
        generator = torch.Generator().manual_seed(update)
        rows = slice(batch * update, batch * (update + 1))
        scale = torch.rand(batch, 9, generator=generator) ** 3
        found = (x[rows] + scale * torch.randn(batch, 9, generator=generator))[
            torch.randperm(batch, generator=generator)
        ]
        cells = (1 - scale[:, :7]).clamp(0.05, 0.99)
        result = Reconstruction("tabular", found, None, 0.02, cells.mean(1), cells=cells, event="the cell is right")
        cases.append((result, x[rows], y[rows]))
    return cases


def table_extra() -> dict[str, Any]:
    encoding = table()[2].encoding
    assert isinstance(encoding, TableEncoding)
    return {"columns": columns_to_list(encoding)}


TEXT = "to be or not to be\nthat is the <question> & more"
VOCABULARY = ("�", *sorted(set(TEXT)))


def text_cases() -> tuple[list[Case], Knowledge]:
    tokens = torch.tensor([VOCABULARY.index(c) for c in TEXT[:40]]).reshape(4, 10)
    found = tokens[[2, 0, 1]].clone()
    found[0, 3], found[0, 7] = 1, 2
    result = Reconstruction("text", found, None, 0.0, torch.tensor([0.4, 0.99, 0.98]))
    return [(result, tokens, tokens.roll(-1, 1))], Knowledge("text", (10,), len(VOCABULARY))


def play_all(run: Path) -> None:
    """Pictures beside the run's claims, rows, texts, and pictures without a truth."""
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"class_names": list(VOCABULARY)}))
    (run / "SHA256SUMS").unlink(missing_ok=True)  # of the summary as it was
    # Amplification says nothing of examples that were drawn; without it the claim has something to say.
    claims = [replace(claim, sampling="none", sample_rate=1.0) for claim in read_run_files(run).claims]
    x, _ = digits()
    rows, _, knowledge = table()
    write_attack(run, 1, picture_cases(), pictures(), prior=x[1000:], claims=claims)
    write_attack(run, 2, table_cases(), knowledge, prior=rows[100:], extra=table_extra())
    cases, text = text_cases()
    write_attack(run, 3, cases, text)
    write_attack(run, 4, picture_cases(1), pictures(), truth=False)
