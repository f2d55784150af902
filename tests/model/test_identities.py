"""Oracles from transformers' own Qwen3: what our two stacks must reduce to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import qwen3_folder, resolve, vocabulary
from torch import Tensor
from transformers import Qwen3ForCausalLM

from ds_encdec.model.attention import PaddedLayout
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

LENGTH = 11
Pair = tuple[Qwen3ForCausalLM, Qwen3ForSeq2SeqLM]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def qwen3_and_ours(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    changes = {"num_hidden_layers": 3, "initializer_range": 0.2, "tie_word_embeddings": request.param}
    changes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    qwen3 = qwen3_folder(tmp_path, dtype=torch.float32, **changes).eval()
    with torch.no_grad():
        for name, parameter in qwen3.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    qwen3.save_pretrained(tmp_path)
    source = resolve(tmp_path, vocabulary((95, 96)))
    ours = Qwen3ForSeq2SeqLM(source.config).eval()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(source.weights(name))
    assert (ours.lm_head.weight is ours.shared.weight) == request.param
    return qwen3, ours


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(2, 95, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_with_an_empty_encoder_the_decoder_is_qwen3_for_causal_lm(qwen3_and_ours: Pair, ids: Tensor) -> None:
    qwen3, ours = qwen3_and_ours
    expected = qwen3(ids).logits
    # Sentinel rows were drawn anew: their logits alone differ where the head is tied to the embedding.
    logits = ours(input_ids=ids[:, :0], decoder_input_ids=ids).logits
    torch.testing.assert_close(logits[..., :95], expected[..., :95], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_with_a_causal_mask_the_encoder_is_qwen3_model(qwen3_and_ours: Pair, ids: Tensor) -> None:
    qwen3, ours = qwen3_and_ours
    expected = qwen3.model(ids).last_hidden_state
    layout = PaddedLayout.build(encoder_length=LENGTH, device=ids.device)
    layout = replace(layout, encoder_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None])
    states = ours.encoder(ours.shared(ids), layout=layout)
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)
