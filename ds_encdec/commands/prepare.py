"""The verbs that prepare a run: `init`, `validate`, `init-model`, `inspect-data` and `prepare`."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ds_encdec.base.arguments import CONFIG, CONFIG_FILES, COUNT, JSON, Verb, flag, value
from ds_encdec.base.terminal import log_to_terminal, outlive_readers, print_marked
from ds_encdec.base.types import ConfigError, Preempted
from ds_encdec.config import shipped
from ds_encdec.config.command_line import config_files, load
from ds_encdec.memory.gpus import has_gpu


def _validate(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from ds_encdec.config.schema import editor_schema, read_config
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
    if loaded.checked.is_sound and loaded.config.training.freeze:
        from ds_encdec.memory.job import frozen_in_vain  # rarely needed

        loaded.add(frozen_in_vain(loaded.config))
    config, notes = loaded.valid(), loaded.notes()
    ranks = config.infra.num_gpus
    if hostfile is None and (wrong := unevenness(config, ranks)):
        notes.append(f"warning: infra.num_gpus={ranks}, and {wrong}")
    if looks_here and config.infra.device == "cuda" and not has_gpu():
        whose = "" if "device" in config.infra.model_fields_set else " (the default)"
        notes.append(f"warning: infra.device=cuda{whose}, and this machine has no GPU: auto would take its CPU")
    print("".join(f"{note}\n" for note in notes), end="")
    print(f"{show(str(options.config))[1:-1] if options.config else 'the default configuration'}: no problems found")


def _init_model(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.checkpoint.folder import refuse_existing
    from ds_encdec.config.stored_model import MODEL_FILES, TOKENIZER_FILES, model_folder

    model_folder(options.source, (*MODEL_FILES, *TOKENIZER_FILES), field="--from")
    refuse_existing(options.out)
    from ds_encdec.commands.model_folders import init_model  # imports torch, so after the checks

    print(init_model(options.source, options.out, options.num_sentinel_tokens, seed=options.seed))


def _inspect_data(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    config = load(options, overrides)
    from ds_encdec.data.inspection import inspect_run_data  # imports torch, so after the checks
    from ds_encdec.training.run_model import run_tokenizer

    shown = inspect_run_data(
        config, *run_tokenizer(config), num_examples=options.n, as_json=options.json, with_ids=options.ids
    )
    print_marked(shown, {r"<extra_id_\d+>": "bold cyan", "(?m)^──.*$": "bold"})


def _prepare(options: argparse.Namespace, overrides: Sequence[str]) -> None:
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

        for line in prepare_data(config, *run_tokenizer(config), options.num_proc or len(os.sched_getaffinity(0))):
            print(line, flush=True)
    except KeyboardInterrupt:
        raise Preempted("stopped: finished parts are kept, and the same command continues") from None


INIT = Verb(
    shipped.run_init,
    "write a shipped configuration, to edit; or list them",
    "ds-encdec init quickstart --out my.yaml",
    shipped.INIT,
)
VALIDATE = Verb(
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
)
INIT_MODEL = Verb(
    _init_model,
    "make an encoder-decoder from a Qwen3 checkpoint",
    "ds-encdec init-model --from Qwen/Qwen3-0.6B --out start",
    {
        "--from": value("decoder-only Qwen3 to start from", dest="source", required=True, metavar="PATH_OR_HUB_ID"),
        "--out": value("folder to write; must not exist", Path, required=True, metavar="DIR"),
        "--num-sentinel-tokens": value("sentinel tokens to add (default 100)", COUNT, default=100),
        "--seed": value("seed of the sentinel rows (default 42)", int, default=42),
    },
)
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
        "--num-proc": value("processes (default: all cores)", COUNT, metavar="N"),
        "--out": value("folder to write (default data.prepared_dir)", Path, metavar="DIR"),
    },
    takes_settings=True,
)
