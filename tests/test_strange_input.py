# SPDX-License-Identifier: Apache-2.0
"""Numbers that nothing holds, texts that move the cursor: what fuzzing found, by family."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from refusals import assert_says, refused

import fedsim
from fedsim.cli import main
from fedsim.errors import RunError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


RUN = "data: digits\nmodel: logistic\nrounds: 1\ncohort: {population: 2}"


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("client.learning_rate=1e308", ("client.learning_rate is 1e\\+308", "at most 1e\\+30")),
        ("client.learning_rate=5e-324", ("client.learning_rate is 5e-324", "at least 1e-30")),
        ("client.weight_decay=1e308", ("client.weight_decay is 1e\\+308", "at most 1e\\+30")),
        ("model={name: mlp, hidden: [9223372036854775808]}", (r"model.hidden\[0\] is 9223372036854775808",)),
        ("model={name: transformer, dim: 1000000000000000000000000000000}", ("model.dim", "at most 16,777,216")),
        ("cohort.population=1000000000000", ("cohort.population is 1000000000000", "at most 1,000,000,000")),
        ("data.test_fraction=5e-324", ("data.test_fraction is 5e-324", "at least 1e-12")),
        ("rounds=&a 1", ("anchors", "&a", "leave it out")),
        ("rounds=0x" + "f" * 5000, ("cannot be read as a number",)),
        ("rounds=" + "9" * 5000, ("cannot be read as a number",)),
        (r'question="\ud800"', ("half a character",)),
    ],
)  # fmt: skip
def test_a_number_that_nothing_holds_is_one_sentence(
    override: str, fragments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(capsys, "check", "quickstart", "--set", override)
    assert_says(sentence, ("^--set ", *fragments))


@pytest.mark.parametrize("scenario", ["one-run-sum", "active-server"])
def test_the_same_for_other_scenarios(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "check", scenario, "--set", "cohort.population=1000000000000")
    refused(capsys, "check", scenario, "--set", "data.test_fraction=5e-324")


def test_an_active_server_needs_rows_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, "check", "active-server", "--set", "data.test_fraction=1e-6")
    assert_says(sentence, ("adversary.active", "1 row", "raise data.test_fraction"))


def test_a_pair_of_halves_is_a_character(capsys: pytest.CaptureFixture[str]) -> None:
    Path("emoji.yaml").write_text(RUN + '\nquestion: "\\ud83d\\ude42"')
    assert main(["check", "emoji.yaml"]) == 0
    assert "🙂" in capsys.readouterr().out


def test_a_zero_byte_in_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert "zero byte" in refused(capsys, "run", "quickstart", "--out", "a\0b")
    with pytest.raises(RunError, match="zero byte"):
        fedsim.run("quickstart", overrides=["rounds=1"], out="a\0b")


STRANGE = "\x1b[2J\x07\u202egnp\u2066\x9b31m\r"


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", STRANGE),
        ("check", "quickstart", "--set", f"rounds={STRANGE}"),
        ("check", "quickstart", "--set", f"{STRANGE}=1"),
        ("run", "quickstart", "--out", STRANGE, "--set", "cohort.population=10000000"),
        ("status", STRANGE),
        ("report", STRANGE),
        (STRANGE,),
        ("new", f"no/{STRANGE}"),
    ],
)
def test_nothing_of_the_input_moves_the_cursor(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, *arguments)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", sentence)


def test_what_a_scenario_says_is_shown_without_its_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    Path("strange.yaml").write_text(RUN + '\nquestion: "a\\x1b[2Jb\\u202ec\\x9bd"')
    assert main(["check", "strange.yaml"]) == 0
    assert r"a\x1b[2Jb\u202ec\x9bd" in capsys.readouterr().out
    assert main(["run", "strange.yaml", "--json", "--no-report", "--out", "run"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
