"""Other settings of a job: their estimates, and which of those that fit to choose.

A change maps dotted fields to values, like overrides on the command line. All choices come from lists of changes in the
order of one cost (`_cost`): the recommendation is the first that fits, the nearest settings are the first few that
differ in kind.
"""

import itertools
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from ds_encdec.base.types import ConfigError
from ds_encdec.config.rules import engine_candidates, engine_conflicts, find_conflicts
from ds_encdec.config.shares import mesh_shape, micro_batches_per_step
from ds_encdec.memory.breakdown import Breakdown, Estimate, HostBreakdown
from ds_encdec.memory.estimate import engine_memory, estimate
from ds_encdec.memory.job import Job, with_micro_batch
from ds_encdec.registry.engines import ENGINES

Change = dict[str, str | int | bool | None]
"""Fields (`section.field`) and the values that they are to have."""

HEADROOM = 0.05
"""Share of a device's usable memory that a fitting setting leaves free: for what the estimate may miss."""
HOST_HEADROOM = 0.1
"""Share of a host's memory that stays free, for the page cache and for what the build of an engine copies."""
EFFICIENT_TOKENS = 4096
"""Tokens of a micro-batch that occupy a GPU well; smaller ones are recommended only where nothing else fits."""
BATCH_FIELDS = {
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "training.global_batch_size",
    "data.num_lanes",
}
"""Any of them decides how many micro-batches a step has."""
STAGES = ("zero0", "zero1", "zero2", "zero3")
HYBRID_STAGES = ("zero2_hybrid", "zero3_hybrid")
OFFLOADS = {"none": ("none", "none"), "optimizer": ("cpu", "none"), "optimizer+params": ("cpu", "cpu")}
"""The table's words for the values of `infra.offload_optimizer` and `infra.offload_params`."""
_DISK_OFFLOADS = {"nvme": ("nvme", "none"), "nvme+params": ("nvme", "cpu")}
"""More of them, in the table of a run with `infra.nvme_path`."""
_NOWHERE = Estimate(Breakdown(framework=math.inf), "", HostBreakdown())
"""The needs of what does not exist: more than there is anywhere."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of the table: a job and its `overrides`; one that does not exist has a `reason`, and fits nowhere."""

    job: Job
    estimate: Estimate = _NOWHERE
    overrides: Change = field(default_factory=dict)
    reason: str = ""

    @property
    def node_bytes(self) -> float:
        """Bytes of host memory that all ranks of a node hold; on a CPU what they compute with is there too."""
        on_device = self.estimate.peak.total if self.job.device == "cpu" else 0.0
        return (on_device + self.estimate.host.total) * self.job.ranks_per_node


Fits = Callable[[Variant], bool]
"""Tells of a setting whether it fits into the memory there is."""


def changed(job: Job, change: Mapping[str, Any]) -> Job:
    """`job` with these fields, not validated. Micro-batches a step stay, unless fields that decide them change."""
    config, engine, steps = job.config, job.engine, job.gradient_accumulation_steps
    for name, value in change.items():
        section, field_name = name.split(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={field_name: value})})
    if "infra.distributed_type" in change:
        engine = engine_candidates(config)[0].name
    if BATCH_FIELDS & change.keys():
        steps = max(1, micro_batches_per_step(config, job.world_size) // job.world_size)
    other = replace(job, config=config, engine=engine, gradient_accumulation_steps=steps)
    return with_micro_batch(other, config.training.micro_batch_size)


def variant(job: Job, change: Change) -> Variant:
    """`job` with this change, and its estimate, or why it cannot be."""
    other = changed(job, change)
    conflicts = [*find_conflicts(other.config), *engine_conflicts(other.config, other.engine)]
    try:
        if conflicts:
            raise ConfigError(conflicts[0].message)
        mesh_shape(other.config.infra, other.world_size, other.ranks_per_node)
        return Variant(other, estimate(other), change)
    except ConfigError as error:
        return Variant(other, overrides=change, reason=str(error))


def as_overrides(change: Mapping[str, Any]) -> str:
    """A change as a shell's command line takes it."""
    return shlex.join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in change.items()
    )


def variants(job: Job) -> list[Variant]:
    """The rows of the table, with engine and batch of `job`; a configuration that is none of them comes first."""
    changes = list(settings(job))
    return [variant(job, change) for change in (changes if {} in changes else [{}, *changes])]


def smallest_variants(job: Job) -> list[Variant]:
    """The settings that need least of a device: everything sharded and recomputed, micro-batches of 1, each offload."""
    smallest, reduces = batches(job)[1], ENGINES[job.engine].reduction_field
    if reduces is not None and not attrgetter(reduces)(job.config):
        smallest[reduces] = True
    return [variant(job, setting(job, "zero3", offload, "full") | smallest) for offload in _offloads(job)]


def _offloads(job: Job) -> Mapping[str, tuple[str, str]]:
    """The offloads of the table. Where parameters are the master weights (`merges_settings`), they go with these."""
    if ENGINES[job.engine].merges_settings:
        return {name: places for name, places in OFFLOADS.items() if places[1] == "none"}
    return OFFLOADS | (_DISK_OFFLOADS if job.config.infra.nvme_path is not None else {})


def settings(job: Job) -> Iterator[Change]:
    """The changes of `job` that make the rows of the table; settings that are the same have one row."""
    stages: tuple[str, ...] = (*STAGES, *HYBRID_STAGES) if job.world_size > job.ranks_per_node else STAGES
    if ENGINES[job.engine].merges_settings:  # gradients are scattered as they are reduced: zero1 is zero2
        stages = tuple(stage for stage in stages if stage != "zero1")
    return (setting(job, *row) for row in itertools.product(stages, _offloads(job), ("none", "full")))


def setting(job: Job, stage: str, offload: str, checkpointing: str) -> Change:
    """The change that makes `job` shard, offload and recompute so, and frees contradicting fields; empty for none."""
    optimizer, params = (OFFLOADS | _DISK_OFFLOADS)[offload]
    wanted: Change = {
        "infra.sharding_stage": stage,
        "infra.offload_optimizer": optimizer,
        "infra.offload_params": params,
        "training.activation_checkpointing": checkpointing,
    }
    if all(attrgetter(name)(job.config) == value for name, value in wanted.items()):
        return {}
    if stage not in HYBRID_STAGES:
        wanted["infra.hybrid_shard_size"] = None
    # Under `auto` the change may undo what only this engine could do; `ddp` is zero0.
    kind = job.config.infra.distributed_type
    if job.engine != next(iter(ENGINES)) if kind == "auto" else stage != "zero0":
        wanted["infra.distributed_type"] = job.engine
    return {name: value for name, value in wanted.items() if value != attrgetter(name)(job.config)}


def offload_of(job: Job) -> str | None:
    """Name what `job` offloads, or None where the table has no word for it (parameters alone)."""
    placed = (job.config.infra.offload_optimizer, job.config.infra.offload_params)
    return next((name for name, places in (OFFLOADS | _DISK_OFFLOADS).items() if places == placed), None)


def batches(job: Job) -> dict[int, Change]:
    """The changes to the micro-batches, the smallest first, that keep the global batch."""
    configured = job.config.training.micro_batch_size
    sequences = configured * job.gradient_accumulation_steps
    # Set even where a global_batch_size decides it: that may be this run's own, of `auto`, and not the user's.
    name, ranks = "training.gradient_accumulation_steps", 1
    if job.config.data.num_lanes:
        name, ranks = "data.num_lanes", job.world_size
    found: dict[int, Change] = {
        size: {"training.per_device_train_batch_size": size, name: sequences // size * ranks}
        for size in range(1, sequences + 1)
        if sequences % size == 0
    }
    return found | {configured: {}}


def recommend(job: Job, fits: Fits) -> Variant | None:
    """The first setting of `job` and its engine that fits, with its largest micro-batch and the same global batch."""
    data, training = job.config.data, job.config.training
    kept: list[Change] = [{}, {"training.activation_offload": False}] if training.activation_offload else [{}]
    wanted = list(_combined(settings(job), kept, _reductions(job)))
    efficient = -(-EFFICIENT_TOKENS // (data.max_encoder_length + data.max_decoder_length))
    for smallest in dict.fromkeys((min(training.micro_batch_size, efficient), 1)):
        # A whole step in one micro-batch leaves out all that accumulation needs, so it may fit where smaller ones fail.
        sized = [batch for size, batch in batches(job).items() if size >= smallest]
        candidates = itertools.product(wanted, filter(None, (sized[-1:], sized[:-1])))
        for change, group in sorted(candidates, key=lambda each: _cost(changed(job, each[1][0]), each[0])):
            # From the smallest: most settings that fail do so at once.
            if fitting := list(itertools.takewhile(fits, (variant(job, change | batch) for batch in group))):
                return fitting[-1]
    return None


def faster(job: Job, fits: Fits) -> Variant | None:
    """The fastest setting of the table that fits, at the batch of `job`; None where that is the one `job` has."""
    costs = [(cost, change) for change in settings(job) if (cost := _cost(job, change)) < _cost(job, {})]
    return next(filter(fits, (variant(job, change) for _, change in sorted(costs, key=lambda each: each[0]))), None)


def nearest(job: Job, fits: Fits, count: int = 3) -> list[Variant]:
    """The first `count` changes to `job` that need less and fit; fewer where no more do.

    They differ in kind: none changes all that an earlier one changes, and more. Where these are too few, others follow
    that leave clearly more room.
    """
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
    """Sort changes, the most desirable first: what they offload, how they add up, the time they cost, how much is new.

    The time is a share of a step's; its figures are assumed, for the order only. A network between nodes is an order of
    magnitude slower. What does not exist may come anywhere, as it fits nowhere.
    """
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
    """Every combination of the choices' changes."""
    for parts in itertools.product(*choices):
        yield {name: value for part in parts for name, value in part.items()}


def _reductions(job: Job) -> list[Change]:
    """Reducing once a step and after every micro-batch, for an engine that leaves the choice."""
    name = ENGINES[job.engine].reduction_field
    return [{}, {name: not attrgetter(name)(job.config)}] if name and job.gradient_accumulation_steps > 1 else [{}]


def _smaller(job: Job) -> Iterator[Change]:
    """Changes to `job` that need less memory, alone and together; none shards, offloads or recomputes less."""
    training, stage, chunk = job.config.training, job.config.infra.sharding_stage, job.config.model.loss_chunk_tokens
    stages = STAGES[STAGES.index(stage) :] if stage in STAGES else ()
    offloads = list(OFFLOADS)[list(OFFLOADS).index(offload_of(job) or "optimizer") :]
    sharing = itertools.product(stages, offloads, dict.fromkeys((training.activation_checkpointing, "full")))
    evaluating: Change = {"training.per_device_eval_batch_size": 1}
    # In chunks of fewer than 128 tokens the head's matrix products are too small to be fast.
    smaller_chunk: Change = {"model.loss_chunk_tokens": max(128, chunk // 4)}
    choices = (
        [{}, evaluating] if training.per_device_eval_batch_size > 1 else [{}],
        [{}, smaller_chunk] if chunk > 128 else [{}],
        [change for change in _reductions(job) if True in change.values() or not change],
        [batch for size, batch in batches(job).items() if size <= training.micro_batch_size],
        [{}, *filter(None, (setting(job, *row) for row in sharing))],
    )
    return filter(None, _combined(*choices))
