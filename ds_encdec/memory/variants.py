"""Other settings of a job: their estimates, and the choice among those that fit.

All choices follow one order (`_cost`): the recommendation is the first change that fits, the nearest settings are the
first few that differ in kind. The mode of `training.activation_checkpointing: auto` is chosen here, too."""

import itertools
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from ds_encdec.base.quantities import in_gib
from ds_encdec.base.types import ConfigError
from ds_encdec.config.rules import engine_candidates, engine_conflicts, find_conflicts
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import mesh_shape, micro_batches_per_step
from ds_encdec.memory.breakdown import Breakdown, Estimate, HostBreakdown
from ds_encdec.memory.estimate import engine_memory, estimate
from ds_encdec.memory.job import Job, with_micro_batch
from ds_encdec.registry.engines import ENGINES

Change = dict[str, str | int | bool | None]  # New values by field (`section.field`)
HEADROOM = 0.05  # Share of a device's usable memory that a fitting setting leaves free, for errors of the estimate
# Share of a host's memory that stays free, for the page cache and for copies during an engine's build.
HOST_HEADROOM = 0.1
# Tokens of a micro-batch that occupy a GPU well; smaller ones are recommended only if nothing else fits.
EFFICIENT_TOKENS = 4096
RECOMPUTATION = "training.activation_checkpointing"
MODES = ("none", "selective", "full")  # Modes that `auto` chooses from, the fastest first
# Fields that decide how many micro-batches a step has.
BATCH_FIELDS = {
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "training.global_batch_size",
    "data.num_lanes",
}
STAGES = ("zero0", "zero1", "zero2", "zero3")
HYBRID_STAGES = ("zero2_hybrid", "zero3_hybrid")
# The table's words for the values of `infra.offload_optimizer` and `infra.offload_params`.
OFFLOADS = {"none": ("none", "none"), "optimizer": ("cpu", "none"), "optimizer+params": ("cpu", "cpu")}
# More words, for a run with `infra.nvme_path`.
_DISK_OFFLOADS = {"nvme": ("nvme", "none"), "nvme+params": ("nvme", "cpu")}
_NOWHERE = Estimate(Breakdown(framework=math.inf), "", HostBreakdown())


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of the table: a job and its `overrides`. A setting that does not exist has a `reason`, and fits nowhere."""

    job: Job
    estimate: Estimate = _NOWHERE
    overrides: Change = field(default_factory=dict)
    reason: str = ""

    @property
    def node_bytes(self) -> float:
        """Bytes of host memory of all ranks of a node; on a CPU their tensors are there too."""
        on_device = self.estimate.peak.total if self.job.device == "cpu" else 0.0
        return (on_device + self.estimate.host.total) * self.job.ranks_per_node


Fits = Callable[[Variant], bool]  # Returns whether a setting fits into the available memory


def with_fields(config: FullConfig, change: Mapping[str, Any]) -> FullConfig:
    """Return `config` with these fields, not validated."""
    for name, value in change.items():
        section, field_name = name.split(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={field_name: value})})
    return config


def changed(job: Job, change: Mapping[str, Any]) -> Job:
    """Return `job` with these fields, not validated. Micro-batches a step stay unless `BATCH_FIELDS` change."""
    config, engine, steps = with_fields(job.config, change), job.engine, job.gradient_accumulation_steps
    if "infra.distributed_type" in change:
        engine = engine_candidates(config)[0].name
    if BATCH_FIELDS & change.keys():
        steps = max(1, micro_batches_per_step(config, job.world_size) // job.world_size)
    return with_micro_batch(
        replace(job, config=config, engine=engine, gradient_accumulation_steps=steps), config.training.micro_batch_size
    )


def variant(job: Job, change: Change) -> Variant:
    """Return `job` with this change and its estimate, or the reason why it cannot exist."""
    other = changed(job, change)
    try:
        for conflict in (*find_conflicts(other.config), *engine_conflicts(other.config, other.engine)):
            raise ConfigError(conflict.message)
        mesh_shape(other.config.infra, other.world_size, other.ranks_per_node)
        return Variant(other, estimate(other), change)
    except ConfigError as error:
        return Variant(other, overrides=change, reason=str(error))


def as_overrides(change: Mapping[str, Any]) -> str:
    """Return a change as overrides for a shell's command line."""
    return shlex.join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in change.items()
    )


def variants(job: Job) -> list[Variant]:
    """Return the table's rows, with engine and batch of `job`; a configuration that is in no row comes first."""
    changes = list(settings(job))
    return [variant(job, change) for change in (changes if {} in changes else [{}, *changes])]


def smallest_variants(job: Job) -> list[Variant]:
    """Return the settings with the least device memory: all sharded and recomputed, micro-batch 1, each offload."""
    smallest, reduces = batches(job)[1], ENGINES[job.engine].reduction_field
    if reduces is not None and not attrgetter(reduces)(job.config):
        smallest[reduces] = True
    return [variant(job, setting(job, "zero3", offload, "full") | smallest) for offload in _offloads(job)]


def _offloads(job: Job) -> list[str]:
    """Return the table's offloads. If parameters are the master weights (`merges_settings`), both move together."""
    if ENGINES[job.engine].merges_settings:
        return ["none", "optimizer"]
    return [*OFFLOADS, *(_DISK_OFFLOADS if job.config.infra.nvme_path is not None else ())]


def settings(job: Job) -> Iterator[Change]:
    """Yield the changes of `job` that make the table's rows; settings that are the same have one row."""
    stages: tuple[str, ...] = (*STAGES, *HYBRID_STAGES) if job.world_size > job.ranks_per_node else STAGES
    if ENGINES[job.engine].merges_settings:  # gradients are scattered as they are reduced: zero1 is zero2
        stages = tuple(stage for stage in stages if stage != "zero1")
    return (setting(job, *row) for row in itertools.product(stages, _offloads(job), ("none", "full")))


def setting(job: Job, stage: str, offload: str, checkpointing: str) -> Change:
    """Return the change that shards, offloads and recomputes this way, and resets contradicting fields."""
    optimizer, params = (OFFLOADS | _DISK_OFFLOADS)[offload]
    wanted: Change = {
        "infra.sharding_stage": stage,
        "infra.offload_optimizer": optimizer,
        "infra.offload_params": params,
        RECOMPUTATION: checkpointing,
    }
    if all(attrgetter(name)(job.config) == value for name, value in wanted.items()):
        return {}
    if stage not in HYBRID_STAGES:
        wanted["infra.hybrid_shard_size"] = None
    # Under `auto` the change may undo what only this engine could do; `ddp` is zero0.
    if job.engine != next(iter(ENGINES)) if job.config.infra.distributed_type == "auto" else stage != "zero0":
        wanted["infra.distributed_type"] = job.engine
    return {name: value for name, value in wanted.items() if value != attrgetter(name)(job.config)}


def offload_of(job: Job) -> str | None:
    """Return the table's word for the offload of `job`, or None if it has none (parameters alone)."""
    placed = (job.config.infra.offload_optimizer, job.config.infra.offload_params)
    return next((name for name, places in (OFFLOADS | _DISK_OFFLOADS).items() if places == placed), None)


def batches(job: Job) -> dict[int, Change]:
    """Return by size, the smallest first, the changes to the micro-batches that keep the global batch."""
    configured = job.config.training.micro_batch_size
    sequences = configured * job.gradient_accumulation_steps
    # Set even if a global_batch_size decides it, which `auto` may have set and not the user.
    name = "data.num_lanes" if job.config.data.num_lanes else "training.gradient_accumulation_steps"
    ranks = job.world_size if job.config.data.num_lanes else 1
    found: dict[int, Change] = {
        size: {"training.per_device_train_batch_size": size, name: sequences // size * ranks}
        for size in range(1, sequences + 1)
        if sequences % size == 0
    }
    return found | {configured: {}}


def choose_recompute(job: Job, device_bytes: float, *, first: str | None = None) -> tuple[str, str]:
    """Return the fastest of `MODES` that fits devices of `device_bytes`, or `full`, and a clause about the choice.
    `first` is taken if it fits, even if a faster one does. Modes that the engine or a setting excludes are skipped."""
    limit_bytes, tried = device_bytes * (1 - HEADROOM), list[str]()
    if job.device == "cpu":
        return MODES[0], f"{RECOMPUTATION}=auto is {MODES[0]} on CPUs"
    even = ""
    for mode in dict.fromkeys((*([first] if first in MODES else []), *MODES)):
        row = variant(job, {RECOMPUTATION: mode})
        tried += [] if row.reason else [f"{mode} {in_gib(row.estimate.peak.total)} GiB"]
        if row.estimate.peak.total <= limit_bytes:
            break
    else:
        mode, even = MODES[-1], ", and even that does not fit"
    return mode, (
        f"{RECOMPUTATION}=auto is {mode}{even} (estimated: {', '.join(tried)}; available: {in_gib(limit_bytes)} GiB)"
    )


def recommend(job: Job, fits: Fits) -> Variant | None:
    """Return the first setting of `job` that fits, with its largest micro-batch and the same global batch."""
    data, training = job.config.data, job.config.training
    kept: list[Change] = [{}, {"training.activation_offload": False}] if training.activation_offload else [{}]
    wanted = list(_combined(settings(job), kept, _reductions(job)))
    efficient = -(-EFFICIENT_TOKENS // (data.max_encoder_length + data.max_decoder_length))
    for smallest in dict.fromkeys((min(training.micro_batch_size, efficient), 1)):
        # One micro-batch per step needs no memory for accumulation, so it may fit where smaller ones fail.
        sized = [batch for size, batch in batches(job).items() if size >= smallest]
        candidates = itertools.product(wanted, filter(None, (sized[-1:], sized[:-1])))
        for change, group in sorted(candidates, key=lambda each: _cost(changed(job, each[1][0]), each[0])):
            # From the smallest: most settings that fail do so at once.
            if fitting := list(itertools.takewhile(fits, (variant(job, change | batch) for batch in group))):
                return fitting[-1]
    return None


def faster(job: Job, fits: Fits) -> Variant | None:
    """Return the fastest setting of the table that fits, at the batch of `job`; None if none beats that of `job`."""
    costs = [(cost, change) for change in settings(job) if (cost := _cost(job, change)) < _cost(job, {})]
    return next(filter(fits, (variant(job, change) for _, change in sorted(costs, key=lambda each: each[0]))), None)


def nearest(job: Job, fits: Fits, count: int = 3) -> list[Variant]:
    """Return the first `count` changes to `job` that need less and fit, or fewer; none includes all of an earlier one.
    If these are too few, others follow that leave clearly more memory free."""
    changes = sorted(_smaller(job), key=lambda change: _cost(job, change))
    found: list[Variant] = []
    for change in changes:
        if len(found) < count and not any(near.overrides.keys() <= change.keys() for near in found):
            found += filter(fits, [variant(job, change)])
    for change in changes if found else ():
        if len(found) < count:
            most = 0.9 * (1 - HEADROOM) * min(near.estimate.peak.total for near in found)
            found += (row for row in [variant(job, change)] if fits(row) and row.estimate.peak.total <= most)
    return found


def _cost(job: Job, change: Change) -> tuple[int, bool, float, int]:
    """Return the sort key of a change, the best first: its offloads, sums in 16 bits, time, and number of new values.
    Times are shares of a step's, assumed for the order only. A network between nodes is an order of magnitude slower. A
    setting that does not exist may come anywhere, as it fits nowhere."""
    other = changed(job, change)
    stage, training = other.config.infra.sharding_stage, other.config.training
    try:
        engine = engine_memory(other)
    except ConfigError:
        return 0, False, 0.0, 0
    alone, several_nodes = job.world_size == 1, job.world_size > job.ranks_per_node
    by_stage = {
        # Every rank updates all weights, and sends as much as under zero1 (ZeRO, arXiv 1910.02054, section 7).
        "zero0": 0.01,
        "zero3": 0.30 if several_nodes else 0.10,  # every layer's weights are gathered twice a micro-batch
        "zero3_hybrid": 0.10,  # the same inside a node
    }
    slowdown = (
        # A second forward pass is a quarter of the arithmetic; published runs lose 21 % of their throughput.
        0.25 * (training.activation_checkpointing != "none")
        + (0.001 * (*STAGES, *HYBRID_STAGES).index(stage) if alone else by_stage.get(stage, 0.0))
        # Gradients are reduced after every micro-batch and not once a step.
        + (0.10 if several_nodes else 0.03) * (engine.reduces_every_micro_batch and not alone)
        # Half the micro-batch means twice as many of them.
        + 0.02 * math.log2(job.config.training.micro_batch_size / training.micro_batch_size)
        + 0.03 * ("model.loss_chunk_tokens" in change)  # a quarter of the tokens in every chunk of logits
        + 0.005 * ("training.per_device_eval_batch_size" in change)  # single sequences in an evaluation
    )
    offloaded = [*OFFLOADS, *_DISK_OFFLOADS].index(offload_of(other) or "none") + training.activation_offload
    return offloaded, engine.sums_in_16_bits, slowdown, len(change)


def _combined(*choices: Iterable[Change]) -> Iterator[Change]:
    for parts in itertools.product(*choices):
        yield {name: value for part in parts for name, value in part.items()}


def _reductions(job: Job) -> list[Change]:
    name = ENGINES[job.engine].reduction_field
    return [{}, {name: not attrgetter(name)(job.config)}] if name and job.gradient_accumulation_steps > 1 else [{}]


def _smaller(job: Job) -> Iterator[Change]:
    """Yield changes to `job` that need less memory, alone and together; none shards, offloads or recomputes less."""
    training, stage, chunk = job.config.training, job.config.infra.sharding_stage, job.config.model.loss_chunk_tokens
    stages = STAGES[STAGES.index(stage) :] if stage in STAGES else ()
    offload = offload_of(job) or "optimizer"
    offloads = list(_DISK_OFFLOADS if offload in _DISK_OFFLOADS else OFFLOADS)
    offloads = offloads[offloads.index(offload) :]
    sharing = itertools.product(stages, offloads, dict.fromkeys((training.activation_checkpointing, "full")))
    combined = _combined(
        [{}, {"training.per_device_eval_batch_size": 1}] if training.per_device_eval_batch_size > 1 else [{}],
        # In chunks of fewer than 128 tokens the head's matrix products are too small to be fast.
        [{}, {"model.loss_chunk_tokens": max(128, chunk // 4)}] if chunk > 128 else [{}],
        [change for change in _reductions(job) if True in change.values() or not change],
        [batch for size, batch in batches(job).items() if size <= training.micro_batch_size],
        [{}, *filter(None, (setting(job, *row) for row in sharing))],
    )
    return filter(None, combined)
