"""Bytes that compiled layers move in what is no product and no attention: what a GPU waits for its memory for.

Counted by inductor as it plans kernels for a CPU: the buffers that each reads and writes, each of them once. That is
linear in the tokens, so layers of Qwen3-0.6B's sizes are compiled for a few of them. A plan for a GPU may differ: sums
over tokens for a norm's weight, which here read everything once more, can be part of another pass there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import pack
from torch._inductor.graph import GraphLowering

from ds_encdec.model import precision
from ds_encdec.model.compiled_layers import compiled
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.encoder import Qwen3EncoderLayer, rotary_tables
from ds_encdec.model.modeling import Qwen3DecoderLayer

SIZES = Qwen3Seq2SeqConfig(
    vocab_size=128,
    hidden_size=1024,
    intermediate_size=3072,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    pad_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=0,
)
LAYERS = 28
TOKENS = {"encoder": 16_384, "decoder": 8_192}
"""Of the default micro-batch of 4 × (4,096 + 2,048)."""
SHARE = 128
"""Of these tokens one in so many is computed."""


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of every kernel that inductor generates, as they are planned; bf16 as on a device that has it."""
    found: list[int] = []
    generate = GraphLowering.compile_to_module

    def counting(graph: GraphLowering) -> Any:
        module = generate(graph)
        nodes = (node for node in graph.scheduler.nodes if "Extern" not in type(node).__name__)
        found.extend(node.get_read_write_buffers_sizes() for node in nodes)
        return module

    monkeypatch.setattr(GraphLowering, "compile_to_module", counting)
    monkeypatch.setattr(precision, "_EMULATED_ON_CPU", frozenset())
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield found
    torch._dynamo.reset()


def test_layers_move_less_than_half_of_what_they_did(moved: list[int]) -> None:
    """They move 63.9 and 47.6 GB a micro-batch, forward and backward, without recomputation.

    Operator by operator it is 240 GB. Recomputing everything repeats the forward pass, about 40 GB.
    """
    few = {side: tokens // SHARE for side, tokens in TOKENS.items()}
    layout = pack((few["encoder"],), (few["decoder"],), *few.values()).inputs["packing"]
    encoder, decoder = (torch.randn(n, 1024, dtype=torch.bfloat16, requires_grad=True) for n in few.values())
    layers = {"encoder": Qwen3EncoderLayer(SIZES, 0), "decoder": Qwen3DecoderLayer(SIZES, 0)}
    gigabytes: dict[str, float] = {}
    for side, inputs in {"encoder": (encoder,), "decoder": (decoder, encoder)}.items():
        moved.clear()
        run = compiled(layers[side].bfloat16().forward, random=False)
        rotary = rotary_tables(getattr(layout, f"{side}_positions"), SIZES, torch.bfloat16)
        run(*inputs, rotary=rotary, layout=layout).sum().backward()
        gigabytes[side] = sum(moved) * SHARE * LAYERS / 1e9
    assert 40 < gigabytes["encoder"] < 66
    assert 25 < gigabytes["decoder"] < 50
