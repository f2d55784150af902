"""Translate settings in other tools' words (other_tools.yaml), and fields without their sections, before validation."""

import os
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from ds_encdec.config.sections import fields, section_in
from ds_encdec.config.settings import COMMAND_LINE, Mention, Problem, Settings, join, show, within
from ds_encdec.config.shipped import find_shipped
from ds_encdec.config.validation import homes, meant, mention, wrong_value
from ds_encdec.config.words.other_tools import BY_NAME, THEIR_SECTIONS, Meaning, Word
from ds_encdec.config.yaml.text import read_settings

# Two fields for one thing: on the command line, one replaces the other.
_INSTEAD = {
    "training.num_train_epochs": "training.num_train_steps",
    "training.num_train_steps": "training.num_train_epochs",
    "training.warmup_ratio": "training.warmup_steps",
    "training.warmup_steps": "training.warmup_ratio",
}


def read_words(settings: Settings, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    """Move settings in other tools' words into our fields, and return the fields that these set. Words without a field,
    or in contradiction to other settings, become `problems`; `notes` reports how each other word was read."""
    found: dict[str, Any] = {}
    for path, value in list(_foreign(settings.values)):
        meaning, (section, _, name) = _meaning(path, value), path.rpartition(".")
        if meaning is None and section not in THEIR_SECTIONS:
            continue  # the schema reports it
        word, row = mention(settings, path), _row(path)
        settings.get(section).pop(name, None)
        if section in THEIR_SECTIONS and not settings.get(section):
            settings.values.pop(section, None)
        if meaning is None:
            problems.append(Problem((word,), meant(path)[0]))
        elif isinstance(meaning, str):
            problems.append(Problem((word,), meaning if path in fields() else f"not a field here: {meaning}"))
        elif meaning:
            for field, wanted in meaning.items():
                _set(settings, problems, field, wanted, word)
                found.setdefault(field, wanted)
            notes.append(f"{word} is read as {', '.join(f'{field} = {show(what)}' for field, what in meaning.items())}")
        elif word.shown != "null":
            notes.append(f"{word} is left out" + (f": {row.why}" if row is not None and row.ignored else ""))
    return found


def _set(settings: Settings, problems: list[Problem], field: str, wanted: Any, word: Mention) -> None:
    """Set `field` to the wanted value, unless the settings have another one. `{}` switches a block on and keeps its
    content; null switches it off, and then it must be empty."""
    present = settings.get(field)
    if field == "training.per_device_train_batch_size" and "auto" in (present, wanted):
        present = wanted = "auto"  # in Hugging Face's words a number may stand beside it
        settings.put(field, wanted, settings.place_of(field) or word.place)
    blocks = (path for path, info in fields().items() if "." in path and section_in(info.annotation))
    off = next((block for block in blocks if settings.get(block, wanted) is None and within(field, block)), None)
    differs = present is not None and present != wanted and not (wanted == {} and isinstance(present, dict))
    if differs or (off and wanted is not None):
        both = off or field
        problems.append(Problem((word, mention(settings, both)), f"both are {both}: make them equal, or remove one"))
    elif present is None:
        settings.put(field, deepcopy(wanted), word.place + (f" ({word.field})" if word.place != COMMAND_LINE else ""))


def read_overrides(
    settings: Settings, overrides: Sequence[str], problems: list[Problem], notes: list[str]
) -> dict[str, Any]:
    """Put settings of the command line, in any tool's words, into `settings`; return the fields that they set. Each is
    `name=value`, `--name=value`, `--name` and `value`, or for a switch `--name` alone. The later of two for one field
    counts. Mistakes are appended to `problems`."""
    remaining, each, found = list(overrides), list[str](), dict[str, Any]()
    while remaining:
        word = remaining.pop(0)
        each.append(with_value(word, remaining) if word.startswith("--") and "=" not in word else word)
    for name, value in read_settings(each, problems):
        setting = Settings()
        setting.put(name, value, COMMAND_LINE)
        claimed = read_words(setting, problems, notes)
        for field, wanted in (({name: setting.get(name)} if name in setting else {}) | claimed).items():
            found[field] = wanted
            if field != name and wanted == {} and isinstance(settings.get(field), dict):
                continue  # the block is on already
            if not settings.put(field, deepcopy(wanted), COMMAND_LINE):
                message = "no such field: what stands above it is set to a single value"
                problems.append(Problem((Mention(COMMAND_LINE, name),), message))
            if wanted is not None and field in _INSTEAD and settings.get(_INSTEAD[field]) is not None:
                settings.put(_INSTEAD[field], None, COMMAND_LINE)
    return found


def with_value(word: str, remaining: list[str]) -> str:
    """Return `--name=value` for `word`, a `--name`, with the value that is taken from `remaining`, or `word` itself if
    no value follows. A switch before a setting or the name of a configuration may stand alone, and is then true."""
    follows, name = remaining[0] if remaining and not remaining[0].startswith("--") else None, word.removeprefix("--")
    meaning = {name: True} if name in fields() else _meaning(name, True)
    is_switch = isinstance(meaning, dict) and all(wrong_value(*one) is None for one in meaning.items())
    if is_switch and (
        follows is None or re.match(r"[\w.]+=|.*\.ya?ml$", follows) or os.path.isfile(find_shipped(follows) or "")
    ):
        return f"{word}=true"
    return word if follows is None else f"{word}={remaining.pop(0)}"


def given_fields(overrides: Sequence[str]) -> set[str]:
    """Return the fields, by our names, that settings of the command line set."""
    return set(read_overrides(Settings(), overrides, [], []))


def _foreign(values: dict[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that may be in other tools' words, with their paths: unknown names, and fields with rows."""
    for key, value in values.items():
        path = join(at, key)
        info = fields().get(path)
        if info is not None and isinstance(value, dict) and section_in(info.annotation):
            yield from _foreign(value, path)
        elif not at and info is None and key in THEIR_SECTIONS and isinstance(value, dict) and value:
            yield from ((join(path, inner), what) for inner, what in value.items())
        elif info is None or path in BY_NAME:
            yield path, value


def _row(path: str) -> Word | None:
    """Return the row for `path`. A name without dots is at the top level, or in a section of ours or of theirs."""
    section, _, name = path.rpartition(".")
    rows = BY_NAME
    return rows.get(path) or (rows.get(name) if "." not in section and path not in fields() else None)


def _meaning(path: str, value: Any) -> Meaning | None:
    """Return the fields that a setting means, why no field fits, or None if it is unknown. Under a name that is not
    ours null, and an `auto` that no field accepts, set nothing."""
    section, _, name = path.rpartition(".")
    row, known = _row(path), homes(name) if not section or section in THEIR_SECTIONS else []
    if not section and name in THEIR_SECTIONS and value in (None, {}):
        return {}
    if row is not None:
        meaning = row.meaning(value)
    elif len(known) == 1:
        meaning = {known[0]: value}
    else:
        return None
    if path not in fields():
        is_wrong = not isinstance(meaning, dict) or any(wrong_value(*one) is not None for one in meaning.items())
        if (row and value is None) or (value in (None, "auto") and is_wrong):
            return {}
        meaning = row.why if row and is_wrong and row.field and row.why else meaning
    if meaning is None or isinstance(meaning, str) or meaning == {path: value}:
        return meaning if isinstance(meaning, str) else None
    translated: dict[str, Any] = {}
    for field, wanted in meaning.items():  # the value may be another tool's, too
        own = BY_NAME[field].meaning(wanted) if field != path and field in BY_NAME else None
        if isinstance(own, str):
            return own
        translated |= {field: wanted} if own is None else own
    return translated
