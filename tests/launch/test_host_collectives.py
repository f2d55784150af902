"""HostCollectives for one process (the 2-rank cases are in tests/distributed)."""

from __future__ import annotations

import pytest

from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.types import DataError, DsEncDecError


def test_one_process_needs_no_group() -> None:
    collectives = HostCollectives()
    assert collectives.all_gather_ints([1, True]) == [[1, 1]]
    assert collectives.gather({"a": 1}) == [{"a": 1}]
    assert collectives.on_rank_zero(lambda: 3) == 3
    assert collectives.on_every_rank(lambda: 4) == 4


def test_errors_keep_their_class_and_foreign_ones_are_named() -> None:
    def fail_data() -> None:
        raise DataError("no such column")

    def fail_os() -> None:
        raise OSError("disk on fire")

    collectives = HostCollectives()
    with pytest.raises(DataError, match="no such column"):
        collectives.on_every_rank(fail_data)
    with pytest.raises(DsEncDecError, match="OSError: disk on fire"):
        collectives.on_rank_zero(fail_os)
