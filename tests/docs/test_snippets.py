# SPDX-License-Identifier: Apache-2.0
"""Every command and snippet of the documentation does what its page shows (`make test-docs`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from snippets import execute, snippets

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for kind in ("tutorials", "how-to") for page in (DOCS / kind).glob("*.md") if snippets(page))


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_followed(page: Path, tmp_path: Path) -> None:
    done = execute(page, tmp_path)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_the_runner_fails_where_a_snippet_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```bash\ntrue\n```\n\n```python\nassert x == 2\n```\n")
    assert execute(page, tmp_path).returncode != 0
    page.write_text("```bash\nfalse\ntrue\n```\n")
    assert execute(page, tmp_path).returncode != 0
    page.write_text("<!-- not run: it fails -->\n```bash\nfalse\n```\n\n```python\n# file: one.py\nx = 1\n```\n")
    assert execute(page, tmp_path).returncode == 0
    assert (tmp_path / "one.py").read_text() == "# file: one.py\nx = 1\n"
