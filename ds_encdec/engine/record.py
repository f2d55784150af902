"""`engine.json` in a checkpoint: which engine wrote its tensors and how, so that any engine can read them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds_encdec.config.plain_files import read_json
from ds_encdec.types import CheckpointError

ENGINE_RECORD = "engine.json"
TAG = "zero"
"""The folder of DeepSpeed's own files in a checkpoint; its files are named by DeepSpeed."""
DCP_FOLDER = "dcp"
"""torch.distributed.checkpoint's files, with float32 tensors `weight.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`."""


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """The facts that a reader of a checkpoint's tensors needs.

    `sharding_stage`: zero0 to zero3, or a hybrid. `applied_steps`: AdamW's counter. `groups`: canonical names in each
    optimizer group, in the optimizer's order. `loss_scaler`: where the dynamic loss scale of a float16 run is; a run in
    another dtype hands on the one that it loaded, so that float16 can be returned to. Else None.
    """

    format: Literal["deepspeed", "dcp"]
    sharding_stage: str
    world_size: int
    applied_steps: int
    groups: tuple[tuple[str, ...], ...]
    loss_scaler: Mapping[str, float | int] | None = None


def write_record(record: EngineRecord, directory: Path) -> Path:
    """Put `record` into the checkpoint `directory`; returns the file."""
    path = directory / ENGINE_RECORD
    path.write_text(json.dumps(dataclasses.asdict(record), indent=1) + "\n")
    return path


def read_record(directory: Path) -> EngineRecord:
    """The record of the checkpoint `directory`. Raises CheckpointError."""
    path = directory / ENGINE_RECORD
    try:
        fields = read_json(path)
        groups = tuple(tuple(names) for names in fields.pop("groups"))
        return EngineRecord(**fields, groups=groups)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: no readable record of an engine ({error})") from None
