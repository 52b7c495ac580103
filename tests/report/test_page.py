# SPDX-License-Identifier: Apache-2.0
"""The page as text: complete, escaped, the same bytes each time, nothing loaded, no ε without its δ and unit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedsim.report import read_run_files, write_report
from fedsim.report.page import page_of, render
from fedsim.report.privacy_spent import spent_lines
from fedsim.report.sections import learning

Make = Callable[..., Path]
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}"


class Blocks(HTMLParser):
    """Collects links, ids, and the text of each innermost block."""

    BLOCKS = frozenset({"p", "li", "tr", "h1", "h2", "h3", "figcaption", "caption", "text", "summary", "div", "pre"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.open: list[list[str]] = [[]]
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "srcset", "action", "data", "poster", "xlink:href"):
                self.links.append(value or "")
            elif name == "id":
                self.ids.append(value or "")
            elif name in ("aria-label", "title", "alt"):
                self.texts.append(value or "")
        if tag in self.BLOCKS:
            self.open.append([])

    def handle_endtag(self, tag: str) -> None:
        if tag in self.BLOCKS:
            self.texts.append("".join(self.open.pop()))

    def handle_data(self, data: str) -> None:
        self.open[-1].append(data)


def header(run: Path) -> str:
    """The page without its sections, which take their time to draw."""
    return render(page_of(read_run_files(run))).replace("\N{NO-BREAK SPACE}", " ").partition("</header>")[0]


def test_every_variant_has_every_section(any_report: Path) -> None:
    text = any_report.read_text()
    for title in ("What ran", "Learning", "The partition", "Privacy spent", "The server&#39;s view"):
        assert f"<h2>{title}</h2>" in text
    assert "Undefined" not in text
    assert "None" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
    ids = Blocks(text).ids
    assert len(ids) == len(set(ids))


def test_nothing_is_loaded(any_report: Path) -> None:
    text = any_report.read_text()
    blocks = Blocks(text)
    assert blocks.links
    assert all(link.startswith(("#", "data:text/csv;")) for link in blocks.links)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(blocks.tags)
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert set(re.findall(r"url\(['\"]?(.)", text)) <= {"#"}
    assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_no_epsilon_without_delta_and_unit(any_report: Path) -> None:
    texts = [text for text in Blocks(any_report.read_text()).texts if "ε" in text]
    assert all("δ" in text and re.search(r"unit|client|example", text) for text in texts), texts
    claims = json.loads((any_report.parent / "claims.json").read_text())
    assert bool(texts) == bool(claims)


@pytest.mark.parametrize("variant", ["dp", "long"])
def test_same_folder_same_bytes(report_of: Callable[[str], Path], tmp_path: Path, variant: str) -> None:
    run = report_of(variant).parent
    copy = tmp_path / "elsewhere"
    shutil.copytree(run, copy)
    written = {file.relative_to(run): file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert write_report(copy) == copy / "report.html"  # a second report, which does not see the first
    assert {file.relative_to(copy): file.read_bytes() for file in copy.rglob("*") if file.is_file()} == written
    assert str(run.parent).encode() not in written[Path("report.html")]


def test_figures_are_wellformed_named_and_explained(any_report: Path) -> None:
    text = any_report.read_text()
    drawn = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(drawn) >= 8  # each wide and narrow
    for svg in drawn:
        root = ElementTree.fromstring(svg)
        assert root.attrib["role"] == "img"
        assert len(root.attrib["aria-label"]) > 20
        assert not re.search(r"#[0-9a-f]{6}", svg), "an ink that does not follow the theme"
        assert list(root.iter("{http://www.w3.org/2000/svg}text")), "text must stay text"
    for figure in re.findall(r"<figure.*?</figure>", text, flags=re.DOTALL):
        assert all(part in figure for part in ("<h3>", "<figcaption>", "<details", "<table", ".csv"))
    files = {file.name for file in (any_report.parent / "figures").iterdir()}
    assert {name.replace(".svg", ".csv") for name in files if name.endswith(".svg")} <= files
    for file in (any_report.parent / "figures").glob("*.svg"):
        assert ElementTree.parse(file).getroot().find("{http://www.w3.org/2000/svg}title") is not None


def test_untrusted_text_is_escaped(make_run: Make, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "dp", question=EVIL)
    summary = json.loads((run / "summary.json").read_text())
    summary |= {
        "model_text": f"</code></pre>{EVIL}",
        "notes": [f"a note {EVIL}"],
        "class_names": [EVIL, "$\\frac{", "]]>", "=1+1", *"456789"],
    }
    summary["notes"] = [f"to know: {EVIL}"]
    (run / "summary.json").write_text(json.dumps(summary))
    messages = run / "transcript" / "messages.jsonl"
    failure = {"round": 1, "direction": "received", "kind": "error", "client": 1, "reason": EVIL}
    messages.write_text(messages.read_text() + json.dumps(failure) + "\n")
    claims = json.loads((run / "claims.json").read_text())
    (run / "claims.json").write_text(
        json.dumps([claim | {"observer": EVIL, "assumptions": [EVIL]} for claim in claims])
    )
    text = write_report(run).read_text()
    blocks = Blocks(text)
    assert blocks.tags.count("script") == 1
    assert "img" not in blocks.tags
    assert "&lt;script&gt;alert(1)" in text
    assert "{{ 7*7 }}" in text
    assert any("to know:" in shown for shown in blocks.texts)
    assert any("$\\frac{" in shown for shown in blocks.texts)
    csv = (run / "figures" / "partition.csv").read_text()
    assert "class =1+1" in csv.splitlines()[0]


@pytest.mark.parametrize(
    ("defence", "words"),
    [
        ({}, "the server sees every update as it is"),
        ({"secure_aggregation": True}, "the server sees the sum of each round&#39;s updates as it is"),
        ({"compression": "sign"}, "compressed"),
        ({"client_dp": {"noise_multiplier": 0}}, "clipping without noise supports none"),
    ],
)
def test_no_claim_is_said_plainly(make_run: Make, tmp_path: Path, defence: dict[str, object], words: str) -> None:
    run = make_run(tmp_path / "run", "plain", defence=defence, rounds=1)
    (run / "claims.json").write_text("[]")
    metrics = [json.loads(line) | {"privacy": []} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    text = header(run)
    assert "no privacy claim" in text
    assert words in text
    assert "ε" not in text


def test_header_states_the_claim_in_full(dp_run: Path) -> None:
    text = header(dp_run)
    assert "ε ≤ 3.905" in text  # 1.234567 * sqrt(10) = 3.90404, rounded up
    assert "δ = 1e-05, per client, add/remove adjacency, observed by the server and whoever" in text
    assert "δ = 1e-05, per example, add/remove adjacency, observed by the server. This allows" in text


def test_an_active_server_opens_the_page(make_run: Make, tmp_path: Path) -> None:
    adversary = {"active": {"kind": "imprint", "rounds": [1, 2], "clients": [3]}}
    changes = {"model": {"name": "mlp", "hidden": [64]}, "strategy": {"name": "fedsgd"}, "adversary": adversary}
    run = make_run(tmp_path / "run", "plain", rounds=3, **changes)
    text = header(run)
    crafted = text.index("sends crafted weights")
    assert 'tone-red"><dt>The server</dt>' in text
    assert "in rounds 1, 2 to client 3, made to leak what a client trains on (imprint)" in text
    assert crafted < text.index("no privacy claim")
    assert "The server sent crafted weights" in render(page_of(read_run_files(run))).partition("</header>")[2]
    assert "crafted" not in header(make_run(tmp_path / "honest", "plain", rounds=1))


def test_infinite_epsilon_is_no_claim(dp_run: Path) -> None:
    claims = json.loads((dp_run / "claims.json").read_text())
    (dp_run / "claims.json").write_text(json.dumps([claims[0] | {"epsilon": "inf"}, claims[1]]))
    metrics = (dp_run / "metrics.jsonl").read_text().splitlines()
    for number, line in enumerate(metrics):
        content = json.loads(line)
        content["privacy"][0]["epsilon"] = "inf" if number % 2 else float("inf")  # both ways to write it in JSON
        metrics[number] = json.dumps(content)
    (dp_run / "metrics.jsonl").write_text("\n".join(metrics) + "\n")
    text = header(dp_run)
    assert "no privacy claim" in text
    assert "∞" not in text
    assert [key[1] for key in spent_lines(read_run_files(dp_run))] == ["example"]


def test_divergence_is_told(make_run: Make, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "plain", rounds=2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[-1] |= {"loss": float("nan"), "train_loss": float("inf"), "accuracy": 0.1}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = learning(read_run_files(run))
    assert section is not None
    assert "the training diverged" in str(section.blocks[0])


def test_a_training_loss_that_nobody_reports_is_not_in_the_legend(make_run: Make, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "plain", rounds=2)
    lines = [json.loads(line) | {"train_loss": None} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = learning(read_run_files(run))
    assert section is not None
    (drawing,) = section.drawings
    assert "test loss" in drawing.wide
    assert "training loss" not in drawing.wide
    assert "no client reported its training loss" in drawing.caption


def test_large_population_shows_counts_and_sums_only(report_of: Callable[[str], Path]) -> None:
    page = report_of("secure")
    text = page.read_text()
    assert "How often clients took part" in text
    assert "any single update: secure aggregation" in text
    assert "10 sums of a round&#39;s updates" in text
    rows = dict(
        line.split(",") for line in (page.parent / "figures" / "participation.csv").read_text().splitlines()[1:]
    )
    assert sum(int(clients) for clients in rows.values()) == 1_000_000
    assert sum(int(times) * int(clients) for times, clients in rows.items()) == 10 * 50


def test_failure_and_its_reason(report_of: Callable[[str], Path]) -> None:
    page = report_of("dp")
    assert "the update holds values that are not numbers" in page.read_text()
    outcomes = (page.parent / "figures" / "participation.csv").read_text()
    assert outcomes.count("failed") == 1
    assert outcomes.count("took part") == 99


def test_long_runs_stay_small(report_of: Callable[[str], Path]) -> None:
    page = report_of("long")
    assert page.stat().st_size < 1_000_000
    assert "41 of 400 rounds are shown" in page.read_text()
