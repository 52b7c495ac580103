# SPDX-License-Identifier: Apache-2.0
"""What the page says of an attack: the question, what was tried and what not, the answer in grades, and one colour."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import attack_runs
import pytest
import torch
from torch import Tensor

from fedsim.attacks.observation import Reconstruction
from fedsim.audit.reconstruction import ReconstructionScore, score
from fedsim.report.attack_answers import did_it_work, graded_total, leak_of, standing_of, tried_by
from fedsim.report.attack_files import AttackDocument, AttackFiles
from fedsim.report.page import facts
from fedsim.report.run_files import read_run_files


def found_by(inputs: Tensor, *, attack: str = "auto", rows: slice = slice(0, 8), **fields: Any) -> ReconstructionScore:
    x, y = attack_runs.digits()
    result = Reconstruction(attack, inputs, None, 0.1, torch.zeros(len(inputs)), **fields)
    public = {"prior": x[500:900], "prior_labels": y[500:900], "others": x[900:1500]}
    return score(result, x[rows], y[rows], attack_runs.pictures(), **public)


def files(*scores: ReconstructionScore | None, attack: str = "auto", **update: Any) -> AttackFiles:
    entries = [
        {"round": 1, "client": place, "key": f"round-1/client-{place}", "score": None, "found": 0, **update}
        | ({} if one is None else {"found": one.found, "score": json.loads(json.dumps(one.to_dict()))})
        for place, one in enumerate(scores)
    ]
    document = {"attack": attack, "kind": "image", "settings": {"restarts": 2, "seconds": 9.0}, "observations": entries}
    return AttackFiles("001-auto", AttackDocument.model_validate(document), {}, {})


def noisy(decibels: float) -> Tensor:
    x, _ = attack_runs.digits()
    return x[:8] + 10 ** (-decibels / 20) * torch.randn(x[:8].shape, generator=torch.Generator().manual_seed(1))


def noise(seed: int = 0) -> Tensor:
    return torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


UNTRIED = ("exact: needs a ReLU", "fedavg: the batch size is not known")


def test_finding_nothing_names_what_was_tried_and_what_was_not() -> None:
    empty = found_by(torch.empty(0, 1, 8, 8))
    tone, text = did_it_work(files(empty, client=None, tried=("closed-form",), untried=UNTRIED))
    assert text == (
        "Can the server rebuild the pictures behind 1 sum of updates? Tried: closed-form, with at most 9.0 s and 2"
        " restarts for each update. Not tried: exact: needs a ReLU; fedavg: the batch size is not known. Found: nothing"
        " of 8 pictures. What a stronger attack, or more time, would find is not known."
    )
    assert tone == "amber"  # it settles nothing
    assert tried_by([files(empty, tried=("closed-form",), untried=UNTRIED)]) == (
        "tried: closed-form; not tried: exact, fedavg"
    )


@pytest.mark.parametrize("decibels", [14, 16, 18])
def test_what_anybody_can_read_is_red(decibels: float) -> None:
    got = files(found_by(noisy(decibels)))
    tone, text = did_it_work(got)
    assert tone == "red"
    assert "8 of 8 pictures recognisable, 0 near, 0 exact" in text
    assert graded_total(got) == "8 of 8 pictures recognisable, 0 near, 0 exact"


def test_no_answer_answers_a_question_that_is_not_on_the_screen() -> None:
    x, _ = attack_runs.digits()
    for inputs in (x[:8], noisy(14), noise(), x[:0]):
        text = did_it_work(files(found_by(inputs)))[1]
        assert text.startswith("Can the server rebuild the pictures behind 1 update? Tried: auto alone")
        assert "No." not in text
        assert "Yes" not in text


def test_noise_is_no_leak_and_settles_nothing() -> None:
    got = files(*(found_by(noise(k), rows=slice(8 * k, 8 * k + 8)) for k in range(3)))
    assert leak_of(got) == "nothing"
    assert did_it_work(got)[0] == "amber"


def test_as_many_as_luck_recognises_are_no_leak() -> None:
    one = found_by(noise())
    lucky = replace(one, items=tuple(replace(item, recognisable=n == 0) for n, item in enumerate(one.items)))
    assert lucky.luck == 8 / 1008
    assert leak_of(files(*([one] * 9), lucky)) == "nothing"  # one of 80, where 0.6 are expected
    assert leak_of(files(*([lucky] * 10))) == "much"  # ten of 80


def test_better_than_a_guess_is_a_small_leak() -> None:
    one = found_by(noise())
    better = replace(one, items=tuple(replace(item, better=True, recognisable=False) for item in one.items))
    assert leak_of(files(better)) == "little"
    assert did_it_work(files(better))[0] == "amber"


def test_what_a_stranger_guesses_as_well_is_no_leak() -> None:
    x, _ = attack_runs.digits()
    result = Reconstruction("auto", x[500:501].expand(8, -1, -1, -1), None, 0.1, torch.zeros(8))
    same = x[500:501].expand(60, -1, -1, -1)
    got = score(result, same[:8], torch.zeros(8).long(), attack_runs.pictures(), prior=same, others=same)
    assert (got.exact.right, got.leaked.right) == (8, 0)
    assert leak_of(files(got)) == "nothing"
    assert "A stranger would have guessed 8 of the 8 that are near." in did_it_work(files(got))[1]


def test_labels_alone() -> None:
    _, y = attack_runs.digits()
    counts = torch.bincount(y[:8], minlength=10)
    got = files(found_by(torch.empty(0, 1, 8, 8), attack="labels", label_counts=counts), attack="labels")
    tone, text = did_it_work(got)
    assert text.startswith("Can the server tell which labels were behind 1 update?")
    assert "100% of the labels of 8 pictures are right" in text
    assert (tone, graded_total(got)) == ("red", "100% of the labels right")


@pytest.mark.parametrize(
    ("update", "tone", "said"),
    [
        ({"found": 3}, "grey", "3 pictures offered, not scored"),
        ({"found": 3, "certified": 2}, "red", "3 pictures offered, not scored"),
        ({"error": "needs a linear layer"}, "grey", "not played"),
    ],
)
def test_without_a_truth_only_a_certificate_shows_anything(update: dict[str, Any], tone: str, said: str) -> None:
    got = files(None, **update)
    assert (did_it_work(got)[0], graded_total(got)) == (tone, said)
    assert standing_of(got).tested == "untested"


def test_the_most_that_leaked_is_at_the_top_of_the_page(attacked: Path) -> None:
    (fact,) = [fact for fact in facts(read_run_files(attacked)) if fact.label.startswith("Can the server")]
    assert fact.label == "Can the server rebuild the pictures?"
    assert fact.tone == "red"
    assert "tried: closed-form, tabular, text; most was found by closed-form" in fact.note
    claims = [fact for fact in facts(read_run_files(attacked)) if fact.label == "Privacy claim"]
    assert {claim.tone for claim in claims} == {"red"}
    assert all("An attack or a game on this run shows what it is to hide." in claim.note for claim in claims)
