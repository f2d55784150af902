"""DeepSpeed's memory by hand: published figures, and what no engine of tests/distributed/test_memory_ranks.py has."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import FullConfig
from ds_encdec.memory.breakdown import Breakdown, Count, power_of_two
from ds_encdec.memory.job import PUBLISHED, Job, Sizes, make_job
from ds_encdec.memory.zero import swapped_bytes, zero_memory

QWEN3_0_6B = PUBLISHED["Qwen/Qwen3-0.6B"]
PARAMETERS = 1_036_517_376
EMBEDDING = 151_936 * 1024
NORMS = 56 * (2 * 1024 + 2 * 128) + 2 * 1024
LARGE = dataclasses.replace(
    QWEN3_0_6B, vocab_size=32_000, hidden_size=4096, num_attention_heads=32, intermediate_size=11_008
)
"""Sizes with the parameters spread over many matrices, none of which is larger than a 64th of all."""
BUCKET = 50_000_000
BF16_GRADIENTS = {"deepspeed_extra": {"data_types": {"grad_accum_dtype": "bf16"}}}
GB = 1e9


def of(number: int) -> Count:
    """So many parameters, all of them trained."""
    return Count(number, number)


def job_of(
    stage: str,
    *,
    world_size: int = 8,
    accumulation: int = 8,
    sizes: Sizes = QWEN3_0_6B,
    training: dict[str, Any] | None = None,
    **infra: Any,
) -> Job:
    """In bf16 on GPUs, without offload or saves unless told otherwise."""
    config = FullConfig.model_validate(
        {
            "infra": {"offload_optimizer": "none", "sharding_stage": stage, **infra},
            "training": {"async_save": False, **(training or {})},
        }
    )
    return make_job(
        config,
        sizes,
        "deepspeed",
        world_size=world_size,
        ranks_per_node=min(world_size, 8),
        gradient_accumulation_steps=accumulation,
    )


def states(moment: Breakdown) -> float:
    return moment.weights + moment.master_weights + moment.gradients + moment.optimizer


@pytest.mark.parametrize(("stage", "published_gb"), [("zero0", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_the_zero_papers_figures(stage: str, published_gb: float) -> None:
    """arXiv 1910.02054, figure 1: 7.5 B parameters, 64 GPUs, gradients in 16 bit, 12 bytes of optimizer."""
    job = job_of(stage, world_size=64, sizes=LARGE, accumulation=2, **(BF16_GRADIENTS if stage > "zero1" else {}))
    memory = zero_memory(job)
    of_7_5_billion = states(memory.resting + memory.forward) * 7.5 / job.parameters
    # Stage 2 keeps all of a parameter of which a rank's partition has a part: two of 45 M here, of 2 bytes each.
    straddling = 2 * 2 * 4096 * 11_008 * 7.5 / job.parameters if stage == "zero2" else 0.0
    assert published_gb - 0.1 < of_7_5_billion < published_gb + straddling + 0.1


def test_float32_accumulation_costs_what_the_paper_does_not_count() -> None:
    """At stages 2 and 3 bf16 is accumulated in float32: 2 more bytes of gradients for each partitioned parameter."""
    for stage, bytes_each in (("zero2", 2 + 16 / 64), ("zero3", 18 / 64)):
        memory = zero_memory(job_of(stage, world_size=64))
        assert states(memory.resting + memory.forward) == pytest.approx(bytes_each * PARAMETERS, rel=1e-4)


def test_a_model_of_7_billion_on_one_gpu() -> None:
    job = job_of("zero0", world_size=1, sizes=LARGE, accumulation=2)
    held = zero_memory(job).resting + zero_memory(job).forward
    scale = 7 / job.parameters
    assert held.weights * scale == pytest.approx(14)
    assert held.gradients * scale == pytest.approx(14)
    assert held.master_weights * scale == pytest.approx(28)
    assert held.optimizer * scale == pytest.approx(28 + 28)


def test_live_parameters_are_bounded_by_the_users_limits() -> None:
    limits = {"stage3_max_live_parameters": 2e8, "stage3_max_reuse_distance": 2e8}
    memory = zero_memory(job_of("zero3", deepspeed_extra={"zero_optimization": limits}))
    assert memory.forward.communication == 2 * (2e8 + BUCKET + EMBEDDING)


def test_one_rank_gathers_nothing() -> None:
    assert zero_memory(job_of("zero3", world_size=1)).forward.total == 0
    offloaded = zero_memory(job_of("zero3", world_size=1, offload_params="cpu", offload_optimizer="cpu"))
    assert offloaded.forward.total == 2 * (PARAMETERS - NORMS)  # each parameter is copied to the GPU


def test_hpz_keeps_a_second_copy_inside_the_node() -> None:
    plain = zero_memory(job_of("zero3", world_size=16))
    hybrid = zero_memory(job_of("zero3_hybrid", world_size=16))
    assert hybrid.resting == plain.resting
    assert hybrid.forward.total - plain.forward.total == 2 * PARAMETERS / 8
    assert hybrid.step.total - plain.step.total == 2 * PARAMETERS / 8


def test_an_output_layer_waits_for_the_gradient_after_it() -> None:
    """Untied and larger than a bucket, it is still in p.grad while it is reduced in the first layer's backward pass."""
    sizes = dataclasses.replace(QWEN3_0_6B, tie_word_embeddings=False)
    layer = job_of("zero2").model.layers["decoder layer 0"].all
    for stage in ("zero2", "zero3"):
        memory = zero_memory(job_of(stage, sizes=sizes))
        first, second = (memory.backward(of(EMBEDDING + done), of(layer)).total for done in (0, layer))
        assert first - second >= 2 * EMBEDDING


def test_offloaded_parameters() -> None:
    memory = zero_memory(job_of("zero3", offload_optimizer="cpu", offload_params="cpu", pin_memory=False))
    assert memory.resting.weights == 0
    # Pinned in any case: 259 MB take 268.4.
    assert memory.host.parameters == 2**28


def test_pinned_buffers_are_rounded_up_to_powers_of_two() -> None:
    assert [power_of_two(n) for n in (0, 1, 5, 1024, 1025)] == [0, 1, 8, 1024, 2048]
    pinned, pageable = (
        zero_memory(job_of("zero3", offload_optimizer="cpu", pin_memory=pin)).host.states for pin in (True, False)
    )
    # Both forms of gradients, 518 MB each, take 536.9; master weights and moments are not pinned.
    assert pinned - pageable == pytest.approx(2 * (2**29 - PARAMETERS / 2), rel=1e-3)


def test_sub_groups_bound_the_step_of_stage_3() -> None:
    small = zero_memory(job_of("zero3", deepspeed_extra={"zero_optimization": {"sub_group_size": 20_000_000}}))
    assert small.step.gradients == 4 * (20_000_000 + EMBEDDING // 8)


def test_what_is_frozen_has_weights_only() -> None:
    for stage in ("zero0", "zero1", "zero2", "zero3"):
        job = job_of(stage, world_size=4, training={"freeze": ["encoder.*"]})
        memory, trainable = zero_memory(job), PARAMETERS - 440_467_456
        assert job.trainable_parameters == trainable
        share = 1 if stage == "zero0" else 4
        weights = PARAMETERS // 4 if stage == "zero3" else PARAMETERS
        assert memory.resting.weights == pytest.approx(2 * weights, rel=1e-5)
        assert memory.resting.master_weights == pytest.approx(4 * trainable / share, rel=1e-5)
        assert memory.resting.optimizer == pytest.approx(8 * trainable / share, rel=1e-5)


@pytest.mark.parametrize(("stage", "bytes_each"), [("zero0", 14), ("zero1", 14), ("zero2", 14), ("zero3", 12)])
def test_background_saves_over_all_ranks(stage: str, bytes_each: int) -> None:
    """Stage 3 saves no bf16 weights: they are the master weights, rounded."""
    training = {"async_save": True}
    pageable = zero_memory(job_of(stage, training=training, pin_memory=False)).host.save
    assert 8 * pageable == pytest.approx(bytes_each * PARAMETERS, rel=1e-4)
    pinned = zero_memory(job_of(stage, training=training)).host.save
    assert pageable < pinned <= 2 * pageable


def test_ranks_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(ConfigError, match="do not divide"):
        zero_memory(job_of("zero3_hybrid", world_size=8, hybrid_shard_size=3))


def test_stages_that_flatten_hold_the_weights_twice_while_they_are_built() -> None:
    built = {stage: zero_memory(job_of(stage)).build.weights for stage in ("zero0", "zero1", "zero2", "zero3")}
    assert built == {"zero0": 0, "zero1": 4 * PARAMETERS, "zero2": 4 * PARAMETERS, "zero3": 0}


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "zero_optimization.reduce_bucket_size = 'auto'"),
        ({"data_types": {"grad_accum_dtype": "half"}}, "grad_accum_dtype = 'half'"),
    ],
)
def test_values_that_deepspeed_could_not_use_are_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        zero_memory(job_of("zero2", deepspeed_extra=extra))


def test_states_on_a_disk_take_four_buffers_of_a_sub_group() -> None:
    """Beside the gradients that are accumulated; and until they are written the moments of one that never stepped."""
    swapped = zero_memory(job_of("zero3", offload_optimizer="nvme", nvme_path="/local", pin_memory=False))
    sub_group = 25_000_000 + EMBEDDING / 8
    assert swapped.host.states == pytest.approx(4 * PARAMETERS / 8 + (4 + 2) * 4 * sub_group, rel=1e-3)
    on_host = zero_memory(job_of("zero3", offload_optimizer="cpu", pin_memory=False))
    assert swapped.resting == on_host.resting
    assert swapped_bytes(job_of("zero3", offload_optimizer="nvme", nvme_path="/local")) == pytest.approx(
        16 * PARAMETERS, rel=1e-4
    )
    assert swapped_bytes(job_of("zero3", offload_optimizer="cpu")) == 0
