"""Shows the report of a configuration's problems on a terminal: in colour, with the lines of the file that are wrong.
It reads the report's text (config/settings.py), in which a place stands as ` file:line[:column]: field = value`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from rich.text import Text

from ds_encdec.base.secret_names import is_secret

_PLACE = re.compile(r"  (?P<place>(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?(?: [^:]*)?): (?P<said>.+)")
_KEY = re.compile(r"([\w.-]+)[\"']?\s*:")


def marked(report: str, width: int) -> Text:
    """Return the report with colours and marks, for a terminal of `width` columns."""
    lines = report.splitlines()
    return Text("\n").join(part for number in range(len(lines)) for part in _marked_line(lines, number, width))


def _marked_line(lines: list[str], number: int, width: int) -> Iterator[Text]:
    line = lines[number]
    if found := _PLACE.fullmatch(line):
        field, equals, value = found["said"].partition(" = ")
        yield Text.assemble("  ", (found["place"], "cyan"), ": ", (field, "bold"), equals, (value, "red"))
        explained = next((below for below in lines[number + 1 :] if below.startswith("      ")), "")
        yield from _source(found, field, None if "unknown key" in explained else value, width)
    elif line.startswith("      "):
        text = Text("\n".join(wrap(line, width, subsequent_indent=" " * 6, break_long_words=False)))
        text.highlight_regex(r"`[^`]+`", "bold green")
        yield text
    else:
        yield Text(line)


def _source(found: re.Match[str], field: str, value: str | None, width: int) -> Iterator[Text]:
    """Yield the line of the file, and marks below it: under the value, or the key if that is unknown."""
    try:
        path = Path(found["file"])
        source = path.read_text().splitlines()[int(found["line"]) - 1] if path.is_file() else ""
    except (OSError, ValueError, IndexError):  # gone by now, or what is wrong with it
        return
    if not source.isprintable() or any(map(is_secret, _KEY.findall(source))):
        return
    key = re.escape(field.rpartition(".")[2])
    pattern = rf"(?<![\w.]){key}\b" if value is None else rf"(?<![\w.]){key}[\"']?\s*:\s*(?P<meant>[^#]*[^#\s,}}])"
    if (mark := re.search(pattern, source)) is None:
        return
    start, end = mark.span("meant" if value is not None else 0)
    margin = f"{found['line']:>8} | "
    columns = max(20, width - len(margin))
    first = max(0, min(start - 4, end - columns)) if end > columns else 0
    end = min(end, first + columns)
    below = " " * (len(margin) - 2) + "| "
    yield Text.assemble((margin, "dim"), source[first : first + columns])
    yield Text.assemble((below, "dim"), " " * (start - first), ("^" * (end - start), "bold red"))
