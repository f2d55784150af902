"""How many sequences an optimizer step holds, and into how many micro-batches they are divided.

A sequence is `data.max_encoder_length` + `data.max_decoder_length` tokens, and a micro-batch of size N has room for N
of them. An optimizer step is `training.global_batch_size` sequences: as many micro-batches (lanes) as that takes,
shared out among the ranks.
"""

from __future__ import annotations

import logging
from typing import Literal, TypeVar

from ds_encdec.config.rules import Sections
from ds_encdec.config.shares import per_rank
from ds_encdec.config.training_sections import TrainingConfig

Run = TypeVar("Run", bound=Sections)
logger = logging.getLogger(__name__)

AUTO: Literal["auto"] = "auto"
"""The value of `training.per_device_train_batch_size` with which the run finds the size that fits."""
DEFAULT_MICRO_BATCH_SIZE: int = TrainingConfig.model_fields["per_device_train_batch_size"].default
"""The size that stands in for `auto` where the global batch follows from one."""


def is_auto(config: Sections) -> bool:
    """Return whether the micro-batch size is still to be found."""
    return config.training.per_device_train_batch_size == AUTO


def global_batch_size(config: Sections, world_size: int) -> int:
    """Sequences of one optimizer step over all ranks, at a first start on `world_size` ranks.

    `training.global_batch_size`, or what micro-batches of the configured size (for `auto`, the default one) make.
    """
    training = config.training
    if training.global_batch_size is not None:
        return training.global_batch_size
    size = DEFAULT_MICRO_BATCH_SIZE if is_auto(config) else training.micro_batch_size
    return size * (config.data.num_lanes or world_size * training.gradient_accumulation_steps)


def micro_batches_per_step(config: Sections, world_size: int) -> int:
    """Micro-batches of one optimizer step over all ranks: the lanes of a run that first starts on `world_size` ranks.

    They need not divide among the ranks. Raises ConfigError while the micro-batch size is `auto`.
    """
    return global_batch_size(config, world_size) // config.training.micro_batch_size


def micro_batch_candidates(config: Sections, world_size: int) -> list[int]:
    """The sizes that `auto` may take, largest first: all that divide one rank's share of the global batch.

    Raises ConfigError where the ranks do not divide the global batch.
    """
    sequences = global_batch_size(config, world_size)
    share = per_rank(sequences, world_size, "training.global_batch_size", multiple=True)
    return [size for size in range(share, 0, -1) if share % size == 0]


def with_micro_batch_size(config: Run, micro_batch_size: int, world_size: int) -> Run:
    """`config` with this number as its micro-batch size, and the accumulation that keeps its global batch.

    The size must be one of `micro_batch_candidates`.
    """
    sequences = global_batch_size(config, world_size)
    batch = {
        "per_device_train_batch_size": micro_batch_size,
        "gradient_accumulation_steps": sequences // (micro_batch_size * world_size),
        "global_batch_size": sequences,
    }
    return config.model_copy(update={"training": config.training.model_copy(update=batch)})


def with_assumed_batch_size(config: Run, world_size: int) -> Run:
    """`config` with a number as its micro-batch size, for what cannot try any; says so where that was `auto`.

    The number is the default where it divides the global batch of each of `world_size` ranks, else the next smaller one
    that does. Raises ConfigError as `micro_batch_candidates`.
    """
    if not is_auto(config):
        return config
    candidates = micro_batch_candidates(config, world_size)
    size = next(size for size in candidates if size <= DEFAULT_MICRO_BATCH_SIZE)
    logger.warning(
        "training.per_device_train_batch_size=auto is found when a run starts, on its machine. Here it is taken to be "
        "%d, of a global batch of %d.",
        size,
        global_batch_size(config, world_size),
    )
    return with_micro_batch_size(config, size, world_size)
