"""Whether a disk holds the checkpoints of a run: known before its first step, where otherwise the first save fails."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.config.schema import FullConfig
from ds_encdec.launch.disk import DiskRefusedError, free_bytes
from ds_encdec.memory.checkpoint_size import checkpoint_bytes, checkpoints_at_once
from ds_encdec.memory.job import Job

logger = logging.getLogger(__name__)


def check_room(folder: Path, config: FullConfig, job: Job) -> None:
    """Warn where less is free in `folder` than the checkpoints take that are to come; those that are there count.

    Raises DiskRefusedError instead with `infra.require_disk_space`.
    """
    training = config.training
    size = checkpoint_bytes(job)
    most = checkpoints_at_once(training, math.ceil(training.num_train_steps / training.save_steps))
    needed = size * max(1, most - len(committed_steps(folder)))
    free = free_bytes(folder)
    if free is None or free >= needed:
        return
    problem = (
        f"infra.output_dir: {folder} has {free:,} bytes free, but {needed:,} are needed: the run has up to {most} "
        f"checkpoints of {size:,} bytes at a time (training.save_total_limit={training.save_total_limit}, the best, "
        "and the one that is written). Free space there, lower training.save_total_limit, or choose another folder."
    )
    if config.infra.require_disk_space:
        raise DiskRefusedError(f"{problem} (infra.require_disk_space=true)")
    logger.warning("%s A save that does not fit fails; infra.require_disk_space=true would refuse to start.", problem)
