"""FSDP2's memory by hand.

Measured engines are in tests/distributed/test_memory_ranks.py, traced ones in test_trace.py.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import FullConfig
from ds_encdec.memory.fsdp import fsdp_memory
from ds_encdec.memory.job import PUBLISHED, Job, make_job

QWEN3_0_6B = PUBLISHED["Qwen/Qwen3-0.6B"]
PARAMETERS = 1_036_517_376
LAYER = 15_730_944
ROOT = PARAMETERS - 56 * LAYER


def job_of(
    stage: str, *, world_size: int = 8, accumulation: int = 8, training: dict[str, Any] | None = None, **infra: Any
) -> Job:
    """In bf16 on GPUs, 8 a node, without offload unless told otherwise."""
    kind = "ddp" if stage == "zero0" else "fsdp"
    config = FullConfig.model_validate(
        {
            "infra": {"offload_optimizer": "none", "sharding_stage": stage, "distributed_type": kind, **infra},
            "training": {"gradient_accumulation_steps": accumulation, **(training or {})},
        }
    )
    return make_job(
        config,
        QWEN3_0_6B,
        "fsdp",
        world_size=world_size,
        ranks_per_node=min(world_size, 8),
    )


@pytest.mark.parametrize(
    ("stage", "world_size", "shards"),
    [("zero0", 8, 1), ("zero1", 8, 8), ("zero2", 8, 8), ("zero3", 64, 64), ("zero3_hybrid", 64, 8)],
)
def test_a_rank_rests_on_its_shard_of_twelve_bytes_a_parameter(stage: str, world_size: int, shards: int) -> None:
    resting = fsdp_memory(job_of(stage, world_size=world_size)).resting
    assert resting.master_weights == pytest.approx(4 * PARAMETERS / shards)
    assert resting.optimizer == pytest.approx(8 * PARAMETERS / shards)
    assert resting.total == resting.master_weights + resting.optimizer


def test_rows_that_do_not_divide_are_padded_to_the_first_ranks() -> None:
    """On 3 ranks the embedding's 151,936 rows are cut into 50,646, 50,646 and 50,644."""
    assert fsdp_memory(job_of("zero3", world_size=3)).resting.master_weights > 4 * PARAMETERS / 3


def test_accumulated_gradients_are_whole_unless_each_micro_batch_is_reduced() -> None:
    """Also under zero3, which holds an eighth otherwise."""
    assert fsdp_memory(job_of("zero3")).forward.gradients == 4 * PARAMETERS
    assert fsdp_memory(job_of("zero3", accumulation=1)).forward.gradients == 0
    reduced = fsdp_memory(job_of("zero3", fsdp_reduce_every_micro_batch=True)).forward.gradients
    assert reduced == pytest.approx(4 * PARAMETERS / 8)


def test_offload_moves_sixteen_bytes_a_parameter_to_the_host() -> None:
    memory = fsdp_memory(job_of("zero3", offload_optimizer="cpu", pin_memory=False))
    assert memory.resting.total == 0
    assert memory.host.states == pytest.approx(16 * PARAMETERS / 8)
    pinned = fsdp_memory(job_of("zero3", offload_optimizer="cpu", pin_memory=True))
    assert memory.host.states < pinned.host.states < 2 * memory.host.states


def test_replicas_share_the_copies_of_a_save() -> None:
    """12 bytes per parameter over all ranks."""
    for stage in ("zero0", "zero3", "zero3_hybrid"):
        memory = fsdp_memory(job_of(stage, world_size=16, pin_memory=False))
        assert 16 * memory.host.save == pytest.approx(12 * PARAMETERS)


def test_frozen_parts_have_neither_moments_nor_gradients() -> None:
    job = job_of("zero0", training={"freeze": ["encoder.*", "shared.*"]})
    memory, decoder = fsdp_memory(job), 28 * job.model.layers["decoder layer 0"].all + 1024
    assert job.trainable_parameters == decoder
    assert memory.resting.master_weights == 4 * decoder
    assert memory.resting.weights == 2 * (PARAMETERS - decoder)
    assert memory.resting.optimizer == 8 * decoder
    assert memory.forward.gradients == 4 * decoder


def test_a_hybrid_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 shards .* do not divide 8 ranks"):
        fsdp_memory(job_of("zero3_hybrid", hybrid_shard_size=3))


def test_the_arithmetic_needs_no_torch() -> None:
    code = "import sys, ds_encdec.memory.fsdp; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
