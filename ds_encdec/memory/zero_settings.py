"""What DeepSpeed's memory depends on: read from the JSON that a run would hand to DeepSpeed, and the model's sizes.

Sizes are elements unless the name says bytes. Defaults stand for keys that a JSON may leave out, and are DeepSpeed
0.19.8's (runtime/zero/config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any

from ds_encdec.engine.ds_json import render_deepspeed_json
from ds_encdec.memory.job import Job
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


@dataclass(frozen=True)
class ZeroSettings:
    """One rank's share of a run under DeepSpeed, in the terms of its source.

    `weight`, `accumulation`, `communication`, `master`, `moment`: bytes of one number of the parameters, the
    accumulated gradients, the gradients in a collective, the optimizer's weights, and each of Adam's moments.
    """

    job: Job
    stage: int
    zero: dict[str, Any]
    weight: int
    accumulation: int
    communication: int
    master: int
    moment: int
    fused: bool
    """Whether torch's AdamW, where it is taken, updates in one operation."""

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.job.parameters

    @property
    def trainable(self) -> int:
        """Those of them that are trained."""
        return self.job.trainable_parameters

    @property
    def world_size(self) -> int:
        """Ranks, among which all is partitioned."""
        return self.job.world_size

    @property
    def accumulates(self) -> bool:
        """Whether earlier micro-batches of a step leave gradients behind."""
        return self.job.gradient_accumulation_steps > 1

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the host holds the optimizer's states."""
        return self._device_of("offload_optimizer") != "none"

    @property
    def offloads_parameters(self) -> bool:
        """Whether the host holds the partitions of the parameters."""
        return self._device_of("offload_param") != "none"

    def _device_of(self, block: str) -> str:
        return str(self.zero.get(block, {}).get("device", "none"))

    def number(self, key: str) -> int:
        """A number of elements or ranks in `zero_optimization`. Raises ConfigError for what is none."""
        value = self.zero.get(key, _DEEPSPEED_DEFAULTS[key])
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"zero_optimization.{key} = {value!r} in infra.deepspeed_extra: give a number")
        return int(value)

    def pinned(self, block: str, num_bytes: float) -> float:
        """Bytes of a host buffer of the offload `block`: torch rounds pinned ones up to a power of two."""
        pin = self.zero.get(block, {}).get("pin_memory", False) and self.job.device != "cpu"
        return power_of_two(num_bytes) if pin else num_bytes

    @property
    def bucket(self) -> int:
        """Elements of a buffer in which gradients are collected."""
        return self.number("reduce_bucket_size")

    @property
    def bucket_buffers(self) -> int:
        """How many of these there are."""
        if not self.zero.get("contiguous_gradients", True) and not self.offloads_optimizer:
            return 0
        return 2 if self.overlaps and self.stage < 3 else 1

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced while the backward pass goes on."""
        return bool(self.zero.get("overlap_comm", self.stage == 3))

    @property
    def sub_group(self) -> int:
        """Elements that stage 3 steps at once: it closes a sub-group with the parameter that fills it."""
        largest = ceil(self.largest / self.world_size)
        return min(self.partition, self.number("sub_group_size") + largest)

    @property
    def secondary_ranks(self) -> int:
        """Ranks that hold hpZ's second copy together; 1: there is none."""
        return self.number("zero_hpz_partition_size")

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter, in the model's order."""
        return tuple(map(prod, self.job.sizes.parameter_shapes.values()))

    @cached_property
    def _distinct_sizes(self) -> frozenset[int]:
        """The `sizes`, each once: layers are alike."""
        return frozenset(self.sizes)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest trained parameter: the embedding."""
        return min(max(self.sizes), self.trainable)

    def largest_of(self, unit: int) -> int:
        """Elements of the largest parameter of a layer, or an embedding, of `unit` parameters."""
        return max((size for size in self._distinct_sizes if size <= unit), default=unit)

    @cached_property
    def persistent(self) -> int:
        """Elements of the parameters so small that stage 3 keeps them whole on every rank."""
        threshold = self.number("stage3_param_persistence_threshold")
        return sum(size for size in self.sizes if size <= threshold)

    @cached_property
    def partition(self) -> int:
        """Trained elements of one rank, padding included.

        Stage 3 splits each parameter, rounding up; stages 1 and 2 each group of parameters, to an even number.
        """
        if self.stage == 3:
            return round(self.weight_partition * self.trainable / self.parameters)
        return 2 * ceil(self.trainable / (2 * self.world_size))

    @cached_property
    def weight_partition(self) -> int:
        """Elements of one rank's part of all parameters under stage 3."""
        return sum(ceil(size / self.world_size) for size in self.sizes)

    @cached_property
    def owned(self) -> int:
        """Elements of all parameters that a partition of stages 1 and 2 touches, in full, on the rank with the most.

        A parameter across the border of two partitions counts on both: an embedding larger than a partition in full.
        """
        by_rank = [0] * self.world_size
        share = sum(self.sizes) / self.world_size
        start = 0
        for size in self.sizes:
            first, last = int(start / share), min(int((start + size - 1) / share), self.world_size - 1)
            for rank in range(first, last + 1):
                by_rank[rank] += size
            start += size
        return round(max(by_rank) * self.trainable / self.parameters)

    def adam_temporaries(self, elements: int, *, as_one: bool) -> float:
        """Bytes that one update of `elements` needs beside states and gradients, where the states are.

        torch.optim.AdamW that is not fused: on GPUs one more copy (_foreach_sqrt of the second moments) of all that is
        updated together; on CPUs two (sqrt, and its quotient) of one tensor, which is everything where it is flattened
        (`as_one`). The fused one, DeepSpeed's CPUAdam and FusedAdam (ops/adam) need none.
        """
        if self.fused or not self.job.config.training.torch_adam:
            return 0.0
        if self.job.device == "cuda" and not self.offloads_optimizer:
            return float(self.master * elements)
        return 2.0 * self.master * (elements if as_one else min(elements, self.largest))


def zero_settings(job: Job) -> ZeroSettings:
    """Read the JSON of `job`. Raises ConfigError as `render_deepspeed_json` does."""
    rendered = render_deepspeed_json(
        job.config,
        world_size=job.world_size,
        gradient_accumulation_steps=job.gradient_accumulation_steps,
        device=job.device,
        ranks_per_node=job.ranks_per_node,
    )
    zero = rendered["zero_optimization"]
    weight = job.compute_bytes
    low_precision_master = any(
        rendered[dtype].get(f"{dtype}_master_weights_and_grads", False) for dtype in ("bf16", "fp16")
    )
    master = 2 if low_precision_master and zero["stage"] > 0 else 4
    return ZeroSettings(
        job=job,
        stage=zero["stage"],
        zero=zero,
        weight=weight,
        accumulation=_bytes(rendered.get("data_types", {}), "grad_accum_dtype", weight),
        communication=_bytes(rendered, "communication_data_type", weight),
        master=master,
        moment=_moment_bytes(rendered, master),
        fused=bool(rendered["optimizer"]["params"].get("fused", False)),
    )


def power_of_two(num_bytes: float) -> float:
    """The next power of two, which torch's allocator of pinned memory rounds up to."""
    return float(1 << (ceil(num_bytes) - 1).bit_length()) if num_bytes > 0 else 0.0


def _bytes(rendered: Mapping[str, Any], key: str, default: int) -> int:
    dtype = rendered.get(key)
    if dtype is not None and dtype not in _BYTES:
        raise ConfigError(f"{key} = {dtype!r} in infra.deepspeed_extra: give one of {', '.join(_BYTES)}")
    return default if dtype is None else _BYTES[dtype]


def _moment_bytes(rendered: dict[str, Any], master: int) -> int:
    """As the master weights, but DeepSpeed's CPUAdam keeps float32 unless told otherwise (ops/adam/cpu_adam.py)."""
    params = rendered["optimizer"]["params"]
    offloads = rendered["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none"
    if not offloads or params["torch_adam"]:
        return master
    if rendered["bf16"].get("bf16_optimizer_states", False) or not params.get("fp32_optimizer_states", True):
        return master
    return 4
