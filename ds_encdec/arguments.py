"""Arguments of the command line as tables, and the values that argparse cannot read by itself."""

from __future__ import annotations

import argparse
import difflib
import math
import platform
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ds_encdec.types import ConfigError

Arguments = dict[str, dict[str, Any]]
"""Keywords of argparse for each argument, by its names (separated by blanks); at most one with `only_one` is taken."""


def mistake(message: str, program: str) -> ConfigError:
    """The error of a command line of `program`, whose help lists what it takes."""
    return ConfigError(f"command line: {message}\n      `{program} --help` lists what it takes")


class Parser(argparse.ArgumentParser):
    """Reads a command line, abbreviates nothing, and tells what is wrong with it as the fields' report does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)  # an abbreviation may be a misspelt setting

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's `message`: the argument, its value, what is allowed, and the nearest."""
        if choice := re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
            near = difflib.get_close_matches(choice[1], re.findall(r"[\w.-]+", choice[2]), 1)
            message += f"; did you mean {near[0]}?" if near else ""
        raise mistake(message, self.prog)

    def explain(self, example: str, *, takes_settings: bool) -> None:
        """Let the help, once the arguments are there, show an example, and where settings go."""
        if takes_settings:
            usage = self.format_usage().partition("usage: ")[2].rstrip().replace("%", "%%")
            indent = " " * len(f"usage: {self.prog} ")
            self.usage = f"{usage}\n{indent}[section.field=value ...]"
        self.epilog = f"example:\n  {example}"
        self.formatter_class = argparse.RawDescriptionHelpFormatter


def add(parser: argparse.ArgumentParser, arguments: Arguments) -> None:
    """Give `parser` the arguments of a table."""
    group = parser.add_mutually_exclusive_group() if any("only_one" in how for how in arguments.values()) else parser
    for names, how in arguments.items():
        parent, kind = group if "only_one" in how else parser, how.get("type")
        keywords = {key: value for key, value in how.items() if key != "only_one"}
        if names.startswith("-") and kind in _VALUES and not how.get("choices"):
            keywords.setdefault("metavar", _VALUES[kind])
        action = parent.add_argument(*names.split(), **keywords)
        # Underscores are for who is used to them: help has one spelling.
        action.option_strings[:] = [name for name in action.option_strings if "_" not in name]  # type: ignore[index]


def value(text: str, type: Callable[[str], Any] = str, **more: Any) -> dict[str, Any]:
    """An argument with a value, explained by `text`."""
    return {"type": type, "help": text, **more}


def flag(text: str) -> dict[str, Any]:
    """An option without a value, explained by `text`."""
    return {"action": "store_true", "help": text}


def positive(number: type[int] | type[float]) -> Callable[[str], float]:
    """Return what argparse reads a number above 0 with."""

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
_VALUES: dict[Any, str] = {Path: "FILE", COUNT: "N", int: "N", RATE: "X", float: "X"}
"""How help calls a value of each type, where its argument has no better name."""


EXAMPLES = {
    "train": "ds-encdec train --config my.yaml --resume auto training.num_train_steps=2000",
    "validate": "ds-encdec validate my.yaml --hostfile hosts infra.num_gpus=16",
    "estimate-memory": "ds-encdec estimate-memory my.yaml --gpus 8 --gpu h100-80gb",
    "plan": "ds-encdec plan my.yaml --tokens 5B --measured output --price-per-gpu-hour 2.5",
    "phases": "ds-encdec phases my.yaml --to validation --dry-run",
    "inspect-data": "ds-encdec inspect-data my.yaml -n 5 data.use_mode_tokens=true",
    "prepare": "ds-encdec prepare my.yaml --out prepared --num-proc 16",
    "init": "ds-encdec init quickstart --out my.yaml",
    "init-model": "ds-encdec init-model --from Qwen/Qwen3-0.6B --out start",
    "export": "ds-encdec export output/checkpoints/final exported --dtype bfloat16",
    "average": "ds-encdec average output --last 3",
    "verify": "ds-encdec verify output",
    "sanity-check": "ds-encdec sanity-check my.yaml training.micro_batch_size=1",
    "doctor": "ds-encdec doctor my.yaml --hostfile hosts",
    "report": "ds-encdec report output --compare output2 --out compared",
    "stop": "ds-encdec stop output",
    "generate": "ds-encdec generate --model output/export/final --text 'Paris is <extra_id_0>.'",
    "evaluate": "ds-encdec evaluate --model output/export/final --split test --max-samples 200",
}
"""A call of each verb, for its help."""


def near_option(name: str, table: Arguments) -> str | None:
    """The option of `table` that `name`, with or without dashes, most likely stands for; None where none is near."""
    known = {option.strip("-"): option for names in table for option in names.split() if option.startswith("-")}
    near = difflib.get_close_matches(name.strip("-").replace("_", "-"), known, 1, 0.8)
    return known[near[0]] if near else None


def tokens(text: str) -> int:
    """A number of tokens as people write it: 5e11, 500B, 10M."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    unit = units.get(text[-1:].upper(), 1.0)
    try:
        number = float(text if unit == 1.0 else text[:-1]) * unit
    except ValueError:
        number = math.nan
    if not (1 <= number < math.inf and round(number, 3).is_integer()):
        raise argparse.ArgumentTypeError(f"{text} is not a number of tokens; write 5e11, 500B or 10M")
    return round(number)


JSON: Arguments = {"--json": flag("print one JSON object")}
CONFIG: Arguments = {
    "config": value("YAML file, or a shipped one's name (ds-encdec init lists them)", Path, nargs="?"),
    "--config": value("the same, as an option", Path, dest="config_option"),
}
"""A configuration that may be named without `--config`; `read_arguments` in config/command_line.py makes them one."""


class ShowVersions(argparse.Action):
    """Shows the versions of ours and of what it stands on, none of which is imported."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print them and end."""
        from importlib.metadata import PackageNotFoundError, version  # not for other calls

        found = []
        for name in ("ds_encdec", "torch", "deepspeed", "transformers"):
            try:
                found.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                found.append(f"{name} (not installed)")
        print(", ".join([*found, f"Python {platform.python_version()}"]))
        parser.exit()


def grouped(groups: Mapping[str, Sequence[str]], summaries: Mapping[str, str]) -> str:
    """The verbs with their summaries in groups, as wide as the terminal."""
    width, indent = shutil.get_terminal_size().columns - 2, 6 + max(map(len, summaries))
    lines = []
    for title, names in groups.items():
        lines.append(f"{title}:")
        for name in names:
            start = f"    {name}".ljust(indent)
            lines += textwrap.wrap(summaries[name], width, initial_indent=start, subsequent_indent=" " * indent)
    return "\n".join([*lines, "", "`ds-encdec VERB --help` lists what a verb takes."])
