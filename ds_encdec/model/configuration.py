"""The configurations of both models, as saved in `config.json`.

This module is exported as remote code: it imports nothing of ds_encdec outside its folder.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig


class Qwen3Seq2SeqConfig(PretrainedConfig):
    """Sizes of a Qwen3 layer, the number of layers on either side, and the task's token ids; lengths are in tokens.

    `num_hidden_layers` counts decoder layers (generation and its cache use that name), `num_encoder_layers` encoder
    layers, by default as many; both sides share every other size. As in Qwen3, `head_dim` is independent of the other
    sizes. `sentinel_token_ids` are the ids of `<extra_id_0>`, `<extra_id_1>`, …; `mode_token_ids` those of the optional
    tokens that name a denoiser, in the order R1, R2, X1, X2, S. `loss_chunk_tokens`: positions whose logits exist at
    one time in the packed training form. `use_flash_attention`: allow variable-length flash kernels there on CUDA.
    """

    model_type = "qwen3_seq2seq"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]  # the Trainer adds a list to it

    def __init__(
        self,
        vocab_size: int = 151936,
        hidden_size: int = 1024,
        intermediate_size: int = 3072,
        num_hidden_layers: int = 28,
        num_encoder_layers: int | None = None,
        num_attention_heads: int = 16,
        num_key_value_heads: int = 8,
        head_dim: int = 128,
        hidden_act: str = "silu",
        max_position_embeddings: int = 40960,
        initializer_range: float = 0.02,
        rms_norm_eps: float = 1e-6,
        rope_parameters: dict[str, Any] | None = None,
        tie_word_embeddings: bool = True,
        use_cache: bool = True,
        pad_token_id: int = 151643,
        eos_token_id: int = 151645,
        decoder_start_token_id: int = 151643,
        sentinel_token_ids: list[int] | None = None,
        mode_token_ids: list[int] | None = None,
        loss_chunk_tokens: int = 1024,
        use_flash_attention: bool = True,
        **kwargs: Any,
    ) -> None:
        _refuse_impossible(num_attention_heads, num_key_value_heads, head_dim)
        _refuse_other_rotations(rope_parameters, kwargs)
        # Set here, since Hugging Face looks for the rotary parameters before it sets fields, and drops `use_cache`.
        self.use_cache = use_cache
        default = {"rope_type": "default", "rope_theta": kwargs.get("rope_theta") or 1e6}
        self.rope_parameters = rope_parameters or default
        own = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_hidden_layers,
            "num_encoder_layers": num_hidden_layers if num_encoder_layers is None else num_encoder_layers,
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
            "head_dim": head_dim,
            "hidden_act": hidden_act,
            "max_position_embeddings": max_position_embeddings,
            "initializer_range": initializer_range,
            "rms_norm_eps": rms_norm_eps,
            "tie_word_embeddings": tie_word_embeddings,
            "pad_token_id": pad_token_id,
            "eos_token_id": eos_token_id,
            "decoder_start_token_id": decoder_start_token_id,
            "sentinel_token_ids": list(sentinel_token_ids or []),
            "mode_token_ids": list(mode_token_ids or []),
            "loss_chunk_tokens": loss_chunk_tokens,
            "use_flash_attention": use_flash_attention,
            # Constants of the architecture: an older file cannot turn them off. Hugging Face picks a loss by class
            # name; an unknown name would get the causal one, which shifts the labels a second time.
            "is_encoder_decoder": True,
            "loss_type": "ForMaskedLM",
        }
        super().__init__(**kwargs | own)


def _refuse_impossible(heads: int, key_heads: int, head_dim: int) -> None:
    if heads % key_heads:
        raise ValueError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({key_heads})")
    if head_dim % 2:
        raise ValueError(f"head_dim ({head_dim}) must be even: rotary embeddings turn pairs")


def _refuse_other_rotations(rope_parameters: dict[str, Any] | None, others: dict[str, Any]) -> None:
    blocks = {"rope_parameters": rope_parameters or {}, "rope_scaling": others.get("rope_scaling") or {}}
    for name, rope in blocks.items():
        if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
            raise ValueError(f"{name} has the rope type {kind!r}, which this model does not compute: remove it")
    bases = [base for base in (others.get("rope_theta"), *(rope.get("rope_theta") for rope in blocks.values())) if base]
    if any(base != bases[0] for base in bases):
        raise ValueError(f"rope_theta, rope_parameters, rope_scaling: bases {bases} differ, keep that of the training")


class Qwen3EncoderConfig(Qwen3Seq2SeqConfig):
    """The configuration of an encoder alone: `num_hidden_layers` counts its layers."""

    model_type = "qwen3_seq2seq_encoder"
    attribute_map: ClassVar[dict[str, str]] = {"num_encoder_layers": "num_hidden_layers"}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.is_encoder_decoder = False

    @classmethod
    def of(cls, config: Qwen3Seq2SeqConfig) -> Qwen3EncoderConfig:
        """Return the configuration of the encoder of `config`."""
        fields = config.to_dict()
        for name in ("model_type", "num_encoder_layers"):
            del fields[name]
        return cls(**fields | {"num_hidden_layers": config.num_encoder_layers})
