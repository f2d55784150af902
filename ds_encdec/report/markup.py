"""HTML out of values that nobody has checked: what is no `Html` is escaped. One file, with all styles inside."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from ds_encdec.report.drawing import DARK, LIGHT

_EXTRA = {
    "page": ("#ffffff", "#15191e"),
    "raised": ("#f6f7f9", "#1d2229"),
    "ok": ("#1a7f4b", "#4cc38a"),
    "warn": ("#9a5b00", "#ffb454"),
    "bad": ("#b3261e", "#ff8a80"),
    "link": ("#00629b", "#6cc0f0"),
}
"""Colours that only the page has, light and dark."""


class Html(str):
    """Text that is markup already."""


def text(value: object) -> Html:
    """`value` as markup: itself where it is Html, escaped where it is anything else."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def join(parts: Iterable[object]) -> Html:
    """The parts one behind the other, each on a line."""
    return Html("\n".join(text(part) for part in parts))


def element(tag: str, content: object, **attributes: str) -> Html:
    """`<tag attributes>content</tag>`; `class_` stands for `class`, other underscores for hyphens."""
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    head = "".join(f' {name}="{escape(value)}"' for name, value in named.items())
    return Html(f"<{tag}{head}>{text(content)}</{tag}>")


def section(title: str, *content: object) -> Html:
    """A part of the page with its heading."""
    return element("section", join([element("h2", title), *content]))


def paragraph(content: object, **attributes: str) -> Html:
    """One paragraph."""
    return element("p", content, **attributes)


def items(entries: Sequence[object], **attributes: str) -> Html:
    """A list, or nothing for no entries."""
    return element("ul", join(element("li", entry) for entry in entries), **attributes) if entries else Html()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, stacked: bool = False) -> Html:
    """A table that scrolls inside itself where the page is narrow; the first column names the row.

    `stacked`: on a phone its cells stand below each other instead, each behind the name of its column.
    """
    head = element("tr", join(element("th", column, scope="col") for column in columns))
    body = join(
        element(
            "tr",
            join(
                [
                    element("th", row[0], scope="row"),
                    *(element("td", cell, data_name=name) for name, cell in zip(columns[1:], row[1:], strict=True)),
                ]
            ),
        )
        for row in rows
    )
    content = join([element("thead", head), element("tbody", body)])
    kind = f"scroll{' wide' if len(columns) > 4 else ''}{' stacked' if stacked else ''}"
    return element("div", element("table", content), class_=kind, role="region", aria_label=title, tabindex="0")


def field_name(name: str) -> Html:
    """A dotted name, which may be broken behind its dots and underscores."""
    return element("code", Html(re.sub(r"([._])", r"\1<wbr>", escape(name))))


def facts(pairs: Sequence[tuple[str, object]]) -> Html:
    """Names and values side by side."""
    return element(
        "dl", join(element("div", join([element("dt", name), element("dd", value)])) for name, value in pairs)
    )


def page(title: str, *content: object) -> str:
    """The whole file."""
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="color-scheme" content="light dark">'),
            Html('<link rel="icon" href="data:,">'),
            element("title", title),
            Html(f"<style>{_styles()}</style>"),
        ]
    )
    body = element("body", element("main", join(content)))
    return f'<!DOCTYPE html>\n<html lang="en">\n{element("head", head)}\n{body}\n</html>\n'


def _styles() -> str:
    light = {**LIGHT, **{name: pair[0] for name, pair in _EXTRA.items()}}
    dark = {**DARK, **{name: pair[1] for name, pair in _EXTRA.items()}}
    return f":root{{{_variables(light)}}}\n@media (prefers-color-scheme: dark){{:root{{{_variables(dark)}}}}}\n{_CSS}"


def _variables(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in colours.items())


_CSS = """
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif }
main { max-width: 1280px; margin: 0 auto; padding: 20px 16px 64px }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 4px }
h2 { font-size: 1.15rem; margin: 36px 0 10px; padding-top: 8px; border-top: 1px solid var(--grid) }
h3 { font-size: 1rem; margin: 20px 0 8px }
p { margin: 8px 0 }
a { color: var(--link) }
code { font: .92em ui-monospace, "Liberation Mono", monospace }
.muted { color: var(--muted) }
.ok { color: var(--ok) } .warn { color: var(--warn) } .bad { color: var(--bad) }
.state { display: inline-block; padding: 1px 10px; border: 1px solid; border-radius: 99px; font-size: .85rem;
  vertical-align: middle }
ul { padding-left: 20px } li { margin: 3px 0 }
.verdict { list-style: none; padding: 10px 14px; margin: 14px 0; background: var(--raised); border-radius: 8px }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 140px), 1fr)); gap: 10px 18px;
  margin: 14px 0 }
dt { color: var(--muted); font-size: .82rem } dd { margin: 0; font-weight: 600 }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 370px), 1fr)); gap: 18px 22px }
.charts.pairs { grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)) }
figure { margin: 0; min-width: 0 } figure.full { grid-column: 1 / -1 }
figure svg { display: block; width: 100%; height: auto }
figcaption { color: var(--muted); font-size: .82rem; margin-top: 2px }
figure.full .wide { display: none }
@media (min-width: 860px) { figure.full .wide { display: block } figure.full .narrow { display: none } }
.scroll { overflow-x: auto; max-width: 100%; border: 1px solid var(--grid); border-radius: 8px }
.scroll.wide table { min-width: 50rem }
table { border-collapse: collapse; width: 100%; font-size: .88rem; overflow-wrap: normal }
th, td { text-align: left; padding: 6px 12px; vertical-align: top; border-bottom: 1px solid var(--grid);
  min-width: 4rem; max-width: 34rem }
thead th { background: var(--raised); color: var(--muted); font-weight: 600; white-space: nowrap }
tbody th { font-weight: 500 }
th code { display: inline-block; min-width: 8rem } tbody tr:last-child > * { border-bottom: 0 }
td, th { overflow-wrap: break-word } td ul { list-style: none; margin: 0; padding: 0 }
@media (max-width: 500px) {
  .scroll.stacked table { min-width: 0 } .stacked thead { display: none }
  .stacked tbody, .stacked tr, .stacked th, .stacked td { display: block }
  .stacked td { border: 0; padding-top: 0 } .stacked td::before { content: attr(data-name) " "; color: var(--muted) }
  .stacked tr:not(:last-child) { border-bottom: 1px solid var(--grid) } .stacked th { border: 0; font-weight: 600 }
}
@media print { .scroll { overflow: visible } }
"""
