"""The runs whose memory is measured under FSDP2 and estimated: a model whose parameters dwarf its activations."""

from __future__ import annotations

from typing import Any

from ds_encdec.config.schema import FullConfig, InfraConfig
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig

TOKENS = 4

CASES: dict[str, dict[str, Any]] = {
    "zero0": {},
    "zero2": {},
    "zero2 one-micro-batch": {"gradient_accumulation_steps": 1},
    "zero3": {},
    "zero3 reduced": {"fsdp_reduce_every_micro_batch": True},
    "zero3 untied": {},
    "zero3_hybrid": {"hybrid_shard_size": 2},
    "zero0 muon": {"optimizer": "muon"},
    "zero3 muon": {"optimizer": "muon"},
}
"""Fields of `training` and `infra` beside the sharding stage, which is a name's first word."""


def model_of(case: str) -> Qwen3Seq2SeqConfig:
    """Rows that do not divide evenly: the first rank holds more than the others."""
    return Qwen3Seq2SeqConfig(
        vocab_size=255,
        hidden_size=250,
        intermediate_size=511,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings="untied" not in case,
        loss_chunk_tokens=TOKENS,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )


def config_of(case: str) -> FullConfig:
    """A run on the CPU, of two micro-batches a step unless the case says otherwise."""
    stage = case.split()[0]
    training: dict[str, Any] = {"activation_checkpointing": "none", "gradient_accumulation_steps": 2, "warmup_steps": 0}
    infra: dict[str, Any] = {
        "distributed_type": "ddp" if stage == "zero0" else "fsdp",
        "device": "cpu",
        "offload_optimizer": "none",
        "sharding_stage": stage,
    }
    for name, value in CASES[case].items():
        (infra if name in InfraConfig.model_fields else training)[name] = value
    return FullConfig.model_validate({"training": training, "infra": infra})
