"""Estimates what a run holds in the memory of its GPUs and hosts, whether it fits, and which settings to choose.

    python -m ds_encdec.estimate_memory [--config X] [--model ID_OR_DIR] [--gpus 8] [--nodes 1] [--gpu h100-80gb]

Without arguments, the default run on 8 x a100-80gb. docs/estimate-memory.md explains the table and its formulas.
Neither torch nor the network is needed."""

import argparse
import json
import sys
from collections.abc import Sequence

from ds_encdec.base.arguments import CONFIG_FILES, JSON, Arguments, Verb, flag, value
from ds_encdec.base.terminal import print_error, reader_may_leave
from ds_encdec.base.types import DsEncDecError
from ds_encdec.config.command_line import read_program
from ds_encdec.memory.gpus import DEFAULT_GPU

ARGUMENTS: Arguments = {
    **CONFIG_FILES,
    "--model": value("a model, instead of the configuration's", metavar="ID_OR_DIR"),
    "--gpus": value("GPUs in total (default infra.num_gpus)", int, metavar="N"),
    "--nodes": value("machines they are in (default 1)", int, default=1, metavar="N"),
    "--gpu": value(f"e.g. h100-80gb, 80GiB (default {DEFAULT_GPU})", metavar="NAME|SIZE"),
    "--host-memory": value("memory of each machine, e.g. 1TB: judge the host, too", metavar="SIZE"),
    "--all": flag("show both engines, and the settings that do not exist"),
    **JSON,
}

FILE_COLUMNS = 120  # The width of a table that is not shown on a terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Estimate by the command line; return the process's exit code."""
    program = "python -m ds_encdec.estimate_memory"
    given, example = sys.argv[1:] if arguments is None else arguments, f"{program} my.yaml --gpus 8 --gpu h100-80gb"
    try:
        options, overrides = read_program(program, __doc__, example, ARGUMENTS, given)
        with reader_may_leave():
            return run(options, overrides)
    except DsEncDecError as error:
        print_error(error)
        return error.exit_code


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Read the options, estimate and print. Raises ConfigError that lists every problem."""
    from ds_encdec.memory.answer import as_json, estimate_tables, show  # not for --help, nor for other verbs
    from ds_encdec.memory.question import read_request

    request = read_request(options, overrides)
    tables = estimate_tables(request)
    if options.json:
        print(json.dumps(as_json(request, tables), indent=2))
    else:
        from rich.console import Console

        console = Console() if sys.stdout.isatty() else Console(width=FILE_COLUMNS, no_color=True)
        with console.capture() as written:
            show(console, request, tables, everything=options.all)
        print(*map(str.rstrip, written.get().splitlines()), sep="\n")
    return 0


VERB = Verb(
    run,
    "say what a run would hold in memory, whether it fits, and what to choose",
    "ds-encdec estimate-memory my.yaml --gpus 8 --gpu h100-80gb",
    ARGUMENTS,
    takes_settings=True,
)


if __name__ == "__main__":
    sys.exit(main())
