"""`ds-encdec prepare`: render and tokenize the documents of a configuration once, into `data.prepared_dir`."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ds_encdec.arguments import CONFIG, Arguments, value
from ds_encdec.terminal import log_to_terminal, outlive_readers
from ds_encdec.types import ConfigError, Preempted

ARGUMENTS: Arguments = {
    **CONFIG,
    "--num-proc": value("processes (default: all cores)", int, metavar="N"),
    "--out": value("folder to write (default data.prepared_dir)", Path, metavar="DIR"),
}


def run(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Do what the options say, and say of each source what is there now. Raises Preempted at Ctrl-C."""
    from ds_encdec.config.schema import load_config

    num_proc = len(os.sched_getaffinity(0)) if options.num_proc is None else options.num_proc
    if num_proc < 1:
        raise ConfigError(f"--num-proc {num_proc}: at least one process has to do it")
    if options.out is not None:
        overrides = [*overrides, f"data.prepared_dir={json.dumps(str(options.out))}"]
    config = load_config(options.config, overrides)
    if config.data.prepared_dir is None:
        raise ConfigError("data.prepared_dir: name the folder to prepare the data in, or give --out DIR")
    log_to_terminal(options, logging.INFO)
    outlive_readers()  # it is for what it leaves, and not for these lines
    try:
        from ds_encdec.data.build import prepare_data  # torch: once the configuration is sound
        from ds_encdec.resume import run_tokenizer

        for line in prepare_data(config, *run_tokenizer(config), num_proc):
            print(line, flush=True)
    except KeyboardInterrupt:
        raise Preempted("stopped: what is finished is kept, and the same command goes on from there") from None
