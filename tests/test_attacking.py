# SPDX-License-Identifier: Apache-2.0
"""Attacks on a run: played on the transcript alone, scored with the truth, written down, and shown."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedsim
from fedsim.attacking import attack_run
from fedsim.audit.reconstruction import ReconstructionScore
from fedsim.cli import main
from fedsim.errors import ScenarioError
from fedsim.federation.run import Run
from fedsim.scenario import Scenario

BASE: dict[str, Any] = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [100]},
    "strategy": "fedsgd",
    "client": {"batch_size": 6},
    "cohort": {"population": 3},
    "rounds": 1,
    "attacks": [{"name": "exact", "observations": 2}],
    "seed": 3,
}


def scenario(**changes: Any) -> Scenario:
    return Scenario.model_validate({**BASE, **changes})


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fedsim.run(scenario(), out=tmp_path_factory.mktemp("attacked") / "run")


def results(run: Run, name: str = "001-exact") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run.path / "attacks" / f"{name}.json").read_text())
    return content


def test_a_batch_comes_back_and_the_files_say_so(attacked: Run) -> None:
    content = results(attacked)
    assert [entry["key"] for entry in content["observations"]] == ["round-1/client-0", "round-1/client-1"]
    found = load_file(attacked.path / "attacks" / "001-exact.safetensors")
    truth = load_file(attacked.path / "attacks" / "001-exact-truth.safetensors")
    for entry in content["observations"]:
        measured = ReconstructionScore.from_dict(entry["score"])
        assert (measured.right.right, measured.exact.right, entry["certified"]) == (6, 6, 6)
        key = entry["key"]
        paired = truth[f"{key}/inputs"][truth[f"{key}/assignment"]]
        torch.testing.assert_close(found[f"{key}/inputs"].float(), paired, atol=1e-4, rtol=0)
    table = attacked.attacks
    assert list(table["found"]) == [6, 6]


def test_the_truth_is_not_read_by_the_attack(attacked: Run, tmp_path: Path) -> None:
    blind = tmp_path / "blind"
    shutil.copytree(attacked.path, blind)
    shutil.rmtree(blind / "truth")
    shutil.rmtree(blind / "attacks")
    attack_run(fedsim.open_run(blind))
    entries = results(fedsim.open_run(blind))["observations"]
    assert [entry["score"] for entry in entries] == [None, None]
    assert not (blind / "attacks" / "001-exact-truth.safetensors").exists()
    one, other = (load_file(path / "attacks" / "001-exact.safetensors") for path in (attacked.path, blind))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_same_attack_gives_the_same_bytes_and_keeps_its_number(attacked: Run) -> None:
    files = sorted((attacked.path / "attacks").glob("001-*"))
    before = [file.read_bytes() for file in files]
    attack_run(attacked)
    assert [file.read_bytes() for file in files] == before
    labels = attacked.scenario.model_copy(update={"attacks": scenario(attacks=["labels"]).attacks})
    assert [path.name for path in attack_run(attacked, labels)] == ["002-labels.json"]
    assert attack_run(attacked, again=False)[0].name == "001-exact.json"


def test_granted_labels_are_said_to_be_granted(attacked: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(attacked.path, copy)
    table = fedsim.attack(copy, ["labels"], overrides=["adversary.knows.labels=known"])
    content = results(fedsim.open_run(copy), sorted(p.stem for p in (copy / "attacks").glob("*labels.json"))[-1])
    assert content["knowledge"]["labels"] == "given, in no order"
    assert "labels" in set(table["attack"])


@pytest.mark.parametrize(
    "defence",
    [
        {"client_dp": {"clipping_norm": 1.0, "noise_multiplier": 2.0, "delta": 1e-3}},
        {"example_dp": {"clipping_norm": 1.0, "noise_multiplier": 2.0, "delta": 1e-3}},
    ],
    ids=["client", "example"],
)
def test_under_a_claim_no_attack_does_more_than_it_allows(defence: dict[str, Any], tmp_path: Path) -> None:
    names = ("exact", "closed-form", "gradient-matching", "imprint")
    attacks: list[dict[str, Any]] = [{"name": name, "observations": 3} for name in names]
    attacks[2]["iterations"] = 20
    active = {"active": {"kind": "imprint", "rounds": [1]}}
    run = fedsim.run(scenario(defence=defence, attacks=attacks, adversary=active), out=tmp_path / "run")
    assert run.claim is not None
    for number, name in enumerate(names, 1):
        entries = results(run, f"{number:03d}-{name}")["observations"]
        assert len(entries) == 3
        for entry in entries:
            measured = ReconstructionScore.from_dict(entry["score"])
            assert measured.right.right == 0
            assert measured.comparisons
            assert all(comparison.verdict == "consistent" for comparison in measured.comparisons)
            assert entry["certified"] in (None, 0)


def test_the_command_line(attacked: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(attacked.path, copy)
    settings = "{name: closed-form, observations: 1}"
    assert main(["attack", str(copy), "--attack", settings, "--json", "--no-report"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["attack"] for entry in document["attacks"]] == ["closed-form"]
    assert main(["attack", str(copy)]) == 0
    out = capsys.readouterr().out
    assert "attack=exact update=round-1/client-0 number=1 of=2 found=6" in out
    assert re.search(r"^exact: 2 updates: .*12 of 12 pictures were reconstructed", out, re.MULTILINE)
    assert re.search(r"Attack[ \d]*: exact", (copy / "report.html").read_text())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attack", "exakt"], "exakt"),
        (["--attack", " "], "names no attack"),
        (["--attack", "tabular"], "tabular cannot be played on this run"),
        (["--attack", "{name: exact, speed: 3}"], "speed"),
        (["--set", "rounds=3"], "only attacks and adversary.knows can still change"),
        (["--set", "adversary.knows.labels=perhaps"], "perhaps"),
    ],
)
def test_a_wrong_word_is_one_sentence(
    attacked: Run, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in (attacked.path / "attacks").iterdir())
    assert main(["attack", str(attacked.path), *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert sorted(path.name for path in (attacked.path / "attacks").iterdir()) == before


def damage_settings(path: Path) -> None:
    (path / "attacks" / "001-exact.json").write_text("{")


def damage_truth(path: Path) -> None:
    (path / "truth" / "round-00001.safetensors").write_bytes(b"short")


def damage_tensors(path: Path) -> None:
    file = path / "transcript" / "round-00001-received.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def lose_tensor(path: Path) -> None:
    file = path / "transcript" / "round-00001-received.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "client-0/3.bias"}, file)


def cut_tensors(path: Path) -> None:
    (path / "transcript" / "round-00001-sent.safetensors").write_bytes(b"short")


def damage_layout(path: Path) -> None:
    (path / "transcript" / "layout.json").write_text('{"names": [], "shapes": []}')


def damage_message(path: Path) -> None:
    file = path / "transcript" / "messages.jsonl"
    file.write_text(file.read_text().replace('"client": 0', '"client" 0'))


def lose_instructions(path: Path) -> None:
    file = path / "transcript" / "messages.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))


def change_scenario(path: Path) -> None:
    file = path / "scenario.yaml"
    file.write_text(file.read_text().replace("source: digits", "source: mnist"))


def block_folder(path: Path) -> None:
    shutil.rmtree(path / "attacks")
    (path / "attacks").write_text("in the way")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_settings, "is damaged"),
        (damage_truth, "is damaged"),
        (damage_tensors, "does not have its SHA-256"),
        (lose_tensor, "does not contain tensor client-0/3.bias"),
        (cut_tensors, "is damaged"),
        (damage_layout, "layout.json is damaged"),
        (damage_message, "messages.jsonl is damaged (line 2"),
        (lose_instructions, "holds an update of round 1, but not what was sent"),
        (change_scenario, "another model than scenario.yaml names"),
        (block_folder, "is in the way"),
    ],
)
def test_a_damaged_run_is_one_sentence(
    attacked: Run, damage: Callable[[Path], None], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(attacked.path, copy)
    (copy / "SHA256SUMS").unlink()  # as of an earlier version: what is damaged is known by its content alone
    damage(copy)
    assert main(["attack", str(copy), "--attack", "labels"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attacks": ["text"]}, "text reads text data, but digits holds image data"),
        ({"attacks": ["tabular"]}, "tabular reads table data"),
        ({"attacks": ["imprint"]}, "set adversary.active"),
        ({"adversary": {"keep_rounds": 0}}, "keeps no update to attack"),
    ],
)
def test_what_an_attack_needs_is_known_before_the_run(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=words):
        fedsim.run(scenario(**changes), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
