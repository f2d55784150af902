"""The program that the launchers start: `deepspeed ds_encdec/train.py`, `torchrun ds_encdec/train.py`, or plain python.

Further arguments: `section.field=value` overrides; `--section.field value` works too.
"""

from __future__ import annotations

import os
import sys

if not __package__:
    # For a script, Python puts this folder on the path instead of the one that holds the package; then `evaluate`
    # would be our folder, and not the library. So this comes before every other import. Once the package is found, its
    # parent goes last: a user may work in it, whose `datasets.py` must not hide a library.
    _HERE = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.path.dirname(_HERE), *(path for path in sys.path if path != _HERE)]
    import ds_encdec  # noqa: F401

    sys.path.append(sys.path.pop(0))

import argparse
import json
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ds_encdec.base.arguments import COUNT, Arguments, Verb, flag, value
from ds_encdec.base.terminal import interrupts_in_a_line, log_to_terminal, outlive_readers, print_error, printable
from ds_encdec.base.types import CheckpointError, ConfigError, DsEncDecError, Preempted
from ds_encdec.config.command_line import container_arguments, is_container, read_program
from ds_encdec.launch.host import no_gpu, wait_without_spinning
from ds_encdec.launch.startup_errors import startup_errors_shared
from ds_encdec.launch.world import World, discover
from ds_encdec.memory.gpus import grow_segments, has_gpu

if TYPE_CHECKING:
    from ds_encdec.config.schema import FullConfig

logger = logging.getLogger(__name__)

RANK_ZERO_SECONDS = 10.0  # how long a rank waits for rank 0, which prints an error of all

ARGUMENTS: Arguments = {
    "--config": value("YAML of the run, or a shipped one's name (default: the schema, qwen3_0.6b_ul2)", Path),
    "--deepspeed_config --deepspeed-config": value("raw DeepSpeed JSON, reconciled with the YAML", Path),
    "--resume --resume_from --resume_from_checkpoint": value(
        "continue from the newest complete checkpoint, or from this one",
        lambda text: "auto" if text.lower() == "true" else text,  # as Hugging Face has it
        metavar="auto|PATH",
    ),
    "--allow-data-change": flag("resume even if the data is not that of the checkpoint"),
    "--profile": value("profile N steps, behind 3 that warm up, into RUN/profile", COUNT, metavar="N", default=0),
    "--print-config": flag("print the resolved YAML and stop"),
    "--print-deepspeed-config": flag("print DeepSpeed's JSON and stop"),
    # Launchers add this one; the rank is read from the environment (launch/world.py).
    "--local_rank --local-rank": value(argparse.SUPPRESS, int),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train by the command line; return the process's exit code."""
    example = "deepspeed --num_gpus 8 ds_encdec/train.py --config my.yaml --resume auto"
    given, in_sagemaker = list(sys.argv[1:] if arguments is None else arguments), is_container(os.environ)
    try:
        if in_sagemaker:
            given = container_arguments(os.environ, given, {name for names in ARGUMENTS for name in names.split()})
        options, overrides = read_program("ds_encdec/train.py", __doc__, example, ARGUMENTS, given)
        with interrupts_in_a_line():
            return run(options, overrides, in_sagemaker=in_sagemaker)
    except Preempted as error:
        if os.environ.get("RANK", "0") == "0":  # all ranks stop together
            print(error, flush=True)
            if "RANK" in os.environ:
                print("Exit code 75 means no failure, although launchers report one.", flush=True)
        return error.exit_code
    except DsEncDecError as error:
        # Every rank reads the same configuration and meets the same error, unless `common` says otherwise.
        common = isinstance(error, ConfigError) if error.common is None else error.common
        if common and not _is_reporter():
            time.sleep(RANK_ZERO_SECONDS)  # launchers end all ranks as soon as one has left
            return error.exit_code
        if type(error) is DsEncDecError:  # an unforeseen one: show where it comes from
            print(printable(traceback.format_exc()), file=sys.stderr)
        print_error(error)
        return error.exit_code


def _is_reporter() -> bool:
    with suppress(ConfigError):
        return discover(os.environ, choose_port=lambda: 0).is_main
    return True  # its rank is unknown


def run(options: argparse.Namespace, overrides: Sequence[str], *, in_sagemaker: bool = False) -> int:
    """Load the configuration, then print it, or DeepSpeed's JSON for a run here (for a plain process, on the planned
    `infra.num_gpus` ranks), or train with it. Raises DsEncDecError."""
    outlive_readers()
    wait_without_spinning(os.environ)
    if options.print_config:
        print(_load(options, overrides, lambda note: print(f"# {note}")).dump_yaml(), end="")
    elif options.print_deepspeed_config:
        config = _load(options, overrides, logger.info)
        import torch

        from ds_encdec.config.shares import plan_lanes, with_assumed_batch_size
        from ds_encdec.engine.deepspeed.json import render_deepspeed_json

        world, device = discover(os.environ), config.infra.device
        ranks = world.world_size if world.world_size > 1 else config.infra.num_gpus
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        config = with_assumed_batch_size(config, ranks)
        _, steps = plan_lanes(config, ranks)
        rendered = render_deepspeed_json(config, world_size=ranks, gradient_accumulation_steps=steps, device=device)
        print(json.dumps(rendered, indent=2))
    else:
        _train(options, overrides, in_sagemaker=in_sagemaker)
    return 0


def _train(options: argparse.Namespace, overrides: Sequence[str], *, in_sagemaker: bool) -> None:
    from ds_encdec.launch.preemption import StopRequest  # not for --help
    from ds_encdec.launch.standby import keep_standby

    try:
        world = discover(os.environ)
    except ConfigError as error:
        error.common = False  # this process's environment is wrong, and maybe no other's
        raise
    log_to_terminal(options, logging.INFO, rank=world.rank, ranks=world.world_size)
    with StopRequest(world, whole_process=True) as stop:
        if not __package__:
            keep_standby(__file__, lambda: stop.heartbeat.has_stepped)
        # Watched while importing: this takes a moment, torch and deepspeed take seconds.
        with startup_errors_shared(world):
            config = _load(options, overrides, logger.info)
            _refuse_early(config, options.resume, world)
            grow_segments(os.environ)
            logger.info("loading torch and the engine, which takes some seconds")
            from ds_encdec.training.build import run_training  # only once the configuration is sound

        run_training(
            config, stop, resume=options.resume, allow_data_change=options.allow_data_change, profile=options.profile
        )
    if in_sagemaker and world.is_main:
        from ds_encdec.exports.hugging_face import hand_over
        from ds_encdec.launch.run_folder import RunFolder

        hand_over(RunFolder(config.infra.output_dir), Path(os.environ.get("SM_MODEL_DIR", "/opt/ml/model")))


def _refuse_early(config: FullConfig, resume: str | None, world: World) -> None:
    """Raise, before torch loads, for missing files, GPU or package, and too few rows for the tokenizer.
    As later, `run.json` records the failure of a new run. Files are left to the run if several hosts, restarting
    launchers or supervisors are to learn of the error from it."""
    from ds_encdec.launch.run_folder import RunFolder
    from ds_encdec.training.absent import refuse_absent, require_here

    folder = RunFolder(config.infra.output_dir)
    starts_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or resume == "auto"
    if world.is_main and world.num_nodes == 1 and not starts_again:
        if resume is None:
            try:
                refuse_absent(config)
            except DsEncDecError as error:
                with suppress(DsEncDecError, OSError):
                    folder.claim(resume=False)
                    folder.write_status("failed", reason=str(error), exit_code=error.exit_code)
                    folder.release()
                raise
        path = Path(resume or "").expanduser().resolve()
        # A save that was killed leaves its checkpoint under the second name, and the run's start renames it.
        if resume and not path.exists() and not path.with_name(f".replaced-{path.name}").exists():
            raise CheckpointError(
                f"--resume: {path}: no such folder. `--resume auto` finds the newest checkpoint of the run"
            )
    if config.infra.device == "cuda" and not has_gpu():
        is_set = "device" in config.infra.model_fields_set
        raise no_gpu("no GPU", f"infra.device=cuda{'' if is_set else ' (the default)'}")
    require_here(config, new=resume is None or (resume == "auto" and not folder.is_used()))


def _load(options: argparse.Namespace, overrides: Sequence[str], log: Callable[[str], None]) -> FullConfig:
    from ds_encdec.config.schema import read_config

    loaded = read_config(options.config, overrides, options.deepspeed_config)
    config = loaded.valid()
    for note in loaded.notes():
        log(note)
    return config


VERB = Verb(
    run,
    "train (one process; for several use deepspeed or torchrun)",
    "ds-encdec train --config my.yaml --resume auto training.num_train_steps=2000",
    ARGUMENTS,
    takes_settings=True,
)


if __name__ == "__main__":
    from ds_encdec.launch.standby import run_rank

    try:
        code = run_rank(main)
    except Exception:
        print(printable(traceback.format_exc()), file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # A rank that failed cannot destroy its process groups in order. Were it left to the interpreter's exit, gloo's
        # threads would sometimes abort and hide the code.
        os._exit(code)
