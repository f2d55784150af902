"""The settings that DeepSpeed's memory depends on, read from a run's JSON for it, and the model's sizes.

Defaults stand for keys that a JSON may leave out, and are DeepSpeed 0.19.8's (runtime/zero/config.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import Any

from ds_encdec.engine.ds_json import render_deepspeed_json
from ds_encdec.memory.job import Job
from ds_encdec.memory.model_sizes import Sizes
from ds_encdec.types import ConfigError

_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
_DEEPSPEED_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "zero_hpz_partition_size": 1,
}
_NOT_ESTIMATED = (
    ("zero_optimization", "contiguous_gradients", True),
    ("optimizer.params", "fused", True),
    ("optimizer.params", "foreach", False),
)
"""Keys of the JSON that change memory, and the value for which it is estimated whatever they say."""


@dataclass(frozen=True)
class ZeroSettings:
    """One rank's share of a run under DeepSpeed, in the terms of its source. Sizes are elements.

    `weight`, `accumulation`, `communication`, `master`, `moment`: bytes of one number of the parameters, the
    accumulated gradients, the gradients in a collective, the optimizer's weights, and each of Adam's moments. `bucket`:
    a buffer in which gradients are collected, `buffers` how many there are; `overlaps`: gradients are reduced while the
    backward pass goes on. `secondary_ranks`: ranks that hold hpZ's second copy together (1: there is none).
    `accumulates`: earlier micro-batches of a step leave gradients behind. `pins_optimizer`: the offloaded states are
    page-locked. `largest`: the largest trained parameter, the embedding. `persistent`: parameters so small that stage 3
    keeps them whole on every rank. `live`: the most that stage 3 has gathered beside the module in work.

    `sizes`: those of the model's parameters. `weight_partition`: one rank's part of all parameters under stage 3, each
    split and rounded up; `partition`: the trained ones; under stages 1 and 2 of each group of parameters, to an even
    number. `sub_group`: what stage 3 steps at once, closed by the parameter that fills it. `owned`: all parameters that
    a partition of stages 1 and 2 touches, in full, on the rank with the most; one across the border of two partitions
    counts on both.
    """

    job: Job
    stage: int
    weight: int
    accumulation: int
    communication: int
    master: int
    moment: int
    bucket: int
    buffers: int
    overlaps: bool
    secondary_ranks: int
    accumulates: bool
    offloads_optimizer: bool
    offloads_parameters: bool
    pins_optimizer: bool
    sizes: frozenset[int]
    largest: int
    persistent: int
    live: int
    weight_partition: int
    partition: int
    sub_group: int
    owned: int

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.job.parameters

    @property
    def trainable(self) -> int:
        """The parameters that are trained."""
        return self.job.trainable_parameters

    def largest_of(self, unit: int) -> int:
        """Elements of the largest parameter of a layer, or an embedding, of `unit` parameters."""
        return max((size for size in self.sizes if size <= unit), default=unit)

    def pinned(self, num_bytes: float) -> float:
        """Bytes of a host buffer of the offloaded optimizer: torch rounds pinned ones up to a power of two."""
        return power_of_two(num_bytes) if self.pins_optimizer else num_bytes


def zero_settings(job: Job) -> ZeroSettings:
    """Read the JSON of `job`. Raises ConfigError as `render_deepspeed_json` does, and for values that are no sizes."""
    rendered = _rendered(job)
    zero, stage = rendered["zero_optimization"], rendered["zero_optimization"]["stage"]
    offload = zero.get("offload_optimizer", {})
    offloads = offload.get("device", "none") != "none"
    ranks, trained = job.world_size, job.trainable_parameters / job.parameters
    sizes, owned = _sizes(job.sizes), _owned(job.sizes, ranks)
    low_master = any(rendered[name].get(f"{name}_master_weights_and_grads", False) for name in ("bf16", "fp16"))
    master = 2 if low_master and stage > 0 else 4
    weight_partition = sum(times * ceil(size / ranks) for size, times in sizes.items())
    partition = round(weight_partition * trained) if stage == 3 else 2 * ceil(job.trainable_parameters / (2 * ranks))
    largest = min(max(sizes), job.trainable_parameters)
    overlaps = bool(zero.get("overlap_comm", stage == 3))
    # The prefetcher runs ahead, a bucket for each module entered, and what it has passed on its way from a use in the
    # forward pass to the next is not released (__params_to_release, fetch_sub_module).
    live = max(_number(zero, "stage3_max_live_parameters"), _number(zero, "stage3_max_reuse_distance") // 2)
    threshold = _number(zero, "stage3_param_persistence_threshold")
    return ZeroSettings(
        job=job,
        stage=stage,
        weight=job.compute_bytes,
        accumulation=_bytes(rendered.get("data_types", {}), "grad_accum_dtype", job.compute_bytes),
        communication=_bytes(rendered, "communication_data_type", job.compute_bytes),
        master=master,
        moment=_moment_bytes(rendered, master, offloads=offloads),
        bucket=_number(zero, "reduce_bucket_size"),
        buffers=2 if overlaps and stage < 3 else 1,
        overlaps=overlaps,
        secondary_ranks=_number(zero, "zero_hpz_partition_size"),
        accumulates=job.gradient_accumulation_steps > 1,
        offloads_optimizer=offloads,
        offloads_parameters=zero.get("offload_param", {}).get("device", "none") != "none",
        pins_optimizer=bool(offload.get("pin_memory", False)) and job.device != "cpu",
        sizes=frozenset(sizes),
        largest=largest,
        persistent=sum(size * times for size, times in sizes.items() if size <= threshold),
        live=live + _number(zero, "stage3_prefetch_bucket_size") + max(sizes),
        weight_partition=weight_partition,
        partition=partition,
        sub_group=min(partition, _number(zero, "sub_group_size") + ceil(largest / ranks)),
        owned=round(owned * trained),
    )


def not_estimated(job: Job) -> Iterator[str]:
    """Settings of the JSON that change memory in a way that the estimate does not follow."""
    rendered = _rendered(job)
    blocks = {"zero_optimization": rendered["zero_optimization"], "optimizer.params": rendered["optimizer"]["params"]}
    for block, key, estimated in _NOT_ESTIMATED:
        if blocks[block].get(key, estimated) != estimated:
            yield f"{block}.{key}"


def power_of_two(num_bytes: float) -> float:
    """The next power of two, which torch's allocator of pinned memory rounds up to."""
    return float(1 << (ceil(num_bytes) - 1).bit_length()) if num_bytes > 0 else 0.0


def _rendered(job: Job) -> dict[str, Any]:
    return render_deepspeed_json(
        job.config,
        world_size=job.world_size,
        gradient_accumulation_steps=job.gradient_accumulation_steps,
        device=job.device,
        ranks_per_node=job.ranks_per_node,
    )


# An answer asks for these thousands of times, of one model.


@lru_cache
def _sizes(sizes: Sizes) -> Counter[int]:
    """Elements of the model's parameters, and how many have as many."""
    return Counter(map(prod, sizes.parameter_shapes.values()))


@lru_cache
def _owned(sizes: Sizes, ranks: int) -> int:
    """Elements of all parameters that a partition touches, on the rank with the most."""
    by_rank = [0] * ranks
    share = sizes.parameters / ranks
    start = 0
    for size in map(prod, sizes.parameter_shapes.values()):
        for rank in range(int(start / share), min(int((start + size - 1) / share), ranks - 1) + 1):
            by_rank[rank] += size
        start += size
    return max(by_rank)


def _number(zero: dict[str, Any], key: str) -> int:
    value = zero.get(key, _DEEPSPEED_DEFAULTS[key])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"zero_optimization.{key} = {value!r} in infra.deepspeed_extra: give a number")
    return int(value)


def _bytes(block: dict[str, Any], key: str, default: int) -> int:
    dtype = block.get(key)
    if dtype is not None and dtype not in _BYTES:
        raise ConfigError(f"{key} = {dtype!r} in infra.deepspeed_extra: give one of {', '.join(_BYTES)}")
    return default if dtype is None else _BYTES[dtype]


def _moment_bytes(rendered: dict[str, Any], master: int, *, offloads: bool) -> int:
    """The master weights' bytes, but DeepSpeed's CPUAdam keeps float32 unless configured (ops/adam/cpu_adam.py)."""
    params = rendered["optimizer"]["params"]
    if not offloads or params["torch_adam"]:
        return master
    low = rendered["bf16"].get("bf16_optimizer_states", False) or not params.get("fp32_optimizer_states", True)
    return master if low else 4
