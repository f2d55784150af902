"""HostCollectives for one process (the 2-rank cases are in tests/distributed)."""

from __future__ import annotations

import resource

import pytest

from ds_encdec.launch.host_collectives import ENOUGH_OPEN_FILES, HostCollectives, allow_connections
from ds_encdec.launch.world import World
from ds_encdec.types import DataError, DsEncDecError


def test_one_process_needs_no_group() -> None:
    collectives = HostCollectives()
    assert collectives.sum(1, True) == [1, 1]
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


def test_the_limit_of_open_files_is_raised_for_the_ranks_and_what_is_missing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        allow_connections(World(world_size=8))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(before[1], ENOUGH_OPEN_FILES), before[1])
        assert not caplog.text
        allow_connections(World(world_size=10**6, local_world_size=8))
        assert "1000000 ranks need about 3000512 open files each" in caplog.text
        caplog.clear()
        allow_connections(World(world_size=10**6, rank=1, local_rank=1, local_world_size=8))  # said once on a machine
        assert not caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
