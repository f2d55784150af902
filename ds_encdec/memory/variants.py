"""Other settings of a job: what each would hold, and which of those that fit to choose.

A change is a mapping of dotted fields to values, the same that the command line takes as overrides. All choices come
from one list of changes, in the order of one cost: the recommendation is the first that fits, and the nearest settings,
also after memory ran out, are the first few that differ in kind.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ds_encdec.config.rules import engine_candidates, engine_conflicts, find_conflicts
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import mesh_shape
from ds_encdec.engines import ENGINES, EngineName
from ds_encdec.memory.breakdown import Estimate
from ds_encdec.memory.estimate import engine_memory, estimate
from ds_encdec.memory.job import Job, make_job
from ds_encdec.types import ConfigError

Value = str | int | bool | None
"""The value of a field that a change sets."""
Offload = Literal["none", "optimizer", "optimizer+params"]
"""Names of what is kept in host memory, in the table's words."""

HEADROOM = 0.05
"""Share of a device's usable memory that a fitting setting leaves free: for what the estimate may miss."""
HOST_HEADROOM = 0.1
"""Share of a host's memory that stays free, for the page cache and for what the build of an engine copies; a process
that takes the last of it is killed silently."""
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
OFFLOADS: dict[Offload, tuple[str, str]] = {
    "none": ("none", "none"),
    "optimizer": ("cpu", "none"),
    "optimizer+params": ("cpu", "cpu"),
}
"""Name of what is offloaded: `infra.offload_optimizer` and `infra.offload_params`."""
_SHARDING_ALIASES = ("fsdp_sharding_strategy", "fsdp_activation_checkpointing", "fsdp_cpu_offload")

# What settings are assumed to add to the time of a step, as shares of it: for their order only, and measured only where
# it says so. The second figure is for ranks in several nodes, whose network is an order of magnitude slower.
RECOMPUTATION = 0.25
"""A second forward pass, a quarter of the arithmetic; published runs lose 21 % of their throughput."""
GATHERING = (0.10, 0.30)
"""zero3: every layer's weights are gathered twice a micro-batch."""
GATHERING_IN_NODE = 0.10
"""zero3_hybrid: the same inside a node."""
REDUCING = (0.03, 0.10)
"""Gradients reduced after every micro-batch and not once a step."""
STEPPING_ALL = 0.01
"""zero0: every rank updates all weights, and sends as much as under zero1 (ZeRO, arXiv 1910.02054, section 7)."""
HALVING = 0.02
"""Half the micro-batch, and twice as many of them."""
SMALLER_CHUNK = 0.03
"""Chunks of logits with a quarter of the tokens."""
SMALLER_EVALUATION = 0.005
"""Single sequences in an evaluation."""


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


@dataclass(frozen=True, slots=True)
class Room:
    """Usable bytes of a device, and a rank's share of its node's memory (None: not known, and not judged)."""

    device_bytes: float
    host_bytes: float | None = None

    def fits(self, estimated: Estimate) -> bool:
        """Return whether the peak leaves `HEADROOM` of the device free, and the host's part `HOST_HEADROOM` of that."""
        enough = self.host_bytes is None or estimated.host.total <= self.host_bytes * (1 - HOST_HEADROOM)
        return estimated.peak.total <= self.device_bytes * (1 - HEADROOM) and enough


# ------------------------------------------------------------------------------------------------------ changed jobs


def resolve_engine(config: FullConfig) -> EngineName:
    """The engine that `infra.distributed_type` means where every engine is installed (see engine/select.py)."""
    return engine_candidates(config)[0].name


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


def variant(job: Job, overrides: dict[str, Value]) -> Variant:
    """`job` with this change, and its estimate, or why it cannot be."""
    other = changed(job, overrides)
    conflicts = [*find_conflicts(other.config), *engine_conflicts(other.config, other.engine)]
    if conflicts:
        return Variant(overrides, other, None, conflicts[0].message)
    try:
        mesh_shape(other.config.infra, other.world_size, other.ranks_per_node)
        return Variant(overrides, other, estimate(other))
    except ConfigError as error:
        return Variant(overrides, other, None, str(error))


def fitting(job: Job, changes: Iterable[dict[str, Value]], room: Room) -> Iterator[Recommendation]:
    """Yield those of the `changes` to `job` that exist and fit."""
    for row in (variant(job, overrides) for overrides in changes):
        if row.estimate is not None and room.fits(row.estimate):
            yield Recommendation(row.overrides, row.job, row.estimate)


def as_overrides(overrides: Mapping[str, Value]) -> str:
    """A change as a shell's command line takes it."""
    return shlex.join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in overrides.items()
    )


def value_of(config: FullConfig, name: str) -> Value:
    """The value of the field `section.field`."""
    section, field = name.split(".")
    value: Value = getattr(getattr(config, section), field)
    return value


# ----------------------------------------------------------------------------------------------- settings of the table


def variants(job: Job) -> list[Variant]:
    """The rows of the table: stage x offload x activation checkpointing, with the engine and the batch of `job`.

    A configuration that is none of them (every_n, selective) comes first, as a row of its own.
    """
    rows = [variant(job, overrides) for overrides in settings(job)]
    return rows if any(not row.overrides for row in rows) else [variant(job, {}), *rows]


def smallest_variants(job: Job) -> list[Variant]:
    """The settings that need least of a device: everything sharded and recomputed, micro-batches of 1, each offload."""
    smallest = batch_overrides(job, 1)
    if (reduces := ENGINES[job.engine].reduction_field) is not None and not value_of(job.config, reduces):
        smallest[reduces] = True
    return [variant(job, setting(job, "zero3", offload, "full") | smallest) for offload in OFFLOADS]


def settings(job: Job) -> Iterator[dict[str, Value]]:
    """The changes of `job` that make the rows of the table."""
    hybrids = HYBRID_STAGES if job.world_size > job.ranks_per_node else ()
    for stage, offload, checkpointing in itertools.product((*STAGES, *hybrids), OFFLOADS, CHECKPOINTING):
        yield setting(job, stage, offload, checkpointing)


def setting(job: Job, stage: str, offload: Offload, checkpointing: str) -> dict[str, Value]:
    """The change that makes `job` shard, offload and recompute so; empty where it does so already."""
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
    kind = job.config.infra.distributed_type
    names = [f"infra.{alias}" for alias in _SHARDING_ALIASES]
    if stage not in HYBRID_STAGES:
        names.append("infra.hybrid_shard_size")
    freed: dict[str, Value] = {name: None for name in names if value_of(job.config, name) is not None}
    # Under `auto` the change may undo what only this engine could do; `ddp` is zero0.
    if kind != job.engine and (stage != "zero0" if kind != "auto" else job.engine != next(iter(ENGINES))):
        freed["infra.distributed_type"] = job.engine
    return freed


def has_other_name(job: Job) -> bool:
    """Return whether the table has the same setting by a more usual name.

    FSDP2's zero1 is zero2, and it offloads all or none: it scatters gradients as it reduces
    them, and its parameters are the master weights (engine/fsdp2.py).
    """
    infra = job.config.infra
    if not ENGINES[job.engine].merges_settings or find_conflicts(job.config):
        return False
    return infra.sharding_stage == "zero1" or infra.offload_params == "cpu"


def offload_of(job: Job) -> Offload | None:
    """Name what `job` offloads, or None where the table has no word for it (parameters alone)."""
    placed = (job.config.infra.offload_optimizer, job.config.infra.offload_params)
    return next((name for name, places in OFFLOADS.items() if places == placed), None)


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
        # Set even where a global_batch_size decides it: that may be this run's own, of `auto`, and not the user's.
        overrides["training.gradient_accumulation_steps"] = steps
    return overrides


# --------------------------------------------------------------------------------------------------- which to choose


def recommend(job: Job, room: Room) -> Recommendation | None:
    """The first setting of `job` and its engine that fits, with its largest micro-batch; None where none does.

    The global batch is kept: the micro-batch divides what a rank reads in one step.
    """
    data, configured = job.config.data, job.config.training.micro_batch_size
    efficient = min(configured, -(-EFFICIENT_TOKENS // (data.max_encoder_length + data.max_decoder_length)))
    kept: list[dict[str, Value]] = [{}]
    if job.config.training.activation_offload:
        kept.append({"training.activation_offload": False})
    asked = [
        overrides
        for overrides in _combined(settings(job), kept, _reductions(job))
        if not overrides or not has_other_name(changed(job, overrides))
    ]
    for smallest in dict.fromkeys((efficient, 1)):
        # A whole step in one micro-batch leaves out all that accumulation needs, so it may fit where smaller ones fail.
        batches = [batch for batch in micro_batches(job) if batch >= smallest]
        groups = [group for group in (batches[-1:], batches[:-1]) if group]
        candidates = itertools.product(asked, groups)
        for overrides, group in sorted(candidates, key=lambda each: _cost(job, each[0], each[1][0])):
            # From the smallest: most settings that fail do so at once.
            changes = (overrides | batch_overrides(job, batch) for batch in group)
            found = [*itertools.takewhile(bool, (next(fitting(job, [change], room), None) for change in changes))]
            if found:
                return found[-1]
    return None


def nearest(job: Job, room: Room, count: int = 3) -> list[Recommendation]:
    """The first `count` changes to `job` that need less and fit; fewer where no more do.

    They differ in kind: none changes all that an earlier one changes, and more. Where these are too few, others follow
    that leave clearly more room.
    """
    changes = sorted(_smaller(job), key=lambda overrides: _cost(job, overrides))
    found: list[Recommendation] = []
    for overrides in changes:
        if len(found) < count and not any(other.overrides.keys() <= overrides.keys() for other in found):
            found += fitting(job, [overrides], room)
    for overrides in changes if found else ():
        if len(found) < count:
            least = MORE_ROOM * min(other.estimate.peak.total for other in found)
            found += fitting(job, [overrides], dataclasses.replace(room, device_bytes=min(room.device_bytes, least)))
    return found


def adds_up_in_16_bits(job: Job) -> bool:
    """Return whether the gradients of several micro-batches are added up in bfloat16 or float16."""
    try:
        return engine_memory(job).sums_in_16_bits
    except ConfigError:  # it does not exist, as its row says
        return True


def _cost(job: Job, overrides: dict[str, Value], batch: int | None = None) -> tuple[int, bool, float, int]:
    """Sorts changes, the most desirable first: what they offload, how they add up, the time they cost, how much is new.

    `batch`: the micro-batch with which it is tried; None: the change's own, whose size then costs time, too.
    """
    other = changed(job, overrides | batch_overrides(job, batch) if batch else overrides)
    offloaded = list(OFFLOADS).index(offload_of(other) or "none") + other.config.training.activation_offload
    slowdown = _slowdown(other)
    if batch is None:
        slowdown += HALVING * math.log2(job.config.training.micro_batch_size / other.config.training.micro_batch_size)
        slowdown += SMALLER_CHUNK * ("model.loss_chunk_tokens" in overrides)
        slowdown += SMALLER_EVALUATION * ("training.per_device_eval_batch_size" in overrides)
    return offloaded, adds_up_in_16_bits(other), slowdown, len(overrides)


def _slowdown(job: Job) -> float:
    """Share of a step's time that the setting adds, by the constants above. A rank alone sends nothing."""
    infra, training = job.config.infra, job.config.training
    stage = infra.sharding_stage
    cost = RECOMPUTATION if training.activation_checkpointing != "none" else 0.0
    if job.world_size == 1:
        return cost + 0.001 * (STAGES.index(stage) if stage in STAGES else len(STAGES))
    several_nodes = job.world_size > job.ranks_per_node
    added = {"zero0": STEPPING_ALL, "zero3": GATHERING[several_nodes], "zero3_hybrid": GATHERING_IN_NODE}
    try:
        reduces = engine_memory(job).reduces_every_micro_batch
    except ConfigError:
        reduces = False
    return cost + added.get(stage, 0.0) + (REDUCING[several_nodes] if reduces else 0.0)


def _combined(*choices: Iterable[dict[str, Value]]) -> Iterator[dict[str, Value]]:
    """Every combination of the choices' changes."""
    for parts in itertools.product(*choices):
        yield {name: value for part in parts for name, value in part.items()}


def _reductions(job: Job) -> list[dict[str, Value]]:
    """Reducing once a step and after every micro-batch, for an engine that leaves the choice."""
    field = ENGINES[job.engine].reduction_field
    if field is None or job.gradient_accumulation_steps == 1:
        return [{}]
    return [{}, {field: not value_of(job.config, field)}]


def _smaller(job: Job) -> Iterator[dict[str, Value]]:
    """Changes to `job` that need less memory than it, alone and together."""
    training, chunk = job.config.training, job.config.model.loss_chunk_tokens
    chunks: list[dict[str, Value]] = [{}]
    if chunk > SMALLEST_LOSS_CHUNK:
        chunks.append({"model.loss_chunk_tokens": max(SMALLEST_LOSS_CHUNK, chunk // 4)})
    evaluating: list[dict[str, Value]] = [{}]
    if training.per_device_eval_batch_size > 1:
        evaluating.append({"training.per_device_eval_batch_size": 1})
    reducing = [change for change in _reductions(job) if True in change.values() or not change]
    batches = [batch_overrides(job, batch) for batch in micro_batches(job) if batch <= training.micro_batch_size]
    return filter(None, _combined(evaluating, chunks, reducing, batches, _more_sharing(job)))


def _more_sharing(job: Job) -> Iterator[dict[str, Value]]:
    """Settings of the table that shard, offload or recompute at least as much as `job` does; itself included."""
    yield {}
    infra, checkpointing = job.config.infra, job.config.training.activation_checkpointing
    if infra.sharding_stage not in STAGES:  # a hybrid
        return
    stages, offloads = STAGES[STAGES.index(infra.sharding_stage) :], list(OFFLOADS)
    offloads = offloads[offloads.index(offload_of(job) or "optimizer") :]
    for stage, offload, recomputing in itertools.product(stages, offloads, dict.fromkeys((checkpointing, "full"))):
        if overrides := setting(job, stage, offload, recomputing):
            yield overrides
