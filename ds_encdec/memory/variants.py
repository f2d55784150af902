"""Other settings of a job, and what each would hold: the rows of the table.

A change is a mapping of dotted fields to values, the same that the command line takes as overrides.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ds_encdec.config.rules import engine_conflicts, find_conflicts
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.ds_json import render_deepspeed_json
from ds_encdec.engines import EngineName
from ds_encdec.memory.breakdown import Estimate
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.job import Job, make_job
from ds_encdec.types import ConfigError

Value = str | int | bool | None
"""Of a field that a change sets."""
Offload = Literal["none", "optimizer", "optimizer+params"]
"""What is kept in host memory, as the table says it."""

HEADROOM = 0.05
"""Share of a device's usable memory that a fitting setting leaves free: for what the estimate may miss."""
HOST_HEADROOM = 0.1
"""Share of a host's memory that stays free, for the page cache and for what the build of an engine copies; a process
that takes the last of it is killed without a word."""

BATCH_FIELDS = {
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "training.global_batch_size",
    "data.num_lanes",
}
"""Any of them decides how many micro-batches a step has."""
STAGES = ("zero0", "zero1", "zero2", "zero3")
HYBRID_STAGES = ("zero2_hybrid", "zero3_hybrid")
CHECKPOINTING = ("none", "full")
OFFLOADS: dict[Offload, tuple[str, str]] = {
    "none": ("none", "none"),
    "optimizer": ("cpu", "none"),
    "optimizer+params": ("cpu", "cpu"),
}
"""Of each, `infra.offload_optimizer` and `infra.offload_params`."""
_SHARDING_ALIASES = ("fsdp_sharding_strategy", "fsdp_activation_checkpointing", "fsdp_cpu_offload")


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of the table. `overrides`: what it changes of the configuration it was derived from, empty for that itself.

    `estimate` is None where the combination does not exist; `reason` then says why not.
    """

    overrides: dict[str, Value]
    job: Job
    estimate: Estimate | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Recommendation(Variant):
    """A setting that fits."""

    estimate: Estimate


def fits(estimated: Estimate, capacity_bytes: float, host_bytes: float | None = None) -> bool:
    """Whether the peak leaves `HEADROOM` of a device free, and the host's part `HOST_HEADROOM` of a rank's share.

    `host_bytes`: that share; None: it is not known, and not judged.
    """
    enough_host = host_bytes is None or estimated.host.total <= host_bytes * (1 - HOST_HEADROOM)
    return estimated.peak.total <= capacity_bytes * (1 - HEADROOM) and enough_host


def resolve_engine(config: FullConfig) -> EngineName:
    """The engine that `infra.distributed_type` means where DeepSpeed is installed (see engine/select.py)."""
    kind = config.infra.distributed_type
    if kind in ("fsdp", "ddp") or (kind == "auto" and engine_conflicts(config, "deepspeed")):
        return "fsdp"
    return "deepspeed"


def changed(job: Job, overrides: Mapping[str, Value]) -> Job:
    """`job` under a configuration in which these fields (`section.field`) have other values. Nothing is validated.

    The number of micro-batches in a step stays what it was, unless a field that decides it is changed.
    """
    config = job.config
    for name, value in overrides.items():
        section, field = name.split(".")
        changed_section = getattr(config, section).model_copy(update={field: value})
        config = config.model_copy(update={section: changed_section})
    keeps_steps = not BATCH_FIELDS & overrides.keys()
    other = make_job(
        config,
        job.sizes,
        resolve_engine(config) if "infra.distributed_type" in overrides else job.engine,
        world_size=job.world_size,
        ranks_per_node=job.ranks_per_node,
        device=job.device,
        gradient_accumulation_steps=job.gradient_accumulation_steps if keeps_steps else None,
        ratio=job.ratio,
        trainable_parameters=job.trainable_parameters,
        emulates_bf16=job.emulates_bf16,
    )
    return dataclasses.replace(other, parameters=job.parameters)  # with adapters, more than the sizes have


def variants(job: Job) -> list[Variant]:
    """The rows of the table: stage x offload x activation checkpointing, with the engine and the batch of `job`.

    A configuration that is none of them (every_n, selective) comes first, as a row of its own.
    """
    rows = [variant(job, overrides) for overrides in settings(job)]
    return rows if any(not row.overrides for row in rows) else [variant(job, {}), *rows]


def smallest_variants(job: Job) -> list[Variant]:
    """What needs least of a device: full checkpointing, micro-batches of 1, sharded parameters, with each offload."""
    smallest = batch_overrides(job, 1)
    if job.engine == "fsdp" and not job.config.infra.fsdp_reduce_every_micro_batch:
        smallest["infra.fsdp_reduce_every_micro_batch"] = True
    return [variant(job, setting(job, "zero3", offload, "full") | smallest) for offload in OFFLOADS]


def micro_batches(job: Job) -> list[int]:
    """Micro-batches that make the same global batch, the smallest first: divisors of what a rank reads in a step."""
    sequences = job.config.training.micro_batch_size * job.gradient_accumulation_steps
    return [batch for batch in range(1, sequences + 1) if sequences % batch == 0]


def batch_overrides(job: Job, batch: int) -> dict[str, Value]:
    """The change to a micro-batch of `batch`, one of `micro_batches`, with the accumulation that keeps the global."""
    training = job.config.training
    if batch == training.micro_batch_size:
        return {}
    overrides: dict[str, Value] = {"training.per_device_train_batch_size": batch}
    steps = training.micro_batch_size * job.gradient_accumulation_steps // batch
    if job.config.data.num_lanes:
        overrides["data.num_lanes"] = steps * job.world_size
    else:
        # Said even where a global_batch_size decides it: that may be this run's own, of `auto`, and not the user's.
        overrides["training.gradient_accumulation_steps"] = steps
    return overrides


def as_overrides(overrides: Mapping[str, Value]) -> str:
    """A change as a shell's command line takes it."""
    return shlex.join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in overrides.items()
    )


def refuse_what_runs_refuse(job: Job) -> None:
    """Raise ConfigError for what `infra.deepspeed_extra` makes a run refuse before it starts."""
    if job.engine == "deepspeed":
        render_deepspeed_json(
            job.config,
            world_size=job.world_size,
            gradient_accumulation_steps=job.gradient_accumulation_steps,
            device=job.device,
            ranks_per_node=job.ranks_per_node,
        )


def variant(job: Job, overrides: dict[str, Value]) -> Variant:
    """`job` with this change, and its estimate, or why it cannot be."""
    other = changed(job, overrides)
    conflicts = [*find_conflicts(other.config), *engine_conflicts(other.config, other.engine)]
    if conflicts:
        return Variant(overrides, other, None, conflicts[0].message)
    if problem := indivisible_hybrid(other.config, other.world_size, other.ranks_per_node):
        return Variant(overrides, other, None, problem)
    try:
        refuse_what_runs_refuse(other)
        return Variant(overrides, other, estimate(other))
    except ConfigError as error:
        return Variant(overrides, other, None, str(error))


def indivisible_hybrid(config: FullConfig, world_size: int, ranks_per_node: int) -> str | None:
    """What is wrong with a hybrid stage whose shards do not divide the ranks; None where nothing is."""
    size = config.infra.hybrid_shard_size or ranks_per_node
    if config.infra.sharding_stage not in HYBRID_STAGES or world_size % size == 0:
        return None
    return f"infra.hybrid_shard_size={size} does not divide {world_size} GPUs: set it to a divisor of {world_size}"


def settings(job: Job) -> Iterator[dict[str, Value]]:
    """What each row of the table changes of `job`."""
    hybrids = HYBRID_STAGES if job.world_size > job.ranks_per_node else ()
    for stage, offload, checkpointing in itertools.product((*STAGES, *hybrids), OFFLOADS, CHECKPOINTING):
        yield setting(job, stage, offload, checkpointing)


def setting(job: Job, stage: str, offload: Offload, checkpointing: str) -> dict[str, Value]:
    """What it changes of `job` to shard, offload and recompute so; nothing where it does so already."""
    optimizer, params = OFFLOADS[offload]
    wanted: dict[str, Value] = {
        "infra.sharding_stage": stage,
        "infra.offload_optimizer": optimizer,
        "infra.offload_params": params,
        "training.activation_checkpointing": checkpointing,
    }
    overrides = {name: value for name, value in wanted.items() if value != value_of(job.config, name)}
    return overrides | _freed(job, stage) if overrides else {}


def _freed(job: Job, stage: str) -> dict[str, Value]:
    """Fields that would contradict the change: aliases of what it sets, a hybrid's size without one, and the engine."""
    infra = job.config.infra
    names = [f"infra.{alias}" for alias in _SHARDING_ALIASES]
    if stage not in HYBRID_STAGES:
        names.append("infra.hybrid_shard_size")
    freed: dict[str, Value] = {name: None for name in names if value_of(job.config, name) is not None}
    # Under `auto` the change may undo what only FSDP2 could do; `ddp` is zero0.
    if (infra.distributed_type == "auto" and job.engine == "fsdp") or (
        infra.distributed_type == "ddp" and stage != "zero0"
    ):
        freed["infra.distributed_type"] = "fsdp"
    return freed


def has_other_name(job: Job) -> bool:
    """Whether the table has the same setting by a more usual name: FSDP2's zero1 is zero2, and it offloads all or none.

    It scatters gradients as it reduces them, and its parameters are the master weights (engine/fsdp2.py).
    """
    infra = job.config.infra
    if job.engine != "fsdp" or find_conflicts(job.config):
        return False
    return infra.sharding_stage == "zero1" or infra.offload_params == "cpu"


def value_of(config: FullConfig, name: str) -> Value:
    """The value of the field `section.field`."""
    section, field = name.split(".")
    value: Value = getattr(getattr(config, section), field)
    return value


def offload_of(job: Job) -> Offload | None:
    """What `job` offloads, or None where the table has no word for it (parameters alone)."""
    placed = (job.config.infra.offload_optimizer, job.config.infra.offload_params)
    return next((name for name, places in OFFLOADS.items() if places == placed), None)
