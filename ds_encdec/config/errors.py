"""The error report: every problem of a configuration at once, each with its place, field, value and fix."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ds_encdec.config.settings import join
from ds_encdec.types import ConfigError

COMMAND_LINE = "command line"
"""Place of what was given as an override."""
DEFAULT = "default"
"""Place of what nobody set."""
MOST_SHOWN = 100
"""Problems that a report lists."""


Rules = dict[str, object]
"""Rules by their text, "FIELDS: what is allowed" (dotted names, between blanks): true for one that is broken."""


@dataclass(frozen=True)
class Conflict:
    """Fields (dotted names) that contradict each other, and what is allowed."""

    fields: tuple[str, ...]
    message: str


def broken(rules: Rules, at: str = "") -> Iterator[Conflict]:
    """Yield those of the `rules` that are broken. `at`: the dotted path of the section that they are about."""
    for fields, _, message in (text.partition(": ") for text, is_broken in rules.items() if is_broken):
        yield Conflict(tuple(join(at, name) for name in fields.split()), message)


@dataclass(frozen=True)
class Mention:
    """A field named in a problem: where its value was set (`file:line`, `file:line:column` in JSON,
    `command line`, `default`), and to what.

    `shown` is the value as the report prints it; empty where there is none to print.
    """

    place: str
    field: str
    shown: str = ""

    def __str__(self) -> str:
        field = _printable(self.field)
        named = f"{field} = {self.shown}" if self.shown else field
        return ": ".join(part for part in (_printable(self.place), named) if part)


@dataclass(frozen=True)
class Problem:
    """One thing to mend: the fields it is about, and what is allowed."""

    mentions: tuple[Mention, ...]
    message: str

    def __str__(self) -> str:
        return "\n".join([*(f"  {mention}" for mention in self.mentions), f"      {_printable(self.message, 4000)}"])


def show(value: Any) -> str:
    """`value` in the notation of JSON and YAML, cut to one readable line."""
    return _printable(json.dumps(value, default=str, ensure_ascii=False), 80)


def _printable(text: str, length: int = 200) -> str:
    """`text` on one line that every terminal can be sent."""
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: length + 1])
    return text if len(text) <= length else text[: length - 3] + "..."


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` is most likely a misspelling of, or None."""
    by_lower_case = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(word.lower(), by_lower_case, n=1, cutoff=0.7)
    return by_lower_case[found[0]] if found else None


def unknown_key(word: str, allowed: Iterable[str], elsewhere: Sequence[str] = ()) -> str:
    """The message for a key that does not exist beside `allowed`; `elsewhere` are full names it has in other places."""
    if elsewhere:
        return f"unknown key here; did you mean `{'` or `'.join(elsewhere)}`?"
    names = sorted(allowed)
    guess = closest(word, names)
    return f"unknown key; did you mean `{guess}`?" if guess else f"unknown key; allowed: {', '.join(names)}"


def raise_if_any(problems: Sequence[Problem]) -> None:
    """Raise one ConfigError that lists `problems` in the order of their places; do nothing without any."""
    if not problems:
        return
    listed = sorted(dict.fromkeys(problems), key=lambda problem: _order(problem.mentions[0].place))
    count = "1 problem" if len(listed) == 1 else f"{len(listed)} problems"
    if len(listed) > MOST_SHOWN:
        count += f", of which these are the first {MOST_SHOWN}"
    raise ConfigError("\n".join([f"The configuration has {count}:", *map(str, listed[:MOST_SHOWN])]))


def _order(place: str) -> tuple[bool, str, int, int]:
    """Files first, by line and column, then the command line and defaults."""
    match = re.match(r"(.*?):(\d+)(?::(\d+))?(?= |$)", place)
    if match is None:
        return (place in (COMMAND_LINE, DEFAULT), place, 0, 0)
    return (False, match[1], int(match[2]), int(match[3] or 0))
