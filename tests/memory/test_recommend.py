"""The recommendation, and the nearest settings that fit."""

from __future__ import annotations

import shlex

import pytest

from ds_encdec.base.quantities import GIB
from ds_encdec.config.schema import load_config
from ds_encdec.memory.answer import estimate_tables
from ds_encdec.memory.estimate import engine_memory, estimate
from ds_encdec.memory.gpus import GPUS, Gpu
from ds_encdec.memory.job import Job, run_sizes
from ds_encdec.memory.question import EstimateRequest, planned_job
from ds_encdec.memory.variants import (
    HEADROOM,
    HOST_HEADROOM,
    Fits,
    Variant,
    as_overrides,
    batches,
    changed,
    nearest,
    recommend,
    settings,
)

FSDP = ("infra.distributed_type=fsdp", "infra.offload_optimizer=none")


def job(*overrides: str, model: str = "0.6B", gpus: int = 8, nodes: int = 1) -> Job:
    config = load_config(None, [f"infra.num_gpus={gpus}", f"model.model_name_or_path=Qwen/Qwen3-{model}", *overrides])
    return planned_job(config, run_sizes(config), nodes)


def room(device_bytes: int, host_bytes: float | None = None) -> Fits:
    """`host_bytes`: of a node."""
    return EstimateRequest(job(), Gpu("asked", device_bytes), host_bytes and int(host_bytes)).fits


A100 = room(GPUS["a100-80gb"].usable_bytes)


def fits(asked: Job, in_room: Fits = A100) -> bool:
    return in_room(Variant(asked, estimate(asked)))


def best(asked: Job, in_room: Fits = A100) -> Variant:
    found = recommend(asked, in_room)
    assert found is not None
    return found


def sequences(asked: Job) -> int:
    return asked.config.training.micro_batch_size * asked.gradient_accumulation_steps * asked.world_size


@pytest.mark.parametrize(
    ("model", "gpus", "nodes", "overrides"),
    [
        ("0.6B", 8, 1, ()),
        ("4B", 1, 1, ()),
        ("8B", 64, 8, ()),
        ("8B", 8, 1, ("training.global_batch_size=256",)),
        ("4B", 8, 1, ("data.num_lanes=64",)),
        ("0.6B", 8, 1, ("training.bf16=false", "training.fp16=true")),
        ("0.6B", 8, 1, ("training.activation_checkpointing=every_n",)),
        ("0.6B", 16, 2, ("infra.sharding_stage=zero3_hybrid", "infra.hybrid_shard_size=4")),
        ("0.6B", 8, 1, ("infra.distributed_type=auto", "training.activation_checkpointing=selective")),
        ("4B", 8, 1, (*FSDP, "training.torch_compile=true", "infra.fsdp_reduce_every_micro_batch=true")),
        ("4B", 8, 1, FSDP),
        ("0.6B", 16, 2, (*FSDP, "infra.sharding_stage=zero2_hybrid")),
    ],
)
def test_what_is_recommended_can_be_pasted(model: str, gpus: int, nodes: int, overrides: tuple[str, ...]) -> None:
    """For both engines: a valid configuration, the same run, the same global batch, and it fits."""
    asked = job(*overrides, model=model, gpus=gpus, nodes=nodes)
    for table in estimate_tables(EstimateRequest(asked, GPUS["a100-80gb"], None)):
        best = table.recommendation
        if "training.fp16=true" in overrides and table.job.engine == "fsdp":
            assert best is None
            continue
        assert best is not None
        pasted = job(*overrides, *shlex.split(as_overrides(best.overrides)), model=model, gpus=gpus, nodes=nodes)
        assert (pasted.config, pasted.engine) == (best.job.config, table.job.engine)
        assert sequences(pasted) == sequences(best.job) == sequences(asked)
        assert estimate(pasted) == best.estimate
        assert A100(best)


def test_a_step_in_one_micro_batch_may_fit_where_smaller_ones_do_not() -> None:
    """FSDP2 accumulates all gradients in float32, here 56 GiB."""
    asked = job(*FSDP, "training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=1", model="8B")
    assert fits(asked)
    assert not fits(changed(asked, batches(asked)[1]))
    found = best(asked)
    assert found.job.config.infra.offload_optimizer == "none"
    assert found.job.gradient_accumulation_steps == 1


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_no_setting_of_the_table_that_fits_offloads_less(engine: str) -> None:
    """Every one of them is tried, at every micro-batch."""
    asked = job(f"infra.distributed_type={engine}", "training.gradient_accumulation_steps=2", model="8B")
    found = best(asked, room(30 * GIB))
    assert found.job.config.infra.offload_optimizer == "cpu"
    for overrides in settings(asked):
        for batch in (1, 2, 4, 8):
            other = changed(asked, overrides | batches(asked)[batch])
            infra = other.config.infra
            if infra.offload_optimizer == infra.offload_params == "none":
                assert not fits(other, room(30 * GIB))


def test_fsdp2_reduces_every_micro_batch_rather_than_to_offload() -> None:
    found = best(job("infra.distributed_type=fsdp", model="8B"))
    assert found.job.config.infra.offload_optimizer == "none"
    assert found.job.config.infra.fsdp_reduce_every_micro_batch
    # Without need it does not.
    small = best(job("infra.distributed_type=fsdp", "infra.fsdp_reduce_every_micro_batch=true"))
    assert not small.job.config.infra.fsdp_reduce_every_micro_batch


def test_the_fastest_setting_is_recommended_with_the_largest_micro_batch() -> None:
    found = best(job())
    infra, training = found.job.config.infra, found.job.config.training
    chosen = (infra.sharding_stage, infra.offload_optimizer, training.activation_checkpointing)
    assert chosen == ("zero2", "none", "none")
    larger = changed(found.job, batches(found.job)[2 * training.micro_batch_size])
    assert not fits(larger)


@pytest.mark.parametrize("gpus", [8, 64])
def test_sharding_comes_before_recomputation(gpus: int) -> None:
    """Inside a node, and in hybrids, it costs less than a second forward pass."""
    found = best(job(model="4B" if gpus == 8 else "8B", gpus=gpus, nodes=gpus // 8))
    assert found.job.config.training.activation_checkpointing == "none"
    assert found.job.config.infra.sharding_stage in ("zero2", "zero3", "zero3_hybrid")


def test_one_gpu_adds_up_in_float32() -> None:
    """There zero2 sends nothing, and zero0 would add 8 micro-batches up in bfloat16."""
    found = best(job(gpus=1))
    assert found.job.config.infra.sharding_stage == "zero2"
    assert not engine_memory(found.job).sums_in_16_bits
    assert engine_memory(changed(found.job, {"infra.sharding_stage": "zero0"})).sums_in_16_bits
    whole = best(job("training.gradient_accumulation_steps=1", gpus=1))
    assert whole.job.config.infra.sharding_stage == "zero0"


def test_activations_on_the_host_are_offload() -> None:
    found = best(job("training.activation_offload=true"))
    assert not found.job.config.training.activation_offload
    assert found == recommend(job("training.activation_offload=true"), room(GPUS["a100-80gb"].usable_bytes, 800 * GIB))


def test_fsdp2_has_one_name_for_one_setting() -> None:
    """Its zero1 is zero2, and parameters are offloaded with the optimizer: the table has one row for each."""
    for stage, other in (("zero1", {"infra.sharding_stage": "zero2"}), ("zero3", {"infra.offload_params": "cpu"})):
        asked = job("infra.distributed_type=fsdp", f"infra.sharding_stage={stage}")
        assert estimate(asked) == estimate(changed(asked, other))
        rows = [changed(asked, change).config.infra for change in settings(asked)]
        assert {row.sharding_stage for row in rows} == {"zero0", "zero2", "zero3"}
        assert {row.offload_params for row in rows} == {"none"}


def test_nothing_is_recommended_where_nothing_fits() -> None:
    assert recommend(job(), room(1 * GIB)) is None
    assert nearest(job(), room(1 * GIB)) == []


def test_the_host_decides_too() -> None:
    """A single GPU holds 4B only with its states on the host: where that is too small, nothing is left."""
    asked = job(model="4B", gpus=1)
    found = best(asked)
    assert found.job.config.infra.offload_optimizer == "cpu"
    device_bytes, needed = GPUS["a100-80gb"].usable_bytes, found.estimate.host.total
    assert recommend(asked, room(device_bytes, needed / (1 - HOST_HEADROOM) + 1)) == found
    assert recommend(asked, room(device_bytes, needed)) != found
    assert recommend(asked, room(device_bytes, 50 * GIB)) is None


def test_fitting_settings_disturb_little_and_differ_in_kind() -> None:
    asked = job("training.activation_checkpointing=none")
    assert not fits(asked, room(30 * GIB))
    found = nearest(asked, room(30 * GIB))
    assert len(found) == 3
    assert all(setting.estimate.peak.total <= 30 * GIB * (1 - HEADROOM) for setting in found)
    kinds = [frozenset(setting.overrides) for setting in found]
    batch = {"training.per_device_train_batch_size", "training.gradient_accumulation_steps"}
    assert kinds[:2] == [batch, {"training.activation_checkpointing"}]
    # Of these two kinds, and with more room than both.
    assert found[2].estimate.peak.total < 0.9 * min(setting.estimate.peak.total for setting in found[:2])
