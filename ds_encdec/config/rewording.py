"""Settings in the words of other tools (word_table.py), put into ours before they are validated.

A name at the top level that only one field has is that field. `Reading.notes` tell what was read as what.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ds_encdec.config.misspelt import THEIR_SECTIONS, homes, meant
from ds_encdec.config.rules import fields, section_in
from ds_encdec.config.settings import COMMAND_LINE, Mention, Problem, Settings, above, join, show, within
from ds_encdec.config.shipped import find_shipped
from ds_encdec.config.validation import mention, wrong_value
from ds_encdec.config.word_table import by_name
from ds_encdec.config.words import Meaning, Word
from ds_encdec.config.yaml_text import read_settings

_EITHER = (
    ("training.num_train_epochs", "training.num_train_steps"),
    ("training.warmup_ratio", "training.warmup_steps"),
)
"""Two ways to say one thing: one on the command line takes the place of the other in a file."""
_FOUND = "training.per_device_train_batch_size"
"""It may be a number and `auto` at a time, in the words of Hugging Face: then it is `auto`."""


@dataclass
class Reading:
    """Notes on how words were read, and which settings of the command line have been read, under which names."""

    notes: list[str] = field(default_factory=list)
    given: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def read_file(self, settings: Settings, problems: list[Problem]) -> None:
        """Put what `settings` say in other tools' words into our fields. Append to `problems` what has no field."""
        self._read(settings, problems)

    def read_override(
        self, present: Settings, name: str, value: Any, problems: list[Problem]
    ) -> Iterable[tuple[str, Any]]:
        """The settings that one of the command line amounts to. `present`: those that it comes after."""
        settings = Settings()
        settings.put(name, value, COMMAND_LINE)
        claimed = self._read(settings, problems)
        meant = ({name: settings.get(name)} if name in settings else {}) | claimed
        for ours, wanted in meant.items():
            is_there = ours in claimed and wanted == {} and isinstance(present.get(ours), dict)  # it is on already
            for other, (earlier, before) in self.given.items():
                if name == earlier or (other, ours) == (earlier, name):
                    continue  # the later counts, also of a block and a part of it
                if other == ours == _FOUND and "auto" in (before, wanted):
                    is_there |= before == "auto"
                elif both := _clash(other, before, ours, wanted):
                    said = (Mention(COMMAND_LINE, earlier, show(before)), Mention(COMMAND_LINE, name, show(wanted)))
                    problems.append(Problem(said, f"both are {both}: make them equal, or remove one"))
            self.given.setdefault(ours, (name, wanted))
            if not is_there:
                yield ours, deepcopy(wanted)
            for other in (pair[1 - pair.index(ours)] for pair in _EITHER if ours in pair and wanted is not None):
                if present.get(other) is not None and other not in self.given:
                    yield other, None

    def _read(self, settings: Settings, problems: list[Problem]) -> dict[str, Any]:
        claimed: dict[str, tuple[Mention, Any]] = {}
        for path, value in list(_strange(settings.values)):
            meaning = _meaning(path, value)
            if meaning is None and above(path) not in THEIR_SECTIONS:
                continue  # the schema reports it
            said = mention(settings, path)
            _remove(settings, path)
            if meaning is None:
                problems.append(Problem((said,), meant(path)[0]))
            elif isinstance(meaning, str):
                problems.append(Problem((said,), meaning if path in fields() else f"not a field here: {meaning}"))
            else:
                for ours, wanted in meaning.items():
                    self._claim(settings, claimed, problems, (ours, wanted), said)
                self._note(said, meaning, _row(path))
        return {ours: wanted for ours, (_, wanted) in claimed.items()}

    def _claim(
        self,
        settings: Settings,
        claimed: dict[str, tuple[Mention, Any]],
        problems: list[Problem],
        meant: tuple[str, Any],
        said: Mention,
    ) -> None:
        """Set a field, unless it is set to something else.

        `{}` switches a block on, whatever is in it, and null off: then nothing can be in it.
        """
        ours, wanted = meant
        present = settings.get(ours)
        if ours == _FOUND and present is not None and "auto" in (present, wanted):
            present = wanted = "auto"
            settings.put(ours, wanted, settings.place_of(ours))
        off = next((block for block in _blocks() if settings.get(block, wanted) is None and within(ours, block)), None)
        is_else = present is not None and present != wanted and not (wanted == {} and isinstance(present, dict))
        if is_else or (off and wanted is not None):
            both = off or ours
            other = claimed[both][0] if both in claimed else mention(settings, both)
            problems.append(Problem((said, other), f"both are {both}: make them equal, or remove one"))
        elif present is None:
            settings.put(
                ours, deepcopy(wanted), said.place if said.place == COMMAND_LINE else f"{said.place} ({said.field})"
            )
        claimed.setdefault(ours, (said, wanted))

    def _note(self, said: Mention, meaning: Mapping[str, Any], row: Word | None) -> None:
        ours = ", ".join(f"{name} = {show(value)}" for name, value in meaning.items())
        if ours:
            self.notes.append(f"{said} is read as {ours}")
        elif said.shown != "null":
            self.notes.append(f"{said} is left out" + (f": {row.why}" if row is not None and row.is_left_out else ""))


def _clash(field: str, value: Any, other: str, theirs: Any) -> str:
    """The field that two settings cannot both be, or nothing: they differ, or one is in what the other turns off."""
    if field == other:
        return field if value != theirs else ""
    for outer, inner, is_off in ((field, other, value is None), (other, field, theirs is None)):
        if is_off and within(inner, outer):
            return outer
    return ""


def read_overrides(settings: Settings, overrides: Sequence[str], reading: Reading, problems: list[Problem]) -> None:
    """Put settings of the command line, in whatever words, into `settings`; append to `problems` what is wrong.

    Each is `name=value` or `--name=value`, or two are `--name` and `value`, or one that is on or off is `--name` alone.
    """
    remaining, each = list(overrides), list[str]()
    while remaining:
        word = remaining.pop(0)
        each.append(with_value(word, remaining) if word.startswith("--") and "=" not in word else word)
    for name, value in read_settings(each, problems):
        if not all(settings.put(*one, COMMAND_LINE) for one in reading.read_override(settings, name, value, problems)):
            message = "no such field: what stands above it is set to a single value"
            problems.append(Problem((Mention(COMMAND_LINE, name),), message))


def with_value(word: str, remaining: list[str]) -> str:
    """`--name=value` of a `word` `--name` and the value that is taken from `remaining`.

    What is on or off may stand alone, before a setting or the name of a configuration: then it is on. `word` itself
    where there is no value.
    """
    follows = remaining[0] if remaining and not remaining[0].startswith("--") else None
    if _is_switch(word.removeprefix("--")) and (
        follows is None or re.match(r"[\w.]+=|.*\.ya?ml$", follows) or os.path.isfile(find_shipped(follows) or "")
    ):
        return f"{word}=true"
    return word if follows is None else f"{word}={remaining.pop(0)}"


def _is_switch(name: str) -> bool:
    """Return whether `name`, a field's or of another tool, may be true."""
    row = _row(name)
    if row is not None and "true" in row.values:
        return True
    found = [name] if name in fields() else [row.field] if row is not None and row.field else homes(name)
    return len(found) == 1 and wrong_value(found[0], True) is None


def given_fields(overrides: Sequence[str]) -> set[str]:
    """The fields, by our names, that settings of the command line are about."""
    reading = Reading()
    read_overrides(Settings(), overrides, reading, [])
    return set(reading.given)


def _strange(values: dict[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that may be in other words, with their paths: what is no field, and fields with rows."""
    for key, value in values.items():
        path = join(at, key)
        info = fields().get(path)
        if info is not None and isinstance(value, dict) and section_in(info.annotation):
            yield from _strange(value, path)
        elif not at and info is None and key in THEIR_SECTIONS and isinstance(value, dict) and value:
            yield from ((join(path, inner), what) for inner, what in value.items())
        elif info is None or path in _rows():
            yield path, value


@cache
def _rows() -> dict[str, Word]:
    return dict(by_name())


def _row(path: str) -> Word | None:
    """The row of what is at `path`. A name without dots is one at the top level, in a section of ours, or of theirs."""
    section, _, name = path.rpartition(".")
    return _rows().get(path) or (_rows().get(name) if "." not in section and path not in fields() else None)


def _meaning(path: str, value: Any) -> Meaning | None:
    """The fields that are meant, why there are none, or None where nobody knows."""
    section, _, name = path.rpartition(".")
    row = _row(path)
    meaning: Meaning | None = None
    if not section and name in THEIR_SECTIONS and value in (None, {}):
        return {}
    if row is not None:
        meaning = {} if value is None and path not in fields() else row.meaning(value)
        if value == "auto" and path not in fields() and _is_left_open(row, meaning):
            meaning = {}
    elif (not section or section in THEIR_SECTIONS) and len(known := homes(name)) == 1:
        # `fp16:` and `learning_rate: auto` are how others leave it out, or to their trainer.
        is_empty = value in (None, "auto") and wrong_value(known[0], value) is not None
        meaning = {} if is_empty else {known[0]: value}
    if meaning is None or isinstance(meaning, str) or meaning == {path: value}:
        return meaning if isinstance(meaning, str) else None
    meant: dict[str, Any] = {}
    for ours, wanted in meaning.items():  # the value may be theirs, too
        own = _rows()[ours].meaning(wanted) if ours != path and ours in _rows() else None
        if isinstance(own, str):
            return own
        meant |= {ours: wanted} if own is None else own
    return meant


def _is_left_open(row: Word, meaning: Meaning | None) -> bool:
    """Return whether a row that does not know `auto` leaves the matter to the trainer by it, as Accelerate's do."""
    if "auto" in row.values:
        return False
    return meaning is None or isinstance(meaning, str) or any(wrong_value(*one) is not None for one in meaning.items())


@cache
def _blocks() -> list[str]:
    """The fields that are blocks inside of a section: null leaves such a one out."""
    return [path for path, info in fields().items() if "." in path and section_in(info.annotation)]


def _remove(settings: Settings, path: str) -> None:
    section, _, name = path.rpartition(".")
    values = settings.get(section) if section else settings.values
    values.pop(name, None)
    if section in THEIR_SECTIONS and not values:
        settings.values.pop(section, None)
