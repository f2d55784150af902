"""Floating-point operations that a micro-batch needs, for the model-FLOPs utilisation (MFU).

Counted is what the mathematics asks for: real tokens only, matrix products forward and backward (a multiplication and
an addition are two operations), attention over visible pairs only. Not counted: padding, recomputation by activation
checkpointing, normalisation and element-wise work (PaLM, arXiv 2204.02311, appendix B, counts likewise, though it
takes causal attention in full).
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_encdec.model.parameter_count import ModelSizes, num_encoder_layers

BACKWARD_PER_FORWARD = 2
"""The backward pass makes two products of each one: for the gradient of the input and of the weight."""


def training_flops(sizes: ModelSizes, encoder_lengths: Sequence[int], decoder_lengths: Sequence[int]) -> int:
    """Operations of one forward and backward pass over documents of these lengths (tokens, one entry each)."""
    return (1 + BACKWARD_PER_FORWARD) * forward_flops(sizes, encoder_lengths, decoder_lengths)


def forward_flops(sizes: ModelSizes, encoder_lengths: Sequence[int], decoder_lengths: Sequence[int]) -> int:
    """Operations of one forward pass over documents of these lengths (tokens, one entry each)."""
    encoder_tokens, decoder_tokens = sum(encoder_lengths), sum(decoder_lengths)
    query_weights = sizes.hidden_size * sizes.num_attention_heads * sizes.head_dim
    key_weights = sizes.hidden_size * sizes.num_key_value_heads * sizes.head_dim
    layer_weights = 2 * query_weights + 2 * key_weights + 3 * sizes.hidden_size * sizes.intermediate_size
    # Each visible query-key pair costs a dot product for its score and a scaled addition of its value.
    pair_products = 2 * sizes.num_attention_heads * sizes.head_dim
    encoder_pairs = sum(length * length for length in encoder_lengths)
    merged_pairs = sum(d * e + d * (d + 1) // 2 for e, d in zip(encoder_lengths, decoder_lengths, strict=True))
    encoder_layer = layer_weights * encoder_tokens + pair_products * encoder_pairs
    # Every decoder layer also projects the encoder's output to its own keys and values.
    decoder_layer = layer_weights * decoder_tokens + 2 * key_weights * encoder_tokens + pair_products * merged_pairs
    head = sizes.hidden_size * sizes.vocab_size * decoder_tokens
    return 2 * (num_encoder_layers(sizes) * encoder_layer + sizes.num_hidden_layers * decoder_layer + head)
