"""Staging: what is copied, what is shared, and what the next save uses again."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
from torch import Tensor, nn

from ds_encdec.engine.sharded_engine import StagingArea


def tied_state() -> tuple[dict[str, Any], Tensor]:
    """A tensor, a view of it and its transpose, beside one of its own; and the first."""
    flat = torch.arange(12.0)
    parameter = nn.Parameter(flat.view(3, 4))
    state = OrderedDict(flat=flat, part=[flat[4:8]], matrix=(parameter.t(), torch.Size([3])), own=torch.ones(5), step=3)
    return state, flat


@pytest.mark.parametrize("copied", [True, False])
def test_shared_storage_stays_shared_and_counts_once(copied: bool) -> None:
    state, flat = tied_state()
    num_bytes, taken = StagingArea(pin_memory=False).take_all(state, copy=copied)
    assert isinstance(taken, OrderedDict)
    assert taken["matrix"][1:] == (torch.Size([3]),)
    assert taken["step"] == 3
    assert num_bytes == (12 + 5) * 4
    for found, given in ((taken["part"][0], flat[4:8]), (taken["matrix"][0], flat.view(3, 4).t())):
        assert torch.equal(found, given)
        assert found.untyped_storage().data_ptr() == taken["flat"].untyped_storage().data_ptr()
        assert not found.requires_grad
    flat.zero_()
    assert bool(taken["part"][0].any()) is copied


def test_the_next_save_uses_the_same_memory() -> None:
    area = StagingArea(pin_memory=False)
    _, first = area.take_all(tied_state()[0], copy=True)
    _, second = area.take_all({"a": torch.full((12,), 7.0), "b": torch.zeros(9)}, copy=True)
    assert second["a"].data_ptr() == first["flat"].data_ptr()
    assert first["flat"].tolist() == [7.0] * 12
    assert second["b"].tolist() == [0.0] * 9  # another size: new memory
    assert first["own"].tolist() == [1.0] * 5


def test_a_save_at_once_goes_through_the_memory_of_those_before() -> None:
    """Beside it, it would need its own host memory."""
    area = StagingArea(pin_memory=False)
    state, flat = tied_state()
    _, referred = area.take_all(state, copy=False)
    assert referred["flat"].data_ptr() == flat.data_ptr()
    _, copied = area.take_all(state, copy=True)
    _, at_once = area.take_all(state, copy=False)
    assert at_once["flat"].data_ptr() == copied["flat"].data_ptr() != flat.data_ptr()


def test_copies_go_on_in_pageable_memory_where_none_can_be_locked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver's refusal is a stand-in. It is asked once."""
    empty = torch.empty

    def refuse(*sizes: int, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    _, taken = StagingArea(pin_memory=True).take_all(tied_state()[0], copy=True)
    assert taken["flat"].tolist() == list(range(12))
    (warning,) = caplog.messages
    assert "pageable memory" in warning
    assert "CUDA error: out of memory" in warning
