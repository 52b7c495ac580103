# SPDX-License-Identifier: Apache-2.0
"""The pages of attacks: real scores, both with a truth and without, in pictures, rows and texts."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import attack_runs as runs
import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.attacks.observation import Reconstruction
from fedsim.audit.scores.shares import Share
from fedsim.errors import RunError
from fedsim.report import read_run_files, write_report
from fedsim.report.attack_figures import binned
from fedsim.report.attack_items import MOST_ITEMS, SMALLEST_SIDE, items_of, png_link, shown
from fedsim.report.attack_pages import DEEDS, attack_pages
from fedsim.report.blocks import Pairs, Paragraph, Pictures, Section, Table
from fedsim.scenario.attack import AttackSection

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def page(attacked: Path) -> str:
    return write_report(attacked).read_text()


@pytest.fixture(scope="module")
def sections(attacked: Path) -> tuple[Section, ...]:
    return attack_pages(read_run_files(attacked))


def block(section: Section, kind: type[Any]) -> Any:
    return next(found for found in section.blocks if isinstance(found, kind))


def test_a_page_for_each_attack(page: str, sections: tuple[Section, ...]) -> None:
    titles = ["Attack 1: closed-form", "Attack 2: tabular", "Attack 3: text", "Attack 4: closed-form"]
    assert [section.title for section in sections] == titles
    for title in titles:
        assert f"<h2>{title}</h2>" in page
    for words in ("What the adversary knew", "mlp 64-200-10", "Side by side", "By update"):
        assert words in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_run_without_attacks_has_no_such_page(make_run: Make, tmp_path: Path) -> None:
    assert attack_pages(read_run_files(make_run(tmp_path / "run", "plain", rounds=1))) == ()


def test_the_answer_is_honest(sections: tuple[Section, ...]) -> None:
    answers = [section.blocks[1] for section in sections]
    assert all(isinstance(answer, Paragraph) for answer in answers)
    pictures, rows, texts, deployed = (str(answer) for answer in answers)
    assert "Can the server rebuild the pictures behind 2 updates? Tried: closed-form alone" in pictures
    assert re.search(r"Found: 1[0-5] of 16 pictures recognisable, 1\d near, 1\d exact\.", pictures)
    assert "a stranger's best guess (the mean of 797 public rows) reaches 11." in pictures
    assert "nearer to its original than to any of 804 other pictures" in pictures
    assert re.search(r"(\d+) came with a certificate, and \1 of those are right \(every pixel within half", pictures)
    assert re.search(r"Found: 1?\d of 12 rows recognisable, \d near", rows)
    assert "2 of 4 texts near" in texts
    assert "Whether more is recognisable was not graded" in texts
    assert "no public rows to guess from" in texts
    assert "Nobody here can say whether it worked" in deployed
    assert "7 pictures" in deployed


class Pieces(HTMLParser):
    """Pictures, and what is marked."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.marked: list[str] = []
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.images.append(dict(attrs))
        self.inside = self.inside or tag == "mark"

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "mark"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.marked.append(data)


def test_pictures_lie_in_the_page_at_a_size_to_judge(page: str) -> None:
    images = Pieces(page).images
    assert len(images) == 16 + 14 + 7  # originals and reconstructions of attack 1, reconstructions of attack 4
    for image in images:
        head, _, data = str(image["src"]).partition(",")
        assert head == "data:image/png;base64"
        assert min(Image.open(io.BytesIO(base64.b64decode(data))).size) >= SMALLEST_SIDE
        assert image["alt"]
    assert "img-src data:" in page
    assert page.count("no reconstruction") == 2
    assert page.count('class="badge"') >= 2


def test_pixels_survive(sections: tuple[Section, ...]) -> None:
    x, _ = runs.digits()
    link = png_link(x[0])
    pixels = Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2])))
    values = torch.from_numpy(np.array(pixels))[::12, ::12] / 255  # 8 × 8, each 12 pixels wide
    assert (values - x[0, 0]).abs().max() <= 0.5 / 255 + 1e-6
    exact = [item for item in block(sections[0], Pictures).items if "exact" in item.caption]
    assert exact
    assert all(item.original == item.found for item in exact)
    assert png_link(torch.full((3, 8, 8), torch.nan)).startswith("data:image/png")
    assert png_link(torch.rand(3, 300, 200)).startswith("data:image/png")


def test_wrong_cells_are_marked_and_the_names_are_read(page: str, sections: tuple[Section, ...]) -> None:
    pairs = block(sections[1], Pairs)
    assert pairs.columns[0] == "mean radius"
    assert pairs.columns[-1] == "size"
    for pair in pairs.items:
        share = float(re.search(r"(\d+)% of the cells right", pair.caption).group(1)) / 100  # type: ignore[union-attr]
        assert sum(part.wrong for part in pair.found) == round((1 - share) * 7)
        assert all(not part.wrong for part in pair.original)
        assert all(part.note.endswith("%") for part in pair.found)
    assert "&lt;small&gt;" in page  # a category that looks like HTML
    assert "<small>small" not in page


def test_wrong_tokens_are_marked(page: str, sections: tuple[Section, ...]) -> None:
    pairs = block(sections[2], Pairs)
    assert pairs.columns == ()
    texts = ["".join(part.text for part in pair.original).replace("⏎\n", "\n") for pair in pairs.items]
    assert "".join(sorted(texts)) == "".join(sorted(runs.TEXT[i : i + 10] for i in range(0, 40, 10)))
    assert [sum(part.wrong for part in pair.found or ()) for pair in pairs.items] == [0, 0, 2, 0]
    assert "not found" in pairs.items[-1].caption
    assert len(Pieces(page).marked) == 2 + sum(p.wrong for pair in block(sections[1], Pairs).items for p in pair.found)


def test_the_surest_come_first_and_both_ends_are_shown(attacked: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(attacked, run)
    x, y = runs.digits()
    sure = torch.linspace(1, 0, 40)
    result = Reconstruction("auto", x[:40], None, 0.0, sure)
    runs.write_attack(run, 5, [(result, x[:60], y[:60])], runs.pictures())
    files = read_run_files(run).attacks[4]
    items, note = shown(items_of(files))
    assert len(items) == MOST_ITEMS
    assert f"{MOST_ITEMS} of 60 are shown" in note
    assert [item.order for item in items[:12]] == pytest.approx(sure[:12].tolist())
    assert all(item.found is None for item in items[-12:])  # not found at all


def test_what_was_not_calibrated_shows_no_number_that_looks_like_a_probability(
    sections: tuple[Section, ...], page: str
) -> None:
    pictures, rows, texts = block(sections[0], Pictures).items, block(sections[1], Pairs), block(sections[2], Pairs)
    for item in (*pictures, *rows.items, *texts.items):
        assert not re.search(r"sure|score|at least|confidence", item.caption)
    for section, calibrated in zip(sections, (False, True, False, False), strict=True):
        meaning = next(b.text for b in section.blocks if isinstance(b, Paragraph) and "probability" in b.text)
        assert ("was not calibrated here" in meaning) != calibrated
        assert ("lower bound of the probability that the cell is right" in meaning) == calibrated
        table = next(b for b in section.blocks if isinstance(b, Table) and b.title == "By update")
        assert ("mean confidence" in table.columns) == calibrated
    assert "mean score" not in page


def test_a_calibrated_image_shows_its_lower_bound_rounded_down(attacked: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(attacked, run)
    x, y = runs.digits()
    sure = torch.tensor([0.6999, 0.29])
    result = Reconstruction("auto", x[:2], None, 0.0, sure.clone(), confidence=sure, event="the image is near")
    runs.write_attack(run, 5, [(result, x[:2], y[:2])], runs.pictures())
    section = attack_pages(read_run_files(run))[-1]
    shown_rates = [re.findall(r"at least (\d+)% sure", item.caption) for item in block(section, Pictures).items]
    assert shown_rates == [["69"], ["28"]]
    assert "lower bound of the probability that the image is near" in str(section.blocks)


def test_confidences_of_an_older_run_are_not_shown(attacked: Path, tmp_path: Path) -> None:
    """Before they were calibrated, every attack wrote a number between 0 and 1 under the name of a confidence."""
    run = tmp_path / "run"
    shutil.copytree(attacked, run)
    x, y = runs.digits()
    old = Reconstruction(
        "gradient-matching", x[:2], None, 0.0, torch.tensor([0.1, 0.97]), confidence=torch.full((2,), 0.97)
    )
    runs.write_attack(run, 5, [(old, x[:2], y[:2])], runs.pictures())
    section = attack_pages(read_run_files(run))[-1]
    assert not re.search(r"97|0\.97", str([item.caption for item in block(section, Pictures).items]))
    assert not [drawing for drawing in section.drawings if "reliability" in drawing.name]


def test_every_attack_has_a_deed() -> None:
    (union,) = {part for part in get_args(AttackSection) if get_args(part)} or {AttackSection}
    names = {get_args(part.model_fields["name"].annotation)[0] for part in get_args(union)}
    assert "fedavg" in names
    assert names == set(DEEDS)


def test_labels_alone(attacked: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(attacked, run)
    (run / "summary.json").write_text("{}")
    x, y = runs.digits()
    counts = torch.bincount(y[:8], minlength=10)
    counts[0] += 1
    counts[7] -= 1
    result = Reconstruction("labels", x[:0], None, float("nan"), torch.zeros(0), label_counts=counts)
    runs.write_attack(run, 5, [(result, x[:8], y[:8])], runs.pictures(), prior=x[1000:])
    path = run / "attacks" / "005-labels.json"
    document = json.loads(path.read_text())
    document["observations"][0] |= {"label_counts": counts.tolist(), "loss": None}
    path.write_text(json.dumps(document))
    section = attack_pages(read_run_files(run))[-1]
    assert "It counts labels only, and 88% of the labels of 8 pictures" in str(section.blocks[1])
    by_update, labels = (block for block in section.blocks if isinstance(block, Table))
    assert by_update.columns == ("update", "originals", "labels right")  # nothing else was looked for
    assert labels.columns[1] == "class 0"
    assert [cell for cell in labels.rows[0] if "really" in str(cell)] == ["2, really 1", "0, really 1"]


def test_the_table_by_update(sections: tuple[Section, ...]) -> None:
    table: Table = block(sections[0], Table)
    assert table.columns[:6] == ("update", "originals", "found", "recognisable", "near", "exact")
    assert "mean PSNR, dB" in table.columns
    assert [row[0] for row in table.rows] == ["round 1, client 0", "round 1, client 1", "a stranger's guess"]
    assert all(row[1:3] == (8, 7) for row in table.rows[:2])
    psnr = table.columns.index("mean PSNR, dB")
    assert all(float(row[psnr] or 0) > 90 for row in table.rows[:2])
    assert float(table.rows[2][psnr] or 0) < 12
    assert "labels right" not in table.columns  # nobody looked for them


def test_claim_and_success_side_by_side(page: str, sections: tuple[Section, ...]) -> None:
    (bound,) = [drawing for drawing in sections[0].drawings if drawing.name == "attack-1-bound"]
    assert "allowed" in bound.data.columns
    assert len(bound.data.rows) == 6
    copies = next(row for row in bound.data.rows if "an exact copy of an example" in str(row[0]))
    allowed, measured, verdict = copies[2], copies[3], copies[-1]
    assert isinstance(allowed, float)
    assert isinstance(measured, float)
    assert allowed < 0.2 < measured
    assert verdict == "inconclusive"  # two updates, and examples of one succeed and fail together
    assert "attack more updates of other clients" in page
    assert not [drawing for section in sections[1:] for drawing in section.drawings if "bound" in drawing.name]


def test_reliability(sections: tuple[Section, ...]) -> None:
    assert binned([(0.95, True), (0.97, False), (0.05, False), (1.0, True)]) == [
        (0.05, Share(0, 1)),
        (pytest.approx((0.95 + 0.97 + 1.0) / 3), Share(2, 3)),
    ]
    names = [drawing.name for section in sections for drawing in section.drawings]
    assert [name for name in names if "reliability" in name] == ["attack-2-reliability"]
    table = next(drawing for drawing in sections[1].drawings).data
    assert sum(int(row[-1] or 0) for row in table.rows if str(row[0]).startswith("cells")) == 2 * 6 * 7
    assert not [row for row in table.rows if str(row[0]).startswith("rows")]


def test_header_tells_the_most_successful_attack(page: str) -> None:
    head = page.partition("</header>")[0]
    assert re.search(r"<strong>1\d of 16 pictures recognisable, 1\d near, 1\d exact</strong>", head)
    assert "tried: closed-form, tabular, text" in head


def test_no_epsilon_without_delta_and_unit(sections: tuple[Section, ...]) -> None:
    texts = [text for section in sections for block in section.blocks for text in re.split(r"', '|\n", str(block))]
    assert all("δ" in text and re.search(r"client|example", text) for text in texts if "ε ≤" in text)


def test_same_folder_same_bytes(attacked: Path, page: str, tmp_path: Path) -> None:
    shutil.copytree(attacked, tmp_path / "copy")
    assert write_report(tmp_path / "copy").read_text() == page


def test_an_attack_that_could_not_be_played(attacked: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(attacked, run)
    update = {
        "round": 1,
        "client": None,
        "key": "round-1/sum",
        "error": "exact needs a linear first layer; this is a cnn",
    }
    document = {"attack": "exact", "kind": "image", "observations": [update]}
    (run / "attacks" / "005-exact.json").write_text(json.dumps(document))
    section = attack_pages(read_run_files(run))[-1]
    assert "It could not be played: exact needs a linear first layer; this is a cnn." in str(section.blocks[1])
    assert "round 1, the sum" in str(section.blocks)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("001-closed-form.json", b"{"),
        ("001-closed-form.json", b'{"attack": "exact", "kind": "sound"}'),
        ("001-closed-form.safetensors", b"\0" * 20),
        ("002-tabular.json", b'{"attack": "tabular", "kind": "table", "columns": [{"name": "x"}]}'),
    ],
)
def test_damaged_files_are_told_in_one_sentence(attacked: Path, tmp_path: Path, name: str, content: bytes) -> None:
    run = tmp_path / "run"
    shutil.copytree(attacked, run)
    (run / "attacks" / name).write_bytes(content)
    with pytest.raises(RunError, match=r"is damaged .*; play the attack again with `fedsim attack`$"):
        attack_pages(read_run_files(run))
