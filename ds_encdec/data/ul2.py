"""Denoising by the rows of `denoisers.py`, UL2's mixture (arXiv 2205.05131): tokens to a pair of sequences.

Span corruption (R and X) is T5's (arXiv 1910.10683, section 3.1.4): noise and kept tokens are each cut at random into
segments, which alternate. T5 makes equally many and ends with noise, so a short text with one span always loses its
end. Here a text may end with a kept segment, so that a span can lie anywhere (see `_kept_lengths`); no length changes.

    tokens    a b c d e f g h          spans  [c d] [g]
    encoder   a b <0> e f <1> h        every span becomes one sentinel, no EOS
    decoder   <0> c d <1> g EOS        what is missing, span by span

S is a prefix language model: the encoder reads the first quarter, the decoder continues. Its target ends with EOS only
where the document ends.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ds_encdec.denoisers import DENOISERS, DenoisedLengths, denoised_lengths
from ds_encdec.types import ConfigError

if TYPE_CHECKING:
    from ds_encdec.tokenizer.sentinels import Vocabulary

MIN_RAW_TOKENS = 2
"""Shortest text that can be denoised: one token for each side."""


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """The room that one example may occupy, in tokens: before denoising, and on either side after it."""

    max_raw_tokens: int
    max_encoder_tokens: int
    max_decoder_tokens: int
    num_sentinels: int


@lru_cache(maxsize=256)
def max_raw_length(denoiser: str, bounds: LengthBounds) -> int:
    """The longest raw text, in tokens, that neither side has to truncate and that has enough sentinels.

    Every shorter text fits as well, because all lengths grow with the raw length. Raises ConfigError where
    not even three tokens fit.
    """

    def too_long(raw_tokens: int) -> bool:
        lengths = denoised_lengths(raw_tokens, denoiser)
        return (
            lengths.encoder_tokens > bounds.max_encoder_tokens
            or lengths.decoder_tokens > bounds.max_decoder_tokens
            or lengths.spans > bounds.num_sentinels
        )

    candidates = range(MIN_RAW_TOKENS, bounds.max_raw_tokens + 1)
    longest = MIN_RAW_TOKENS - 1 + bisect_left(candidates, True, key=too_long)
    if longest <= MIN_RAW_TOKENS:
        raise ConfigError(
            f"denoiser {denoiser} cannot work on {longest + 1} tokens within {bounds.max_encoder_tokens} encoder "
            f"tokens (mode token aside) and {bounds.max_decoder_tokens} decoder tokens: raise "
            "data.max_encoder_length or data.max_decoder_length"
        )
    return longest


def denoise(
    tokens: np.ndarray, denoiser: str, vocabulary: Vocabulary, rng: np.random.Generator, *, document_ends: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Corrupt `tokens` (int32 [n], n >= 2) into (encoder_ids, decoder_ids), int32 each.

    The caller keeps `n` within `max_raw_length` and the sentinels out of `tokens`. `document_ends`: the chunk's last
    token is its document's (only a prefix language model asks). With mode tokens the encoder starts with one.
    """
    lengths = denoised_lengths(len(tokens), denoiser)
    if DENOISERS[denoiser].has_spans:
        encoder_ids, decoder_ids = _corrupt_spans(tokens, lengths, vocabulary, rng)
    else:
        ending = np.array([vocabulary.eos_id] if document_ends else [], dtype=np.int32)
        encoder_ids, suffix = np.split(tokens.copy(), [lengths.encoder_tokens])
        decoder_ids = np.concatenate([suffix, ending])
    if vocabulary.mode_token_ids:
        mode = vocabulary.mode_token_ids[list(DENOISERS).index(denoiser)]
        encoder_ids = np.concatenate([[mode], encoder_ids], dtype=np.int32)
    return encoder_ids, decoder_ids


def _corrupt_spans(
    tokens: np.ndarray, lengths: DenoisedLengths, vocabulary: Vocabulary, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    _, decoder_tokens, noise_tokens, spans = lengths
    noise_lengths = _random_partition(noise_tokens, spans, rng)
    sentinels = np.array(vocabulary.sentinel_ids[:spans], dtype=np.int32)

    # Kept and noise segments alternate: kept, noise, kept, ..., noise, kept.
    segments = np.empty(2 * spans + 1, dtype=np.int64)
    segments[0::2] = _kept_lengths(len(tokens) - noise_tokens, spans, noise_tokens / len(tokens), rng)
    segments[1::2] = noise_lengths
    span_starts = np.cumsum(segments[:-1])[::2]
    is_noise = np.repeat(np.arange(2 * spans + 1) % 2 == 1, segments)

    # A sentinel overwrites the first token of its span, and only that token of it stays in the encoder.
    encoder_source = tokens.copy()
    encoder_source[span_starts] = sentinels
    in_encoder = ~is_noise
    in_encoder[span_starts] = True

    decoder_ids = np.empty(decoder_tokens, dtype=np.int32)
    is_text = np.ones(decoder_tokens, dtype=np.bool_)
    sentinel_slots = np.cumsum(noise_lengths + 1) - (noise_lengths + 1)
    is_text[sentinel_slots] = False
    is_text[-1] = False
    decoder_ids[is_text] = tokens[is_noise]
    decoder_ids[sentinel_slots] = sentinels
    decoder_ids[-1] = vocabulary.eos_id
    return encoder_source[in_encoder], decoder_ids


def _kept_lengths(kept_tokens: int, spans: int, noise_density: float, rng: np.random.Generator) -> np.ndarray:
    """Lengths of the kept segments around and between `spans` spans; only the outer two may be 0; int64 [spans + 1].

    Drawn in one of two ways, because no span may hang over an end of the text. Where all `spans + 1` are alike, the
    ends are corrupted too rarely, all the more where noise is dense; where the outer two are one segment cut in two,
    sparse noise piles up near the ends. Taking the first way with probability 1 - 2 x density makes the outer ones
    1 - density times as long as the others on average, which corrupts positions most evenly for all four denoisers.
    """
    if rng.random() < 1 - 2 * noise_density:
        lengths = _random_partition(kept_tokens + 2, spans + 1, rng)
        lengths[[0, -1]] -= 1
        return lengths
    inner = _random_partition(kept_tokens, spans, rng)
    before = rng.integers(inner[0] + 1)
    return np.concatenate([[before], inner[1:], [inner[0] - before]])


def _random_partition(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """`parts` positive integers that sum to `total`, every such composition equally likely; int64 [parts]."""
    edges = np.empty(parts + 1, dtype=np.int64)
    edges[0], edges[-1] = 0, total
    edges[1:-1] = rng.choice(total - 1, parts - 1, replace=False, shuffle=False) + 1
    edges.sort()
    return edges[1:] - edges[:-1]


def reconstruct(encoder_ids: np.ndarray, decoder_ids: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """The exact inverse of `denoise`: the original tokens, int32 [n].

    Which denoiser was used shows in the target: span corruption starts it with the first sentinel, S with
    text. Raises ValueError where encoder and decoder do not name the same sentinels in the same order.
    """
    if vocabulary.mode_token_ids:
        encoder_ids = encoder_ids[1:]
    if decoder_ids[-1] == vocabulary.eos_id:
        decoder_ids = decoder_ids[:-1]
    if not len(decoder_ids) or decoder_ids[0] != vocabulary.sentinel_ids[0]:
        return np.concatenate([encoder_ids, decoder_ids])

    sentinel_ids = np.asarray(vocabulary.sentinel_ids, dtype=np.int32)
    holes = np.flatnonzero(np.isin(encoder_ids, sentinel_ids))
    heads = np.flatnonzero(np.isin(decoder_ids, sentinel_ids))
    if not np.array_equal(encoder_ids[holes], decoder_ids[heads]):
        raise ValueError("encoder and decoder sequences hold different sentinels")
    spans = np.split(decoder_ids, heads[1:])
    kept = np.split(encoder_ids, holes)
    pieces = [kept[0]]
    for span, after in zip(spans, kept[1:], strict=True):
        pieces += [span[1:], after[1:]]
    return np.concatenate(pieces)
