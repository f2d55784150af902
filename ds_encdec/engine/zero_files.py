"""DeepSpeed's own checkpoint files: written whole, read back at the same world size.

CHECKPOINT/
  latest             the tag, for zero_to_fp32.py (stages 1-3)
  zero_to_fp32.py    DeepSpeed's script: `python CHECKPOINT/zero_to_fp32.py CHECKPOINT OUT` (stages 1-3)
  zero/
    layout.json      what wrote these files: stage, world size, dtype
    *mp_rank_00_model_states.pt, *_optim_states.pt

Committing the folder, hashing it and pointing at it is the checkpoint manager's work. Stage 0 has no
zero_to_fp32.py: its weights stand in full in `mp_rank_00_model_states.pt`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_encdec.types import CheckpointError

TAG = "zero"


def save(engine: DeepSpeedEngine, directory: Path) -> list[Path]:
    """Write the engine's state under `directory` (exists, shared by all ranks); returns this rank's files.

    Collective. Every file is returned by exactly one rank.
    """
    if dist.get_rank() == 0:
        (directory / TAG).mkdir(exist_ok=True)
        (directory / TAG / "layout.json").write_text(json.dumps(_layout(engine), indent=2) + "\n")
        if engine.zero_optimization_stage() > 0:
            (directory / "latest").write_text(TAG)  # not save_latest=True: that one moves before all have written
    engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)  # ends with a barrier
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [path for path in files if _owner(path.relative_to(directory)) == dist.get_rank()]


def load(engine: DeepSpeedEngine, directory: Path) -> None:
    """Restore weights, optimizer, loss scale and schedule. Collective. The engine must be fresh (under ZeRO-3).

    The files are unpickled: check their hashes first. Raises CheckpointError when they are missing, or
    were written at another stage, world size or dtype.
    """
    try:
        saved = json.loads((directory / TAG / "layout.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: not a checkpoint of the DeepSpeed engine ({error})") from None
    for what, mine in _layout(engine).items():
        if saved.get(what) != mine:
            raise CheckpointError(
                f"{directory}: written with {what} {saved.get(what)}, but this run has {what} {mine}. "
                f"Resume with the same {what}, or start a new run from the exported model."
            )
    path, _ = engine.load_checkpoint(str(directory), tag=TAG)
    if path is None:
        raise CheckpointError(f"{directory}: DeepSpeed found no model states in {TAG}/")


def _layout(engine: DeepSpeedEngine) -> dict[str, int | str]:
    stage = engine.zero_optimization_stage()
    dtype = str(engine.get_data_types()[0]).removeprefix("torch.")
    # Without sharding every rank holds the same, so any number of ranks can read it.
    return {"sharding stage": stage, "dtype": dtype} | ({"world size": dist.get_world_size()} if stage else {})


def _owner(path: Path) -> int:
    """The rank that wrote a file: named in it (`zero_pp_rank_3_mp_rank_00_…`, `rank3/…`), else rank 0."""
    named = re.search(r"rank_?(\d+)", str(path))
    return int(named.group(1)) if named else 0
