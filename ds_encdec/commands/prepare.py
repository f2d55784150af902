"""The verbs `inspect-data` and `prepare`, which show the data that a run reads, or render and tokenize it once."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ds_encdec.base.arguments import CONFIG, COUNT, JSON, Verb, flag, value
from ds_encdec.base.terminal import log_to_terminal, outlive_readers, print_marked
from ds_encdec.base.types import ConfigError, Preempted
from ds_encdec.config.command_line import load


def _inspect_data(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    config = load(options, overrides)
    from ds_encdec.data.inspection import inspect_run_data  # imports torch, so after the checks
    from ds_encdec.training.run_model import run_tokenizer

    shown = inspect_run_data(
        config, *run_tokenizer(config), num_examples=options.n, as_json=options.json, with_ids=options.ids
    )
    print_marked(shown, {r"<extra_id_\d+>": "bold cyan", "(?m)^──.*$": "bold"})


def _prepare(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Prepare the data and print the state of each source. Raises Preempted at Ctrl-C."""
    num_proc = len(os.sched_getaffinity(0)) if options.num_proc is None else options.num_proc
    if num_proc < 1:
        raise ConfigError(f"--num-proc {num_proc}: at least one process has to do it")
    if options.out is not None:
        overrides = [*overrides, f"data.prepared_dir={json.dumps(str(options.out))}"]
    config = load(options, overrides)
    if config.data.prepared_dir is None:
        raise ConfigError("data.prepared_dir: name the folder to prepare the data in, or give --out DIR")
    log_to_terminal(options, logging.INFO)
    outlive_readers()  # its files matter, not these lines
    try:
        from ds_encdec.data.build import prepare_data  # imports torch, so after the checks
        from ds_encdec.training.run_model import run_tokenizer

        for line in prepare_data(config, *run_tokenizer(config), num_proc):
            print(line, flush=True)
    except KeyboardInterrupt:
        raise Preempted("stopped: what is finished is kept, and the same command goes on from there") from None


INSPECT_DATA = Verb(
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
)
PREPARE = Verb(
    _prepare,
    "render and tokenize the data once, for every rank and run to read",
    "ds-encdec prepare my.yaml --out prepared --num-proc 16",
    {
        **CONFIG,
        "--num-proc": value("processes (default: all cores)", int, metavar="N"),
        "--out": value("folder to write (default data.prepared_dir)", Path, metavar="DIR"),
    },
    takes_settings=True,
)
