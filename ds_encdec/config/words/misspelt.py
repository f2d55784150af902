"""Guess the meaning of an unknown key: a field beside it, one elsewhere, or a word of other tools."""

from functools import cache

from ds_encdec.config.data_sections import EvalSet
from ds_encdec.config.sections import fields
from ds_encdec.config.settings import closest, join, unknown_key
from ds_encdec.config.words.other_tools import their_sections, words_by_name


def _called(name: str) -> list[str]:
    """Return the fields called `name`, without those of evaluation sets, whose paths contain a name of the user's."""
    return [path for path in fields() if path.endswith("." + name) and not path.startswith("data.eval_sets.")]


@cache
def homes(name: str) -> list[str]:
    """Return the fields called `name`, without those of phases, of sources in a mixture, and of evaluation sets."""
    return [path for path in _called(name) if ".0." not in path and not path.startswith("phases.")]


def fields_in(path: str) -> list[str]:
    """Return the names of the fields of the section at `path`."""
    parent = in_schema(path)
    if parent.rpartition(".")[0] == "data.eval_sets":  # whatever the name of the set
        return [*EvalSet.model_fields]
    return [name for above, _, name in (known.rpartition(".") for known in fields()) if above == parent]


def in_schema(path: str) -> str:
    """Return the name in `fields` of `path`, which may lead through any item of a list."""
    return ".".join("0" if key.isdigit() else key for key in path.split("."))


def meant(path: str) -> tuple[str, list[str]]:
    """Return the message about the unknown key at `path`, and the fields that it may mean. The same name elsewhere
    takes precedence over similar ones, which may be beside it, need no section, or be words of other tools."""
    parent, _, key = path.rpartition(".")
    beside = fields_in(parent)
    section, _, field = key.partition("_")
    if not parent and section in beside and field:
        return f"unknown key; behind a section stands a dot: `{section}.{field}`", []
    if elsewhere := _called(key):
        return unknown_key(key, (), elsewhere), elsewhere
    names = _elsewhere(parent) if "." not in parent else {}
    guess = closest(key, [*beside, *(name for name in names if _is_near(name, key))])
    if guess in beside:
        return unknown_key(key, [guess]), [join(parent, guess)]
    if guess and closest(key, [guess], cutoff=0.8):
        field = names[guess]
        if field and parent and parent not in their_sections() and guess not in words_by_name():
            return unknown_key(key, (), [field]), [field]
        return f"unknown key; did you mean `{guess}`" + (f" (here `{field}`)?" if field else "?"), [field] * bool(field)
    known = "unknown key; docs/coming-from.md lists the words that are known"
    return known if parent in their_sections() else unknown_key(key, beside), []


@cache
def _elsewhere(parent: str) -> dict[str, str]:
    """Return the names that need no section, and other tools' words that are read in `parent`, with their fields."""
    names = dict.fromkeys(their_sections(), "") if not parent else {}
    for word, row in words_by_name().items():
        name = word.removeprefix(f"{parent}.")
        if "." not in name:
            names[name] = row.field
    own = {path.rpartition(".")[2] for path in fields() if "." in path}
    return names | {name: homes(name)[0] for name in own if len(homes(name)) == 1}


def _is_near(name: str, key: str) -> bool:
    return name[:1] == key[:1] and (abs(len(name) - len(key)) <= 2 or name.startswith(key))
