"""The verbs for use before, during and after a run, but for those on exported models. Only what they need is imported,
and torch after the checks, so that mistakes are reported at once."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_encdec.base import terminal
from ds_encdec.base.arguments import CONFIG, CONFIG_FILES, COUNT, JSON, RATE, Arguments, Verb, flag, tokens, value
from ds_encdec.base.findings import Finding, describe
from ds_encdec.base.types import ConfigError, GateError
from ds_encdec.config import shipped
from ds_encdec.config.command_line import config_files, load
from ds_encdec.config.stored_model import MODEL_FILES, TOKENIZER_FILES, model_folder, read_stored_model
from ds_encdec.evaluate.models import require_model_folder
from ds_encdec.memory.gpus import DEFAULT_GPU, has_gpu

if TYPE_CHECKING:
    from ds_encdec.config.schema import FullConfig


def _validate(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.config.schema import Mark, editor_schema, marked, read_config
    from ds_encdec.config.settings import show
    from ds_encdec.config.shares import unevenness
    from ds_encdec.training.absent import look_here

    if options.schema:
        print(editor_schema(), end="")
        return
    hostfile, looks_here = options.hostfile, not options.elsewhere
    loaded = read_config(*config_files(options, overrides))
    if hostfile is not None:
        loaded.check_hosts(hostfile)
    if looks_here:
        look_here(loaded)
    is_chosen = any(field in loaded.settings for field in ("training.freeze", *marked(Mark.FORM)))
    if loaded.checked.is_sound and is_chosen:
        from ds_encdec.memory.job import impossible_model  # rarely needed

        loaded.add(impossible_model(loaded.config))
    config, notes = loaded.valid(), loaded.notes()
    ranks = config.infra.num_gpus
    if hostfile is None and (wrong := unevenness(config, ranks)):
        notes.append(f"warning: infra.num_gpus={ranks}, and {wrong}")
    if looks_here and config.infra.device == "cuda" and not has_gpu():
        whose = "" if "device" in config.infra.model_fields_set else " (the default)"
        notes.append(f"warning: infra.device=cuda{whose}, and this machine has no GPU: auto would take its CPU")
    named = show(str(options.config))[1:-1] if options.config else "the default configuration"
    terminal.print_text("\n".join([*notes, f"{named}: no problems found"]))


def _estimate_memory(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.memory.answer import as_json, estimate_tables, show
    from ds_encdec.memory.question import read_request

    request = read_request(options, overrides)
    tables = estimate_tables(request)
    if options.json:
        print(json.dumps(as_json(request, tables), indent=2))
        return
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=120, no_color=True)
    with console.capture() as written:
        show(console, request, tables, everything=options.all)
    print(*map(str.rstrip, written.get().splitlines()), sep="\n")


def _init_model(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.checkpoint.folder import refuse_existing
    from ds_encdec.config.schema import Mark, marked, read_config
    from ds_encdec.config.words.rewording import given_fields
    from ds_encdec.memory.job import require_possible_model

    given = [f"model.model_name_or_path={json.dumps(options.source)}"]
    given.append(f"model.num_sentinel_tokens={options.num_sentinel_tokens}")
    config = read_config(None, [*given, *overrides]).valid()
    if unread := sorted(given_fields(overrides).difference(known := marked(Mark.FORM))):
        raise ConfigError(f"{unread[0]}: init-model reads no such setting, only {', '.join(known)}")
    if options.check is not None and not options.check.is_file():
        raise ConfigError(f"--check: there is no file {options.check}")
    require_possible_model(config)
    model_folder(options.source, (*MODEL_FILES, *TOKENIZER_FILES), field="--from")
    refuse_existing(options.out)
    from ds_encdec.commands.model_folders import init_model

    for line in init_model(config.model, options.out, seed=options.seed, text=options.check):
        terminal.print_text(line)


def _inspect_data(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    config = load(options, overrides)
    from ds_encdec.data.inspection import inspect_run_data
    from ds_encdec.training.run_model import run_tokenizer

    shown = inspect_run_data(
        config, *run_tokenizer(config), num_examples=options.n, as_json=options.json, with_ids=options.ids
    )
    terminal.print_marked(shown, {r"<extra_id_\d+>": "bold cyan", "(?m)^──.*$": "bold"})


def _prepare(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    if options.out is not None:
        overrides = [*overrides, f"data.prepared_dir={json.dumps(str(options.out))}"]
    config = load(options, overrides)
    if config.data.prepared_dir is None:
        raise ConfigError("data.prepared_dir: name the folder to prepare the data in, or give --out DIR")
    terminal.log_to_terminal(options, logging.INFO)
    terminal.outlive_readers()  # its files matter, not these lines
    from ds_encdec.data.build import prepare_data
    from ds_encdec.training.run_model import run_tokenizer

    for line in prepare_data(config, *run_tokenizer(config), options.num_proc or len(os.sched_getaffinity(0))):
        terminal.print_text(line)


def _plan(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.commands.plan import describe_plan, plan_run

    if options.gpus is not None:
        overrides = [f"infra.num_gpus={options.gpus}", *overrides]
    plan = plan_run(
        load(options, overrides),
        nodes=options.nodes,
        num_tokens=options.tokens,
        tokens_per_second=_rate(options),
        price_per_gpu_hour=options.price_per_gpu_hour,
    )
    print(json.dumps(plan, indent=2) if options.json else describe_plan(plan))


def _phases(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.commands.phases.execute import run_phases
    from ds_encdec.commands.phases.plan import plan_phase, select_phases, with_given
    from ds_encdec.commands.plan import describe_plan_of_phases, plan_of_phases
    from ds_encdec.config.words.rewording import given_fields

    needs_dry_run = options.json or options.measured or options.tokens_per_second or options.price_per_gpu_hour
    if needs_dry_run and not options.dry_run:
        raise ConfigError(
            "--json, --tokens-per-second, --measured and --price-per-gpu-hour belong to --dry-run: add it"
        )
    phases = select_phases(options.only, options.first, options.last)
    config = with_given(load(options, overrides), given_fields(overrides))
    plans = [plan_phase(config, phase, options.steps_per_phase) for phase in phases]
    if not options.dry_run:
        terminal.outlive_readers()  # the runs matter, not these lines
        run_phases(config, plans, launcher=options.launcher)
        return
    plan = plan_of_phases(plans, tokens_per_second=_rate(options), price_per_gpu_hour=options.price_per_gpu_hour)
    print(json.dumps(plan, indent=2) if options.json else describe_plan_of_phases(plan))


def _rate(options: argparse.Namespace) -> float | None:
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


def _rates(remark: str = "") -> Arguments:
    return {
        "--tokens-per-second": value(f"throughput of all ranks{remark}", RATE, metavar="T", only_one=True),
        "--measured": value(f"take the throughput from this run{remark}", Path, metavar="RUN", only_one=True),
        "--price-per-gpu-hour": value(f"compute the cost at this price{remark}", RATE, metavar="USD"),
    }


def _doctor(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    files = config_files(options, overrides)
    with terminal.libraries_print_to_stderr() as stdout:
        from ds_encdec.commands.doctor import look_at_hosts, look_here

        findings, is_printed = look_at_hosts(options.hostfile, files) if options.hostfile else look_here(files)
    if is_printed and options.json:
        rows = [
            {name: getattr(one, name) for name in ("check", "host", "passed", "message", "fix")} for one in findings
        ]
        print(json.dumps({"passed": all(one.passed for one in findings), "findings": rows}, indent=2), file=stdout)
    elif is_printed:
        terminal.print_marked(describe(findings, terminal.console().width), {"(?m)^✓": "green", "(?m)^✗": "bold red"})
    if wrong := list(dict.fromkeys(finding.check for finding in findings if not finding.passed)):
        raise GateError(f"not ready for a run: {', '.join(wrong)}")


def _sanity_check(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    files = config_files(options, overrides)
    config = config_for_model(options.model, *files) if options.model else load(options, overrides)
    from ds_encdec.commands.sanity_check import check_config
    from ds_encdec.monitor.metrics_file import strict_json

    terminal.outlive_readers()  # the exit code is the result
    with terminal.libraries_print_to_stderr() as stdout:

        def show(finding: Finding) -> None:
            if not options.json:
                terminal.print_text(describe([finding], column=30), file=stdout)

        findings, problem = check_config(config, show)
    if options.json:
        others = ("passed", "skipped", "message", "values")
        rows = [{"name": one.check, **{name: getattr(one, name) for name in others}} for one in findings]
        print(json.dumps(strict_json({"passed": problem is None, "checks": rows}), indent=2, allow_nan=False))
    if problem is not None:
        raise problem


def config_for_model(
    model: Path, config: Path | None, overrides: Sequence[str], deepspeed_config: Path | None = None
) -> FullConfig:
    """Return the configuration to check the model folder `model` with: `config`, else a small one on the built-in text.
    `overrides` come last. Raises ConfigError, and CheckpointError for a folder that is not a model's."""
    from ds_encdec.config.schema import load_config

    require_model_folder(model)
    stored = read_stored_model(model / "config.json")
    given = [f"model.model_name_or_path={json.dumps(str(model))}", *(_SMALL if config is None else _ITS_OWN).split()]
    if sentinels := stored.get("sentinel_token_ids"):
        has_modes = json.dumps(bool(stored.get("mode_token_ids")))
        given += [f"model.num_sentinel_tokens={len(sentinels)}", f"data.use_mode_tokens={has_modes}"]
    return load_config(config, [*given, *overrides], deepspeed_config)


_ITS_OWN = "model.tokenizer_name_or_path=null model.architecture=null"
_SMALL = (
    f"{_ITS_OWN} data.dataset_name=builtin data.max_seq_length=512 data.max_encoder_length=256 "
    "data.max_decoder_length=256 training.per_device_train_batch_size=2 training.report_to=none "
    "infra.distributed_type=auto infra.device=auto infra.num_gpus=1 infra.sharding_stage=zero2 "
    "infra.offload_optimizer=none"
)


def _stop(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.launch.run_folder import RunFolder

    print(RunFolder(options.run_folder).ask_to_stop())


def _report(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.report.write import write_report

    page, warnings = write_report(options.run_folder, compare=options.compare, out=options.out, png=options.png)
    for warning in warnings:
        terminal.print_text(f"warning: {warning}", file=sys.stderr)
    terminal.print_text(f"the report is in {page}")


def _compare(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.commands.compare import compared

    terminal.outlive_readers()  # the exit code is the result
    for sentence in compared(*options.runs):
        terminal.print_text(sentence)


_PHASES = ("sanity_check", "validation", "medium", "full")

VERBS = {
    "init": Verb(
        shipped.run_init,
        "write a shipped configuration, to edit; or list them",
        "ds-encdec init quickstart --out my.yaml",
        shipped.INIT,
    ),
    "validate": Verb(
        _validate,
        "check a configuration and report every problem in it",
        "ds-encdec validate my.yaml --hostfile hosts infra.num_gpus=16",
        {
            **CONFIG_FILES,
            "--hostfile": value("hosts and slots, as the deepspeed launcher reads them", Path),
            "--elsewhere": flag("for another machine: do not look for the files and folders it names"),
            "--schema": flag("print the JSON schema of configurations, for editors, and check nothing"),
        },
        takes_settings=True,
    ),
    "estimate-memory": Verb(
        _estimate_memory,
        "say what a run would hold in memory, whether it fits, and what to choose",
        "ds-encdec estimate-memory my.yaml --gpus 8 --gpu h100-80gb",
        {
            **CONFIG_FILES,
            "--model": value("a model, instead of the configuration's", metavar="ID_OR_DIR"),
            "--gpus": value("GPUs in total (default infra.num_gpus)", int, metavar="N"),
            "--nodes": value("machines they are in (default 1)", int, default=1, metavar="N"),
            "--gpu": value(f"e.g. h100-80gb, 80GiB (default {DEFAULT_GPU})", metavar="NAME|SIZE"),
            "--host-memory": value("memory of each machine, e.g. 1TB: judge the host, too", metavar="SIZE"),
            "--all": flag("show both engines, and the settings that do not exist"),
            **JSON,
        },
        takes_settings=True,
    ),
    "init-model": Verb(
        _init_model,
        "make an encoder-decoder from a decoder's checkpoint",
        "ds-encdec init-model --from Qwen/Qwen3-0.6B --out start decoder_layers=7",
        {
            "--from": value("decoder (docs/model.md)", dest="source", required=True, metavar="PATH_OR_HUB_ID"),
            "--out": value("folder to write; must not exist", Path, required=True, metavar="DIR"),
            "--num-sentinel-tokens": value("sentinel tokens to add (default 100)", COUNT, default=100),
            "--seed": value("seed of the sentinel rows (default 42)", int, default=42),
            "--check": value("measure on this text what the conversion alone costs", Path, metavar="FILE"),
        },
        takes_settings=True,
    ),
    "inspect-data": Verb(
        _inspect_data,
        "show the examples that a run will see",
        "ds-encdec inspect-data my.yaml -n 5 data.use_mode_tokens=true",
        {
            **CONFIG,
            "-n": value("examples to show (default 20)", COUNT, default=20),
            "--ids": flag("show the token ids, too"),
            **JSON,
        },
        takes_settings=True,
    ),
    "prepare": Verb(
        _prepare,
        "render and tokenize the data once, for every rank and run to read",
        "ds-encdec prepare my.yaml --out prepared --num-proc 16",
        {
            **CONFIG,
            "--num-proc": value("processes (default: all cores)", COUNT, metavar="N"),
            "--out": value("folder to write (default data.prepared_dir)", Path, metavar="DIR"),
        },
        takes_settings=True,
        kept="finished parts",
    ),
    "plan": Verb(
        _plan,
        "compute what a run would take: steps, days, money, disks, host memory",
        "ds-encdec plan my.yaml --tokens 5B --measured output --price-per-gpu-hour 2.5",
        {
            **CONFIG_FILES,
            "--tokens": value("tokens to train on (default: the run's steps)", tokens, metavar="N"),
            "--gpus": value("GPUs in total (default infra.num_gpus)", COUNT, metavar="N"),
            "--nodes": value("machines they are in (default 1)", COUNT, default=1, metavar="N"),
            **_rates(),
            **JSON,
        },
        takes_settings=True,
    ),
    "phases": Verb(
        _phases,
        "run the phases of a pre-training, each behind the gate of the one before",
        "ds-encdec phases my.yaml --to validation --dry-run",
        {
            **CONFIG_FILES,
            "--only": value("run this phase", choices=_PHASES),
            "--from": value("first phase (default sanity_check)", dest="first", choices=_PHASES),
            "--to": value("last phase (default full)", dest="last", choices=_PHASES),
            "--steps-per-phase": value("at most N optimizer steps a phase", COUNT, metavar="N"),
            "--launcher": value("what starts the ranks, e.g. 'deepspeed --hostfile hosts'", metavar="COMMAND"),
            "--dry-run": flag("print steps, tokens, days and money, and stop"),
            **_rates(" (dry run)"),
            "--json": flag("the dry run as one JSON object"),
        },
        takes_settings=True,
    ),
    "doctor": Verb(
        _doctor,
        "look at each host before a run: versions, devices, folders, network",
        "ds-encdec doctor my.yaml --hostfile hosts",
        {
            **CONFIG_FILES,
            "--hostfile": value("check each of its hosts, by ssh, and all of them together", Path),
            **JSON,
        },
        takes_settings=True,
    ),
    "sanity-check": Verb(
        _sanity_check,
        "look at model, data and engine before a long run",
        "ds-encdec sanity-check my.yaml training.micro_batch_size=1",
        {
            **CONFIG_FILES,
            "--model": value("a model folder, instead of the configuration's", Path, metavar="DIR"),
            **JSON,
        },
        takes_settings=True,
    ),
    "stop": Verb(
        _stop,
        "make a running job save and stop, from any host that sees its folder",
        "ds-encdec stop output",
        {"run_folder": value("the run's folder (infra.output_dir), or that of a phase", metavar="RUN")},
    ),
    "report": Verb(
        _report,
        "write one page with pictures about a run, or a pipeline of phases",
        "ds-encdec report output --compare output2 --out compared",
        {
            "run_folder": value("a run or a pipeline's folder, e.g. output", Path, metavar="run"),
            "--compare": value("run to draw beside it (repeatable)", Path, action="append", default=[], metavar="RUN"),
            "--out": value("folder to write into (default RUN/report, or RUN/report-compared)", Path, metavar="DIR"),
            "--png": flag("also write each chart beside the page as a picture"),
        },
    ),
    "compare": Verb(
        _compare,
        "report where two runs part: tokens and metrics (exit code 10)",
        "ds-encdec compare output output2",
        {"runs": value("the folders of two runs", Path, nargs=2, metavar="RUN")},
    ),
}
