"""Collating: the layout that `Batch` documents, checked field by field."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_encdec.base.types import Example
from ds_encdec.data.budgets import Budgets
from ds_encdec.data.loader import collate
from ds_encdec.registry.denoisers import DENOISERS

BUDGETS = Budgets(encoder_tokens=8, decoder_tokens=9, max_examples=4)
PAD = 90


def example(encoder: list[int], decoder: list[int], denoiser: str) -> Example:
    return Example(np.array(encoder, np.int32), np.array(decoder, np.int32), denoiser, f"{denoiser} document")


def test_two_examples() -> None:
    batch = collate(
        [example([1, 2, 3], [4, 90], "R2"), example([5, 6], [7, 8, 9], "S")],
        BUDGETS,
        PAD,
    )
    assert batch.encoder_ids.tolist() == [1, 2, 3, 5, 6, 90, 90, 90]
    assert batch.decoder_input_ids.tolist() == [90, 4, 90, 7, 8, 90, 90, 90, 90]
    assert batch.labels.tolist() == [4, 90, 7, 8, 9, -100, -100, -100, -100]  # EOS = pad is a label all the same
    assert batch.encoder_positions.tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert batch.decoder_positions.tolist() == [0, 1, 0, 1, 2, 0, 0, 0, 0]
    assert batch.encoder_cu_seqlens.tolist() == [0, 3, 5, 5, 5]
    assert batch.decoder_cu_seqlens.tolist() == [0, 2, 5, 5, 5]
    r2, s = (list(DENOISERS).index(name) for name in ("R2", "S"))
    assert batch.denoiser_ids.tolist() == [r2, r2, s, s, s, 0, 0, 0, 0]
    assert (batch.encoder_lengths, batch.decoder_lengths) == ((3, 2), (2, 3))
    assert batch.documents == ("R2 document", "S document")
    assert (batch.encoder_tokens, batch.target_tokens) == (5, 5)
    assert {batch.encoder_ids.dtype, batch.labels.dtype, batch.denoiser_ids.dtype} == {torch.int64}
    assert {batch.encoder_cu_seqlens.dtype, batch.decoder_cu_seqlens.dtype} == {torch.int32}


def test_an_empty_batch_has_the_same_shapes_and_no_weight() -> None:
    batch = collate([], BUDGETS, PAD)
    assert batch.target_tokens == batch.encoder_tokens == 0
    assert (batch.labels == -100).all()
    assert batch.encoder_cu_seqlens.tolist() == [0] * 5
    assert (batch.encoder_ids.shape, batch.labels.shape) == ((8,), (9,))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="10 tokens in a buffer of 9"):
        collate([example([1], list(range(10)), "R1")], BUDGETS, PAD)
    with pytest.raises(ValueError, match="5 examples in a micro-batch of at most 4"):
        collate([example([1], [2], "R1")] * 5, BUDGETS, PAD)
