# SPDX-License-Identifier: Apache-2.0
"""The report of a run: sections of plain data, figures as SVG, one self-contained HTML page."""

from __future__ import annotations

from fedsim.report.blocks import Block, Bullets, Definitions, Drawing, Fact, Paragraph, Section, Source, Table
from fedsim.report.page import holds_only_audits, write_report
from fedsim.report.run_files import RunFiles, read_run_files
from fedsim.report.sections import SECTIONS

__all__ = [
    "SECTIONS",
    "Block",
    "Bullets",
    "Definitions",
    "Drawing",
    "Fact",
    "Paragraph",
    "RunFiles",
    "Section",
    "Source",
    "Table",
    "holds_only_audits",
    "read_run_files",
    "write_report",
]
