# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser: it loads from a file, asks for nothing, complains about nothing, and fits the screen.

A headless Chromium is spoken to over its debugging pipe: no driver, no port, no package.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import select
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch

import fedsim
from fedsim.report import write_report
from fedsim.report.attack_items import png_link
from fedsim.report.blocks import Block, Pair, Pairs, Paragraph, Part, Picture, Pictures, Section, Table
from fedsim.report.page import Page, render

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: apt-get install chromium"),
]
LOOKS = [(1280, False), (1280, True), (420, False), (420, True)]
VARIANTS = ("dp", "plain", "secure", "unfinished")


class Browser:
    """One page. `requests` and `complaints` collect what it asked for and what it complained about."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.profile = tempfile.TemporaryDirectory(prefix="fedsim-chromium-", ignore_cleanup_errors=True)
        read_commands, self.write = os.pipe()
        self.read, write_answers = os.pipe()
        # Chromium reads commands on descriptor 3 and answers on 4.
        command = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", command, CHROMIUM, *FLAGS, f"--user-data-dir={self.profile.name}"],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self.buffer, self.number = b"", 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        os.close(self.read)
        os.close(self.write)
        self.profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.number += 1
        number = self.number
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, page: Path, *, width: int, dark: bool) -> None:
        """Load a file at a width in CSS pixels, light or dark, and wait until it is loaded."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.requests.clear()
        self.complaints.clear()
        self.call("Page.navigate", url=page.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """The whole page as PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(answer["data"]))

    def print(self, file: Path) -> None:
        """The page as PDF, as a reader would print it."""
        answer = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)
        file.write_bytes(base64.b64decode(answer["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            assert select.select([self.read], [], [], 60)[0], "Chromium does not answer"
            part = os.read(self.read, 1 << 20)
            assert part, "Chromium ended"
            self.buffer += part
        head, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(head)
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        return message


@pytest.fixture(scope="module")
def pages(report_of: Callable[[str], Path]) -> dict[str, Path]:
    return {variant: report_of(variant) for variant in VARIANTS}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_loads_alone_and_fits(browser: Browser, pages: dict[str, Path], variant: str, width: int, dark: bool) -> None:
    page = pages[variant]
    browser.open(page, width=width, dark=dark)
    assert browser.evaluate("[...document.querySelectorAll('section')].map(s => s.id)") == [
        "what-ran",
        "learning",
        "partition",
        "privacy",
        "server",
    ]
    for opened in (False, True):  # with everything folded, and with everything unfolded
        browser.evaluate(f"document.querySelectorAll('details').forEach(d => d.open = {str(opened).lower()})")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(OVERFLOWING) == []
    assert browser.requests == [page.as_uri()]
    assert browser.complaints == []


# Elements that stick out of the page and are not inside a box that scrolls, nor of a drawing, which clips them.
OVERFLOWING = """[...document.querySelectorAll('body *')]
  .filter(e => !e.parentElement.closest('.scroll') && !e.ownerSVGElement)
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.tagName + '.' + e.className)"""

# Text of figures that sticks out of its SVG.
CLIPPED = """[...document.querySelectorAll('figure svg')].filter(s => s.clientWidth).flatMap(s => {
  const box = s.getBoundingClientRect();
  return [...s.querySelectorAll('text')].filter(t => {
    const r = t.getBoundingClientRect();
    return r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1;
  }).map(t => t.textContent);
})"""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("width", [1280, 420])
def test_no_label_is_clipped(browser: Browser, pages: dict[str, Path], variant: str, width: int) -> None:
    browser.open(pages[variant], width=width, dark=False)
    assert browser.evaluate("document.querySelectorAll('figure svg text').length") > 20
    assert browser.evaluate(CLIPPED) == []


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_attack_pages_fit(browser: Browser, attacked: Path, width: int, dark: bool) -> None:
    page = attacked / "report.html"
    if not page.is_file():
        write_report(attacked)
    browser.open(page, width=width, dark=dark)
    assert browser.evaluate("document.querySelectorAll('section[id^=\"attack-\"]').length") == 4
    sizes = browser.evaluate("[...document.querySelectorAll('.frame img')].map(i => [i.naturalWidth, i.clientWidth])")
    assert len(sizes) > 30
    assert all(natural >= 96 and drawn >= 96 for natural, drawn in sizes)
    for opened in (False, True):
        browser.evaluate(f"document.querySelectorAll('details').forEach(d => d.open = {str(opened).lower()})")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(OVERFLOWING) == []
    assert browser.evaluate(CLIPPED) == []
    assert [request for request in browser.requests if not request.startswith("data:image/png")] == [page.as_uri()]
    assert browser.complaints == []


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_audit_pages_fit(browser: Browser, audit_report: Path, width: int, dark: bool) -> None:
    browser.open(audit_report, width=width, dark=dark)
    assert browser.evaluate("document.querySelectorAll('section[id^=audit]').length") == 3
    for opened in (False, True):
        browser.evaluate(f"document.querySelectorAll('details').forEach(d => d.open = {str(opened).lower()})")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(OVERFLOWING) == []
    assert browser.evaluate(CLIPPED) == []
    text, marks = browser.evaluate(CONTRAST)
    assert text >= 7
    assert marks >= 3
    assert browser.requests == [audit_report.as_uri()]
    assert browser.complaints == []


# Contrast (WCAG) of everything that is drawn or written in a figure against the figure's background.
CONTRAST = """(() => {
  const channels = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255);
  const light = c => channels(c).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = light(getComputedStyle(document.querySelector('figure')).backgroundColor);
  const ratio = c => (Math.max(light(c), paper) + 0.05) / (Math.min(light(c), paper) + 0.05);
  const least = (selector, property) => Math.min(...[...document.querySelectorAll(selector)]
    .map(e => getComputedStyle(e)[property]).filter(c => c.startsWith('rgb(')).map(ratio));
  return [least('figure svg text', 'fill'), least('figure svg use', 'fill')];
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_figures_are_readable_on_either_theme(browser: Browser, pages: dict[str, Path], dark: bool) -> None:
    browser.open(pages["dp"], width=1280, dark=dark)
    text, marks = browser.evaluate(CONTRAST)
    assert text >= 7
    assert marks >= 3


def test_theme_button(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["plain"], width=1280, dark=False)
    colour = "getComputedStyle(document.documentElement).backgroundColor"
    light = browser.evaluate(colour)
    browser.evaluate("document.getElementById('theme').click()")
    dark = browser.evaluate(colour)
    browser.evaluate("document.getElementById('theme').click()")
    assert dark != light
    assert browser.evaluate(colour) == light
    browser.open(pages["plain"], width=1280, dark=True)
    assert browser.evaluate(colour) == dark
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(colour) == light


def wide_page(folder: Path) -> Path:
    """Tables and rows of 30 columns, forty pictures and a long sentence without a space."""
    columns = tuple(f"a column of data {number}" for number in range(30))
    parts = tuple(Part(f"{number}.123456", wrong=number % 7 == 0, note="97%") for number in range(30))
    dot = png_link(torch.zeros(1, 4, 4))
    pictures = tuple(
        Picture(dot, dot, f"round 1, client {number}, 150 dB", "a dot", True, True) for number in range(40)
    )
    blocks: tuple[Block, ...] = (
        Table("Wide", ("row", *columns), tuple((f"row {row}", *(row + 0.123456,) * 30) for row in range(60))),
        Table("Ten", columns[:10], tuple((f"row {row}", *(row + 0.123456,) * 9) for row in range(60))),
        Pairs("Side by side", columns, (Pair(parts, parts, "round 1, client 0, exact", certified=True),) * 20),
        Pictures("Pictures", pictures, "All are shown."),
        Paragraph("x" * 400, "red"),
    )
    path = folder / "wide.html"
    path.write_text(render(Page('a "name" </style>', (), (Section("wide", "Wide", blocks),), fingerprint="0" * 64)))
    return path


def test_nothing_is_cut_off_or_overlaps_on_paper(
    browser: Browser, attacked: Path, audit_report: Path, tmp_path: Path
) -> None:
    page = attacked / "report.html"
    if not page.is_file():
        write_report(attacked)
    for path in (wide_page(tmp_path), page, audit_report):
        browser.open(path, width=680, dark=False)  # A4 without its margins
        browser.call("Emulation.setEmulatedMedia", media="print")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 680
        assert browser.evaluate(OFF_PAPER) == []
        # Chromium lays a grid that is cut between two sheets over what follows it.
        assert browser.evaluate(GRIDS) == []
        browser.call("Emulation.setEmulatedMedia", media="")


OFF_PAPER = """[...document.querySelectorAll('body *')].filter(e => !e.ownerSVGElement && e.offsetParent)
  .filter(e => e.getBoundingClientRect().right > 681).map(e => e.tagName + '.' + e.className)"""
GRIDS = """[...document.querySelectorAll('section, .gallery, .gallery ol, figure')]
  .filter(e => getComputedStyle(e).display.includes('grid')).map(e => e.tagName + '.' + e.className)"""


def test_every_sheet_names_the_run_the_version_the_hash_and_its_number(
    browser: Browser, pages: dict[str, Path]
) -> None:
    page = pages["dp"]
    browser.open(page, width=1280, dark=False)
    margins = (
        "[...document.styleSheets].flatMap(s => [...s.cssRules]).filter(r => r.type === 6).map(r => r.cssText).join()"
    )
    sheet = browser.evaluate(margins)
    digest = hashlib.sha256((page.parent / "scenario.yaml").read_bytes()).hexdigest()
    for part in (f"fedsim {fedsim.__version__}", digest[:16], "counter(page)", "counter(pages)", "dp-fedavg-clients"):
        assert part in sheet
    assert digest in page.read_text()
    assert "printed" not in sheet  # no file of a run knows the date
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert re.search(r"printed 20\d\d-\d\d-\d\d", browser.evaluate(margins))
    assert browser.complaints == []


def test_prints(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    browser.open(pages["dp"], width=1280, dark=True)
    browser.print(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF-")
