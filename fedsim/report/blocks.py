# SPDX-License-Identifier: Apache-2.0
"""What a page is made of: sections, and the blocks within them. Plain frozen data; `page.html` knows how each looks."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal
from urllib.parse import quote

Tone = Literal["green", "grey", "amber", "red"]
Cell = str | int | float | None
EMBEDDED_CSV = (
    200_000  # characters of data that a page carries with a figure; what is longer lies beside it in figures/
)
SHOWN_ROWS = 200  # rows of a figure's data that are shown as a table


@dataclass(frozen=True)
class Paragraph:
    """A few sentences. A warning is something that the reader must not overlook."""

    kind: ClassVar = "paragraph"
    text: str
    tone: Literal["plain", "note", "warning"] | Tone = "plain"


@dataclass(frozen=True)
class Bullets:
    """Short statements under a heading."""

    kind: ClassVar = "bullets"
    title: str
    items: tuple[str, ...]


@dataclass(frozen=True)
class Fact:
    """One figure of the row at the top. `wide` takes the whole row: a claim that needs its full wording.

    `tone` is the colour, by `standing.tone`; None: it is about nothing that was claimed or tested. `anchor` is the
    section that says more.
    """

    label: str
    value: str
    note: str = ""
    wide: bool = False
    tone: Tone | None = None
    anchor: str = ""


@dataclass(frozen=True)
class Definitions:
    """Terms and what they mean here."""

    kind: ClassVar = "definitions"
    items: tuple[tuple[str, str], ...]
    title: str = ""


@dataclass(frozen=True)
class Source:
    """A file of the run, word for word, folded away."""

    kind: ClassVar = "source"
    title: str
    text: str


@dataclass(frozen=True)
class Table:
    """Rows under named columns. The first column names the row. Privacy is shown rounded up, never down.

    `folded`: shown when somebody asks for it.
    """

    kind: ClassVar = "table"
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    round_up: bool = False
    folded: bool = False

    @cached_property
    def csv(self) -> str:
        """The table as CSV, numbers in full precision."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([_harmless(column) for column in self.columns])
        writer.writerows([_harmless(cell) for cell in row] for row in self.rows)
        return text.getvalue()

    @cached_property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers and nothing else."""
        columns = [[cell for cell in column if cell is not None] for column in zip(*self.rows, strict=True)]
        flags = [bool(column) and not any(isinstance(cell, str) for cell in column) for column in columns]
        return tuple(flags) or (False,) * len(self.columns)

    def shown(self, most: int = SHOWN_ROWS) -> Sequence[tuple[Cell, ...]]:
        """All rows or, of a long table, every so many-th and the last."""
        step = -(-len(self.rows) // most)
        return self.rows if step <= 1 else (*self.rows[:-1:step], self.rows[-1])


@dataclass(frozen=True)
class Drawing:
    """A figure with the words and the data that belong to it; drawn twice, for wide and for narrow pages."""

    kind: ClassVar = "drawing"
    name: str
    title: str
    caption: str
    alt: str
    wide: str  # inline SVG that takes its inks from the page
    narrow: str
    standalone: str  # a complete SVG file
    data: Table

    @property
    def csv_link(self) -> str | None:
        """The data as a `data:` link, unless it is too long to be carried along."""
        return f"data:text/csv;charset=utf-8,{quote(self.data.csv)}" if len(self.data.csv) <= EMBEDDED_CSV else None


@dataclass(frozen=True)
class Picture:
    """An original beside its reconstruction, each a PNG as a `data:` link; None where there is none."""

    original: str | None
    found: str | None
    caption: str
    alt: str
    right: bool | None = None
    certified: bool = False


@dataclass(frozen=True)
class Pictures:
    """Pictures in pairs, at a size that a person can judge."""

    kind: ClassVar = "pictures"
    title: str
    items: tuple[Picture, ...]
    note: str = ""


@dataclass(frozen=True)
class Part:
    """A cell or a token of something reconstructed, and whether it is wrong."""

    text: str
    wrong: bool = False
    note: str = ""


@dataclass(frozen=True)
class Pair:
    """A row or a text beside its reconstruction, part by part; None where there is none."""

    original: tuple[Part, ...] | None
    found: tuple[Part, ...] | None
    caption: str
    certified: bool = False


@dataclass(frozen=True)
class Pairs:
    """Rows (under `columns`) or texts (without) in pairs, with what is wrong marked."""

    kind: ClassVar = "pairs"
    title: str
    columns: tuple[str, ...]
    items: tuple[Pair, ...]
    note: str = ""


Block = Paragraph | Bullets | Definitions | Source | Table | Drawing | Pictures | Pairs


@dataclass(frozen=True)
class Section:
    """A part of the page under its own heading."""

    anchor: str
    title: str
    blocks: tuple[Block, ...]

    @property
    def drawings(self) -> Iterable[Drawing]:
        """The figures among the blocks."""
        return (block for block in self.blocks if isinstance(block, Drawing))


def _harmless(cell: Cell) -> Cell:
    # A spreadsheet would run a cell of text that starts like a formula; class names come from the data.
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@") else cell
