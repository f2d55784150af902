"""Overrides from the command line: `section.field=value`, `--section.field=value`, `--section.field value`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_encdec.config.plain_files import MAX_DEPTH
from ds_encdec.config.report import COMMAND_LINE, Mention, Problem, show
from ds_encdec.config.settings import Settings, is_name
from ds_encdec.config.yaml_text import UnreadableError, parse_value


@dataclass(frozen=True)
class Override:
    """One setting of the command line: the dotted `field` and the `value` as YAML reads it."""

    field: str
    value: Any


def parse_overrides(arguments: Sequence[str], problems: list[Problem]) -> list[Override]:
    """The overrides in `arguments`, in their order. What cannot be read is appended to `problems`."""
    found: list[Override] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        if not equals and argument.startswith("--") and remaining and not remaining[0].startswith("--"):
            equals, text = "=", remaining.pop(0)
        parts = name.split(".")
        if not equals or len(parts) > MAX_DEPTH or not all(part.isidentifier() and is_name(part) for part in parts):
            problems.append(_problem(argument, "not a setting; write `section.field=value`"))
            continue
        try:
            found.append(Override(name, parse_value(text, COMMAND_LINE, name, problems)))
        except UnreadableError as error:
            message = f"{show(text)} is not a YAML value; quote it, as in {name}='\"...\"' ({error})"
            problems.append(_problem(name, message))
    return found


def apply_overrides(settings: Settings, overrides: Sequence[Override], problems: list[Problem]) -> Settings:
    """`settings` with every override put in; of two for the same field the later one counts.

    A mapping given as a value replaces what stood there as a whole.
    """
    result = settings.copy()
    for override in overrides:
        if not result.put(override.field, override.value, COMMAND_LINE):
            problems.append(_problem(override.field, "no such field: what stands above it is set to a single value"))
    return result


def _problem(field: str, message: str) -> Problem:
    return Problem((Mention(COMMAND_LINE, field),), message)
