"""From nested settings to a validated configuration, or to a list of everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ds_encdec.config.report import DEFAULT, Mention, Problem, closest, show, unknown_key
from ds_encdec.config.rules import Conflict, ConflictingFields
from ds_encdec.config.settings import Settings, join

if TYPE_CHECKING:
    from ds_encdec.config.schema import FullConfig

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text (put a number between quotes)",
    "tuple_type": "a list",
    "dict_type": "a mapping (`key: value` lines)",
    "model_type": "a mapping (`field: value` lines)",
    "model_attributes_type": "a mapping (`field: value` lines)",
}
_BOUNDS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}


def validate(schema: type[FullConfig], settings: Settings, problems: list[Problem]) -> FullConfig | None:
    """The configuration that `settings` describe, or None and what is wrong with them in `problems`.

    Pydantic checks fields against each other only when each is valid by itself. To report both at once,
    invalid fields are taken out and the rest is checked again; contradictions that involve a field
    taken out are dropped, since nobody knows what was meant there.
    """
    values = deepcopy(settings.values)
    broken: set[str] = set()
    while True:
        try:
            config = schema.model_validate(values)
            return None if broken else config
        except ValidationError as error:
            invalid = [detail for detail in error.errors() if not _conflicts_of(detail)]
            explained = [_explain(schema, settings, detail) for detail in invalid]
            # A required field that was taken out is missing in the next round: that was our doing.
            problems.extend(problem for path, problem in explained if path not in broken)
            taken_out = {_set_part(values, path) for path, _ in explained}
            assert all(taken_out), "every section has defaults, so no error is about the whole"
            for path in taken_out:
                _remove(values, path)
            broken |= taken_out
            if not invalid:
                found = [conflict for detail in error.errors() for conflict in _conflicts_of(detail)]
                problems.extend(_mention_all(schema, settings, c) for c in found if not _touches(c, broken))
                return None


def default_of(schema: type[BaseModel], path: str) -> Any:
    """The default of the field at the dotted `path`; None where there is none."""
    section, _, field = path.partition(".")
    info = schema.model_fields.get(section)
    if info is None or not field:
        return info.get_default(call_default_factory=True) if info and not info.is_required() else None
    inner = _section_type(info.annotation)
    return default_of(inner, field) if inner else None


def mention(schema: type[BaseModel], settings: Settings, path: str) -> Mention:
    """The field at `path` with where it was set, and to what."""
    if path in settings:
        return Mention(settings.place_of(path), path, show(settings.get(path)))
    return Mention(DEFAULT, path, show(default_of(schema, path)))


def _conflicts_of(detail: ErrorDetails) -> list[Conflict]:
    raised = detail.get("ctx", {}).get("error")
    return raised.conflicts if isinstance(raised, ConflictingFields) else []


def _mention_all(schema: type[BaseModel], settings: Settings, conflict: Conflict) -> Problem:
    return Problem(tuple(mention(schema, settings, path) for path in conflict.fields), conflict.message)


def _touches(conflict: Conflict, broken: Iterable[str]) -> bool:
    return any((field + ".").startswith(path + ".") or (path + ".").startswith(field + ".")
               for field in conflict.fields for path in broken)  # fmt: skip


def _explain(schema: type[BaseModel], settings: Settings, detail: ErrorDetails) -> tuple[str, Problem]:
    """The dotted path of an error of pydantic's, and the same error in our words."""
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        message = "an item is missing from the list" if path[-1].isdigit() else "the field is required"
        return path, Problem((Mention(settings.place_of(path), path),), message)
    if detail["type"] == "extra_forbidden":
        parent, _, key = path.rpartition(".")
        names = _fields_at(schema, parent)
        elsewhere = [] if closest(key, names) else [name for name in _all_fields(schema) if name.endswith("." + key)]
        return path, Problem((mention(schema, settings, path),), unknown_key(key, names, elsewhere))
    return path, Problem((mention(schema, settings, path),), _allowed(detail))


def _allowed(detail: ErrorDetails) -> str:
    """What may stand where the error is."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        guess = closest(str(detail["input"]), [name.strip("'") for name in _split_expected(context["expected"])])
        return f"allowed: {context['expected']}" + (f"; did you mean '{guess}'?" if guess else "")
    if kind in _BOUNDS:
        limit = next(context[name] for name in ("gt", "ge", "lt", "le") if name in context)
        return f"must be {_BOUNDS[kind]} {limit}"
    if kind in ("too_short", "too_long"):
        return f"must have {context.get('min_length', context.get('max_length'))} items"
    if kind in _EXPECTED:
        return f"must be {_EXPECTED[kind]}"
    return detail["msg"].removeprefix("Value error, ")


def _split_expected(expected: str) -> list[str]:
    return expected.replace(" or ", ", ").split(", ")


def _set_part(values: dict[str, Any], path: str) -> str:
    """The longest part of `path` that leads through mappings to something that is set.

    Shorter than `path` for an item of a list and for a required field that is missing.
    """
    current: Any = values
    found: list[str] = []
    for key in path.split("."):
        if not isinstance(current, dict) or key not in current:
            break
        found.append(key)
        current = current[key]
    return ".".join(found)


def _remove(values: dict[str, Any], path: str) -> None:
    *parents, last = path.split(".")
    for key in parents:
        values = values.get(key, {})
    values.pop(last, None)


def _section_type(annotation: Any) -> type[BaseModel] | None:
    """The section that a field of type `annotation` holds: itself, in a union, or in a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_type(part))), None)


def _fields_at(schema: type[BaseModel], path: str) -> list[str]:
    section: type[BaseModel] | None = schema
    for key in path.split(".") if path else []:
        if section and not key.isdigit():
            section = _section_type(section.model_fields[key].annotation) if key in section.model_fields else None
    return list(section.model_fields) if section else []


def _all_fields(schema: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, info in schema.model_fields.items():
        yield join(path, name)
        if inner := _section_type(info.annotation):
            yield from _all_fields(inner, join(path, name))
