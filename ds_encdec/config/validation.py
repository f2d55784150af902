"""From nested settings to a validated configuration, or to a list of everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import cache
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
_STAND_INS: dict[Any, Any] = {int: 1, float: 1.0, str: "unknown"}
_BOUNDS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}


def validate(schema: type[FullConfig], settings: Settings, problems: list[Problem]) -> FullConfig | None:
    """The configuration that `settings` describe, or None and what is wrong with them in `problems`.

    Pydantic checks fields against each other only when each is valid by itself. To report both at once,
    invalid fields and unknown keys are taken out, stand-ins are put where a required field is lacking, and the
    rest is checked again. Contradictions that involve one of these fields are dropped, since nobody
    knows what was meant there; so is what a misspelt key explains about the field it was meant for.
    """
    values = deepcopy(settings.values)
    broken: set[str] = set()
    unusable = dict(settings.unusable())
    problems.extend(Problem((mention(schema, settings, path),), message) for path, message in unusable.items())
    broken |= _take_out(values, unusable)
    while True:
        try:
            config = schema.model_validate(values)
            return None if broken else config
        except ValidationError as error:
            details = error.errors()
        invalid = [detail for detail in details if not _conflicts_of(detail)]
        unknown = [_path(detail) for detail in invalid if detail["type"] == "extra_forbidden"]
        broken.update(field for path in unknown for field in _meant(schema, path) if field not in settings)
        # A required field that was taken out is missing in the next round: that was our doing.
        problems.extend(_explain(schema, settings, detail) for detail in invalid if _path(detail) not in broken)
        broken |= _mend(schema, values, invalid)
        if not invalid:
            found = [conflict for detail in details for conflict in _conflicts_of(detail)]
            problems.extend(mention_all(schema, settings, c) for c in found if not _touches(c, broken))
            return None


def wrong_value(schema: type[FullConfig], path: str, value: Any) -> str | None:
    """What is wrong with `value` for the field at the dotted `path`, whatever else is set; None if nothing is."""
    settings = Settings()
    settings.put(path, value, "")
    try:
        schema.model_validate(settings.values)
    except ValidationError as error:
        return next((_allowed(detail) for detail in error.errors() if _within(_path(detail), path)), None)
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


def mention_all(schema: type[BaseModel], settings: Settings, conflict: Conflict) -> Problem:
    """`conflict` with where each of its fields was set, and to what."""
    return Problem(tuple(mention(schema, settings, path) for path in conflict.fields), conflict.message)


def _touches(conflict: Conflict, broken: Iterable[str]) -> bool:
    """Whether `conflict` is about a broken field. A section is only read for being there: its fields do not matter."""
    return any(_within(field, path) for field in conflict.fields for path in broken)


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(outer + ".")


def _path(detail: ErrorDetails) -> str:
    """The dotted path that an error of pydantic's is about."""
    return ".".join(str(part) for part in detail["loc"])


def _explain(schema: type[BaseModel], settings: Settings, detail: ErrorDetails) -> Problem:
    """An error of pydantic's in our words."""
    path = _path(detail)
    parent, _, key = path.rpartition(".")
    if detail["type"] == "missing":
        message = "an item is missing from the list" if key.isdigit() else "the field is required"
        return Problem((Mention(settings.place_of(path), path),), message)
    if detail["type"] == "extra_forbidden":
        elsewhere = [name for name in _meant(schema, path) if name.rpartition(".")[0] != parent]
        return Problem((mention(schema, settings, path),), unknown_key(key, _fields_at(schema, parent), elsewhere))
    # A single string may stand for a list of one, whose item 0 nobody wrote.
    written = parent if key.isdigit() and isinstance(settings.get(parent), str) else path
    return Problem((mention(schema, settings, written),), _allowed(detail))


def _meant(schema: type[BaseModel], path: str) -> list[str]:
    """The fields that an unknown key may stand for: a neighbour of similar name, else those of its name elsewhere."""
    parent, _, key = path.rpartition(".")
    guess = closest(key, _fields_at(schema, parent))
    return [join(parent, guess)] if guess else [name for name in _all_fields(schema) if name.endswith("." + key)]


def _allowed(detail: ErrorDetails) -> str:
    """What may stand where the error is."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        guess = closest(str(detail["input"]), [name.strip("'") for name in _split_expected(context["expected"])])
        return f"allowed: {context['expected']}" + (f"; did you mean `{guess}`?" if guess else "")
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


def _mend(schema: type[BaseModel], values: dict[str, Any], details: Iterable[ErrorDetails]) -> set[str]:
    """Change `values` so that they no longer have these errors; the paths of what was taken out or put in."""
    lacking = {
        _path(detail)
        for detail in details
        if detail["type"] == "missing" and isinstance(_container(values, _path(detail)), dict)
    }
    taken_out = _take_out(values, (path for path in map(_path, details) if path not in lacking))
    assert all(taken_out), "every section has defaults, so no error is about the whole"
    for path in lacking:
        container = _container(values, path)
        if isinstance(container, dict):
            parent, _, field = path.rpartition(".")
            container[field] = stand_in(_section_at(schema, parent), field)
    return taken_out | lacking


def _take_out(values: dict[str, Any], paths: Iterable[str]) -> set[str]:
    """Remove what stands at `paths`, a list for one of its items; the paths of what was removed."""
    parts = {_set_part(values, path) for path in paths}
    for part in parts:
        container = _container(values, part)
        if isinstance(container, dict):
            container.pop(part.rpartition(".")[2], None)
    return parts


def stand_in(section: type[BaseModel], field: str) -> Any:
    """A valid value for a required field, of which nothing will be reported."""
    return _STAND_INS[section.model_fields[field].annotation]


def _container(values: dict[str, Any], path: str) -> Any:
    """What the last key of `path` is looked up in; None if that is not there."""
    parent = path.rpartition(".")[0]
    return Settings(values).get(parent) if parent else values


def _set_part(values: dict[str, Any], path: str) -> str:
    """The longest part of `path` that is set and can be taken out: the whole list for one of its items."""
    while path:
        parent, _, key = path.rpartition(".")
        container = _container(values, path)
        if isinstance(container, dict) and key in container:
            break
        path = parent
    return path


def _section_type(annotation: Any) -> type[BaseModel] | None:
    """The section that a field of type `annotation` holds: itself, in a union, or in a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_type(part))), None)


def _section_at(schema: type[BaseModel], path: str) -> type[BaseModel]:
    """The section at the dotted `path`, which leads through fields of `schema` and items of lists."""
    section = schema
    for key in path.split(".") if path else []:
        if not key.isdigit():
            inner = _section_type(section.model_fields[key].annotation)
            assert inner is not None, f"{path} is no section"
            section = inner
    return section


def _fields_at(schema: type[BaseModel], path: str) -> list[str]:
    return list(_section_at(schema, path).model_fields)


@cache
def _all_fields(schema: type[BaseModel], path: str = "") -> tuple[str, ...]:
    return tuple(
        name
        for field, info in schema.model_fields.items()
        for inner in [_section_type(info.annotation)]
        for name in (join(path, field), *(_all_fields(inner, join(path, field)) if inner else ()))
    )
