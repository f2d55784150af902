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
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_encdec import estimate_memory, prepare, train
from ds_encdec.engines import STATE_FORMATS
from ds_encdec.launch.preemption import outlive_readers, reader_may_leave
from ds_encdec.launch.world import discover
from ds_encdec.text_metrics import TEXT_METRICS
from ds_encdec.types import ConfigError, DsEncDecError, Preempted

if TYPE_CHECKING:
    from ds_encdec.config.schema import FullConfig
    from ds_encdec.config.settings import Conflict
    from ds_encdec.phases import PlannedPhase

Verb = Callable[[argparse.Namespace, Sequence[str]], int | None]
"""Does what its options and overrides say; its exit code is 0 where it returns None."""
Arguments = dict[str, dict[str, Any]]
"""Keywords of argparse for each argument, by its names (separated by blanks); at most one with `only_one` is taken."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not options.accepts_overrides:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        with reader_may_leave():
            return options.run(options, rest) or 0
    except DsEncDecError as error:
        is_end = isinstance(error, Preempted)
        print(error if is_end else f"error: {error}", file=sys.stdout if is_end else sys.stderr, flush=True)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-encdec",
        description="Train encoder-decoders from Qwen3 checkpoints with DeepSpeed and UL2.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (run, accepts_overrides, summary) in VERBS.items():
        epilog = "further arguments: section.field=value" if accepts_overrides else None
        verb = verbs.add_parser(name, help=summary, description=summary, epilog=epilog, allow_abbrev=False)
        verb.set_defaults(run=run, accepts_overrides=accepts_overrides)
        if callable(arguments := ARGUMENTS.get(name, {})):
            arguments(verb)
            continue
        group = verb.add_mutually_exclusive_group() if any("only_one" in how for how in arguments.values()) else verb
        for names, how in arguments.items():
            parent = group if "only_one" in how else verb
            parent.add_argument(*names.split(), **{key: value for key, value in how.items() if key != "only_one"})
    return parser


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


def _language(text: str) -> str:
    """A code of a language as model cards have it: en, pt-BR."""
    if not re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*", text):
        raise argparse.ArgumentTypeError(f"{text} is not the code of a language; write en, de or pt-BR")
    return text


def _weight_options(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    return {"dtype": getattr(torch, options.dtype), "max_shard_bytes": int(options.max_shard_gb * 1e9)}


def _settings(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[Path | None, Sequence[str], Path | None]:
    """The files and overrides that `load_config` takes."""
    from ds_encdec.config.schema import find_shipped

    return find_shipped(options.config), overrides, find_shipped(getattr(options, "deepspeed_config", None))


def _load(options: argparse.Namespace, overrides: Sequence[str]) -> FullConfig:
    from ds_encdec.config.schema import load_config

    return load_config(*_settings(options, overrides))


def _validate(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.config.schema import find_shipped, load_config
    from ds_encdec.config.settings import show

    path, overrides = options.config, list(overrides)
    if path is not None and "=" in str(path):  # an override in the place of the file
        path, overrides = None, [str(path), *overrides]
    path = path or options.config_option
    files = find_shipped(path), overrides, find_shipped(options.deepspeed_config)
    hostfile, looks_here = find_shipped(options.hostfile), not options.elsewhere
    load_config(*files, hostfile=hostfile, looks_here=looks_here, further=_frozen_in_vain)
    print(f"{show(str(path))[1:-1] if path else 'the default configuration'}: no problems found")


def _frozen_in_vain(config: FullConfig) -> Iterator[Conflict]:
    """Yield what is wrong with the patterns of `training.freeze` for a model whose sizes are known here."""
    from ds_encdec.config.settings import Conflict
    from ds_encdec.memory.job import run_sizes
    from ds_encdec.model.trained import trained_shapes

    if not config.training.freeze:
        return
    try:
        sizes = run_sizes(config)
    except (ConfigError, RuntimeError):  # it is not here: a run will find it, and then look
        return
    try:
        trained_shapes(config, sizes)
    except ConfigError as error:
        yield Conflict(("training.freeze",), str(error).removeprefix("training.freeze: "))


def _schema(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.config.schema import FullConfig

    print(json.dumps(FullConfig.model_json_schema(), indent=2))


def _phases(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.phase_runs.run import run_phases
    from ds_encdec.phases import plan_phases, select_phases

    asks_for_it = options.json or options.measured or options.tokens_per_second or options.price_per_gpu_hour
    if asks_for_it and not options.dry_run:
        raise ConfigError(
            "--json, --tokens-per-second, --measured and --price-per-gpu-hour belong to --dry-run: add it"
        )
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
    from ds_encdec.memory.question import contradictions
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
    if options.adapter:
        from ds_encdec.checkpoint.adapters import export_adapter

        if options.encoder_only:
            raise ConfigError("--adapter and --encoder-only: adapters stand beside both sides; give one of the two")
        export_adapter(options.checkpoint, options.out, base=options.base)
    else:
        from ds_encdec.checkpoint.export import export_checkpoint

        how = {name: getattr(options, name) for name in ("encoder_only", "base", "languages")} | _weight_options(
            options
        )
        export_checkpoint(options.checkpoint, options.out, **how)
    print(f"exported to {options.out}")


def _average(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.checkpoint.export import average_checkpoints
    from ds_encdec.launch.run_folder import RunFolder

    if options.adapter:
        raise ConfigError(
            "--adapter: the mean of adapters is none, as the mean of products B A has a higher rank than they: "
            "leave it out, and the mean of the merged models is written"
        )
    run = RunFolder(str(options.run_folder))
    how = {"base": options.base} | _weight_options(options)
    steps = average_checkpoints(run, options.out, last=options.last, **how)
    fewer = f" (there are no more in a row; {options.last} were asked for)" if len(steps) < options.last else ""
    print(f"the mean of steps {', '.join(map(str, steps))}{fewer} is in {options.out or run.averaged}")


def _convert(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.checkpoint.export import convert_checkpoint

    convert_checkpoint(options.checkpoint, options.out, to=options.to, overrides=overrides)
    if discover(os.environ).is_main:
        print(f"{options.checkpoint} is in {options.out} for {options.to}")


def _verify(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.checkpoint.folder import verify_checkpoints
    from ds_encdec.data.prepared import INDEX, verified_shards

    is_prepared = any(options.path.glob(f"*/{INDEX}"))
    for whole in verified_shards(options.path) if is_prepared else verify_checkpoints(options.path):
        print(whole, flush=True)


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
    from ds_encdec.evaluate.generation import GenerationSettings
    from ds_encdec.model_folders import generate_text

    settings = GenerationSettings(**{name: getattr(options, name) for name in GENERATION if name != "batch_tokens"})
    text = sys.stdin.read() if options.text == "-" else options.text
    shown = generate_text(options.model, text, settings, raw=options.raw, stream=options.stream)
    if shown is not None:
        print(shown)


def _push_to_hub(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.checkpoint.hub import push_to_hub

    how = {name: getattr(options, name) for name in ("private", "revision", "message")}
    print(f"uploaded: {push_to_hub(options.folder, options.repo_id, **how)}")


def _evaluate(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    names = options.metrics or [
        name for name, row in TEXT_METRICS.items() if options.bertscore_model or not row.needs_model
    ]
    from ds_encdec.evaluate.generation import GenerationSettings
    from ds_encdec.evaluate.metrics import BertScoreModel
    from ds_encdec.evaluate.run import default_out, evaluate, run_config

    settings = GenerationSettings(**{name: getattr(options, name) for name in GENERATION})
    options.config = options.config or run_config(options.model)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print, too
        found = evaluate(
            options.model,
            _load(options, overrides),
            options.split,
            out=(out := options.out or default_out(options.model, options.split)),
            settings=settings,
            metrics=names,
            max_samples=options.max_samples,
            bertscore_model=BertScoreModel(options.bertscore_model, options.bertscore_layer)
            if options.bertscore_model
            else None,
            device=options.device,
            dtype=options.dtype,
        )
    if not discover(os.environ).is_main:
        return
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['examples']:,} examples of {options.split}; predictions and figures are in {out}")
    for name, value in found["figures"].items():
        print(f"{name:20} {value:10.4f}")
    if cut := found["cut_at_max_new_tokens"]:
        print(f"{cut:,} predictions were cut off at --max-new-tokens ({options.max_new_tokens})")


def _value(text: str, type: Callable[[str], Any] = str, **more: Any) -> dict[str, Any]:
    return {"type": type, "help": text, **more}


def _flag(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


_COUNT, _RATE = _positive(int), _positive(float)


def _rates(remark: str = "") -> Arguments:
    return {
        "--tokens-per-second": _value(f"throughput of all ranks{remark}", _RATE, metavar="T", only_one=True),
        "--measured": _value(f"take the throughput from this run{remark}", Path, metavar="RUN", only_one=True),
        "--price-per-gpu-hour": _value(f"for the money{remark}", _RATE, metavar="USD"),
    }


_CONFIG: Arguments = {"--config": _value("YAML file", Path)}
_FILES = _CONFIG | {"--deepspeed_config --deepspeed-config": _value("raw DeepSpeed JSON", Path)}
_JSON: Arguments = {"--json": _flag("as one JSON object")}
_CHECKPOINT: Arguments = {"checkpoint": _value("a checkpoint, e.g. output/checkpoints/final", Path)}
_WEIGHTS: Arguments = {
    "--dtype": _value("(default float32)", choices=("float32", "bfloat16"), default="float32"),
    "--max-shard-gb": _value("largest file, in GB (default 5)", float, default=5.0),
}
_LORA: Arguments = {
    "--base": _value("base of a LoRA run, if it is no longer where the run found it", metavar="PATH_OR_HUB_ID"),
    "--adapter": _flag("the adapters of a LoRA run alone, as a folder for peft (default: merged)"),
}
_OUT = _value("folder to write; must not exist", Path)

GENERATION = {
    "max_new_tokens": (int, 512, "new tokens of a prediction at most"),
    "num_beams": (int, 1, "beams of the search"),
    "temperature": (float, 0.0, "of sampling; 0 takes the likeliest token"),
    "top_p": (float, 1.0, "sample from the likeliest tokens that have this share"),
    "top_k": (int, 0, "sample from so many of the likeliest tokens; 0: from all"),
    "repetition_penalty": (float, 1.0, "above 1: tokens that were generated are less likely"),
    "seed": (int, 0, "of sampling"),
    "batch_tokens": (int, 16384, "tokens of a batch at most, input and new ones"),
}
"""The options of an evaluation's generation: type, default, meaning; they are fields of `GenerationSettings`."""

ARGUMENTS: dict[str, Arguments | Callable[[argparse.ArgumentParser], None]] = {
    "train": train.add_arguments,
    "validate": {
        "config": _value("YAML file", Path, nargs="?"),
        "--config": _value("YAML file", Path, dest="config_option"),
        "--deepspeed_config --deepspeed-config": _value("raw DeepSpeed JSON", Path),
        "--hostfile": _value("hosts and slots, as the deepspeed launcher reads them", Path),
        "--elsewhere": _flag("for another machine: do not look for the files and folders it names"),
    },
    "estimate-memory": estimate_memory.add_arguments,
    "plan": {
        **_FILES,
        "--phases": _flag("plan the phases instead, as `phases --dry-run` does"),
        "--tokens": _value("to train on (default: the run's steps)", _tokens, metavar="N"),
        "--gpus": _value("GPUs in total (default infra.num_gpus)", _COUNT, metavar="N"),
        "--nodes": _value("machines they are in (default 1)", _COUNT, default=1, metavar="N"),
        **_rates(),
        **_JSON,
    },
    "phases": {
        **_FILES,
        "--only": _value("this phase: sanity_check, validation, medium or full", metavar="P"),
        "--from": _value("first phase (default sanity_check)", dest="first", metavar="P"),
        "--to": _value("last phase (default full)", dest="last", metavar="P"),
        "--steps-per-phase": _value("at most N optimizer steps a phase", _COUNT, metavar="N"),
        "--launcher": _value("what starts the ranks, e.g. 'deepspeed --hostfile hostfiles/8gpu'"),
        "--dry-run": _flag("print steps, tokens, days and money, and stop"),
        **_rates(" (dry run)"),
        "--json": _flag("the dry run as one JSON object"),
    },
    "inspect-data": {**_CONFIG, "-n": _value("examples to show (default 20)", int, default=20), **_JSON},
    "prepare": prepare.add_arguments,
    "init-model": {
        "--from": _value("decoder-only Qwen3", dest="source", required=True, metavar="PATH_OR_HUB_ID"),
        "--out": _OUT | {"required": True},
        "--num-sentinel-tokens": _value("sentinels (default 100)", int, default=100),
        "--seed": _value("seed of the sentinel rows (default 42)", int, default=42),
    },
    "export": {
        **_CHECKPOINT,
        "out": _OUT,
        "--encoder-only": _flag("the encoder alone, as a text embedding model, also for sentence-transformers"),
        "--language": _value(
            "for the card, such as en (repeatable)", _language, action="append", default=[], dest="languages"
        ),
        **_LORA,
        **_WEIGHTS,
    },
    "average": {
        "run_folder": _value("a run, e.g. output", Path, metavar="run"),
        "out": _value("folder to write (default RUN/export/averaged)", Path, nargs="?"),
        "--last": _value("newest checkpoints to average (default 5)", int, default=5),
        **_LORA,
        **_WEIGHTS,
    },
    "convert": {
        **_CHECKPOINT,
        "out": _value("checkpoint folder to write; must not exist", Path),
        "--to": _value("format of the tensors", choices=list(STATE_FORMATS), required=True),
    },
    "verify": {"path": _value("a checkpoint, a run (e.g. output), or prepared data", Path)},
    "sanity-check": {
        **_FILES,
        "--model": _value("a model folder, instead of the configuration's", Path, metavar="DIR"),
        **_JSON,
    },
    "report": {
        "run_folder": _value("a run or a pipeline's folder, e.g. output", Path, metavar="run"),
        "--compare": _value("runs to lay over it", Path, nargs="+", default=(), metavar="RUN"),
        "--out": _value("folder to write into (default RUN/report)", Path),
        "--png": _flag("put each chart beside the page as a picture, too"),
    },
    "push-to-hub": {
        "folder": _value("exported folder", Path),
        "repo_id": _value("OWNER/NAME of the repository, made where there is none"),
        "--private": _flag("make it one that only you see"),
        "--revision": _value("branch (default main)", metavar="BRANCH"),
        "--message": _value("of the commit"),
    },
    "generate": {
        "--model": _value("exported folder", Path, required=True),
        "--text": _value("with <extra_id_0>… to fill, or a prefix to continue; - reads standard input", required=True),
        "--raw": _flag("print what the model writes, and nothing of the text: the answer of a fine-tuned one"),
        "--stream": _flag("print tokens as they come"),
        "--max-new-tokens": _value("(default 64)", int, default=64),
        **{
            f"--{name.replace('_', '-')}": _value(f"{text} (default {default})", kind, default=default, metavar="X")
            for name, (kind, default, text) in GENERATION.items()
            if name not in ("max_new_tokens", "batch_tokens")
        },
    },
    "evaluate": {
        "--model": _value("exported folder", Path, required=True, metavar="DIR"),
        "--config": _value("what the data is (default: that of the run whose export/ the model lies in)", Path),
        "--split": _value("(default test)", choices=("train", "validation", "test"), default="test"),
        "--max-samples": _value("the first N examples (default all)", _COUNT, metavar="N"),
        "--metrics": _value(
            f"(default: all that need no model) {', '.join(TEXT_METRICS)}", choices=TEXT_METRICS, nargs="+", metavar="M"
        ),
        "--bertscore-model": _value("folder of the model that BERTScore compares with", Path, metavar="DIR"),
        "--bertscore-layer": _value("its layer (default: the one known to be best, else the last)", _COUNT),
        "--out": _value("folder to write into (default MODEL-SPLIT, beside the model)", Path, metavar="DIR"),
        **{
            f"--{name.replace('_', '-')}": _value(f"{text} (default {default})", kind, default=default, metavar="X")
            for name, (kind, default, text) in GENERATION.items()
        },
        "--device": _value("(default auto)", choices=("auto", "cuda", "cpu"), default="auto"),
        "--dtype": _value(
            "(default: as stored on a GPU, float32 on a CPU)", choices=("float32", "bfloat16", "float16")
        ),
        **_JSON,
    },
}
"""The arguments of each verb that has some; for those of other modules, what adds them."""

VERBS: dict[str, tuple[Verb, bool, str]] = {
    "train": (train.run, True, "train (one process; for several use deepspeed or torchrun)"),
    "validate": (_validate, True, "check a configuration and report every problem in it"),
    "estimate-memory": (
        estimate_memory.run,
        True,
        "say what a run would hold in memory, whether it fits, and what to choose",
    ),
    "plan": (_plan, True, "say what a run would take: steps, days, money, disks, host memory"),
    "schema": (_schema, False, "print the JSON schema of the configuration, for editors"),
    "phases": (_phases, True, "run the phases of a pre-training, each behind the gate of the one before"),
    "inspect-data": (_inspect_data, True, "show the examples that a run will see"),
    "prepare": (prepare.run, True, "render and tokenize the data once, for every rank and run to read"),
    "init-model": (_init_model, False, "make an encoder-decoder from a Qwen3 checkpoint"),
    "export": (_export, False, "write a checkpoint as a Hugging Face model folder"),
    "average": (_average, False, "write the mean of a run's last checkpoints as a Hugging Face model folder"),
    "convert": (_convert, True, "write a checkpoint in the files of a certain engine"),
    "verify": (
        _verify,
        False,
        "compare every file of a checkpoint, a run or prepared data with its SHA-256",
    ),
    "sanity-check": (_sanity_check, True, "look at model, data and engine before a long run"),
    "report": (_report, False, "write one page with pictures about a run, or a pipeline of phases"),
    "push-to-hub": (_push_to_hub, False, "upload an exported folder to the Hugging Face hub (token: HF_TOKEN)"),
    "generate": (_generate, False, "fill sentinels in a text, or continue it"),
    "evaluate": (_evaluate, True, "generate for a split of the data, and compare with its references"),
}
"""For each verb: the function that runs it, whether settings may follow its arguments, and its summary."""


if __name__ == "__main__":
    sys.exit(main())
