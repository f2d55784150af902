"""`ds-encdec VERB`: a thin layer over functions that can be imported.

Imports of torch, transformers and deepspeed happen inside the verbs that need them, so that `--help`
and `validate` answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_encdec import estimate_memory, train
from ds_encdec.engines import ENGINES
from ds_encdec.launch.preemption import outlive_readers, reader_may_leave
from ds_encdec.types import ConfigError, DsEncDecError, Preempted

if TYPE_CHECKING:
    from ds_encdec.config.schema import FullConfig
    from ds_encdec.phases import PlannedPhase

Verb = Callable[[argparse.Namespace, Sequence[str]], int | None]
"""Does what its options and overrides say; its exit code is 0 where it returns None."""
_CONFIG = {"--config": "YAML file"}
_FILES = _CONFIG | {"--deepspeed_config": "raw DeepSpeed JSON"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not options.accepts_overrides:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        with reader_may_leave():
            return options.run(options, rest) or 0
    except Preempted as error:
        print(error, flush=True)
        return error.exit_code
    except DsEncDecError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-encdec",
        description="Train encoder-decoders from Qwen3 checkpoints with DeepSpeed and UL2.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, run: Verb, summary: str, files: dict[str, str] | None = None) -> argparse.ArgumentParser:
        """A verb; with `files` of a configuration (even none), settings may follow its arguments."""
        epilog = "further arguments: section.field=value" if files is not None else None
        sub = verbs.add_parser(name, help=summary, description=summary, epilog=epilog, allow_abbrev=False)
        sub.set_defaults(run=run, accepts_overrides=files is not None)
        for option, text in (files or {}).items():
            sub.add_argument(*dict.fromkeys((option, option.replace("_", "-"))), type=Path, help=text)
        return sub

    train.add_arguments(verb("train", train.run, "train (one process; for several use deepspeed or torchrun)", {}))

    validate = verb("validate", _validate, "check a configuration and report every problem in it", {})
    validate.add_argument("config", type=Path, nargs="?", help="YAML file")
    validate.add_argument("--config", type=Path, dest="config_option", help="YAML file")
    validate.add_argument("--deepspeed_config", "--deepspeed-config", type=Path, help="raw DeepSpeed JSON")
    validate.add_argument("--hostfile", type=Path, help="hosts and slots, as the deepspeed launcher reads them")
    elsewhere = "for another machine: do not look for the files and folders it names"
    validate.add_argument("--elsewhere", action="store_true", help=elsewhere)

    summary = "say what a run would hold in memory, whether it fits, and what to choose"
    estimate_memory.add_arguments(verb("estimate-memory", estimate_memory.run, summary, {}))
    plan = verb("plan", _plan, "say what a run would take: steps, days, money, disks, host memory", _FILES)
    plan.add_argument("--phases", action="store_true", help="plan the phases instead, as `phases --dry-run` does")
    plan.add_argument("--tokens", type=_tokens, metavar="N", help="to train on (default: the run's steps)")
    plan.add_argument("--gpus", type=_positive(int), metavar="N", help="GPUs in total (default infra.num_gpus)")
    plan.add_argument("--nodes", type=_positive(int), default=1, metavar="N", help="machines they are in (default 1)")
    _add_rate_arguments(plan)
    plan.add_argument("--json", action="store_true", help="as one JSON object")

    verb("schema", _schema, "print the JSON schema of the configuration, for editors")

    summary = "run the phases of a pre-training, each behind the gate of the one before"
    _add_phase_arguments(verb("phases", _phases, summary, _FILES))

    inspect = verb("inspect-data", _inspect_data, "show the examples that a run will see", _CONFIG)
    inspect.add_argument("-n", type=int, default=20, help="examples to show (default 20)")
    inspect.add_argument("--json", action="store_true", help="as one JSON object")

    init = verb("init-model", _init_model, "make an encoder-decoder from a Qwen3 checkpoint")
    init.add_argument("--from", dest="source", required=True, metavar="PATH_OR_HUB_ID", help="decoder-only Qwen3")
    init.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    init.add_argument("--num-sentinel-tokens", type=int, default=100, help="sentinels (default 100)")
    init.add_argument("--seed", type=int, default=42, help="seed of the sentinel rows (default 42)")

    export = verb("export", _export, "write a checkpoint as a Hugging Face model folder")
    export.add_argument("checkpoint", type=Path, help="a checkpoint, e.g. output/checkpoints/final")
    export.add_argument("out", type=Path, help="folder to write; must not exist")
    export.add_argument("--encoder-only", action="store_true", help="the encoder alone, as a text embedding model")
    _add_weight_arguments(export)

    average = verb("average", _average, "write the mean of a run's last checkpoints as a Hugging Face model folder")
    average.add_argument("run_folder", metavar="run", type=Path, help="a run, e.g. output")
    average.add_argument("out", type=Path, nargs="?", help="folder to write (default RUN/export/averaged)")
    average.add_argument("--last", type=int, default=5, help="newest checkpoints to average (default 5)")
    _add_weight_arguments(average)

    convert = verb("convert", _convert, "write a checkpoint in the files of a certain engine", {})
    convert.add_argument("checkpoint", type=Path, help="a checkpoint, e.g. output/checkpoints/final")
    convert.add_argument("out", type=Path, help="checkpoint folder to write; must not exist")
    formats = [row.state_format for row in ENGINES.values()]
    convert.add_argument("--to", choices=formats, required=True, help="format of the tensors")

    verify = verb("verify", _verify, "compare every file of a checkpoint, or of all in a run, with its SHA-256")
    verify.add_argument("path", type=Path, help="a checkpoint or a run, e.g. output")

    sanity = verb("sanity-check", _sanity_check, "look at model, data and engine before a long run", _FILES)
    sanity.add_argument("--model", type=Path, metavar="DIR", help="a model folder, instead of the configuration's")
    sanity.add_argument("--json", action="store_true", help="as one JSON object")

    report = verb("report", _report, "write one page with pictures about a run, or a pipeline of phases")
    report.add_argument("run_folder", metavar="run", type=Path, help="a run or a pipeline's folder, e.g. output")
    report.add_argument("--compare", type=Path, nargs="+", default=(), metavar="RUN", help="runs to lay over it")
    report.add_argument("--out", type=Path, help="folder to write into (default RUN/report)")
    report.add_argument("--png", action="store_true", help="put each chart beside the page as a picture, too")

    generate = verb("generate", _generate, "fill sentinels in a text, or continue it")
    generate.add_argument("--model", type=Path, required=True, help="exported folder")
    generate.add_argument("--text", required=True, help="text with <extra_id_0>… to fill, or a prefix to continue")
    generate.add_argument("--max-new-tokens", type=int, default=64, help="(default 64)")
    generate.add_argument("--num-beams", type=int, default=1, help="(default 1)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--seed", type=int, default=0, help="seed of sampling (default 0)")
    return parser


def _add_phase_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--only", metavar="P", help="this phase: sanity_check, validation, medium or full")
    verb.add_argument("--from", dest="first", metavar="P", help="first phase (default sanity_check)")
    verb.add_argument("--to", dest="last", metavar="P", help="last phase (default full)")
    verb.add_argument("--steps-per-phase", type=_positive(int), metavar="N", help="at most N optimizer steps a phase")
    verb.add_argument("--launcher", help="what starts the ranks, e.g. 'deepspeed --hostfile hostfiles/8gpu'")
    verb.add_argument("--dry-run", action="store_true", help="print steps, tokens, days and money, and stop")
    _add_rate_arguments(verb, " (dry run)")
    verb.add_argument("--json", action="store_true", help="the dry run as one JSON object")


def _add_rate_arguments(verb: argparse.ArgumentParser, remark: str = "") -> None:
    rate = verb.add_mutually_exclusive_group()
    rate.add_argument(
        "--tokens-per-second", type=_positive(float), metavar="T", help=f"throughput of all ranks{remark}"
    )
    rate.add_argument("--measured", type=Path, metavar="RUN", help=f"take the throughput from this run{remark}")
    verb.add_argument("--price-per-gpu-hour", type=_positive(float), metavar="USD", help=f"for the money{remark}")


def _positive(number: type[int] | type[float]) -> Callable[[str], float]:
    """Return what argparse reads a number above 0 with."""

    def read(text: str) -> float:
        value = number(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    read.__name__ = number.__name__  # argparse says "invalid int value"
    return read


def _tokens(text: str) -> int:
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


def _add_weight_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default float32)")
    verb.add_argument("--max-shard-gb", type=float, default=5.0, help="largest file, in GB (default 5)")


def _weight_options(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    return {"dtype": getattr(torch, options.dtype), "max_shard_bytes": int(options.max_shard_gb * 1e9)}


def _settings(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[Path | None, Sequence[str], Path | None]:
    """The files and overrides that `load_config` takes."""
    from ds_encdec.config.load import find_shipped

    return find_shipped(options.config), overrides, find_shipped(getattr(options, "deepspeed_config", None))


def _load(options: argparse.Namespace, overrides: Sequence[str]) -> FullConfig:
    from ds_encdec.config.schema import load_config

    return load_config(*_settings(options, overrides))


def _validate(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.config.errors import show
    from ds_encdec.config.load import check_config, find_shipped

    path, overrides = options.config, list(overrides)
    if path is not None and "=" in str(path):  # an override in the place of the file
        path, overrides = None, [str(path), *overrides]
    path = path or options.config_option
    files = find_shipped(path), overrides, find_shipped(options.deepspeed_config)
    check_config(*files, hostfile=find_shipped(options.hostfile), elsewhere=options.elsewhere)
    print(f"{show(str(path))[1:-1] if path else 'the default configuration'}: no problems found")


def _schema(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.config.schema import FullConfig

    print(json.dumps(FullConfig.model_json_schema(), indent=2))


def _phases(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.phase_runs.run import run_phases
    from ds_encdec.phases import plan_phases, select_phases

    asks_for_it = options.json or options.measured or options.tokens_per_second or options.price_per_gpu_hour
    if asks_for_it and not options.dry_run:
        message = "--json, --tokens-per-second, --measured and --price-per-gpu-hour belong to --dry-run: add it"
        raise ConfigError(message)
    phases = select_phases(options.only, options.first, options.last)
    config = _load(options, overrides)
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
    from ds_encdec.memory.planned import contradictions
    from ds_encdec.phases import plan_phases
    from ds_encdec.plan import describe_plan, plan_run

    if options.price_per_gpu_hour and not (options.tokens_per_second or options.measured):
        raise ConfigError("--price-per-gpu-hour needs a rate: add --tokens-per-second or --measured")
    if problems := list(contradictions({"--gpus": options.gpus}, overrides)):
        raise ConfigError("\n".join(problems))
    if options.gpus is not None:
        overrides = [f"infra.num_gpus={options.gpus}", *overrides]
    config = _load(options, overrides)
    if options.phases:
        if options.tokens or options.nodes != 1:
            raise ConfigError("--tokens and --nodes are about a single run: leave them out, or --phases")
        _print_plan_of_phases(options, plan_phases(config))
        return
    plan = plan_run(
        config,
        nodes=options.nodes,
        num_tokens=options.tokens,
        tokens_per_second=_rate(options),
        price_per_gpu_hour=options.price_per_gpu_hour,
    )
    print(json.dumps(plan, indent=2) if options.json else describe_plan(plan))


def _inspect_data(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.build import inspect_run_data

    print(inspect_run_data(_load(options, overrides), num_examples=options.n, as_json=options.json))


def _init_model(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.model_folders import init_model

    print(init_model(options.source, options.out, options.num_sentinel_tokens, seed=options.seed))


def _export(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.checkpoint.export import export_checkpoint

    export_checkpoint(options.checkpoint, options.out, encoder_only=options.encoder_only, **_weight_options(options))
    print(f"exported to {options.out}")


def _average(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.checkpoint.average import average_checkpoints
    from ds_encdec.launch.run_folder import RunFolder

    run = RunFolder(str(options.run_folder))
    steps = average_checkpoints(run, options.out, last=options.last, **_weight_options(options))
    fewer = f" (there are no more in a row; {options.last} were asked for)" if len(steps) < options.last else ""
    print(f"the mean of steps {', '.join(map(str, steps))}{fewer} is in {options.out or run.averaged}")


def _convert(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.checkpoint.convert import convert_checkpoint

    convert_checkpoint(options.checkpoint, options.out, to=options.to, overrides=overrides)
    if os.environ.get("RANK", "0") == "0":
        print(f"{options.checkpoint} is in {options.out} for {options.to}")


def _verify(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.checkpoint.folder import verify_checkpoints

    for checkpoint in verify_checkpoints(options.path):
        print(checkpoint, flush=True)


def _report(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.report.write import write_report

    page, warnings = write_report(options.run_folder, compare=options.compare, out=options.out, png=options.png)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"the report is in {page}")


def _sanity_check(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    config = None if options.model else _load(options, overrides)
    from ds_encdec.sanity_check.run import check_config, config_for_model  # torch: once the configuration is sound

    if config is None:
        config = config_for_model(options.model, *_settings(options, overrides))
    stdout = sys.stdout  # libraries print, too
    with contextlib.redirect_stdout(sys.stderr):
        report = check_config(config, lambda check: None if options.json else print(check, file=stdout, flush=True))
    if options.json:
        print(report.as_json())
    if report.error is not None:
        raise report.error


def _generate(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.model_folders import generate_text

    how = {name: getattr(options, name) for name in ("max_new_tokens", "num_beams", "temperature", "seed")}
    print(generate_text(options.model, options.text, **how))


if __name__ == "__main__":
    sys.exit(main())
