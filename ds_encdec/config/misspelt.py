"""The likely meaning of a key that nobody knows: a field beside it, one elsewhere, or a word of other tools."""

from difflib import SequenceMatcher
from functools import cache

from ds_encdec.config.rules import fields
from ds_encdec.config.sections import EvalSet
from ds_encdec.config.settings import closest, join, unknown_key
from ds_encdec.config.words import their_sections, words_by_name


def _called(name: str) -> list[str]:
    """The fields called `name` whose path can be written: the evaluation sets' ones have a name of the user's in it."""
    return [path for path in fields() if path.endswith("." + name) and not path.startswith("data.eval_sets.")]


@cache
def homes(name: str) -> list[str]:
    """The fields called `name`, but for those of phases, of sources in a mixture, and of evaluation's named sets."""
    return [path for path in _called(name) if ".0." not in path and not path.startswith("phases.")]


def fields_in(path: str) -> list[str]:
    """The names of the fields of the section at `path`."""
    parent = in_schema(path)
    if parent.rpartition(".")[0] == "data.eval_sets":  # whatever its name
        return [*EvalSet.model_fields]
    return [name for above, _, name in (known.rpartition(".") for known in fields()) if above == parent]


def in_schema(path: str) -> str:
    """The name in `fields` of what is at `path`, which may lead through any item of a list."""
    return ".".join("0" if key.isdigit() else key for key in path.split("."))


def meant(path: str) -> tuple[str, list[str]]:
    """The message about the unknown key at `path`, and the fields that it may stand for.

    Other tools' words, and names that need no section, count where they would be read; beside a field of its own
    section or name they must be much nearer.
    """
    parent, _, key = path.rpartition(".")
    beside = fields_in(parent)
    section, _, field = key.partition("_")
    if not parent and section in beside and field:
        return f"unknown key; behind a section stands a dot: `{section}.{field}`", []
    flat, words = _near_names(key) if "." not in parent else {}, _near_words(parent, key)
    ours = [*beside, *flat] if not parent or parent in their_sections() else beside
    guess = closest(key, ours, {**flat, **words})
    if guess is not None and guess not in beside and not _would_be_accepted(guess, key):
        guess = None
    elsewhere = _called(key)
    if guess in beside:
        return unknown_key(key, [guess]), [join(parent, guess)]
    if elsewhere or (guess in flat and guess not in ours):
        elsewhere = elsewhere or [flat[guess or ""]]
        return unknown_key(key, (), elsewhere), elsewhere
    if guess is None:
        known = "unknown key; docs/coming-from.md lists the words that are known"
        return known if parent in their_sections() else unknown_key(key, beside), []
    field = flat.get(guess) or words[guess]
    return f"unknown key; did you mean `{guess}`" + (f" (here `{field}`)?" if field else "?"), [field] if field else []


def _near_names(key: str) -> dict[str, str]:
    """Names of fields that need no section, with the fields' paths."""
    names = {path.rpartition(".")[2] for path in fields() if "." in path}
    return {name: homes(name)[0] for name in sorted(names) if _is_near(name, key) and len(homes(name)) == 1}


def _near_words(parent: str, key: str) -> dict[str, str]:
    """The words of other tools that are read in the section `parent`, and the field of each; empty for none."""
    words = dict.fromkeys(their_sections(), "") if not parent else {}
    for word, row in words_by_name().items():
        name = word.removeprefix(f"{parent}.")
        if "." not in name and (name != word or "." not in parent):
            words[name] = row.field
    return {name: words[name] for name in sorted(words) if _is_near(name, key)}


def _would_be_accepted(guess: str, key: str) -> bool:
    """Return whether a name of another section is so near that a person would take it for what was meant."""
    return guess.startswith(key) or SequenceMatcher(None, guess.lower(), key.lower()).ratio() >= 0.8


def _is_near(name: str, key: str) -> bool:
    """Return whether `name`, one of many, is worth a comparison."""
    return name[:1] == key[:1] and (abs(len(name) - len(key)) <= 2 or name.startswith(key))
