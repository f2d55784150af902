"""Memory of DeepSpeed 0.19.8 on a rank for parameters, gradients and optimizer, in each part of a step.

Every term names the place in deepspeed/runtime/ that makes the tensor. Collectives of optimizer steps need nothing:
stages 1 and 2 gather the new weights in place (utils.py all_gather_dp_groups). docs/memory.md has tables."""

from collections import Counter
from functools import lru_cache, partial
from math import ceil, prod
from typing import Any

from ds_encdec.base.types import ConfigError
from ds_encdec.engine.deepspeed.json import render_deepspeed_json
from ds_encdec.memory.breakdown import Breakdown, Count, EngineMemory, HostBreakdown, power_of_two
from ds_encdec.memory.job import Job, Parameters

# Elements that are all-reduced at once if nothing is sharded: engine.py MEMORY_OPT_ALLREDUCE_SIZE.
_ALL_REDUCE_ELEMENTS = 500_000_000
_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
# DeepSpeed's defaults of sizes that a JSON may leave out (runtime/zero/config.py).
_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "zero_hpz_partition_size": 1,
}


def zero_memory(job: Job) -> EngineMemory:
    """Return the memory of `job` on the rank with the most. Raises ConfigError for an impossible JSON."""
    s = _Settings(job)
    memory = (_replicated if s.stage == 0 or s.is_bf16_optimizer else _sharded if s.stage == 3 else _partitioned)(s)
    on_device = 0 if s.offloads_optimizer else s.states
    states = Breakdown(
        weights=0 if s.offloads_parameters else s.weight * s.weight_partition,  # bit16_groups_flat, lp_param_buffer
        # fp32_groups(_flat), single_partition_of_fp32_groups, fp32_partitioned_groups_flat; and Adam's moments
        master_weights=s.master * on_device,
        optimizer=s.moments * s.moment * on_device,
    )
    return memory._replace(
        resting=states + memory.resting,
        host=_host(s),
        reduces_every_micro_batch=s.stage == 2 and s.accumulates,
        sums_in_16_bits=s.accumulation < 4 and s.accumulates,
        # torch's own, DeepSpeed's copy of it (utils/groups.py, _clone_world_group), and hpZ's parts of a node.
        communicators=2 + (s.number["zero_hpz_partition_size"] > 1),
    )


def swapped_bytes(job: Job) -> float:
    """Return the bytes of optimizer states on each node's disk (`infra.offload_optimizer: nvme`), or 0."""
    if job.config.infra.offload_optimizer != "nvme":
        return 0.0
    s = _Settings(job)  # weights, moments, and the gradients of a step: swap_params_info
    return (s.master + s.moments * s.moment + s.master) * s.partition * job.ranks_per_node


class _Settings:
    """One rank's share of a run under DeepSpeed, in the terms of its source. Sizes are elements. `weight`,
    `accumulation`, `communication`, `master`, `moment`: bytes of a number of the parameters, the accumulated gradients,
    the gradients in a collective, the optimizer's weights, and each moment. `each`: of the gradients in a `bucket`;
    `reduced`: of their flat copies in allreduce_bucket. `overlaps`: reductions run beside the backward pass.
    `accumulates`: earlier micro-batches leave gradients. `number`: the JSON's by key of `_DEFAULTS`. `gathers_layers`:
    stage 3 gathers and reduces a layer at once (leaf_module).

    `sizes`, `trained_sizes`: number of parameters by size; `largest`: of the trained ones. `weight_partition`,
    `partition`: a rank's part of all and of the trained parameters (stage 3 cuts each of them, stages 1 and 2 each
    group). `states`: parameters in the rank's optimizer. `is_compact`: stages 1 and 2 accumulate the partition in
    float32 (_use_compact_grad_partition_buffer). `kept`: bytes of reduced gradients that stay on the device: that
    partition, or else in full the parameters that it touches (`owned`, grads_in_partition)."""

    def __init__(self, job: Job) -> None:
        rendered = render_deepspeed_json(
            job.config,
            world_size=job.world_size,
            gradient_accumulation_steps=job.gradient_accumulation_steps,
            device=job.device,
            ranks_per_node=job.ranks_per_node,
        )
        zero = rendered["zero_optimization"]
        self.number = {key: _number(key, value) for key, value in (_DEFAULTS | zero).items() if key in _DEFAULTS}
        ranks, self.offload = job.world_size, zero.get("offload_optimizer", {})
        self.job, self.parameters, self.trainable = job, job.parameters, job.trainable_parameters
        self.stage: int = zero["stage"]
        self.offloads_optimizer: bool = self.offload.get("device", "none") != "none"
        self.offloads_parameters: bool = zero.get("offload_param", {}).get("device", "none") != "none"
        self.swaps = self.offload.get("device") == "nvme"
        self.accumulates = job.gradient_accumulation_steps > 1

        self.weight = job.compute_bytes
        self.accumulation = _bytes(rendered.get("data_types", {}), "grad_accum_dtype", self.weight)
        self.communication = _bytes(rendered, "communication_data_type", self.weight)
        is_low = rendered["bf16"].get("bf16_master_weights_and_grads", False)  # those of fp16 are refused
        self.moment, self.moments = 2 if is_low and self.stage > 0 else 4, job.moments[0]
        self.master = self.moment if self.stage or self.weight < 4 else 0
        # engine.py _do_optimizer_sanity_check
        self.is_bf16_optimizer = (
            self.stage == 1 and job.config.training.bf16 and self.accumulation == 4 and not self.offloads_optimizer
        )
        self.each = self.accumulation if self.stage == 1 else self.weight
        self.reduced = self.each + (self.communication if self.communication != self.each else 0)

        self.sizes, self.trained_sizes = (
            Counter(map(prod, shapes.values())) for shapes in (job.model.shapes, job.model.trained)
        )
        self.largest = max(self.trained_sizes)
        self.weight_partition, self.partition = self.parameters, 2 * ceil(self.trainable / (2 * ranks))
        if self.stage == 3:
            self.weight_partition, self.partition = (
                sum(times * ceil(size / ranks) for size, times in sizes.items())
                for sizes in (self.sizes, self.trained_sizes)
            )
        self.states = self.partition if self.stage else self.trainable
        self.is_compact = self.accumulation == 4 and self.weight != 4
        self.owned = _owned(job.model, ranks)
        whole = 0 if self.offloads_optimizer else self.weight * self.owned
        self.kept = self.accumulation * self.partition if self.is_compact else whole

        self.sub_group = min(self.partition, self.number["sub_group_size"] + ceil(self.largest / ranks))
        self.gathers_layers = any(zero.get("leaf_module", {}).values())
        self.overlaps = bool(zero.get("overlap_comm", self.stage == 3))
        self.bucket = self.number["reduce_bucket_size"]

    def largest_of(self, unit: Count) -> int:
        """Return the elements of the largest trained parameter in a layer or embedding of `unit` parameters."""
        return max((size for size in self.trained_sizes if size <= unit.trained), default=unit.trained)

    def whole_gradients(self, bytes_each: int, done: Count, unit: Count) -> float:
        """Return the bytes of gradients that stay until the step, with the one that autograd is adding."""
        if self.accumulates:
            return bytes_each * self.trainable + self.weight * self.largest_of(unit)
        return bytes_each * min(done.trained + unit.trained, self.trainable)

    def is_filled(self, done: Count, unit: Count) -> bool:
        """Return whether a bucket was full, and reduced, by then. The embedding's gradient comes last of all."""
        return done.trained + (0 if unit.all == self.job.embedding_parameters else unit.trained) > self.bucket

    def is_reducing(self, done: Count, unit: Count, *, behind: bool) -> bool:
        """Return whether a bucket may be reduced at the worst moment of `unit`, its first gradient, or `behind`."""
        is_embedding = unit.all == self.job.embedding_parameters
        if behind or self.overlaps or self.waiting_head(done):
            return self.is_filled(done, unit) and (self.overlaps or not is_embedding)
        return done.trained % self.bucket + (0 if is_embedding else self.largest_of(unit)) > self.bucket

    def waiting_head(self, done: Count) -> int:
        """Return the elements of an untied output layer that no bucket can hold; the next gradient reduces it."""
        head = self.job.embedding_parameters
        return head if done.trained == head > self.bucket and not self.job.sizes.tie_word_embeddings else 0


def _number(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"zero_optimization.{key} = {value!r} in infra.deepspeed_extra: give a number")
    return int(value)


def _bytes(block: dict[str, Any], key: str, default: int) -> int:
    dtype = block.get(key)
    if dtype is not None and dtype not in _BYTES:
        raise ConfigError(f"{key} = {dtype!r} in infra.deepspeed_extra: give one of {', '.join(_BYTES)}")
    return default if dtype is None else _BYTES[dtype]


@lru_cache
def _owned(model: Parameters, ranks: int) -> int:
    """Return the elements of all trained parameters that a partition touches, on the rank with the most."""
    by_rank, share, start = [0] * ranks, model.of("").trained / ranks, 0
    for size in map(prod, model.trained.values()):
        for rank in range(int(start / share), min(int((start + size - 1) / share), ranks - 1) + 1):
            by_rank[rank] += size
        start += size
    return max(by_rank)


def _replicated(s: _Settings) -> EngineMemory:
    """Stage 0: torch's own optimizer in float32, else fp16/unfused_optimizer.py. Also bf16_optimizer.py, stage 1 in
    bf16 that accumulates in float32: states are partitioned, and float32 gradients of all parameters stay beside p.grad
    (fp32_groups_gradients_flat)."""
    gradients = float(s.weight * s.trainable)  # p.grad, until the step
    # engine.py allreduce_bucket: a flat copy, also on a single rank; two in two dtypes.
    reduced = min(s.trainable, _ALL_REDUCE_ELEMENTS + s.largest) * (s.reduced if s.is_bf16_optimizer else s.weight)
    return EngineMemory(
        resting=Breakdown(gradients=s.accumulation * s.trainable * s.is_bf16_optimizer),
        forward=Breakdown(gradients=gradients * s.accumulates),
        backward=lambda done, unit: Breakdown(gradients=s.whole_gradients(s.weight, done, unit)),
        # fp32_param.grad, before p.grad goes
        step=Breakdown(gradients=gradients + 4 * s.trainable * (s.weight < 4 and not s.is_bf16_optimizer)),
        last_reduction=Breakdown(gradients=gradients, communication=reduced),
    )


def _partitioned(s: _Settings) -> EngineMemory:
    """Stages 1 and 2: zero/stage_1_and_2.py. Stage 2 reduces every micro-batch's gradients as they come
    (partition_grads). Under stage 1 they stay whole, in p.grad or p.grad_accum, until the last micro-batch: with
    overlap_comm they are reduced in its backward pass, else after it (reduce_gradients). p.grad is a bucket's view."""
    buckets, reduces_late = s.each * s.bucket * (1 + s.overlaps), s.stage == 1 and not s.overlaps  # setup_buckets
    accumulates_whole, accumulates_parts = (s.accumulates and s.stage == stage for stage in (1, 2))
    # The partition comes with the first reduction and stays; where it is not compact, each micro-batch makes one of its
    # own: grads_in_partition, beside all_grad_tensors of the earlier ones.
    filled, unfilled = (s.kept * min(n + accumulates_parts, 1 if s.is_compact else 2) for n in (1, 0))

    def backward(done: Count, unit: Count, *, behind: bool = False) -> Breakdown:
        if reduces_late:
            return Breakdown(gradients=s.whole_gradients(s.each, done, unit), communication=buckets)
        head, largest = s.waiting_head(done), s.largest_of(unit)
        waiting = s.each * max(s.trainable - done.trained, 0) * accumulates_whole
        gradients = waiting + s.weight * largest + s.each * head + (filled if s.is_filled(done, unit) else unfilled)
        if s.is_reducing(done, unit, behind=behind):
            return _reducing(s, gradients, buckets, max(largest, head), adds=s.stage == 2)
        return Breakdown(gradients=gradients, communication=buckets)

    # With offload, when it is reduced: the largest gradient of a partition in float64, for its norm (get_norm_dtype).
    norm = 8.0 * min(s.largest, s.partition)
    # At the end of the backward pass: the bucket that the embedding fills, it alone, or all if one holds it.
    held = filled + (s.each * s.largest if s.trainable > s.bucket else 0)
    if reduces_late:
        held = s.kept + s.each * max(s.trainable - s.bucket, 0)
    last = _reducing(s, held, buckets, s.largest, adds=not reduces_late)
    if s.offloads_optimizer and not reduces_late:
        last = max(last, Breakdown(gradients=held + norm, communication=buckets), key=lambda moment: moment.total)
    # DeepSpeedZeroOptimizer.step: the partition's gradients flat in the master weights' dtype, and where they are not
    # compact before .to(), which copies only into another dtype. The second group's tensors keep the common
    # grads_in_partition while the first group is updated.
    flat = 0 if s.is_compact or s.master == s.weight else s.weight
    copied = 0 if s.is_compact and s.master == s.accumulation else (flat + s.master) * s.partition
    return EngineMemory(
        # temp_grad_buffer_for_gpu_offload
        resting=Breakdown(communication=s.weight * s.largest * s.offloads_optimizer),
        # Under stage 1 a micro-batch that reduces nothing leaves its buckets to the next.
        forward=Breakdown(
            gradients=s.kept * accumulates_parts + s.each * s.trainable * accumulates_whole,
            communication=buckets * accumulates_whole,
        ),
        backward=backward,
        behind=partial(backward, behind=True),
        step=Breakdown(gradients=s.kept + (0 if s.offloads_optimizer else copied)),
        last_reduction=last,
        # The weights are put together into bit16_groups_flat where there is room, else on the host.
        build=Breakdown(weights=s.weight * (s.parameters + s.trainable)),
    )


def _reducing(s: _Settings, gradients: float, buckets: float, largest: int, *, adds: bool) -> Breakdown:
    """Add a bucket in a reduction. `adds`: the gradient of one parameter exists in the partition's dtype, too."""
    if adds and s.is_compact and s.communication != s.accumulation:
        gradients += s.accumulation * min(largest, s.partition)
    copies = s.reduced * min(max(s.bucket, largest), s.trainable)
    return Breakdown(gradients=gradients, communication=buckets + copies)


def _sharded(s: _Settings) -> EngineMemory:
    """Stage 3: zero/stage3.py, and the gathering of parameters in zero/partitioned_param_coordinator.py."""
    number, ranks, on_device = s.number, s.job.world_size, 0 if s.offloads_optimizer else s.partition
    # hpZ's second partition, from the first forward pass to the end of the step: ds_secondary_tensor.
    secondary_ranks = number["zero_hpz_partition_size"]
    secondary = s.weight * s.parameters / secondary_ranks if secondary_ranks > 1 else 0.0
    # Parameters so small that they are whole on every rank. One rank's are no tensors of their own (NoGatherHandle).
    persistent = sum(
        size * times for size, times in s.sizes.items() if size <= number["stage3_param_persistence_threshold"]
    )
    is_gathered = ranks > 1 or (s.offloads_parameters and s.job.device != "cpu")
    # The prefetcher runs ahead, a bucket for each module entered, and what it has passed on its way from a use in the
    # forward pass to the next is not released (__params_to_release, fetch_sub_module).
    layer = max(unit.all for unit in s.job.model.layers.values()) if s.gathers_layers else 0
    # The way back counts for the distance, except for leaves (__params_to_release).
    distance = number["stage3_max_reuse_distance"] // (1 if s.gathers_layers else 2)
    live = max(number["stage3_max_live_parameters"], distance)
    live += number["stage3_prefetch_bucket_size"] + max(*s.sizes, layer)
    bucket = min(s.bucket, s.trainable)
    # A bucket on its way is put together by rank (reduce_scatter_coalesced); itself it is in the collective's dtype.
    scattered = s.communication * bucket + _scattering(s, bucket, alone=False)

    def gathered(done: int) -> float:
        """Return the bytes of whole parameters in a backward pass after `done`; the last prefetch exceeds the limit."""
        return secondary + s.weight * max(min(s.parameters - persistent - done, live), 0) * is_gathered

    def backward(done: Count, unit: Count, *, behind: bool = False) -> Breakdown:
        head = s.waiting_head(done)
        on_its_way = (scattered + _scattering(s, head, alone=True)) * s.is_reducing(done, unit, behind=behind)
        return Breakdown(
            # reduce_leaf_module_grads: those of a leaf together, when it has been gone through
            gradients=s.weight * ((unit.trained if s.gathers_layers else s.largest_of(unit)) + head),
            communication=gathered(done.all) + on_its_way,
        )

    # At the end of the backward pass, when the embedding is still gathered: the bucket that it fills, or it alone.
    last = max(scattered, _scattering(s, s.largest, alone=True) if s.largest > s.bucket else 0)
    # _prepare_fp32_grad_for_sub_group: the gradients of one sub-group, which the parameter that fills it closes, flat,
    # in the master weights' dtype.
    prepared = s.sub_group * (s.accumulation + (0 if s.master == s.accumulation else s.master))
    return EngineMemory(
        resting=Breakdown(
            gradients=s.accumulation * on_device,  # grad_partitions_flat_buffer
            # persistent_parameters, gathered in _post_step; ipg_buckets
            communication=s.weight * persistent * is_gathered + s.communication * s.bucket,
        ),
        forward=Breakdown(communication=gathered(0)),
        backward=backward,
        behind=partial(backward, behind=True),
        step=Breakdown(gradients=0 if s.offloads_optimizer else prepared, communication=secondary),
        keeps_frozen_inputs=True,  # zero/linear.py: LinearFunctionForZeroStage3
        frozen_shares=ranks,
        gathers=live * is_gathered,
        offloads_frozen=s.offloads_parameters,
        last_reduction=Breakdown(
            gradients=s.weight * s.largest if s.trainable > s.bucket else 0,
            communication=last + gathered(s.parameters - persistent - s.largest),
        ),
    )


def _scattering(s: _Settings, elements: int, *, alone: bool) -> float:
    """Return the bytes beyond a collective's input. `alone`: of a parameter that bypasses the bucket."""
    ranks, is_cpu = s.job.world_size, s.job.device == "cpu"
    return (
        # a dtype that the collective does not take: __avg_scatter_grads
        s.communication * elements * (alone and s.communication != s.weight)
        + s.accumulation * elements / ranks * (s.communication != s.accumulation)  # after it
        + s.communication * elements * (is_cpu and ranks > 1)  # torch's ProcessGroupGloo works on a copy
        # partition_grads: one parameter's, on the device to be added
        + s.accumulation * min(elements, s.largest) / ranks * (s.offloads_optimizer and not is_cpu)
    )


def _host(s: _Settings) -> HostBreakdown:
    """Return the offloaded states, and the copies for a background save: the mean of the first node's ranks. Each rank
    saves its own states and, at stage 3, frozen weights (FROZEN_PARAM_FRAGMENTS); rank 0 saves whole ones."""
    on_gpu, on_node, infra = s.job.device != "cpu", s.job.ranks_per_node, s.job.config.infra
    states = parameters = save = 0.0
    if s.offloads_optimizer:
        # fp32_partitioned_groups_flat[i].grad and grad_partitions_flat_buffer; of stages 1 and 2
        # single_partition_of_fp32_groups and their .grad, param_buffer_of_bit16_for_cpu_offload_groups, and
        # temp_grad_buffer_for_cpu_offload.
        buffers = [s.master * s.partition, s.accumulation * s.partition]
        if s.swaps:
            # grad_partitions_flat_buffer; PartitionedOptimizerSwapper's, which it locks by itself; and the moments of
            # a sub-group that was never stepped, until they have been written
            buffers, locked = [s.accumulation * s.partition], int(s.offload.get("buffer_count", 0)) * s.master
            states = (locked + s.moments * s.moment) * s.sub_group
        elif s.stage < 3:
            buffers = [*2 * [s.master * s.partition], s.weight * s.partition, s.weight * s.largest]
        states += sum(map(power_of_two if s.offload.get("pin_memory") and on_gpu else int, buffers))
        states += 0 if s.swaps else (s.moments * s.moment + s.master * (s.stage == 3)) * s.partition
        if s.stage == 2 and s.accumulates and not s.is_compact and s.master == 4:
            # accumulated_grads_in_cpu: one buffer for each parameter that the partition touches
            states += s.weight * s.owned
    if s.offloads_parameters:
        # param_groups_fp16_flat_cpu_memory: pinned whatever the configuration says
        parameters = (power_of_two if on_gpu else float)(s.weight * s.weight_partition)
    if s.job.config.training.async_save:
        saves_frozen = s.job.config.model.lora is None  # else adapters alone
        weights, frozen = s.weight * (s.parameters if saves_frozen else s.trainable), 0
        if s.stage == 3:
            weights, frozen = 0, s.weight * (s.weight_partition - s.partition) * saves_frozen
        copied = power_of_two if infra.pin_memory and on_gpu else float
        each = sum(map(copied, (s.master * s.states, *s.moments * [s.moment * s.states], frozen)))
        save = (copied(weights) + each * (min(s.job.world_size, on_node) if s.stage else 1)) / on_node
    return HostBreakdown(states=states, parameters=parameters, save=save)
