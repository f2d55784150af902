"""The runs whose memory is measured and estimated: a model whose parameters dwarf its activations."""

from __future__ import annotations

from typing import Any

from ds_encdec.config.schema import FullConfig, InfraConfig
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig

ACCUMULATION = 2
TOKENS = 4

MODEL = Qwen3Seq2SeqConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    loss_chunk_tokens=TOKENS,
    pad_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=0,
)

BOUNDED: dict[str, Any] = {
    "stage3_max_live_parameters": 800_000,
    "stage3_max_reuse_distance": 800_000,
    "sub_group_size": 200_000,
}
CASES: dict[str, dict[str, Any]] = {
    "zero0": {},
    "zero1": {},
    "zero1 overlap": {"zero": {"overlap_comm": True}},
    "zero2": {},
    "zero2 bf16-states": {"extra": {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}},
    "zero2 offload float32": {"offload_optimizer": "cpu", "bf16": False},
    # Before others of stage 3, which leave DeepSpeed's linear layers in the place of torch's: recomputation needs none.
    "zero3 bounded recomputed": {"zero": BOUNDED, "activation_checkpointing": "full"},
    "zero3": {},
    "zero3 bounded": {"zero": BOUNDED},
    "zero3 offload": {"offload_optimizer": "cpu", "offload_params": "cpu"},
    "zero3_hybrid": {"hybrid_shard_size": 2},
    # Last: what DeepSpeed leaves of this one goes when the next is built, in the middle of its measurement.
    "zero1 float32-accumulation": {"extra": {"data_types": {"grad_accum_dtype": "fp32"}}},
}
"""Arguments of `memory_config` beside the sharding stage, which is a name's first word."""


def memory_config(
    *,
    sharding_stage: str,
    zero: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    **overrides: Any,
) -> FullConfig:
    """A bf16 run. `overrides`: fields of `training` and `infra`.

    `zero`: keys of DeepSpeed's `zero_optimization`; `extra`: other keys of its JSON.
    """
    training: dict[str, Any] = {
        "bf16": True,
        "activation_checkpointing": "none",
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
    }
    infra: dict[str, Any] = {"device": "cpu", "offload_optimizer": "none", "sharding_stage": sharding_stage}
    for name, value in overrides.items():
        (infra if name in InfraConfig.model_fields else training)[name] = value
    # As with real models: a bucket holds a layer's largest matrix, and only norms are small enough to stay whole.
    buckets: dict[str, Any] = {} if sharding_stage == "zero0" else {"reduce_bucket_size": 140_000}
    if sharding_stage.startswith("zero3"):
        buckets |= {"stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 140_000}
    infra["deepspeed_extra"] = {"zero_optimization": buckets | (zero or {}), **(extra or {})}
    return FullConfig.model_validate({"training": training, "infra": infra})
