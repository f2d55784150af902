"""The verbs `plan` and `phases`: the needs of a run, and the phases of a pre-training."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_encdec.base.arguments import CONFIG_FILES, COUNT, JSON, RATE, Arguments, Verb, flag, tokens, value
from ds_encdec.base.terminal import outlive_readers
from ds_encdec.base.types import ConfigError
from ds_encdec.config.command_line import load


def _plan(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.commands.plan import describe_plan, plan_run

    if options.price_per_gpu_hour and not (options.tokens_per_second or options.measured):
        raise ConfigError("--price-per-gpu-hour needs a rate: add --tokens-per-second or --measured")
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
    from ds_encdec.commands.phases.plan import plan_phases, select_phases, with_given
    from ds_encdec.commands.plan import describe_plan_of_phases, plan_of_phases
    from ds_encdec.config.words.rewording import given_fields

    needs_dry_run = options.json or options.measured or options.tokens_per_second or options.price_per_gpu_hour
    if needs_dry_run and not options.dry_run:
        raise ConfigError(
            "--json, --tokens-per-second, --measured and --price-per-gpu-hour belong to --dry-run: add it"
        )
    phases = select_phases(options.only, options.first, options.last)
    config = with_given(load(options, overrides), given_fields(overrides))
    plans = plan_phases(config, phases, options.steps_per_phase)
    if not options.dry_run:
        outlive_readers()  # the runs matter, not these lines
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
        "--price-per-gpu-hour": value(f"say what it costs at this price{remark}", RATE, metavar="USD"),
    }


PLAN = Verb(
    _plan,
    "say what a run would take: steps, days, money, disks, host memory",
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
)
PHASES = Verb(
    _phases,
    "run the phases of a pre-training, each behind the gate of the one before",
    "ds-encdec phases my.yaml --to validation --dry-run",
    {
        **CONFIG_FILES,
        "--only": value("run this phase: sanity_check, validation, medium or full", metavar="PHASE"),
        "--from": value("first phase (default sanity_check)", dest="first", metavar="PHASE"),
        "--to": value("last phase (default full)", dest="last", metavar="PHASE"),
        "--steps-per-phase": value("at most N optimizer steps a phase", COUNT, metavar="N"),
        "--launcher": value("what starts the ranks, e.g. 'deepspeed --hostfile hosts'", metavar="COMMAND"),
        "--dry-run": flag("print steps, tokens, days and money, and stop"),
        **_rates(" (dry run)"),
        "--json": flag("the dry run as one JSON object"),
    },
    takes_settings=True,
)
