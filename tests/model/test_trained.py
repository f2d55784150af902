"""What is trained, by name; how adapters begin; and what they are merged into."""

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model_state_dict, inject_adapter_in_model
from tiny_models import pack, tiny_config, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import FullConfig
from ds_encdec.model import attention_kernels
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.lora import choose_trained, merged_weights, with_new_adapters
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import (
    canonical_name,
    count_parameters,
    forward_flops,
    is_adapter,
    model_shapes,
    parameter_shapes,
    trained_shapes,
)
from ds_encdec.model.precision import Linear
from ds_encdec.model.weights import random_weights

SIZES: Qwen3Seq2SeqConfig = tiny_config()


def run(lora: dict[str, Any] | None = None, *freeze: str) -> FullConfig:
    return FullConfig.model_validate({"model": {"lora": lora}, "training": {"freeze": freeze}})


def test_patterns_name_what_is_frozen() -> None:
    everything = parameter_shapes(SIZES)
    assert trained_shapes(run(), SIZES) == everything
    trained = trained_shapes(run(None, "encoder.*", "shared.weight", "*.mlp.*"), SIZES)
    assert [name for name in everything if name in trained] == [
        name for name in everything if name.startswith("decoder.") and ".mlp." not in name
    ]
    model = Qwen3ForSeq2SeqLM(SIZES)
    choose_trained(model, run(None, "encoder.*"))
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {
        name for name in everything if name.startswith("encoder.")
    }


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["encoder.*", "q"], "called 'q'; there are shared.weight, *.layers.*.self_attn.q_proj.weight, "),
        (["*"], "match all"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        trained_shapes(run(None, *patterns), SIZES)
    assert message in str(error.value)


def test_adapters_stand_where_peft_puts_them() -> None:
    config = run({"r": 4, "lora_dropout": 0.0})
    lora = config.model.lora
    assert lora is not None
    model = Qwen3ForSeq2SeqLM(SIZES)
    choose_trained(model, config)
    named = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    shapes = model_shapes(SIZES, lora)
    assert [(name, tuple(parameter.shape)) for name, parameter in named.items()] == list(shapes.items())
    trained = trained_shapes(config, SIZES)
    assert {name for name, parameter in named.items() if parameter.requires_grad} == trained.keys()
    assert all(map(is_adapter, trained))
    products = [module for name, module in model.named_modules() if name.endswith(".default") and "dropout" not in name]
    assert {type(module) for module in products} == {Linear}
    plain = Qwen3ForSeq2SeqLM(SIZES)
    inject_adapter_in_model(PeftConfig(r=4, target_modules=list(lora.target_modules)), plain)
    assert get_peft_model_state_dict(plain).keys() == trained.keys()


def test_adapters_begin_like_pefts_and_change_nothing() -> None:
    lora = run({"r": 4}).model.lora
    assert lora is not None
    base = random_weights(SIZES, seed=1)
    source, other = (with_new_adapters(base, lora, SIZES, seed) for seed in (1, 2))
    for name, shape in model_shapes(SIZES, lora).items():
        found = source(name)
        assert torch.equal(found[1:3], source(name, slice(1, 3)))
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(shape[1])  # the bound of torch.nn.Linear's own
            assert 0.8 * bound < found.abs().max() <= bound
            assert not torch.equal(found, other(name))
        elif name.endswith("lora_B.weight"):
            assert not found.any()
        else:
            assert torch.equal(found, base(name))
    together = merged_weights(base, source, lora)
    assert all(torch.equal(together(name), base(name)) for name in parameter_shapes(SIZES))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "num_encoder_layers": 3}], ids=str)
def test_names_and_shapes_are_the_models(changes: dict[str, int]) -> None:
    config = tiny_config(**changes)
    model = tiny_model(**changes)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shapes = parameter_shapes(config)
    assert list(shapes.items()) == list(expected.items())
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "layers",
    [
        {"num_encoder_layers": 3},
        {"num_encoder_layers": 3, "cross_attention": "renormed", "encoder_positions": "prefix"},
        {"num_encoder_layers": 1, "cross_attention": "aligned", "encoder_positions": "prefix"},
        {
            "num_encoder_layers": 3,
            "num_hidden_layers": 4,
            "cross_attention": "aligned",
            "encoder_heights": [0, 2, 2, 3],
        },
    ],
    ids=str,
)
def test_flops_equal_what_torch_counts(layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "_JOINED_SCORES", 0)  # each document by itself: none of its scores is masked
    encoder_lengths, decoder_lengths = (5, 0, 7), (4, 6, 3)
    model = tiny_model(**layers).train()
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
