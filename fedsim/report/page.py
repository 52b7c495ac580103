# SPDX-License-Identifier: Apache-2.0
"""The report of a run, or of an audited function: one HTML file that needs nothing else, with its figures beside it."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

import fedsim
from fedsim.audit.results import audit_paths
from fedsim.errors import counted
from fedsim.privacy.claim import PrivacyClaim
from fedsim.report import words
from fedsim.report.attack_answers import NOUNS, graded_total, leak_of, standing_of, tried_by
from fedsim.report.attack_files import total_right
from fedsim.report.audit_files import Audit, read_audit_files
from fedsim.report.audit_pages import audit_facts, audit_pages
from fedsim.report.blocks import Fact, Section
from fedsim.report.figures import INKS
from fedsim.report.privacy_spent import full_claim, no_claim, promises_noise
from fedsim.report.run_files import RunFiles, Spent, read_run_files
from fedsim.report.sections import sections_of
from fedsim.report.standing import (
    LEAKS,
    Leak,
    Standing,
    allowance,
    allowed_by,
    leak_of_games,
    tested_by,
    tested_in_words,
    tone,
)

# The only script: a button that swaps the themes, and the date of printing, which no file of a run may hold: the
# same run must be the same bytes. The page is complete without it.
SCRIPT = """
const button = document.getElementById("theme");
const dark = () => getComputedStyle(document.documentElement).colorScheme === "dark" ||
  (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
button.hidden = false;
button.addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; });
const printed = document.head.appendChild(document.createElement("style"));
addEventListener("beforeprint", () => {
  printed.textContent = `@page { @top-right { content: "printed ${new Date().toISOString().slice(0, 10)}" } }`;
});
"""

MOST_COLUMNS = 9
"""Of a table that fits a printed sheet; of a wider one each row is printed as a list of named cells."""


@dataclass(frozen=True)
class Page:
    """What a report says."""

    name: str
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    question: str = ""
    status: str = ""
    source: str = ""
    """The file that the page is about, and whose hash is on every printed sheet."""
    fingerprint: str = ""
    version: str = fedsim.__version__


def write_report(folder: Path) -> Path:
    """Write `report.html` and `figures/` into a folder, from its files alone; the path of the page.

    The folder is that of a run, or of the audit of a function. The same folder gives the same bytes. A run that is
    still growing gives a report that says so.
    """
    page = _page_of_functions(folder) if holds_only_audits(folder) else page_of(read_run_files(folder))
    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    for section in page.sections:
        for drawing in section.drawings:
            _write(figures / f"{drawing.name}.svg", drawing.standalone)
            _write(figures / f"{drawing.name}.csv", drawing.data.csv)
    path = folder / "report.html"
    _write(path, render(page))
    return path


def holds_only_audits(folder: Path) -> bool:
    """Whether a folder is that of the audit of a function, and of no run."""
    return bool(audit_paths(folder)) and not (folder / "scenario.yaml").exists()


def page_of(run: RunFiles) -> Page:
    """The report of a run."""
    digest = hashlib.sha256(run.scenario_text.encode()).hexdigest()
    name, question = run.scenario.name, run.scenario.question
    state = f"{warning(run)} {status(run)}".strip()
    return Page(name, facts(run), sections_of(run), question, state, "scenario.yaml", digest)


def _page_of_functions(folder: Path) -> Page:
    """The report of a folder of audits; its hash is that of their files, one after the other."""
    paths = audit_paths(folder)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    names = ", ".join(str(path.relative_to(folder)) for path in paths)
    return replace(page_of_audits(read_audit_files(folder)), source=names, fingerprint=digest)


def page_of_audits(audits: Sequence[Audit]) -> Page:
    """The report of functions that were audited."""
    name = ", ".join(dict.fromkeys(audit.target for audit in audits)) or "audit"
    return Page(name, audit_facts(audits), audit_pages(audits), "Does it keep its privacy claim?")


def render(page: Page) -> str:
    """The page as text. Everything from the run is escaped; only our own style, script and SVG are taken as is."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = words.number
    environment.filters["cell"] = words.cell
    environment.filters["epsilon"] = lambda value: value if value is None else words.epsilon(value)
    environment.filters["svg"] = Markup
    here = files("fedsim.report")
    template = environment.from_string(here.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        page=page,
        most_columns=MOST_COLUMNS,
        style=Markup(_inks() + here.joinpath("style.css").read_text(encoding="utf-8") + _sheet(page)),
        script=Markup(SCRIPT),
        script_hash=base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
    )


def facts(run: RunFiles) -> tuple[Fact, ...]:
    """The row at the top: what a reader in a hurry must know, privacy in full."""
    first = (_accuracy(run), _rounds(run), _clients(run), _seen(run))
    leak: Leak = max([leak_of_games(run.audits), *map(leak_of, run.attacks)], key=LEAKS.index)
    return (
        *first,
        *_crafted(run),
        *_reconstructed(run),
        *_claims(run, leak),
        *audit_facts(run.audits, leak, explain=False),
    )


def warning(run: RunFiles) -> str:
    """A sentence when files of the run are damaged, else nothing: what is below may then be wrong."""
    if not run.damage:
        return ""
    shown = ", ".join(run.damage[:5]) + (f" and {len(run.damage) - 5:,} more" if len(run.damage) > 5 else "")
    are = "is" if len(run.damage) == 1 else "are"
    return (
        f"Damaged: {shown} {are} missing, cut short or changed since the run was written, so this page may be wrong."
        " Restore the folder from a backup, or run the scenario again."
    )


def status(run: RunFiles) -> str:
    """A sentence when the run has not ended, else nothing."""
    if run.finished:
        return ""
    if run.rounds_done >= run.scenario.rounds:
        return (
            "All rounds are done, but the final model is not written yet: this is a report of a run that has not ended."
        )
    done = f"{run.rounds_done} of {counted(run.scenario.rounds, 'planned round')}"
    more = ", and more privacy will be spent" if promises_noise(run) else ""
    return f"This run has not ended: {done} are done. Everything below is as it stood then{more}."


def _accuracy(run: RunFiles) -> Fact:
    evaluated = [line for line in run.rounds if line.accuracy is not None]
    if not evaluated:
        return Fact("Test accuracy", "–", "not evaluated yet")
    last = evaluated[-1]
    rows = f", {counted(run.summary.test_rows, 'held-out row')}" if run.summary.test_rows is not None else ""
    return Fact("Test accuracy", f"{last.accuracy:.3f}", f"after round {last.round}{rows}")


def _rounds(run: RunFiles) -> Fact:
    planned = run.scenario.rounds
    name = {"fedavg": "FedAvg", "fedsgd": "FedSGD"}[run.scenario.strategy.name]
    if run.rounds_done < planned:
        return Fact("Rounds", f"{run.rounds_done:,} of {planned:,}", f"{name}, not ended", tone="amber")
    return Fact("Rounds", f"{planned:,}", f"of {name}")


def _clients(run: RunFiles) -> Fact:
    known = run.summary.population or run.scenario.cohort.population
    return Fact("Clients", "–" if known is None else f"{known:,}", words.in_a_round(run))


def _seen(run: RunFiles) -> Fact:
    failures = f"{counted(len(run.failures), 'failure')}" if run.failures else "no failures"
    noun = "sum" if run.scenario.defence.secure_aggregation else "update"
    if run.scenario.strategy.name == "fedsgd" and noun == "update":
        noun = "gradient"
    alone = any(message.clients == 1 for message in run.received)
    how = ("single updates among them" if alone else "no single update") if noun == "sum" else "one by one"
    return Fact("The server saw", counted(len(run.received), noun), f"{how}; {failures}")


def _crafted(run: RunFiles) -> tuple[Fact, ...]:
    """That the server attacked its clients by the weights that it sent, where it did."""
    how = words.crafted(run)
    if not how:
        return ()
    note = (
        f"{how}: this server is active, and not only curious. What is found here says nothing about a server that sends"
        " honest weights."
    )
    return (Fact("The server", "sends crafted weights", note, wide=True, tone="red", anchor="server"),)


def _reconstructed(run: RunFiles) -> tuple[Fact, ...]:
    """What the most successful attack found; what could not be scored is said where nothing else was found."""
    if not run.attacks:
        return ()
    best = max(run.attacks, key=lambda files: (LEAKS.index(leak_of(files)), total_right(files).share))
    anchor, colour = f"attack-{run.attacks.index(best) + 1}", tone(standing_of(best))
    label = f"Can the server rebuild the {NOUNS[best.document.kind]}s?"
    note = tried_by(run.attacks) + (f"; most was found by {best.title}" if len(run.attacks) > 1 else "")
    return (Fact(label, graded_total(best), note, wide=True, tone=colour, anchor=anchor),)


def _claims(run: RunFiles, leak: Leak) -> tuple[Fact, ...]:
    """Each claim, in full; of a run that has not ended, what was spent so far."""
    spent = run.rounds[-1].privacy if run.rounds else ()
    claims: tuple[PrivacyClaim, ...] | tuple[Spent, ...] = run.claims if run.finished else spent
    label = "Privacy claim" if run.finished else f"Privacy spent so far, after round {run.rounds_done}"
    if claims:
        return tuple(_claim(claim, label, run.audits, leak) for claim in claims)
    colour = tone(Standing("anything", leak=leak))
    if promises_noise(run) and not run.finished:
        return (Fact("Privacy claim", "not yet", "nothing has been accounted for yet", wide=True, tone="grey"),)
    head, _, tail = no_claim(run).partition(": ")
    return (Fact("Privacy", head, tail, wide=True, tone=colour),)


def _claim(claim: Spent | PrivacyClaim, label: str, audits: Sequence[Audit], leak: Leak) -> Fact:
    standing = Standing(allowed_by(claim), tested_by(audits, claim), leak)
    if math.isinf(claim.epsilon):
        against = f" against {claim.observer}" if claim.observer else ""
        note = f"for a single {claim.unit}{against}"
        return Fact("Privacy", "no privacy claim", note, wide=True, tone=tone(standing))
    note = f"{full_claim(claim)}. {allowance(claim)}. {tested_in_words(standing)}"
    return Fact(label, f"ε ≤ {words.epsilon(claim.epsilon)}", note, wide=True, tone=tone(standing))


def _inks() -> str:
    """The colours as CSS variables: light for every browser, both themes where light-dark() is known."""
    light = "".join(f"--{name}:{light};" for name, (light, _) in INKS.items())
    both = "".join(f"--{name}:light-dark({light},{dark});" for name, (light, dark) in INKS.items())
    return f":root{{{light}}}\n@supports (color:light-dark(#000,#fff)){{:root{{color-scheme:light dark;{both}}}}}\n"


def _sheet(page: Page) -> str:
    """What stands on the margins of every printed sheet: what it is a report of, by which version, and its number."""
    about = f"fedsim {page.version}"
    if page.fingerprint:
        about += f" · {page.source} sha256 {page.fingerprint[:16]}"
    margins = {
        "top-left": _css_string(f"{page.name} · fedsim report"),
        "bottom-left": _css_string(about),
        "bottom-right": '"page " counter(page) " of " counter(pages)',
    }
    boxes = " ".join(f"@{place} {{ content: {content} }}" for place, content in margins.items())
    return f"@page {{ margin: 18mm 15mm; font: 8pt sans-serif; {boxes} }}\n"


def _css_string(text: str) -> str:
    """A CSS string in which nothing of the text can end the string, or the style."""
    return '"' + "".join(c if c.isalnum() or c in " -_.·" else f"\\{ord(c):x} " for c in text) + '"'


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    temporary.replace(path)
