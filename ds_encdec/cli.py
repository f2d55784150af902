"""`ds-encdec VERB`: a thin layer over functions that can be imported.

Imports of torch, transformers and deepspeed happen inside the verbs that need them, so that `--help`
and `validate` answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from ds_encdec import estimate_memory, prepare, train
from ds_encdec.arguments import (
    CONFIG,
    COUNT,
    EXAMPLES,
    JSON,
    RATE,
    Arguments,
    Parser,
    ShowVersions,
    add,
    flag,
    grouped,
    tokens,
    value,
)
from ds_encdec.checkpoint import commands as checkpoints
from ds_encdec.config import shipped
from ds_encdec.config.command_line import read_arguments
from ds_encdec.evaluate import commands
from ds_encdec.evaluate.folders import require_model_folder
from ds_encdec.gpus import has_gpu
from ds_encdec.launch.cores import wait_without_spinning
from ds_encdec.launch.world import discover
from ds_encdec.terminal import (
    VERBOSITY,
    console,
    log_to_terminal,
    outlive_readers,
    print_error,
    print_marked,
    reader_may_leave,
)
from ds_encdec.types import ConfigError, DsEncDecError, GateError, Preempted

if TYPE_CHECKING:
    from ds_encdec.config.schema import FullConfig
    from ds_encdec.config.settings import Conflict
    from ds_encdec.phases import PlannedPhase

Verb = Callable[[argparse.Namespace, Sequence[str]], int | None]
"""Does what its options and overrides say; its exit code is 0 where it returns None."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(of=given[:1])
    if not given:
        parser.print_help(sys.stderr)
        return ConfigError.exit_code
    try:
        options, rest = _read(parser, given)
        log_to_terminal(options, **_place())
        wait_without_spinning(os.environ)
        with reader_may_leave():
            return options.run(options, rest) or 0
    except Preempted as error:
        print(error, flush=True)
        return error.exit_code
    except DsEncDecError as error:
        print_error(error)
        return error.exit_code


def _read(parser: argparse.ArgumentParser, given: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of `given`, and its settings. Raises ConfigError."""
    if given[0] not in VERBS and not given[0].startswith("-"):
        guess = next((f": did you mean {name}?" for name in get_close_matches(given[0], VERBS, 1)), "")
        parser.error(f"there is no verb {given[0]}{guess}")
    takes_settings = given[0] in VERBS and VERBS[given[0]][1]
    return read_arguments(parser, ARGUMENTS.get(given[0], {}), given, takes_settings=takes_settings)


def _place() -> dict[str, int]:
    """Which one this process is, of how many, as far as its environment can be understood."""
    try:
        world = discover(os.environ, choose_port=lambda: 0)
    except ConfigError:  # verbs that need to know say so
        return {}
    return {"rank": world.rank, "ranks": world.world_size}


def _parser(*, of: Collection[str] = ()) -> argparse.ArgumentParser:
    """The parser of every verb, with the arguments of those in `of`: the one that is called needs no others."""
    parser = Parser(
        prog="ds-encdec",
        usage="%(prog)s [-h] [-V] VERB ...",
        description="Train encoder-decoders from Qwen3 checkpoints with DeepSpeed and UL2.",
        epilog=grouped(GROUPS, {name: summary for name, (*_, summary) in VERBS.items()}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-V", "--version", action=ShowVersions, nargs=0, help="show the versions of this and its libraries"
    )
    verbs = parser.add_subparsers(dest="verb", prog=parser.prog, required=True, help=argparse.SUPPRESS)
    for name, (run, accepts_overrides, summary) in VERBS.items():
        verb = verbs.add_parser(name, description=f"{summary[0].upper()}{summary[1:]}.")
        verb.set_defaults(run=run, accepts_overrides=accepts_overrides)
        if name in of:
            add(verb, ARGUMENTS.get(name, {}))
            add(verb, VERBOSITY)
            verb.explain(EXAMPLES[name], takes_settings=accepts_overrides)
    return parser


def _settings(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[Path | None, Sequence[str], Path | None]:
    """The files and overrides that `load_config` takes."""
    return options.config, overrides, getattr(options, "deepspeed_config", None)


def _load(options: argparse.Namespace, overrides: Sequence[str]) -> FullConfig:
    from ds_encdec.config.schema import load_config

    return load_config(*_settings(options, overrides))


def _validate(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.config.schema import editor_schema, load_config
    from ds_encdec.config.settings import show
    from ds_encdec.config.shares import unevenness

    def further(config: FullConfig) -> Iterable[Conflict]:
        if not config.training.freeze:
            return ()
        from ds_encdec.memory.job import frozen_in_vain  # not for most

        return frozen_in_vain(config)

    if options.schema:
        print(editor_schema(), end="")
        return
    path, files = options.config, _settings(options, overrides)
    hostfile, looks_here = options.hostfile, not options.elsewhere
    notes: list[str] = []
    config = load_config(*files, hostfile=hostfile, looks_here=looks_here, further=further, notes=notes)
    ranks = config.infra.num_gpus
    if hostfile is None and (wrong := unevenness(config, ranks)):
        notes.append(f"warning: infra.num_gpus={ranks}, and {wrong}")
    if looks_here and config.infra.device == "cuda" and not has_gpu():
        whose = "" if "device" in config.infra.model_fields_set else " (the default)"
        notes.append(f"warning: infra.device=cuda{whose}, and this machine has no GPU: auto would take its CPU")
    print("".join(f"{note}\n" for note in notes), end="")
    print(f"{show(str(path))[1:-1] if path else 'the default configuration'}: no problems found")


def _phases(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.config.rewording import given_fields
    from ds_encdec.phase_runs.run import run_phases
    from ds_encdec.phases import plan_phases, select_phases, with_given

    asks_for_it = options.json or options.measured or options.tokens_per_second or options.price_per_gpu_hour
    if asks_for_it and not options.dry_run:
        raise ConfigError(
            "--json, --tokens-per-second, --measured and --price-per-gpu-hour belong to --dry-run: add it"
        )
    phases = select_phases(options.only, options.first, options.last)
    config = with_given(_load(options, overrides), given_fields(overrides))
    plans = plan_phases(config, phases, options.steps_per_phase)
    if not options.dry_run:
        outlive_readers()  # the phases are for what they leave, and not for these lines
        run_phases(config, plans, launcher=options.launcher)
    else:
        _print_plan_of_phases(options, plans)


def _print_plan_of_phases(options: argparse.Namespace, plans: Sequence[PlannedPhase]) -> None:
    from ds_encdec.plan import describe_plan_of_phases, plan_of_phases

    plan = plan_of_phases(plans, tokens_per_second=_rate(options), price_per_gpu_hour=options.price_per_gpu_hour)
    print(json.dumps(plan, indent=2) if options.json else describe_plan_of_phases(plan))


def _rate(options: argparse.Namespace) -> float | None:
    """Tokens per second, given or measured; None where they are not known."""
    from ds_encdec.launch.run_folder import RunFolder
    from ds_encdec.monitor.metrics_file import measured_tokens_per_second

    if options.measured is None:
        return options.tokens_per_second
    if not options.measured.is_dir():
        raise ConfigError(f"--measured {options.measured}: no such folder; give a run's, such as output")
    rate = measured_tokens_per_second(options.measured)
    run = RunFolder(str(options.measured)).read_status()
    place = f"ranks: {run.get('world_size', 'unknown')}; device: {run.get('device', 'unknown')}"
    print(f"{rate:,.0f} tokens/s were measured in {options.measured} ({place})", file=sys.stderr)
    return rate


def _plan(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.plan import describe_plan, plan_run

    if options.price_per_gpu_hour and not (options.tokens_per_second or options.measured):
        raise ConfigError("--price-per-gpu-hour needs a rate: add --tokens-per-second or --measured")
    if options.gpus is not None:
        overrides = [f"infra.num_gpus={options.gpus}", *overrides]
    config = _load(options, overrides)
    plan = plan_run(
        config,
        nodes=options.nodes,
        num_tokens=options.tokens,
        tokens_per_second=_rate(options),
        price_per_gpu_hour=options.price_per_gpu_hour,
    )
    print(json.dumps(plan, indent=2) if options.json else describe_plan(plan))


def _inspect_data(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    config = _load(options, overrides)
    from ds_encdec.build import inspect_run_data  # torch: once the configuration is sound

    shown = inspect_run_data(config, num_examples=options.n, as_json=options.json, with_ids=options.ids)
    print_marked(shown, {r"<extra_id_\d+>": "bold cyan", "(?m)^──.*$": "bold"})


def _init_model(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.checkpoint.folder import refuse_existing
    from ds_encdec.config.model_folder import MODEL_FILES, TOKENIZER_FILES, model_folder

    model_folder(options.source, (*MODEL_FILES, *TOKENIZER_FILES), field="--from")
    refuse_existing(options.out)
    from ds_encdec.model_folders import init_model  # torch: once there is a source

    print(init_model(options.source, options.out, options.num_sentinel_tokens, seed=options.seed))


def _report(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.report.write import write_report

    page, warnings = write_report(options.run_folder, compare=options.compare, out=options.out, png=options.png)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"the report is in {page}")


def _stop(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.launch.run_folder import RunFolder

    print(RunFolder(options.run_folder).ask_to_stop())


def _sanity_check(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    if options.model:
        require_model_folder(options.model)
    config = None if options.model else _load(options, overrides)
    from ds_encdec.sanity_check.run import check_config, config_for_model  # torch: once the configuration is sound

    if config is None:
        config = config_for_model(options.model, *_settings(options, overrides))
    outlive_readers()  # the exit code is the answer
    stdout = sys.stdout  # libraries print, too
    with contextlib.redirect_stdout(sys.stderr):
        report = check_config(config, lambda check: None if options.json else print(check, file=stdout, flush=True))
    if options.json:
        print(report.as_json())
    if report.error is not None:
        raise report.error


def _doctor(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    files = _settings(options, overrides)
    stdout = sys.stdout  # libraries print, too
    with contextlib.redirect_stdout(sys.stderr):
        from ds_encdec.doctor.run import as_json, describe, look_at_hosts, look_here

        findings, tells = (
            look_here(files) if options.hostfile is None else (look_at_hosts(options.hostfile, files), True)
        )
    if tells and options.json:
        print(as_json(findings), file=stdout)
    elif tells:
        print_marked(describe(findings, console().width), {"(?m)^✓": "green", "(?m)^✗": "bold red"})
    if wrong := list(dict.fromkeys(finding.check for finding in findings if not finding.passed)):
        raise GateError(f"not ready for a run: {', '.join(wrong)}")


def _rates(remark: str = "") -> Arguments:
    return {
        "--tokens-per-second": value(f"throughput of all ranks{remark}", RATE, metavar="T", only_one=True),
        "--measured": value(f"take the throughput from this run{remark}", Path, metavar="RUN", only_one=True),
        "--price-per-gpu-hour": value(f"say what it costs at this price{remark}", RATE, metavar="USD"),
    }


_FILES = CONFIG | {"--deepspeed_config --deepspeed-config": value("raw DeepSpeed JSON", Path)}
ARGUMENTS: dict[str, Arguments] = {
    "train": train.ARGUMENTS,
    "validate": {
        **CONFIG,
        "--deepspeed_config --deepspeed-config": value("raw DeepSpeed JSON", Path),
        "--hostfile": value("hosts and slots, as the deepspeed launcher reads them", Path),
        "--elsewhere": flag("for another machine: do not look for the files and folders it names"),
        "--schema": flag("print the JSON schema of configurations, for editors, and check nothing"),
    },
    "estimate-memory": estimate_memory.ARGUMENTS,
    "plan": {
        **_FILES,
        "--tokens": value("tokens to train on (default: the run's steps)", tokens, metavar="N"),
        "--gpus": value("GPUs in total (default infra.num_gpus)", COUNT, metavar="N"),
        "--nodes": value("machines they are in (default 1)", COUNT, default=1, metavar="N"),
        **_rates(),
        **JSON,
    },
    "phases": {
        **_FILES,
        "--only": value("run this phase: sanity_check, validation, medium or full", metavar="PHASE"),
        "--from": value("first phase (default sanity_check)", dest="first", metavar="PHASE"),
        "--to": value("last phase (default full)", dest="last", metavar="PHASE"),
        "--steps-per-phase": value("at most N optimizer steps a phase", COUNT, metavar="N"),
        "--launcher": value("what starts the ranks, e.g. 'deepspeed --hostfile hosts'", metavar="COMMAND"),
        "--dry-run": flag("print steps, tokens, days and money, and stop"),
        **_rates(" (dry run)"),
        "--json": flag("the dry run as one JSON object"),
    },
    "doctor": {
        **_FILES,
        "--hostfile": value("ask each of its hosts, by ssh, and all of them together", Path),
        **JSON,
    },
    "inspect-data": {
        **CONFIG,
        "-n": value("examples to show (default 20)", COUNT, default=20),
        "--ids": flag("show the token ids, too"),
        **JSON,
    },
    "prepare": prepare.ARGUMENTS,
    "init": shipped.INIT,
    "init-model": {
        "--from": value("decoder-only Qwen3 to start from", dest="source", required=True, metavar="PATH_OR_HUB_ID"),
        "--out": value("folder to write; must not exist", Path, required=True, metavar="DIR"),
        "--num-sentinel-tokens": value("sentinel tokens to add (default 100)", COUNT, default=100),
        "--seed": value("seed of the sentinel rows (default 42)", int, default=42),
    },
    "export": checkpoints.EXPORT,
    "average": checkpoints.AVERAGE,
    "verify": checkpoints.VERIFY,
    "sanity-check": {
        **_FILES,
        "--model": value("a model folder, instead of the configuration's", Path, metavar="DIR"),
        **JSON,
    },
    "report": {
        "run_folder": value("a run or a pipeline's folder, e.g. output", Path, metavar="run"),
        "--compare": value("run to draw beside it (repeatable)", Path, action="append", default=[], metavar="RUN"),
        "--out": value("folder to write into (default RUN/report, or RUN/report-compared)", Path, metavar="DIR"),
        "--png": flag("also write each chart beside the page as a picture"),
    },
    "stop": {"run_folder": value("the run's folder (infra.output_dir), or that of a phase", metavar="RUN")},
    "generate": commands.GENERATE,
    "evaluate": commands.EVALUATE,
}
"""The arguments of each verb that has some."""

VERBS: dict[str, tuple[Verb, bool, str]] = {
    "train": (train.run, True, "train (one process; for several use deepspeed or torchrun)"),
    "validate": (_validate, True, "check a configuration and report every problem in it"),
    "estimate-memory": (
        estimate_memory.run,
        True,
        "say what a run would hold in memory, whether it fits, and what to choose",
    ),
    "plan": (_plan, True, "say what a run would take: steps, days, money, disks, host memory"),
    "phases": (_phases, True, "run the phases of a pre-training, each behind the gate of the one before"),
    "inspect-data": (_inspect_data, True, "show the examples that a run will see"),
    "prepare": (prepare.run, True, "render and tokenize the data once, for every rank and run to read"),
    "init": (shipped.run_init, False, "write a shipped configuration, to edit; or list them"),
    "init-model": (_init_model, False, "make an encoder-decoder from a Qwen3 checkpoint"),
    "export": (checkpoints.run_export, False, "write a checkpoint as a Hugging Face model folder"),
    "average": (
        checkpoints.run_average,
        False,
        "write the mean of a run's last checkpoints as a Hugging Face model folder",
    ),
    "verify": (
        checkpoints.run_verify,
        False,
        "compare every file of a checkpoint, a run or prepared data with its SHA-256",
    ),
    "sanity-check": (_sanity_check, True, "look at model, data and engine before a long run"),
    "doctor": (_doctor, True, "look at each host before a run: versions, devices, folders, network"),
    "report": (_report, False, "write one page with pictures about a run, or a pipeline of phases"),
    "stop": (_stop, False, "ask a running job to save and stop, from any host that sees its folder"),
    "generate": (commands.run_generate, False, "fill sentinels in a text, or continue it"),
    "evaluate": (commands.run_evaluate, True, "generate for a split of the data, and compare with its references"),
}
"""For each verb: the function that runs it, whether settings may follow its arguments, and its summary."""

GROUPS = {
    "prepare": ("init", "validate", "estimate-memory", "plan", "inspect-data", "prepare", "init-model"),
    "run": ("doctor", "sanity-check", "train", "phases", "stop"),
    "look": ("report", "verify", "generate", "evaluate"),
    "publish": ("export", "average"),
}
"""The verbs as `--help` lists them, in the order of the work."""


if __name__ == "__main__":
    sys.exit(main())
