"""The verbs `doctor`, `sanity-check`, `stop` and `report`, for use before, during and after a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_encdec.base.arguments import CONFIG_FILES, JSON, Verb, flag, value
from ds_encdec.base.findings import Finding, describe
from ds_encdec.base.terminal import console, libraries_print_to_stderr, outlive_readers, print_marked
from ds_encdec.base.types import GateError
from ds_encdec.config.command_line import config_files, load
from ds_encdec.evaluate.models import require_model_folder


def _doctor(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    files = config_files(options, overrides)
    with libraries_print_to_stderr() as stdout:
        from ds_encdec.commands.doctor.findings import as_json, look_at_hosts, look_here

        findings, is_printed = (
            look_here(files) if options.hostfile is None else (look_at_hosts(options.hostfile, files), True)
        )
    if is_printed and options.json:
        print(as_json(findings), file=stdout)
    elif is_printed:
        print_marked(describe(findings, console().width), {"(?m)^✓": "green", "(?m)^✗": "bold red"})
    if wrong := list(dict.fromkeys(finding.check for finding in findings if not finding.passed)):
        raise GateError(f"not ready for a run: {', '.join(wrong)}")


def _sanity_check(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    if options.model:
        require_model_folder(options.model)
    config = None if options.model else load(options, overrides)
    from ds_encdec.commands.sanity_check.session import (  # imports torch, so after the checks
        check_config,
        config_for_model,
    )

    if config is None:
        config = config_for_model(options.model, *config_files(options, overrides))
    outlive_readers()  # the exit code is the result
    with libraries_print_to_stderr() as stdout:

        def show(finding: Finding) -> None:
            if not options.json:
                print(describe([finding], column=30), file=stdout, flush=True)

        report = check_config(config, show)
    if options.json:
        print(report.as_json())
    if report.error is not None:
        raise report.error


def _stop(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.launch.run_folder import RunFolder

    print(RunFolder(options.run_folder).ask_to_stop())


def _report(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.report.write import write_report

    page, warnings = write_report(options.run_folder, compare=options.compare, out=options.out, png=options.png)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"the report is in {page}")


DOCTOR = Verb(
    _doctor,
    "look at each host before a run: versions, devices, folders, network",
    "ds-encdec doctor my.yaml --hostfile hosts",
    {**CONFIG_FILES, "--hostfile": value("check each of its hosts, by ssh, and all of them together", Path), **JSON},
    takes_settings=True,
)
SANITY_CHECK = Verb(
    _sanity_check,
    "look at model, data and engine before a long run",
    "ds-encdec sanity-check my.yaml training.micro_batch_size=1",
    {**CONFIG_FILES, "--model": value("a model folder, instead of the configuration's", Path, metavar="DIR"), **JSON},
    takes_settings=True,
)
STOP = Verb(
    _stop,
    "ask a running job to save and stop, from any host that sees its folder",
    "ds-encdec stop output",
    {"run_folder": value("the run's folder (infra.output_dir), or that of a phase", metavar="RUN")},
)
REPORT = Verb(
    _report,
    "write one page with pictures about a run, or a pipeline of phases",
    "ds-encdec report output --compare output2 --out compared",
    {
        "run_folder": value("a run or a pipeline's folder, e.g. output", Path, metavar="run"),
        "--compare": value("run to draw beside it (repeatable)", Path, action="append", default=[], metavar="RUN"),
        "--out": value("folder to write into (default RUN/report, or RUN/report-compared)", Path, metavar="DIR"),
        "--png": flag("also write each chart beside the page as a picture"),
    },
)
