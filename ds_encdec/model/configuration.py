"""The configurations of both models, as saved in `config.json`."""

from typing import Any, ClassVar

from transformers import PretrainedConfig

from .cross_attention import FORMS, POSITIONS, encoder_form

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_cache": True,
    "pad_token_id": 151643,
    "eos_token_id": 151645,
    "decoder_start_token_id": 151643,
    "cross_attention": "final",
    "encoder_positions": "unrotated",
    "encoder_heights": None,
    "loss_chunk_tokens": 1024,
    "use_flash_attention": True,
    "qk_norm": "head",
    "norm_position": "before",
    "attention_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "unrotated_layers": {},
}
ROPE_KINDS = ("default", "linear", "yarn", "llama3")


class Qwen3Seq2SeqConfig(PretrainedConfig):
    """Sizes and form of a layer, the number of layers on either side, and the task's token ids; lengths are in tokens.
    `num_hidden_layers` counts decoder layers (generation and its cache use that name), `num_encoder_layers` encoder
    layers, by default all that the decoder reads; both sides share every other size. Without decoder layers it is an
    encoder alone. `cross_attention` and `encoder_positions` are names in cross_attention.py. `encoder_heights`, of the
    aligned form: for each decoder layer, behind how many encoder layers it reads their states; ascending, and the last
    one is all of them. As in Qwen3, `head_dim` is independent of the other sizes. `sentinel_token_ids` are the ids of
    `<extra_id_0>`, `<extra_id_1>`, …; `mode_token_ids` those of the optional tokens that name a denoiser, in the order
    R1, R2, X1, X2, S. `loss_chunk_tokens`: positions whose logits exist at one time in the packed training form.
    `use_flash_attention`: allow variable-length flash kernels there on CUDA.

    A layer is Qwen3's unless its fields differ. `qk_norm`: RMSNorm on each query and key head ("head"), over all heads
    at once ("all"), or "none". `norm_position`: of the norms, "before" attention and MLP, or "after" them.
    `attention_bias` is that of queries, keys and values. `unrotated_layers`: by side, the layers that do not rotate
    queries and keys. `rope_parameters`: of a kind in `ROPE_KINDS`."""

    model_type = "qwen3_seq2seq"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]  # the Trainer adds a list to it

    def __init__(self, **kwargs: Any) -> None:
        fields = _DEFAULTS | kwargs
        if (heads := fields["num_attention_heads"]) % (key_heads := fields["num_key_value_heads"]):
            raise ValueError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({key_heads})")
        if (head_dim := fields["head_dim"]) % 2:
            raise ValueError(f"head_dim ({head_dim}) must be even: rotary embeddings turn pairs")
        for name, known in (("cross_attention", FORMS), ("encoder_positions", POSITIONS)):
            if fields[name] not in known:
                raise ValueError(f"{name} is {fields[name]!r}, which this code does not know: {', '.join(known)}")
        form = FORMS[fields["cross_attention"]]
        scaled, rope = fields.pop("rope_scaling", None), fields.pop("rope_parameters", None)
        base = (rope or {}).get("rope_theta") or kwargs.get("rope_theta") or 1e6
        rope = {"rope_theta": base, **(scaled or rope or {})}  # the older name precedes
        rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
        if (kind := rope["rope_type"]) not in ROPE_KINDS:
            raise ValueError(
                f"{'rope_scaling' if scaled else 'rope_parameters'} has the rope type {kind!r}, which this model does "
                f"not compute: remove it, or take one of {', '.join(ROPE_KINDS)}"
            )
        if kind in ("yarn", "llama3"):
            rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
        # Set here, since Hugging Face checks the rotary parameters before it sets fields, and drops `use_cache`.
        self.use_cache = fields.pop("use_cache")
        self.rope_parameters, self.max_position_embeddings = rope, fields["max_position_embeddings"]
        if fields.get("num_encoder_layers") is None:
            fields["num_encoder_layers"] = fields["num_hidden_layers"] - form.is_aligned
        fields["encoder_heights"] = _check_heights(fields) if form.is_aligned else None
        for name in ("sentinel_token_ids", "mode_token_ids"):
            fields[name] = list(fields.get(name) or [])
        # Constants of the architecture: an older file cannot turn them off. Hugging Face picks a loss by class name; an
        # unknown name would get the causal one, which shifts the labels a second time.
        super().__init__(**fields | {"is_encoder_decoder": True, "loss_type": "ForMaskedLM"})


def _check_heights(fields: dict[str, Any]) -> list[int]:
    layers, decoders = fields["num_encoder_layers"], fields["num_hidden_layers"]
    heights = list(range(decoders)) if fields["encoder_heights"] is None else list(fields["encoder_heights"])
    if len(heights) != decoders or heights != sorted(heights) or heights[0] < 0 or heights[-1] != layers:
        raise ValueError(
            f"encoder_heights is {heights}: needed are {decoders} ascending numbers from 0, the last of them "
            f"num_encoder_layers ({layers})"
        )
    return heights


class Qwen3EncoderConfig(Qwen3Seq2SeqConfig):
    """The configuration of an encoder alone: `num_hidden_layers` counts its layers."""

    model_type = "qwen3_seq2seq_encoder"
    attribute_map: ClassVar[dict[str, str]] = {"num_encoder_layers": "num_hidden_layers"}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.is_encoder_decoder = False

    @classmethod
    def of(cls, config: Qwen3Seq2SeqConfig) -> "Qwen3EncoderConfig":
        """Return the configuration of the encoder of `config`; see `encoder_form`."""
        others = ("model_type", "num_encoder_layers", "cross_attention", "encoder_positions", "encoder_heights")
        fields = {name: value for name, value in config.to_dict().items() if name not in others}
        form = {"cross_attention": encoder_form(config)}
        return cls(**fields | form | {"num_hidden_layers": config.num_encoder_layers})
