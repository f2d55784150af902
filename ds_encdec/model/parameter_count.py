"""Names, shapes and number of the model's parameters, and its operations, from its sizes alone and without torch.

*Canonical names*, which checkpoints and weight sources use, are those of `Qwen3ForSeq2SeqLM.named_parameters()`.
Operations are counted for the MFU (PaLM, arXiv 2204.02311, appendix B): matrix products of real tokens and visible
pairs, two for each multiplication and addition; not recomputation, normalisation and element-wise work.
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Protocol

EMBEDDING_ROWS_MULTIPLE = 128  # embeddings that must grow do so to a multiple of this, for matrix kernels


class ModelSizes(Protocol):
    """The sizes behind the parameters; without `num_encoder_layers`, both sides have equally many layers."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102 - the schema documents them
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def num_hidden_layers(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_key_value_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def tie_word_embeddings(self) -> bool: ...  # noqa: D102


def num_encoder_layers(sizes: ModelSizes) -> int:
    """Return the number of encoder layers."""
    return getattr(sizes, "num_encoder_layers", sizes.num_hidden_layers)


def parameter_shapes(sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
    """Return all parameters' shapes by canonical name, in the order of `named_parameters()`, without a tied head."""
    embedding = (sizes.vocab_size, sizes.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": embedding}
    for side, layers in (("encoder", num_encoder_layers(sizes)), ("decoder", sizes.num_hidden_layers)):
        for layer, (name, shape) in product(range(layers), _layer_shapes(sizes).items()):
            shapes[f"{side}.layers.{layer}.{name}"] = shape
        shapes[f"{side}.norm.weight"] = (sizes.hidden_size,)
    if not sizes.tie_word_embeddings:
        shapes["lm_head.weight"] = embedding
    return shapes


def count_parameters(sizes: ModelSizes) -> int:
    """Return the number of parameters; a tied embedding counts once."""
    return sum(map(prod, parameter_shapes(sizes).values()))


def _layer_shapes(sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    query, key = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    return {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (sizes.head_dim,),
        "self_attn.k_norm.weight": (sizes.head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def training_flops(
    sizes: ModelSizes, encoder_lengths: Sequence[int], decoder_lengths: Sequence[int], trained_share: float = 1.0
) -> float:
    """Return the operations of a forward and a backward pass over documents of these lengths (tokens). The backward
    pass makes two products for each forward one, for the gradients of input and weight (Kaplan et al., arXiv
    2001.08361, section 2.1); `trained_share` of the second are counted."""
    return (2 + trained_share) * forward_flops(sizes, encoder_lengths, decoder_lengths)


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
    # Every decoder layer also projects the encoder's output to its own keys and values.
    decoder_layer = layer_weights * decoder_tokens + 2 * key_weights * encoder_tokens + pair * merged_pairs
    head = sizes.hidden_size * sizes.vocab_size * decoder_tokens
    return 2 * (num_encoder_layers(sizes) * encoder_layer + sizes.num_hidden_layers * decoder_layer + head)
