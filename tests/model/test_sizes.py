"""Parameter count and FLOPs against the real model and against torch's own counter."""

from __future__ import annotations

import pytest
from tiny_models import pack, tiny_config, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ds_encdec.config.schema import ArchitectureConfig, FullConfig
from ds_encdec.model import attention_kernels
from ds_encdec.model.parameter_count import (
    count_parameters,
    forward_flops,
    parameter_shapes,
    trained_share,
    training_flops,
)

QWEN3_0_6B = ArchitectureConfig(
    vocab_size=151936,
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False}, {"num_encoder_layers": 3}, {"num_key_value_heads": 1}], ids=str
)
def test_names_and_shapes_are_the_models(changes: dict[str, int]) -> None:
    config = tiny_config(**changes)
    model = tiny_model(**changes)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shapes = parameter_shapes(config)
    assert list(shapes.items()) == list(expected.items())
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


def test_flops_equal_what_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's counter takes causal attention in full; the pairs above the diagonal are added to ours."""
    monkeypatch.setattr(attention_kernels, "_JOINED_SCORES", 0)  # each document by itself: none of its scores is masked
    encoder_lengths, decoder_lengths = (5, 0, 7), (4, 6, 3)
    model = tiny_model(num_encoder_layers=3).train()
    batch = pack(encoder_lengths, decoder_lengths, 12, 13)  # no padding
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = model(**batch.inputs)
        head_product = 2 * 13 * 32 * 97
        forward_counted = counter.get_total_flops()
        output.loss.backward()
    config = model.config
    hidden_pairs = sum(length * (length - 1) // 2 for length in decoder_lengths)
    unseen = 4 * config.num_attention_heads * config.head_dim * hidden_pairs * config.num_hidden_layers
    expected_forward = forward_flops(config, encoder_lengths, decoder_lengths) + unseen
    # The head computes its gradients in the forward pass; that of its weight by addmm_, which is not counted.
    assert forward_counted == expected_forward + head_product
    assert counter.get_total_flops() == 3 * expected_forward - head_product


def test_the_gradients_of_frozen_weights_are_not_counted() -> None:
    forward = forward_flops(QWEN3_0_6B, [5], [4])
    assert training_flops(QWEN3_0_6B, [5], [4]) == 3 * forward
    settings = FullConfig.model_validate({"training": {"freeze": ["encoder.*"]}})
    share = trained_share(settings, QWEN3_0_6B)
    assert share == pytest.approx(0.5751, abs=1e-4)
    assert training_flops(QWEN3_0_6B, [5], [4], share) == pytest.approx((2 + share) * forward)


def test_config_refuses_odd_heads() -> None:
    with pytest.raises(ValueError, match="head_dim"):
        tiny_config(head_dim=7)
