# SPDX-License-Identifier: Apache-2.0
"""Figures: matplotlib to SVG that takes its inks from the page, so that it follows the light and the dark theme.

Every ink is drawn in its light value; within the page that value is replaced by the CSS variable of the ink's name, and
a file of its own keeps it. The same input gives the same bytes: no dates, ids from a fixed salt, no pyplot state.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Literal
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from fedsim.report.blocks import Drawing, Table

# name: (on light, on dark). The four colours differ in lightness and hue for all common kinds of colour vision, have a
# contrast of at least 3:1 to either background, and are never the only difference: markers and dashes go with them.
INKS = MappingProxyType(
    {
        "ink": ("#1d2329", "#e3e7eb"),
        "muted": ("#5b656f", "#a0abb5"),
        "grid": ("#dfe3e7", "#353d45"),
        "paper": ("#ffffff", "#1c2126"),
        "page": ("#f6f7f8", "#13171a"),
        "blue": ("#1b6ca8", "#6db3ec"),
        "orange": ("#c2540a", "#f39a5b"),
        "green": ("#0a7a5f", "#4fcba6"),
        "purple": ("#7d4396", "#cf9be3"),
        "amber": ("#8a5a00", "#e2b33c"),
        "red": ("#b3231a", "#ff8f85"),
    }
)
INK, MUTED, GRID, PAPER, _, BLUE, ORANGE, GREEN, PURPLE, _, _ = (light for light, _ in INKS.values())
COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")

WIDE, NARROW = 780, 350  # pixels
Draw = Callable[[Figure, bool], None]  # (figure, narrow)
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "{http://www.w3.org/1999/xlink}href"
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 12,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "figure.facecolor": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 12,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.fontsize": 12,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.5,
    "path.simplify": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedsim",
    "text.color": INK,
    "text.parse_math": False,  # a class may be called "$5 or more"
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 11,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 11,
}


def make_drawing(
    name: str, title: str, caption: str, alt: str, data: Table, draw: Draw, *, height: int, narrow_height: int
) -> Drawing:
    """Draw a figure for wide and for narrow pages (heights in pixels), and as a file of its own."""
    wide, narrow = _svg(draw, WIDE, height, narrow=False), _svg(draw, NARROW, narrow_height, narrow=True)
    return Drawing(
        name=name,
        title=title,
        caption=caption,
        alt=alt,
        wide=_inline(wide, f"{name}-wide", alt),
        narrow=_inline(narrow, f"{name}-narrow", alt),
        standalone=_standalone(wide, title, alt),
        data=data,
    )


def round_axis(axes: Axes, first: int, last: int, *, ticks: int) -> None:
    """An x axis that counts rounds, with at most so many ticks."""
    axes.set_xlabel("round")
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def fill_cells(axes: Axes, cells: Sequence[tuple[int, int]], **style: Any) -> None:
    """Fill the cells (x, y) of a raster: one path for all, because a path for each makes pages of megabytes."""
    half = 0.42
    corners = np.array([(-half, -half), (half, -half), (half, half), (-half, half), (-half, -half)])
    outlines = [Path(corners + cell, closed=True) for cell in cells]
    if outlines:
        axes.add_patch(PathPatch(Path.make_compound_path(*outlines), **style))


def legend_below(figure: Figure, axes: Axes, *, columns: int) -> None:
    """The legend of an axes under the figure, outside the data."""
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower left", ncols=columns, handlelength=2.4, borderpad=0.2
    )


def _svg(draw: Draw, width: int, height: int, *, narrow: bool) -> ElementTree.Element:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        draw(figure, narrow)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return ElementTree.fromstring(buffer.getvalue())


def _inline(svg: ElementTree.Element, prefix: str, alt: str) -> str:
    """The SVG for the page: inks as variables, the page's font, ids of its own, a name for those who do not see it."""
    root = ElementTree.Element(svg.tag, {"viewBox": svg.attrib["viewBox"], "role": "img", "aria-label": alt})
    root.extend(ElementTree.fromstring(ElementTree.tostring(svg)))  # a copy
    for element in root.iter():
        if element is not root:
            _adapt(element, prefix)
    return _serialise(root)


def _adapt(element: ElementTree.Element, prefix: str) -> None:
    attributes = element.attrib
    if "id" in attributes:
        attributes["id"] = f"{prefix}-{attributes['id']}"
    if _XLINK in attributes:
        attributes["href"] = f"#{prefix}-{attributes.pop(_XLINK).removeprefix('#')}"
    if "clip-path" in attributes:
        attributes["clip-path"] = attributes["clip-path"].replace("url(#", f"url(#{prefix}-")
    if "style" in attributes:
        style = re.sub(r"font: ([\d.]+px)[^;]*", r"font-size: \1", attributes["style"])
        style = style.replace("url(#", f"url(#{prefix}-")
        for name, (light, _) in INKS.items():
            style = style.replace(light, f"var(--{name})")
        attributes["style"] = style


def _standalone(svg: ElementTree.Element, title: str, alt: str) -> str:
    root = ElementTree.Element(svg.tag, svg.attrib)
    for tag, text in (("title", title), ("desc", alt)):
        ElementTree.SubElement(root, f"{{{_SVG}}}{tag}").text = text
    ElementTree.SubElement(root, f"{{{_SVG}}}rect", {"width": "100%", "height": "100%", "fill": PAPER})
    root.extend(svg)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + _serialise(root) + "\n"


def _serialise(root: ElementTree.Element) -> str:
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK[1:].partition("}")[0])
    return re.sub(r">\s*\n\s*<", "><", ElementTree.tostring(root, encoding="unicode"))
