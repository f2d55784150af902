"""Copies ahead of the device: their order on stand-ins of its streams, and nothing at all without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from ds_encdec.base.types import Batch
from ds_encdec.data import loader
from ds_encdec.data.loader import copied_ahead

GPU = torch.device("cuda", 0)


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
