"""Turn nested settings into a validated configuration, or into a list of all their problems."""

from collections.abc import Iterable, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ds_encdec.config.data_sections import EvalSet
from ds_encdec.config.rules import find_conflicts
from ds_encdec.config.sections import Sections, fields
from ds_encdec.config.settings import (
    DEFAULT,
    Conflict,
    Mention,
    Problem,
    Settings,
    above,
    closest,
    join,
    masked,
    show,
    unknown_key,
    within,
)
from ds_encdec.config.words.other_tools import BY_NAME, THEIR_SECTIONS

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text (put a number between quotes)",
    "tuple_type": "a list",
    "dict_type": "a mapping (`key: value` lines)",
    "model_type": "a mapping (`field: value` lines, with a blank behind the colon)",
}
# Valid values for missing required fields, about which nothing will be reported, by the field's type.
_STAND_INS: dict[Any, Any] = {int: 1, float: 1.0, str: "unknown"}
_SIGNS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}


@dataclass(frozen=True)
class Checked:
    """The sections, the fields that hold stand-ins (`broken`), and the fields that contradict (`conflicts`)."""

    sections: Sections
    broken: Set[str]
    conflicts: Set[tuple[str, ...]]

    @property
    def is_sound(self) -> bool:
        """Return whether this is a valid configuration."""
        return not self.broken and not self.conflicts

    def knows(self, fields: tuple[str, ...]) -> bool:
        """Return whether none of `fields` is broken, and they have not been reported together."""
        return fields not in self.conflicts and not any(within(field, path) for field in fields for path in self.broken)


def validate(settings: Settings, problems: list[Problem], unread: Sequence[str] = ()) -> Checked:
    """Return the sections of a configuration, and append the problems of `settings` to `problems`. Only fields that are
    valid by themselves can be checked for contradictions. To report both at once, invalid fields and unknown keys are
    removed, stand-ins replace missing required fields, and the rest is validated again. Contradictions with these
    fields, or with the fields or sections `unread`, are dropped."""
    rest, unusable = deepcopy(settings), settings.unusable()
    problems.extend(Problem((mention(settings, path),), message) for path, message in unusable.items())
    broken = _take_out(rest, unusable)
    while True:
        try:
            config = Sections.model_validate(rest.values)
            break
        except ValidationError as error:
            details = error.errors()
        broken.update(
            field
            for detail in details
            if detail["type"] == "extra_forbidden"
            for field in meant(_path(detail))[1]
            if field not in settings
        )
        # A required field that was removed below is missing in the next round, which is not the user's error.
        problems.extend(_explain(settings, detail) for detail in details if _path(detail) not in broken)
        lacking = {_path(detail) for detail in details if detail["type"] == "missing"}
        taken_out = _take_out(rest, [path for path in map(_path, details) if path not in lacking])
        assert all(taken_out), "every section has defaults, so no error is about the whole"
        for path in lacking:
            if isinstance(section := rest.get(above(path)), dict):  # the section itself was not removed
                section[path.rpartition(".")[2]] = _STAND_INS[fields()[_in_schema(path)].annotation]
        broken |= taken_out | lacking
    conflicts = [
        conflict
        for conflict in find_conflicts(config)
        if not any(within(field, path) for field in conflict.fields for path in (*broken, *unread))
    ]
    problems.extend(mention_all(settings, conflict) for conflict in conflicts)
    return Checked(config, broken, {conflict.fields for conflict in conflicts})


def wrong_value(path: str, value: Any) -> str | None:
    """Return why the field at the dotted `path` cannot have `value`; None if it can."""
    settings = Settings()
    settings.put(path, value, "")
    try:
        Sections.model_validate(settings.values)
    except ValidationError as error:
        return next((_allowed(detail) for detail in error.errors() if within(_path(detail), path)), None)
    return None


def default_of(path: str) -> Any:
    """Return the default of the field at the dotted `path`, or None."""
    info = _field_at(path)
    return None if info is None or info.is_required() else info.get_default(call_default_factory=True)


def mention(settings: Settings, path: str) -> Mention:
    """Return the field at `path` with the place that set it, and its value."""
    if path not in settings:
        return Mention(DEFAULT, path, show(default_of(path)))
    value = settings.get(path) if _field_at(path) else masked(path.rpartition(".")[2], settings.get(path))
    return Mention(settings.place_of(path), path, show(value))


def mention_all(settings: Settings, conflict: Conflict) -> Problem:
    """Return `conflict` as a problem that mentions all its fields."""
    return Problem(tuple(mention(settings, path) for path in conflict.fields), conflict.message)


def _path(detail: ErrorDetails) -> str:
    return ".".join(str(part) for part in detail["loc"])


def _explain(settings: Settings, detail: ErrorDetails) -> Problem:
    path, kind = _path(detail), detail["type"]
    if kind == "missing":
        return Problem((Mention(settings.place_of(path), path),), "the field is required")
    # Nobody wrote the items of a list if a single string or a mapping stands for it.
    written = above(path) if path not in settings and path.rpartition(".")[2].isdigit() else path
    return Problem((mention(settings, written),), meant(path)[0] if kind == "extra_forbidden" else _allowed(detail))


def _allowed(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        expected = context["expected"]
        names = (name.strip("'") for name in expected.replace(" or ", ", ").split(", "))
        guess = closest(str(detail["input"]), names, cutoff=0.6)  # few names: stf is as near as this to sft
        return f"allowed: {expected}" + (f"; did you mean `{guess}`?" if guess else "")
    if kind in _SIGNS:
        (limit,) = context.values()
        return f"must be {_SIGNS[kind]} {limit}"
    return f"must be {_EXPECTED[kind]}" if kind in _EXPECTED else detail["msg"].removeprefix("Value error, ")


def _take_out(rest: Settings, paths: Iterable[str]) -> set[str]:
    """Remove the settings at `paths`, or the nearest removable ones around them (an item's list), and return these."""
    parts = set()
    for path in paths:
        while path and not (path in rest and isinstance(rest.get(above(path)), dict)):
            path = above(path)
        parts.add(path)
    for path in parts:
        if isinstance(section := rest.get(above(path)), dict):
            section.pop(path.rpartition(".")[2], None)
    return parts


def _field_at(path: str) -> FieldInfo | None:
    return fields().get(_in_schema(path))


@cache
def homes(name: str) -> list[str]:
    """Return the fields called `name`, without those of phases, of sources in a mixture, and of evaluation sets."""
    return [path for path in _called(name) if ".0." not in path and not path.startswith("phases.")]


def _called(name: str) -> list[str]:
    """Return the fields called `name`, without those of evaluation sets, whose paths contain a name of the user's."""
    return [path for path in fields() if path.endswith("." + name) and not path.startswith("data.eval_sets.")]


def _in_schema(path: str) -> str:
    return ".".join("0" if key.isdigit() else key for key in path.split("."))


def meant(path: str) -> tuple[str, list[str]]:
    """Return the message about the unknown key at `path`, and the fields that it may mean. The same name elsewhere
    takes precedence over similar ones, and those beside it over those that need no section or are another tool's."""
    parent, _, key = path.rpartition(".")
    if elsewhere := _called(key):
        return unknown_key(key, (), elsewhere), elsewhere
    parts = (known.rpartition(".") for known in fields())
    beside = [name for section, _, name in parts if section == _in_schema(parent)]
    if above(parent) == "data.eval_sets":  # whatever the name of the set
        beside = [*EvalSet.model_fields]
    names = _elsewhere(parent) if "." not in parent else {}
    guess = closest(key, [*beside, *names])
    if guess in beside:
        return unknown_key(key, [guess]), [join(parent, guess)]
    if guess and closest(key, [guess], cutoff=0.8):
        field = names[guess]
        return unknown_key(key, [guess], [field] if field else []), [field] if field else []
    if parent in THEIR_SECTIONS:
        return "unknown key; docs/coming-from.md lists the words that are known", []
    return unknown_key(key, beside), []


@cache
def _elsewhere(parent: str) -> dict[str, str]:
    """Return the names that need no section, and other tools' words that are read in `parent`, with their fields."""
    names = {} if parent else dict.fromkeys(THEIR_SECTIONS, "")
    words = ((word.removeprefix(f"{parent}."), row.field) for word, row in BY_NAME.items())
    names |= {name: field for name, field in words if "." not in name}
    own = {path.rpartition(".")[2] for path in fields() if "." in path}
    return names | {name: homes(name)[0] for name in own if len(homes(name)) == 1}
