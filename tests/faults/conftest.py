# SPDX-License-Identifier: Apache-2.0
"""Prints the matrix of faults at the end: what was done, what was expected, what happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Note = Callable[[str, str, str], None]
_NOTES = pytest.StashKey[dict[str, list[str]]]()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """note(fault, expected, happened): one line of the matrix; called before the assertions that need `happened`."""
    notes = request.config.stash.setdefault(_NOTES, {})

    def write(fault: str, expected: str, happened: str) -> None:
        notes[request.node.nodeid] = [fault, expected, happened]

    return write


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    notes = config.stash.get(_NOTES, {})
    if not notes or not config.getoption("--matrix"):
        return
    failed = {report.nodeid for report in terminalreporter.stats.get("failed", [])}
    rows = [["fault", "expected", "happened", ""]]
    rows += [[*cells, "WRONG" if name in failed else "ok"] for name, cells in notes.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    terminalreporter.section(f"{len(notes)} faults")
    for row in rows:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
