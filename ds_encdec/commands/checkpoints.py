"""The verbs `export`, `average` and `verify`. They import torch only when they run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_encdec.base.arguments import Arguments, Verb, flag, value
from ds_encdec.base.terminal import outlive_readers
from ds_encdec.base.types import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch


def _export(options: argparse.Namespace, _: Sequence[str]) -> None:
    if options.adapter and options.encoder_only:
        raise ConfigError("--adapter and --encoder-only: adapters stand beside both sides; give one of the two")
    _require_sound(options.checkpoint, options.out)
    if options.adapter:
        from ds_encdec.exports.adapters import export_adapter

        export_adapter(options.checkpoint, options.out, base=options.base)
    else:
        from ds_encdec.exports.hugging_face import export_checkpoint

        how: dict[str, Any] = {"dtype": _dtype(options), "encoder_only": options.encoder_only, "base": options.base}
        export_checkpoint(options.checkpoint, options.out, **how)
    print(f"exported to {options.out}")


def _average(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.checkpoint.folder import refuse_existing
    from ds_encdec.launch.run_folder import RunFolder

    run = RunFolder(str(options.run_folder))
    if not run.root.is_dir():
        raise CheckpointError(f"{options.run_folder}: no such folder; give a run's, such as output")
    refuse_existing(out := options.out or run.averaged)
    from ds_encdec.exports.hugging_face import average_checkpoints  # imports torch, so after the checks

    steps = average_checkpoints(run, out, last=options.last, base=options.base, dtype=_dtype(options))
    fewer = f" (there are no more in a row; {options.last} were asked for)" if len(steps) < options.last else ""
    print(f"the mean of steps {', '.join(map(str, steps))}{fewer} is in {out}")


def _verify(options: argparse.Namespace, _: Sequence[str]) -> None:
    from ds_encdec.checkpoint.folder import verify_checkpoints
    from ds_encdec.data.sources.prepared import INDEX, verified_shards

    outlive_readers()  # the exit code is the result
    is_prepared = any(options.path.glob(f"*/{INDEX}"))
    for whole in verified_shards(options.path) if is_prepared else verify_checkpoints(options.path):
        print(whole, flush=True)


def _require_sound(checkpoint: Path, out: Path) -> None:
    """Refuse an `out` that exists, and a path that is not a checkpoint, before torch is imported."""
    from ds_encdec.checkpoint.folder import refuse_existing
    from ds_encdec.checkpoint.manifest import read_manifest

    refuse_existing(out)
    read_manifest(checkpoint.expanduser().resolve())


def _dtype(options: argparse.Namespace) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, options.dtype)
    return dtype


_WEIGHTS: Arguments = {
    "--base": value("base of a LoRA run, if it is no longer where the run found it", metavar="PATH_OR_HUB_ID"),
    "--dtype": value(
        "dtype of the written weights (default float32)", choices=("float32", "bfloat16"), default="float32"
    ),
}
EXPORT = Verb(
    _export,
    "write a checkpoint as a Hugging Face model folder",
    "ds-encdec export output/checkpoints/final exported --dtype bfloat16",
    {
        "checkpoint": value("a checkpoint, e.g. output/checkpoints/final", Path),
        "out": value("folder to write; must not exist", Path),
        "--encoder-only": flag("write the encoder alone, as a text embedding model, also for sentence-transformers"),
        "--adapter": flag("write the adapters of a LoRA run alone, as a folder for peft (default: merged)"),
        **_WEIGHTS,
    },
)
AVERAGE = Verb(
    _average,
    "write the mean of a run's last checkpoints as a Hugging Face model folder",
    "ds-encdec average output --last 3",
    {
        "run_folder": value("a run, e.g. output", Path, metavar="run"),
        "out": value("folder to write; must not exist (default RUN/export/averaged)", Path, nargs="?"),
        "--last": value("newest checkpoints to average (default 5)", int, default=5),
        **_WEIGHTS,
    },
)
VERIFY = Verb(
    _verify,
    "compare every file of a checkpoint, a run or prepared data with its SHA-256",
    "ds-encdec verify output",
    {"path": value("a checkpoint, a run (e.g. output), or prepared data", Path)},
)
