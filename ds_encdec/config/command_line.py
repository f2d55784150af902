"""Read command lines of options and settings: `--word value` is a setting unless an option has that name."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_encdec.base.arguments import VERBOSITY, Arguments, Parser, add, mistake
from ds_encdec.base.types import ConfigError

if TYPE_CHECKING:
    from ds_encdec.config.schema import FullConfig

_ASSIGNED = re.compile(r"[^/]*=")  # the beginning of a setting; a path may have the sign, but after a slash


def read_arguments(
    parser: argparse.ArgumentParser, table: Arguments, given: Sequence[str], *, takes_settings: bool = True
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, the verb's own by `table`, and the settings. Options may have underscores for hyphens. Raises
    ConfigError, also for other arguments."""
    named = {name: how for names, how in {**table, **VERBOSITY}.items() for name in names.split()}
    own, settings, remaining = list[str](), list[str](), list(given)
    while remaining:
        word = remaining.pop(0)
        name, equals, text = word.partition("=")
        option = f"--{name[2:].replace('_', '-')}" if name.startswith("--") and name not in named else name
        if option.startswith("-") and option in named:
            own.append(f"{option}{equals}{text}")
            if remaining and not equals and named[option].get("action") != "store_true":
                own.append(remaining.pop(0))
        elif takes_settings and word.startswith("--") and word not in ("--help", "--version"):
            from ds_encdec.config.words.rewording import with_value  # not for --help

            settings.append(word if equals else with_value(word, remaining))
        else:
            is_setting = takes_settings and _ASSIGNED.match(word) and not word.startswith("-")
            (settings if is_setting else own).append(word)
    options, rest = parser.parse_known_args(own)
    if rest and not takes_settings:
        names = [word.partition("=")[0] for word in rest if word.startswith("-")]  # a value may be a secret
        known = {name.strip("-"): name for name in named if name.startswith("-")}
        found = (difflib.get_close_matches(name.strip("-").replace("_", "-"), known, 1, 0.8) for name in names)
        guess = next((f"; did you mean {known[near[0]]}?" for near in found if near), "")
        program = parser.prog if given[0].startswith("-") else f"{parser.prog} {given[0]}"
        raise mistake(f"unrecognized arguments: {' '.join(names or rest)}{guess}", program)
    if (by_option := vars(options).pop("config_option", None)) is not None:
        if options.config is not None:
            raise ConfigError(f"{options.config} and --config {by_option}: both name a configuration; give only one")
        options.config = by_option
    return options, [*settings, *rest]


def read_program(
    name: str, description: str | None, example: str, table: Arguments, given: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options and settings of a program without verbs. Raises ConfigError."""
    parser = Parser(prog=name, description=description)
    add(parser, table)
    add(parser, VERBOSITY)
    parser.explain(example, takes_settings=True)
    return read_arguments(parser, table, given)


def config_files(
    options: argparse.Namespace, settings: Sequence[str]
) -> tuple[Path | None, Sequence[str], Path | None]:
    """Return a command line's files and settings as `load_config` takes them."""
    return options.config, settings, getattr(options, "deepspeed_config", None)


def load(options: argparse.Namespace, settings: Sequence[str]) -> FullConfig:
    """Load the configuration that a command line names. Raises ConfigError."""
    from ds_encdec.config.schema import load_config  # not for --help

    return load_config(*config_files(options, settings))
