# SPDX-License-Identifier: Apache-2.0
"""What must be true of every command that refuses something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedsim.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, before: set[str] | None = None) -> str:
    """The sentence with which a command is refused, after everything that must be true of a refusal."""
    code = main(list(arguments))
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    here = {path.name for path in Path().iterdir()}
    assert here == (before or here) - {"runs"}, "something was left behind"
    return err.removeprefix("error: ").rstrip("\n")


def assert_says(sentence: str, fragments: tuple[str, ...]) -> None:
    for fragment in fragments:
        assert re.search(fragment, sentence), f"{fragment!r} is not in: {sentence}"
