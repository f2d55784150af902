"""Runs `ds-encdec VERB`: a thin layer over functions that can be imported. Only verbs that need torch, transformers or
deepspeed import them, so that `--help` and `validate` answer at once."""

import argparse
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress

from ds_encdec import train
from ds_encdec.base.arguments import VERBOSITY, Parser, add
from ds_encdec.base.terminal import interrupts_in_a_line, log_to_terminal, print_error, printable, reader_may_leave
from ds_encdec.base.types import ConfigError, DsEncDecError, Preempted
from ds_encdec.commands import models, runs
from ds_encdec.config.command_line import read_arguments
from ds_encdec.launch.host import wait_without_spinning
from ds_encdec.launch.world import discover

GROUPS = {  # as `--help` lists them, in the order of the work
    "prepare": ("init", "validate", "estimate-memory", "plan", "inspect-data", "prepare", "init-model"),
    "run": ("doctor", "sanity-check", "train", "phases", "stop"),
    "look": ("report", "compare", "verify", "generate", "evaluate"),
    "publish": ("export", "average"),
}
_ROWS = runs.VERBS | models.VERBS | {"train": train.VERB}
VERBS = {name: _ROWS[name] for group in GROUPS.values() for name in group}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console script; return the exit code."""
    if not (given := list(sys.argv[1:] if arguments is None else arguments)):
        _parser("").print_help(sys.stderr)
        return ConfigError.exit_code
    try:
        options, settings = read_verb(given)
        place: dict[str, int] = {}
        with suppress(ConfigError):  # verbs that need to know their place raise it themselves
            world = discover(os.environ, choose_port=lambda: 0)
            place = {"rank": world.rank, "ranks": world.world_size}
        log_to_terminal(options, **place)
        wait_without_spinning(os.environ)
        with interrupts_in_a_line(VERBS[given[0]].kept), reader_may_leave():
            return VERBS[given[0]].run(options, settings) or 0
    except Preempted as error:
        print(printable(str(error)), flush=True)
        return error.exit_code
    except DsEncDecError as error:
        print_error(error)
        return error.exit_code


def read_verb(given: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and settings behind a verb. Raises ConfigError."""
    name = given[0]
    parser = _parser(name)
    table, takes_settings = (VERBS[name].arguments, VERBS[name].takes_settings) if name in VERBS else ({}, False)
    return read_arguments(parser, table, given, takes_settings=takes_settings)


def _parser(called: str) -> Parser:
    width, indent = shutil.get_terminal_size().columns - 2, 6 + max(map(len, VERBS))
    listed = []
    for title, group in GROUPS.items():
        listed.append(f"{title}:")
        for name in group:
            start = f"    {name}".ljust(indent)
            listed += textwrap.wrap(VERBS[name].summary, width, initial_indent=start, subsequent_indent=" " * indent)
    parser = Parser(
        prog="ds-encdec",
        usage="%(prog)s [-h] [-V] VERB ...",
        description="Train encoder-decoders from decoder checkpoints with DeepSpeed and UL2.",
        epilog="\n".join([*listed, "", "`ds-encdec VERB --help` lists the arguments of a verb."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action=_ShowVersions, nargs=0, help="show the versions of the libraries")
    verbs = parser.add_subparsers(dest="verb", prog=parser.prog, required=True, help=argparse.SUPPRESS)
    for name, verb in VERBS.items():
        subparser = verbs.add_parser(name, description=f"{verb.summary[0].upper()}{verb.summary[1:]}.")
        if name == called:
            add(subparser, verb.arguments)
            add(subparser, VERBOSITY)
            subparser.explain(verb.example, takes_settings=verb.takes_settings)
    return parser


class _ShowVersions(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ds_encdec.launch.disk import installed_versions  # not for other calls

        names = ("ds_encdec", "torch", "deepspeed", "transformers")
        found = installed_versions(*names)
        versions = (f"{name} {found.get(name, '(not installed)')}" for name in names)
        print(*versions, f"Python {platform.python_version()}", sep=", ")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
