"""The memory that DeepSpeed 0.19.8 holds on a rank for parameters, gradients and optimizer in the parts of a step.

Every term names the place in deepspeed/runtime/ that makes the tensor. Collectives of optimizer steps need nothing:
stages 1 and 2 gather the new weights in place (utils.py all_gather_dp_groups). Norms and overflow checks look at one
parameter at a time, which is the worst part of a step of stages 1 and 2 alone. docs/memory.md has the
formulas in tables. Two rare settings are estimated at their defaults, and remarked on: zero_settings.not_estimated.
"""

from __future__ import annotations

import dataclasses

from ds_encdec.memory.breakdown import Breakdown, EngineMemory, HostBreakdown
from ds_encdec.memory.job import Job
from ds_encdec.memory.zero_settings import ZeroSettings, power_of_two, zero_settings

_ALL_REDUCE_ELEMENTS = 500_000_000
"""Elements that are all-reduced at once where nothing is sharded: engine.py MEMORY_OPT_ALLREDUCE_SIZE."""


def zero_memory(job: Job) -> EngineMemory:
    """The memory of `job` under DeepSpeed. See EngineMemory; `forward`, `backward` and `step` come on top of `resting`.

    Where ranks differ, it is the rank with the most.

    Raises ConfigError for settings of which no JSON for DeepSpeed can be made.
    """
    s = zero_settings(job)
    # engine.py _do_optimizer_sanity_check
    is_bf16_optimizer = s.stage == 1 and job.config.training.bf16 and s.accumulation == 4 and not s.offloads_optimizer
    if s.stage == 0 or is_bf16_optimizer:
        memory = _replicated(s, is_bf16_optimizer=is_bf16_optimizer)
    else:
        memory = _sharded(s) if s.stage == 3 else _partitioned(s)
    return dataclasses.replace(
        memory,
        reduces_every_micro_batch=s.stage == 2 and s.accumulates,
        sums_in_16_bits=s.accumulation < 4 and s.accumulates,
    )


def _replicated(s: ZeroSettings, *, is_bf16_optimizer: bool) -> EngineMemory:
    """Stage 0: torch's own optimizer in float32, else fp16/fused_optimizer.py or fp16/unfused_optimizer.py.

    And stage 1 in bf16 that accumulates in float32, bf16_optimizer.py: float32 gradients of all parameters exist for
    good (fp32_groups_gradients_flat) beside p.grad, and the optimizer's states are partitioned.
    """
    states = s.partition if is_bf16_optimizer else s.trainable
    low_precision = s.weight < 4
    gradients = float(s.weight * s.trainable)  # p.grad, until the step
    # engine.py allreduce_bucket: a flat copy of up to so many elements, also on a single rank; two in two dtypes.
    reduced = min(s.trainable, _ALL_REDUCE_ELEMENTS + s.largest)
    step = gradients
    if not is_bf16_optimizer and low_precision:
        # fp32_param.grad; FP16_Optimizer.step makes these, and then the flat one, before p.grad goes.
        step += 4 * s.trainable * (1 if s.job.config.training.torch_adam else 2)
    tensors = (4 * states if low_precision else 0, s.moment * states, s.moment * states)
    return EngineMemory(
        resting=Breakdown(
            weights=s.weight * s.parameters,
            master_weights=tensors[0],  # fp32_groups(_flat)
            gradients=s.accumulation * s.trainable if is_bf16_optimizer else 0,
            optimizer=2 * s.moment * states,
        ),
        forward=Breakdown(gradients=gradients * s.accumulates),
        backward=lambda done, unit: Breakdown(gradients=_native_gradients(s, s.weight, done, unit)),
        step=Breakdown(gradients=step),
        host=HostBreakdown(
            save=_saved(s, s.weight * s.parameters, tensors, ranks=s.job.world_size if is_bf16_optimizer else 1)
        ),
        last_reduction=Breakdown(
            gradients=gradients,
            communication=reduced * (_reduced_bytes(s, s.accumulation) if is_bf16_optimizer else s.weight),
        ),
    )


def _native_gradients(s: ZeroSettings, bytes_each: int, done: int, unit: int) -> float:
    """Gradients that stay in the parameters until the step, with the one that autograd is just adding."""
    in_work = s.weight * s.largest_of(unit)
    return bytes_each * s.trainable + in_work if s.accumulates else bytes_each * min(done + unit, s.trainable)


def _larger(*parts: Breakdown) -> Breakdown:
    return max(parts, key=lambda part: part.total)


# --------------------------------------------------------------------------------------------------- stages 1 and 2


def _partitioned(s: ZeroSettings) -> EngineMemory:
    """zero/stage_1_and_2.py.

    Stage 2 reduces every micro-batch's gradients as they come (partition_grads). Under stage 1 they stay whole, in
    p.grad or p.grad_accum, and are reduced in the last micro-batch: with overlap_comm during its backward pass, and
    otherwise after it (reduce_gradients). Each goes as soon as it is reduced, while the partition's are allocated with
    the first of them. What is in a bucket is nowhere else: p.grad is a view of it then.
    """
    each = s.weight if s.stage == 2 else s.accumulation
    buckets = each * s.bucket * s.buffers  # IPGBucket.buffer, made by setup_buckets
    kept = _gradient_partition(s)

    def partition(*, is_filled: bool) -> float:
        """It comes with the first reduction and stays; not compact, each micro-batch makes one of its own.

        These are grads_in_partition, beside all_grad_tensors of the earlier micro-batches.
        """
        if s.stage == 1:
            return kept * is_filled
        return kept * (is_filled or s.accumulates) if _is_compact(s) else kept * (is_filled + s.accumulates)

    def backward(done: int, unit: int) -> Breakdown:
        if s.stage == 1 and not s.overlaps:
            return Breakdown(gradients=_native_gradients(s, each, done, unit), communication=buckets)
        waiting = each * max(s.trainable - done, 0) if s.stage == 1 and s.accumulates else 0
        head, largest = _waiting_head(s, done), s.largest_of(unit)
        gradients = waiting + s.weight * largest + each * head + partition(is_filled=_is_filled(s, done, unit))
        if not _is_reducing(s, done, unit):
            return Breakdown(gradients=gradients, communication=buckets)
        largest = max(largest, head)
        gradients += _summand(s, largest) if s.stage == 2 else 0
        return Breakdown(gradients=gradients, communication=buckets + _reduction(s, each, largest))

    if s.stage == 1 and not s.overlaps:
        outside = each * max(s.trainable - s.bucket, 0)
        last = Breakdown(gradients=outside + kept, communication=buckets + _reduction(s, each, s.largest))
    else:
        last = _last_reduction(s, each, partition(is_filled=True))
    weights = s.weight * s.parameters
    if s.offloads_optimizer:
        resting = Breakdown(weights=weights, communication=s.weight * s.largest)  # temp_grad_buffer_for_gpu_offload
    else:  # bit16_groups_flat, single_partition_of_fp32_groups, Adam's moments
        resting = Breakdown(
            weights=weights, master_weights=s.master * s.partition, optimizer=2 * s.moment * s.partition
        )
    # Under stage 1 a micro-batch that reduces nothing leaves its buckets to the next.
    earlier = (
        Breakdown(gradients=kept) if s.stage == 2 else Breakdown(gradients=each * s.trainable, communication=buckets)
    )
    return EngineMemory(
        resting=resting,
        forward=earlier if s.accumulates else Breakdown(),
        backward=backward,
        step=_partitioned_step(s),
        host=_partitioned_host(s),
        last_reduction=last,
        # The weights are put together into bit16_groups_flat where there is room, else on the host.
        build=Breakdown(weights=2 * weights),
    )


def _is_compact(s: ZeroSettings) -> bool:
    """Return whether a rank accumulates its partition in float32: _use_compact_grad_partition_buffer."""
    return s.accumulation == 4 and s.weight != 4


def _gradient_partition(s: ZeroSettings) -> float:
    """Bytes that a rank keeps of reduced gradients, on the device also with offload where it is compact.

    `averaged_gradients` as one flat float32 partition, or `grads_in_partition`: the parameters that the partition
    touches, in full.
    """
    if _is_compact(s):
        return s.accumulation * s.partition
    return 0.0 if s.offloads_optimizer else s.weight * s.owned


def _reduced_bytes(s: ZeroSettings, bytes_each: int) -> int:
    """Bytes of an element in allreduce_bucket: a flat copy, and another where the collective has a dtype of its own."""
    return bytes_each + (s.communication if s.communication != bytes_each else 0)


def _reduction(s: ZeroSettings, bytes_each: int, largest: int) -> float:
    """A bucket's slices, put together to be reduced; of a parameter larger than a bucket, all of it.

    With offload such a gradient is cloned before (reduce_independent_p_g_buckets_and_remove_grads): no more than this.
    """
    return _reduced_bytes(s, bytes_each) * min(max(s.bucket, largest), s.trainable)


def _summand(s: ZeroSettings, largest: int) -> float:
    """One parameter's reduced gradient in the dtype of the partition: _add_to_grad_partition_buffer."""
    if not _is_compact(s) or s.communication == s.accumulation:
        return 0.0
    return s.accumulation * min(largest, s.partition)


def _is_filled(s: ZeroSettings, done: int, unit: int) -> bool:
    """Return whether a bucket has been full by then in this micro-batch, and so was reduced.

    The embedding's gradient comes to the buckets last of all: what that leads to is in `_last_reduction`.
    """
    return done + (0 if unit == s.job.embedding_parameters else unit) > s.bucket


def _is_reducing(s: ZeroSettings, done: int, unit: int) -> bool:
    """Return whether a bucket may be on its way while the backward pass of `unit` is at its worst."""
    return _is_filled(s, done, unit) and (s.overlaps or unit != s.job.embedding_parameters)


def _waiting_head(s: ZeroSettings, done: int) -> int:
    """Elements of an untied output layer that no bucket can hold: reduced when the gradient after it comes."""
    head = s.job.embedding_parameters
    return head if done == head > s.bucket and not s.job.sizes.tie_word_embeddings else 0


def _last_reduction(s: ZeroSettings, bytes_each: int, kept: float) -> Breakdown:
    """At the end of the backward pass: the bucket that the embedding fills, it alone, or all if one holds it."""
    held = kept + (bytes_each * s.largest if s.trainable > s.bucket else 0)
    buckets = bytes_each * s.bucket * s.buffers
    reducing = Breakdown(
        gradients=held + _summand(s, s.largest), communication=buckets + _reduction(s, bytes_each, s.largest)
    )
    if not s.offloads_optimizer:
        return reducing
    return _larger(reducing, Breakdown(gradients=held + _in_float64(s), communication=buckets))


def _in_float64(s: ZeroSettings) -> float:
    """The largest gradient of a partition, to take its norm: get_norm_dtype. With offload when it is reduced."""
    return 8.0 * min(s.largest, s.partition)


def _partitioned_step(s: ZeroSettings) -> Breakdown:
    """DeepSpeedZeroOptimizer.step: norms, then the partition's gradients flat in the master weights' dtype."""
    held, master = _gradient_partition(s), s.master * s.partition
    if s.offloads_optimizer:
        return Breakdown(gradients=held)
    if _is_compact(s):
        copied = 0 if s.master == s.accumulation else master
    else:
        flat = 0 if s.master == s.weight else s.weight * s.partition  # before .to(), which else does not copy
        # The second group's tensors keep the common grads_in_partition while the first group is updated.
        copied = flat + master
    return Breakdown(gradients=held + max(_in_float64(s), copied))


def _partitioned_host(s: ZeroSettings) -> HostBreakdown:
    """The host's part of stages 1 and 2: partitions of float32 weights, moments, float32 gradients, and new weights."""
    save = _saved(s, s.weight * s.parameters, _optimizer_tensors(s), ranks=s.job.world_size)
    if not s.offloads_optimizer:
        return HostBreakdown(save=save)
    pinned = (
        s.master * s.partition,  # single_partition_of_fp32_groups
        s.master * s.partition,  # their .grad
        s.weight * s.partition,  # param_buffer_of_bit16_for_cpu_offload_groups
        s.weight * s.largest,  # temp_grad_buffer_for_cpu_offload
    )
    states = sum(map(s.pinned, pinned)) + 2 * s.moment * s.partition
    if s.stage == 2 and s.accumulates and not _is_compact(s) and s.master == 4:
        # accumulated_grads_in_cpu: one buffer for each parameter that the partition touches
        states += s.weight * s.owned
    return HostBreakdown(states=states, save=save)


# ---------------------------------------------------------------------------------------------------------- stage 3


def _sharded(s: ZeroSettings) -> EngineMemory:
    """zero/stage3.py, and the gathering of parameters in zero/partitioned_param_coordinator.py."""
    # hpZ's second partition, from the first forward pass to the end of the step: ds_secondary_tensor.
    secondary = s.weight * s.parameters / s.secondary_ranks if s.secondary_ranks > 1 else 0.0
    on_device = 0 if s.offloads_optimizer else s.partition

    def backward(done: int, unit: int) -> Breakdown:
        in_work = s.weight * (s.largest_of(unit) + _waiting_head(s, done))
        communication = secondary + _gathered(s, done)
        if _is_reducing(s, done, unit):
            communication += _scattered(s, s.bucket) + _scattering(s, _waiting_head(s, done), alone=True)
        return Breakdown(gradients=in_work, communication=communication)

    # At the end of the backward pass, when the embedding is still gathered: see `_last_reduction`.
    last = _scattered(s, s.bucket)
    if s.largest > s.bucket:
        last = max(last, _scattering(s, s.largest, alone=True))
    # _prepare_fp32_grad_for_sub_group: one sub-group's gradients, flat, in the master weights' dtype.
    converted = 0 if s.master == s.accumulation else s.master
    step = 0 if s.offloads_optimizer else (s.accumulation + converted) * s.sub_group
    return EngineMemory(
        resting=Breakdown(
            weights=0 if s.offloads_parameters else s.weight * s.weight_partition,  # lp_param_buffer
            master_weights=s.master * on_device,  # fp32_partitioned_groups_flat
            gradients=s.accumulation * on_device,  # grad_partitions_flat_buffer
            optimizer=2 * s.moment * on_device,
            # persistent_parameters, gathered in _post_step; ipg_buckets
            communication=(s.weight * s.persistent if _is_gathered(s) else 0) + s.communication * s.bucket,
        ),
        forward=Breakdown(communication=secondary + _gathered(s, 0)),
        backward=backward,
        step=Breakdown(gradients=step, communication=secondary),
        host=_sharded_host(s),
        last_reduction=Breakdown(
            gradients=s.weight * s.largest if s.trainable > s.bucket else 0,
            communication=secondary + last + _gathered(s, s.parameters - s.persistent - s.largest),
        ),
    )


def _is_gathered(s: ZeroSettings) -> bool:
    """Return whether whole parameters are tensors of their own: one rank's are its partition (NoGatherHandle)."""
    return s.job.world_size > 1 or (s.offloads_parameters and s.job.device != "cpu")


def _gathered(s: ZeroSettings, done: int) -> float:
    """Whole parameters in a backward pass that has left `done` behind (0: at the end of the forward pass).

    The prefetcher runs ahead until stage3_max_live_parameters are there. Beyond that limit there is what the last
    prefetch has begun and what the module in work needs; and while its parameters are used one after the other, the
    buffer that a prefetch was received in stays (__inflight_param_registry).
    """
    if not _is_gathered(s):
        return 0.0
    return s.weight * float(max(min(s.parameters - s.persistent - done, s.live), 0))


def _scattered(s: ZeroSettings, elements: int) -> float:
    """So many elements of a bucket on their way, put together by rank: reduce_scatter_coalesced.

    The bucket itself holds them in the collective's dtype.
    """
    elements = min(elements, s.trainable)
    return s.communication * elements + _scattering(s, elements, alone=False)


def _scattering(s: ZeroSettings, elements: int, *, alone: bool) -> float:
    """Beyond what goes into the collective; `alone`: of a parameter that goes past the bucket."""
    needed = 0.0
    if alone and s.communication != s.weight:  # a dtype that the collective does not take: __avg_scatter_grads
        needed += s.communication * elements
    if s.communication != s.accumulation:  # after it
        needed += s.accumulation * elements / s.job.world_size
    if s.job.device == "cpu" and s.job.world_size > 1:  # torch's ProcessGroupGloo works on a copy
        needed += s.communication * elements
    if s.offloads_optimizer and s.job.device != "cpu":  # partition_grads: one parameter's, on the device to be added
        needed += s.accumulation * min(elements, s.largest) / s.job.world_size
    return needed


def _sharded_host(s: ZeroSettings) -> HostBreakdown:
    """The host's part of stage 3."""
    states = parameters = 0.0
    if s.offloads_optimizer:
        # grad_partitions_flat_buffer, and fp32_partitioned_groups_flat[i].grad
        states = s.pinned(s.accumulation * s.partition) + s.pinned(s.master * s.partition)
        states += (s.master + 2 * s.moment) * s.partition
    if s.offloads_parameters:
        # param_groups_fp16_flat_cpu_memory: pinned whatever the configuration says
        num_bytes = s.weight * s.weight_partition
        parameters = power_of_two(num_bytes) if s.job.device != "cpu" else num_bytes
    # No weights but the frozen ones, which the optimizer does not have: FROZEN_PARAM_FRAGMENTS.
    tensors = (*_optimizer_tensors(s), s.weight * (s.weight_partition - s.partition))
    return HostBreakdown(states=states, parameters=parameters, save=_saved(s, 0, tensors, ranks=s.job.world_size))


# --------------------------------------------------------------------------------------------------------- saving


def _optimizer_tensors(s: ZeroSettings) -> tuple[float, ...]:
    """Bytes of what a rank saves of its optimizer: master weights and both moments."""
    return (s.master * s.partition, s.moment * s.partition, s.moment * s.partition)


def _saved(s: ZeroSettings, weights: float, tensors: tuple[float, ...], *, ranks: int) -> float:
    """Copies that a background save is written from (engine/deepspeed_zero.py), as the mean of the first node's ranks.

    Rank 0 saves the `weights`, and each of the first `ranks` ranks its optimizer's `tensors`.
    """
    if not s.job.config.training.async_save:
        return 0.0
    pin = s.job.config.infra.pin_memory and s.job.device != "cpu"
    on_node = s.job.ranks_per_node
    whole = power_of_two(weights) if pin else weights
    each = sum(power_of_two(tensor) if pin else tensor for tensor in tensors)
    return (whole + each * min(ranks, on_node)) / on_node
