# SPDX-License-Identifier: Apache-2.0
"""The pages of audits: what they say is what the audit found, every ε comes with its δ, and nothing is made up."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audit_runs as runs
import numpy as np
import pytest

from fedsim.audit.verdict import Claim
from fedsim.errors import RunError
from fedsim.report import read_run_files
from fedsim.report.audit_bounds import gap_table
from fedsim.report.audit_density import density, density_figure
from fedsim.report.audit_estimates import four_digits_down, rounded_down
from fedsim.report.audit_files import Audit, Counts, read_audit_files
from fedsim.report.audit_pages import audit_facts, audit_pages, releases_of
from fedsim.report.blocks import Bullets, Definitions, Drawing, Paragraph, Section, Table

TITLES = [
    "client canaries",
    "client canaries",
    "transcript",
    "the game MI",
    "the game MI",
    "the game MI",
    "one run sum",
]
SOUND, BROKEN, TRANSCRIPT, GAME, PERFECT, UNCLAIMED, SUM = range(7)


@pytest.fixture(scope="module")
def audits(audited: Path) -> tuple[Audit, ...]:
    return read_audit_files(audited)


@pytest.fixture(scope="module")
def sections(audited: Path) -> tuple[Section, ...]:
    return audit_pages(read_run_files(audited).audits)


def drawn(section: Section, ending: str) -> Drawing:
    return next(drawing for drawing in section.drawings if drawing.name.endswith(ending))


def data_of(drawing: Drawing) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(drawing.data.csv)))


def texts(section: Section) -> list[str]:
    """Everything that a section says in words, sentence by sentence or cell by cell."""
    said: list[str] = []
    for block in section.blocks:
        match block:
            case Paragraph():
                said.append(block.text)
            case Definitions():
                said += [meaning for _, meaning in block.items]
            case Bullets():
                said += block.items
            case Table():
                said += [block.title, *block.columns]
            case Drawing():
                said += [block.caption, block.alt]
    return said


# --- the whole page -------------------------------------------------------------------------------------------------


def test_every_audit_has_a_section(sections: tuple[Section, ...]) -> None:
    assert [section.title for section in sections] == [f"Audit {n}: {name}" for n, name in enumerate(TITLES, start=1)]
    drawings = [drawing for section in sections for drawing in section.drawings]
    assert len({drawing.name for drawing in drawings}) == len(drawings) >= 20
    assert all(drawing.data.rows for drawing in drawings)


def test_every_figure_is_in_the_page_and_in_files_of_its_own(audit_report: Path, sections: tuple[Section, ...]) -> None:
    page, drawings = audit_report.read_text(), list(sections[BROKEN].drawings)
    assert len(drawings) == 4
    for drawing in drawings:
        name = drawing.name.replace("audit-2", "audit-1")
        assert f'id="figure-{name}"' in page
        assert (audit_report.parent / "figures" / f"{name}.csv").read_text() == drawing.data.csv
        assert (audit_report.parent / "figures" / f"{name}.svg").read_text() == drawing.standalone


def test_an_epsilon_is_never_said_without_its_delta_and_its_unit(sections: tuple[Section, ...]) -> None:
    numbers = re.compile(r"ε [≤≥=] [\d∞]|ε between \d")
    found = [text for section in sections for text in texts(section) if numbers.search(text)]
    assert len(found) > 20
    for text in found:
        assert re.search(r"δ\s=\s\d|same δ", text), text
        assert re.search(r"per client|one client|one example", text), text


def test_figures_follow_the_theme_and_point_at_what_is_there(sections: tuple[Section, ...]) -> None:
    for drawing in (drawing for section in sections for drawing in section.drawings):
        for svg in (drawing.wide, drawing.narrow):
            assert not re.search(r"(fill|stroke): #(?!000000)", svg), drawing.name
            assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= set(re.findall(r'id="([^"]+)"', svg)), drawing.name
            assert "mathdefault" not in svg


def test_a_run_without_audits_has_no_such_page(dp_run: Path) -> None:
    files = read_run_files(dp_run)
    assert files.audits == ()
    assert audit_pages(files.audits) == ()
    assert audit_facts(files.audits) == ()


def test_the_worst_verdict_is_at_the_top(audit_report: Path, audits: tuple[Audit, ...]) -> None:
    fact, other = audit_facts(read_run_files(audit_report.parent).audits)
    page = audit_report.read_text()
    verdict = audits[BROKEN].verdict
    assert verdict is not None
    assert (fact.value, fact.tone) == ("violated", "red")
    assert str(verdict.claim) in fact.note
    assert fact.note.count("same δ") == 2
    assert "one example" in other.note  # a claim for another unit is another fact
    assert page.index(fact.note.partition("(")[0]) < page.index('id="audit-1"')


# --- the verdict ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "tone"), [(SOUND, "amber"), (BROKEN, "red"), (PERFECT, "red")])
def test_the_verdict_is_said_as_the_audit_said_it(
    number: int, tone: str, sections: tuple[Section, ...], audits: tuple[Audit, ...]
) -> None:
    said = next(b for b in sections[number].blocks if isinstance(b, Paragraph) and b.text == audits[number].sentence)
    assert said.tone == tone
    words = dict(next(block for block in sections[number].blocks if isinstance(block, Definitions)).items)
    assert words["Verdict"].startswith("violated" if tone == "red" else "consistent")
    assert words["Claim"].startswith("ε ≤ ")


def test_an_inconclusive_audit_does_not_hide_one_that_tells(audited: Path) -> None:
    files = read_run_files(audited)
    files.__dict__["audits"] = (files.audits[TRANSCRIPT], files.audits[SOUND], files.audits[GAME])
    assert [fact.value for fact in audit_facts(files.audits)] == ["consistent", "inconclusive"]
    assert "1 other audit consistent" in audit_facts(files.audits)[0].note


def test_bounds_are_rounded_down_and_tiers_stay_apart(sections: tuple[Section, ...], audits: tuple[Audit, ...]) -> None:
    verdict, drawing = audits[SOUND].verdict, drawn(sections[SOUND], "-bounds")
    assert verdict is not None
    rows = data_of(drawing)
    for row, estimate in zip(rows, verdict.estimates, strict=False):
        assert (row["estimator"], row["tier"]) == (estimate.method, estimate.tier)
        shown = float(row["ε at least (rounded down)"])
        assert shown <= estimate.lower + 1e-9
        assert shown == pytest.approx(estimate.lower, rel=1e-3)
        assert (float(row["confidence"]), float(row["δ"])) == (0.95, runs.DELTA)
    assert [row["tier"] for row in rows] == sorted(row["tier"] for row in rows)
    assert "Bayesian" in rows[-1]["estimator"]
    assert drawing.wide.index("tier A: without") < drawing.wide.index("tier B: under a model")
    assert "<pattern" in drawing.wide  # tier B is hatched


@pytest.mark.parametrize(("value", "shown"), [(2.6999, "2.699"), (3.0, "3.000"), (0.0004, "0.000"), (math.inf, "∞")])
def test_a_lower_bound_does_not_grow_by_being_printed(value: float, shown: str) -> None:
    assert rounded_down(value) == shown
    assert four_digits_down(value) <= value + 1e-9


def test_the_gap_adds_up(audits: tuple[Audit, ...]) -> None:
    verdict = audits[SOUND].verdict
    assert verdict is not None
    table = gap_table(verdict)
    assert table is not None
    first, *parts, last = [float(str(row[1]).replace("−", "-")) for row in table.rows]
    assert len(parts) >= 3
    assert first + sum(parts) == pytest.approx(last, abs=0.004)
    played = audits[GAME].verdict
    assert played is not None
    assert gap_table(played) is None  # a game does not explain its gap


# --- the errors -----------------------------------------------------------------------------------------------------


def test_the_region_is_that_of_the_claim_and_the_curve_that_of_the_file(
    sections: tuple[Section, ...], audits: tuple[Audit, ...]
) -> None:
    verdict = audits[SOUND].verdict
    assert verdict is not None
    epsilon, delta = verdict.claim.epsilon, verdict.claim.delta
    rows = data_of(drawn(sections[SOUND], "-tradeoff"))
    whole = [row for row in rows if row["test"] == "the whole run"]
    assert [float(row["false positive rate"]) for row in whole] == list(audits[SOUND].numbers.trade_off.fpr)
    assert [float(row["false negative rate"]) for row in whole] == list(audits[SOUND].numbers.trade_off.fnr)
    for row in whole:
        x = float(row["false positive rate"])
        least = max(0, 1 - delta - math.exp(epsilon) * x, math.exp(-epsilon) * (1 - delta - x))
        assert float(row["least FNR allowed"]) == pytest.approx(least, abs=1e-12)
    roc = [row for row in data_of(drawn(sections[SOUND], "-roc")) if row["test"] == "the whole run"]
    for row, same in zip(roc, whole, strict=True):
        assert float(row["true positive rate"]) == pytest.approx(1 - float(same["false negative rate"]))
        assert float(row["largest TPR allowed"]) == pytest.approx(1 - float(same["least FNR allowed"]))


def test_a_transcript_has_steps_only_and_without_a_claim_nothing_is_shaded(sections: tuple[Section, ...]) -> None:
    tests = {row["test"] for row in data_of(drawn(sections[TRANSCRIPT], "-tradeoff"))}
    assert tests == {"one step, of those that joined"}
    unclaimed = drawn(sections[UNCLAIMED], "-tradeoff")
    assert "nothing is shaded" in unclaimed.caption
    assert {row["least FNR allowed"] for row in data_of(unclaimed)} == {""}
    assert not any(drawing.name.endswith(("-bounds", "-density")) for drawing in sections[UNCLAIMED].drawings)


def test_the_curve_of_the_releases_lies_within_what_is_claimed() -> None:
    claim = runs.the_claim()
    curve = releases_of(claim)
    assert curve is not None
    for x in np.linspace(0, 1, 21):
        edge = max(0.0, 1 - claim.delta - math.exp(claim.epsilon) * x, math.exp(-claim.epsilon) * (1 - claim.delta - x))
        assert curve(float(x)) >= edge - 1e-9


# --- the density ----------------------------------------------------------------------------------------------------


def test_the_density_is_that_of_two_betas_and_has_mass_one() -> None:
    counts = Counts(tp=30, fp=4, tn=36, fn=10)
    x, y, values = density(counts, ((0.0, 1.0), (0.0, 1.0)), 200)
    assert values.mean() == pytest.approx(1, abs=1e-3)

    def log_beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    i, j = 20, 50
    across = 3.5 * math.log(x[i]) + 35.5 * math.log(1 - x[i]) - log_beta(4.5, 36.5)
    along = 9.5 * math.log(y[j]) + 29.5 * math.log(1 - y[j]) - log_beta(10.5, 30.5)
    assert values[j, i] == pytest.approx(math.exp(across + along), rel=1e-9)


def test_the_density_says_how_much_of_it_the_claim_allows() -> None:
    far, near = Claim(8.0, 1e-5), Claim(0.0, 0.0)
    counts = Counts(tp=30, fp=4, tn=36, fn=10)
    for claim, share in ((far, "99"), (near, "0")):
        drawing = density_figure("audit-1", claim, counts)
        assert drawing is not None
        assert re.search(rf" {share}[\d.]*%? of it lies in the shaded region", drawing.caption), drawing.caption
    assert density_figure("audit-1", far, None) is None
    assert density_figure("audit-1", far, Counts(tp=0, fp=1, tn=3, fn=0)) is None


def test_a_perfect_attack_has_a_density_too(sections: tuple[Section, ...]) -> None:
    values = [float(row["density"]) for row in data_of(drawn(sections[PERFECT], "-density"))]
    assert all(math.isfinite(value) and value >= 0 for value in values)


# --- bounds and successes -------------------------------------------------------------------------------------------


def test_successes_are_beside_their_bounds(sections: tuple[Section, ...], audits: tuple[Audit, ...]) -> None:
    table = next(block for block in sections[PERFECT].blocks if isinstance(block, Table) and "allows" in block.title)
    rows = {str(row[0]): [str(cell).replace("\N{NO-BREAK SPACE}", " ") for cell in row[1:]] for row in table.rows}
    epsilon = 0.5
    allowed = (math.expm1(epsilon) + 2e-5) / (math.exp(epsilon) + 1)
    assert rows["membership advantage, TPR − FPR"][:2] == [f"{math.ceil(1000 * allowed) / 10:.1f}%", "100.0%"]
    assert rows["TPR at FPR 1%"][0] == f"{math.ceil(1000 * (math.exp(epsilon) * 0.01 + 1e-5)) / 10:.1f}%"
    assert rows["TPR at FPR 0.1%"][1] == "–"  # too few trials to tell
    names = " ".join(rows)
    assert all(word in names for word in ("accuracy", "attribute", "reconstruction"))


# --- the noisy sum --------------------------------------------------------------------------------------------------


def test_the_three_questions_are_drawn_from_the_rows_of_the_file(audited: Path, sections: tuple[Section, ...]) -> None:
    rows = json.loads((audited / "audit.json").read_text())["audits"][SUM]["numbers"]["rows"]
    for question, ending in (("Q2.1", "-q2-1"), ("Q2.2", "-q2-2"), ("Q2.3", "-q2-3")):
        drawing = drawn(sections[SUM], ending)
        expected = sorted((row for row in rows if row["question"] == question), key=lambda row: row["value"])
        for shown, row in zip(data_of(drawing), expected, strict=True):
            assert float(shown["value"]) == row["value"]
            assert float(shown["ε of the mechanism"]) == row["true_epsilon"]
            for name in ("asked", "corrected", "registered", "valid"):
                assert float(shown[f"{name}, mean"]) == row[name]
                assert float(shown[f"{name}, s.d."]) == row[f"{name}_sd"]
    assert drawn(sections[SUM], "-q2-1").caption.startswith("Canaries m = 100, dimension d = 1,000; δ = 1e-06")
    assert drawn(sections[SUM], "-q2-3").caption.startswith("Budget ε = 16, canaries m = 100; δ")


# --- files that are not as they should be ---------------------------------------------------------------------------


def _spoil(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], str]:
    def spoiled(document: dict[str, Any]) -> str:
        change(document)
        return json.dumps(document)

    return spoiled


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: json.dumps(document)[:-20],
        lambda document: "[]",
        _spoil(lambda d: d["audits"][0].pop("sentence")),
        _spoil(lambda d: d["audits"][0]["verdict"].update(status="fine")),
        _spoil(lambda d: d["audits"][0]["verdict"]["estimates"][0].update(lower=-1)),
        _spoil(lambda d: d["audits"][0]["verdict"]["claim"].update(delta=2)),
        _spoil(lambda d: d["audits"][0]["numbers"]["trade_off"]["fpr"].pop()),
        _spoil(lambda d: d["audits"][0]["numbers"]["counts"].update(tp=-3)),
        _spoil(lambda d: d["audits"][SUM]["numbers"]["rows"][0].pop("valid")),
    ],
)
def test_a_damaged_file_is_one_sentence(spoil: Callable[[dict[str, Any]], str], audited: Path, tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text(spoil(json.loads((audited / "audit.json").read_text())))
    with pytest.raises(RunError, match=r"audit\.json is damaged \(.+\); remove it") as caught:
        read_audit_files(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_a_file_lacks_is_left_out(audited: Path, tmp_path: Path, make_run: Callable[[Path, str], Path]) -> None:
    document = json.loads((audited / "audit.json").read_text())
    document["audits"] = document["audits"][:1]
    for name in ("counts", "counts_guessed", "trade_off", "trade_off_step", "claim"):
        document["audits"][0]["numbers"].pop(name)
    document["audits"][0]["verdict"]["estimates"][0]["lower"] = "inf"  # as the writer has it
    run = make_run(tmp_path / "dp", "dp")
    (run / "audit.json").write_text(json.dumps(document))
    (section,) = audit_pages(read_run_files(run).audits)
    assert [drawing.name for drawing in section.drawings] == ["audit-1-bounds"]
    assert "∞" in drawn(section, "-bounds").alt
