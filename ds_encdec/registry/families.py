"""Lists the families of decoder-only models that can be converted, a row of facts each, by `model_type`. Code elsewhere
reads the row of a family, never its name. `LAYER` has the facts in which the families' layers differ, as fields of our
own `config.json`, with Qwen3's values."""

from collections.abc import Mapping
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
ROPE_KINDS: dict[str, tuple[str, ...]] = {"default": (), **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",))}
ROPE_KINDS["llama3"] = ("factor", "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True, slots=True)
class Family:
    """One family of decoders.

    `title`: its name in texts. `layer`: what its layers have other than `LAYER`. `reads`: the fields of `LAYER` that
    its own `config.json` decides. `defaults`: the values of transformers' class for fields that a `config.json` may
    lack; without one, `head_dim` is hidden_size / num_attention_heads. `rope_theta`: the default base of its rotary
    embedding; None: a file must have it. `unrotated_every`: where `no_rope_layers` is missing, one layer in so
    many does not rotate; 0: all do. `renamed`: our part of a tensor's name → the family's. `fused`: the family's part →
    ours that it stacks.
    """

    title: str
    layer: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float | None = None
    unrotated_every: int = 0
    renamed: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def layer_of(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts of `LAYER` of the model whose `config.json` has the fields `stored`, defaults included."""
        read = {name: stored[name] for name in self.reads if stored.get(name) is not None}
        if self.unrotated_every:
            rotates = stored.get("no_rope_layers")  # for each layer 1 if it rotates, or 0
            every, layers = stored.get("no_rope_layer_interval", self.unrotated_every), stored["num_hidden_layers"]
            read["unrotated_layers"] = [n for n in range(layers) if not (rotates[n] if rotates else (n + 1) % every)]
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
        defaults={"max_position_embeddings": 32768, "tie_word_embeddings": True, "use_sliding_window": False},
        rope_theta=2e6,
        unrotated_every=4,
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
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    ),
}

# An encoder-decoder made here.
OF_OUR_OWN = "qwen3_seq2seq"
OWN = Family("encoder-decoder", reads=tuple(LAYER), defaults={"head_dim": 128})

# Fields of which each marks a mixture of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "moe_num_experts")
# Why models of a `model_type` that begins with the key have no row.
_OTHERS = {
    "gemma": "whose norms (1 + weight), scaled embedding, soft caps and windows no layer here has",
    "phi": "whose LayerNorms and partial rotation no layer here has",
}


def unknown_family(stored: Mapping[str, Any]) -> str:
    """Return what is wrong with the `model_type` in `stored`, which has no row, and which ones are known."""
    kind = stored.get("model_type")
    reasons = [why for beginning, why in _OTHERS.items() if str(kind).startswith(beginning)]
    if stored.get("is_encoder_decoder"):
        reasons = ["which is an encoder-decoder already"]
    elif any(stored.get(name) for name in _EXPERTS):
        reasons = ["a mixture of experts, which no layer here is"]
    known = ", ".join(f"{name} ({row.title})" for name, row in FAMILIES.items())
    return (
        f"model_type is {kind!r}{f', {reasons[0]}' if reasons else ''}; needed is a dense decoder, {known}, or "
        f"{OF_OUR_OWN} (an encoder-decoder made here)"
    )
