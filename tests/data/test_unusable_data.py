"""Data that cannot be trained on is refused with the reason and the way out."""

from __future__ import annotations

import pytest
from data_parts import byte_tokenizer

from ds_encdec.config.schema import DataConfig
from ds_encdec.data.budgets import Budgets
from ds_encdec.data.chunks import Chunker, documents_ratio
from ds_encdec.data.inspect import SampleStatistics, require_one_step
from ds_encdec.types import DataError

BUDGETS = Budgets(encoder_tokens=400, decoder_tokens=600, max_examples=8)


def test_fewer_documents_than_lanes_names_the_lanes() -> None:
    with pytest.raises(DataError, match=r"^1 document to train on: too few for 4 lanes.*data\.num_lanes=1, give"):
        require_one_step(SampleStatistics(ratio=1.0, documents=1, tokens=21_270), 4, BUDGETS)


def test_too_few_tokens_names_both_numbers() -> None:
    with pytest.raises(DataError, match=r"3,999 tokens in 9 documents.*needs 4,000 tokens"):
        require_one_step(SampleStatistics(ratio=1.0, documents=9, tokens=3_999), 4, BUDGETS)
    require_one_step(SampleStatistics(ratio=1.0, documents=4, tokens=4_000), 4, BUDGETS)


def test_the_look_at_a_huge_document_is_short() -> None:
    """A line of 10 MB has millions of tokens: what is cut up for the ratio is bounded."""
    _, vocabulary = byte_tokenizer()
    drawn = 0

    class Counting(Chunker):
        def draw_chunk(self, remaining: int, draw: float) -> tuple[str, int]:
            nonlocal drawn
            drawn += 1
            return super().draw_chunk(remaining, draw)

    chunker = Counting.from_config(DataConfig(), 0, vocabulary)
    ratio = documents_ratio([6_000_000], chunker)
    assert drawn < 40_000  # 2 times 6,000,000 tokens, not 32 times
    assert ratio == pytest.approx(documents_ratio([500_000], chunker), rel=0.03)
