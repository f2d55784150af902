"""What DeepSpeed 0.19.8 holds on a rank for parameters, gradients and optimizer at the moments of a step.

Every term names the place in deepspeed/runtime/ that makes the tensor. Collectives of optimizer steps need nothing:
stages 1 and 2 gather the new weights in place (utils.py all_gather_dp_groups). Norms and overflow checks look at one
parameter at a time, which is the worst moment of stages 1 and 2 alone. docs/memory.md has the principle.
"""

from __future__ import annotations

import dataclasses

from ds_encdec.memory.breakdown import Breakdown, EngineMemory, HostBreakdown
from ds_encdec.memory.job import Job
from ds_encdec.memory.zero_settings import ZeroSettings, power_of_two, zero_settings

_ALL_REDUCE_ELEMENTS = 500_000_000
"""What is all-reduced at once where nothing is sharded: engine.py MEMORY_OPT_ALLREDUCE_SIZE."""


def zero_memory(job: Job) -> EngineMemory:
    """Of `job` under DeepSpeed. See EngineMemory; `forward`, `backward` and `step` come on top of `resting`.

    Where ranks differ, it is the rank with the most.

    Raises ConfigError for what DeepSpeed's JSON cannot be rendered of.
    """
    settings = zero_settings(job)
    if settings.stage == 0:
        return _replicated(settings)
    if settings.stage == 3:
        return _stage_3(settings)
    if _has_bf16_optimizer(settings):
        return _bf16_optimizer(settings)
    memory = _stage_1(settings) if settings.stage == 1 else _stage_2(settings)
    # zero/stage_1_and_2.py: the weights are put together into bit16_groups_flat where there is room, else on the host.
    return dataclasses.replace(memory, build=Breakdown(weights=2 * settings.weight * settings.parameters))


# ---------------------------------------------------------------------------------------------------------- stage 0


def _replicated(s: ZeroSettings) -> EngineMemory:
    """DDP: torch's own optimizer in float32, fp16/fused_optimizer.py or fp16/unfused_optimizer.py otherwise."""
    low_precision = s.weight < 4
    gradients = s.weight * s.trainable  # p.grad, until the step
    # engine.py allreduce_bucket: a flat copy of up to so many elements, also on a single rank.
    reduction = s.weight * min(s.trainable, _ALL_REDUCE_ELEMENTS + s.largest)
    converted = 4 * s.trainable if low_precision else 0  # fp32_param.grad
    step = Breakdown(gradients=gradients + converted, optimizer=s.adam_temporaries(s.trainable, as_one=False))
    if low_precision and not s.job.config.training.torch_adam:
        # FP16_Optimizer.step: float32 copies of all p.grad, and then the flat one, before p.grad goes.
        step = _larger(step, Breakdown(gradients=gradients + 2 * converted))

    def backward(done: int, unit: int) -> Breakdown:
        return Breakdown(gradients=_native_gradients(s, s.weight, done, unit))

    return EngineMemory(
        resting=Breakdown(
            weights=s.weight * s.parameters,
            master_weights=4 * s.trainable if low_precision else 0,  # fp32_groups(_flat)
            optimizer=2 * s.moment * s.trainable,
        ),
        forward=Breakdown(gradients=_earlier(s, s.weight * s.trainable)),
        backward=backward,
        step=step,
        host=HostBreakdown(save=_saved(s, s.weight * s.parameters, _optimizer_tensors(s, s.trainable), ranks=1)),
        last_reduction=Breakdown(gradients=gradients, communication=reduction),
    )


def _native_gradients(s: ZeroSettings, bytes_each: int, done: int, unit: int) -> float:
    """Gradients that stay in the parameters until the step, with the one that autograd is just adding."""
    in_work = s.weight * s.largest_of(unit)
    return bytes_each * s.trainable + in_work if s.accumulates else bytes_each * min(done + unit, s.trainable)


def _earlier(s: ZeroSettings, num_bytes: float) -> float:
    """Of the step's earlier micro-batches."""
    return num_bytes if s.accumulates else 0.0


def _larger(*moments: Breakdown) -> Breakdown:
    return max(moments, key=lambda moment: moment.total)


# --------------------------------------------------------------------------------------------------- stages 1 and 2


def _partitioned_states(s: ZeroSettings) -> Breakdown:
    """Between steps. zero/stage_1_and_2.py: bit16_groups_flat, single_partition_of_fp32_groups, Adam's moments."""
    weights = s.weight * s.parameters
    if s.offloads_optimizer:
        # temp_grad_buffer_for_gpu_offload
        return Breakdown(weights=weights, communication=s.weight * s.largest)
    return Breakdown(weights=weights, master_weights=s.master * s.partition, optimizer=2 * s.moment * s.partition)


def _is_compact(s: ZeroSettings) -> bool:
    """Whether a rank accumulates its partition in float32: _use_compact_grad_partition_buffer."""
    return s.accumulation == 4 and s.weight != 4


def _gradient_partition(s: ZeroSettings) -> float:
    """What a rank keeps of reduced gradients, on the device also with offload where it is compact.

    `averaged_gradients` as one flat float32 partition, or `grads_in_partition`: the parameters that the partition
    touches, in full.
    """
    if _is_compact(s):
        return s.accumulation * s.partition
    return 0.0 if s.offloads_optimizer else s.weight * s.owned


def _buckets(s: ZeroSettings, bytes_each: int) -> float:
    """IPGBucket.buffer, made by setup_buckets."""
    return bytes_each * s.bucket * s.bucket_buffers


def _reduced_bytes(s: ZeroSettings, bytes_each: int) -> int:
    """Of one element in allreduce_bucket: a flat copy, and one more where the collective has a dtype of its own."""
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
    """Whether a bucket has been full by then in this micro-batch, and so was reduced.

    The embedding's gradient comes to the buckets last of all: what that leads to is in `_last_reduction`.
    """
    return done + (0 if unit == s.job.embedding_parameters else unit) > s.bucket


def _is_reducing(s: ZeroSettings, done: int, unit: int) -> bool:
    """Whether a bucket may be on its way while the backward pass of `unit` is at its worst."""
    return _is_filled(s, done, unit) and (s.overlaps or unit != s.job.embedding_parameters)


def _waiting_head(s: ZeroSettings, done: int) -> int:
    """Elements of an untied output layer that no bucket can hold: reduced when the gradient after it comes."""
    head = s.job.embedding_parameters
    return head if done == head > s.bucket and not s.job.sizes.tie_word_embeddings else 0


def _last_reduction(s: ZeroSettings, bytes_each: int, kept: float) -> Breakdown:
    """At the end of the backward pass: the bucket that the embedding fills, it alone, or all if one holds it."""
    held = kept + (bytes_each * s.largest if s.trainable > s.bucket else 0)
    buckets = _buckets(s, bytes_each)
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
    held, update = _gradient_partition(s), _update(s, s.partition)
    if s.offloads_optimizer:
        return Breakdown(gradients=held) + update
    norm = Breakdown(gradients=held + _in_float64(s))
    master = s.master * s.partition
    if _is_compact(s):
        copied = 0 if s.master == s.accumulation else master
        return _larger(norm, Breakdown(gradients=held + copied), Breakdown(gradients=copied or held) + update)
    flat = 0 if s.master == s.weight else s.weight * s.partition  # before .to(), which else does not copy
    # The second group's tensors keep the common grads_in_partition while the first group is updated.
    kept = held if s.bucket_buffers else 0
    return _larger(norm, Breakdown(gradients=held + flat + master), Breakdown(gradients=kept + master) + update)


def _update(s: ZeroSettings, elements: int) -> Breakdown:
    """What Adam needs beside states and gradients: on a GPU's host with offload, and otherwise here."""
    on_host = s.offloads_optimizer and s.job.device != "cpu"
    return Breakdown() if on_host else Breakdown(optimizer=s.adam_temporaries(elements, as_one=True))


def _host_update(s: ZeroSettings, elements: int) -> float:
    """The same on a GPU's host."""
    on_host = s.offloads_optimizer and s.job.device != "cpu"
    return s.adam_temporaries(elements, as_one=True) if on_host else 0.0


def _stage_2(s: ZeroSettings) -> EngineMemory:
    """zero/stage_1_and_2.py with partition_grads: every micro-batch's gradients are reduced as they come."""
    kept = _gradient_partition(s)

    def partition(*, is_filled: bool) -> float:
        """It comes with the first reduction and stays; not compact, each micro-batch makes one of its own.

        These are grads_in_partition, beside all_grad_tensors of the earlier micro-batches.
        """
        if _is_compact(s):
            return kept if is_filled or s.accumulates else 0.0
        return kept * (is_filled + s.accumulates)

    def backward(done: int, unit: int) -> Breakdown:
        head = _waiting_head(s, done)
        gradients = partition(is_filled=_is_filled(s, done, unit)) + s.weight * (s.largest_of(unit) + head)
        communication = _buckets(s, s.weight)
        if _is_reducing(s, done, unit):
            largest = max(s.largest_of(unit), head)
            gradients += _summand(s, largest)
            communication += _reduction(s, s.weight, largest)
        return Breakdown(gradients=gradients, communication=communication)

    return EngineMemory(
        resting=_partitioned_states(s),
        forward=Breakdown(gradients=_earlier(s, kept)),
        backward=backward,
        step=_partitioned_step(s),
        host=_partitioned_host(s),
        last_reduction=_last_reduction(s, s.weight, partition(is_filled=True)),
    )


def _stage_1(s: ZeroSettings) -> EngineMemory:
    """zero/stage_1_and_2.py: gradients stay whole, in p.grad or p.grad_accum, and are reduced in the last micro-batch.

    With overlap_comm that happens during its backward pass, and otherwise after it (reduce_gradients); each gradient
    goes as soon as it is reduced, while the partition's are allocated with the first of them. What is in a bucket is
    nowhere else: p.grad is a view of it then.
    """
    each = s.accumulation
    buckets, kept = _buckets(s, each), _gradient_partition(s)

    def backward(done: int, unit: int) -> Breakdown:
        if not s.overlaps:
            return Breakdown(gradients=_native_gradients(s, each, done, unit), communication=buckets)
        waiting = each * max(s.trainable - done, 0) if s.accumulates else 0
        head = _waiting_head(s, done)
        in_work = s.weight * s.largest_of(unit) + each * head
        reduced = _reduction(s, each, max(s.largest_of(unit), head)) if _is_reducing(s, done, unit) else 0
        kept_now = kept if _is_filled(s, done, unit) else 0
        return Breakdown(gradients=waiting + in_work + kept_now, communication=buckets + reduced)

    if s.overlaps:
        last_reduction = _last_reduction(s, each, kept)
    else:
        outside = each * max(s.trainable - s.bucket if s.bucket_buffers else s.trainable, 0)
        last_reduction = Breakdown(gradients=outside + kept, communication=buckets + _reduction(s, each, s.largest))

    return EngineMemory(
        resting=_partitioned_states(s),
        # A micro-batch that reduces nothing leaves its buckets to the next.
        forward=Breakdown(gradients=_earlier(s, each * s.trainable), communication=_earlier(s, buckets)),
        backward=backward,
        step=_partitioned_step(s),
        host=_partitioned_host(s),
        last_reduction=last_reduction,
    )


def _partitioned_host(s: ZeroSettings) -> HostBreakdown:
    """What stages 1 and 2 offload: partitions of float32 weights, moments, float32 gradients, and new weights."""
    save = _saved(s, s.weight * s.parameters, _optimizer_tensors(s, s.partition), ranks=s.world_size)
    if not s.offloads_optimizer:
        return HostBreakdown(save=save)
    pinned = (
        s.master * s.partition,  # single_partition_of_fp32_groups
        s.master * s.partition,  # their .grad
        s.weight * s.partition,  # param_buffer_of_bit16_for_cpu_offload_groups
        s.weight * s.largest,  # temp_grad_buffer_for_cpu_offload
    )
    states = sum(s.pinned("offload_optimizer", num_bytes) for num_bytes in pinned)
    states += 2 * s.moment * s.partition
    if s.stage == 2 and s.accumulates and not _is_compact(s) and s.master == 4:
        # accumulated_grads_in_cpu: one buffer for each parameter that the partition touches
        states += s.weight * s.owned
    states += _host_update(s, s.partition)
    return HostBreakdown(states=states, save=save)


# ----------------------------------------------------------------------------- stage 1 in bf16, accumulating in float32


def _has_bf16_optimizer(s: ZeroSettings) -> bool:
    """engine.py _do_optimizer_sanity_check."""
    return s.stage == 1 and s.job.config.training.bf16 and s.accumulation == 4 and not s.offloads_optimizer


def _bf16_optimizer(s: ZeroSettings) -> EngineMemory:
    """bf16_optimizer.py: float32 gradients of all parameters exist for good (fp32_groups_gradients_flat)."""
    bf16_gradients = 2 * s.trainable  # p.grad, set to zero and kept until the step
    reduced = min(s.trainable, _ALL_REDUCE_ELEMENTS + s.largest)

    def backward(done: int, unit: int) -> Breakdown:
        return Breakdown(gradients=_native_gradients(s, 2, done, unit))

    return EngineMemory(
        resting=Breakdown(
            weights=2 * s.parameters,
            master_weights=4 * s.partition,
            gradients=s.accumulation * s.trainable,
            optimizer=8 * s.partition,
        ),
        forward=Breakdown(gradients=_earlier(s, bf16_gradients)),
        backward=backward,
        step=Breakdown(gradients=bf16_gradients) + _update(s, s.partition),
        host=HostBreakdown(save=_saved(s, 2 * s.parameters, _optimizer_tensors(s, s.partition), ranks=s.world_size)),
        # engine.py allreduce_bucket: a flat copy in float32, and one in bf16
        last_reduction=Breakdown(gradients=bf16_gradients, communication=_reduced_bytes(s, s.accumulation) * reduced),
    )


# ---------------------------------------------------------------------------------------------------------- stage 3


def _stage_3(s: ZeroSettings) -> EngineMemory:
    """zero/stage3.py, and the gathering of parameters in zero/partitioned_param_coordinator.py."""
    secondary = _secondary(s)

    def backward(done: int, unit: int) -> Breakdown:
        in_work = s.weight * (s.largest_of(unit) + _waiting_head(s, done))
        communication = secondary + _gathered(s, done)
        if _is_reducing(s, done, unit):
            communication += _scattered(s, s.bucket) + _scattered_alone(s, _waiting_head(s, done))
        return Breakdown(gradients=in_work, communication=communication)

    return EngineMemory(
        resting=_sharded_states(s),
        forward=Breakdown(communication=secondary + _gathered(s, 0)),
        backward=backward,
        step=_sub_group_step(s) + Breakdown(communication=secondary),
        host=_sharded_host(s),
        last_reduction=_last_scattering(s) + Breakdown(communication=secondary),
    )


def _sharded_states(s: ZeroSettings) -> Breakdown:
    """Between steps. Optimizer and gradients are on the host with offload."""
    whole = s.weight * s.persistent if _is_gathered(s) else 0  # persistent_parameters, gathered in _post_step
    bucket = s.communication * s.bucket * s.bucket_buffers  # ipg_buckets
    on_device = 0 if s.offloads_optimizer else s.partition
    return Breakdown(
        weights=0 if s.offloads_parameters else s.weight * s.weight_partition,  # lp_param_buffer
        master_weights=s.master * on_device,  # fp32_partitioned_groups_flat
        gradients=s.accumulation * on_device,  # grad_partitions_flat_buffer
        optimizer=2 * s.moment * on_device,
        communication=whole + bucket,
    )


def _is_gathered(s: ZeroSettings) -> bool:
    """Whether whole parameters are tensors of their own: one rank's are its partition (NoGatherHandle)."""
    return s.world_size > 1 or (s.offloads_parameters and s.job.device != "cpu")


def _gathered(s: ZeroSettings, done: int) -> float:
    """Whole parameters in a backward pass that has left `done` behind (0: at the end of the forward pass).

    The prefetcher runs ahead, a bucket for each module entered, until stage3_max_live_parameters are there, and what
    it has passed on its way into the backward pass is not released (__params_to_release, fetch_sub_module). Beyond
    that limit there is what the last prefetch has begun and what the module in work needs; and while its parameters
    are used one after the other, the buffer that a prefetch was received in stays (__inflight_param_registry).
    """
    if not _is_gathered(s):
        return 0.0
    prefetched = s.number("stage3_prefetch_bucket_size") + max(s.sizes)
    limit = max(
        s.number("stage3_max_live_parameters"),
        s.number("stage3_max_reuse_distance") // 2,  # from a use in the forward pass to the next
    )
    remaining = s.parameters - s.persistent - done
    return s.weight * float(max(min(remaining, limit + prefetched), 0))


def _secondary(s: ZeroSettings) -> float:
    """hpZ's second partition, from the first forward pass to the end of the step: ds_secondary_tensor."""
    return s.weight * s.parameters / s.secondary_ranks if s.secondary_ranks > 1 else 0.0


def _scattered(s: ZeroSettings, elements: int) -> float:
    """So many elements of a bucket on their way, put together by rank: reduce_scatter_coalesced.

    The bucket itself holds them in the collective's dtype.
    """
    elements = min(elements, s.trainable)
    converted = 0 if s.bucket_buffers else _converted(s, elements)
    return s.communication * elements + converted + _scattering(s, elements)


def _scattered_alone(s: ZeroSettings, elements: int) -> float:
    """Of a parameter that goes alone, past the bucket."""
    return _converted(s, elements) + _scattering(s, elements)


def _converted(s: ZeroSettings, elements: int) -> float:
    """Of gradients whose dtype the collective does not take: __avg_scatter_grads, before it."""
    return float(s.communication * elements) if s.communication != s.weight else 0.0


def _scattering(s: ZeroSettings, elements: int) -> float:
    """Beyond what goes into the collective."""
    needed = 0.0
    if s.communication != s.accumulation:  # __avg_scatter_grads, after it
        needed += s.accumulation * elements / s.world_size
    if s.job.device == "cpu" and s.world_size > 1:  # torch's ProcessGroupGloo works on a copy
        needed += s.communication * elements
    if s.offloads_optimizer and s.job.device != "cpu":  # partition_grads: one parameter's, on the device to be added
        needed += s.accumulation * min(elements, s.largest) / s.world_size
    return needed


def _last_scattering(s: ZeroSettings) -> Breakdown:
    """At the end of the backward pass, when the embedding is still gathered: see `_last_reduction`."""
    communication = _scattered(s, s.bucket)
    if s.largest > s.bucket:
        communication = max(communication, _scattered_alone(s, s.largest))
    return Breakdown(
        gradients=s.weight * s.largest if s.trainable > s.bucket else 0,
        communication=_gathered(s, s.parameters - s.persistent - s.largest) + communication,
    )


def _sub_group_step(s: ZeroSettings) -> Breakdown:
    """_prepare_fp32_grad_for_sub_group: one sub-group's gradients, flat, in the master weights' dtype."""
    update = _update(s, s.sub_group)
    if s.offloads_optimizer:
        return update
    flat = s.accumulation * s.sub_group
    copy = s.master * s.sub_group
    converting = flat if s.master == s.accumulation else flat + copy
    return _larger(Breakdown(gradients=converting), Breakdown(gradients=copy) + update)


def _sharded_host(s: ZeroSettings) -> HostBreakdown:
    """What stage 3 offloads."""
    states = parameters = 0.0
    if s.offloads_optimizer:
        pinned = (
            s.accumulation * s.partition,  # grad_partitions_flat_buffer
            s.master * s.partition,  # fp32_partitioned_groups_flat[i].grad
        )
        states = sum(s.pinned("offload_optimizer", num_bytes) for num_bytes in pinned)
        states += (s.master + 2 * s.moment) * s.partition
        states += _host_update(s, s.sub_group)
    if s.offloads_parameters:
        # param_groups_fp16_flat_cpu_memory: pinned whatever the configuration says
        num_bytes = s.weight * s.weight_partition
        parameters = power_of_two(num_bytes) if s.job.device != "cpu" else num_bytes
    # No weights but the frozen ones, which the optimizer does not have: FROZEN_PARAM_FRAGMENTS.
    tensors = (*_optimizer_tensors(s, s.partition), s.weight * (s.weight_partition - s.partition))
    return HostBreakdown(states=states, parameters=parameters, save=_saved(s, 0, tensors, ranks=s.world_size))


# --------------------------------------------------------------------------------------------------------- saving


def _optimizer_tensors(s: ZeroSettings, elements: int) -> tuple[float, ...]:
    """Bytes of what a rank saves of its optimizer: master weights and both moments."""
    moments = (s.moment * elements, s.moment * elements)
    return moments if s.stage == 0 and s.weight == 4 else (s.master * elements, *moments)


def _saved(s: ZeroSettings, weights: float, tensors: tuple[float, ...], *, ranks: int) -> float:
    """Copies that a background save is written from (engine/zero_files.py), as the mean of the first node's ranks.

    Rank 0 saves the `weights`, and each of the first `ranks` ranks its optimizer's `tensors`.
    """
    if not s.job.config.training.async_save:
        return 0.0
    pin = s.job.config.infra.pin_memory and s.job.device != "cpu"
    on_node = s.job.ranks_per_node
    whole = power_of_two(weights) if pin else weights
    each = sum(power_of_two(tensor) if pin else tensor for tensor in tensors)
    return (whole + each * min(ranks, on_node)) / on_node
