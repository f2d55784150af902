"""Tokenising a document, cutting it into chunks and denoising each: texts to Examples.

Each chunk draws its denoiser by the configured weights, and only then its length, so that the fill of the
batches never bends the mixture. Everything about chunk k of a document follows from (seed, epoch, document
key, k) and the document's length: one chunk can be made again without its batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_encdec.config.schema import DataConfig
from ds_encdec.data.randomness import keyed_generator
from ds_encdec.data.ul2 import MIN_RAW_TOKENS, LengthBounds, denoise, max_raw_length
from ds_encdec.denoisers import DENOISERS
from ds_encdec.types import ConfigError, Document, Example

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ds_encdec.tokenizer.sentinels import Vocabulary

Tokenize = Callable[[Document], np.ndarray]
"""A document to its token ids, int32 [n], without any special token."""

MIN_TAIL_TOKENS = 16
"""A document's last chunk takes this many tokens from the one before rather than be shorter."""


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A `Tokenize` made of a fast tokenizer's Rust half, which worker processes load without transformers.

    Special tokens in the text are split into ordinary ones (`encode_special_tokens`). So `<extra_id_0>` or
    `<|endoftext|>` written in a document can neither be taken for a sentinel nor end a sequence.
    """

    backend: Tokenizer

    def __call__(self, document: Document) -> np.ndarray:
        """Token ids of `document`. Surrogates without a partner (JSON can hold them, UTF-8 cannot) are read as `?`."""
        if document.token_ids is not None:
            return document.token_ids
        text = document.text.encode("utf-8", errors="replace").decode("utf-8")
        before = self.backend.encode_special_tokens
        self.backend.encode_special_tokens = True
        try:
            encodings: list[Any] = self.backend.encode_batch_fast([text], add_special_tokens=False)
        finally:
            self.backend.encode_special_tokens = before
        return np.array(encodings[0].ids, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of a document, and what they are denoised by."""

    index: int
    start: int
    length: int
    denoiser: str
    rng: np.random.Generator


@dataclass(frozen=True)
class Chunker:
    """Turns tokenised documents into examples. `weights`: relative, in the order of `DENOISERS`."""

    seed: int
    weights: tuple[float, ...]
    bounds: LengthBounds
    vocabulary: Vocabulary

    @cached_property
    def _cumulative_shares(self) -> list[float]:
        # Without the last, which is 1 up to rounding: whatever is drawn above the others is its.
        return list(accumulate(weight / sum(self.weights) for weight in self.weights))[:-1]

    @classmethod
    def from_config(cls, data: DataConfig, seed: int, vocabulary: Vocabulary) -> Chunker:
        """The chunker of a run. Raises ConfigError for weights that cannot be sampled from."""
        if min(data.ul2_task_weights) < 0 or sum(data.ul2_task_weights) <= 0:
            raise ConfigError(
                f"data.ul2_task_weights={list(data.ul2_task_weights)}: weights must not be negative, nor all zero"
            )
        bounds = LengthBounds(
            max_raw_tokens=data.max_seq_length,
            max_encoder_tokens=data.max_encoder_length - bool(vocabulary.mode_token_ids),
            max_decoder_tokens=data.max_decoder_length,
            num_sentinels=len(vocabulary.sentinel_ids),
        )
        return cls(seed, data.ul2_task_weights, bounds, vocabulary)

    def draw_chunk(self, remaining: int, draw: float) -> tuple[str, int]:
        """Denoiser and length of the next chunk, with `remaining` tokens to go; `draw` is uniform in [0, 1)."""
        denoiser = list(DENOISERS)[bisect_right(self._cumulative_shares, draw)]
        return denoiser, _next_length(remaining, max_raw_length(denoiser, self.bounds))

    def chunks(self, num_tokens: int, document: str, epoch: int) -> Iterator[Chunk]:
        """The chunks of a document of `num_tokens`, in order. One that is too short to denoise has none."""
        start = index = 0
        while num_tokens - start >= MIN_RAW_TOKENS:
            rng = keyed_generator(self.seed, "denoise", epoch, document, index)
            denoiser, length = self.draw_chunk(num_tokens - start, rng.random())
            yield Chunk(index, start, length, denoiser, rng)
            start, index = start + length, index + 1

    def example_lengths(self, length: int, denoiser: str, *, document_ends: bool) -> tuple[int, int]:
        """Encoder and decoder tokens that a chunk of `length` tokens becomes, without denoising it."""
        row = DENOISERS[denoiser]
        lengths = row.lengths(length)
        lacks_eos = not (row.has_spans or document_ends)
        return lengths.encoder_tokens + bool(self.vocabulary.mode_token_ids), lengths.decoder_tokens - lacks_eos

    def example(self, chunk: Chunk, tokens: np.ndarray, document: str) -> Example:
        """Denoise one chunk of `tokens` (int32, the whole document). Call it once per chunk: it draws from its rng."""
        encoder_ids, decoder_ids = denoise(
            tokens[chunk.start : chunk.start + chunk.length],
            chunk.denoiser,
            self.vocabulary,
            chunk.rng,
            document_ends=chunk.start + chunk.length == len(tokens),
        )
        return Example(encoder_ids, decoder_ids, chunk.denoiser, document)


def _next_length(remaining: int, longest: int) -> int:
    """The longest chunk that leaves nothing or at least a minimum tail."""
    if remaining <= longest:
        return remaining
    tail = max(MIN_RAW_TOKENS, min(MIN_TAIL_TOKENS, longest // 2))
    return min(longest, remaining - tail)
