"""Tiny models and packed batches for the model's tests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from ds_encdec.config.schema import ModelConfig
from ds_encdec.model.attention import PackedLayout
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.source import ModelSource, resolve_model
from ds_encdec.model.weights import random_weights
from ds_encdec.tokenizer.sentinels import Vocabulary

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
"""Grouped queries, and a head_dim that is not hidden_size / num_attention_heads."""


def tiny_config(**changes: Any) -> Qwen3Seq2SeqConfig:
    """`SIZES` with other changes; attention far from uniform, so that a wrong mask shows."""
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return Qwen3Seq2SeqConfig(**{**SIZES, **ids, "loss_chunk_tokens": 7, "initializer_range": 0.2, **changes})


def tiny_model(**changes: Any) -> Qwen3ForSeq2SeqLM:
    """A model with random weights; norms are not all ones, so that a wrong or missing one shows."""
    config = tiny_config(**changes)
    model = Qwen3ForSeq2SeqLM(config)
    weights = random_weights(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights(name))
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def qwen3_folder(
    folder: Path, *, max_shard_size: str = "5GB", dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Qwen3ForCausalLM:
    """Write a folder of a Qwen3 of `SIZES` as transformers writes it; returns the model."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "tie_word_embeddings": True, **changes})).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def qwen3_with_norms(folder: Path, **changes: Any) -> Qwen3ForCausalLM:
    """Write a folder of a float32 Qwen3 whose attention is far from uniform and whose norms differ."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    model = qwen3_folder(folder, dtype=torch.float32, initializer_range=0.2, rope_parameters=rope, **changes).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    return model


def filled(source: ModelSource) -> Qwen3ForSeq2SeqLM:
    """The model of `source` with its weights."""
    model = Qwen3ForSeq2SeqLM(source.config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.weights(name))
    return model


def vocabulary(sentinels: Iterable[int] = range(90, 94), size: int = VOCAB) -> Vocabulary:
    return Vocabulary(tuple(sentinels), eos_id=1, pad_id=0, mode_token_ids=(), vocab_size=size)


def resolve(folder: Path, known: Vocabulary | None = None, seed: int = 0, **section: Any) -> ModelSource:
    return resolve_model(ModelConfig(model_name_or_path=str(folder), **section), known or vocabulary(), seed)


def loss_inputs(
    dtype: torch.dtype, tokens: int = 37, hidden_size: int = 24, vocab: int = 211
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels of a loss; every fifth label is ignored, and those behind the first are ends."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden_size, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[::5] = -100
    labels[1:3] = torch.tensor([0, vocab - 1])
    return hidden, weight, labels


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


@dataclass
class Packed:
    inputs: dict[str, Any]
    documents: list[tuple[Tensor, Tensor, Tensor]]  # encoder ids, decoder ids, labels


def pack(
    encoder_lengths: Sequence[int],
    decoder_lengths: Sequence[int],
    encoder_tokens: int,
    decoder_tokens: int,
    max_documents: int = 6,
) -> Packed:
    """Documents of given lengths with random ids, behind them padding of random (not pad) ids."""
    generator = torch.Generator().manual_seed(2)
    encoder_ids = torch.randint(2, VOCAB, (encoder_tokens,), generator=generator)
    decoder_ids = torch.randint(2, VOCAB, (decoder_tokens,), generator=generator)
    labels = torch.randint(2, VOCAB, (decoder_tokens,), generator=generator)
    labels[sum(decoder_lengths) :] = -100
    layout = PackedLayout.build(
        _cu_seqlens(encoder_lengths, max_documents),
        _cu_seqlens(decoder_lengths, max_documents),
        tuple(encoder_lengths),
        tuple(decoder_lengths),
        _positions(encoder_lengths, encoder_tokens),
        _positions(decoder_lengths, decoder_tokens),
    )
    inputs = {"input_ids": encoder_ids, "decoder_input_ids": decoder_ids, "labels": labels, "packing": layout}
    parts = zip(
        encoder_ids.split([*encoder_lengths, encoder_tokens - sum(encoder_lengths)])[:-1],
        decoder_ids.split([*decoder_lengths, decoder_tokens - sum(decoder_lengths)])[:-1],
        labels.split([*decoder_lengths, decoder_tokens - sum(decoder_lengths)])[:-1],
        strict=True,
    )
    return Packed(inputs, list(parts))


def token_losses_alone(model: Qwen3ForSeq2SeqLM, batch: Packed) -> Tensor:
    """Each document by itself through the ordinary form; the losses by torch's own cross-entropy."""
    losses = []
    for encoder_ids, decoder_ids, labels in batch.documents:
        logits = model(input_ids=encoder_ids[None], decoder_input_ids=decoder_ids[None]).logits[0]
        losses.append(F.cross_entropy(logits.float(), labels, reduction="none"))
    return torch.cat(losses)


def _cu_seqlens(lengths: Sequence[int], max_documents: int) -> Tensor:
    padded = torch.zeros(max_documents + 1, dtype=torch.int32)
    padded[1 : len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int32)
    return padded.cumsum(0, dtype=torch.int32)


def _positions(lengths: Sequence[int], tokens: int) -> Tensor:
    real = [position for length in lengths for position in range(length)]
    return torch.tensor(real + [0] * (tokens - len(real)))
