"""HostCollectives for one process (the 2-rank cases are in tests/distributed)."""

from __future__ import annotations

from typing import Any

import pytest

from ds_encdec.base.types import DataError, DsEncDecError
from ds_encdec.launch.host_collectives import HostCollectives


def test_one_process_needs_no_group() -> None:
    collectives = HostCollectives()
    assert collectives.sum(1, True) == [1, 1]
    assert collectives.gather({"a": 1}) == [{"a": 1}]
    assert collectives.on_rank_zero(lambda: 3) == 3
    assert collectives.on_every_rank(lambda: 4) == 4


def test_errors_keep_their_class_and_foreign_ones_are_named() -> None:
    def fail(error: Exception) -> None:
        raise error

    collectives = HostCollectives()
    with pytest.raises(DataError, match="no such column"):
        collectives.on_every_rank(lambda: fail(DataError("no such column")))
    with pytest.raises(DsEncDecError, match="OSError: disk on fire"):
        collectives.on_rank_zero(lambda: fail(OSError("disk on fire")))


class Second(HostCollectives):
    """Rank 1 of two, where `lowest_rank` is the first that has an error: its own, or rank 0's, which has the same."""

    def __init__(self, lowest_rank: int) -> None:
        super().__init__()
        self.rank, self.world_size, self.lowest_rank = 1, 2, lowest_rank

    def lowest(self, *values: int) -> list[int]:
        return [self.lowest_rank]

    def broadcast(self, record: Any, source: int = 0) -> Any:
        return record


def test_an_error_that_rank_zero_does_not_have_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node1")
    for lowest_rank, told in ((1, "rank 1 (node1): too few files"), (0, "too few files")):
        with pytest.raises(DataError) as caught:
            Second(lowest_rank).raise_first(DataError("too few files"))
        assert str(caught.value) == told
