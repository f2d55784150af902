"""What a run's configuration has other than the defaults, and what several runs have other than each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ds_encdec.config.errors import show
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.settings import join

NOT_SET = "not set"
"""Shown in the place of a field that one side does not have."""
PLACES = ("infra.output_dir",)
"""Fields in which any two runs differ."""


class Change(NamedTuple):
    """A field that is not at its default, both values as text; `known`: whether this version has the field."""

    name: str
    default: str
    value: str
    known: bool


def changes_from_defaults(config: Mapping[str, Any]) -> list[Change]:
    """The fields of `config` (nested, as in YAML) whose values are not the defaults, in the order of the schema."""
    defaults = dict(_leaves(FullConfig().model_dump(mode="json")))
    return [
        Change(name, _shown(defaults, name), show(value), _is_known(name))
        for name, value in _leaves(config)
        if name not in defaults or defaults[name] != value
    ]


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The fields that are not the same in all `configs`, each with its value in every one, as text."""
    flat = [dict(_leaves(config)) for config in configs]
    names = sorted({name: None for values in flat for name in values}, key=_section_order)
    rows = [(name, [_shown(values, name) for values in flat]) for name in names if name not in PLACES]
    # A field that is a mapping in one run and null in another is shown by what is in the mapping.
    return [
        (name, shown)
        for name, shown in rows
        if len(set(shown)) > 1 and not any(other.startswith(f"{name}.") for other in names)
    ]


def _section_order(name: str) -> int:
    sections = list(FullConfig.model_fields)
    section = name.partition(".")[0]
    return sections.index(section) if section in sections else len(sections)


def _shown(values: Mapping[str, Any], name: str) -> str:
    return show(values[name]) if name in values else NOT_SET


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, child in value.items():
            yield from _leaves(child, join(path, key))
    else:
        yield path, value


def _is_known(name: str) -> bool:
    """Whether the schema has the section and the field that `name` begins with."""
    section, _, rest = name.partition(".")
    sections = {key: type(value).model_fields for key, value in FullConfig()}
    return section in sections and rest.split(".")[0] in sections[section]
