"""Settings before validation, each with the place that set it, and the report of all their problems."""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_encdec.base.terminal import is_secret, without_url_secrets
from ds_encdec.base.types import ConfigError

COMMAND_LINE = "command line"  # the place of an override
DEFAULT = "default"  # the place of a default
LARGEST_FLOAT32 = 3.4e38
_NOTHING = object()


@dataclass
class Settings:
    """Nested settings. `places` maps the dotted path of each key to where it was set: `file:line`, command line."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def __contains__(self, path: str) -> bool:
        return self.get(path, _NOTHING) is not _NOTHING

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at the dotted `path`, which may lead through lists; `default` if it is not set."""
        current: Any = self.values
        for key in path.split(".") if path else ():
            if isinstance(current, list) and key.isdigit() and int(key) < len(current):
                current = current[int(key)]
            elif isinstance(current, Mapping) and key in current:
                current = current[key]
            else:
                return default
        return current

    def put(self, path: str, value: Any, place: str) -> bool:
        """Set `path` and record its place. Returns False, and does not set it, if a value above it is not a mapping."""
        *parents, last = path.split(".")
        target, here = self.values, ""
        for key in parents:
            here = join(here, key)
            if target.get(key) is None:
                target[key] = {}
                self.places[here] = place
            target = target[key]
            if not isinstance(target, dict):
                return False
        target[last] = value
        self.places = {known: at for known, at in self.places.items() if not known.startswith(path + ".")}
        self.places |= dict.fromkeys([path, *(inner for inner, _ in _paths_in(value, path))], place)
        return True

    def place_of(self, path: str) -> str:
        """Return where `path`, or else the nearest value around it, was set; empty if nowhere."""
        while path and path not in self.places:
            path = above(path)
        return self.places.get(path, "")

    def unusable(self) -> dict[str, str]:
        """Return the dotted paths of values that no field can hold, with the reasons."""
        return {path: message for path, value in _paths_in(self.values, "") if (message := unusable(value))}


def join(path: str, key: str | int) -> str:
    """Return the dotted path of `key` below `path`."""
    return f"{path}.{key}" if path else str(key)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the innermost values with their dotted names, which number the mappings of a list; an empty one is a
    value."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping) and (not path or value):
        for key, child in value.items():
            yield from leaves(child, join(path, key))
    else:
        yield path, value


def above(path: str) -> str:
    """Return the dotted path one level up; empty at the top."""
    return path.rpartition(".")[0]


def within(path: str, outer: str) -> bool:
    """Return whether `path` is `outer` or inside it."""
    return path == outer or path.startswith(outer + ".")


def unusable(value: Any) -> str | None:
    """Return why no field can hold this plain value, or None."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return "must be a finite number"
        return "must fit into a 32-bit float" if abs(value) > LARGEST_FLOAT32 else None
    return "must be a number of at most 64 bits" if isinstance(value, int) and not -(2**63) <= value < 2**63 else None


def _paths_in(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (here := join(path, key)), child
        yield from _paths_in(child, here)


@dataclass(frozen=True)
class Conflict:
    """Fields (dotted names) that contradict each other, and the message that names the allowed values."""

    fields: tuple[str, ...]
    message: str


def conflicts_in(section: str) -> Callable[[str, str], Conflict]:
    """Return a function that makes a conflict of fields' names (those without a dot are of `section`) and a message."""
    return lambda names, message: Conflict(
        tuple(name if "." in name else f"{section}.{name}" for name in names.split()), message
    )


@dataclass(frozen=True)
class Mention:
    """A field named in a problem, its place (`file:line`, `command line`, `default`), and its value, if shown."""

    place: str
    field: str
    shown: str = ""

    def __str__(self) -> str:
        named = _printable(self.field) + (f" = {self.shown}" if self.shown else "")
        return ": ".join(part for part in (_printable(self.place), named) if part)


@dataclass(frozen=True)
class Problem:
    """A problem: the fields involved, and the message that names the allowed values."""

    mentions: tuple[Mention, ...]
    message: str

    def __str__(self) -> str:
        return "\n".join([*(f"  {mention}" for mention in self.mentions), f"      {_printable(self.message, 4000)}"])


def show(value: Any) -> str:
    """Return `value` in the notation of JSON and YAML, cut to one readable line."""
    return _printable(without_url_secrets(json.dumps(value, default=str, ensure_ascii=False)), 80)


def masked(key: str, value: Any) -> Any:
    """Return `value`, which stands at `key`, for printing: without the texts of keys named like secrets."""
    if isinstance(value, dict):
        return {inner: masked(str(inner), child) for inner, child in value.items()}
    if isinstance(value, list):
        return [masked(key, item) for item in value]
    return "***" if isinstance(value, str) and value and is_secret(key) else value


def _printable(text: str, length: int = 200) -> str:
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: length + 1])
    return text if len(text) <= length else text[: length - 3] + "..."


def closest(word: str, candidates: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """Return the candidate of which `word` is most likely a misspelling or the beginning; None if all are too far."""
    names, word = {candidate.lower(): candidate for candidate in candidates}, word.lower()
    found = difflib.get_close_matches(word, names, n=len(names) or 1, cutoff=cutoff)
    return names[max(found, key=lambda name: name.startswith(word))] if found else None


def unknown_key(word: str, allowed: Iterable[str], elsewhere: Sequence[str] = ()) -> str:
    """Return the message for an unknown key beside `allowed`; `elsewhere` are its full names in other places."""
    if elsewhere:
        return f"unknown key here; did you mean `{'` or `'.join(elsewhere)}`?"
    names = sorted(allowed)
    guess = closest(word, names)
    return f"unknown key; did you mean `{guess}`?" if guess else f"unknown key; allowed: {', '.join(names)}"


def raise_if_any(problems: Sequence[Problem]) -> None:
    """Raise one ConfigError that lists `problems` in the order of their places, if there are any."""
    if problems:
        listed = sorted(dict.fromkeys(problems), key=lambda problem: _order(problem.mentions[0].place))
        heading = f"The configuration has {len(listed)} problem{'s' * (len(listed) > 1)}:"
        raise ConfigError("\n".join([heading, *map(str, listed)]))


def _order(place: str) -> tuple[bool, str, int, int]:
    # Files first, by line and column, then the command line and defaults.
    match = re.match(r"(.*?):(\d+)(?::(\d+))?(?= |$)", place)
    if match is None:
        return (place in (COMMAND_LINE, DEFAULT), place, 0, 0)
    return (False, match[1], int(match[2]), int(match[3] or 0))
