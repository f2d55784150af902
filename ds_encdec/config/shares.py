"""Divide the batch, the lanes and the shards of a run among its ranks, and refuse those that do not divide; divide a
micro-batch between encoder and decoder. Memory estimates read this, too, so nothing here imports numpy. A sequence
is `data.max_encoder_length` + `data.max_decoder_length` tokens for each segment of an example (of an encoder alone, the
first of the two), and a micro-batch of size N takes N of them. A step is `training.global_batch_size` sequences, in
micro-batches (lanes) that the ranks share."""

import logging
from dataclasses import dataclass
from typing import Literal, TypeVar

from ds_encdec.base.types import ConfigError
from ds_encdec.config.data_sections import DataConfig
from ds_encdec.config.sections import InfraConfig, Sections
from ds_encdec.config.training_sections import TrainingConfig
from ds_encdec.registry.objectives import OBJECTIVES

Run = TypeVar("Run", bound=Sections)
logger = logging.getLogger(__name__)

# The value of `training.per_device_train_batch_size` for which the run finds the size that fits, and the size that is
# assumed for it if the global batch follows from it.
AUTO: Literal["auto"] = "auto"
DEFAULT_MICRO_BATCH_SIZE: int = TrainingConfig.model_fields["per_device_train_batch_size"].default


@dataclass(frozen=True, slots=True)
class Budgets:
    """Tokens of one micro-batch on each side, and its largest number of examples."""

    encoder_tokens: int
    decoder_tokens: int
    max_examples: int


def token_budgets(data: DataConfig, micro_batch_size: int, ratio: float) -> Budgets:
    """Divide a micro-batch by `ratio` (encoder to decoder tokens), so that each side fits its longest example."""
    objective = OBJECTIVES[data.objective]
    segments = objective.segments(data)
    longest = segments * data.max_encoder_length
    longest_target = 0 if objective.encoder_only else segments * data.max_decoder_length
    total = micro_batch_size * (longest + longest_target)
    encoder_tokens = round(total * ratio / (1 + ratio)) if longest_target else total
    encoder_tokens = min(max(encoder_tokens, longest), total - longest_target)
    return Budgets(encoder_tokens, total - encoder_tokens, data.max_examples_per_micro_batch)


def is_auto(config: Sections) -> bool:
    """Return whether the micro-batch size is still to be found."""
    return config.training.per_device_train_batch_size == AUTO


def global_batch_size(config: Sections, world_size: int) -> int:
    """Return the sequences per optimizer step over all ranks, at a first start on `world_size` ranks:
    `training.global_batch_size`, or a number that follows from the micro-batch size (for `auto`, the default one)."""
    training = config.training
    if training.global_batch_size is not None:
        return training.global_batch_size
    size = DEFAULT_MICRO_BATCH_SIZE if is_auto(config) else training.micro_batch_size
    return size * (config.data.num_lanes or world_size * training.gradient_accumulation_steps)


def micro_batches_per_step(config: Sections, world_size: int) -> int:
    """Return the micro-batches of a step over all ranks at a first start, which the ranks may not divide. Raises
    ConfigError while the micro-batch size is `auto`."""
    return global_batch_size(config, world_size) // config.training.micro_batch_size


def plan_lanes(config: Sections, world_size: int, saved_lanes: int | None = None) -> tuple[int, int]:
    """Return the micro-batches per optimizer step over all ranks (a run's lanes, which never change) and on each rank.
    Raises ConfigError if the ranks do not divide them."""
    if saved_lanes:
        return saved_lanes, per_rank(saved_lanes, world_size, "data.num_lanes (fixed when this run first started)")
    lanes = micro_batches_per_step(config, world_size)
    by_size = "training.global_batch_size / training.per_device_train_batch_size"
    return lanes, per_rank(lanes, world_size, "data.num_lanes" if config.data.num_lanes else by_size)


def micro_batch_candidates(config: Sections, world_size: int) -> list[int]:
    """Return the sizes that `auto` may take, largest first: the divisors of one rank's share of the global batch.
    Raises ConfigError if the ranks do not divide the global batch."""
    share = per_rank(global_batch_size(config, world_size), world_size, "training.global_batch_size", multiple=True)
    return [size for size in range(share, 0, -1) if share % size == 0]


def with_micro_batch_size(config: Run, micro_batch_size: int, world_size: int) -> Run:
    """Return `config` with one of `micro_batch_candidates`, and the accumulation that keeps its global batch."""
    sequences = global_batch_size(config, world_size)
    batch = {
        "per_device_train_batch_size": micro_batch_size,
        "gradient_accumulation_steps": sequences // (micro_batch_size * world_size),
        "global_batch_size": sequences,
    }
    return config.model_copy(update={"training": config.training.model_copy(update=batch)})


def with_assumed_batch_size(config: Run, world_size: int) -> Run:
    """Call `with_first_batch_size` and log a warning, for programs that cannot try a size."""
    if not is_auto(config):
        return config
    assumed = with_first_batch_size(config, world_size)
    logger.warning(
        "training.per_device_train_batch_size=auto is found at a start: here taken to be %d, of a global batch of %d.",
        assumed.training.micro_batch_size,
        global_batch_size(config, world_size),
    )
    return assumed


def with_first_batch_size(config: Run, world_size: int) -> Run:
    """Return `config` with a number for `auto`: the default size, or the next smaller one that divides a rank's share
    of the global batch. Raises ConfigError as `micro_batch_candidates` does."""
    if not is_auto(config):
        return config
    size = next(size for size in micro_batch_candidates(config, world_size) if size <= DEFAULT_MICRO_BATCH_SIZE)
    return with_micro_batch_size(config, size, world_size)


def per_rank(count: int, ranks: int, what: str, *, multiple: bool = False) -> int:
    """Return one rank's share of `count` things; `what` is the field that sets their number. Raises ConfigError that
    proposes numbers of ranks which divide them, or with `multiple` the next count that fits."""
    if count % ranks == 0:
        return count // ranks
    fix = f"make it a multiple of {ranks}, such as {-(-count // ranks) * ranks}"
    if not multiple:
        divisors = (str(number) for number in range(1, count + 1) if count % number == 0)
        fix = f"use one of these numbers of ranks: {', '.join(divisors)}"
    raise ConfigError(f"{what}={count} cannot be divided evenly among {ranks} ranks: {fix}.")


def unevenness(config: Sections, ranks: int) -> str | None:
    """Return why `ranks` cannot share the micro-batches of a step; None if they can, or if `auto` decides."""
    try:
        if config.infra.hybrid_shard_size:
            mesh_shape(config.infra, ranks, ranks)
        if not is_auto(config):
            per_rank(micro_batches_per_step(config, ranks), ranks, "data.num_lanes")
    except ConfigError as error:
        return str(error)
    return None


def mesh_shape(infra: InfraConfig, ranks: int, ranks_per_node: int) -> tuple[int, int]:
    """Return the number of groups of ranks that replicate each other, and of ranks in each that shard the states.
    Raises ConfigError for a hybrid whose shards do not divide the ranks."""
    if infra.sharding_stage == "zero0":
        return ranks, 1
    if not infra.sharding_stage.endswith("_hybrid"):
        return 1, ranks
    shards = infra.hybrid_shard_size or min(ranks_per_node, ranks)
    origin = "infra.hybrid_shard_size" if infra.hybrid_shard_size else "the ranks of a node"
    return replicas(ranks, shards, f"infra.sharding_stage={infra.sharding_stage}: {shards} shards ({origin})"), shards


def replicas(ranks: int, shards: int, what: str) -> int:
    """Return the number of groups of `shards` ranks, which `what` names. Raises ConfigError if ranks are left over."""
    if ranks % shards:
        raise ConfigError(f"{what} do not divide {ranks} ranks: set infra.hybrid_shard_size to a divisor of {ranks}.")
    return ranks // shards
