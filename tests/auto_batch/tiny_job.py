"""The job whose micro-batches are tried: a model of one narrow layer per stack, FSDP2 on one CPU."""

from __future__ import annotations

from ds_encdec.config.schema import FullConfig

MODEL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
}


def make_config(**training: object) -> FullConfig:
    return FullConfig.model_validate(
        {
            "model": {"tokenizer_name_or_path": "builtin", "architecture": MODEL},
            "data": {"max_encoder_length": 100, "max_decoder_length": 60},
            "training": training,
            "infra": {"device": "cpu", "distributed_type": "fsdp", "offload_optimizer": "none", "num_gpus": 1},
        }
    )
