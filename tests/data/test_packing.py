"""Packing: full on both sides, nobody waits too long, and the pool is the whole state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_encdec.config.schema import DataConfig
from ds_encdec.data.budgets import Budgets, token_budgets
from ds_encdec.data.examples.chunks import Chunker, documents_ratio
from ds_encdec.data.packing import Packer, Waiting
from ds_encdec.tokenizer.sentinels import Vocabulary

VOCABULARY = Vocabulary(tuple(range(1000, 1100)), eos_id=998, pad_id=999, mode_token_ids=(), vocab_size=1100)


def web_like_lengths(count: int, seed: int) -> list[int]:
    """Document lengths in tokens: log-normal, median 620, sigma 1."""
    return np.maximum(2, 620 * np.exp(np.random.default_rng(seed).normal(size=count))).astype(int).tolist()


def sizes(chunker: Chunker, lengths: list[int]) -> Iterator[Waiting[tuple[int, int]]]:
    """The tokens that every chunk needs on either side."""
    for number, length in enumerate(lengths):
        for chunk in chunker.chunks(length, f"document {number}", epoch=0):
            ends = chunk.start + chunk.length == length
            pair = chunker.example_lengths(chunk.length, chunk.denoiser, document_ends=ends)
            yield Waiting(pair, *pair)


SHORT = {"max_seq_length": 512, "max_encoder_length": 256, "max_decoder_length": 256}


@pytest.mark.parametrize(("fields", "micro_batch_size"), [({}, 4), (SHORT, 8)])
def test_both_budgets_are_filled_to_95_percent(fields: dict[str, int], micro_batch_size: int) -> None:
    """Budgets from one sample of documents, fill on others, over 150 micro-batches."""
    data = DataConfig(**fields)
    chunker = Chunker.from_config(data, seed=1, vocabulary=VOCABULARY)
    budgets = token_budgets(data, micro_batch_size, documents_ratio(web_like_lengths(256, seed=1), chunker))
    packer: Packer[tuple[int, int]] = Packer(
        budgets, pool_examples=data.packing_pool_examples, max_wait_batches=data.packing_max_wait_batches
    )
    arrivals = sizes(chunker, web_like_lengths(20_000, seed=2))
    filled = np.array([np.sum(packer.pack(arrivals), axis=0) for _ in range(150)])
    capacity = (budgets.encoder_tokens, budgets.decoder_tokens)
    assert (filled <= capacity).all()
    assert (filled.mean(axis=0) / capacity >= 0.95).all()


def test_budgets_follow_the_ratio_and_hold_the_longest_example() -> None:
    data = DataConfig()
    assert token_budgets(data, 4, 0.87) == Budgets(round(4 * 6144 * 0.87 / 1.87), 24576 - 11434, 512)
    assert token_budgets(data, 1, 0.87) == Budgets(4096, 2048, 512)
    assert token_budgets(data, 4, 100.0) == Budgets(24576 - 2048, 2048, 512)


@settings(max_examples=150)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 60)), min_size=1, max_size=250),
    budgets=st.builds(Budgets, st.integers(100, 300), st.integers(60, 300), st.integers(1, 12)),
    pool=st.integers(1, 40),
    max_wait=st.integers(2, 6),
)
def test_nobody_waits_too_long_and_nothing_is_lost(
    pairs: list[tuple[int, int]], budgets: Budgets, pool: int, max_wait: int
) -> None:
    packer: Packer[int] = Packer(budgets, pool_examples=pool, max_wait_batches=max_wait)
    arrivals = (Waiting(number, *pair) for number, pair in enumerate(pairs))
    seen: list[int] = []
    while batch := packer.pack(arrivals):
        assert all(entry.waited_batches <= max_wait for entry in packer.waiting)
        assert len(packer.waiting) <= pool
        assert len(batch) <= budgets.max_examples
        encoder_tokens, decoder_tokens = np.sum([pairs[number] for number in batch], axis=0)
        assert encoder_tokens <= budgets.encoder_tokens
        assert decoder_tokens <= budgets.decoder_tokens
        seen += batch
    assert sorted(seen) == list(range(len(pairs)))


def test_denoisers_are_drawn_by_weight_whatever_fits() -> None:
    """Counts of 20,000 chunks within four standard deviations."""
    chunker = Chunker.from_config(DataConfig(), seed=5, vocabulary=VOCABULARY)
    chunks = islice((chunk for n in range(20_000) for chunk in chunker.chunks(700, f"document {n}", epoch=0)), 20_000)
    counts = Counter(chunk.denoiser for chunk in chunks)
    for name, share in {"R1": 1 / 8, "R2": 1 / 8, "X1": 1 / 8, "X2": 1 / 8, "S": 1 / 2}.items():
        assert counts[name] == pytest.approx(20_000 * share, abs=4 * np.sqrt(20_000 * share * (1 - share)))


@settings(max_examples=200)
@given(length=st.integers(0, 30_000), epoch=st.integers(0, 3))
def test_chunks_cover_a_document_without_stubs(length: int, epoch: int) -> None:
    chunker = Chunker.from_config(DataConfig(), seed=5, vocabulary=VOCABULARY)
    chunks = list(chunker.chunks(length, "document", epoch))
    assert sum(chunk.length for chunk in chunks) == (length if length >= 2 else 0)
    assert [chunk.start for chunk in chunks] == np.cumsum([0, *(chunk.length for chunk in chunks)])[:-1].tolist()
    assert all(chunk.length >= min(16, length) for chunk in chunks)
