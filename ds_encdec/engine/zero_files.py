"""DeepSpeed's own checkpoint files: written whole, read back at the same world size.

CHECKPOINT/
  latest             the tag, for zero_to_fp32.py (stages 1-3)
  zero_to_fp32.py    DeepSpeed's script: `python CHECKPOINT/zero_to_fp32.py CHECKPOINT OUT` (stages 1-3)
  zero/
    layout.json      what wrote these files: stage, world size, dtype (layout.py)
    *mp_rank_00_model_states.pt, *_optim_states.pt

Committing the folder, hashing it and pointing at it is the checkpoint manager's work. Stage 0 has no
zero_to_fp32.py: its weights stand in full in `mp_rank_00_model_states.pt`.

The files bring back state and counters: weights, moments, loss scale, steps. What the user configures (rates, decay,
clipping, the schedule and its length) DeepSpeed would restore too; here the configuration wins.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.optim.lr_scheduler import LambdaLR

from ds_encdec.engine.layout import TAG, Layout, check_layout, write_layout
from ds_encdec.types import CheckpointError

_CONFIGURED = ("lr", "initial_lr", "betas", "eps", "weight_decay")
"""Entries of an optimizer group that come from the configuration; `initial_lr` is LambdaLR's peak."""


def save(engine: DeepSpeedEngine, directory: Path, layout: Layout) -> list[Path]:
    """Write the engine's state under `directory` (exists, shared by all ranks); returns this rank's files.

    Collective. Every file is returned by exactly one rank.
    """
    if dist.get_rank() == 0:
        (directory / TAG).mkdir(exist_ok=True)
        write_layout(layout, directory)
        if engine.zero_optimization_stage() > 0:
            (directory / "latest").write_text(TAG)  # not save_latest=True: that one moves before all have written
    engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)  # ends with a barrier
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [path for path in files if _owner(path.relative_to(directory)) == dist.get_rank()]


def load(engine: DeepSpeedEngine, directory: Path, layout: Layout) -> None:
    """Restore weights, moments, loss scale and counters. Collective. The engine must be fresh (under ZeRO-3).

    The files are unpickled: check their hashes first. Raises CheckpointError when they are missing, or
    were written at another stage, world size or dtype.
    """
    check_layout(directory, layout)
    optimizer = engine.optimizer
    configured = [{key: group[key] for key in _CONFIGURED if key in group} for group in optimizer.param_groups]
    path, _ = engine.load_checkpoint(str(directory), tag=TAG, load_lr_scheduler_states=False)
    if path is None:
        raise CheckpointError(f"{directory}: DeepSpeed found no model states in {TAG}/")
    for group, settings in zip(optimizer.param_groups, configured, strict=True):
        group.update(settings)
    if hasattr(optimizer, "clip_grad"):  # saved and restored by stages 1 and 2
        optimizer.clip_grad = engine.gradient_clipping()
    set_applied_steps(engine.lr_scheduler, engine.global_steps - engine.skipped_steps)


def set_applied_steps(scheduler: Any, applied: int) -> None:
    """Put a schedule, and its optimizer's rates, where they are after `applied` steps of its present configuration.

    `scheduler`: a LambdaLR, or a class of deepspeed/runtime/lr_schedules.py, whose counter starts at -1.
    """
    if not isinstance(scheduler, LambdaLR):
        scheduler.step(applied - 1)
        return
    # Not step(): torch warns when a schedule is stepped before its optimizer.
    scheduler.last_epoch = applied
    groups = scheduler.optimizer.param_groups
    for group, peak, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = peak * factor(applied)


def _owner(path: Path) -> int:
    """The rank that wrote a file: named in it (`zero_pp_rank_3_mp_rank_00_…`, `rank3/…`), else rank 0."""
    named = re.search(r"rank_?(\d+)", str(path))
    return int(named.group(1)) if named else 0
