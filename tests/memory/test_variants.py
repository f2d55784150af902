"""Rows of the table, changes to a job, the recommendation, and the nearest settings that fit."""

from __future__ import annotations

import dataclasses
import shlex
from operator import attrgetter
from typing import Any

import pytest
from jobs import planned as job

from ds_encdec.base.quantities import GIB
from ds_encdec.memory.answer import estimate_tables
from ds_encdec.memory.estimate import FRAGMENTATION, engine_memory, estimate
from ds_encdec.memory.gpus import GPUS, Gpu
from ds_encdec.memory.job import Job
from ds_encdec.memory.question import EstimateRequest
from ds_encdec.memory.variants import (
    HEADROOM,
    HOST_HEADROOM,
    HYBRID_STAGES,
    RECOMPUTATION,
    STAGES,
    Fits,
    Variant,
    as_overrides,
    batches,
    changed,
    nearest,
    recommend,
    settings,
    variants,
)

REDUCES = "infra.fsdp_reduce_every_micro_batch"
FSDP = ("infra.distributed_type=fsdp", "infra.offload_optimizer=none")


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


def stage_of(asked: Job) -> str:
    return asked.config.infra.sharding_stage


def test_hybrids_come_with_several_nodes() -> None:
    rows = variants(job(gpus=16, nodes=2))
    assert {stage_of(found.job) for found in rows} == {*STAGES, *HYBRID_STAGES}
    reasons = [found.reason for found in rows if stage_of(found.job) == "zero2_hybrid"]
    assert "FSDP2" in reasons[0]
    assert all(reasons)


def test_what_auto_and_ddp_stand_for_is_said() -> None:
    """A row that undoes what only FSDP2 can do would otherwise be DeepSpeed's."""
    own = job("infra.distributed_type=auto", "training.activation_checkpointing=selective")
    whole = job("infra.distributed_type=ddp", "infra.sharding_stage=zero0", "infra.offload_optimizer=none")
    rows = [*variants(own)[1:], *(found for found in variants(whole) if stage_of(found.job) == "zero3")]
    assert {found.overrides["infra.distributed_type"] for found in rows} == {own.engine} == {"fsdp"}


def test_a_change_can_be_typed_into_a_shell() -> None:
    overrides = {"infra.hybrid_shard_size": None, "training.bf16": False, "infra.nvme_path": "/a b"}
    assert as_overrides(overrides) == "infra.hybrid_shard_size=null training.bf16=false 'infra.nvme_path=/a b'"


def test_a_configuration_of_its_own_is_a_row_of_its_own() -> None:
    own = job("training.activation_checkpointing=every_n")
    rows = variants(own)
    assert len(rows) == 25
    assert rows[0].overrides == {}
    assert rows[0].estimate == estimate(own)


@pytest.mark.parametrize(
    ("overrides", "batch", "expected"),
    [
        ((), 4, {}),
        ((), 8, {"training.per_device_train_batch_size": 8, "training.gradient_accumulation_steps": 4}),
        (("data.num_lanes=64",), 1, {"training.per_device_train_batch_size": 1, "data.num_lanes": 256}),
        (
            ("training.global_batch_size=256",),
            2,
            {"training.per_device_train_batch_size": 2, "training.gradient_accumulation_steps": 16},
        ),
    ],
)
def test_micro_batches_keep_the_global_batch(overrides: tuple[str, ...], batch: int, expected: dict[str, int]) -> None:
    asked = job(*overrides)
    assert list(batches(asked)) == [1, 2, 4, 8, 16, 32]
    assert batches(asked)[batch] == expected
    other = changed(asked, expected)
    assert other.config.training.micro_batch_size * other.gradient_accumulation_steps == 32
    assert other == job(*overrides, *as_overrides(expected).split())


def test_a_changed_job_keeps_what_a_run_knows_better() -> None:
    """The measured ratio of the data, and the accumulation of a resumed run."""
    own = dataclasses.replace(job(), ratio=2.0, gradient_accumulation_steps=3)
    other = changed(own, {"infra.sharding_stage": "zero2"})
    assert (other.ratio, other.gradient_accumulation_steps) == (2.0, 3)
    assert other.encoder_tokens == 2 * other.decoder_tokens
    assert changed(own, {"infra.distributed_type": "fsdp"}).engine == "fsdp"


def test_each_communicator_has_its_memory() -> None:
    """DeepSpeed makes its own group beside torch's; each dimension of a hybrid's mesh is one more."""
    for count, given, gpus in (
        (0, ["infra.distributed_type=deepspeed"], 1),
        (2, ["infra.distributed_type=deepspeed"], 8),
        (3, ["infra.distributed_type=deepspeed", "infra.sharding_stage=zero3_hybrid", "infra.hybrid_shard_size=4"], 8),
        (1, ["infra.distributed_type=fsdp"], 8),
        (3, ["infra.distributed_type=fsdp", "infra.sharding_stage=zero3_hybrid", "infra.hybrid_shard_size=4"], 8),
    ):
        peak = estimate(job(*given, gpus=gpus)).peak
        beside = peak.framework - FRAGMENTATION * (peak.total - peak.framework)
        assert beside / GIB == pytest.approx(0.6 + 0.6 * count), given


@pytest.mark.parametrize(
    ("model", "gpus", "nodes", "overrides"),
    [
        ("0.6B", 8, 1, ()),
        ("8B", 64, 8, ()),
        ("8B", 8, 1, ("training.global_batch_size=256",)),
        ("4B", 8, 1, ("data.num_lanes=64",)),
        ("0.6B", 8, 1, ("training.bf16=false", "training.fp16=true")),
        ("0.6B", 16, 2, ("infra.sharding_stage=zero3_hybrid", "infra.hybrid_shard_size=4")),
        ("0.6B", 8, 1, ("infra.distributed_type=auto", "training.activation_checkpointing=selective")),
        ("4B", 8, 1, (*FSDP, "training.torch_compile=true", "infra.fsdp_reduce_every_micro_batch=true")),
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
        steps = {each.config.training.micro_batch_size * each.gradient_accumulation_steps for each in (pasted, asked)}
        assert steps == {best.job.config.training.micro_batch_size * best.job.gradient_accumulation_steps}
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


@pytest.mark.parametrize(
    ("overrides", "place", "chosen"),
    [
        ((), {}, {"infra.sharding_stage": "zero2", "infra.offload_optimizer": "none", RECOMPUTATION: "none"}),
        # Sharding inside a node, and in hybrids, costs less than a second forward pass.
        ((), {"model": "4B"}, {"infra.sharding_stage": "zero2", RECOMPUTATION: "none"}),
        ((), {"model": "8B", "gpus": 64, "nodes": 8}, {"infra.sharding_stage": "zero2", RECOMPUTATION: "none"}),
        # FSDP2 reduces every micro-batch rather than to offload, and not without need.
        (FSDP[:1], {"model": "8B"}, {"infra.offload_optimizer": "none", REDUCES: True}),
        ((FSDP[0], f"{REDUCES}=true"), {}, {REDUCES: False}),
        # On one GPU zero2 sends nothing, and zero0 would add 8 micro-batches up in bfloat16.
        ((), {"gpus": 1}, {"infra.sharding_stage": "zero2"}),
        (("training.gradient_accumulation_steps=1",), {"gpus": 1}, {"infra.sharding_stage": "zero0"}),
        (("training.activation_offload=true",), {}, {"training.activation_offload": False}),
    ],
)
def test_the_fastest_setting_is_recommended(
    overrides: tuple[str, ...], place: dict[str, Any], chosen: dict[str, Any]
) -> None:
    found = best(job(*overrides, **place)).job
    assert {name: attrgetter(name)(found.config) for name in chosen} == chosen
    assert not engine_memory(found).sums_in_16_bits
    larger = batches(found).get(2 * found.config.training.micro_batch_size)
    assert larger is None or not fits(changed(found, larger))


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
