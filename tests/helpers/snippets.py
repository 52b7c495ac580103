# SPDX-License-Identifier: Apache-2.0
"""The snippets of a documentation page, and a program that executes them from top to bottom in one folder.

Bash runs a fence of language `console` or `bash`; one interpreter runs all `python` fences of a page. A fence whose
first line is `# file: NAME` is written to that file instead. A fence after the comment `<!-- not run: REASON -->` is
skipped; one inside a comment is run and not shown. Other languages (`text`, `yaml` without a file name) are not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+?) -->\n+)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_FILE = re.compile(r"# file: (?P<name>[\w./-]+)\n")
_SHELL = {"bash", "console", "sh"}


@dataclass(frozen=True)
class Snippet:
    """One fence of a page."""

    language: str
    code: str
    line: int
    reason: str | None = None
    """Why it is not run."""

    @property
    def file(self) -> str | None:
        """The file that the snippet is, if it is one."""
        match = _FILE.match(self.code)
        return match["name"] if match else None


def snippets(page: Path) -> list[Snippet]:
    """The fences of a page in their order."""
    text = page.read_text()
    return [
        Snippet(match["language"], match["code"], text[: match.start("code")].count("\n") + 1, match["reason"])
        for match in _FENCE.finditer(text)
    ]


def program(page: Path) -> str:
    """A Python program that does what a page's reader would do: its snippets from top to bottom."""
    lines = ["import subprocess, pathlib", "page = {}"]
    for snippet in snippets(page):
        if snippet.reason:
            continue
        where = f"{page.name}:{snippet.line}"
        if snippet.file:
            lines.append(f"pathlib.Path({snippet.file!r}).write_text({snippet.code!r})")
        elif snippet.language in _SHELL:
            lines.append(f"print({'> ' + where!r}, flush=True)")
            lines.append(f"subprocess.run(['bash', '-euo', 'pipefail', '-c', {_commands(snippet.code)!r}], check=True)")
        elif snippet.language == "python":
            lines.append(f"print({'> ' + where!r}, flush=True)")
            lines.append(f"exec(compile({snippet.code!r}, {where!r}, 'exec'), page)")
    return "\n".join(lines)


def _commands(code: str) -> str:
    """The commands of a fence: where some lines have a prompt, only those."""
    prompted = [line[2:] for line in code.splitlines() if line.startswith("$ ")]
    return "\n".join(prompted) if prompted else textwrap.dedent(code)


def execute(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a page's snippets in a folder, with the `fedsim` of this environment first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-c", program(page)],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=550,
    )
