# SPDX-License-Identifier: Apache-2.0
"""The documentation site: Sphinx reads this. `make docs` builds it, with every warning an error."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import reference_pages  # noqa: E402

import fedsim  # noqa: E402

project = "fedsim"
copyright = "the fedsim authors"  # noqa: A001
release = fedsim.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"fedsim {release}"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
suppress_warnings = ["myst.header"]

reference_pages.write(HERE / "reference")
