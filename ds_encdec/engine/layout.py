"""What a DeepSpeed checkpoint is bound to: sharding stage, dtype, number of ranks. Needs neither torch nor deepspeed.

So a run that cannot read its checkpoint hears so before it builds a model.
"""

from __future__ import annotations

import json
from pathlib import Path

from ds_encdec.config.schema import FullConfig, InfraConfig
from ds_encdec.types import CheckpointError

TAG = "zero"
"""The folder of DeepSpeed's own files in a checkpoint."""

Layout = dict[str, int | str]


def zero_stage(infra: InfraConfig) -> int:
    """DeepSpeed's number of `infra.sharding_stage`: 0 to 3, a hybrid's without the hybrid."""
    return int(infra.sharding_stage.removeprefix("zero").removesuffix("_hybrid"))


def layout_of(config: FullConfig, world_size: int) -> Layout:
    """The layout that a run writes. Without sharding every rank holds the same: any number of ranks can read it."""
    stage, training = zero_stage(config.infra), config.training
    dtype = "bfloat16" if training.bf16 else "float16" if training.fp16 else "float32"
    layout: Layout = {"sharding stage": stage, "dtype": dtype}
    return layout | {"world size": world_size} if stage else layout


def write_layout(layout: Layout, directory: Path) -> None:
    """Put `layout` into the checkpoint `directory`; its folder TAG exists."""
    _file(directory).write_text(json.dumps(layout, indent=2) + "\n")


def check_layout(directory: Path, layout: Layout) -> None:
    """Raise CheckpointError where the checkpoint `directory` has another layout than `layout`, or none."""
    try:
        saved = json.loads(_file(directory).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: not a checkpoint of the DeepSpeed engine ({error})") from None
    for what, mine in layout.items():
        if saved.get(what) != mine:
            raise CheckpointError(
                f"{directory}: written with {what} {saved.get(what)}, but this run has {what} {mine}. "
                f"Resume with the same {what}, or export the checkpoint and start a new run from the export."
            )


def _file(directory: Path) -> Path:
    return directory / TAG / "layout.json"
