"""Rows of the table, and changes to a job."""

from __future__ import annotations

import dataclasses

import pytest

from ds_encdec.base.quantities import GIB
from ds_encdec.config.schema import load_config
from ds_encdec.memory.estimate import FRAGMENTATION, estimate
from ds_encdec.memory.gpus import GPUS, Gpu
from ds_encdec.memory.job import Job, run_sizes
from ds_encdec.memory.question import EstimateRequest, planned_job
from ds_encdec.memory.variants import Variant, as_overrides, batches, changed, variants

PARAMETERS = 1_036_517_376


def job(*overrides: str, gpus: int = 8, nodes: int = 1) -> Job:
    config = load_config(None, [f"infra.num_gpus={gpus}", *overrides])
    return planned_job(config, run_sizes(config), nodes)


def row(rows: list[Variant], stage: str, offload: str = "none", checkpointing: str = "full") -> Variant:
    (found,) = (
        row
        for row in rows
        if row.job.config.infra.sharding_stage == stage
        and row.job.config.infra.offload_optimizer == ("none" if offload == "none" else "cpu")
        and row.job.config.infra.offload_params == ("cpu" if offload == "both" else "none")
        and row.job.config.training.activation_checkpointing == checkpointing
    )
    return found


def test_what_is_offloaded_is_on_the_host() -> None:
    rows = variants(job())
    for stage in ("zero1", "zero2", "zero3"):
        offloaded = row(rows, stage, "optimizer").estimate
        assert (offloaded.peak.master_weights, offloaded.peak.optimizer) == (0, 0)
        assert 8 * offloaded.host.states >= 12 * PARAMETERS
    both = row(rows, "zero3", "both").estimate
    assert both.peak.weights < 0.1 * 2 * PARAMETERS / 8
    assert 8 * both.host.parameters >= 2 * PARAMETERS


def test_the_default_run_fits_eight_a100() -> None:
    """Parts are compared with traces and measured runs elsewhere; this pins their sum, so that none can double.

    In GiB: 2.9 of activations, 2.0 of gathered weights, 2.0 of framework, 0.5 of the rest.
    """
    assert EstimateRequest(job(), GPUS["a100-80gb"], None).fits(Variant(job(), estimate(job())))
    assert estimate(job()).peak.total / GIB == pytest.approx(7.4, abs=0.35)


def test_the_table_has_every_combination_and_says_what_does_not_exist() -> None:
    rows = variants(job())
    assert len(rows) == 4 * 3 * 2
    missing = {
        (found.job.config.infra.sharding_stage, found.job.config.infra.offload_params) for found in rows if found.reason
    }
    assert missing == {("zero0", "none"), ("zero0", "cpu"), ("zero1", "cpu"), ("zero2", "cpu")}
    assert all(
        EstimateRequest(job(), Gpu("huge", 10**30), None).fits(found) is not bool(found.reason) for found in rows
    )
    (configured,) = (found for found in rows if not found.overrides)
    assert configured.estimate == estimate(job())


def test_hybrids_come_with_several_nodes() -> None:
    stages = {found.job.config.infra.sharding_stage for found in variants(job(gpus=16, nodes=2))}
    assert stages == {"zero0", "zero1", "zero2", "zero3", "zero2_hybrid", "zero3_hybrid"}
    hybrid = row(variants(job(gpus=16, nodes=2)), "zero2_hybrid")
    assert "FSDP2" in hybrid.reason


def test_a_change_can_be_typed_into_a_shell() -> None:
    overrides = {"infra.hybrid_shard_size": None, "training.bf16": False, "infra.nvme_path": "/a b"}
    assert as_overrides(overrides) == "infra.hybrid_shard_size=null training.bf16=false 'infra.nvme_path=/a b'"


def test_what_auto_and_ddp_stand_for_is_said() -> None:
    """A row that undoes what only FSDP2 can do would otherwise be DeepSpeed's."""
    own = job("infra.distributed_type=auto", "training.activation_checkpointing=selective")
    assert own.engine == "fsdp"
    assert all(found.overrides["infra.distributed_type"] == "fsdp" for found in variants(own)[1:])
    whole = job("infra.distributed_type=ddp", "infra.sharding_stage=zero0", "infra.offload_optimizer=none")
    assert row(variants(whole), "zero3").overrides["infra.distributed_type"] == "fsdp"


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


def test_adapters_have_states_and_their_base_weights_alone() -> None:
    settings = ["infra.sharding_stage=zero0", "infra.offload_optimizer=none", "model.lora={r: 16}"]
    config, adapters = load_config(None, settings), 2 * 10_092_544
    frozen = planned_job(config, run_sizes(config), 1)
    assert (frozen.parameters, frozen.trainable_parameters) == (PARAMETERS + adapters, adapters)
    peak = estimate(frozen).peak
    assert peak.master_weights == pytest.approx(4 * adapters, rel=0.01)
    assert peak.weights == pytest.approx(2 * (PARAMETERS + adapters), rel=0.01)
    assert changed(frozen, {"model.loss_chunk_tokens": 512}).parameters == frozen.parameters


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
