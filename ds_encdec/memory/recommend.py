"""Which other settings of a job to choose: the fastest that fits, and the nearest ones that do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from ds_encdec.memory.job import Job
from ds_encdec.memory.variants import (
    OFFLOADS,
    STAGES,
    Recommendation,
    Value,
    batch_overrides,
    changed,
    fits,
    has_other_name,
    micro_batches,
    offload_of,
    setting,
    settings,
    value_of,
    variant,
)
from ds_encdec.memory.zero_settings import zero_settings
from ds_encdec.types import ConfigError

EFFICIENT_TOKENS = 4096
"""Tokens of a micro-batch that occupy a GPU well; smaller ones are recommended only where nothing else fits."""
MORE_ROOM = 0.9
"""Share of another setting's peak below which one of the same kind is worth naming beside it."""
SMALLEST_LOSS_CHUNK = 128
"""Tokens; below this the head's matrix products are too small to be fast."""

# What settings are assumed to add to the time of a step, as shares of it: for their order only, and not measured but
# where it says so. The second figure is for ranks in several nodes, whose network is an order of magnitude slower.
RECOMPUTATION = 0.25
"""A second forward pass, a quarter of the arithmetic; published runs lose 21 % of their throughput."""
GATHERING = (0.10, 0.30)
"""zero3: every layer's weights are gathered twice a micro-batch."""
GATHERING_IN_NODE = 0.10
"""zero3_hybrid: the same inside a node."""
REDUCING = (0.03, 0.10)
"""Gradients reduced after every micro-batch and not once a step: zero2 of DeepSpeed, FSDP2's switch for it."""
STEPPING_ALL = 0.01
"""zero0: every rank updates all weights, and sends as much as under zero1 (ZeRO, arXiv 1910.02054, section 7)."""

_FLOAT32 = 4
"""Bytes."""
_REDUCES = "infra.fsdp_reduce_every_micro_batch"


def recommend(job: Job, capacity_bytes: float, host_bytes: float | None = None) -> Recommendation | None:
    """The fastest setting of `job` and its engine that fits, with its largest micro-batch; None where none does.

    What offloads least comes first, then what adds gradients up in float32, then what costs least time by the constants
    above. The global batch is kept: the micro-batch divides what a rank reads in one step. `capacity_bytes`: usable
    memory of a device; `host_bytes`: a rank's share of its node's.
    """
    asked = list(_askable(job))
    for smallest in dict.fromkeys((_efficient_micro_batch(job), 1)):
        # A whole step in one micro-batch leaves out all that accumulation needs, so it may fit where smaller ones fail.
        batches = [batch for batch in micro_batches(job) if batch >= smallest]
        groups = [batches[-1:], batches[:-1]]
        candidates = [(overrides, group) for overrides in asked for group in groups if group]
        for overrides, group in sorted(candidates, key=lambda each: _rank(job, each[0], each[1][0])):
            if (found := _largest_that_fits(job, overrides, group, capacity_bytes, host_bytes)) is not None:
                return found
    return None


def _largest_that_fits(
    job: Job, overrides: dict[str, Value], batches: list[int], capacity_bytes: float, host_bytes: float | None
) -> Recommendation | None:
    """Of these micro-batches, with which memory grows. From the smallest: most settings that fail do so at once."""
    found: Recommendation | None = None
    for batch in batches:
        fitting = _fitting(job, overrides | batch_overrides(job, batch), capacity_bytes, host_bytes)
        if not fitting:
            break
        (found,) = fitting
    return found


def _askable(job: Job) -> Iterator[dict[str, Value]]:
    """The table's settings, with and without what else decides between fitting and speed."""
    offloads = (False, True) if job.config.training.activation_offload else (False,)
    reduces = (False, True) if job.engine == "fsdp" and job.gradient_accumulation_steps > 1 else (False,)
    for overrides, offload, reduce in itertools.product(settings(job), offloads, reduces):
        if job.engine == "fsdp" and overrides and has_other_name(changed(job, overrides)):
            continue
        extra: dict[str, Value] = {"training.activation_offload": offload, _REDUCES: reduce}
        yield overrides | {name: value for name, value in extra.items() if value != value_of(job.config, name)}


def _rank(job: Job, overrides: dict[str, Value], batch: int) -> tuple[int, bool, float, int]:
    """Sorts settings, the most desirable first: what they offload, how they add up, what they cost, how much is new."""
    other = changed(job, overrides | batch_overrides(job, batch))
    offloaded = list(OFFLOADS).index(offload_of(other) or "none") + other.config.training.activation_offload
    return offloaded, adds_up_in_16_bits(other), _slowdown(other), len(overrides)


def adds_up_in_16_bits(job: Job) -> bool:
    """Whether the gradients of several micro-batches are added up in bfloat16 or float16."""
    if job.engine == "fsdp" or job.gradient_accumulation_steps == 1:
        return False
    try:
        return zero_settings(job).accumulation < _FLOAT32
    except ConfigError:  # it does not exist, as its row says
        return True


def _slowdown(job: Job) -> float:
    """Share of a step's time that the setting adds, by the constants above. A rank alone sends nothing."""
    infra, training = job.config.infra, job.config.training
    stage = infra.sharding_stage
    cost = RECOMPUTATION if training.activation_checkpointing != "none" else 0.0
    if job.world_size == 1:
        return cost + 0.001 * (STAGES.index(stage) if stage in STAGES else len(STAGES))
    several_nodes = job.world_size > job.ranks_per_node
    if stage == "zero3_hybrid":
        cost += GATHERING_IN_NODE
    elif stage == "zero3":
        cost += GATHERING[several_nodes]
    elif stage == "zero0":
        cost += STEPPING_ALL
    reduces = stage == "zero2" if job.engine == "deepspeed" else infra.fsdp_reduce_every_micro_batch
    return cost + (REDUCING[several_nodes] if reduces and job.gradient_accumulation_steps > 1 else 0.0)


def _efficient_micro_batch(job: Job) -> int:
    data, configured = job.config.data, job.config.training.micro_batch_size
    return min(configured, -(-EFFICIENT_TOKENS // (data.max_encoder_length + data.max_decoder_length)))


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
    row = variant(job, overrides)
    if row.estimate is None or not fits(row.estimate, capacity_bytes, host_bytes):
        return []
    return [Recommendation(row.overrides, row.job, row.estimate)]


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
        reducing.append({_REDUCES: True})
    batches = [batch_overrides(job, batch) for batch in micro_batches(job) if batch <= training.micro_batch_size]
    for parts in itertools.product(evaluating, chunks, reducing, batches, _more_sharing(job)):
        overrides = {name: value for part in parts for name, value in part.items()}
        if overrides:
            yield overrides


def _more_sharing(job: Job) -> Iterator[dict[str, Value]]:
    """Settings of the table that shard, offload or recompute at least as much as `job` does; itself included."""
    yield {}
    infra, checkpointing = job.config.infra, job.config.training.activation_checkpointing
    if infra.sharding_stage not in STAGES:  # a hybrid
        return
    stages, offloads = STAGES[STAGES.index(infra.sharding_stage) :], list(OFFLOADS)
    for stage, offload in itertools.product(stages, offloads[offloads.index(offload_of(job) or "optimizer") :]):
        for recomputing in dict.fromkeys((checkpointing, "full")):
            if overrides := setting(job, stage, offload, recomputing):
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
        _REDUCES: 3.0,
        "infra.sharding_stage": 2.0,
        "training.activation_checkpointing": 4.0,
        "infra.offload_optimizer": 8.0,
        "infra.offload_params": 8.0,
    }
    return halvings + sum(cost for name, cost in fixed.items() if name in overrides)
