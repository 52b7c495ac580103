# SPDX-License-Identifier: Apache-2.0
"""Numbers for people, tables for programs, and the one statistic that the report computes itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.report import Table, read_run_files, words
from fedsim.report.figures import INKS, make_drawing
from fedsim.report.run_files import PartitionPicture
from fedsim.report.sections import _skew
from fedsim.report.server_view import participation


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (1_000_000, "1,000,000"),
        (0.93124, "0.9312"),
        (1e-5, "1e-05"),
        (3.0, "3"),
        (float("nan"), "not a number"),
        (float("inf"), "∞"),
        (float("-inf"), "−∞"),
        ("text", "text"),
    ],
)
def test_number(value: str | float | None, shown: str) -> None:
    assert words.number(value) == shown


@given(st.floats(min_value=1e-9, max_value=1e6))
def test_epsilon_is_never_shown_smaller_than_it_is(value: float) -> None:
    shown = float(words.epsilon(value))
    assert shown >= value * (1 - 1e-6) - 1e-9
    assert shown <= value * 1.01 + 1e-3


@pytest.mark.parametrize(("value", "shown"), [(2.3141, "2.315"), (2.0, "2.000"), (0.01234, "0.0124"), (0.0, "0")])
def test_epsilon_rounds_up(value: float, shown: str) -> None:
    assert words.epsilon(value) == shown


@pytest.mark.parametrize(("amount", "shown"), [(1, "1 byte"), (999, "999 bytes"), (4_071_000, "4.1 MB")])
def test_size(amount: int, shown: str) -> None:
    assert words.size(amount) == shown


def test_csv_keeps_precision_and_disarms_formulas() -> None:
    table = Table("t", ("=cmd", "value"), (("-1+1", 0.1 + 0.2), ("plain, quoted", None)))
    assert table.csv == "'=cmd,value\n'-1+1,0.30000000000000004\n\"plain, quoted\",\n"
    assert table.numeric == (False, True)


def test_long_tables_are_thinned_and_keep_their_ends() -> None:
    table = Table("t", ("n",), tuple((n,) for n in range(1001)))
    shown = table.shown(40)
    assert len(shown) <= 41
    assert (shown[0], shown[-1]) == ((0,), (1000,))
    assert Table("t", ("n",), ()).shown() == ()


def test_skew_by_hand() -> None:
    # Shares (1, 0) and (0, 1) against (1/2, 1/2): each at total variation distance 1/2.
    apart = PartitionPicture(clients=(0, 1), counts=((4, 0), (0, 4)), sizes=(4, 4))
    alike = PartitionPicture(clients=(0, 1), counts=((4, 2), (2, 1)), sizes=(6, 3))
    assert _skew(apart) == pytest.approx(0.5)
    assert _skew(alike) == pytest.approx(0.0)
    assert _skew(PartitionPicture(clients=(0,), counts=((0, 0),), sizes=(0,))) == 0.0


def test_participation_agrees_with_and_without_cohorts(dp_run: Path) -> None:
    run = read_run_files(dp_run)
    with_cohorts = participation(run)
    (dp_run / "summary.json").unlink()
    assert participation(read_run_files(dp_run)) == with_cohorts
    assert sum(not ok for rounds in with_cohorts.values() for ok in rounds.values()) == 1


def test_scenario_in_words(make_run: Callable[..., Path], tmp_path: Path) -> None:
    told = dict(words.describe(read_run_files(make_run(tmp_path / "run", "dp"))))
    assert told["Cohort"] == "20 clients; 10 in a round; 10 rounds"
    assert "Dirichlet(0.3)" in told["Partition"]
    assert "uniformly" in told["Strategy"]  # client-level privacy needs it
    assert "clipped to L2 norm 0.8, with noise multiplier 1.1 (Gaussian)" in told["Defence"]
    target = {"example_dp": {"target_epsilon": 3.0}}
    told = dict(words.describe(read_run_files(make_run(tmp_path / "other", "plain", defence=target))))
    assert "ε at most 3.000 at δ = 1e-05 per example" in told["Defence"]


def test_drawing_follows_the_theme_and_its_file_does_not_need_the_page() -> None:
    table = Table("t", ("x",), ((1,),))
    drawing = make_drawing(
        "d",
        "T & t",
        "",
        "an <alt>",
        table,
        lambda figure, _: figure.subplots().plot([1, 2]) and None,
        height=200,
        narrow_height=200,
    )
    light = INKS["ink"][0]
    assert "var(--ink)" in drawing.wide
    assert light not in drawing.wide
    assert light in drawing.standalone
    assert "var(" not in drawing.standalone
    assert ElementTree.fromstring(drawing.wide).attrib["aria-label"] == "an <alt>"
    assert 'id="d-wide-' in drawing.wide
    assert 'id="d-narrow-' in drawing.narrow
