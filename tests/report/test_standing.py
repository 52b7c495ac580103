# SPDX-License-Identifier: Apache-2.0
"""What may be green: a claim that allows little, that an audit with power found consistent, and nothing leaked."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import attack_runs
import audit_runs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsim.attacks.observation import Reconstruction
from fedsim.audit.estimate import Estimate
from fedsim.audit.verdict import Claim, DecidingTest, Status, Verdict
from fedsim.report import read_run_files
from fedsim.report.attack_pages import attack_pages
from fedsim.report.audit_files import Audit
from fedsim.report.audit_pages import audit_facts
from fedsim.report.page import facts, page_of, render
from fedsim.report.standing import (
    Allows,
    Leak,
    Standing,
    Tested,
    allowance,
    allowed_by,
    auc_interval,
    leak_of_game,
    leak_of_games,
    outcome,
    tone,
)
from fedsim.report.standing import tested_by as found_by

LETTERS = {"G": "green", "-": "grey", "A": "amber", "R": "red"}
# allows: tested: one letter for each leak, in the order unknown, nothing, little, much
TABLE: dict[Allows | None, dict[Tested, str]] = {
    "little": {"untested": "--AR", "inconclusive": "AAAR", "consistent": "GGAR", "violated": "RRRR"},
    "much": {"untested": "AAAR", "inconclusive": "AAAR", "consistent": "AAAR", "violated": "RRRR"},
    "anything": {"untested": "AAAR", "inconclusive": "AAAR", "consistent": "AAAR", "violated": "RRRR"},
    None: {"untested": "--AR", "inconclusive": "AAAR", "consistent": "--AR", "violated": "RRRR"},
}
VARIANTS = ("dp", "plain", "secure", "unfinished")
LEAK_ORDER: tuple[Leak, ...] = ("unknown", "nothing", "little", "much")


@pytest.mark.parametrize(("allows", "tested"), list(product((*get_args(Allows), None), get_args(Tested))))
def test_the_colour_of_every_combination(allows: Allows | None, tested: Tested) -> None:
    expected = [LETTERS[letter] for letter in TABLE[allows][tested]]
    assert [tone(Standing(allows, tested, leak)) for leak in LEAK_ORDER] == expected


def test_the_table_is_complete() -> None:
    assert set(LEAK_ORDER) == set(get_args(Leak))
    assert set(TABLE) == {*get_args(Allows), None}
    assert all(set(rows) == set(get_args(Tested)) for rows in TABLE.values())


# --- how much a claim allows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "delta", "allows"),
    [
        (0.0, 0.0, "little"),
        (1.0, 1e-5, "little"),
        (1.098, 0.0, "little"),  # at ln 3 the advantage is a half
        (1.099, 0.0, "much"),
        (4.0, 1e-6, "much"),
        (299.969, 1e-5, "much"),
        (math.inf, 0.0, "anything"),
        (0.1, 0.02, "much"),  # two of a hundred may be published as they are
        (0.0, 0.5, "much"),
    ],
)
def test_how_much_a_claim_allows(epsilon: float, delta: float, allows: Allows) -> None:
    assert allowed_by(audit_claim(epsilon, delta)) == allows


def audit_claim(epsilon: float, delta: float) -> Any:
    return dataclasses.replace(audit_runs.the_claim(), epsilon=epsilon, delta=delta)


@given(st.floats(0, 400), st.floats(0, 0.99), st.floats(0, 50), st.floats(0, 0.5))
def test_a_weaker_claim_never_allows_less(epsilon: float, delta: float, more: float, leaked: float) -> None:
    order = ("little", "much", "anything")
    weaker = audit_claim(epsilon + more, min(0.999, delta + leaked))
    assert order.index(allowed_by(weaker)) >= order.index(allowed_by(audit_claim(epsilon, delta)))


def test_what_is_allowed_is_rounded_up() -> None:
    text = allowance(audit_claim(math.log(3), 0.0))
    assert "a client took part in up to 75.0% of fair guesses" in text
    assert "100.0%" in allowance(audit_claim(300.0, 1e-5))


# --- what an audit is worth -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def audits() -> list[Audit]:
    return [Audit.model_validate(json.loads(json.dumps(entry))) for entry in audit_runs.audits()]


SOUND, BROKEN, TRANSCRIPT, GAME, PERFECT, BARE = range(6)


def with_claim(audit: Audit, epsilon: float, status: Status, power: float = 0.95, factor: float = 2.0) -> Audit:
    """The same audit with another claim at δ = 1e-5 per client, and another outcome."""
    return audit.model_copy(update={"verdict": judged(audit, epsilon, status, power, factor)})


def judged(audit: Audit, epsilon: float, status: Status, power: float, factor: float = 2.0) -> Verdict:
    assert audit.verdict is not None
    refuted = status == "violated"
    lower = epsilon + 1 if refuted else 0.0
    return dataclasses.replace(
        audit.verdict,
        claim=Claim(epsilon, 1e-5, "client", "add/remove"),
        estimates=(Estimate(lower, None, 0.95, "counts", "A", 1e-5),),
        p_value=0.001 if refuted else 1.0,
        status=status,
        power=power,
        factor=factor,
        test=DecidingTest(),
    )


def test_only_an_audit_with_power_against_the_worst_case_counts_as_consistent(audits: list[Audit]) -> None:
    sound = with_claim(audits[SOUND], 1.0, "consistent")
    claim = audit_claim(1.0, 1e-5)
    assert outcome(sound) == "consistent"
    assert found_by([sound], claim) == "consistent"
    assert outcome(with_claim(audits[SOUND], 1.0, "consistent", factor=10.0)) == "inconclusive"
    for weak in (TRANSCRIPT, GAME):  # an ordinary adversary that finds nothing proves nothing
        assert outcome(with_claim(audits[weak], 1.0, "consistent", power=0.99)) == "inconclusive"
        assert outcome(with_claim(audits[weak], 1.0, "violated")) == "violated"
    assert outcome(audits[BARE]) == "inconclusive"


def test_an_audit_counts_for_the_claim_that_it_tested(audits: list[Audit]) -> None:
    sound = with_claim(audits[SOUND], 1.0, "consistent")
    assert found_by([], audit_claim(1.0, 1e-5)) == "untested"
    assert found_by([sound], audit_claim(0.5, 1e-5)) == "untested"  # that ε ≤ 1 stands says nothing about 0.5
    assert found_by([sound], audit_claim(1.0, 1e-7)) == "untested"
    other = dataclasses.replace(audit_claim(1.0, 1e-5), unit="example")
    assert found_by([sound], other) == "untested"
    assert found_by([audits[BROKEN]], audit_claim(1.0, 1e-5)) == "violated"  # of the same unit, whatever ε was
    assert found_by([audits[BROKEN]], other) == "untested"


@pytest.mark.parametrize(
    ("auc", "trials", "leak"),
    [(0.94, 100, "much"), (0.73, 100, "much"), (0.73, 8, "nothing"), (0.53, 10_000, "little"), (0.5, 400, "nothing")],
)
def test_what_a_game_leaks(audits: list[Audit], auc: float, trials: int, leak: Leak) -> None:
    audit = audits[BARE]
    numbers = audit.numbers.model_copy(update={"auc": auc, "trials": trials, "ins": trials // 2, "auc_interval": None})
    played = audit.model_copy(update={"numbers": numbers})
    low, high = auc_interval(played)
    assert low < auc < high
    assert leak_of_game(played) == leak


def test_a_game_that_wins_under_a_claim_is_a_leak_of_what_was_claimed(audits: list[Audit]) -> None:
    assert leak_of_games([audits[GAME], audits[PERFECT]]) == "much"
    assert leak_of_games([audits[BARE], audits[SOUND]]) == "unknown"  # no claim speaks about it


def test_a_weak_audit_does_not_speak_for_a_strong_one(audits: list[Audit]) -> None:
    strong = with_claim(audits[SOUND], 1.0, "inconclusive", power=0.5)
    weak = with_claim(audits[TRANSCRIPT], 1.0, "consistent", power=0.99)
    good = with_claim(audits[SOUND], 1.0, "consistent")
    (fact,) = audit_facts([strong, weak])
    assert (fact.value, fact.tone) == ("inconclusive", "amber")
    (fact,) = audit_facts([weak, good])
    assert (fact.value, fact.tone, fact.anchor) == ("consistent", "green", "audit-2")


def test_a_game_without_a_claim_is_at_the_top(audits: list[Audit]) -> None:
    (fact,) = audit_facts([audits[BARE]])
    assert fact.value.startswith("AUC 0.")
    assert fact.tone in ("red", "amber")
    assert "one client alone" in fact.note
    assert fact.anchor == "audit-1"


# --- pages ----------------------------------------------------------------------------------------------------------


def private_run(make_run: Callable[..., Path], path: Path, epsilon: float, audit: Status | None, leak: bool) -> Path:
    """A run with one claim of a client; its audit, and an attack that shows all or nothing."""
    run = make_run(path, "dp", defence={"client_dp": {"clipping_norm": 1.0, "noise_multiplier": 1.0}})
    claim = audit_claim(epsilon, 1e-5).to_dict()
    (run / "claims.json").write_text(json.dumps([claim]))
    if audit is not None:
        entry = audit_runs.audits()[SOUND]
        sound = Audit.model_validate(json.loads(json.dumps(entry)))
        entry["verdict"] = judged(sound, epsilon, audit, 0.5 if audit == "inconclusive" else 0.95).to_dict()
        (run / "audit.json").write_text(json.dumps({"audits": [entry]}))
    if leak:
        x, y = attack_runs.digits()
        result = Reconstruction("auto", x[:8], None, 0.0, torch.ones(8))
        attack_runs.write_attack(run, 1, [(result, x[:8], y[:8])], attack_runs.pictures(), prior=x[1000:])
    return run


@pytest.mark.parametrize(
    ("epsilon", "audit", "leak", "colour"),
    [
        (0.9, "consistent", False, "green"),
        (0.9, None, False, "grey"),
        (0.9, "inconclusive", False, "amber"),
        (0.9, "violated", False, "red"),
        (0.9, "consistent", True, "red"),
        (299.969, "consistent", False, "amber"),
        (299.969, None, False, "amber"),
        (299.969, "inconclusive", False, "amber"),
    ],
)
def test_the_colour_of_a_claim_on_the_page(
    make_run: Callable[..., Path], tmp_path: Path, epsilon: float, audit: Status | None, leak: bool, colour: str
) -> None:
    run = private_run(make_run, tmp_path / "run", epsilon, audit, leak)
    about = [fact for fact in facts(read_run_files(run)) if fact.label in ("Privacy claim", "Audit of the claim")]
    assert [fact.tone for fact in about] == [colour] * len(about)
    assert len(about) == 1 + (audit is not None)
    assert "allows " + ("little" if epsilon < 1 else "much") in about[0].note


def test_a_page_shows_its_colours(make_run: Callable[..., Path], tmp_path: Path) -> None:
    page = page_of(read_run_files(private_run(make_run, tmp_path / "run", 0.9, "consistent", leak=False)))
    assert render(page).count('class="fact claim tone-green"') == 2
    assert '<p class="tone-green">' in render(page)  # what the audit said


def test_nothing_else_is_green(
    report_of: Callable[[str], Path], attacked: Path, audited: Path, audit_report: Path
) -> None:
    for run in (attacked, audited):
        assert [fact for fact in facts(read_run_files(run)) if fact.tone == "green"] == []
    for report in (*map(report_of, VARIANTS), audit_report):
        assert not re.search(r'class="[^"]*tone-green', report.read_text())


def test_only_the_tone_draws_in_green(audit_report: Path, attacked: Path) -> None:
    style = (Path(__file__).parents[2] / "fedsim" / "report" / "style.css").read_text()
    assert re.findall(r".*var\(--green\).*", style) == [".tone-green { --tone: var(--green); }"]
    audits = re.findall(r'<section id="audit.*?</section>', audit_report.read_text(), re.DOTALL)
    files = read_run_files(attacked)
    drawn = [drawing.wide for section in attack_pages(files) for drawing in section.drawings]
    assert audits
    assert drawn
    assert not [part for part in (*audits, *drawn) if "var(--green)" in part]  # what a claim allows is no success
