"""What a step of DeepSpeed's engine waits for: the host once for the norm, and streams for each other."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from engine_plan import FLOAT32_ACCUMULATION
from gloo_ranks import run_ranks

pytestmark = pytest.mark.distributed

WAITING: dict[str, dict[str, Any]] = {
    **{f"{stage}-bf16": {"sharding_stage": stage, "bf16": True} for stage in ("zero0", "zero1")},
    "zero1-bf16-float32-accumulation": {"sharding_stage": "zero1", "bf16": True, **FLOAT32_ACCUMULATION},
    "zero2-offload-bf16": {"sharding_stage": "zero2", "offload_optimizer": "cpu", "bf16": True},
    "zero3-offload": {"offload_optimizer": "cpu"},
    "zero3-offload-all-bf16": {"offload_optimizer": "cpu", "offload_params": "cpu", "bf16": True},
}
"""Runs whose waits for the device are counted, by name."""

_SMALL_BUCKET = {"overlap_comm": True, "reduce_bucket_size": 1000}
"""Smaller than the larger half of the parameters, as 50 million elements are for models of 8 billion."""
OVERLAPPED = {"zero_optimization": _SMALL_BUCKET}
GATHERED = {"zero_optimization": {**_SMALL_BUCKET, "stage3_param_persistence_threshold": 0}}
STREAMS: dict[str, dict[str, Any]] = {
    "zero1-bf16": {"sharding_stage": "zero1", "bf16": True, "deepspeed_extra": OVERLAPPED},
    "zero2-bf16": {"sharding_stage": "zero2", "bf16": True, "deepspeed_extra": OVERLAPPED},
    "zero2-offload-bf16": {
        "sharding_stage": "zero2",
        "offload_optimizer": "cpu",
        "bf16": True,
        "deepspeed_extra": OVERLAPPED,
    },
    "zero2": {"sharding_stage": "zero2", "deepspeed_extra": OVERLAPPED},
    "zero3-bf16": {"bf16": True, "deepspeed_extra": GATHERED},
    "zero3-offload-all-bf16": {
        "offload_optimizer": "cpu",
        "offload_params": "cpu",
        "bf16": True,
        "deepspeed_extra": GATHERED,
    },
    "zero3-offload-bf16": {"offload_optimizer": "cpu", "bf16": True, "deepspeed_extra": GATHERED},
}
"""Runs on a device that has streams, by name."""


ALONE = ("zero2-offload-bf16", "zero3-offload-bf16")
"""Those that also run on one rank, which sends nothing."""
STREAMING = [*((2, case) for case in STREAMS), *((1, case) for case in ALONE)]


@functools.cache
def ranks(world_size: int) -> list[dict[str, Any]]:
    plan = [(f"streams {case}", "waits_of_streams", STREAMS[case]) for size, case in STREAMING if size == world_size]
    if world_size == 2:
        plan += [(f"waits {name}", "waits", given) for name, given in WAITING.items()]
    return run_ranks("wait_cases.py:run_cases", world_size, {"cases": plan})


def result(world_size: int, case: str) -> list[Any]:
    """The case's result on every rank."""
    found = [rank[case] for rank in ranks(world_size)]
    for traceback in found:
        assert not isinstance(traceback, str), traceback
    return found


@pytest.mark.parametrize("case", WAITING)
def test_a_step_waits_for_its_device_once(case: str) -> None:
    """It reads the norm, and nothing else, whatever the number of micro-batches; no evaluation reads anything."""
    for counted in result(2, f"waits {case}"):
        assert counted == {"_local_scalar_dense": 1}


@pytest.mark.parametrize(("world_size", "case"), STREAMING)
def test_streams_wait_for_each_other_and_the_host_for_none(world_size: int, case: str) -> None:
    """Where DeepSpeed has the host wait, the device's own stream does: the order is kept, and so are the results."""
    for found in result(world_size, f"streams {case}"):
        assert not [one for one in found["waits"] if one.startswith("host")]
        assert "default waits for side" in found["waits"]
        assert all(math.isfinite(loss) for loss in found["losses"])


@pytest.mark.parametrize(("world_size", "case"), STREAMING)
def test_no_memory_is_reused_under_a_stream_at_work(world_size: int, case: str) -> None:
    """Or it is the next tensor's, such as the next matrix's gradient: wrong numbers without an error."""
    for found in result(world_size, f"streams {case}"):
        assert found["overwritten"] == []
