"""Rows of the table, the recommendation, and the nearest settings that fit."""

from __future__ import annotations

import dataclasses

import pytest

from ds_encdec.config.load import load_config
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.gpus import GIB, GPUS
from ds_encdec.memory.job import Job
from ds_encdec.memory.model_sizes import adapter_parameters, run_sizes
from ds_encdec.memory.planned import planned_job
from ds_encdec.memory.variants import (
    HEADROOM,
    Variant,
    as_overrides,
    batch_overrides,
    changed,
    fits,
    fitting_settings,
    micro_batches,
    recommend,
    variants,
)

PARAMETERS = {
    "Qwen/Qwen3-0.6B": 1_036_517_376,
    "Qwen/Qwen3-1.7B": 3_129_985_024,
    "Qwen/Qwen3-4B": 7_655_980_032,
    "Qwen/Qwen3-8B": 15_136_811_008,
}
A100 = GPUS["a100-80gb"].usable_bytes


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


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("gpus", [1, 8, 64])
@pytest.mark.parametrize("model", PARAMETERS)
def test_states_by_hand(model: str, gpus: int, engine: str) -> None:
    """bfloat16 weights 2, float32 masters 4 and two moments 8 bytes per parameter, over the ranks that share them."""
    parameters = PARAMETERS[model]
    settings = [f"model.model_name_or_path={model}", f"infra.distributed_type={engine}", "infra.offload_optimizer=none"]
    for stage in ("zero0", "zero1", "zero2", "zero3"):
        held = estimate(job(*settings, f"infra.sharding_stage={stage}", gpus=gpus, nodes=max(1, gpus // 8))).peak
        ranks = 1 if stage == "zero0" else gpus
        assert held.master_weights == pytest.approx(4 * parameters / ranks, rel=0.01)
        assert held.optimizer >= 0.99 * 8 * parameters / ranks  # and what its step needs
        if stage != "zero3":
            assert held.weights == pytest.approx(2 * parameters, rel=0.02)  # FSDP2 lets go of layers that are done
        elif engine == "deepspeed":  # FSDP2's embedding stays gathered
            assert held.weights == pytest.approx(2 * parameters / gpus, rel=0.02)


def test_what_is_offloaded_is_on_the_host() -> None:
    rows = variants(job())
    for stage in ("zero1", "zero2", "zero3"):
        offloaded = row(rows, stage, "optimizer").estimate
        assert offloaded is not None
        assert (offloaded.peak.master_weights, offloaded.peak.optimizer) == (0, 0)
        assert 8 * offloaded.host.states >= 12 * PARAMETERS["Qwen/Qwen3-0.6B"]
    both = row(rows, "zero3", "both").estimate
    assert both is not None
    assert both.peak.weights < 0.1 * 2 * PARAMETERS["Qwen/Qwen3-0.6B"] / 8
    assert 8 * both.host.parameters >= 2 * PARAMETERS["Qwen/Qwen3-0.6B"]


def test_the_default_run_fits_eight_a100() -> None:
    assert fits(estimate(job()), A100)
    assert estimate(job()).peak.total < 0.25 * A100


def test_the_table_has_every_combination_and_says_what_does_not_exist() -> None:
    rows = variants(job())
    assert len(rows) == 4 * 3 * 2
    missing = {
        (found.job.config.infra.sharding_stage, found.job.config.infra.offload_params)
        for found in rows
        if found.estimate is None
    }
    assert missing == {("zero0", "none"), ("zero0", "cpu"), ("zero1", "cpu"), ("zero2", "cpu")}
    assert all(bool(found.reason) is (found.estimate is None) for found in rows)
    (configured,) = (found for found in rows if not found.overrides)
    assert configured.estimate == estimate(job())


def test_hybrids_come_with_several_nodes() -> None:
    stages = {found.job.config.infra.sharding_stage for found in variants(job(gpus=16, nodes=2))}
    assert stages == {"zero0", "zero1", "zero2", "zero3", "zero2_hybrid", "zero3_hybrid"}
    hybrid = row(variants(job(gpus=16, nodes=2)), "zero2_hybrid")
    assert hybrid.estimate is None
    assert "FSDP2" in hybrid.reason


def test_a_configuration_of_its_own_is_a_row_of_its_own() -> None:
    own = job("training.activation_checkpointing=every_n")
    rows = variants(own)
    assert len(rows) == 25
    assert rows[0].overrides == {}
    assert rows[0].estimate == estimate(own)


def test_aliases_give_way() -> None:
    aliased = job("infra.distributed_type=fsdp", "infra.fsdp_sharding_strategy=FULL_SHARD")
    found = row(variants(aliased), "zero2", "optimizer")
    assert found.overrides == {"infra.sharding_stage": "zero2", "infra.fsdp_sharding_strategy": None}
    assert found.estimate is not None


@pytest.mark.parametrize(("model", "gpus"), [("Qwen/Qwen3-0.6B", 8), ("Qwen/Qwen3-4B", 1), ("Qwen/Qwen3-8B", 64)])
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_a_recommendation_fits_is_valid_and_keeps_the_batch(model: str, gpus: int, engine: str) -> None:
    settings = [f"model.model_name_or_path={model}", f"infra.distributed_type={engine}"]
    asked = job(*settings, gpus=gpus, nodes=max(1, gpus // 8))
    found = recommend(asked, A100)
    assert found is not None
    assert found.estimate.peak.total <= A100 * (1 - HEADROOM)
    # What is printed can be pasted, and is then the same run.
    pasted = job(*settings, *as_overrides(found.overrides).split(), gpus=gpus, nodes=max(1, gpus // 8))
    assert pasted.config == found.job.config
    assert estimate(pasted) == found.estimate
    batches = [each.config.training.micro_batch_size * each.gradient_accumulation_steps for each in (asked, found.job)]
    assert batches[0] == batches[1]


def test_the_fastest_setting_is_recommended_with_the_largest_micro_batch() -> None:
    found = recommend(job(), A100)
    assert found is not None
    infra, training = found.job.config.infra, found.job.config.training
    assert (infra.sharding_stage, infra.offload_optimizer, training.activation_checkpointing) == (
        "zero1",
        "none",
        "none",
    )
    larger = changed(found.job, batch_overrides(found.job, 2 * training.micro_batch_size))
    assert not fits(estimate(larger), A100)


def test_a_single_gpu_shards_nothing() -> None:
    found = recommend(job(gpus=1), A100)
    assert found is not None
    assert found.job.config.infra.sharding_stage == "zero0"


def test_nothing_is_recommended_where_nothing_fits() -> None:
    assert recommend(job(), 1 * GIB) is None
    assert fitting_settings(job(), 1 * GIB) == []


def test_the_host_decides_too() -> None:
    """A single GPU holds 4B only with its states on the host: where that is too small, nothing is left."""
    asked = job("model.model_name_or_path=Qwen/Qwen3-4B", gpus=1)
    found = recommend(asked, A100)
    assert found is not None
    assert found.job.config.infra.offload_optimizer == "cpu"
    assert recommend(asked, A100, host_bytes=found.estimate.host.total) == found
    assert recommend(asked, A100, host_bytes=50 * GIB) is None


@pytest.mark.parametrize(
    ("overrides", "batch", "expected"),
    [
        ((), 4, {}),
        ((), 8, {"training.per_device_train_batch_size": 8, "training.gradient_accumulation_steps": 4}),
        (("data.num_lanes=64",), 1, {"training.per_device_train_batch_size": 1, "data.num_lanes": 256}),
        (("training.global_batch_size=256",), 2, {"training.per_device_train_batch_size": 2}),
    ],
)
def test_micro_batches_keep_the_global_batch(overrides: tuple[str, ...], batch: int, expected: dict[str, int]) -> None:
    asked = job(*overrides)
    assert micro_batches(asked) == [1, 2, 4, 8, 16, 32]
    assert batch_overrides(asked, batch) == expected
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


def test_fitting_settings_disturb_little_and_differ_in_kind() -> None:
    asked = job("training.activation_checkpointing=none")
    assert not fits(estimate(asked), 30 * GIB)
    found = fitting_settings(asked, 30 * GIB)
    assert len(found) == 3
    assert all(setting.estimate.peak.total <= 30 * GIB * (1 - HEADROOM) for setting in found)
    kinds = [frozenset(setting.overrides) for setting in found]
    batch = {"training.per_device_train_batch_size", "training.gradient_accumulation_steps"}
    assert kinds[:2] == [batch, {"training.activation_checkpointing"}]
    # Of these two kinds, and with more room than both.
    assert found[2].estimate.peak.total < 0.9 * min(setting.estimate.peak.total for setting in found[:2])


def test_frozen_parameters_have_weights_but_no_states() -> None:
    config = load_config(None, ["infra.sharding_stage=zero0", "infra.offload_optimizer=none"])
    sizes = run_sizes(config)
    adapters = adapter_parameters(sizes, 16)
    frozen = planned_job(config, sizes, 1, lora_rank=16)
    assert (frozen.parameters, frozen.trainable_parameters) == (1_036_517_376 + adapters, adapters)
    peak = estimate(frozen).peak
    assert peak.master_weights == pytest.approx(4 * adapters, rel=0.01)
    assert peak.optimizer < 20 * adapters
    assert peak.weights == pytest.approx(2 * (1_036_517_376 + adapters), rel=0.01)
    assert changed(frozen, {"model.loss_chunk_tokens": 512}).parameters == frozen.parameters
