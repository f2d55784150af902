"""The memory of both engines by hand: published figures, and what test_memory_ranks.py does not measure."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from jobs import EMBEDDING, ENCODER, PARAMETERS, QWEN3_0_6B, job_of

from ds_encdec.base.types import ConfigError
from ds_encdec.memory.breakdown import Breakdown, Count, power_of_two
from ds_encdec.memory.estimate import engine_memory
from ds_encdec.memory.fsdp import fsdp_memory
from ds_encdec.memory.job import PUBLISHED
from ds_encdec.memory.zero import swapped_bytes, zero_memory
from ds_encdec.registry.engines import EngineName

NORMS = 56 * (2 * 1024 + 2 * 128) + 2 * 1024
LARGE = dataclasses.replace(
    QWEN3_0_6B, vocab_size=32_000, hidden_size=4096, num_attention_heads=32, intermediate_size=11_008
)
"""Sizes with the parameters spread over many matrices, none of which is larger than a 64th of all."""
BF16_GRADIENTS = {"deepspeed_extra": {"data_types": {"grad_accum_dtype": "bf16"}}}


def states(moment: Breakdown) -> float:
    return moment.weights + moment.master_weights + moment.gradients + moment.optimizer


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("model", "parameters"), [("0.6B", PARAMETERS), ("8B", 15_136_811_008)])
def test_what_rests_between_steps(model: str, parameters: int, stage: str, ranks: int, engine: EngineName) -> None:
    """Float32 masters of 4 and two moments of 8 bytes per parameter, over the ranks that share them.

    DeepSpeed has bfloat16 weights of 2 bytes beside them; FSDP2 makes these in the step. Padding is below 0.1 %, but
    for norms and small parameters, which DeepSpeed's ZeRO-3 keeps whole.
    """
    shards = 1 if stage == "zero0" else ranks
    held = engine_memory(job_of(engine, stage, sizes=PUBLISHED[f"Qwen/Qwen3-{model}"], world_size=ranks)).resting
    assert held.master_weights == pytest.approx(4 * parameters / shards, rel=1e-3)
    assert held.optimizer == pytest.approx(8 * parameters / shards, rel=1e-3)
    weights = 0 if engine == "fsdp" else 2 * parameters / (shards if stage == "zero3" else 1)
    assert held.weights == pytest.approx(weights, rel=0.02)


@pytest.mark.parametrize(("stage", "published_gb"), [("zero0", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_the_zero_papers_figures(stage: str, published_gb: float) -> None:
    """arXiv 1910.02054, figure 1: 7.5 B parameters, 64 GPUs, gradients in 16 bit, 12 bytes of optimizer."""
    extra = BF16_GRADIENTS if stage > "zero1" else {}
    job = job_of("deepspeed", stage, world_size=64, sizes=LARGE, accumulation=2, **extra)
    memory = zero_memory(job)
    of_7_5_billion = states(memory.resting + memory.forward) * 7.5 / job.parameters
    # Stage 2 keeps all of a parameter of which a rank's partition has a part: two of 45 M here, of 2 bytes each.
    straddling = 2 * 2 * 4096 * 11_008 * 7.5 / job.parameters if stage == "zero2" else 0.0
    assert published_gb - 0.1 < of_7_5_billion < published_gb + straddling + 0.1


def test_float32_accumulation_costs_what_the_paper_does_not_count() -> None:
    """At stages 2 and 3 bf16 is accumulated in float32: 2 more bytes of gradients for each partitioned parameter."""
    for stage, bytes_each in (("zero2", 2 + 16 / 64), ("zero3", 18 / 64)):
        memory = zero_memory(job_of("deepspeed", stage, world_size=64))
        assert states(memory.resting + memory.forward) == pytest.approx(bytes_each * PARAMETERS, rel=1e-4)


def test_one_rank_of_deepspeed_gathers_nothing() -> None:
    assert zero_memory(job_of(world_size=1)).forward.total == 0
    offloaded = zero_memory(job_of(world_size=1, offload_params="cpu", offload_optimizer="cpu"))
    assert offloaded.forward.total == 2 * (PARAMETERS - NORMS)  # each parameter is copied to the GPU


def test_an_output_layer_waits_for_the_gradient_after_it() -> None:
    """Untied and larger than a bucket, it is still in p.grad while it is reduced in the first layer's backward pass."""
    sizes = dataclasses.replace(QWEN3_0_6B, tie_word_embeddings=False)
    layer = job_of().model.layers["decoder layer 0"].all
    for stage in ("zero2", "zero3"):
        backward = zero_memory(job_of("deepspeed", stage, sizes=sizes)).backward
        behind = [Count(EMBEDDING + done, EMBEDDING + done) for done in (0, layer)]
        first, second = (backward(done, Count(layer, layer)).total for done in behind)
        assert first - second >= 2 * EMBEDDING


def test_offloaded_states_on_the_host() -> None:
    """DeepSpeed pins its buffers, rounded up to powers of two; FSDP2 has 16 bytes a parameter there, and pins all."""
    assert [power_of_two(n) for n in (0, 1, 5, 1024, 1025)] == [0, 1, 8, 1024, 2048]
    both = {"offload_optimizer": "cpu", "offload_params": "cpu"}
    pinned, pageable = (zero_memory(job_of(**both, pin_memory=pin)) for pin in (True, False))
    assert pageable.resting.weights == 0
    assert pageable.host.parameters == 2**28  # pinned in any case: 259 MB take 268.4
    # Both forms of gradients, 518 MB each, take 536.9; master weights and moments are not pinned.
    assert pinned.host.states - pageable.host.states == pytest.approx(2 * (2**29 - PARAMETERS / 2), rel=1e-3)
    pinned, pageable = (fsdp_memory(job_of("fsdp", offload_optimizer="cpu", pin_memory=pin)) for pin in (True, False))
    assert pageable.resting.total == 0
    assert pageable.host.states == pytest.approx(16 * PARAMETERS / 8)
    assert pageable.host.states < pinned.host.states < 2 * pageable.host.states


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3"])
def test_frozen_parts_have_weights_alone(engine: EngineName, stage: str) -> None:
    job = job_of(engine, stage, world_size=4, sections={"training": {"freeze": ["encoder.*"]}})
    memory, trained = engine_memory(job), PARAMETERS - ENCODER
    assert job.trainable_parameters == trained
    shards = 1 if stage == "zero0" else 4
    with_weights = ENCODER / shards if engine == "fsdp" else PARAMETERS / (4 if stage == "zero3" else 1)
    assert memory.resting.weights == pytest.approx(2 * with_weights, rel=1e-5)
    assert memory.resting.master_weights == pytest.approx(4 * trained / shards, rel=1e-5)
    assert memory.resting.optimizer == pytest.approx(8 * trained / shards, rel=1e-5)
    assert engine == "deepspeed" or memory.forward.gradients == 4 * trained


@pytest.mark.parametrize(("stage", "bytes_each"), [("zero0", 14), ("zero3", 12)])
def test_background_saves_over_all_ranks(stage: str, bytes_each: int) -> None:
    """Stage 3 saves no bf16 weights: they are the master weights, rounded."""
    sections = {"training": {"async_save": True}}
    pinned, pageable = (
        zero_memory(job_of("deepspeed", stage, sections=sections, pin_memory=pin)).host.save for pin in (True, False)
    )
    assert 8 * pageable == pytest.approx(bytes_each * PARAMETERS, rel=1e-4)
    assert pageable < pinned <= 2 * pageable


@pytest.mark.parametrize(("stage", "bytes_each"), [("zero0", 0), ("zero1", 4), ("zero2", 4), ("zero3", 0)])
def test_stages_that_flatten_hold_the_weights_twice_while_they_are_built(stage: str, bytes_each: int) -> None:
    assert zero_memory(job_of("deepspeed", stage)).build.weights == bytes_each * PARAMETERS


def test_states_on_a_disk_take_four_buffers_of_a_sub_group() -> None:
    """Beside the gradients that are accumulated; and until they are written the moments of one that never stepped."""
    on_disk = {"offload_optimizer": "nvme", "nvme_path": "/local"}
    swapped = zero_memory(job_of(**on_disk, pin_memory=False))
    sub_group = 25_000_000 + EMBEDDING / 8
    assert swapped.host.states == pytest.approx(4 * PARAMETERS / 8 + (4 + 2) * 4 * sub_group, rel=1e-3)
    assert swapped.resting == zero_memory(job_of(offload_optimizer="cpu", pin_memory=False)).resting
    assert swapped_bytes(job_of(**on_disk)) == pytest.approx(16 * PARAMETERS, rel=1e-4)
    assert swapped_bytes(job_of(offload_optimizer="cpu")) == 0


@pytest.mark.parametrize(
    ("engine", "infra", "named"),
    [
        ("fsdp", {"stage": "zero3_hybrid", "hybrid_shard_size": 3}, r"3 shards .* do not divide 8 ranks"),
        ("deepspeed", {"stage": "zero3_hybrid", "hybrid_shard_size": 3}, "do not divide"),
        (
            "deepspeed",
            {"stage": "zero2", "deepspeed_extra": {"zero_optimization": {"reduce_bucket_size": "auto"}}},
            "zero_optimization.reduce_bucket_size = 'auto'",
        ),
        ("deepspeed", {"deepspeed_extra": {"data_types": {"grad_accum_dtype": "half"}}}, "grad_accum_dtype = 'half'"),
    ],
)
def test_values_that_an_engine_could_not_use_are_named(engine: EngineName, infra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        engine_memory(job_of(engine, **infra))


def test_the_arithmetic_needs_no_torch() -> None:
    code = "import sys, ds_encdec.memory.estimate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
