"""What a step of DeepSpeed's engine waits for on a device with streams: these for each other, and the host for none."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from engine_plan import BF16, OFFLOAD, OFFLOAD_ALL, Settings, zero
from gloo_ranks import run_ranks

pytestmark = pytest.mark.distributed

_SMALL_BUCKET = {"overlap_comm": True, "reduce_bucket_size": 1000}
"""Smaller than the larger half of the parameters, as 50 million elements are for models of 8 billion."""
OVERLAPPED: Settings = {"deepspeed_extra": {"zero_optimization": _SMALL_BUCKET}}
GATHERED: Settings = {
    "deepspeed_extra": {"zero_optimization": {**_SMALL_BUCKET, "stage3_param_persistence_threshold": 0}}
}
STREAMS: dict[str, Settings] = {
    "zero1-bf16": zero(1, **BF16, **OVERLAPPED),
    "zero2-bf16": zero(2, **BF16, **OVERLAPPED),
    "zero2-offload-bf16": zero(2, **OFFLOAD, **BF16, **OVERLAPPED),
    "zero2": zero(2, **OVERLAPPED),
    "zero3-bf16": zero(3, **BF16, **GATHERED),
    "zero3-offload-all-bf16": zero(3, **OFFLOAD_ALL, **BF16, **GATHERED),
    "zero3-offload-bf16": zero(3, **OFFLOAD, **BF16, **GATHERED),
}
"""Runs on a device that has streams, by name."""
ALONE = ("zero2-offload-bf16", "zero3-offload-bf16")
"""Those that also run on one rank, which sends nothing."""
STREAMING = [*((2, case) for case in STREAMS), *((1, case) for case in ALONE)]


@functools.cache
def ranks(world_size: int) -> list[dict[str, Any]]:
    plan = [(case, "waits_of_streams", STREAMS[case]) for size, case in STREAMING if size == world_size]
    return run_ranks("stand_in_streams.py:run_cases", world_size, {"cases": plan})


@pytest.mark.parametrize(("world_size", "case"), STREAMING)
def test_streams_wait_for_each_other_and_no_memory_in_use_is_reused(world_size: int, case: str) -> None:
    """Where DeepSpeed has the host wait, the device's own stream does: the order is kept, and so are the results.

    No memory is reused under a stream at work, or it is the next tensor's, such as the next matrix's gradient: wrong
    numbers without an error.
    """
    for found in (rank[case] for rank in ranks(world_size)):
        assert isinstance(found, dict), found
        assert not [one for one in found["waits"] if one.startswith("host")]
        assert "default waits for side" in found["waits"]
        assert all(math.isfinite(loss) for loss in found["losses"])
        assert found["overwritten"] == []
