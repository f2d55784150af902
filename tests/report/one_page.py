"""A page as a reader meets it: its elements, texts and tables, parsed."""

from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "wbr", "input"}
LINES = {"h1", "h2", "h3", "p", "li", "tr", "dt", "summary", "figcaption", "div", "section"}
SHOWN_ROWS = 24


class Page(HTMLParser):
    """Parses `path`; raises AssertionError where elements are not properly nested. `prose`: the words outside of the
    drawings, a paragraph or row of a table a line, of tables the first rows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._prose = ""
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self._open == []
        self.text = " ".join(self.text.split())  # as a browser shows it
        lines = (" ".join(line.split()) for line in self._prose.splitlines())
        self.prose = "\n".join(line for line in lines if line)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.elements.append((tag, named))
        if named.get("role") == "region":
            self._rows = self.tables.setdefault(named["aria-label"], [])
        if tag == "tr":
            self._rows.append([])
        shown = "tr" not in self._open or len(self._rows) <= SHOWN_ROWS
        if tag in LINES:
            self._prose += "\n"
        if tag in ("th", "td"):
            self._rows[-1].append("")
            self._prose += " | " * shown
        if tag == "dd":
            self._prose += ": "
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if "svg" not in self._open and ("tr" not in self._open or len(self._rows) <= SHOWN_ROWS):
            self._prose += data.replace("\n", " ")
        if {"th", "td"} & set(self._open):
            self._rows[-1][-1] += data.strip()

    def all(self, tag: str) -> list[dict[str, str]]:
        """The attributes of every element of that name."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def charts(self) -> dict[str, str]:
        """The words of a screen reader for each chart by its title."""
        return dict(svg["aria-label"].split(": ", 1) for svg in self.all("svg"))
