"""Contradictions between fields: each is found, named by its fields, and no sound configuration is refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from ds_encdec.base.types import ConfigError
from ds_encdec.config.rules import engine_candidates
from ds_encdec.config.schema import FullConfig, InfraConfig, TrainingConfig, load_config

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


def cases(text: str) -> list[list[str]]:
    """The settings of each case of a table: cases end with the line or at a semicolon."""
    long = text.replace("SCRATCH", " ".join(f"{field}={value}" for field, value in SCRATCH.items()))
    long = long.replace("NVME", "infra.offload_optimizer=nvme infra.nvme_path=/local")
    long = long.replace("SIZES", SCRATCH["model.architecture"])
    return [re.split(r" (?=[\w.]+=)", case) for case in re.split(r"\n| ; ", long.strip())]


CONTRADICTIONS = """
monitor.window_size=5 ; training.per_device_train_batch_size=0 ; training.per_device_train_batch_size=atuo
training.global_batch_size=6 ; training.global_batch_size=8 data.num_lanes=4
training.per_device_train_batch_size=auto data.num_lanes=4 ; monitor.grad_norm_threshold=0.5
monitor.on_loss_spike=rollback training.save_total_limit=1
monitor.on_loss_spike=rollback training.save_steps=12
monitor.on_non_finite=rollback training.save_steps=99951 ; infra.hang_timeout_minutes=0.001
infra.distributed_timeout_minutes=1000000000000000.0 ; infra.hang_timeout_minutes=30
training.early_stopping_patience=2 training.eval_samples=0
training.teacher_weight=0.3 ; training.teacher=source training.teacher_weight=1.5
training.teacher=source training.teacher_temperature=0 ; training.teacher=source training.loss=mine:loss
training.teacher=source data.use_mode_tokens=true ; training.teacher=source data.ul2_task_weights=[1,1,1,1,0]
SCRATCH training.teacher=source
training.metric_for_best_model=distillation_loss
training.dpo.beta=0.2 ; data.objective=dpo training.label_smoothing=0.1 ; data.objective=dpo training.loss=mine:loss
data.objective=dpo training.z_loss=1e-4 ; data.objective=dpo training.dpo.loss=ipo training.dpo.label_smoothing=0.1
data.objective=dpo training.dpo.beta=0 ; data.objective=dpo training.dpo.loss=kto
data.objective=dpo training.teacher=source ; training.metric_for_best_model=reward_accuracy
data.objective=dpo training.metric_for_best_model=perplexity ; data.objective=dpo data.chat_targets=every
data.objective=dpo data.dataset_name=text data.data_files=x
training.save_on_best=true training.eval_samples=0 ; training.residual_dropout=1.0
infra.distributed_type=fsdp training.attention_dropout=0.1 training.activation_checkpointing=selective
training.save_strategy=best training.eval_samples=0
training.save_strategy=best monitor.on_loss_spike=rollback ; training.metric_for_best_model=eval_rougeL
training.metric_for_best_model=exactmatch ; training.load_best_model_at_end=true training.export_at_end=false
SCRATCH model.architecture.num_key_value_heads=3 ; SCRATCH model.architecture.head_dim=15
SCRATCH model.architecture.vocab_size=357
SCRATCH model.architecture.vocab_size=362 data.use_mode_tokens=true
SCRATCH model.architecture.max_position_embeddings=4000 ; SCRATCH model.model_name_or_path=x
model.model_name_or_path=null ; model.architecture=SIZES ; training.fp16=true training.bf16=true
training.bf16=false training.fp16=true infra.device=cpu
training.bf16=false training.fp16=true infra.sharding_stage=zero0 infra.offload_optimizer=none
infra.sharding_stage=zero0 infra.offload_optimizer=cpu ; infra.sharding_stage=zero2 infra.offload_params=cpu
infra.sharding_stage=zero2_hybrid ; training.optimizer=muon
infra.distributed_type=fsdp training.optimizer=muon model.lora={} ; model.lora={} training.freeze=encoder.*
model.lora.target_modules=[] ; model.lora.target_modules=[q_proj,k] ; model.lora.quantize=nf4
infra.distributed_type=fsdp model.lora.quantize=nf4
infra.deepspeed_extra.zero_optimization.zero_quantized_nontrainable_weights=true
infra.deepspeed_extra.zero_optimization.leaf_module.names=[encoder] training.freeze=shared.*
infra.distributed_type=ddp infra.sharding_stage=zero3 ; training.activation_checkpointing=selective
training.torch_compile=true training.freeze=shared.* ; infra.fsdp_reduce_every_micro_batch=true
infra.distributed_type=fsdp training.fp16=true training.bf16=false
infra.distributed_type=fsdp infra.offload_optimizer=nvme infra.nvme_path=/local
infra.distributed_type=fsdp infra.offload_params=cpu infra.offload_optimizer=none ; infra.hybrid_shard_size=4
model.tokenizer_name_or_path=builtin ; infra.offload_optimizer=nvme
NVME infra.sharding_stage=zero2 ; infra.offload_params=nvme
NVME infra.deepspeed_extra.zero_optimization.offload_optimizer.pipeline_read=true
infra.deepspeed_extra={"with blanks": 1}
infra.deepspeed_extra={bf16: {bf16_optimizer_states: true}} infra.offload_optimizer=none
infra.deepspeed_extra={bf16: {bf16_master_weights_and_grads: true}} infra.offload_optimizer=none
infra.deepspeed_extra={bf16: {bf16_master_weights_and_grads: true,bf16_optimizer_states: true}}
training.num_train_steps=9 training.warmup_steps=9 ; training.warmup_steps=0
training.lr_scheduler_type=wsd training.wsd_decay_fraction=0.995 ; training.min_lr_ratio=0.2
training.lr_scheduler_type=constant training.min_lr_ratio=0 ; training.wsd_decay_fraction=0.2
data.dataset_name=parquet ; data.dataset_name=builtin data.data_files=x ; data.mixture=[]
data.mixture=[{weight: 1,dataset_name: text}]
data.mixture=[{weight: 1,dataset_name: builtin}] data.dataset_name=c4
data.mixture=[{weight: 1,dataset_name: builtin}] data.text_column=other ; data.ul2_task_weights=[0,0,0,0,0]
data.ul2_task_weights=[1,0,-1,0,0] ; data.ul2_task_weights=[1,1,x,1,1] ; data.ul2_task_weights={S: -1}
data.ul2_task_weights={S: x} ; data.ul2_task_weights={R1: 1,r2: 1}
infra.deepspeed_extra={optimizer: {params: 5}} ; data.eval_fraction=0 ; training.average_checkpoints=1
infra.deepspeed_extra={gradient_clipping: 1.0} ; data.dataset_name=jsonl data.data_files=a.jsonl
infra.deepspeed_extra={optimizer: {params: {fused: true,foreach: true}}}
infra.deepspeed_extra={optimizer: {params: {torch_adam: false}}}
infra.deepspeed_extra={scheduler: {params: {warmup_min_lr: 1e-6}}} training.lr_scheduler_type=wsd
data.objective=contrastive model.decoder_layers=2 ; data.objective=contrastive training.label_smoothing=0.1
data.objective=contrastive data.max_decoder_length=64 ; data.objective=contrastive data.field_mapping={text: a}
data.objective=contrastive data.input_template=x ; data.objective=contrastive data.dataset_name=builtin
data.objective=contrastive training.metric_for_best_model=perplexity ; training.contrastive.temperature=0.1
data.objective=contrastive training.contrastive.matryoshka_dims=[64,32] ; data.objective=mntp data.num_negatives=1
data.objective=mntp model.cross_attention=aligned ; data.objective=mntp training.eval_generate_samples=8
data.objective=mntp training.metric_for_best_model=mrr ; data.mask_share=0.5 ; data.objective=mntp data.mask_share=1
data.objective=mntp training.teacher=source
"""


def test_contradictions(golden: Callable[[object], None]) -> None:
    found = []
    for settings in cases(CONTRADICTIONS):
        with pytest.raises(ConfigError) as caught:
            load_config(None, settings)
        heading, _, problem = str(caught.value).partition("\n")
        assert heading == "The configuration has 1 problem:", problem
        found.append(problem)
    golden("\n".join(found))


ALLOWED = """
SCRATCH ; SCRATCH model.architecture.vocab_size=358 ; training.bf16=false
training.bf16=false training.fp16=true ; infra.sharding_stage=zero0 infra.offload_optimizer=none
infra.offload_params=cpu ; infra.sharding_stage=zero3_hybrid infra.fsdp_sharding_strategy=HYBRID_SHARD
infra.sharding_stage=zero2_hybrid infra.distributed_type=fsdp
infra.distributed_type=auto training.optimizer=muon
training.activation_checkpointing=selective infra.distributed_type=fsdp
infra.distributed_type=fsdp training.torch_compile=true training.activation_checkpointing=selective
training.torch_compile=true infra.sharding_stage=zero2 ; training.torch_compile=true
infra.distributed_type=fsdp infra.sharding_stage=zero2_hybrid infra.hybrid_shard_size=4
infra.distributed_type=fsdp training.warmup_steps=0
infra.distributed_type=auto infra.sharding_stage=zero2_hybrid
infra.distributed_type=ddp model.lora.quantize=nf4 model.lora.target_modules=q_proj
infra.distributed_type=auto training.fp16=true training.bf16=false
infra.fsdp_cpu_offload=true infra.offload_optimizer=cpu
training.num_train_steps=10 training.lr_scheduler_type=WarmupLR
training.num_train_steps=10 training.lr_scheduler_type=constant
training.warmup_steps=0 training.lr_scheduler_type=cosine
training.lr_scheduler_type=linear training.min_lr_ratio=0.0
training.lr_scheduler_type=constant training.min_lr_ratio=1.0
training.lr_scheduler_type=wsd training.min_lr_ratio=0.1
data.dataset_name=org/corpus data.data_files=part-0.parquet
data.mixture=[{weight: 1,dataset_name: builtin},{weight: 2,dataset_name: random}]
data.eval_fraction=0 training.eval_samples=0
"""


def test_what_is_allowed() -> None:
    for settings in cases(ALLOWED):
        load_config(None, settings)


DECIDING = """
infra.fsdp_cpu_offload=false ; infra.distributed_type=fsdp infra.fsdp_cpu_offload=true
infra.distributed_type=fsdp infra.fsdp_cpu_offload=true infra.fsdp_sharding_strategy=SHARD_GRAD_OP
infra.fsdp_sharding_strategy=HYBRID_SHARD ; infra.fsdp_sharding_strategy=NO_SHARD
infra.fsdp_activation_checkpointing=false ; infra.distributed_type=ddp ; infra.sharding_stage=zero0 ; training.fp16=true
training.num_train_steps=500 ; training.num_train_steps=1001 ; training.max_grad_norm=null
"""


def test_what_is_set_decides_what_is_not(golden: Callable[[object], None]) -> None:
    defaults = FullConfig().dump_yaml().splitlines()
    for settings in cases(DECIDING):
        lines = load_config(None, settings).dump_yaml().splitlines()
        golden("\n".join([" ".join(settings), *(line for line in lines if line not in defaults)]))


SEVERAL = """
training.average_checkpoints=1 infra.sharding_stage=zero2_hybrid data.dataset_name=text
infra.distributed_type=auto infra.sharding_stage=zero2_hybrid training.fp16=true training.bf16=false
training.average_checkpoints=1 training.seed=x infra.sharding_stage=zero9
"""
"""With `auto` one engine must be able to do all; beside a wrong value others are contradicted that do not touch it."""


def test_several_contradictions_are_reported_together(golden: Callable[[object], None]) -> None:
    for settings in cases(SEVERAL):
        with pytest.raises(ConfigError) as caught:
            load_config(None, settings)
        golden(caught.value)


def test_a_configuration_built_in_python_is_checked_too() -> None:
    with pytest.raises(ValidationError, match="at most one may be true"):
        FullConfig(training=TrainingConfig(fp16=True, bf16=True))
    story = FullConfig(infra=InfraConfig(distributed_type="ddp"))
    assert (story.infra.sharding_stage, story.infra.offload_optimizer, story.infra.num_gpus) == ("zero0", "none", 8)
    assert FullConfig(training=TrainingConfig(fp16=True)).training.bf16 is False


@pytest.mark.parametrize(
    ("settings", "engines"),
    [
        ({}, "deepspeed"),
        (FSDP, "fsdp"),
        (DDP, "fsdp"),
        (AUTO, "deepspeed fsdp"),
        (AUTO | {"training.torch_compile": "true", "training.freeze": "shared.*"}, "fsdp"),
        (AUTO | {"training.fp16": "true", "training.bf16": "false"}, "deepspeed"),
    ],
)
def test_the_engines_that_a_configuration_leaves_the_choice_of(settings: dict[str, Any], engines: str) -> None:
    assert " ".join(row.name for row in engine_candidates(load(settings))) == engines


def test_written_numbers_are_refused_where_schedule_or_optimizer_ignores_them() -> None:
    for settings in (
        {"training.lr_scheduler_type": "linear", "training.min_lr_ratio": 0.1},
        {"training.optimizer": "my_parts:Lion", "training.adam_beta1": 0.8},
        {"training.muon_momentum": 0.9},
    ):
        with pytest.raises(ConfigError, match=r"training\.(adam_beta1|m\w+) = [\s\S]*does not read it"):
            load(settings)
    load(FSDP | {"training.optimizer": "muon", "training.muon_momentum": 0.9, "training.adam_beta1": 0.8})
