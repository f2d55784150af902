"""Describes arguments of the command line as tables, and reads values that argparse cannot read by itself."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ds_encdec.base.types import ConfigError

# Keywords of argparse for each argument, by its names (separated by blanks); those with `only_one` exclude each other.
Arguments = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of `ds-encdec`, with a summary and an example for its help. `run` takes the options and settings, and
    returns the exit code (None: 0). `takes_settings`: `section.field=value` may follow the arguments. `kept`: what an
    interrupted start leaves to the next one."""

    run: Callable[[argparse.Namespace, Sequence[str]], int | None]
    summary: str
    example: str
    arguments: Arguments
    takes_settings: bool = False
    kept: str = ""


def mistake(message: str, program: str) -> ConfigError:
    """Return the error of a wrong command line of `program`."""
    return ConfigError(f"command line: {message}\n      `{program} --help` lists its arguments")


class Parser(argparse.ArgumentParser):
    """Reads a command line without abbreviations, and reports mistakes in the form of the report on fields."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)  # an abbreviation may be a misspelt setting

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's `message`, and the nearest choice."""
        if choice := re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
            near = difflib.get_close_matches(choice[1], re.findall(r"[\w.-]+", choice[2]), 1)
            message += f"; did you mean {near[0]}?" if near else ""
        raise mistake(message, self.prog)

    def explain(self, example: str, *, takes_settings: bool) -> None:
        """Make the help show an example, and the place of settings. Call this once all arguments are added."""
        if takes_settings:
            usage = self.format_usage().partition("usage: ")[2].rstrip().replace("%", "%%")
            indent = " " * len(f"usage: {self.prog} ")
            self.usage = f"{usage}\n{indent}[section.field=value ...]"
        self.epilog = f"example:\n  {example}"
        self.formatter_class = argparse.RawDescriptionHelpFormatter


def add(parser: argparse.ArgumentParser, arguments: Arguments) -> None:
    """Add the arguments of a table to `parser`."""
    group = parser.add_mutually_exclusive_group() if any("only_one" in how for how in arguments.values()) else parser
    for names, how in arguments.items():
        parent, kind = group if "only_one" in how else parser, how.get("type")
        keywords = {key: value for key, value in how.items() if key != "only_one"}
        if names.startswith("-") and kind in _VALUES and not how.get("choices"):
            keywords.setdefault("metavar", _VALUES[kind])
        action = parent.add_argument(*names.split(), **keywords)
        # Underscores work, too, but help has one spelling.
        action.option_strings[:] = [name for name in action.option_strings if "_" not in name]  # type: ignore[index]


def value(text: str, type: Callable[[str], Any] = str, **more: Any) -> dict[str, Any]:
    """Return the row of an argument with a value, explained by `text`."""
    return {"type": type, "help": text, **more}


def flag(text: str) -> dict[str, Any]:
    """Return the row of an option without a value, explained by `text`."""
    return {"action": "store_true", "help": text}


def positive(number: type[int] | type[float]) -> Callable[[str], float]:
    """Return a function with which argparse reads numbers above 0."""

    def read(text: str) -> float:
        try:
            found = number(text)
        except ValueError:
            found = number()
        if not 0 < found < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a {'whole ' * (number is int)}number above 0")
        return found

    return read


COUNT, RATE = positive(int), positive(float)
# The name of a value of each type in the help, if its argument has no better one.
_VALUES: dict[Any, str] = {Path: "FILE", COUNT: "N", int: "N", RATE: "X", float: "X"}


def tokens(text: str) -> int:
    """Read a number of tokens as people write it: 5e11, 500B, 10M."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        number = float(text if unit == 1.0 else text[:-1]) * unit
    except ValueError:
        number = math.nan
    if not (1 <= number < math.inf and round(number, 3).is_integer()):
        raise argparse.ArgumentTypeError(f"{text} is not a number of tokens; write 5e11, 500B or 10M")
    return round(number)


JSON: Arguments = {"--json": flag("print one JSON object")}
# A configuration that may stand without `--config`; `read_arguments` in config/command_line.py merges the two.
CONFIG: Arguments = {
    "config": value("YAML file, or a shipped one's name (ds-encdec init lists them)", Path, nargs="?"),
    "--config": value("the same, as an option", Path, dest="config_option"),
}
CONFIG_FILES = CONFIG | {"--deepspeed_config --deepspeed-config": value("raw DeepSpeed JSON", Path)}
VERBOSITY: Arguments = {
    "-v --verbose": flag("log more: developer messages, and those of other ranks") | {"only_one": True},
    "-q --quiet": flag("log less: only warnings and errors, and no progress") | {"only_one": True},
}
