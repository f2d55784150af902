"""Settings on their way into the schema: nested values, and for each the place that set it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Settings:
    """Nested mappings of settings. `places` tells where each key (dotted path) was set: `file:line`, command line."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def __contains__(self, path: str) -> bool:
        return self._find(path) is not _NOTHING

    def get(self, path: str, default: Any = None) -> Any:
        """The value at the dotted `path`, which may lead through lists; `default` where nothing is set."""
        found = self._find(path)
        return default if found is _NOTHING else found

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
        self.places.update(dict.fromkeys([path, *_paths_in(value, path)], place))
        return True

    def place_of(self, path: str) -> str:
        """Where `path`, or else the nearest thing around it, was set; empty for none."""
        while path and path not in self.places:
            path = path.rpartition(".")[0]
        return self.places.get(path, "")

    def copy(self) -> Settings:
        """Settings that can be changed without changing these."""
        return Settings(_copy(self.values), dict(self.places))

    def _find(self, path: str) -> Any:
        current: Any = self.values
        for key in path.split("."):
            if isinstance(current, list) and key.isdigit() and int(key) < len(current):
                current = current[int(key)]
            elif isinstance(current, Mapping) and key in current:
                current = current[key]
            else:
                return _NOTHING
        return current


_NOTHING = object()


def join(path: str, key: str | int) -> str:
    """The dotted path of `key` below `path`."""
    return f"{path}.{key}" if path else str(key)


def _paths_in(value: Any, path: str) -> Iterator[str]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield join(path, key)
        yield from _paths_in(child, join(path, key))


def _copy(value: Any) -> Any:
    return {key: _copy(child) for key, child in value.items()} if isinstance(value, dict) else value
