"""Contradictions between fields: each is found, named by its fields, and no sound configuration is refused."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ds_encdec.config.rules import engine_candidates
from ds_encdec.config.schema import FullConfig, InfraConfig, TrainingConfig, load_config
from ds_encdec.config.settings import Conflict, broken
from ds_encdec.types import ConfigError

SCRATCH = {
    "model.tokenizer_name_or_path": "builtin",
    "model.architecture": "{vocab_size: 4096, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 16, intermediate_size: 128}",
}

FSDP = {"infra.distributed_type": "fsdp"}
AUTO = {"infra.distributed_type": "auto"}
DDP = {"infra.distributed_type": "ddp", "infra.sharding_stage": "zero0", "infra.offload_optimizer": "none"}


def load(settings: dict[str, Any]) -> FullConfig:
    return load_config(None, [f"{field}={value}" for field, value in settings.items()])


@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        ({"monitor.window_size": 5}, "monitor.window_size = 5", "<= window_size, or spikes are never detected"),
        ({"training.per_device_train_batch_size": 0}, "per_device_train_batch_size = 0", ">= 1, or `auto`"),
        ({"training.per_device_train_batch_size": "atuo"}, '"atuo"', ">= 1, or `auto`"),
        (
            {"training.global_batch_size": 6},
            "training.global_batch_size = 6",
            "a multiple of the micro-batch",
        ),
        ({"training.global_batch_size": 8, "data.num_lanes": 4}, "data.num_lanes = 4", "are 16 sequences"),
        ({"training.per_device_train_batch_size": "auto", "data.num_lanes": 4}, "data.num_lanes = 4", "auto decides"),
        (
            {"monitor.grad_norm_threshold": 0.5},
            "monitor.grad_norm_threshold = 0.5",
            "cannot be explosions",
        ),
        (
            {"monitor.on_loss_spike": "rollback", "training.save_total_limit": 1},
            "training.save_total_limit = 1",
            "too young to go back to",
        ),
        (
            {"monitor.on_loss_spike": "rollback", "training.save_steps": 12},
            "monitor.rollback_min_steps = 50",
            "the oldest of 5 kept checkpoints is 48 steps old",
        ),
        (
            {"monitor.on_non_finite": "rollback", "training.save_steps": 99_951},
            "monitor.rollback_min_steps = 50",
            "old enough to go back to",
        ),
        ({"infra.hang_timeout_minutes": 0.001}, "infra.hang_timeout_minutes = 0.001", "give 0.1 (6 seconds) or more"),
        ({"infra.distributed_timeout_minutes": 1e15}, "infra.distributed_timeout_minutes = 1000", "must be <= 100000"),
        (
            {"infra.hang_timeout_minutes": 30},
            "infra.hang_timeout_minutes = 30",
            "before the watchdog writes",
        ),
        ({"training.early_stopping_patience": 2, "training.eval_samples": 0}, "patience = 2", "set eval_samples > 0"),
        ({"training.save_on_best": "true", "training.eval_samples": 0}, "save_on_best = true", "set eval_samples > 0"),
        ({"training.residual_dropout": 1.0}, "training.residual_dropout = 1", "must be < 1"),
        (
            FSDP | {"training.attention_dropout": 0.1, "training.activation_checkpointing": "selective"},
            "training.attention_dropout = 0.1",
            "without what it dropped out",
        ),
        ({"training.save_strategy": "best", "training.eval_samples": 0}, '= "best"', "set eval_samples > 0"),
        ({"training.save_strategy": "best", "monitor.on_loss_spike": "rollback"}, '= "best"', "set steps"),
        ({"training.metric_for_best_model": "eval_rougeL"}, "generate_samples = 0", "set eval_generate_samples > 0"),
        ({"training.metric_for_best_model": "exactmatch"}, '= "exactmatch"', "did you mean `exact_match`?"),
        ({"training.load_best_model_at_end": "true", "training.export_at_end": "false"}, "export_at_end", "set export"),
        (SCRATCH | {"model.architecture.num_key_value_heads": 3}, "num_attention_heads = 4", "must divide"),
        (SCRATCH | {"model.architecture.head_dim": 15}, "model.architecture.head_dim = 15", "must be even"),
        (SCRATCH | {"model.architecture.vocab_size": 357}, "vocab_size = 357", "must be >= 358"),
        (SCRATCH | {"model.architecture.vocab_size": 362, "data.use_mode_tokens": "true"}, "= 362", "must be >= 363"),
        (SCRATCH | {"model.architecture.max_position_embeddings": 4000}, "max_encoder_length = 4096", "longer than"),
        (SCRATCH | {"model.model_name_or_path": "x"}, 'model.model_name_or_path = "x"', "one of the two"),
        ({"model.model_name_or_path": "null"}, "model.model_name_or_path = null", "one of the two is needed"),
        ({"model.architecture": SCRATCH["model.architecture"]}, "tokenizer_name_or_path = null", "builtin"),
        ({"training.fp16": "true", "training.bf16": "true"}, "training.bf16 = true", "at most one"),
        ({"training.bf16": "false", "training.fp16": "true", "infra.device": "cpu"}, "infra.device", "on CPUs"),
        (
            {"training.bf16": "false", "training.fp16": "true"}
            | {"infra.sharding_stage": "zero0", "infra.offload_optimizer": "none"},
            'infra.sharding_stage = "zero0"',
            "trains float16 wrongly",
        ),
        ({"infra.sharding_stage": "zero0", "infra.offload_optimizer": "cpu"}, '_optimizer = "cpu"', "to offload"),
        ({"infra.sharding_stage": "zero2", "infra.offload_params": "cpu"}, "offload_params", "set zero3"),
        ({"infra.sharding_stage": "zero2_hybrid"}, 'infra.sharding_stage = "zero2_hybrid"', "FSDP2"),
        ({"training.optimizer": "muon"}, 'training.optimizer = "muon"', "before their norm is taken"),
        (FSDP | {"training.optimizer": "muon", "model.lora": "{}"}, "model.lora", "not adapters beside them"),
        ({"model.lora": "{}", "training.freeze": "encoder.*"}, 'training.freeze = "encoder.*"', "frozen already"),
        ({"model.lora.target_modules": "[]"}, "model.lora.target_modules = []", "nothing is trained"),
        ({"model.lora.target_modules": "[q_proj, k]"}, "target_modules.1", "'gate_proj', 'up_proj' or 'down_proj'"),
        ({"model.lora.quantize": "nf4"}, 'model.lora.quantize = "nf4"', "DeepSpeed cuts and broadcasts no 4-bit"),
        (FSDP | {"model.lora.quantize": "nf4"}, 'infra.sharding_stage = "zero3"', "cannot be cut into shards"),
        (
            {"infra.deepspeed_extra.zero_optimization.zero_quantized_nontrainable_weights": "true"},
            "zero_quantized_nontrainable_weights",
            "quantizes frozen weights",
        ),
        (
            {"infra.deepspeed_extra.zero_optimization.leaf_module.names": "[encoder]", "training.freeze": "shared.*"},
            "leaf_module.names",
            "gradients of leaf modules are lost",
        ),
        ({"infra.distributed_type": "ddp", "infra.sharding_stage": "zero3"}, '= "zero3"', "ddp shards nothing"),
        ({"training.activation_checkpointing": "selective"}, '= "selective"', "FSDP2"),
        (
            {"training.torch_compile": "true", "training.freeze": "shared.*"},
            "training.torch_compile = true",
            "ZeRO-3 gathers parameters inside layers",
        ),
        ({"infra.fsdp_reduce_every_micro_batch": "true"}, "fsdp_reduce_every_micro_batch = true", "FSDP2's"),
        (FSDP | {"training.fp16": "true", "training.bf16": "false"}, "training.fp16 = true", "no loss scaling"),
        (
            FSDP | {"infra.offload_optimizer": "nvme", "infra.nvme_path": "/local"},
            'infra.offload_optimizer = "nvme"',
            "FSDP2 keeps nothing on a disk",
        ),
        (
            FSDP | {"infra.offload_params": "cpu", "infra.offload_optimizer": "none"},
            'infra.offload_optimizer = "none"',
            "parameters and optimizer together",
        ),
        ({"infra.hybrid_shard_size": 4}, "infra.hybrid_shard_size = 4", "only zero2_hybrid and zero3_hybrid"),
        ({"model.tokenizer_name_or_path": "builtin"}, '= "Qwen/Qwen3-0.6B"', "builtin goes with an architecture"),
        ({"infra.offload_optimizer": "nvme"}, 'infra.offload_optimizer = "nvme"', "nvme needs a folder"),
        (
            {"infra.offload_optimizer": "nvme", "infra.nvme_path": "/local", "infra.sharding_stage": "zero2"},
            'infra.sharding_stage = "zero2"',
            "only the states of sharded parameters can be on a disk",
        ),
        ({"infra.offload_params": "nvme"}, 'infra.offload_params = "nvme"', "allowed: 'none' or 'cpu'"),
        (
            {
                "infra.offload_optimizer": "nvme",
                "infra.nvme_path": "/local",
                "infra.deepspeed_extra": "{zero_optimization: {offload_optimizer: {pipeline_read: true}}}",
            },
            'infra.offload_optimizer = "nvme"',
            "states on a disk are float32",
        ),
        *[
            ({"infra.deepspeed_extra": f"{{bf16: {block}}}"} | settings, "bf16.bf16_", "set both and offload_optimizer")
            for block, settings in {
                "{bf16_optimizer_states: true}": {"infra.offload_optimizer": "none"},
                "{bf16_master_weights_and_grads: true}": {"infra.offload_optimizer": "none"},
                "{bf16_master_weights_and_grads: true, bf16_optimizer_states: true}": {},
            }.items()
        ],
        (
            {"training.num_train_steps": 9, "training.warmup_steps": 9},
            "warmup_steps = 9",
            "must end before the run does: set warmup_steps=1, a tenth of it",
        ),
        ({"training.warmup_steps": 0}, "training.warmup_steps = 0", "at least 1 step of warm-up"),
        (
            {"training.lr_scheduler_type": "wsd", "training.wsd_decay_fraction": 0.995},
            "training.wsd_decay_fraction = 0.995",
            "decay of 99500 steps",
        ),
        ({"training.min_lr_ratio": 0.2}, "training.min_lr_ratio = 0.2", "WarmupDecayLR always ends at 0 times"),
        (
            {"training.lr_scheduler_type": "constant", "training.min_lr_ratio": 0},
            "training.min_lr_ratio = 0",
            "constant always ends at 1 times the peak: set lr_scheduler_type=cosine",
        ),
        ({"training.wsd_decay_fraction": 0.2}, "training.wsd_decay_fraction = 0.2", "set lr_scheduler_type=wsd"),
        ({"data.dataset_name": "parquet"}, "data.data_files = null", "parquet needs data_files"),
        ({"data.dataset_name": "builtin", "data.data_files": "x"}, 'data.data_files = "x"', "reads no files"),
        ({"data.mixture": "[]"}, "data.mixture = []", "at least one source"),
        (
            {"data.mixture": "[{weight: 1, dataset_name: text}]"},
            "command line: data.mixture.0.dataset_name",
            "text needs data_files",
        ),
        (
            {"data.mixture": "[{weight: 1, dataset_name: builtin}]", "data.dataset_name": "c4"},
            'data.dataset_name = "c4"',
            "a mixture replaces dataset_name",
        ),
        *[
            (
                {"data.mixture": "[{weight: 1, dataset_name: builtin}]", f"data.{field}": "other"},
                f'data.{field} = "other"',
                f"a mixture replaces {field}",
            )
            for field in ("dataset_config", "dataset_split", "dataset_revision", "text_column")
        ],
        ({"data.ul2_task_weights": "[0, 0, 0, 0, 0]"}, "data.ul2_task_weights = [0, 0, 0, 0, 0]", "at least one"),
        ({"data.ul2_task_weights": "[1, 0, -1, 0, 0]"}, "data.ul2_task_weights", "must be >= 0"),
        ({"data.ul2_task_weights": "[1, 1, x, 1, 1]"}, 'data.ul2_task_weights.2 = "x"', "must be a number"),
        ({"data.ul2_task_weights": "{S: -1}"}, 'data.ul2_task_weights = {"S": -1}', "must be >= 0"),
        ({"data.ul2_task_weights": "{S: x}"}, 'data.ul2_task_weights = {"S": "x"}', "must be a number"),
        ({"data.ul2_task_weights": "{R1: 1, r2: 1}"}, '"r2": 1}', "r2: unknown key; did you mean `R2`?"),
        ({"infra.deepspeed_extra": "{optimizer: {params: 5}}"}, "extra.optimizer.params", "must be a block"),
        ({"data.eval_fraction": 0}, "data.eval_fraction = 0", "eval_samples=0"),
        ({"training.average_checkpoints": 1}, "average_checkpoints = 1", "2 or more"),
        ({"infra.deepspeed_extra": "{gradient_clipping: 1.0}"}, "deepspeed_extra.gradient_clipping", "max_grad_norm"),
        ({"infra.deepspeed_extra": "{overlap_comm: true}"}, "overlap_comm", "did you mean `zero_optimization.overlap"),
        ({"infra.deepspeed_extra": "{wandb: {enabled: true}}"}, "wandb.enabled", "does nothing here: trackers"),
        ({"data.dataset_name": "jsonl", "data.data_files": "a.jsonl"}, "data.dataset_name", "write `json`"),
        (
            {"infra.deepspeed_extra": "{optimizer: {params: {fused: true, foreach: true}}}"},
            "infra.deepspeed_extra.optimizer.params.fused",
            "torch's AdamW takes one of them",
        ),
        (
            {"infra.deepspeed_extra": "{optimizer: {params: {torch_adam: false}}}"},
            "infra.deepspeed_extra.optimizer.params.torch_adam",
            "only true works here: torch's fused AdamW",
        ),
        (
            {"infra.deepspeed_extra": "{scheduler: {params: {warmup_min_lr: 1e-6}}}"}
            | {"training.lr_scheduler_type": "wsd"},
            "infra.deepspeed_extra.scheduler",
            "only DeepSpeed's own schedules",
        ),
    ],
)
def test_contradictions(settings: dict[str, Any], fields: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings)
    assert fields in str(caught.value)
    assert message in str(caught.value)
    assert "1 problem" in str(caught.value), "one mistake, one problem"


@pytest.mark.parametrize(
    "settings",
    [
        SCRATCH,
        SCRATCH | {"model.architecture.vocab_size": 358},
        {"training.bf16": "false"},
        {"training.bf16": "false", "training.fp16": "true"},
        {"infra.sharding_stage": "zero0", "infra.offload_optimizer": "none"},
        {"infra.offload_params": "cpu"},
        {"infra.sharding_stage": "zero3_hybrid", "infra.fsdp_sharding_strategy": "HYBRID_SHARD"},
        {"infra.sharding_stage": "zero2_hybrid", "infra.distributed_type": "fsdp"},
        AUTO | {"training.optimizer": "muon"},
        {"training.activation_checkpointing": "selective", "infra.distributed_type": "fsdp"},
        FSDP | {"training.torch_compile": "true"},
        FSDP | {"training.torch_compile": "true", "training.activation_checkpointing": "selective"},
        {"training.torch_compile": "true", "infra.sharding_stage": "zero2"},
        {"training.torch_compile": "true"},
        {"training.torch_compile": "auto"},
        FSDP | {"infra.sharding_stage": "zero2_hybrid", "infra.hybrid_shard_size": 4},
        FSDP | {"training.warmup_steps": 0},
        AUTO | {"infra.sharding_stage": "zero2_hybrid"},
        DDP | {"model.lora.quantize": "nf4", "model.lora.target_modules": "q_proj"},
        AUTO | {"training.fp16": "true", "training.bf16": "false"},
        AUTO | {"training.torch_compile": "true"},
        {"infra.fsdp_activation_checkpointing": "true", "infra.fsdp_sharding_strategy": "FULL_SHARD"},
        {"infra.fsdp_cpu_offload": "true", "infra.offload_optimizer": "cpu"},
        {"training.num_train_steps": 10, "training.lr_scheduler_type": "WarmupLR"},
        {"training.num_train_steps": 10, "training.lr_scheduler_type": "constant"},
        {"training.warmup_steps": 0, "training.lr_scheduler_type": "cosine"},
        {"data.dataset_name": "json", "data.data_files": "[a.jsonl, b/*.jsonl]"},
        {"training.num_train_epochs": 2, "data.dataset_name": "builtin"},
        {"data.dataset_name": "org/corpus", "data.data_files": "part-0.parquet"},
        {"data.mixture": "[{weight: 1, dataset_name: builtin}, {weight: 2, dataset_name: random}]"},
        {"data.eval_fraction": 0, "training.eval_samples": 0},
        {"infra.deepspeed_extra": "{zero_optimization: {overlap_comm: false}}"},
    ],
)
def test_what_is_allowed(settings: dict[str, Any]) -> None:
    load(settings)


@pytest.mark.parametrize(
    ("settings", "decided"),
    [
        ({"infra.fsdp_cpu_offload": "false"}, {"infra.offload_optimizer": "none", "infra.offload_params": "none"}),
        (FSDP | {"infra.fsdp_cpu_offload": "true"}, {"infra.offload_optimizer": "cpu"}),
        (
            FSDP | {"infra.fsdp_cpu_offload": "true", "infra.fsdp_sharding_strategy": "SHARD_GRAD_OP"},
            {"infra.sharding_stage": "zero2", "infra.offload_optimizer": "cpu", "infra.offload_params": "none"},
        ),
        ({"infra.fsdp_sharding_strategy": "HYBRID_SHARD"}, {"infra.sharding_stage": "zero3_hybrid"}),
        ({"infra.fsdp_sharding_strategy": "NO_SHARD"}, {"infra.sharding_stage": "zero0"}),
        ({"infra.fsdp_activation_checkpointing": "false"}, {"training.activation_checkpointing": "none"}),
        ({"infra.distributed_type": "ddp"}, {"infra.sharding_stage": "zero0", "infra.offload_optimizer": "none"}),
        ({"infra.sharding_stage": "zero0"}, {"infra.offload_optimizer": "none"}),
        ({"training.fp16": "true"}, {"training.bf16": False}),
        ({"training.num_train_steps": 500}, {"training.warmup_steps": 50}),
        ({"training.num_train_steps": 1001}, {"training.warmup_steps": 1000}),
    ],
)
def test_what_is_set_decides_what_is_not(settings: dict[str, Any], decided: dict[str, Any]) -> None:
    config = load(settings)
    assert {name: attrgetter(name)(config) for name in decided} == decided


def test_several_contradictions_are_reported_together() -> None:
    with pytest.raises(ConfigError, match="3 problems"):
        load({"training.average_checkpoints": 1, "infra.sharding_stage": "zero2_hybrid", "data.dataset_name": "text"})


def test_auto_needs_one_engine_that_can_do_all() -> None:
    with pytest.raises(ConfigError) as caught:
        load(AUTO | {"infra.sharding_stage": "zero2_hybrid", "training.fp16": "true", "training.bf16": "false"})
    assert "2 problems" in str(caught.value)
    assert "DeepSpeed has no hybrid of ZeRO-2" in str(caught.value)
    assert "FSDP2 has no loss scaling" in str(caught.value)


def test_contradictions_are_reported_beside_invalid_fields_that_they_do_not_touch() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"training.average_checkpoints": 1, "training.seed": "x", "infra.sharding_stage": "zero9"})
    message = str(caught.value)
    assert "3 problems" in message
    assert "averaging needs 2 or more" in message
    assert "offload" not in message  # nobody knows what zero9 was meant to be


def test_rules_with_the_same_text_are_each_judged() -> None:
    rules = [(is_broken, "a b", "at most one: or none") for is_broken in ("yes", True, 0)]
    assert list(broken(*rules)) == [Conflict(("a", "b"), "at most one: or none")] * 2


def test_a_configuration_built_in_python_is_checked_too() -> None:
    with pytest.raises(ValidationError, match="at most one may be true"):
        FullConfig(training=TrainingConfig(fp16=True, bf16=True))
    story = FullConfig(infra=InfraConfig(distributed_type="ddp"))
    assert (story.infra.sharding_stage, story.infra.offload_optimizer, story.infra.num_gpus) == ("zero0", "none", 8)
    assert FullConfig(training=TrainingConfig(fp16=True)).training.bf16 is False


def test_a_single_sound_field_never_contradicts_a_default_of_the_monitor() -> None:
    short = load({"infra.distributed_timeout_minutes": 15, "training.max_grad_norm": 50})
    assert (short.infra.hang_timeout_minutes, short.monitor.grad_norm_threshold) == (None, 10.0)
    never = load({"infra.distributed_timeout_minutes": 15, "infra.hang_timeout_minutes": 0})
    assert never.infra.hang_timeout_minutes == 0


@pytest.mark.parametrize(
    ("settings", "engines"),
    [
        ({}, ["deepspeed"]),
        (FSDP, ["fsdp"]),
        (DDP, ["fsdp"]),
        (AUTO, ["deepspeed", "fsdp"]),
        (AUTO | {"training.torch_compile": "true"}, ["deepspeed", "fsdp"]),
        (AUTO | {"training.torch_compile": "true", "training.freeze": "shared.*"}, ["fsdp"]),
        (AUTO | {"training.fp16": "true", "training.bf16": "false"}, ["deepspeed"]),
    ],
)
def test_the_engines_that_a_configuration_leaves_the_choice_of(settings: dict[str, Any], engines: list[str]) -> None:
    assert [row.name for row in engine_candidates(load(settings))] == engines


@pytest.mark.parametrize(("schedule", "end"), [("linear", 0.0), ("constant", 1.0), ("wsd", 0.1)])
def test_an_end_that_the_schedule_has_is_taken(schedule: str, end: float) -> None:
    config = load_config(None, [f"training.lr_scheduler_type={schedule}", f"training.min_lr_ratio={end}"])
    assert config.training.min_lr_ratio == end


@pytest.mark.parametrize("schedule", ["linear", "constant", "inverse_sqrt"])
def test_the_default_of_an_end_is_refused_where_a_person_gave_it(schedule: str, tmp_path: Path) -> None:
    settings = [f"training.lr_scheduler_type={schedule}"]
    with pytest.raises(ConfigError, match=r"(?s)training\.min_lr_ratio = 0\.1.*or remove min_lr_ratio"):
        load_config(None, [*settings, "training.min_lr_ratio=0.1"])
    file = tmp_path / "config.yaml"
    load_config(None, settings).to_yaml(file)  # a run writes all fields
    assert load_config(file, ["training.seed=3"]).training.lr_scheduler_type == schedule


def test_numbers_of_adam_are_refused_where_the_optimizer_ignores_them(tmp_path: Path) -> None:
    own = "training.optimizer=my_parts:Lion"
    ways = [("beta1=0.8", "= 0.8"), ("beta2=0.999", "= 0.999"), ("epsilon=1e-6", "= 1e-06")]  # one is the default
    for setting, value in ways:
        with pytest.raises(ConfigError, match=rf"(?s)training\.adam_\w+ {value}.*in training\.optimizer_args"):
            load_config(None, [own, f"training.adam_{setting}"])
    with pytest.raises(ConfigError, match=r"(?s)muon_momentum = 0\.9.*adamw does not read .*training\.optimizer=muon"):
        load_config(None, ["training.muon_momentum=0.9"])
    load(FSDP | {"training.optimizer": "muon", "training.muon_momentum": 0.9, "training.adam_beta1": 0.8})
    load_config(None, [own]).to_yaml(tmp_path / "config.yaml")  # a run writes all fields
    assert load_config(tmp_path / "config.yaml", ["training.seed=3"]).training.adam_beta1 == 0.9


def test_a_limit_of_null_clips_nothing() -> None:
    assert load_config(None, ["training.max_grad_norm=null"]).training.max_grad_norm == 0
