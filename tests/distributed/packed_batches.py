"""Packed micro-batches of random tokens, the same for every engine that is given the same seed."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_encdec.base.types import IGNORE_INDEX, Batch
from ds_encdec.registry.denoisers import DENOISERS

ENCODER_TOKENS = 48
DECODER_TOKENS = 40
MAX_EXAMPLES = 6


def random_batch(seed: int, vocab_size: int, examples: int | None = None) -> Batch:
    """A micro-batch of `examples` (default: 1 to 4, by the seed) documents, padded to the fixed budgets."""
    draw = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=draw).tolist()

    count = integers(1, 5, 1)[0] if examples is None else examples
    encoder_lengths = integers(1, ENCODER_TOKENS // 4 + 1, count)
    decoder_lengths = integers(1, DECODER_TOKENS // 4 + 1, count)
    denoisers = integers(0, len(DENOISERS), count)
    targets = torch.randint(0, vocab_size, (sum(decoder_lengths),), generator=draw)
    denoiser_ids = torch.tensor(
        [id for id, length in zip(denoisers, decoder_lengths, strict=True) for _ in range(length)]
    )
    return Batch(
        encoder_ids=torch.randint(0, vocab_size, (ENCODER_TOKENS,), generator=draw),
        decoder_input_ids=torch.randint(0, vocab_size, (DECODER_TOKENS,), generator=draw),
        labels=padded(targets, DECODER_TOKENS, IGNORE_INDEX),
        encoder_positions=positions(encoder_lengths, ENCODER_TOKENS),
        decoder_positions=positions(decoder_lengths, DECODER_TOKENS),
        encoder_cu_seqlens=boundaries(encoder_lengths),
        decoder_cu_seqlens=boundaries(decoder_lengths),
        denoiser_ids=padded(denoiser_ids, DECODER_TOKENS, 0),
        encoder_lengths=tuple(encoder_lengths),
        decoder_lengths=tuple(decoder_lengths),
    )


def padded(values: Tensor, length: int, fill: int) -> Tensor:
    return torch.cat([values.to(torch.int64), torch.full((length - len(values),), fill, dtype=torch.int64)])


def positions(lengths: list[int], total: int) -> Tensor:
    return padded(torch.cat([torch.arange(n) for n in lengths] + [torch.arange(0)]), total, 0)


def boundaries(lengths: list[int]) -> Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat([ends, ends[-1:].expand(MAX_EXAMPLES + 1 - len(ends))]).to(torch.int32)
