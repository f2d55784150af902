"""Other settings of a job: what each would hold, which is the fastest that fits, and what is nearest to one that does.

A change is a mapping of dotted fields to values, the same that the command line takes as overrides.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ds_encdec.config.rules import engine_conflicts, find_conflicts
from ds_encdec.config.schema import FullConfig
from ds_encdec.memory.breakdown import Estimate
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.job import Job, make_job
from ds_encdec.types import ConfigError, EngineName

Value = str | int | bool | None
"""Of a field that a change sets."""
Offload = Literal["none", "optimizer", "optimizer+params"]
"""What is kept in host memory, as the table says it."""

HEADROOM = 0.05
"""Share of a device's usable memory that a fitting setting leaves free: for what the estimate may miss."""
EFFICIENT_TOKENS = 4096
"""Tokens of a micro-batch that occupy a GPU well; smaller ones are recommended only where nothing else fits."""
MORE_ROOM = 0.9
"""Share of another setting's peak below which one of the same kind is worth naming beside it."""
SMALLEST_LOSS_CHUNK = 128
"""Tokens; below this the head's matrix products are too small to be fast."""

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
_OFFLOAD: dict[Offload, tuple[str, str]] = {
    "none": ("none", "none"),
    "optimizer": ("cpu", "none"),
    "optimizer+params": ("cpu", "cpu"),
}
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
class Recommendation:
    """A setting that fits. `overrides`: what it changes of the configuration it was derived from."""

    overrides: dict[str, Value]
    job: Job
    estimate: Estimate


def fits(estimated: Estimate, capacity_bytes: float, host_bytes: float | None = None) -> bool:
    """Whether the peak leaves `HEADROOM` of a device free, and the host's part fits a rank's share of it, if known."""
    enough_host = host_bytes is None or estimated.host.total <= host_bytes
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

    A configuration that is none of them (nvme, every_n, selective) comes first, as a row of its own.
    """
    rows = [_variant(job, overrides) for overrides in _settings(job)]
    return rows if any(not row.overrides for row in rows) else [_variant(job, {}), *rows]


def recommend(job: Job, capacity_bytes: float, host_bytes: float | None = None) -> Recommendation | None:
    """The fastest setting of `job` and its engine that fits, with its largest micro-batch; None where none does.

    No offload before offload, then the lowest stage, then no recomputation. The global batch is kept: the micro-batch
    divides what a rank reads in one step. `capacity_bytes`: usable memory of a device; `host_bytes`: a rank's share
    of its node's.
    """
    ranked = sorted(_settings(job), key=lambda overrides: _slowness(changed(job, overrides)))
    for smallest in dict.fromkeys((_efficient_micro_batch(job), 1)):
        batches = [batch for batch in micro_batches(job) if batch >= smallest]
        for overrides in ranked:
            fitting: Recommendation | None = None
            for batch in batches:  # from the smallest: most settings that fail do so at once
                row = _variant(job, overrides | batch_overrides(job, batch))
                if row.estimate is None or not fits(row.estimate, capacity_bytes, host_bytes):
                    break
                fitting = Recommendation(row.overrides, row.job, row.estimate)
            if fitting is not None:
                return fitting
    return None


def smallest_variants(job: Job) -> list[Variant]:
    """What needs least of a device: full checkpointing, micro-batches of 1, sharded parameters, with each offload."""
    return [_variant(job, _setting(job, "zero3", offload, "full") | batch_overrides(job, 1)) for offload in _OFFLOAD]


def fitting_settings(
    job: Job, capacity_bytes: float, count: int = 3, host_bytes: float | None = None
) -> list[Recommendation]:
    """The `count` least disturbing changes to `job` that fit, the least disturbing first; fewer where no more do.

    They differ in kind: none changes all that an earlier one changes, and more. Where these are too few, others follow
    that leave clearly more room. `host_bytes`: as of `recommend`.
    """
    candidates = sorted(_disturbances(job), key=lambda overrides: _disturbance(job, overrides))
    found: list[Recommendation] = []
    for overrides in candidates:
        if len(found) < count and not any(other.overrides.keys() <= overrides.keys() for other in found):
            found += _fitting(job, overrides, capacity_bytes, host_bytes)
    for overrides in candidates if found else ():
        if len(found) < count:
            least = min(other.estimate.peak.total for other in found)
            found += _fitting(job, overrides, min(capacity_bytes, MORE_ROOM * least), host_bytes)
    return found


def _fitting(
    job: Job, overrides: dict[str, Value], capacity_bytes: float, host_bytes: float | None
) -> list[Recommendation]:
    """The change to `job`, if it exists and fits."""
    row = _variant(job, overrides)
    if row.estimate is None or not fits(row.estimate, capacity_bytes, host_bytes):
        return []
    return [Recommendation(row.overrides, row.job, row.estimate)]


def micro_batches(job: Job) -> list[int]:
    """Micro-batches that make the same global batch, the smallest first: divisors of what a rank reads in a step."""
    sequences = job.config.training.micro_batch_size * job.gradient_accumulation_steps
    return [batch for batch in range(1, sequences + 1) if sequences % batch == 0]


def batch_overrides(job: Job, batch: int) -> dict[str, Value]:
    """The change to a micro-batch of `batch`, one of `micro_batches`, with the accumulation that keeps the global."""
    training, lanes = job.config.training, job.config.data.num_lanes
    if batch == training.micro_batch_size:
        return {}
    overrides: dict[str, Value] = {"training.per_device_train_batch_size": batch}
    steps = training.micro_batch_size * job.gradient_accumulation_steps // batch
    if lanes:
        overrides["data.num_lanes"] = steps * job.world_size
    elif training.global_batch_size is None:  # which decides the accumulation by itself
        overrides["training.gradient_accumulation_steps"] = steps
    return overrides


def as_overrides(overrides: Mapping[str, Value]) -> str:
    """A change as the command line takes it."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in overrides.items()
    )


def _variant(job: Job, overrides: dict[str, Value]) -> Variant:
    other = changed(job, overrides)
    conflicts = [*find_conflicts(other.config), *engine_conflicts(other.config, other.engine)]
    if conflicts:
        return Variant(overrides, other, None, conflicts[0].message)
    size = other.config.infra.hybrid_shard_size or other.ranks_per_node
    if other.config.infra.sharding_stage in HYBRID_STAGES and other.world_size % size:
        return Variant(overrides, other, None, f"shards over {size} ranks do not divide the {other.world_size} ranks")
    try:
        return Variant(overrides, other, estimate(other))
    except ConfigError as error:  # what infra.deepspeed_extra does not go with
        return Variant(overrides, other, None, str(error))


def _settings(job: Job) -> Iterator[dict[str, Value]]:
    """What each row of the table changes of `job`."""
    hybrids = HYBRID_STAGES if job.world_size > job.ranks_per_node else ()
    for stage, offload, checkpointing in itertools.product((*STAGES, *hybrids), _OFFLOAD, CHECKPOINTING):
        yield _setting(job, stage, offload, checkpointing)


def _setting(job: Job, stage: str, offload: Offload, checkpointing: str) -> dict[str, Value]:
    optimizer, params = _OFFLOAD[offload]
    wanted: dict[str, Value] = {
        "infra.sharding_stage": stage,
        "infra.offload_optimizer": optimizer,
        "infra.offload_params": params,
        "training.activation_checkpointing": checkpointing,
    }
    overrides = {name: value for name, value in wanted.items() if value != value_of(job.config, name)}
    return overrides | _freed(job.config, stage) if overrides else {}


def _freed(config: FullConfig, stage: str) -> dict[str, Value]:
    """Fields that would contradict the change: aliases of what it sets, and the size of a hybrid that is none."""
    names = [f"infra.{alias}" for alias in _SHARDING_ALIASES]
    if stage not in HYBRID_STAGES:
        names.append("infra.hybrid_shard_size")
    return {name: None for name in names if value_of(config, name) is not None}


def value_of(config: FullConfig, name: str) -> Value:
    """The value of the field `section.field`."""
    section, field = name.split(".")
    value: Value = getattr(getattr(config, section), field)
    return value


def offload_of(job: Job) -> Offload | None:
    """What `job` offloads, or None where the table has no word for it (nvme, or parameters alone)."""
    placed = (job.config.infra.offload_optimizer, job.config.infra.offload_params)
    return next((name for name, places in _OFFLOAD.items() if places == placed), None)


def _slowness(job: Job) -> tuple[int, int, int]:
    """Sorts settings of the table by speed, the fastest first.

    ZeRO-1 sends what ZeRO-0 does, and each rank steps its share of the weights only (ZeRO, arXiv 1910.02054, section
    7); a single rank has nothing to share. Hybrids gather inside a node.
    """
    several = ("zero1", "zero0", "zero2", "zero2_hybrid", "zero3_hybrid", "zero3")
    stages = several if job.world_size > 1 else STAGES
    return (
        list(_OFFLOAD).index(offload_of(job) or "none"),
        stages.index(job.config.infra.sharding_stage),
        CHECKPOINTING.index(job.config.training.activation_checkpointing),
    )


def _efficient_micro_batch(job: Job) -> int:
    data, configured = job.config.data, job.config.training.micro_batch_size
    return min(configured, -(-EFFICIENT_TOKENS // (data.max_encoder_length + data.max_decoder_length)))


def _disturbances(job: Job) -> Iterator[dict[str, Value]]:
    """Changes to `job` that need less memory than it, alone and together."""
    training, infra = job.config.training, job.config.infra
    chunk = job.config.model.loss_chunk_tokens
    chunks: list[dict[str, Value]] = [{}]
    if chunk > SMALLEST_LOSS_CHUNK:
        chunks.append({"model.loss_chunk_tokens": max(SMALLEST_LOSS_CHUNK, chunk // 4)})
    evaluating: list[dict[str, Value]] = [{}]
    if training.per_device_eval_batch_size > 1:
        evaluating.append({"training.per_device_eval_batch_size": 1})
    reducing: list[dict[str, Value]] = [{}]
    if job.engine == "fsdp" and job.gradient_accumulation_steps > 1 and not infra.fsdp_reduce_every_micro_batch:
        reducing.append({"infra.fsdp_reduce_every_micro_batch": True})
    batches = [batch_overrides(job, batch) for batch in micro_batches(job) if batch <= training.micro_batch_size]
    for parts in itertools.product(evaluating, chunks, reducing, batches, _more_sharing(job)):
        overrides = {name: value for part in parts for name, value in part.items()}
        if overrides:
            yield overrides


def _more_sharing(job: Job) -> Iterator[dict[str, Value]]:
    """Settings of the table that shard, offload or recompute at least as much as `job` does; itself included."""
    yield {}
    infra, checkpointing = job.config.infra, job.config.training.activation_checkpointing
    if infra.sharding_stage in HYBRID_STAGES or "nvme" in (infra.offload_optimizer, infra.offload_params):
        return
    offloads = list(_OFFLOAD)
    for stage, offload in itertools.product(
        STAGES[STAGES.index(infra.sharding_stage) :], offloads[offloads.index(offload_of(job) or "optimizer") :]
    ):
        for recomputing in dict.fromkeys((checkpointing, "full")):
            if overrides := _setting(job, stage, offload, recomputing):
                yield overrides


def _disturbance(job: Job, overrides: Mapping[str, Value]) -> float:
    """How much a change costs, roughly in the order of lost speed: an order, not a measurement."""
    batch = overrides.get("training.per_device_train_batch_size")
    halvings = 0.0
    if isinstance(batch, int):
        halvings = math.log2(job.config.training.micro_batch_size / batch)
    fixed = {
        "training.per_device_eval_batch_size": 0.5,
        "model.loss_chunk_tokens": 1.0,
        "infra.fsdp_reduce_every_micro_batch": 3.0,
        "infra.sharding_stage": 2.0,
        "training.activation_checkpointing": 4.0,
        "infra.offload_optimizer": 8.0,
        "infra.offload_params": 8.0,
    }
    return halvings + sum(cost for name, cost in fixed.items() if name in overrides)
