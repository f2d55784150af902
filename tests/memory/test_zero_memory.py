"""DeepSpeed's memory by hand: published figures, and the terms that decide a setting.

Measured engines are in tests/distributed/test_zero_memory_ranks.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ds_encdec.config.schema import FullConfig
from ds_encdec.memory.breakdown import Breakdown, Count, power_of_two
from ds_encdec.memory.job import Job, Sizes, make_job
from ds_encdec.memory.zero import swapped_bytes, zero_memory
from ds_encdec.types import ConfigError

QWEN3_0_6B = Sizes(
    vocab_size=151_936,
    hidden_size=1024,
    num_hidden_layers=28,
    num_encoder_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    tie_word_embeddings=True,
)
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


def test_zero3_by_hand() -> None:
    memory = zero_memory(job_of("zero3"))
    shard = PARAMETERS // 8
    assert memory.resting.weights == pytest.approx(2 * shard, rel=1e-5)
    assert memory.resting.master_weights == pytest.approx(4 * shard, rel=1e-5)
    assert memory.resting.gradients == pytest.approx(4 * shard, rel=1e-5)
    assert memory.resting.optimizer == pytest.approx(8 * shard, rel=1e-5)
    assert memory.resting.communication == 4 * BUCKET + 2 * NORMS  # gradients are reduced in float32
    assert memory.forward == Breakdown(communication=2 * (PARAMETERS - NORMS))  # all is gathered: 1 B may be
    assert memory.step == Breakdown(gradients=memory.resting.gradients)  # one flat copy; fused AdamW needs nothing
    assert memory.host.total == 0
    # The embedding, larger than a bucket, goes alone, converted to float32 while it and its gradient are there.
    assert memory.last_reduction == Breakdown(gradients=2 * EMBEDDING, communication=(2 + 4) * EMBEDDING)
    on_its_way = 4 * BUCKET  # a full bucket, put together
    layer = job_of("zero3").model.layers["decoder layer 0"].all
    empty, full = (memory.backward(of(done), of(1024)).communication + 2 * done for done in (0, 4 * layer))
    assert full - empty == on_its_way


def test_gathered_parameters_go_with_the_layers_that_are_done() -> None:
    memory = zero_memory(job_of("zero3"))
    layer = job_of("zero3").model.layers["decoder layer 0"].all
    start, later = (memory.backward(of(done), of(layer)).communication for done in (4 * layer, 28 * layer))
    assert start - later == 2 * 24 * layer


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


def test_stage_1_keeps_all_gradients_until_the_last_micro_batch() -> None:
    accumulating, single = (zero_memory(job_of("zero1", accumulation=steps)) for steps in (2, 1))
    assert accumulating.forward == Breakdown(gradients=2 * PARAMETERS, communication=2 * 2 * BUCKET)
    assert single.forward.total == 0


def test_stage_2_adds_gradients_up_in_one_float32_partition() -> None:
    accumulating, single = (zero_memory(job_of("zero2", accumulation=steps)) for steps in (2, 1))
    assert accumulating.forward.gradients == pytest.approx(4 * PARAMETERS / 8)
    assert single.forward.total == 0
    assert accumulating.step.gradients == accumulating.forward.gradients  # the optimizer takes it as it is
    assert accumulating.backward(of(0), of(1024)).communication == 2 * 2 * BUCKET  # two of them, for overlap
    # What a full one is put together in, and its float32 copy.
    assert accumulating.backward(of(BUCKET), of(1024)).communication == (2 * 2 + 2 + 4) * BUCKET
    # The partition comes with the first reduction, and stays.
    partition = accumulating.forward.gradients
    assert [single.backward(of(done), of(1024)).gradients - 2 * 1024 for done in (0, BUCKET)] == [
        0,
        partition,
    ]
    assert accumulating.backward(of(0), of(1024)).gradients == partition + 2 * 1024
    # An embedding larger than a bucket is reduced alone.
    last = accumulating.last_reduction
    assert last.communication == 2 * 2 * BUCKET + (2 + 4) * EMBEDDING
    assert last.gradients == partition + 2 * EMBEDDING
    # Reduced in bfloat16 it is added to the partition in float32.
    last = zero_memory(job_of("zero2", deepspeed_extra={"communication_data_type": "bf16"})).last_reduction
    assert last.communication == 2 * (2 * BUCKET + EMBEDDING)
    assert last.gradients == partition + 2 * EMBEDDING + 4 * PARAMETERS / 8


def test_an_output_layer_waits_for_the_gradient_after_it() -> None:
    """Untied and larger than a bucket, it is still in p.grad while it is reduced in the first layer's backward pass."""
    sizes = dataclasses.replace(QWEN3_0_6B, tie_word_embeddings=False)
    layer = job_of("zero2").model.layers["decoder layer 0"].all
    for stage in ("zero2", "zero3"):
        memory = zero_memory(job_of(stage, sizes=sizes))
        first, second = (memory.backward(of(EMBEDDING + done), of(layer)).total for done in (0, layer))
        assert first - second >= 2 * EMBEDDING


def test_without_float32_accumulation_a_rank_keeps_whole_parameters() -> None:
    """On 64 ranks the embedding covers ten partitions, and each of those ranks holds all of its gradient."""
    memory = zero_memory(job_of("zero2", world_size=64, **BF16_GRADIENTS))
    assert 2 * EMBEDDING <= memory.forward.gradients < 2.3 * EMBEDDING
    # This micro-batch's beside the earlier ones', and the one that is just computed.
    assert memory.backward(of(2 * BUCKET), of(EMBEDDING)).gradients == 2 * memory.forward.gradients + 2 * EMBEDDING
    assert (
        memory.backward(of(0), of(EMBEDDING)).gradients == memory.forward.gradients + 2 * EMBEDDING
    )  # no bucket was full yet


def test_offload_moves_states_to_the_host() -> None:
    memory = zero_memory(job_of("zero3", offload_optimizer="cpu", pin_memory=False))
    assert memory.resting.master_weights == memory.resting.gradients == memory.resting.optimizer == 0
    assert memory.step.total == 0
    # Master weights, two moments, accumulated gradients, and those that the optimizer reads.
    assert memory.host.states == pytest.approx(5 * 4 * PARAMETERS / 8, rel=1e-5)


def test_offload_at_stage_2_still_accumulates_on_the_gpu() -> None:
    memory = zero_memory(job_of("zero2", offload_optimizer="cpu", pin_memory=False))
    assert memory.resting == Breakdown(weights=2 * PARAMETERS, communication=2 * EMBEDDING)
    assert memory.forward.gradients == memory.step.gradients == pytest.approx(4 * PARAMETERS / 8)
    partition = PARAMETERS / 8
    assert memory.host.states == pytest.approx((4 * 4 + 2) * partition + 2 * EMBEDDING)


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


def test_bf16_master_weights_and_states() -> None:
    extra = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    resting = zero_memory(job_of("zero2", deepspeed_extra=extra)).resting
    assert resting.master_weights == pytest.approx(2 * PARAMETERS / 8)
    assert resting.optimizer == pytest.approx(4 * PARAMETERS / 8)


def test_stage_1_with_float32_accumulation_has_all_gradients_twice() -> None:
    extra = {"data_types": {"grad_accum_dtype": "fp32"}}
    memory = zero_memory(job_of("zero1", deepspeed_extra=extra))
    assert memory.resting.gradients == 4 * PARAMETERS
    assert memory.forward.gradients == 2 * PARAMETERS


def test_stage_0_has_all_gradients_in_float32_beside_those_of_the_parameters() -> None:
    memory = zero_memory(job_of("zero0"))
    assert memory.step == Breakdown(gradients=(2 + 4) * PARAMETERS)
    float32 = zero_memory(job_of("zero0", training={"bf16": False}))
    # The reduction copies 500 M elements, and the parameter that fills them.
    reduction = Breakdown(gradients=4 * PARAMETERS, communication=4 * (500_000_000 + EMBEDDING))
    assert float32.last_reduction == reduction


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
