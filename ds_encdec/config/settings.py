"""Settings on their way into the schema: nested values, and for each the place that set it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

LONGEST_NAME = 100
"""Characters of a key in a file."""
LARGEST_FLOAT32 = 3.4e38
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True)
class Unreadable:
    """In the place of a value that could not be read: how it is written, and what is wrong with it."""

    text: str
    message: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Settings:
    """Nested mappings of settings. `places` tells where each key (dotted path) was set: `file:line`, command line."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def __contains__(self, path: str) -> bool:
        return self.get(path, _NOTHING) is not _NOTHING

    def get(self, path: str, default: Any = None) -> Any:
        """The value at the dotted `path`, which may lead through lists; `default` where nothing is set."""
        current: Any = self.values
        for key in path.split("."):
            if isinstance(current, list) and key.isdigit() and int(key) < len(current):
                current = current[int(key)]
            elif isinstance(current, Mapping) and key in current:
                current = current[key]
            else:
                return default
        return current

    def put(self, path: str, value: Any, place: str) -> bool:
        """Set `path` and note its place. False, and no change, where something that is no mapping stands above it."""
        *parents, last = path.split(".")
        target, above = self.values, ""
        for key in parents:
            above = join(above, key)
            if target.get(key) is None:
                target[key] = {}
                self.places[above] = place
            target = target[key]
            if not isinstance(target, dict):
                return False
        target[last] = value
        self.places = {known: at for known, at in self.places.items() if not known.startswith(path + ".")}
        self.places.update(dict.fromkeys([path, *(inner for inner, _ in _paths_in(value, path))], place))
        return True

    def place_of(self, path: str) -> str:
        """The place where `path`, or else the nearest thing around it, was set; empty for none."""
        while path and path not in self.places:
            path = path.rpartition(".")[0]
        return self.places.get(path, "")

    def unusable(self) -> Iterator[tuple[str, str]]:
        """The dotted paths of values that no field can hold, and why."""
        for path, value in _paths_in(self.values, ""):
            if message := unusable(value):
                yield path, message

    def copy(self) -> Settings:
        """Settings that can be changed without changing these."""
        return deepcopy(self)


_NOTHING = object()


def join(path: str, key: str | int) -> str:
    """The dotted path of `key` below `path`."""
    return f"{path}.{key}" if path else str(key)


def is_name(key: str) -> bool:
    """Return whether a key of a file can be a field's name, or a part of a dotted one."""
    return 0 < len(key) <= LONGEST_NAME and key.isprintable() and "." not in key


def whole_number(digits: str) -> int | float:
    """The number that decimal `digits` stand for; infinity where Python would refuse to read so many."""
    return int(digits) if len(digits) < 400 else float(digits)


def unusable(value: Any) -> str | None:
    """Why no field can hold this plain value; None for one that some may."""
    if isinstance(value, Unreadable):
        return value.message
    if isinstance(value, str) and _NOT_TEXT.search(value):
        return "holds a NUL character or half of a surrogate pair, which no name or path can"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, float) and abs(value) > LARGEST_FLOAT32:
        return "must fit into a 32-bit float"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "must be a number of at most 64 bits"
    return None


def _paths_in(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Everything inside `value`, which stands at `path`, with its own path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        here = join(path, key)
        yield here, child
        yield from _paths_in(child, here)
