"""Micro-batches: the layout that `Batch` documents, and their copies ahead of the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_encdec.base.types import Batch, Example
from ds_encdec.data import loader
from ds_encdec.data.budgets import Budgets
from ds_encdec.data.loader import collate, copied_ahead
from ds_encdec.registry.denoisers import DENOISERS

BUDGETS = Budgets(encoder_tokens=8, decoder_tokens=9, max_examples=4)
PAD = 90
GPU = torch.device("cuda", 0)


def example(encoder: list[int], decoder: list[int], denoiser: str) -> Example:
    return Example(np.array(encoder, np.int32), np.array(decoder, np.int32), denoiser, f"{denoiser} document")


def test_two_examples() -> None:
    batch = collate([example([1, 2, 3], [4, 90], "R2"), example([5, 6], [7, 8, 9], "S")], BUDGETS, PAD)
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


def batch(number: int) -> Batch:
    tensors = {
        field.name: torch.zeros(2, dtype=torch.int64) for field in dataclasses.fields(Batch) if field.type == "Tensor"
    }
    assert len(tensors) == 8
    return Batch(**tensors, encoder_lengths=(2,), decoder_lengths=(2,), number=number)  # type: ignore[arg-type]


class Streams:
    """What a GPU's streams are asked for, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current = ["work"]
        patch.setattr(loader, "_side_stream", lambda device: self)
        patch.setattr(torch.cuda, "stream", self._inside)
        patch.setattr(torch.cuda, "current_stream", lambda device: self)
        patch.setattr(Batch, "to", lambda given, device: self._copy(given, device))
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: self.log.append("keep"))

    @contextmanager
    def _inside(self, stream: Streams) -> Iterator[None]:
        self.current.append("side")
        yield
        self.current.pop()

    def _copy(self, given: Batch, device: torch.device) -> Batch:
        assert device == GPU
        self.log.append(f"copy {given.number} on {self.current[-1]}")
        return given

    def record_event(self) -> str:
        assert self.current[-1] == "side"
        return self.log[-1]

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.current[-1]} waits for {event}")


def test_each_batch_is_copied_while_the_one_before_is_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    for copied in copied_ahead(iter([batch(0), batch(1), batch(2)]), GPU):
        streams.log.append(f"use {copied.number}")
    assert [line for line in streams.log if line != "keep"] == [
        "copy 0 on side",
        "copy 1 on side",
        "work waits for copy 0 on side",
        "use 0",
        "copy 2 on side",
        "work waits for copy 1 on side",
        "use 1",
        "work waits for copy 2 on side",
        "use 2",
    ]
    assert streams.log.count("keep") == 3 * 8


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_batches_are_handed_on(monkeypatch: pytest.MonkeyPatch, count: int, device: torch.device) -> None:
    Streams(monkeypatch)  # which refuses to copy to a CPU
    given = [batch(number) for number in range(count)]
    assert [id(one) for one in copied_ahead(given, device)] == [id(one) for one in given]
