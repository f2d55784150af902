"""UL2 denoising: exactly invertible, of fixed lengths, and with the published statistics."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_encdec.base.types import ConfigError
from ds_encdec.data.examples.chunks import LengthBounds, denoise, max_raw_length, reconstruct
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.tokenizer.sentinels import Vocabulary

TEXT_IDS = 900
PLAIN = Vocabulary(tuple(range(1000, 2700)), eos_id=998, pad_id=999, mode_token_ids=(), vocab_size=2700)
# Sentinels in no order, and EOS equal to the pad token, as in Qwen3's Base models.
ODD = Vocabulary(
    tuple(np.random.default_rng(0).permutation(np.arange(1000, 2700)).tolist()),
    eos_id=999,
    pad_id=999,
    mode_token_ids=(901, 902, 903, 904, 905),
    vocab_size=2700,
)


def text(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(TEXT_IDS, size=length).astype(np.int32)


@settings(max_examples=400)
@given(
    length=st.integers(2, 60) | st.integers(2, 5000),
    denoiser=st.sampled_from(list(DENOISERS)),
    vocabulary=st.sampled_from([PLAIN, ODD]),
    seed=st.integers(0, 2**32),
    document_ends=st.booleans(),
)
def test_encoder_and_decoder_give_back_the_text(
    length: int, denoiser: str, vocabulary: Vocabulary, seed: int, document_ends: bool
) -> None:
    tokens = text(length, seed)
    encoder_ids, decoder_ids = denoise(
        tokens, denoiser, vocabulary, np.random.default_rng(seed), document_ends=document_ends
    )

    assert encoder_ids.dtype == decoder_ids.dtype == np.int32
    np.testing.assert_array_equal(reconstruct(encoder_ids, decoder_ids, vocabulary), tokens)
    expected = DENOISERS[denoiser].lengths(length)
    mode_tokens = bool(vocabulary.mode_token_ids)
    assert len(encoder_ids) == expected.encoder_tokens + mode_tokens
    assert len(decoder_ids) == expected.decoder_tokens - (denoiser == "S" and not document_ends)
    assert vocabulary.eos_id not in encoder_ids
    ends = decoder_ids[-1] == vocabulary.eos_id
    assert ends == (denoiser != "S" or document_ends)
    if denoiser == "S":
        assert abs(expected.encoder_tokens - length / 4) < 1
    if mode_tokens:
        assert encoder_ids[0] == vocabulary.mode_token_ids[list(DENOISERS).index(denoiser)]


@pytest.mark.parametrize(
    ("denoiser", "mean_span", "density"), [("R1", 3, 0.15), ("R2", 12, 0.5), ("X1", 32, 0.15), ("X2", 32, 0.5)]
)
def test_span_corruption_has_the_published_rate_and_span(denoiser: str, mean_span: float, density: float) -> None:
    length = 1500
    encoder_ids, decoder_ids = denoise(text(length), denoiser, PLAIN, np.random.default_rng(1), document_ends=False)
    in_decoder = decoder_ids < TEXT_IDS
    spans = int((decoder_ids >= 1000).sum())
    assert in_decoder.sum() == pytest.approx(density * length, abs=0.5)
    assert in_decoder.sum() / spans == pytest.approx(mean_span, rel=0.05)
    used = encoder_ids[encoder_ids >= 1000]
    np.testing.assert_array_equal(used, PLAIN.sentinel_ids[:spans])  # in order, without gaps
    np.testing.assert_array_equal(used, decoder_ids[decoder_ids >= 1000])


@pytest.mark.parametrize("length", [2, 7, 40])
def test_a_single_span_lies_anywhere(length: int) -> None:
    """T5's own order would always put it at the end. Chi-square at 0.1 % with one bin per start."""
    noise = DENOISERS["X1"].lengths(length).noise_tokens
    starts = length - noise + 1
    counts = np.zeros(starts)
    draws = 400 * starts
    rng = np.random.default_rng(length)
    for _ in range(draws):
        encoder_ids, _ = denoise(text(length), "X1", PLAIN, rng, document_ends=False)
        counts[int(np.flatnonzero(encoder_ids == PLAIN.sentinel_ids[0])[0])] += 1
    degrees = max(1, starts - 1)
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < degrees + 4.5 * np.sqrt(2 * degrees) + 10


@pytest.mark.parametrize(
    ("length", "denoiser", "low", "high"),
    [(40, "R1", 0.12, 0.19), (500, "X2", 0.45, 0.55)],
)
def test_positions_are_corrupted_evenly(length: int, denoiser: str, low: float, high: float) -> None:
    """Mean corruption in each tenth of the text; sigma is below 0.01. Without the mixture of both ways, R1 has 0.11 to
    0.20 on 40 tokens and X2 0.38 to 0.54 on 500."""
    draws = 1500
    rng = np.random.default_rng(0)
    lost = np.zeros(length)
    tokens = np.arange(length, dtype=np.int32)
    many = Vocabulary(tuple(range(5000, 5100)), eos_id=4998, pad_id=4999, mode_token_ids=(), vocab_size=5100)
    for _ in range(draws):
        _, decoder_ids = denoise(tokens, denoiser, many, rng, document_ends=False)
        lost[decoder_ids[decoder_ids < length]] += 1
    tenths = [part.mean() / draws for part in np.array_split(lost, 10)]
    assert low < min(tenths) <= max(tenths) < high


# Bounded by sentinels, by either side, by the raw text.
BOUNDS = [
    LengthBounds(8192, 4096, 2048, 100),
    LengthBounds(512, 256, 256, 32),
    LengthBounds(8192, 64, 512, 4),
    LengthBounds(60, 512, 512, 100),
]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("denoiser", DENOISERS)
def test_the_longest_raw_text_fits_and_one_more_token_does_not(denoiser: str, bounds: LengthBounds) -> None:
    """Against really denoised arrays."""
    longest = max_raw_length(denoiser, bounds)
    rng = np.random.default_rng(0)
    lengths = (
        range(2, longest + 2) if longest < 700 else [*range(2, longest + 2, 97), longest - 1, longest, longest + 1]
    )
    for length in lengths:
        encoder_ids, decoder_ids = denoise(text(length), denoiser, PLAIN, rng, document_ends=True)
        fits = (
            length <= bounds.max_raw_tokens
            and len(encoder_ids) <= bounds.max_encoder_tokens
            and len(decoder_ids) <= bounds.max_decoder_tokens
            and (decoder_ids >= 1000).sum() <= bounds.num_sentinels
        )
        assert fits == (length <= longest)


def test_bounds_that_hold_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"denoiser S cannot work on 2 tokens.*max_decoder_length"):
        max_raw_length("S", LengthBounds(100, 50, 1, 10))
