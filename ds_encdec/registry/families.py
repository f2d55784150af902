"""Lists the families of decoder-only models that can be converted, a row of facts each, by `model_type`. Code elsewhere
reads the row of a family, never its name. `LAYER` has the facts in which the families' layers differ, as fields of our
own `config.json`, with Qwen3's values."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

# `qk_norm`: RMSNorm on each query and key head ("head"), over all heads at once ("all"), or "none". `norm_position`: of
# each layer's norms, "before" attention and MLP or "after" them. `unrotated_layers`: those whose queries and keys are
# not rotated, of a decoder as a list, of a model of our own as lists by side.
LAYER: dict[str, Any] = {
    "qk_norm": "head",
    "norm_position": "before",
    "attention_bias": False,  # of queries, keys and values
    "attention_output_bias": False,
    "mlp_bias": False,
    "unrotated_layers": {},
}
# Kinds of rotary embeddings, and the numbers that each needs beside the base.
ROPE_KINDS: dict[str, tuple[str, ...]] = {"default": (), "dynamic": (), "linear": ("factor",), "yarn": ("factor",)}
ROPE_KINDS["llama3"] = ("factor", "low_freq_factor", "high_freq_factor")
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2")


@dataclass(frozen=True, slots=True)
class Family:
    """One family of decoders.

    `title`: its name in texts. `layer`: what its layers have other than `LAYER`. `reads`: the fields of `LAYER`
    that its own `config.json` decides. `defaults`: the values of transformers' class for fields that a
    `config.json` may lack; without one, `head_dim` is hidden_size / num_attention_heads. `rope_theta`: the default
    base of its rotary embedding; None: a file must have it. `rope_kinds`: those that transformers' class reads.
    `renamed`: our part of a tensor's name → the family's. `fused`: the family's part → ours that it stacks.
    """

    title: str
    layer: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float | None = None
    rope_kinds: Collection[str] = tuple(ROPE_KINDS)
    renamed: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def layer_of(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts of `LAYER` of the model whose `config.json` has the fields `stored`, defaults included.
        Raises ValueError for a malformed one."""
        read = {name: stored[name] for name in self.reads if stored.get(name) is not None}
        if "no_rope_layer_interval" in self.defaults:  # `no_rope_layers` has 1 for each layer that rotates
            rotates, layers = stored.get("no_rope_layers"), stored["num_hidden_layers"]
            if rotates is None and isinstance(every := stored["no_rope_layer_interval"], int) and every > 0:
                rotates = [(number + 1) % every > 0 for number in range(layers)]
            if not isinstance(rotates, list) or len(rotates) < layers or any(one not in (0, 1) for one in rotates):
                raise ValueError(f"no_rope_layers is {rotates!r}: needed is 0 or 1 for each of {layers} layers")
            read["unrotated_layers"] = [number for number, rotated in enumerate(rotates[:layers]) if not rotated]
        if "attention_bias" in read and "attention_output_bias" not in self.reads:
            read["attention_output_bias"] = read["attention_bias"]  # one field for all four
        return {**LAYER, **self.layer, **read}

    def place(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, int]:
        """Return the family's tensor that holds our parameter `name`, and the row of it at which this begins. `shapes`:
        of our parameters."""
        stack, _, rest = name.partition(".")
        theirs = {"shared": f"model.embed_tokens.{rest}", "lm_head": name}.get(stack, f"model.{rest}")
        for ours, own in self.renamed.items():
            theirs = theirs.replace(f".{ours}.", f".{own}.")
        for own, parts in self.fused.items():
            for number, part in enumerate(parts):
                if f".{part}." in theirs:
                    before = sum(shapes[name.replace(part, other)][0] for other in parts[:number])
                    return theirs.replace(part, own), before
        return theirs, 0


_QWEN = {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_MISTRAL = {"max_position_embeddings": 131_072, "sliding_window": 4096}
_SMOLLM = {"max_position_embeddings": 32768, "tie_word_embeddings": True, "use_sliding_window": False}
_LLAMA = {"max_position_embeddings": 2048, "num_key_value_heads": None}

# The rows by `model_type`.
FAMILIES: dict[str, Family] = {
    "qwen3": Family("Qwen3", reads=("attention_bias",), defaults={**_QWEN, "head_dim": 128}),
    "qwen2": Family("Qwen2", layer={"qk_norm": "none", "attention_bias": True}, defaults=_QWEN),
    "llama": Family(
        "Llama", layer={"qk_norm": "none"}, reads=("attention_bias", "mlp_bias"), defaults=_LLAMA, rope_theta=1e4
    ),
    "mistral": Family("Mistral", layer={"qk_norm": "none"}, defaults=_MISTRAL, rope_theta=1e4),
    "smollm3": Family(
        "SmolLM3",
        layer={"qk_norm": "none"},
        reads=("attention_bias", "mlp_bias"),
        defaults={**_SMOLLM, "no_rope_layer_interval": 4},
        rope_theta=2e6,
    ),
    "olmo2": Family(
        "OLMo 2",
        layer={"qk_norm": "all", "norm_position": "after"},
        reads=("attention_bias",),
        defaults={**_LLAMA, "rms_norm_eps": 1e-5},
        rope_theta=1e4,
        renamed={"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"},
    ),
    "phi3": Family(
        "Phi-3",
        layer={"qk_norm": "none"},
        defaults={**_LLAMA, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        rope_theta=1e4,
        rope_kinds=("default",),
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    ),
}

# An encoder-decoder made here.
OF_OUR_OWN = "qwen3_seq2seq"
ENCODER_ALONE = "qwen3_seq2seq_encoder"
OWN = Family("encoder-decoder", reads=tuple(LAYER), defaults={"head_dim": 128, "max_position_embeddings": 40960})


def unknown_family(stored: Mapping[str, Any]) -> str:
    """Return what is wrong with the `model_type` in `stored`, which has no row, and which ones are known."""
    reason = ""
    if stored.get("is_encoder_decoder"):
        reason = ", which is an encoder-decoder already"
    elif any("expert" in name and value for name, value in stored.items()):
        reason = ", a mixture of experts, which no layer here is"
    known = ", ".join(f"{name} ({row.title})" for name, row in FAMILIES.items())
    return (
        f"model_type is {stored.get('model_type')!r}{reason}; needed is a dense decoder, {known}, or "
        f"{OF_OUR_OWN} (an encoder-decoder made here)"
    )
