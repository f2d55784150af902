"""The verbs `init`, `validate` and `init-model`, which prepare a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ds_encdec.base.arguments import CONFIG_FILES, COUNT, Verb, flag, value
from ds_encdec.config import shipped
from ds_encdec.config.command_line import config_files
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
    from ds_encdec.config.model_folder import MODEL_FILES, TOKENIZER_FILES, model_folder

    model_folder(options.source, (*MODEL_FILES, *TOKENIZER_FILES), field="--from")
    refuse_existing(options.out)
    from ds_encdec.commands.model_folders import init_model  # imports torch, so after the checks

    print(init_model(options.source, options.out, options.num_sentinel_tokens, seed=options.seed))


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
