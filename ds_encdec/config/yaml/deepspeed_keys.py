"""Every key that a DeepSpeed JSON may hold, and its treatment here (deepspeed_keys.yaml explains its tables). Keys of
blocks with a pydantic class in DeepSpeed come from a snapshot of that (deepspeed_keys.json)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_encdec.config.settings import show, unknown_key
from ds_encdec.config.words.other_tools import read_table

_SNAPSHOT: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
_TABLES = read_table(Path(__file__).with_suffix(".yaml"))
_OF_BLOCK = {
    block: {f"{block}.{key}": kind for key, kind in keys.items()} for block, keys in _SNAPSHOT["blocks"].items()
}


def _by_key(table: dict[str, str]) -> dict[str, str]:
    """Return the reason for each key; a block stands for the keys in it."""
    return {key: why for names, why in table.items() for name in names.split() for key in _OF_BLOCK.get(name, [name])}


# Keys for which the schema has a field; keys without effect, each with the reason for the warning; keys that may only
# have certain values, with the reason; and keys that are errors unless switched off, each with the alternative.
SCHEMA_FIELDS: dict[str, str] = _TABLES["fields"]
IGNORED = _by_key(_TABLES["ignored"])
FIXED: dict[str, tuple[list[Any], str]] = {key: (values, why) for key, (values, why) in _TABLES["fixed"].items()}
REFUSED = _by_key(_TABLES["refused"]) | dict.fromkeys(
    _SNAPSHOT["removed"], "DeepSpeed 0.19 no longer has this; remove it"
)
_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str, "list": list}
_DECIDED = {*SCHEMA_FIELDS, *IGNORED, *FIXED, *REFUSED}
# Keys that are passed to DeepSpeed unchanged (`infra.deepspeed_extra`), with the type of their value.
PASSED_ON = {key: _TYPES[kind] for kind, keys in _TABLES["passed_on"].items() for key in keys.split()}
PASSED_ON |= {key: _TYPES[kind] for keys in _OF_BLOCK.values() for key, kind in keys.items() if key not in _DECIDED}
KEYS = frozenset([*_DECIDED, *PASSED_ON])  # every known key, dotted
_BLOCKS = frozenset(key[:end] for key in KEYS for end in range(len(key)) if key[end] == ".")
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", list: "a list"}


def check_keys(block: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any, str | None]]:
    """Yield the dotted key, the value, and an error message or None for every entry of a DeepSpeed configuration. The
    schema checks the values of `SCHEMA_FIELDS`; `None` and "auto" are always valid."""
    for key, value in block.items():
        here = f"{path}.{key}" if path else key
        known = "." not in key and (here in KEYS or here in _BLOCKS)
        if known and here in _BLOCKS and isinstance(value, dict):
            yield from check_keys(value, here)
        elif not known:
            inside = f"{path}." if path else ""
            siblings = {name.removeprefix(inside).split(".")[0] for name in KEYS if name.startswith(inside)}
            elsewhere = sorted(name for name in KEYS | _BLOCKS if name.rpartition(".")[2] == key)
            message = unknown_key(key, siblings - REFUSED.keys(), elsewhere[:1])
            yield here, value, message if path else f"{message} (DeepSpeed would ignore it silently)"
        elif value is None or value == "auto":
            yield here, None, None
        elif here in _BLOCKS:
            yield here, value, "must be a block, { ... }"
        else:
            yield here, value, _wrong(here, value)


def check_extra(extra: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted keys that `infra.deepspeed_extra` must not have, each with the reason."""
    for path, _, message in check_keys(extra):
        if message is not None:
            yield path, message
        elif path in SCHEMA_FIELDS:
            yield path, f"set `{SCHEMA_FIELDS[path]}` instead"
        elif path in IGNORED:
            yield path, f"does nothing here: {IGNORED[path]}"


def _wrong(path: str, value: Any) -> str | None:
    if path in REFUSED:
        is_off = value is False or (isinstance(value, dict) and value.get("enabled") is False)
        return None if is_off else REFUSED[path]
    if path in FIXED:
        allowed, reason = FIXED[path]
        return None if value in allowed else f"only {' or '.join(map(show, allowed))} works here: {reason}"
    kind = PASSED_ON.get(path, object)
    fits = isinstance(value, kind)
    if kind in (int, float) and not isinstance(value, bool):
        fits = isinstance(value, int) or (isinstance(value, float) and (kind is float or value.is_integer()))
    return None if fits else f"must be {_TYPE_NAMES[kind]}"
