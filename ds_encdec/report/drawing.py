"""One drawing as SVG to stand in a page, whose light or dark colours it takes, and as PNG for everywhere else."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

COLOURS: dict[str, str] = dict(
    re.findall(r"--(\w+): (#[0-9a-f]{6})", Path(__file__).with_name("page.css").read_text().partition("@media")[0])
)
"""The colours of a light page by name, as its stylesheet has them: no two are the same."""
LINES = tuple(name for name in COLOURS if name.startswith("line"))

_PNG_DPI = 160
_STYLE = Path(__file__).with_name("drawing.mplstyle")
_COLOURED = {
    "ink": ("text.color", "axes.titlecolor"),
    "grid": ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"),
    "muted": ("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"),
}


class Chart(NamedTuple):
    """A finished chart: `caption` has its key figures, `svg` is an element coloured by the CSS variables `--NAME`."""

    caption: str
    svg: str


def draw(
    key: str,
    title: str,
    caption: str,
    paint: Callable[[Axes], None],
    pictures: Path | None = None,
    over: str = "optimizer step",
) -> Chart:
    """Let `paint` fill one pair of axes over the horizontal axis `over`.

    `key`: unique in the page. A screen reader reads `title` and `caption`. `pictures`: a folder that gets the drawing
    as KEY.png, too. The same paint gives the same bytes.
    """
    coloured: dict[Any, Any] = {name: COLOURS[colour] for colour, names in _COLOURED.items() for name in names}
    with matplotlib.rc_context({**coloured, "svg.hashsalt": key}, _STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a run may be named in any script
        figure = Figure()
        axes = figure.add_subplot()
        axes.set_title(title)
        axes.set_xlabel(over)
        paint(axes)
        _add_legend(figure, axes)
        # More ticks than intervals between points would be where nothing was logged.
        intervals = max([4, *(np.size(line.get_xdata()) - 1 for line in axes.lines)])
        axes.xaxis.set_major_locator(MaxNLocator(min(6, intervals), steps=[1, 2, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        if pictures is not None:
            figure.set_layout_engine("none")  # it is laid out; a second time would take as long again
            figure.savefig(
                pictures / f"{key}.png", format="png", dpi=_PNG_DPI, facecolor="white", metadata={"Software": None}
            )
    return Chart(caption, _for_page(svg.getvalue(), key, f"{title}: {caption}"))


def _add_legend(figure: Figure, axes: Axes) -> None:
    """One entry a label, in a row or more below the drawing, where no curve can be under it."""
    named = {str(line.get_label()): line for line in axes.lines}
    # Not axes.get_legend_handles_labels(), which leaves out runs whose names begin with an underscore.
    entries = {label: line for label, line in named.items() if label and not re.fullmatch(r"_child\d+", label)}
    if entries:
        columns = max(1, int(figure.get_figwidth() * 14 / (max(map(len, entries)) + 6)))
        lines, labels = list(entries.values()), list(entries)
        figure.legend(lines, labels, loc="outside lower left", ncols=min(columns, len(entries)))


def _for_page(svg: str, key: str, label: str) -> str:
    """The `<svg>` element alone, with names of its own, variables for colours, and a description."""
    head, body = svg[svg.index("<svg") :].split(">", 1)
    view_box = re.search(r'viewBox="[^"]*"', head)
    assert view_box is not None  # matplotlib always writes one
    body = re.sub(r'\bid="', f'id="{key}-', body)
    body = re.sub(r'(url\(|href=")#', rf"\g<1>#{key}-", body)
    body = re.sub(r" font-family: [^;\"]*;", "", body)
    for name, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    return f'<svg role="img" aria-label="{escape(label)}" {view_box[0]}>{body.strip()}'
