"""Cutting a document's tokens into chunks and denoising each: tokens to Examples.

Each chunk draws its denoiser by the configured weights, and only then its length, so that the fill of the batches does
not change the mixture. Chunk k follows from (seed, epoch, document key, k) and the document's length.

Denoising follows UL2's mixture (arXiv 2205.05131; rows of `denoisers.py`). Span corruption (R and X) is T5's (arXiv
1910.10683, section 3.1.4), except that a text may end with a kept segment, so that a span can lie anywhere. S is a
prefix language model: the encoder reads the first quarter; the target has EOS only at the document's end.

    tokens    a b c d e f g h          spans  [c d] [g]
    encoder   a b <0> e f <1> h        every span becomes one sentinel, no EOS
    decoder   <0> c d <1> g EOS        the missing tokens, span by span
"""

# ruff: noqa: D102  (protocol.ExampleMaker documents the methods)

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ds_encdec.base.types import ConfigError, Document, Example
from ds_encdec.config.schema import DataConfig
from ds_encdec.data.examples.protocol import ALL, ExampleMaker, Made
from ds_encdec.data.randomness import keyed_generator
from ds_encdec.data.text_tokenizer import TextTokenizer
from ds_encdec.registry.denoisers import DENOISERS, DenoisedLengths
from ds_encdec.tokenizer.sentinels import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MIN_RAW_TOKENS = 2  # the shortest text that can be denoised: one token for each side
MIN_TAIL_TOKENS = 16  # the shortest last chunk of a document: it takes tokens from the chunk before it
_REPETITIONS = 32  # how often each sampled length is cut, so that the draw of denoisers hardly changes the ratio
_MAX_CUT_TOKENS = 1 << 24  # the most tokens to cut for it: a document of 10 MB must not take a minute


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of a document, and their denoiser."""

    index: int
    start: int
    length: int
    denoiser: str
    rng: np.random.Generator


class LengthBounds(NamedTuple):
    """The most tokens of an example: before denoising, and on either side after it."""

    max_raw_tokens: int
    max_encoder_tokens: int
    max_decoder_tokens: int
    num_sentinels: int


@dataclass(frozen=True, slots=True)
class Chunker:
    """Cuts token ids into chunks, and denoises these; `weights` are relative, in the order of `DENOISERS`."""

    seed: int
    weights: tuple[float, ...]
    bounds: LengthBounds
    vocabulary: Vocabulary

    @classmethod
    def from_config(cls, data: DataConfig, seed: int, vocabulary: Vocabulary) -> Chunker:
        """Return the chunker of a run; the configuration's rules have checked its weights."""
        bounds = LengthBounds(
            max_raw_tokens=data.max_seq_length,
            max_encoder_tokens=data.max_encoder_length - len(vocabulary.beginning("S")),
            max_decoder_tokens=data.max_decoder_length,
            num_sentinels=len(vocabulary.sentinel_ids),
        )
        return cls(seed, data.ul2_task_weights, bounds, vocabulary)

    def draw_chunk(self, remaining: int, draw: float) -> tuple[str, int]:
        """Return denoiser and length of the next chunk of `remaining` tokens; `draw` is uniform in [0, 1)."""
        total = sum(self.weights)
        edges = list(accumulate(weight / total for weight in self.weights))[:-1]  # the last is 1 up to rounding
        denoiser = list(DENOISERS)[bisect_right(edges, draw)]
        longest = max_raw_length(denoiser, self.bounds)
        # The longest chunk leaves nothing, or at least a minimum tail.
        tail = max(MIN_RAW_TOKENS, min(MIN_TAIL_TOKENS, longest // 2))
        return denoiser, remaining if remaining <= longest else min(longest, remaining - tail)

    def chunks(self, num_tokens: int, document: str, epoch: int) -> Iterator[Chunk]:
        """Yield the chunks of a document of `num_tokens`, in order; none if it is too short to denoise."""
        start = index = 0
        while num_tokens - start >= MIN_RAW_TOKENS:
            rng = keyed_generator(self.seed, "denoise", epoch, document, index)
            denoiser, length = self.draw_chunk(num_tokens - start, rng.random())
            yield Chunk(index, start, length, denoiser, rng)
            start, index = start + length, index + 1

    def example_lengths(self, length: int, denoiser: str, *, document_ends: bool) -> tuple[int, int]:
        """Return the encoder and decoder tokens of a chunk of `length` tokens, without denoising it."""
        lengths = DENOISERS[denoiser].lengths(length)
        lacks_eos = not (lengths.spans or document_ends)
        return lengths.encoder_tokens + len(self.vocabulary.beginning(denoiser)), lengths.decoder_tokens - lacks_eos

    def example(self, chunk: Chunk, tokens: np.ndarray, document: str) -> Example:
        """Denoise one chunk of `tokens` (int32, the whole document). Call it once per chunk: it draws from its rng."""
        stop = chunk.start + chunk.length
        text, ends = tokens[chunk.start : stop], stop == len(tokens)
        ids = denoise(text, chunk.denoiser, self.vocabulary, chunk.rng, document_ends=ends)
        return Example(*ids, chunk.denoiser, document)


@dataclass(frozen=True)
class ChunkMaker(ExampleMaker):
    """The `ExampleMaker` of pre-training: it tokenizes, cuts and denoises documents."""

    vocabulary: Vocabulary
    tokenize: Callable[[Document], np.ndarray]
    chunker: Chunker

    @classmethod
    def from_config(
        cls, data: DataConfig, seed: int, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
    ) -> ChunkMaker:
        return cls(vocabulary, TextTokenizer(tokenizer.backend_tokenizer), Chunker.from_config(data, seed, vocabulary))

    @property
    def why_empty(self) -> str:
        return "empty, held out or not readable. Check data.data_files, data.text_column and data.eval_fraction"

    def read(self, document: Document) -> np.ndarray:
        return self.tokenize(document)

    def size(self, ids: np.ndarray) -> int:
        return len(ids) if len(ids) >= MIN_RAW_TOKENS else 0

    def ratio(self, read: Sequence[np.ndarray]) -> float:
        return documents_ratio([len(ids) for ids in read], self.chunker)

    def examples(self, ids: np.ndarray, document: str, epoch: int, wanted: Container[int] = ALL) -> Iterator[Made]:
        for chunk in self.chunker.chunks(len(ids), document, epoch):
            if chunk.index in wanted:
                is_last = chunk.start + chunk.length == len(ids)
                yield Made(chunk.index, self.chunker.example(chunk, ids, document), is_last)

    def of_evaluation(self) -> ChunkMaker:
        return replace(self, chunker=replace(self.chunker, seed=0))  # whatever the run's seed is

    def checked(self, ids: np.ndarray, document: str) -> Iterator[tuple[str, bool]]:
        for denoiser, weight in zip(DENOISERS, self.chunker.weights, strict=False):
            if weight:
                length = min(len(ids), max_raw_length(denoiser, self.chunker.bounds))
                rng = keyed_generator(self.chunker.seed, "sanity check", document, denoiser)
                example = self.chunker.example(Chunk(0, 0, length, denoiser, rng), ids, document)
                again = reconstruct(example.encoder_ids, example.decoder_ids, self.vocabulary)
                yield denoiser, bool(np.array_equal(again, ids[:length]))


def documents_ratio(lengths: Sequence[int], chunker: Chunker) -> float:
    """Return the encoder tokens per decoder token, after denoising, of documents of these `lengths` in tokens."""
    draw = keyed_generator(chunker.seed, "survey").random
    encoder_tokens = decoder_tokens = 0
    repetitions = min(_REPETITIONS, max(1, _MAX_CUT_TOKENS // sum(lengths)))
    for remaining in np.tile(lengths, repetitions).tolist():
        while remaining >= MIN_RAW_TOKENS:
            denoiser, length = chunker.draw_chunk(remaining, draw())
            remaining -= length
            encoder, decoder = chunker.example_lengths(length, denoiser, document_ends=remaining == 0)
            encoder_tokens += encoder
            decoder_tokens += decoder
    return encoder_tokens / decoder_tokens


@lru_cache(maxsize=256)
def max_raw_length(denoiser: str, bounds: LengthBounds) -> int:
    """Return the longest text, in tokens, that fits, as all shorter ones do. Raises ConfigError below three tokens."""

    def too_long(raw_tokens: int) -> bool:
        lengths = DENOISERS[denoiser].lengths(raw_tokens)
        return (
            lengths.encoder_tokens > bounds.max_encoder_tokens
            or lengths.decoder_tokens > bounds.max_decoder_tokens
            or lengths.spans > bounds.num_sentinels
        )

    # All lengths grow with the raw length.
    longest = MIN_RAW_TOKENS - 1 + bisect_left(range(MIN_RAW_TOKENS, bounds.max_raw_tokens + 1), True, key=too_long)
    if longest <= MIN_RAW_TOKENS:
        raise ConfigError(
            f"denoiser {denoiser} cannot work on {longest + 1} tokens within {bounds.max_encoder_tokens} encoder "
            f"tokens (BOS and mode token aside) and {bounds.max_decoder_tokens} decoder tokens: raise "
            "data.max_encoder_length or data.max_decoder_length"
        )
    return longest


def denoise(
    tokens: np.ndarray, denoiser: str, vocabulary: Vocabulary, rng: np.random.Generator, *, document_ends: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Corrupt `tokens` (int32 [n], n >= 2) into (encoder_ids, decoder_ids), int32 each. The caller keeps `n` within
    `max_raw_length`, and sentinels out of `tokens`. The encoder's begin as `vocabulary.beginning` has it."""
    lengths = DENOISERS[denoiser].lengths(len(tokens))
    if DENOISERS[denoiser].mean_span is not None:
        encoder_ids, decoder_ids = _corrupt_spans(tokens, lengths, vocabulary, rng)
    else:
        ending = np.array([vocabulary.eos_id] if document_ends else [], dtype=np.int32)
        encoder_ids, decoder_ids = np.split(np.concatenate([tokens, ending]), [lengths.encoder_tokens])
    if beginning := vocabulary.beginning(denoiser):
        encoder_ids = np.concatenate([beginning, encoder_ids], dtype=np.int32)
    return encoder_ids, decoder_ids


def _corrupt_spans(
    tokens: np.ndarray, lengths: DenoisedLengths, vocabulary: Vocabulary, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    _, decoder_tokens, noise_tokens, spans = lengths
    sentinels = np.array(vocabulary.sentinel_ids[:spans], dtype=np.int32)

    # Kept and noise segments alternate: kept, noise, kept, ..., noise, kept.
    segments = np.empty(2 * spans + 1, dtype=np.int64)
    noise_lengths = segments[1::2] = _random_partition(noise_tokens, spans, rng)
    segments[0::2] = _kept_lengths(len(tokens) - noise_tokens, spans, noise_tokens / len(tokens), rng)
    span_starts = np.cumsum(segments[:-1])[::2]
    is_noise = np.repeat(np.arange(2 * spans + 1) % 2 == 1, segments)

    decoder_ids = np.full(decoder_tokens, vocabulary.eos_id, dtype=np.int32)
    sentinel_slots = np.cumsum(noise_lengths + 1) - (noise_lengths + 1)
    decoder_ids[sentinel_slots] = sentinels
    decoder_ids[np.delete(np.arange(decoder_tokens - 1), sentinel_slots)] = tokens[is_noise]

    # A sentinel overwrites the first token of its span, and only that token of the span stays in the encoder.
    encoder_source = tokens.copy()
    encoder_source[span_starts] = sentinels
    is_noise[span_starts] = False
    return encoder_source[~is_noise], decoder_ids


def _kept_lengths(kept_tokens: int, spans: int, noise_density: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the lengths of the kept segments around `spans` spans; only the outer two may be 0; int64 [spans + 1]. With
    all segments alike, the ends are corrupted too rarely, above all by dense noise; with the outer two as one segment
    cut in two, sparse noise piles up near the ends. Taking the first way with probability 1 - 2 x density corrupts
    positions most evenly for all four denoisers."""
    if rng.random() < 1 - 2 * noise_density:
        lengths = _random_partition(kept_tokens + 2, spans + 1, rng)
        lengths[[0, -1]] -= 1
        return lengths
    inner = _random_partition(kept_tokens, spans, rng)
    before = rng.integers(inner[0] + 1)
    return np.concatenate([[before], inner[1:], [inner[0] - before]])


def _random_partition(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `parts` positive integers of the sum `total`, every composition equally likely; int64 [parts]."""
    edges = np.sort(rng.choice(total - 1, parts - 1, replace=False, shuffle=False) + 1)
    return np.diff(edges, prepend=0, append=total)


def reconstruct(encoder_ids: np.ndarray, decoder_ids: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """Invert `denoise`: return the original tokens, int32 [n]. Raises ValueError if the sentinels differ."""
    encoder_ids = encoder_ids[len(vocabulary.beginning("S")) :]
    decoder_ids = decoder_ids[:-1] if decoder_ids[-1] == vocabulary.eos_id else decoder_ids
    if not len(decoder_ids) or decoder_ids[0] != vocabulary.sentinel_ids[0]:
        return np.concatenate([encoder_ids, decoder_ids])

    sentinel_ids = np.asarray(vocabulary.sentinel_ids, dtype=np.int32)
    holes = np.flatnonzero(np.isin(encoder_ids, sentinel_ids))
    heads = np.flatnonzero(np.isin(decoder_ids, sentinel_ids))
    if not np.array_equal(encoder_ids[holes], decoder_ids[heads]):
        raise ValueError("encoder and decoder sequences hold different sentinels")
    spans = np.split(decoder_ids, heads[1:])
    kept = np.split(encoder_ids, holes)
    return np.concatenate([kept[0], *(part[1:] for pair in zip(spans, kept[1:], strict=True) for part in pair)])
