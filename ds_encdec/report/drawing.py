"""One drawing as SVG to stand in a page, whose light or dark colours it takes, and as PNG for everywhere else."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

LIGHT = {
    "ink": "#1b1f24",
    "muted": "#5b6470",
    "grid": "#e2e5ea",
    "paper": "#fefefe",
    "line1": "#0072b2",
    "line2": "#d55e00",
    "line3": "#00866a",
    "line4": "#b0508f",
    "line5": "#7d6608",
    "line6": "#3c9cd6",
    "alert": "#c46a00",
    "rollback": "#b3261f",
    "abandoned": "#8b94a0",
}
"""Colours of drawings by name (the lines: Okabe and Ito's for colour-blind readers, darkened to stand out on white)."""
DARK = {
    "ink": "#e7eaee",
    "muted": "#a3acb8",
    "grid": "#2e353e",
    "paper": "#15191e",
    "line1": "#56b4e9",
    "line2": "#ff8f4a",
    "line3": "#2fc79f",
    "line4": "#e39bc8",
    "line5": "#e2c93b",
    "line6": "#9fd3f2",
    "alert": "#ffb454",
    "rollback": "#ff7a70",
    "abandoned": "#8d96a3",
}
"""The same on a dark page."""
LINES = tuple(name for name in LIGHT if name.startswith("line"))

NARROW, WIDE = (4.2, 3.0), (11.6, 3.8)
"""Sizes of drawings in inches; a narrow one is read on a phone without zooming."""
_PNG_DPI = 160

_STYLE: dict[RcKeyType, Any] = {
    "svg.fonttype": "none",  # text stays text: in the page's font, and read by screen readers
    "text.parse_math": False,  # names of runs may hold dollar signs
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": LIGHT["ink"],
    "axes.edgecolor": LIGHT["grid"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.grid": True,
    "axes.xmargin": 0.02,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.7,
    "xtick.color": LIGHT["grid"],
    "ytick.color": LIGHT["grid"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.5,
    "agg.path.chunksize": 10_000,
}


@dataclass(frozen=True)
class Drawing:
    """`svg`: an element for an HTML page, coloured by the page's CSS variables `--NAME`; `png`: a file's bytes."""

    svg: str
    png: bytes


def draw(key: str, paint: Callable[[Axes], None], *, size: tuple[float, float] = NARROW, label: str = "") -> Drawing:
    """Let `paint` fill one pair of axes. `key`: unique in the page; `label`: what a screen reader says.

    The same paint gives the same bytes.
    """
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": key}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a run may be named in any script
        figure = Figure(figsize=size, layout="constrained", facecolor="none")
        axes = figure.add_subplot(facecolor="none")
        paint(axes)
        _add_legend(figure, axes)
        most = min(6 if size == NARROW else 10, _intervals(axes))
        axes.xaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        figure.set_layout_engine("none")  # it is laid out; a second time would take as long again
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=_PNG_DPI, facecolor="white", metadata={"Software": None})
    return Drawing(_for_page(svg.getvalue(), key, label), png.getvalue())


def _intervals(axes: Axes) -> int:
    """Intervals of the curve with the most points, 4 at least: more ticks would be where nothing was logged."""
    return max([4, *(np.size(line.get_xdata()) - 1 for line in axes.lines)])


def _add_legend(figure: Figure, axes: Axes) -> None:
    """One entry a label, in a row or more below the drawing, where no curve can be under it."""
    named = {str(line.get_label()): line for line in axes.lines}
    # Not axes.get_legend_handles_labels(), which leaves out runs whose names begin with an underscore.
    entries = {label: line for label, line in named.items() if not re.fullmatch(r"_child\d+", label)}
    if entries:
        longest = max(map(len, entries))
        columns = max(1, int(figure.get_figwidth() * 14 / (longest + 6)))
        figure.legend(
            list(entries.values()),
            list(entries),
            loc="outside lower left",
            ncols=min(columns, len(entries)),
            handlelength=1.8,
            columnspacing=1.2,
            borderaxespad=0.1,
        )


def _for_page(svg: str, key: str, label: str) -> str:
    """The `<svg>` element alone, with names of its own, variables for colours, and a description."""
    head, body = svg[svg.index("<svg") :].split(">", 1)
    view_box = re.search(r'viewBox="[^"]*"', head)
    assert view_box is not None  # matplotlib always writes one
    body = re.sub(r'\bid="', f'id="{key}-', body)
    body = re.sub(r'(url\(|href=")#', rf"\g<1>#{key}-", body)
    body = re.sub(r" font-family: [^;\"]*;", "", body)
    for name, colour in LIGHT.items():
        body = body.replace(colour, f"var(--{name})")
    return f'<svg role="img" aria-label="{escape(label)}" {view_box[0]}>{body.strip()}'
