"""Names, shapes and number of the model's parameters, which of them a run trains, and the model's operations; no torch.
*Canonical names*, which checkpoints and weight sources use, are those of `Qwen3ForSeq2SeqLM.named_parameters()`. A
matrix with an adapter keeps its name, although peft calls it `….q_proj.base_layer.weight`; its adapter's are
`….q_proj.lora_A.weight` and `….q_proj.lora_B.weight`. Operations are counted for the MFU (PaLM, arXiv 2204.02311,
appendix B): matrix products of real tokens and visible pairs, two for each multiplication and addition; not
recomputation, normalisation and element-wise work."""

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Protocol

from ds_encdec.base.types import ConfigError
from ds_encdec.config.sections import LoraConfig, Sections
from ds_encdec.model.cross_attention import form_of
from ds_encdec.registry.families import LAYER

# peft's name of the one adapter, which is part of the names of modules, and not of the files it saves.
ADAPTER = "default"
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"  # endings of the names of an adapter's two matrices
EMBEDDING_ROWS_MULTIPLE = 128  # embeddings that must grow do so to a multiple of this, for matrix kernels

Shapes = dict[str, tuple[int, ...]]


class ModelSizes(Protocol):
    """The sizes behind the parameters. `num_encoder_layers` and `cross_attention` may be missing: then both sides have
    equally many layers, and the form is `final`; without fields of `registry.families.LAYER` layers are Qwen3's."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool


def num_encoder_layers(sizes: ModelSizes) -> int:
    """Return the number of encoder layers."""
    return getattr(sizes, "num_encoder_layers", sizes.num_hidden_layers)


def parameter_shapes(sizes: ModelSizes) -> Shapes:
    """Return all parameters' shapes by canonical name, in the order of `named_parameters()`, without a tied head."""
    hidden, of_layer = sizes.hidden_size, _layer_shapes(sizes)
    shapes: Shapes = {"shared.weight": (sizes.vocab_size, hidden)}
    for side, layers in (("encoder", num_encoder_layers(sizes)), ("decoder", sizes.num_hidden_layers)):
        for layer in range(layers):
            shapes |= {f"{side}.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
        if layers if side == "decoder" else not form_of(sizes).has_own_norm:
            shapes[f"{side}.norm.weight"] = (hidden,)
    return shapes if sizes.tie_word_embeddings else shapes | {"lm_head.weight": shapes["shared.weight"]}


def _layer_shapes(sizes: ModelSizes) -> Shapes:
    form = {name: getattr(sizes, name, value) for name, value in LAYER.items()}
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    query, key = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    shapes: Shapes = {}

    def product(name: str, rows: int, columns: int, bias: str) -> None:
        shapes[f"{name}_proj.weight"] = (rows, columns)
        if form[bias]:
            shapes[f"{name}_proj.bias"] = (rows,)

    product("self_attn.q", query, hidden, "attention_bias")
    product("self_attn.k", key, hidden, "attention_bias")
    product("self_attn.v", key, hidden, "attention_bias")
    product("self_attn.o", hidden, query, "attention_output_bias")
    if form["qk_norm"] != "none":
        normed = {"head": (sizes.head_dim, sizes.head_dim), "all": (query, key)}[form["qk_norm"]]
        shapes |= {f"self_attn.{name}_norm.weight": (size,) for name, size in zip("qk", normed, strict=True)}
    product("mlp.gate", inner, hidden, "mlp_bias")
    product("mlp.up", inner, hidden, "mlp_bias")
    product("mlp.down", hidden, inner, "mlp_bias")
    before, after = ("input_layernorm", "post_attention_layernorm"), ("attention_output_norm", "mlp_output_norm")
    return shapes | {f"{name}.weight": (hidden,) for name in (before if form["norm_position"] == "before" else after)}


def count_parameters(sizes: ModelSizes) -> int:
    """Return the number of parameters; a tied embedding counts once."""
    return sum(map(prod, parameter_shapes(sizes).values()))


def training_flops(
    sizes: ModelSizes,
    encoder_lengths: Sequence[int],
    decoder_lengths: Sequence[int],
    trained_share: float = 1.0,
    encoder_labels: int = 0,
) -> float:
    """Return the operations of a forward and a backward pass over documents of these lengths (tokens). The backward
    pass makes two products for each forward one, for the gradients of input and weight (Kaplan et al., arXiv
    2001.08361, section 2.1); `trained_share` of the second are counted. `encoder_labels`: tokens predicted from the
    encoder's states."""
    head = 2 * sizes.hidden_size * sizes.vocab_size * encoder_labels
    return (2 + trained_share) * (forward_flops(sizes, encoder_lengths, decoder_lengths) + head)


def forward_flops(sizes: ModelSizes, encoder_lengths: Sequence[int], decoder_lengths: Sequence[int]) -> int:
    """Return the operations of one forward pass over documents of these lengths (tokens)."""
    encoder_tokens, decoder_tokens = sum(encoder_lengths), sum(decoder_lengths)
    query_weights = sizes.hidden_size * sizes.num_attention_heads * sizes.head_dim
    key_weights = sizes.hidden_size * sizes.num_key_value_heads * sizes.head_dim
    layer_weights = 2 * query_weights + 2 * key_weights + 3 * sizes.hidden_size * sizes.intermediate_size
    # A decoder token sees the whole input and, causally, the decoder's own tokens.
    encoder_pairs = sum(length * length for length in encoder_lengths)
    merged_pairs = sum(d * e + d * (d + 1) // 2 for e, d in zip(encoder_lengths, decoder_lengths, strict=True))
    pair = 2 * sizes.num_attention_heads * sizes.head_dim  # the score of query and key, and the value that it weighs
    encoder_layer = layer_weights * encoder_tokens + pair * encoder_pairs
    # Every decoder layer also projects encoder states to its own keys and values.
    decoder_layer = layer_weights * decoder_tokens + 2 * key_weights * encoder_tokens + pair * merged_pairs
    head = sizes.hidden_size * sizes.vocab_size * decoder_tokens
    return 2 * (num_encoder_layers(sizes) * encoder_layer + sizes.num_hidden_layers * decoder_layer + head)


def canonical_name(name: str) -> str:
    """Return the canonical name of a parameter that `named_parameters()` calls `name`."""
    return name.replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")


def is_adapter(name: str) -> bool:
    """Return whether `name` is one of an adapter's matrices."""
    return name.endswith((LORA_A, LORA_B))


def has_adapter(name: str, lora: LoraConfig) -> bool:
    """Return whether the parameter `name` is a matrix that has an adapter."""
    *place, module, kind = name.split(".")
    return place[1:2] == ["layers"] and module in lora.target_modules and kind == "weight"


def model_shapes(sizes: ModelSizes, lora: LoraConfig | None) -> Shapes:
    """Return all parameters' shapes, with adapters, by canonical name in the order of `named_parameters()`."""
    shapes: Shapes = {}
    adapters: Shapes = {}  # of the matrix before, whose bias may stand between
    for name, shape in parameter_shapes(sizes).items():
        if not name.endswith(".bias"):
            shapes |= adapters
            adapters = {}
        shapes[name] = shape
        if lora is not None and has_adapter(name, lora):
            module, (rows, columns) = name.removesuffix(".weight"), shape
            adapters = {module + LORA_A: (lora.r, columns), module + LORA_B: (rows, lora.r)}
    return shapes | adapters


def trained_shapes(config: Sections, sizes: ModelSizes) -> Shapes:
    """Return the shape of every parameter that `config` trains. Raises ConfigError as `frozen_names` does, and for
    embeddings that are to be larger than the model's states."""
    shapes, cut = model_shapes(sizes, config.model.lora), config.training.contrastive.matryoshka_dims
    if cut and cut[-1] > sizes.hidden_size:
        raise ConfigError(
            f"training.contrastive.matryoshka_dims has {cut[-1]}, but embeddings have the model's {sizes.hidden_size} "
            "numbers (hidden_size): leave larger sizes out"
        )
    frozen = frozen_names(config, shapes)
    return {name: shape for name, shape in shapes.items() if name not in frozen}


def trained_share(config: Sections, sizes: ModelSizes) -> float:
    """Return the parameters that `config` trains, as a share of all."""
    trained, shapes = trained_shapes(config, sizes), model_shapes(sizes, config.model.lora)
    return sum(map(prod, trained.values())) / sum(map(prod, shapes.values()))


def frozen_names(config: Sections, names: Collection[str]) -> frozenset[str]:
    """Return the `names` that `config` freezes. ConfigError for an unmatched pattern, or if nothing is trained."""
    if config.model.lora is not None:
        return frozenset(name for name in names if not is_adapter(name))
    matches = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in config.training.freeze}
    for pattern, matching in matches.items():
        if not matching:
            kinds = dict.fromkeys(re.sub(r"\b(encoder|decoder|\d+)\.", "*.", name) for name in names)
            raise ConfigError(f"training.freeze: no parameter is called {pattern!r}; there are {', '.join(kinds)}")
    frozen = frozenset(name for matching in matches.values() for name in matching)
    if frozen and len(frozen) == len(names):
        raise ConfigError(
            f"training.freeze: {', '.join(map(repr, matches))} match all {len(names)} parameters: leave some to train"
        )
    return frozen


def trained_summary(trained: int, parameters: int) -> str:
    """Return a line for logs with the numbers of trained parameters and of all."""
    return f"trainable parameters: {trained:,} of {parameters:,} ({trained / parameters:.2%})".replace("%", " %")
