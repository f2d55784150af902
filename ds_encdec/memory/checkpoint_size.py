"""The size of a run's checkpoints on the disk."""

from __future__ import annotations

from ds_encdec.config.schema import TrainingConfig
from ds_encdec.engines import ENGINES
from ds_encdec.memory.job import Job


def checkpoint_bytes_per_parameter(job: Job) -> int:
    """Bytes of a checkpoint's tensors for each parameter: float32 weights, both moments of AdamW, and more.

    Its ZeRO-0 to 2 write the weights that layers compute with, too (in float32 under ZeRO-0 these are the same).
    """
    stage, states = job.config.infra.sharding_stage, 3 * 4
    only_states = stage.startswith("zero3") or (stage == "zero0" and job.compute_bytes == 4)
    if only_states or not ENGINES[job.engine].saves_compute_weights:
        return states
    return states + job.compute_bytes


def checkpoint_bytes(job: Job) -> int:
    """The tensors of one checkpoint; what else is in it, the tokenizer above all, is some megabytes."""
    return job.parameters * checkpoint_bytes_per_parameter(job)


def checkpoints_at_once(training: TrainingConfig, saves: int) -> int:
    """The most that are there at a time, of so many saves: those that are kept, the best, and the one being written."""
    keep = saves if training.save_total_limit is None else training.save_total_limit
    best = 1 if training.eval_samples else 0  # the best may be none of the newest
    return min(saves, keep + best + 1)  # a new one is whole before an old one goes
