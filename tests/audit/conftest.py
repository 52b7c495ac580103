# SPDX-License-Identifier: Apache-2.0
"""The reference numbers of the bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "audit.json"


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """Section f: ReRo, U-ReRo, membership and attributes."""
    if not REFERENCE.is_file():
        pytest.skip(f"{REFERENCE} is not here: the reference numbers belong to the design, not to the package")
    section: dict[str, Any] = json.loads(REFERENCE.read_text())["f_rero_urero_mia_aia"]
    return section
